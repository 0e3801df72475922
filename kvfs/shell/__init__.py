"""What the `kvfs` command is made of: words, places, look-ups and how they are shown."""
