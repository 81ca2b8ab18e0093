"""What a call over a process group carries: one buffer of bytes for the call and one for its reply,
whose sizes follow from the number of rows.

| call    | bytes                        | reply | bytes                 |
| ------- | ---------------------------- | ----- | --------------------- |
| head    | 32                           | head  | 32                    |
| rows    | rows * columns * item        | sums  | rows * columns * item |
| scales  | 4 * rows * columns/128 (fp8) |       |                       |
| ids     | 4 * rows * top_k             |       |                       |
| weights | 4 * rows * top_k             |       |                       |

All rows go to all servers, in one message for all: a graph's messages have fixed sizes, and which
server holds what is known to the device alone. An id has the number of the server that is to
compute it above its lowest 20 bits.

The head of a call is its number on the lane, from 1, its layer and its rows; of a reply the number
and whether something was wrong. Either side counts by itself, on the device, so a message that is
lost or comes twice is detected, and no call takes the sums of another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rorqual.ops.reference import ACTIVATION_BLOCK, FP8, quantize_activation

ALIGNED = 16
HEAD = 4  # int64
NUMBER_SHIFT = 20
EXPERT_MASK = 2**NUMBER_SHIFT - 1
MISSED = 1  # in a reply, and added to a report: an expert is not where it was looked for
OUT_OF_STEP = 2**16  # another call came than was to


@dataclass(frozen=True)
class CallParts:
    """Views of a call's buffer: head [4] int64, rows (hidden states [T, columns],) or (e4m3, scales
    fp32), ids and weights [T, K] int32 and fp32."""

    head: Tensor
    rows: tuple[Tensor, ...]
    ids: Tensor
    weights: Tensor


@dataclass(frozen=True)
class ReplyParts:
    """head [4] int64, sums [T, columns]."""

    head: Tensor
    sums: Tensor


@dataclass(frozen=True)
class GroupRows:
    """The layout of calls. columns, dtype: of hidden states; fp8: they are sent in that, with ue8m0
    by scales that are powers of two."""

    columns: int
    top_k: int
    dtype: torch.dtype
    fp8: bool
    ue8m0: bool = False

    @property
    def _call(self) -> tuple[tuple[int, torch.dtype], ...]:
        """Of a row: elements of each part."""
        rows: tuple[tuple[int, torch.dtype], ...] = ((self.columns, self.dtype),)
        if self.fp8:
            rows = ((self.columns, FP8), (-(-self.columns // ACTIVATION_BLOCK), torch.float32))
        return (*rows, (self.top_k, torch.int32), (self.top_k, torch.float32))

    def call_size(self, rows: int) -> int:
        return _size(self._call, rows)

    def reply_size(self, rows: int) -> int:
        return _size(((self.columns, self.dtype),), rows)

    def call(self, buffer: Tensor, rows: int) -> CallParts:
        head, *parts = _views(buffer, self._call, rows)
        ids, weights = parts[-2:]
        return CallParts(head, tuple(parts[:-2]), ids, weights)

    def reply(self, buffer: Tensor, rows: int) -> ReplyParts:
        return ReplyParts(*_views(buffer, ((self.columns, self.dtype),), rows))

    def fill(self, rows: tuple[Tensor, ...], x: Tensor) -> None:
        """A call's rows from hidden states x [T, columns]."""
        found = quantize_activation(x, self.ue8m0) if self.fp8 else (x,)
        for part, new in zip(rows, found, strict=True):
            part.copy_(new)


def _lengths(parts: tuple[tuple[int, torch.dtype], ...], rows: int) -> list[int]:
    return [-(-rows * count * dtype.itemsize // ALIGNED) * ALIGNED for count, dtype in parts]


def _size(parts: tuple[tuple[int, torch.dtype], ...], rows: int) -> int:
    return 8 * HEAD + sum(_lengths(parts, rows))


def _views(
    buffer: Tensor, parts: tuple[tuple[int, torch.dtype], ...], rows: int
) -> Iterator[Tensor]:
    yield buffer[: 8 * HEAD].view(torch.int64)
    starts = accumulate(_lengths(parts, rows), initial=8 * HEAD)
    for (count, dtype), start in zip(parts, starts, strict=False):
        end = start + rows * count * dtype.itemsize
        yield buffer[start:end].view(dtype).view(rows, count)


def marked(ids: Tensor, count: Tensor, table: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """ids [T, K] with the number of the server that is to compute each, int32, -1 for none; and
    whether one has no holder, a scalar. count [E], table [E, servers]: the experts' holders. turn
    [T, 1]: the same for all of a row's experts, so a row goes to one of two servers that hold the
    same."""
    known = ids.clamp(0)
    held = count[known]
    number = table[known].gather(-1, (turn % held.clamp(1))[..., None])[..., 0]
    wanted = ids >= 0
    found = torch.where(wanted & (held > 0), number << NUMBER_SHIFT | known, -1)
    return found.to(torch.int32), (wanted & (held == 0)).any()


def slots_of(ids: Tensor, number: int, places: Tensor) -> tuple[Tensor, Tensor]:
    """What server `number` computes of marked ids: slots [T, K], -1 for the others'; and whether it
    lacks one of its own, a scalar. places [E + 1]: the slot of each expert, the last -1."""
    nowhere = places.shape[0] - 1
    mine = ids >> NUMBER_SHIFT == number
    experts = (ids & EXPERT_MASK).to(torch.int64)
    slots = places[torch.where(mine, experts, nowhere).clamp(max=nowhere)]
    return slots, (mine & (slots < 0)).any()
