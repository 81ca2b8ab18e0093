"""Counter-based random numbers: the same bits on every device, in every batch and layout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FIELDS_DEVIATION = math.sqrt(4 * (2**32 - 1) / 12)  # std of a sum of four uniforms below 2^16


def hash_bits(counter: Tensor, key: int) -> Tensor:
    """splitmix64 (Steele, Lea, Flood 2014) of counter + key in wrapping int64 arithmetic: 64
    well-mixed bits an element."""
    z = counter * -7046029254386353131 + key
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def uniform(seed: Tensor, position: Tensor, stream: int = 0, fp64: bool = True) -> Tensor:
    """One number in [0, 1) for each (seed, position), fp64. Streams are independent. Without fp64,
    for devices that lack it: the number's first 24 bits, fp32."""
    bits = hash_bits(hash_bits(seed, 0x5EED) + position, 0x70C5 + stream * 0x9E3779B9)
    if not fp64:
        return ((bits >> 40) & ((1 << 24) - 1)).float() * 2.0**-24
    return ((bits >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def draw_normal(
    view: Tensor, key: int, std: float, first: int, width: int, chunk: int | None = None
) -> None:
    """Fill view [rows, columns] with nearly normal numbers (the sum of four 16-bit fields of a
    hash, integer arithmetic only), rounded to its dtype; e4m3 is clipped to +-448. The element in
    row r and column c has counter first + r * width + c: the view is a window of a matrix with
    `width` columns. `chunk`: elements drawn at a time; the default fits a CPU's cache (17 times
    faster than 2^22) or fills a GPU."""
    chunk = chunk or (2**17 if view.device.type == "cpu" else 2**22)
    rows, columns = view.shape
    step = max(1, chunk // max(1, columns))
    for begin in range(0, rows, step):
        part = view[begin : begin + step]
        elements = _elements(first + begin * width, part.shape[0], columns, width, view.device)
        part.copy_(_normal(key, elements, std, view.dtype == torch.float8_e4m3fn).view(part.shape))


def _elements(first: int, rows: int, columns: int, width: int, device: torch.device) -> Tensor:
    """Counters of a window's elements, [rows * columns], in a matrix with `width` columns."""
    if columns == width or rows == 1:
        return torch.arange(first, first + rows * columns, dtype=torch.int64, device=device)
    starts = torch.arange(first, first + rows * width, width, dtype=torch.int64, device=device)
    return (starts[:, None] + torch.arange(columns, dtype=torch.int64, device=device)).flatten()


def _normal(key: int, elements: Tensor, std: float, clip: bool) -> Tensor:
    bits = hash_bits(elements, key)
    total = (
        (bits & 0xFFFF)
        + ((bits >> 16) & 0xFFFF)
        + ((bits >> 32) & 0xFFFF)
        + ((bits >> 48) & 0xFFFF)
    )
    values = (total - 2 * 0xFFFF).float() * (std / FIELDS_DEVIATION)
    return values.clamp_(-448, 448) if clip else values
