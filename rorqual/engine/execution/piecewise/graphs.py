"""Piecewise capture of steps with prompt chunks: the operations between two layers' attention
depend only on the number of tokens.

One capture per bucket of tokens. Attention, which depends on the requests, runs between the
pieces. That of decoding requests is captured too, for each bucket of requests; that of prompts is
launched eagerly. A step with fewer tokens is padded with rows that write to the null page. Of
several data-parallel ranks all are padded to the bucket of the one with most tokens, and replay the
same pieces, which contain the exchanges.
Without this, the host launches steps of up to about two thousand tokens more slowly than a GPU
computes them.

Calls to expert servers over shared memory are kernels of the pieces. Each call is within one piece,
and all calls are announced before the first piece is replayed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.engine.kernels_ahead import Parts
from rorqual.engine.scheduling.buckets import token_buckets
from rorqual.layers.forward_batch import Between, ForwardBatch, PieceRecorder
from rorqual.ops.interface import AttentionMetadata, TokenPlaces
from rorqual.parallel.remote.step_calls import StepCalls
from rorqual.parallel.remote.wire import Step
from rorqual.platforms.base import Pieces, Platform, Replay

Body = Callable[[Tensor, Tensor, Tensor, PieceRecorder], Tensor]


@dataclass
class Gap:
    """An operation between pieces: `out` receives `work` applied to the step and `inputs`. index:
    among the gaps of a forward pass."""

    index: int
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

    def room(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As `get`, for any shape of as many elements at most as the first one."""
        count = math.prod(shape)
        if count > self.get(use, (count,), dtype).shape[0]:
            del self.held[use, (), dtype]
        return self.get(use, (count,), dtype).view(*shape)


