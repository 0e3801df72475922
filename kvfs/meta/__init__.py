"""The namespace: inodes, names, digests and what they weigh. One contract, several engines."""
