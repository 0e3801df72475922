"""Places that hold blobs, behind one contract."""
