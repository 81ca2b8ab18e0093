"""Piecewise capture of steps with prompt chunks: the operations between two layers' attention
depend only on the number of tokens.

One capture per bucket of tokens. Attention, which depends on the requests, runs between the pieces,
most of it captured too (attention.py). A step with fewer tokens is padded with rows that write to
the null page. Of several data-parallel ranks all are padded to the bucket of the one with most
tokens, and replay the same pieces, which contain the exchanges. Without this, the host launches
steps of up to about two thousand tokens more slowly than a GPU computes them.

Calls to expert servers over shared memory are kernels of the pieces. Each call is within one piece,
and all calls are announced before the first piece is replayed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from rorqual.engine.execution.piecewise.attention import CapturedAttention, CapturedRows
from rorqual.engine.execution.piecewise.gaps import Buffers, Gap, Recorder, hold_tokens
from rorqual.engine.kernels_ahead import Parts
from rorqual.engine.scheduling.buckets import token_buckets
from rorqual.layers.forward_batch import ForwardBatch, PieceRecorder
from rorqual.parallel.remote.step_calls import StepCalls
from rorqual.parallel.remote.wire import Step
from rorqual.platforms.base import Pieces, Platform

Body = Callable[[Tensor, Tensor, Tensor, PieceRecorder], Tensor]


class PiecewiseGraphs:
    """`body(token ids, positions, cache slots, recorder)`, [bucket] each, computes the tokens'
    hidden states. few_layers: as in DecodeGraphs."""

    def __init__(
        self,
        body: Body,
        platform: Platform,
        most: int,
        few_layers: Callable[[], AbstractContextManager[None]] | None = None,
    ):
        self.body = body
        self.few_layers = few_layers
        self.loaded = False  # whether all kernels of `capture` are compiled and loaded
        self.platform = platform
        self.sizes = token_buckets(most)
        self.buffers = Buffers(platform)
        self.graphs: dict[int, Pieces[Gap]] = {}
        self.calls: StepCalls | None = None  # to expert servers, if any
        self.called: dict[int, Step] = {}
        self.columns: Tensor | None = None
        # that are not padding, in the next replay
        self.num_tokens = torch.zeros(1, dtype=torch.int64, device=platform.device)
        self.attention = CapturedAttention(platform)

    def capture(self) -> None:
        """Capture all sizes, the largest first: the others fit into its memory."""
        for size in reversed(self.sizes):
            self._capture(size)

    def _capture(self, size: int) -> None:
        calls = self.calls
        few_layers = self.few_layers if self.loaded and calls is None else None
        if few_layers is not None:
            # products take libraries' kernels by the size, each of which is loaded when it runs
            with few_layers():
                self.platform.warm_up(lambda: self._compute(size, lambda gap: None))
        warm = few_layers is None
        with calls.capture_calls() if calls is not None else nullcontext() as found:
            self.graphs[size] = self.platform.capture_pieces(partial(self._noting, size), warm)
        if calls is None:
            return
        assert found is not None
        self.called[size] = found.step()
        # expert servers capture their side at the first replay; no request should wait for that
        calls.announce_step(self.called[size])
        self.graphs[size](lambda gap: None)

    def _noting(self, size: int, gap: Callable[[Gap], None]) -> Tensor:
        """`_compute`, which notes the gaps of the largest size."""
        if size < self.sizes[-1]:
            return self._compute(size, gap)
        found = self.attention.gaps = []

        def note(one: Gap) -> None:
            found.append(one)
            gap(one)

        return self._compute(size, note)

    def warm_up(self, parts: Parts) -> None:
        """Run every step that `capture` would capture, once: each size is a part. The largest
        always, whose gaps and buffers are those of all."""
        for size in reversed(self.sizes):
            run = partial(self._noting, size, lambda gap: None)
            parts(f"pieces {size}", run, always=size == self.sizes[-1])

    def attend(self, step: ForwardBatch) -> None:
        """Run the first layer's attention for such a step."""
        if not self.attention.gaps:
            self._noting(self.sizes[-1], lambda gap: None)
        first = self.attention.gaps[0]
        inputs = (tensor[: step.num_tokens] for tensor in first.inputs)
        first.work(step, *inputs)

    def capture_attention(self, wanted: Iterable[CapturedRows]) -> None:
        """After `capture`."""
        self.attention.capture(wanted, self.loaded)

    def _compute(self, size: int, gap: Callable[[Gap], None]) -> Tensor:
        columns = self._columns(size)
        return self.body(columns[0], columns[1], columns[2], Recorder(self.buffers, gap))

    def _columns(self, size: int) -> Tensor:
        """[3, size]: token ids, positions, cache slots. Zeros are padding, which writes to the null
        page."""
        if self.columns is None:
            shape = (3, self.sizes[-1])
            self.columns = torch.zeros(shape, dtype=torch.int64, device=self.platform.device)
        return self.columns[:, :size]

    def fits(self, tokens: int) -> bool:
        return bool(self.graphs) and 0 < tokens <= self.sizes[-1]

    def run(self, step: ForwardBatch, longest: int) -> Tensor:
        """The hidden states of all of the step's tokens, [T, hidden]; valid until the next run, in
        stream order. longest: tokens of the data-parallel rank that has most, as all ranks replay
        the same pieces."""
        tokens = step.num_tokens
        size = self.sizes[bisect_left(self.sizes, longest)]
        columns = self._columns(size)
        hold_tokens(columns, self.num_tokens, step)

        between = self.attention.begin(step)
        if self.calls is not None:  # for all pieces at once: a server replays one graph too
            self.calls.announce_step(self.called[size])
        return self.graphs[size](between)[:tokens]

    def drop(self) -> None:
        """Release everything captured."""
        self.graphs.clear()
        self.attention.drop()
