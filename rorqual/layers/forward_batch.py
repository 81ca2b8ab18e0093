"""Everything one forward pass needs, passed as an argument and never global."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.ops.interface import AttentionMetadata, TokenPlaces
from rorqual.parallel.layout import Layout
from rorqual.parallel.mesh import SINGLE_LAYOUT

Between = Callable[..., Tensor]  # (step, *inputs)


class PieceRecorder(Protocol):
    """Captures a forward pass as piecewise graphs, with eager calls in between."""

    def between(self, work: Between, inputs: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        """Run `work` eagerly between two pieces. Returns the buffer of its result, of this shape
        and the inputs' dtype. The first dimension of inputs and result is the step's tokens."""


@dataclass(frozen=True)
class CapturablePrompts:
    """Of an attention layer whose attention to prompts can be captured for other prompts with as
    many tokens and keys at most. packed: keys that can be packed at once, None if they are read
    from their pages."""

    packed: int | None = None


@dataclass
class ForwardBatch:
    """Packed tokens of several requests: decoding requests first, then those with a prefill chunk.

    token_ids, positions [T] int64. `places`: rotation angles and cache slots of the tokens.
    `logit_rows` [N] int64: rows that need logits. `decode`, `prefill`: None if the step has no such
    requests; both are None on a rank without tokens. `layout`: where the rows are on several ranks,
    from Transformer.layout. `recorder`: set during a piecewise capture, which is for any step of
    this many tokens, so the segments are unknown. `parts`: the micro-batches of the step, in the
    order of the packed tokens. `layer_written`: called after a layer has launched its cache writes.
    `layer_read`: called, with its number in the pool, before a layer launches its attention.
    `attention_out` [T, heads, columns]: see Ops.attention.
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
    layer_read: Callable[[int], None] | None = None
    attention_out: Tensor | None = None

    def part(self, tokens: slice, layout: Layout) -> ForwardBatch:
        """A slice of the packed tokens, as its own batch without logit rows. If it begins inside a
        prompt's chunk, each layer must have computed the tokens before it."""
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
    def prompts(self) -> ForwardBatch:
        """The requests with a prompt chunk as a batch without logit rows, with the same segment."""
        found = self._rows(slice(self.decode_tokens, None))
        found.prefill = self.prefill
        return found

    @property
    def decoding(self) -> ForwardBatch:
        """As `prompts`, of the requests that decode."""
        found = self._rows(slice(self.decode_tokens))
        found.decode = self.decode
        return found

    def _rows(self, tokens: slice) -> ForwardBatch:
        places = self.places
        return ForwardBatch(
            self.token_ids[tokens],
            self.positions[tokens],
            TokenPlaces(places.cos[tokens], places.sin[tokens], places.slots[tokens]),
            self.logit_rows[:0],
            self.pool,
            layer_read=self.layer_read,
        )

    @property
    def idle(self) -> bool:
        """Whether this rank has no tokens."""
        return not self.segments and self.recorder is None

    def between(self, work: Between, inputs: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        """`work(step, *inputs)`, which depends on the step's segments: called now, or at each
        replay of a piecewise capture."""
        if self.recorder is None:
            return work(self, *inputs)
        return self.recorder.between(work, inputs, shape)

    def read(self, layer: int) -> dict[str, Tensor]:
        """Planes of a layer's cache, for its attention."""
        if self.layer_read is not None:
            self.layer_read(layer)
        return self.pool.layers[layer]

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def decode_tokens(self) -> int:
        return self.decode.tokens if self.decode else 0

    @cached_property
    def segments(self) -> list[tuple[AttentionMetadata, slice]]:
        """Each segment with its slice of the packed tokens."""
        split = self.decode_tokens
        found = []
        if self.decode:
            found.append((self.decode, slice(0, split)))
        if self.prefill:
            found.append((self.prefill, slice(split, self.num_tokens)))
        return found


def _requests(segment: AttentionMetadata | None, start: int, stop: int) -> AttentionMetadata | None:
    """The requests whose tokens are `start` to `stop` of the segment."""
    return None if segment is None or start >= stop else segment.between(start, stop)
