"""Step: everything one forward pass needs to know, passed from hand to hand, never global."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.ops.interface import AttentionMetadata, TokenPlaces
from rorqual.parallel.layout import Layout
from rorqual.parallel.mesh import SINGLE_LAYOUT

Between = Callable[..., Tensor]  # (step, *inputs)


class PieceRecorder(Protocol):
    """Captures a forward pass in pieces, between which something is computed anew each time."""

    def between(self, work: Between, inputs: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        """Where the result of `work`, of this shape and the inputs' dtype, will be when the next
        piece runs. Inputs and result begin with the step's tokens."""


@dataclass
class ForwardBatch:
    """Packed tokens of several requests, decoding requests first, then those with a chunk of
    prompt.

    token_ids, positions [T] int64; `places`: how attention rotates the tokens and where it writes
    them. `logit_rows` [N] int64 picks the tokens whose next token is wanted. Segments are None
    where a kind is absent; both, on a rank that has no token. `layout` says where tokens are on
    several ranks: Transformer.layout makes it. `recorder`: the pass is captured for any step of so
    many tokens, whose segments are not known yet. `parts`: the step is computed as these, side by
    side in the packed tokens. `layer_written`: called once a layer has launched what it writes to
    its pages.
    """

    token_ids: Tensor
    positions: Tensor
    places: TokenPlaces
    logit_rows: Tensor
    pool: KVPool
    decode: AttentionMetadata | None = None
    prefill: AttentionMetadata | None = None
    layout: Layout = SINGLE_LAYOUT
    recorder: PieceRecorder | None = None
    parts: Sequence[ForwardBatch] = ()
    layer_written: Callable[[], None] | None = None

    def part(self, tokens: slice, layout: Layout) -> ForwardBatch:
        """Some of the packed tokens, those of whole requests, as a step of their own. It has no
        logit rows."""
        split = self.decode_tokens
        places = self.places
        return ForwardBatch(
            self.token_ids[tokens],
            self.positions[tokens],
            TokenPlaces(places.cos[tokens], places.sin[tokens], places.slots[tokens]),
            self.logit_rows[:0],
            self.pool,
            _requests(self.decode, tokens.start, min(tokens.stop, split)),
            _requests(self.prefill, max(tokens.start - split, 0), tokens.stop - split),
            layout,
        )

    @property
    def idle(self) -> bool:
        """No token is on this rank."""
        return not self.segments and self.recorder is None

    def between(self, work: Between, inputs: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        """`work(step, *inputs)`, which depends on what segments are in the step: now, or each time
        a captured pass is replayed."""
        if self.recorder is None:
            return work(self, *inputs)
        return self.recorder.between(work, inputs, shape)

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def decode_tokens(self) -> int:
        return self.decode.tokens if self.decode else 0

    @cached_property
    def segments(self) -> list[tuple[AttentionMetadata, slice]]:
        """Each segment with the slice of the packed tokens it owns."""
        split = self.decode_tokens
        found = []
        if self.decode:
            found.append((self.decode, slice(0, split)))
        if self.prefill:
            found.append((self.prefill, slice(split, self.num_tokens)))
        return found


def _requests(segment: AttentionMetadata | None, start: int, stop: int) -> AttentionMetadata | None:
    """Those whose tokens are `start` to `stop` of the segment."""
    if segment is None or start >= stop:
        return None
    starts = list(accumulate(segment.query_lens, initial=0))
    first = starts.index(start)
    last = starts.index(stop)
    return segment.part(slice(first, last))
