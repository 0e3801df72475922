"""kvfs: the file system for KV caches. Here is the store: no FUSE, torch or vLLM in it."""

__version__ = "0.1.0"
