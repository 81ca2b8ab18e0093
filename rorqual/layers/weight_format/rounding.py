"""Quantize floating-point matrices to eight or four bits: round to nearest, with a search for the
scales of least error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rorqual.config.quant import WeightScheme
from rorqual.ops.reference import Weight
from rorqual.ops.rounding import FP8, FP8_MAX, pack_int4

# Clipping ratios to try: scales for these fractions of a block's maximum; 1 is plain rounding.
PLAIN = (1.0,)
SHARES = (1.0, *(round(1.0 - 0.025 * step, 3) for step in range(1, 21)))
# Half the range of symmetric numbers; int4 has one more number below zero than above.
HALF = {"fp8": FP8_MAX, "int8": 127.0, "int4": 7.5}
TINY = {torch.float16: 2.0**-24}  # smallest scale above zero, by dtype
LEAST = 1e-12


@dataclass
class RoundedBlocks:
    """Numbers [row blocks, rows, column blocks, columns]; scale, zero point and weighted squared
    error of each block, [row blocks, column blocks]."""

    numbers: Tensor
    scale: Tensor
    zero: Tensor | None
    loss: Tensor


def round_matrix(
    data: Tensor,
    scheme: WeightScheme,
    dtype: torch.dtype,
    shares: Sequence[float] = PLAIN,
    importance: Tensor | None = None,
) -> tuple[Weight, float]:
    """Quantize data [rows, columns] to `scheme`, with int4 scales in `dtype`. Each block uses the
    clipping ratio of `shares` with the least error. Returns the weight and the sum of squared
    errors, each times the `importance` [columns] of its column."""
    rows, columns = data.shape
    share, group = scheme.block[0], scheme.block[1] or columns
    blocks = _blocks(data.float(), share, group)
    weights = torch.ones(columns) if importance is None else importance.float()
    by_column = F.pad(weights.to(data.device), (0, -columns % group)).view(-1, group)
    kept = dtype if scheme.kind == "int4" else torch.float32
    best: RoundedBlocks | None = None
    for part in shares:
        for scale, zero in _grids(blocks, scheme, part, kept, len(shares) > 1):
            found = _round(blocks, scheme, scale, zero, by_column)
            best = found if best is None else _better(best, found)
    assert best is not None
    numbers = best.numbers.flatten(2).flatten(0, 1)[:rows, :columns]
    scale = best.scale.to(kept)
    if scheme.kind == "int4":
        zero = best.zero
        packed = pack_int4((numbers + (8 if zero is None else 0)).to(torch.uint8))
        held = None if zero is None else zero.to(torch.uint8)
        weight = Weight(packed, scale, (share, group), held, scheme.activation)
    else:
        kind = FP8 if scheme.kind == "fp8" else torch.int8
        weight = Weight(numbers.to(kind), scale, (share, group), activation=scheme.activation)
    return weight, float(best.loss.sum())


def _blocks(data: Tensor, share: int, group: int) -> Tensor:
    rows, columns = data.shape
    padded = F.pad(data, (0, -columns % group, 0, -rows % share))
    return padded.view(padded.shape[0] // share, share, -1, group)


def _grids(
    blocks: Tensor, scheme: WeightScheme, part: float, dtype: torch.dtype, search: bool
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """(scales, zero points) to try for the clipping ratio `part`. int4 has one more number below
    zero than above: a search also tries the scale, possibly negative, that gives it to the side of
    the block's largest value."""
    least = TINY.get(dtype, LEAST)
    if scheme.symmetric:
        most = blocks.abs().amax((1, 3)) * part
        yield (most / HALF[scheme.kind]).clamp(least).to(dtype).float(), None
        if search and scheme.kind == "int4":
            high = blocks.amax((1, 3)) * part
            toward = torch.where(high < most, 1.0, -1.0)
            yield ((most / 8).clamp(least) * toward).to(dtype).float(), None
        return
    low = (blocks.amin((1, 3)) * part).clamp(max=0)
    high = (blocks.amax((1, 3)) * part).clamp(min=0)
    scale = ((high - low) / 15).clamp(least).to(dtype).float()
    yield scale, (-low / scale).round().clamp(0, 15)


def _round(
    blocks: Tensor, scheme: WeightScheme, scale: Tensor, zero: Tensor | None, weights: Tensor
) -> RoundedBlocks:
    if zero is None:
        numbers = _nearest(blocks / _spread(scale), scheme.kind)
        exact = numbers
    else:
        numbers = (blocks / _spread(scale) + _spread(zero)).round().clamp(0, 15)
        exact = numbers - _spread(zero)
    lost = (exact * _spread(scale) - blocks).square() * weights
    return RoundedBlocks(numbers, scale, zero, lost.sum((1, 3)))


def _nearest(steps: Tensor, kind: str) -> Tensor:
    if kind == "fp8":
        return steps.clamp(-FP8_MAX, FP8_MAX).to(FP8).float()
    return steps.round().clamp(-8, 7) if kind == "int4" else steps.round().clamp(-127, 127)


def _spread(numbers: Tensor) -> Tensor:
    """Repeat a value of each block for all its elements."""
    return numbers[:, None, :, None]


def _better(first: RoundedBlocks, second: RoundedBlocks) -> RoundedBlocks:
    """For each block the one with the smaller loss."""
    wins = second.loss < first.loss
    zero = None
    if first.zero is not None and second.zero is not None:
        zero = torch.where(wins, second.zero, first.zero)
    return RoundedBlocks(
        torch.where(_spread(wins), second.numbers, first.numbers),
        torch.where(wins, second.scale, first.scale),
        zero,
        torch.where(wins, second.loss, first.loss),
    )
