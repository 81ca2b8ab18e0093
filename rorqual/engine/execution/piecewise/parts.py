"""Piecewise capture of steps with prompts that are computed in two micro-batches.

As in graphs.py, the operations between two layers' attention are captured by the number of tokens,
here for both micro-batches as they alternate. Their messages are launched between the pieces: a
message that is on its way at the end of a piece would have to arrive before it, so that nothing
could be computed meanwhile. So a micro-batch has three pieces in each layer: up to the dispatch of
rows to experts, the experts, and from their results to attention.

Both micro-batches of all data-parallel ranks are padded to the bucket of the longest. Without this,
the host launches such a step up to some thousand tokens a rank more slowly than a GPU computes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rorqual.engine.execution.piecewise.attention import CapturedAttention, CapturedRows
from rorqual.engine.execution.piecewise.gaps import Buffers, Gap, Recorder, hold_tokens
from rorqual.engine.kernels_ahead import Parts
from rorqual.engine.scheduling.buckets import part_buckets
from rorqual.layers.forward_batch import Between, ForwardBatch
from rorqual.parallel.collectives import CollectiveLaunch, PendingCollective
from rorqual.parallel.group_axis import GroupAxis
from rorqual.platforms.base import Pieces, Platform, Start

PARTS = 2

Result = Callable[[Tensor], Tensor]


@dataclass
class AttentionGap:
    """Of a micro-batch, between two pieces."""

    part: int
    gap: Gap


@dataclass(eq=False)
class Message:
    """A collective that each replay repeats."""

    launch: CollectiveLaunch
    x: Tensor
    out: Tensor


@dataclass(eq=False)
class Sending:
    """Messages that start together."""

    messages: Sequence[Message]
    arrive: Callable[[], None] | None = None

    @property
    def key(self) -> SendingKey:
        """Sendings of one key are alike: layers use the same buffers."""
        return tuple(
            (*message.launch.kind, message.x.data_ptr(), message.out.data_ptr())
            for message in self.messages
        )

    def launch(self) -> list[Any]:
        return [message.launch(message.out, message.x) for message in self.messages]

    def start(self, how: Start) -> None:
        for message in self.messages:
            message.launch.count()
        self.arrive = how()

    def wait(self) -> None:
        assert self.arrive is not None, "a message is waited for once, after its start"
        self.arrive()
        self.arrive = None


@dataclass
class MessageGap:
    """Messages to start, and then others to wait for, between two pieces."""

    started: Sending | None
    awaited: Sequence[Sending] = ()
    how: Start | None = None

    def run(self, starts: Mapping[SendingKey, Start]) -> None:
        """starts: what capture_messages returned, by key."""
        if self.started is not None:
            if self.how is None:  # once, as it takes the host some microseconds
                self.how = starts[self.started.key]
            self.started.start(self.how)
        for sending in self.awaited:
            sending.wait()


SendingKey = tuple[tuple[object, ...], ...]
GapWork = AttentionGap | MessageGap


@dataclass
class Recorded:
    """A collective of a pass that is being captured."""

    recorder: PartRecorder
    message: Message
    finish: Result

    def wait(self) -> Tensor:
        self.recorder.wait(self.message)
        return self.finish(self.message.out)


class PartRecorder(Recorder):
    """Records a micro-batch: the gaps of its attention, and its messages. Those of a layer have
    buffers of their own, which the next layer uses again: no message's result is read once the
    next attention has begun, but the embedding's, which is the first residual stream."""

    def __init__(self, buffers: Buffers, part: int, gap: Callable[[GapWork], None]):
        super().__init__(buffers, lambda found: gap(AttentionGap(part, found)))
        self.part = part
        self.between_pieces = gap
        self.number = 0  # of a layer's messages
        self.unsent: list[Message] = []
        self.under_way: list[Sending] = []

    def between(self, work: Between, inputs: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        self.flush()
        self.number = 0
        return super().between(work, inputs, shape)

    def start(
        self,
        launch: CollectiveLaunch,
        x: Tensor,
        shape: Sequence[int] | None,
        finish: Result,
    ) -> PendingCollective:
        """CollectiveRecorder.start: the message is copied, because its memory would be another
        piece's while it is on its way."""
        use = self._use
        kept = self.buffers.room(use, x.shape, x.dtype).copy_(x)
        out = kept if shape is None else self.buffers.room(f"{use}, result", shape, x.dtype)
        self.number += 1
        self.unsent.append(Message(launch, kept, out))
        return Recorded(self, self.unsent[-1], finish)

    @property
    def _use(self) -> str:
        """Of the next message's buffers."""
        return f"{'layer' if self.gaps else 'first'} message {self.number} of part {self.part}"

    def flush(self) -> None:
        """Start what was not started yet."""
        sending = self._sending()
        if sending is not None:
            self.between_pieces(MessageGap(sending))

    def _sending(self) -> Sending | None:
        if not self.unsent:
            return None
        use = f"{self._use}, time"
        for message in self.unsent:
            message.launch.ready(lambda: self.buffers.get(use, (1,), torch.int64))
        self.under_way.append(Sending(self.unsent))
        self.unsent = []
        return self.under_way[-1]

    def wait(self, message: Message) -> None:
        """Wait for it, and for the part's other messages: for all between the same two pieces."""
        sent = any(message in sending.messages for sending in self.under_way)
        if sent or message in self.unsent:
            self.between_pieces(MessageGap(self._sending(), self.under_way))
            self.under_way = []

    def recording(
        self, forward: Generator[None, None, Tensor], axes: Sequence[GroupAxis]
    ) -> Generator[None, None, Tensor]:
        """`forward`, whose collectives over `axes` this records. At each hand-over its messages are
        started."""
        while True:
            with self._recording(axes):
                try:
                    next(forward)
                except StopIteration as stop:
                    return stop.value
                finally:
                    self.flush()
            yield

    @contextmanager
    def _recording(self, axes: Sequence[GroupAxis]) -> Iterator[None]:
        for axis in axes:
            axis.recorder = self
        try:
            yield
        finally:
            for axis in axes:
                axis.recorder = None


# hidden states of both parts, one after the other, of [3, tokens] of each as in PiecewiseGraphs
Body = Callable[[Sequence[Tensor], Sequence[PartRecorder]], Tensor]


class PiecewiseParts:
    """body: see above. most: tokens of a part up to which steps are captured."""

    def __init__(self, body: Body, platform: Platform, most: int):
        self.body = body
        self.platform = platform
        self.sizes = part_buckets(most)
        # of each part; both have requests at the same time
        self.attention = [CapturedAttention(platform, 1 + part) for part in range(PARTS)]
        self.buffers = Buffers(platform)
        self.graphs: dict[int, Pieces[GapWork]] = {}
        self.sendings: dict[SendingKey, Sending] = {}
        self.starts: dict[SendingKey, Start] = {}
        shape = (PARTS, 3, most)
        self.columns = torch.zeros(shape, dtype=torch.int64, device=platform.device)
        # of each part, that are not padding, in the next replay
        self.num_tokens = torch.zeros(PARTS, 1, dtype=torch.int64, device=platform.device)

    def warm_up(self, parts: Parts) -> None:
        """As in PiecewiseGraphs."""
        for size in reversed(self.sizes):
            run = partial(self._noting, size, lambda gap: None)
            parts(f"pieces of parts {size}", run, always=size == self.sizes[-1])

    def capture(self) -> None:
        """Capture all sizes, the largest first, and their messages. Collective."""
        for size in reversed(self.sizes):
            self.graphs[size] = self.platform.capture_pieces(partial(self._noting, size))
            for key, sending in self.sendings.items():
                self.starts[key] = self.platform.capture_messages(sending.launch)
            self.sendings.clear()

    def capture_attention(
        self, wanted: Callable[[CapturedAttention], Iterable[CapturedRows]]
    ) -> None:
        """Of each part, after `capture`."""
        for attention in self.attention:
            attention.capture(wanted(attention), loaded=False)

    def _noting(self, size: int, gap: Callable[[GapWork], None]) -> Tensor:
        """`_compute`, which notes messages, and the attention of the largest size."""
        largest = size == self.sizes[-1]
        if largest:
            for attention in self.attention:
                attention.gaps = []

        def note(what: GapWork) -> None:
            if isinstance(what, AttentionGap):
                if largest:
                    self.attention[what.part].gaps.append(what.gap)
            elif what.started is not None and what.started.key not in self.starts:
                self.sendings[what.started.key] = what.started
            gap(what)

        return self._compute(size, note)

    def _compute(self, size: int, gap: Callable[[GapWork], None]) -> Tensor:
        recorders = [PartRecorder(self.buffers, part, gap) for part in range(PARTS)]
        return self.body(list(self.columns[:, :, :size]), recorders)

    def fits(self, parts: Sequence[Sequence[int]]) -> bool:
        """parts: tokens of each, on each data-parallel rank. The same on all ranks."""
        longest = max((max(part) for part in parts), default=0)
        return bool(self.graphs) and len(parts) == PARTS and 0 < longest <= self.sizes[-1]

    def run(self, parts: Sequence[ForwardBatch], longest: int) -> Tensor:
        """The hidden states of a step's tokens, [T, hidden]. longest: tokens of the longest part of
        any rank."""
        size = self.sizes[bisect_left(self.sizes, longest)]
        for columns, count, part in zip(self.columns, self.num_tokens, parts, strict=True):
            hold_tokens(columns[:, :size], count, part)

        attend = [
            attention.begin(part) if part.num_tokens else None
            for attention, part in zip(self.attention, parts, strict=True)
        ]

        def between(what: GapWork) -> None:
            if isinstance(what, MessageGap):
                what.run(self.starts)
                return
            of_part = attend[what.part]
            if of_part is not None:
                of_part(what.gap)

        found = self.graphs[size](between).split(size)
        return torch.cat([rows[: part.num_tokens] for rows, part in zip(found, parts, strict=True)])

    def drop(self) -> None:
        """Release everything captured."""
        self.graphs.clear()
        self.starts.clear()
        for attention in self.attention:
            attention.drop()
