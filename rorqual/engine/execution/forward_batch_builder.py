"""From a scheduler output to what the model computes: packed tokens, their slots in the cache, and
the rows that are sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.scheduling.scheduler_output import PrefillChunk, SchedulerOutput
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.layers.rotary import Rotary
from rorqual.ops.interface import AttentionMetadata, TokenPlaces
from rorqual.parallel.layout import Layout
from rorqual.parallel.mesh import SINGLE_LAYOUT


@dataclass
class BatchPart:
    """The decode or the prefill half of a step, packed tokens first, then the rows that are
    sampled: their `logit_rows` among the part's tokens, `slots`, and `bounds` of their cached
    entries. `following`: the prompt's token after each (0 after the last). `ends`: with several
    prediction modules, the last rows [C] of chunks that are not sampled, and the tokens after
    them [C, modules]; where the prompt ends before, its last one stands in. `scored`: rows of a
    prompt whose next token's log probability is wanted."""

    ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    logit_rows: Tensor
    slots: Tensor
    segment: AttentionMetadata
    bounds: tuple[int, ...]
    following: Tensor | None = None
    ends: tuple[Tensor, Tensor] | None = None
    scored: Tensor | None = None

    def columns(self) -> tuple[Tensor, ...]:
        return self.ids, self.positions, self.slot_mapping, self.logit_rows


@dataclass
class BuiltBatch:
    """A step and the halves it was made of."""

    step: ForwardBatch
    decode: BatchPart | None
    prefill: BatchPart | None


class ForwardBatchBuilder:
    """`exact`: the host knows every length, as it does without speculation. `modules`: prediction
    modules that will read what follows a prompt's tokens."""

    def __init__(
        self, rows: RequestState, pool: KVPool, rotary: Rotary, exact: bool, modules: int = 0
    ):
        self.modules = modules
        self.rows = rows
        self.pool = pool
        self.rotary = rotary
        self.exact = exact
        self.platform = rows.platform
        self.page_size = pool.spec.page_size
        self.nothing = torch.empty(0, dtype=torch.int64, device=self.platform.device)

    def batch(
        self, decode: BatchPart | None, prefill: BatchPart | None, layout: Layout = SINGLE_LAYOUT
    ) -> BuiltBatch:
        """Without either half a rank computes nothing of its own and takes part in what the
        others compute."""
        columns = [part.columns() for part in (decode, prefill) if part] or [(self.nothing,) * 4]
        ids, positions, slot_mapping, logit_rows = (
            join([column[i] for column in columns]) for i in range(4)
        )
        if decode and prefill:
            logit_rows = torch.cat((decode.logit_rows, prefill.logit_rows + decode.ids.shape[0]))
        places = TokenPlaces(*self.rotary.rows(positions), slot_mapping)
        segments = (decode.segment if decode else None, prefill.segment if prefill else None)
        return BuiltBatch(
            ForwardBatch(ids, positions, places, logit_rows, self.pool, *segments, layout),
            decode,
            prefill,
        )

    def decode(
        self, slots: Tensor, bounds: tuple[int, ...], num_speculative_tokens: int
    ) -> BatchPart:
        """The newest token of each request and num_speculative_tokens drafts behind it."""
        rows = self.rows
        width = num_speculative_tokens + 1
        tables = rows.tables[slots, : self._pages(max(bounds))]
        ids, positions, mapping, lens = rows.ops.decode_rows(
            rows.length,
            rows.last_token,
            rows.drafts,
            tables,
            slots,
            num_speculative_tokens,
            self.page_size,
        )
        segment = AttentionMetadata(tables, lens, (width,) * len(bounds), bounds, self.exact)
        logit_rows = torch.arange(positions.shape[0], device=self.platform.device)
        return BatchPart(ids, positions, mapping, logit_rows, slots, segment, bounds)

    def prefill(self, output: SchedulerOutput) -> BatchPart:
        """Everything about prompts is known to the host: one copy brings it over."""
        rows = self.rows
        chunks = output.chunks
        to_device = self.platform.to_device
        host = _ChunkColumns()
        for index, chunk in enumerate(chunks):
            host.add(index, chunk)
        tokens = to_device(torch.tensor([host.ids, host.positions, host.owner, host.following]))
        heads = to_device(
            torch.tensor([[chunk.slot for chunk in chunks], [chunk.stop for chunk in chunks]])
        )
        picked = to_device(torch.tensor([host.logit_rows, host.slots], dtype=torch.int64))
        slots = heads[0]
        lens = heads[1]
        rows.length.index_copy_(0, slots, lens)
        bounds = tuple(chunk.stop for chunk in chunks)
        tables = rows.tables[slots, : self._pages(max(bounds))]
        segment = AttentionMetadata(
            tables, lens, tuple(len(chunk.tokens) for chunk in chunks), bounds
        )
        held = tables[tokens[2], tokens[1] // self.page_size]
        mapping = held * self.page_size + tokens[1] % self.page_size
        sampled = tuple(chunk.stop for chunk in chunks if chunk.sample)
        ends = self._ends(host)
        scored = to_device(torch.tensor(host.scored)) if host.scored else None
        last = picked[0], picked[1], segment, sampled
        return BatchPart(tokens[0], tokens[1], mapping, *last, tokens[3], ends, scored)

    def _ends(self, host: _ChunkColumns) -> tuple[Tensor, Tensor] | None:
        if self.modules < 2 or not host.ends:
            return None
        after = [(*known, *known[-1:] * self.modules)[: self.modules] for known in host.after]
        to_device = self.platform.to_device
        return to_device(torch.tensor(host.ends)), to_device(torch.tensor(after))

    def _pages(self, length: int) -> int:
        return -(-length // self.page_size)


class _ChunkColumns:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.owner: list[int] = []
        self.following: list[int] = []
        self.logit_rows: list[int] = []
        self.slots: list[int] = []
        self.ends: list[int] = []
        self.after: list[tuple[int, ...]] = []
        self.scored: list[int] = []

    def add(self, index: int, chunk: PrefillChunk) -> None:
        if chunk.num_scored:
            shift = len(self.ids) - chunk.start
            self.scored.extend(range(chunk.score_start + shift, chunk.score_stop + shift))
        self.ids.extend(chunk.tokens)
        self.positions.extend(range(chunk.start, chunk.stop))
        self.owner.extend([index] * len(chunk.tokens))
        self.following.extend(chunk.tokens[1:])
        self.following.append(chunk.following[0] if chunk.following else 0)
        if chunk.following:
            self.ends.append(len(self.ids) - 1)
            self.after.append(chunk.following)
        if chunk.sample:
            self.logit_rows.append(len(self.ids) - 1)
            self.slots.append(chunk.slot)


def join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
