"""Sizes that steps are captured for: batch sizes of decode steps, tokens of steps with prompts. No
torch."""

from __future__ import annotations

PIECEWISE_TOKENS = 4096  # above this, computing takes longer than launching
# Weights of a layer. With more to read, a GPU's step always takes longer than its launches, and
# piecewise capture would only add rows of padding.
PIECEWISE_BYTES = 4 * 2**30


def bucket_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 64, every 16 up to 256, every 64 beyond."""
    sizes = {1, 2, 4, most, *range(8, 65, 8), *range(64, 257, 16), *range(256, most + 1, 64)}
    return sorted(size for size in sizes if size <= most)


def bucket_of(size: int) -> int:
    """Rows that a step of `size` requests computes, unless max_num_seqs lies in between."""
    if size <= 8:
        return 1 << max(0, size - 1).bit_length()
    step = 8 if size <= 64 else 16 if size <= 256 else 64
    return -(-size // step) * step


def piecewise_tokens(layer_bytes: float) -> int:
    """Tokens up to which one GPU captures steps with prompts by default; 0 for none. layer_bytes:
    mean weights of a layer."""
    return PIECEWISE_TOKENS if layer_bytes <= PIECEWISE_BYTES else 0


def token_buckets(most: int) -> list[int]:
    """Every 64 up to 512, 128 up to 1,024, 256 up to 2,048, 512 beyond, and `most` (at least 1): of
    more than 512 tokens that are computed at most a fifth are padding."""
    sizes = (*range(64, 512, 64), *range(512, 1024, 128), *range(1024, 2048, 256))
    found = [size for size in (*sizes, *range(2048, most + 1, 512)) if size <= most]
    return found if found and found[-1] == most else [*found, most]


def part_buckets(most: int) -> list[int]:
    """Tokens of each of two micro-batches: every 64 up to 512; beyond, quarters of a power of two,
    from 1,024 on eighths, and a little more, as the larger part of a full step has a little more
    than half of its tokens; and `most`."""
    found = list(range(64, min(512, most) + 1, 64))
    power = 512
    while power < most:
        step = power // (4 if power < 1024 else 8)
        more = min(64, power // 32)
        sizes = range(power + step + more, 2 * power + more + 1, step)
        found += [size for size in sizes if size <= most]
        power *= 2
    return found if found and found[-1] == most else [*found, most]
