"""Random numbers from counters: the same bits on every device, in every batch and in every layout."""

from __future__ import annotations

from torch import Tensor


def hash_bits(counter: Tensor, key: int) -> Tensor:
    """splitmix64 (Steele, Lea, Flood 2014) of counter + key in wrapping int64 arithmetic: 64 well-mixed bits an element."""
    z = counter * -7046029254386353131 + key
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def uniform(seed: Tensor, position: Tensor, stream: int = 0) -> Tensor:
    """One number in [0, 1) for each (seed, position), fp64. Streams are independent of one another."""
    bits = hash_bits(hash_bits(seed, 0x5EED) + position, 0x70C5 + stream * 0x9E3779B9)
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
