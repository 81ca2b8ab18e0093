"""GPU memory that processes of one host share by file descriptors."""
