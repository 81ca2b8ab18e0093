"""Batch sizes that decode steps are recorded for. No torch."""

from __future__ import annotations


def bucket_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 64, every 16 up to 256, every 64 beyond."""
    sizes = {1, 2, 4, most, *range(8, 65, 8), *range(64, 257, 16), *range(256, most + 1, 64)}
    return sorted(size for size in sizes if size <= most)


def bucket_of(size: int) -> int:
    """Rows that a step of `size` requests computes, where max_num_seqs is not in between."""
    if size <= 8:
        return 1 << max(0, size - 1).bit_length()
    step = 8 if size <= 64 else 16 if size <= 256 else 64
    return -(-size // step) * step
