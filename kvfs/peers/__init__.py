"""How nodes talk to each other: a channel of small messages, and streams of bytes beside it."""
