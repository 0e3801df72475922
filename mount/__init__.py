"""The FUSE mount: kernel requests in, calls of the node out. The only package that uses pyfuse3."""
