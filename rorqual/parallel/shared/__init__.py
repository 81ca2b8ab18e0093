"""What GPUs of one host share: memory by file descriptors, and an imitated slow link."""
