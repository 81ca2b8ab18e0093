"""Triton kernels for the ops of rorqual.ops.interface; each module is one op, its entry function
first among equals."""
