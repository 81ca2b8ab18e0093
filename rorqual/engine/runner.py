"""ModelRunner: turns a plan into a Step on the device, runs the model, samples, and leaves the token ids there for the next step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.engine.plan import Chunk, Plan, StepResult
from rorqual.engine.rows import Rows
from rorqual.engine.sampler import row_logprobs, sample
from rorqual.layers.step import Step
from rorqual.models.transformer import Transformer
from rorqual.ops.table import Segment
from rorqual.parallel.overlap import straight
from rorqual.platforms.base import Platform
from rorqual.request import SamplingParams


@dataclass
class Pending:
    """A launched step: `tensors` fetch what was sampled, `params` are those of the sampled rows in order."""

    tensors: list[Callable[[], Tensor]]
    params: list[SamplingParams]


class ModelRunner:
    """The Runner protocol over a model on one device."""

    def __init__(self, model: Transformer, pool: KVPool, platform: Platform, max_num_seqs: int, max_model_len: int):
        self.model, self.pool, self.platform = model, pool, platform
        self.page_size = pool.spec.page_size
        self.rows = Rows(max_num_seqs, -(-max_model_len // self.page_size), model.config.vocab_size, platform)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Pending:
        with self.platform.stream():
            self.rows.apply(plan)
            step, sampled_slots = self._build(plan)
            hidden = straight(self.model.forward(step))
            return self._sample(plan, hidden, sampled_slots)

    def collect(self, pending: Pending) -> StepResult:
        tensors = [fetch() for fetch in pending.tensors]
        if not tensors:
            return StepResult([])
        result = StepResult(tensors[0].tolist())
        if len(tensors) > 1:
            wanted = (row for row, params in enumerate(pending.params) if params.logprobs is not None)
            result.logprobs = {row: row_logprobs(tensors, row, pending.params[row]) for row in wanted}
        return result

    def _sample(self, plan: Plan, hidden: Tensor, slots: Tensor) -> Pending:
        """Draw, and leave each token in its row: the next step reads it there."""
        rows, host_slots = self.rows, plan.sampled_slots
        if not host_slots:
            return Pending([], [])
        sampled = sample(self.model.logits(hidden), slots, host_slots, rows.length.index_select(0, slots), rows)
        rows.last_token.index_copy_(0, slots, sampled.token_ids)
        params = [row.params for slot in host_slots if (row := rows.params[slot]) is not None]
        return Pending([self.platform.fetch(tensor) for tensor in sampled.tensors()], params)

    def _build(self, plan: Plan) -> tuple[Step, Tensor]:
        """The step, and the slots of the rows it samples. Row lengths move on to what is cached after the step."""
        decode = self._decode_part(plan) if plan.decode_slots else None
        prefill = self._prefill_part(plan) if plan.chunks else None
        parts = [part for part in (decode, prefill) if part]
        ids, positions, slot_mapping, logit_rows, slots = (_join([part.columns()[i] for part in parts]) for i in range(5))
        if decode and prefill:
            logit_rows = torch.cat((decode.logit_rows, prefill.logit_rows + len(plan.decode_slots)))
        cos, sin = self.model.rotary.rows(positions)
        segments = (decode.segment if decode else None, prefill.segment if prefill else None)
        return Step(ids, positions, slot_mapping, cos, sin, logit_rows, self.pool, *segments), slots

    def _decode_part(self, plan: Plan) -> Part:
        rows = self.rows
        slots = self.platform.to_device(torch.tensor(plan.decode_slots))
        positions = rows.length.index_select(0, slots)
        tables = rows.tables[slots, : self._pages(max(plan.decode_bounds))]
        lens = positions + 1
        rows.length.index_copy_(0, slots, lens)
        segment = Segment(tables, lens, (1,) * len(plan.decode_slots), tuple(plan.decode_bounds))
        mapping = self._slot_mapping(tables, positions, None)
        count = torch.arange(len(plan.decode_slots), device=self.platform.device)
        return Part(rows.last_token.index_select(0, slots), positions, mapping, count, slots, segment)

    def _prefill_part(self, plan: Plan) -> Part:
        """Everything about prompts is known to the host: one copy brings it over."""
        rows, chunks = self.rows, plan.chunks
        host = _ChunkColumns()
        for index, chunk in enumerate(chunks):
            host.add(index, chunk)
        tokens = self.platform.to_device(torch.tensor([host.ids, host.positions, host.owner]))
        heads = self.platform.to_device(torch.tensor([[chunk.slot for chunk in chunks], [chunk.stop for chunk in chunks]]))
        picked = self.platform.to_device(torch.tensor([host.logit_rows, host.slots], dtype=torch.int64))
        slots, lens = heads[0], heads[1]
        rows.length.index_copy_(0, slots, lens)
        bounds = tuple(chunk.stop for chunk in chunks)
        tables = rows.tables[slots, : self._pages(max(bounds))]
        segment = Segment(tables, lens, tuple(len(chunk.tokens) for chunk in chunks), bounds)
        mapping = self._slot_mapping(tables, tokens[1], tokens[2])
        return Part(tokens[0], tokens[1], mapping, picked[0], picked[1], segment)

    def _slot_mapping(self, tables: Tensor, positions: Tensor, owner: Tensor | None) -> Tensor:
        page = positions // self.page_size
        held = tables.gather(1, page[:, None]).squeeze(1) if owner is None else tables[owner, page]
        return held * self.page_size + positions % self.page_size

    def _pages(self, length: int) -> int:
        return -(-length // self.page_size)


@dataclass
class Part:
    """The decode or the prefill half of a step, packed tokens first, then the rows that are sampled."""

    ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    logit_rows: Tensor
    slots: Tensor
    segment: Segment

    def columns(self) -> tuple[Tensor, ...]:
        return self.ids, self.positions, self.slot_mapping, self.logit_rows, self.slots


class _ChunkColumns:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.owner: list[int] = []
        self.logit_rows: list[int] = []
        self.slots: list[int] = []

    def add(self, index: int, chunk: Chunk) -> None:
        self.ids.extend(chunk.tokens)
        self.positions.extend(range(chunk.start, chunk.stop))
        self.owner.extend([index] * len(chunk.tokens))
        if chunk.sample:
            self.logit_rows.append(len(self.ids) - 1)
            self.slots.append(chunk.slot)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
