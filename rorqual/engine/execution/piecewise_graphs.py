"""Piecewise capture of steps with prompt chunks: the operations between two layers' attention
depend only on the number of tokens.

One capture per bucket of tokens. Attention, which depends on the requests, is launched eagerly
between the pieces. A step with fewer tokens is padded with rows that write to the null page. Of
several data-parallel ranks all are padded to the bucket of the one with most tokens, and replay the
same pieces, which contain the exchanges.
Without this, the host launches steps of up to about two thousand tokens more slowly than a GPU
computes them.

Calls to expert servers over shared memory are kernels of the pieces. Each call is within one piece,
and all calls are announced before the first piece is replayed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rorqual.engine.scheduling.buckets import token_buckets
from rorqual.layers.forward_batch import Between, ForwardBatch, PieceRecorder
from rorqual.parallel.remote.step_calls import StepCalls
from rorqual.parallel.remote.wire import Step
from rorqual.platforms.base import Pieces, Platform

Body = Callable[[Tensor, Tensor, Tensor, PieceRecorder], Tensor]


@dataclass
class Gap:
    """An eager operation between pieces: `out` receives `work` applied to the step and `inputs`."""

    work: Between
    inputs: tuple[Tensor, ...]
    out: Tensor


class Buffers:
    """Memory that outlives a piece, by use: shared by all layers and all captures."""

    def __init__(self, platform: Platform):
        self.platform = platform
        self.held: dict[tuple[object, ...], Tensor] = {}

    def get(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Rows of a buffer; the largest size must be requested first. Initially zeros: padding rows
        are read, and must be finite."""
        key = (use, shape[1:], dtype)
        if key not in self.held:
            self.held[key] = torch.zeros(shape, dtype=dtype, device=self.platform.device)
        return self.held[key][: shape[0]]


class Recorder:
    """The PieceRecorder of one capture."""

    def __init__(self, buffers: Buffers, gap: Callable[[Gap], None]):
        self.buffers = buffers
        self.gap = gap

    def between(self, work: Between, inputs: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        dtype = inputs[0].dtype
        kept = []
        for place, tensor in enumerate(inputs):
            buffer = self.buffers.get(f"input {place}", tuple(tensor.shape), tensor.dtype)
            kept.append(buffer.copy_(tensor))
        out = self.buffers.get("output", shape, dtype)
        self.gap(Gap(work, tuple(kept), out))
        return out


class PiecewiseGraphs:
    """`body(token ids, positions, cache slots, recorder)`, [bucket] each, computes the tokens'
    hidden states."""

    def __init__(self, body: Body, platform: Platform, most: int):
        self.body = body
        self.platform = platform
        self.sizes = token_buckets(most)
        self.buffers = Buffers(platform)
        self.graphs: dict[int, Pieces[Gap]] = {}
        self.calls: StepCalls | None = None  # to expert servers, if any
        self.called: dict[int, Step] = {}
        self.columns: Tensor | None = None
        # that are not padding, in the next replay
        self.num_tokens = torch.zeros(1, dtype=torch.int64, device=platform.device)
        self.first: Gap | None = None  # of the largest size

    def capture(self) -> None:
        """Capture all sizes, the largest first: the others fit into its memory."""
        for size in reversed(self.sizes):
            self._capture(size)

    def _capture(self, size: int) -> None:
        calls = self.calls
        with calls.capture_calls() if calls is not None else nullcontext() as found:
            self.graphs[size] = self.platform.capture_pieces(partial(self._compute, size))
        if calls is None:
            return
        assert found is not None
        self.called[size] = found.step()
        # expert servers capture their side at the first replay; no request should wait for that
        calls.announce_step(self.called[size])
        self.graphs[size](lambda gap: None)

    def warm_up(self) -> None:
        """Run every step that `capture` would capture, once."""
        for size in reversed(self.sizes):
            self._compute(size, self._keep_first)

    def _keep_first(self, gap: Gap) -> None:
        self.first = self.first or gap

    def attend(self, step: ForwardBatch) -> None:
        """Run the first layer's attention for such a step."""
        if self.first is None:
            self._compute(self.sizes[-1], self._keep_first)
        assert self.first is not None
        inputs = (tensor[: step.num_tokens] for tensor in self.first.inputs)
        self.first.work(step, *inputs)

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
        for row, given in enumerate((step.token_ids, step.positions, step.places.slots)):
            columns[row, :tokens].copy_(given)
        columns[:, tokens:].zero_()
        self.num_tokens.fill_(tokens)

        def between(gap: Gap) -> None:
            if not tokens:
                return
            inputs = (tensor[:tokens] for tensor in gap.inputs)
            gap.out[:tokens].copy_(gap.work(step, *inputs))

        if self.calls is not None:  # for all pieces at once: a server replays one graph too
            self.calls.announce_step(self.called[size])
        return self.graphs[size](between)[:tokens]
