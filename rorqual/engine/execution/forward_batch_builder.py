"""Builds a ForwardBatch from a scheduler output: packed tokens, their cache slots, and the rows to
sample."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.scheduling.scheduler_output import PrefillChunk, SchedulerOutput
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.layers.rotary import Rotary
from rorqual.ops.interface import AttentionMetadata, TokenPlaces
from rorqual.parallel.eplb.placement import Ints
from rorqual.parallel.layout import Layout
from rorqual.parallel.mesh import SINGLE_LAYOUT
from rorqual.platforms.base import Platform


@dataclass
class BatchPart:
    """The decode or the prefill half of a step: packed tokens, then the rows to sample: their
    `logit_rows` among the part's tokens, `slots`, and `bounds` of their cached entries.
    `following`: the prompt's token after each (0 after the last). `ends`: with several prediction
    modules, the last rows [C] of chunks that are not sampled, and the tokens after them [C,
    modules], the prompt's last token repeated past its end. `scored`: prompt rows whose next
    token's log probability is wanted."""

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
    """A step and its two halves."""

    step: ForwardBatch
    decode: BatchPart | None
    prefill: BatchPart | None


class ForwardBatchBuilder:
    """`exact`: the host knows every length, which holds without speculation. `modules`: number of
    prediction modules, which read the tokens after a prompt's rows."""

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
        """With neither half a rank has no rows of its own and only takes part in the others'
        collectives."""
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
        """The newest token of each request and num_speculative_tokens drafts after it."""
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
        """The host knows everything about prompts: a single copy brings it to the device. Until
        the first layer is launched the GPU waits, so there are as few operations as possible."""
        rows = self.rows
        host = _ChunkColumns(output.chunks, self.modules, rows.tables.shape[1], self.page_size)
        columns = _columns_on_device(host.columns(), self.platform)
        (
            ids, positions, pages, inside, following, slots, lens, query_starts, key_starts,
            logit_rows, drawn, scored, ends, after,
        ) = columns  # fmt: skip
        rows.length.index_copy_(0, slots, lens)
        held = rows.tables.view(-1).index_select(0, pages)
        mapping = torch.add(inside, held, alpha=self.page_size)
        bounds = tuple(chunk.stop for chunk in output.chunks)
        tables = rows.tables[:, : self._pages(max(bounds))].index_select(0, slots)
        segment = AttentionMetadata(tables, lens, host.lengths, bounds)
        segment.query_starts = query_starts
        segment.key_starts = key_starts
        if bounds == host.lengths:  # whole prompts: their keys are the step's tokens
            segment.key_slots = mapping
        return BatchPart(
            ids,
            positions,
            mapping,
            logit_rows,
            drawn,
            segment,
            tuple(chunk.stop for chunk in output.chunks if chunk.sample),
            following,
            (ends, after.view(-1, self.modules)) if host.after else None,
            scored if host.scored else None,
        )

    def _pages(self, length: int) -> int:
        return -(-length // self.page_size)


class _ChunkColumns:
    """The device's columns for a step's chunks. modules: see ForwardBatchBuilder. tokens: of each
    its id, its position, where its page stands in the block tables of all slots (max_pages each),
    its place in the page, and the prompt's token after it."""

    def __init__(self, chunks: list[PrefillChunk], modules: int, max_pages: int, page_size: int):
        self.max_pages = max_pages
        self.page_size = page_size
        self.lengths = tuple(len(chunk.tokens) for chunk in chunks)
        self.tokens = np.empty((5, sum(self.lengths)), np.int64)
        self.slots = [chunk.slot for chunk in chunks]
        self.stops = [chunk.stop for chunk in chunks]
        self.logit_rows: list[int] = []
        self.sampled_slots: list[int] = []  # slots
        self.scored: list[int] = []
        self.ends: list[int] = []
        self.after: list[int] = []
        self.query_starts = [*accumulate(self.lengths, initial=0)]
        self.key_starts = [*accumulate(self.stops, initial=0)]
        for chunk, start in zip(chunks, self.query_starts, strict=False):
            self._add(chunk, start, modules)

    def columns(self) -> tuple[Ints | list[int], ...]:
        return (
            *self.tokens,
            self.slots,
            self.stops,
            self.query_starts,
            self.key_starts,
            self.logit_rows,
            self.sampled_slots,
            self.scored,
            self.ends,
            self.after,
        )

    def _add(self, chunk: PrefillChunk, start: int, modules: int) -> None:
        """The chunk's tokens are rows `start` and on."""
        last = start + len(chunk.tokens) - 1
        ids, positions, pages, inside, following = self.tokens[:, start : last + 1]
        ids[:] = chunk.tokens
        positions[:] = np.arange(chunk.start, chunk.stop)
        np.divmod(positions, self.page_size, pages, inside)
        pages += chunk.slot * self.max_pages
        following[:-1] = ids[1:]
        following[-1] = chunk.following[0] if chunk.following else 0
        if chunk.following and modules > 1:
            self.ends.append(last)
            self.after += (*chunk.following, *chunk.following[-1:] * modules)[:modules]
        if chunk.sample:
            self.logit_rows.append(last)
            self.sampled_slots.append(chunk.slot)
        if chunk.num_scored:
            shift = start - chunk.start
            self.scored += range(chunk.score_start + shift, chunk.score_stop + shift)


def _columns_on_device(
    columns: tuple[Ints | list[int], ...], platform: Platform
) -> tuple[Tensor, ...]:
    """Each column as [n] int64 on the device. A single copy for all: starting a copy costs the host
    more than joining them. They start at multiples of 16 bytes, which compiled kernels assume."""
    sizes = [len(column) for column in columns]
    starts = [*accumulate((size + size % 2 for size in sizes), initial=0)]
    joined = np.zeros(starts[-1], np.int64)
    for column, size, start in zip(columns, sizes, starts, strict=False):
        joined[start : start + size] = column
    moved = platform.to_device(torch.from_numpy(joined))
    return tuple(moved[start : start + size] for size, start in zip(sizes, starts, strict=False))


def join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