class Recorder:
    """The PieceRecorder of one capture."""

    def __init__(self, buffers: Buffers, gap: Callable[[Gap], None]):
        self.buffers = buffers
        self.gap = gap
        self.gaps = 0

    def between(self, work: Between, inputs: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        dtype = inputs[0].dtype
        kept = []
        for place, tensor in enumerate(inputs):
            buffer = self.buffers.get(f"input {place}", tuple(tensor.shape), tensor.dtype)
            kept.append(buffer.copy_(tensor))
        out = self.buffers.get("output", shape, dtype)
        self.gap(Gap(self.gaps, work, tuple(kept), out))
        self.gaps += 1
        return out


def hold_tokens(columns: Tensor, num_tokens: Tensor, step: ForwardBatch) -> None:
    """Put a step's tokens into columns [3, size], where a replay reads them: ids, positions, cache
    slots, then padding; and their number into num_tokens [1]."""
    tokens = step.num_tokens
    for row, given in enumerate((step.token_ids, step.positions, step.places.slots)):
        columns[row, :tokens].copy_(given)
    columns[:, tokens:].zero_()
    num_tokens.fill_(tokens)


class DecodeRows:
    """So many decoding requests of a step with prompts, at fixed addresses: `step` has them alone,
    and `graphs` compute one gap after the other for their rows. tables [requests, columns] int64
    and lens [requests] int64 hold their block tables and cached entries, of up to `max_len`."""

    def __init__(
        self,
        pool: KVPool,
        max_len: int,
        queries: int,
        tables: Tensor,
        lens: Tensor,
        may_share: bool,
    ):
        self.requests = tables.shape[0]
        self.queries = queries
        self.rows = self.requests * queries
        self.tables = tables
        self.lens = lens
        each = ((queries,) * self.requests, (max_len,) * self.requests)
        segment = AttentionMetadata(tables, lens, *each, exact=False)
        segment.may_share = may_share
        ids = torch.zeros(self.rows, dtype=torch.int64, device=lens.device)
        nowhere = TokenPlaces(ids, ids, ids)  # not for attention
        self.step = ForwardBatch(ids, ids, nowhere, ids[:0], pool, decode=segment)
        self.graphs: list[Replay] = []

    def works(self, gaps: Sequence[Gap]) -> list[Callable[[], None]]:
        return [partial(self._attend, gap) for gap in gaps]

    def _attend(self, gap: Gap) -> None:
        inputs = (tensor[: self.rows] for tensor in gap.inputs)
        gap.out[: self.rows].copy_(gap.work(self.step, *inputs))

    def hold(self, segment: AttentionMetadata) -> None:
        """The requests of the next replay. Padding has no cached entries."""
        count, columns = segment.tables.shape
        self.tables[:count, :columns].copy_(segment.tables)
        self.lens[:count].copy_(segment.kv_lens)
        self.lens[count:].zero_()


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
        self.gaps: list[Gap] = []  # of the largest size
        self.decodes: dict[tuple[int, int], DecodeRows] = {}  # by requests, and queries of each

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
        found = self.gaps = []

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
        if not self.gaps:
            self._noting(self.sizes[-1], lambda gap: None)
        first = self.gaps[0]
        inputs = (tensor[: step.num_tokens] for tensor in first.inputs)
        first.work(step, *inputs)

    def decode_rows(
        self, pool: KVPool, max_len: int, most: int, queries: Iterable[int], may_share: bool
    ) -> list[DecodeRows]:
        """What `capture_decodes` captures, after `warm_up` or `capture`: powers of two of up to
        `most` requests, which may reach `max_len` cached entries, with each number of query tokens.
        None where attention reads more than its queries (MLA's materialized form)."""
        if len(self.gaps[0].inputs) > 1:
            return []
        sizes = sorted({most, *(1 << power for power in range(most.bit_length()))})
        columns = -(-max_len // pool.spec.page_size)
        device = self.platform.device
        # of whichever is replayed
        tables = torch.zeros(most, columns, dtype=torch.int64, device=device)
        lens = torch.zeros(most, dtype=torch.int64, device=device)
        return [
            DecodeRows(pool, max_len, each, tables[:requests], lens[:requests], may_share)
            for each, requests in product(queries, sizes)
            if requests * each <= self.sizes[-1]
        ]

    def capture_decodes(self, wanted: Iterable[DecodeRows]) -> None:
        """Without, decoding requests are attended to eagerly."""
        for rows in wanted:
            works = rows.works(self.gaps)
            if self.loaded:  # a layer's products are those of all
                self.platform.warm_up(works[0])
            rows.graphs = self.platform.capture_each(works, not self.loaded)
            self.decodes[rows.requests, rows.queries] = rows

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

        split = 0
        decodes = self._decodes_for(step.decode) if step.decode is not None else None
        if decodes is not None and step.decode is not None:
            decodes.hold(step.decode)
            split = step.decode.tokens
        rest = step.prompts if split else step

        def between(gap: Gap) -> None:
            if decodes is not None:
                if step.layer_read is not None:  # captured attention does not wait itself
                    step.layer_read(gap.index)
                decodes.graphs[gap.index]()
                if decodes.rows > tokens:
                    gap.out[tokens : decodes.rows].zero_()  # padding attended to nothing
            if split < tokens:
                inputs = (tensor[split:tokens] for tensor in gap.inputs)
                gap.out[split:tokens].copy_(gap.work(rest, *inputs))
            if step.layer_written is not None:
                step.layer_written()

        if self.calls is not None:  # for all pieces at once: a server replays one graph too
            self.calls.announce_step(self.called[size])
        return self.graphs[size](between)[:tokens]

    def _decodes_for(self, segment: AttentionMetadata) -> DecodeRows | None:
        """The captured ones of at least as many requests."""
        queries = segment.query_lens[0]
        sizes = [size for size, each in self.decodes if each == queries and size >= len(segment)]
        return self.decodes[min(sizes), queries] if sizes else None

    def drop(self) -> None:
        """Release everything captured."""
        self.graphs.clear()
        self.decodes.clear()
