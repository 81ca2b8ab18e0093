"""Triton kernels for the ops of rorqual.ops.table; each module is one op, its entry function first among equals."""
