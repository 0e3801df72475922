"""The room of what reads files from every place that has them, in the reader's own process."""
