"""ModelRunner: turns a plan into a Step on the device, runs the model, samples, and leaves the token ids there for the next step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.engine.graphs import DecodeGraphs
from rorqual.engine.plan import Chunk, Plan, StepResult
from rorqual.engine.rows import Rows
from rorqual.engine.sampler import Variant, choose, row_logprobs, sample, variant_of
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

    def __init__(self, model: Transformer, pool: KVPool, platform: Platform, max_num_seqs: int, max_model_len: int, graphs: bool = False):
        self.model, self.pool, self.platform = model, pool, platform
        self.max_model_len = max_model_len
        self.page_size = pool.spec.page_size
        self.rows = Rows(max_num_seqs, -(-max_model_len // self.page_size), model.config.vocab_size, platform)
        self.graphs = DecodeGraphs(self._decode_body, platform, max_num_seqs, self.rows.padding) if graphs else None

    @torch.inference_mode()
    def record(self, variants: tuple[Variant, ...]) -> None:
        """Record decode graphs for every batch bucket; without graphs there is nothing to do."""
        if self.graphs:
            with self.platform.stream():
                self.graphs.record(variants)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Pending:
        with self.platform.stream():
            self.rows.apply(plan)
            variant = self._recorded_variant(plan)
            if self.graphs and variant is not None:
                return Pending([self.platform.fetch(self.graphs.run(plan.decode_slots, variant))], [])
            step, sampled_slots = self._build(plan)
            hidden = straight(self.model.forward(step))
            return self._sample(plan, hidden, sampled_slots)

    def _recorded_variant(self, plan: Plan) -> Variant | None:
        """How to sample a step that a graph can hold: decoding alone, nothing that needs the host."""
        if self.graphs is None or plan.chunks:
            return None
        variant = variant_of(self.rows.asked(plan.decode_slots))
        return None if variant is Variant.FULL else variant

    def _decode_body(self, slots: Tensor, variant: Variant) -> Tensor:
        """One decode step of padded rows, on the device alone: nothing here may depend on a value the host would have to read."""
        rows = self.rows
        part = self._decode_part(slots, (self.max_model_len,) * slots.shape[0])
        cos, sin = self.model.rotary.rows(part.positions)
        step = Step(part.ids, part.positions, part.slot_mapping, cos, sin, part.logit_rows, self.pool, part.segment)
        logits = self.model.logits(straight(self.model.forward(step)))
        token_ids = choose(logits, variant, slots, rows.length.index_select(0, slots), rows)
        rows.last_token.index_copy_(0, slots, token_ids)
        rows.length[rows.padding :].zero_()
        return token_ids

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
        return Pending([self.platform.fetch(tensor) for tensor in sampled.tensors()], rows.asked(host_slots))

    def _build(self, plan: Plan) -> tuple[Step, Tensor]:
        """The step, and the slots of the rows it samples. Row lengths move on to what is cached after the step."""
        decode = None
        if plan.decode_slots:
            decode = self._decode_part(self.platform.to_device(torch.tensor(plan.decode_slots)), tuple(plan.decode_bounds))
        prefill = self._prefill_part(plan) if plan.chunks else None
        parts = [part for part in (decode, prefill) if part]
        ids, positions, slot_mapping, logit_rows, slots = (_join([part.columns()[i] for part in parts]) for i in range(5))
        if decode and prefill:
            logit_rows = torch.cat((decode.logit_rows, prefill.logit_rows + len(plan.decode_slots)))
        cos, sin = self.model.rotary.rows(positions)
        segments = (decode.segment if decode else None, prefill.segment if prefill else None)
        return Step(ids, positions, slot_mapping, cos, sin, logit_rows, self.pool, *segments), slots

    def _decode_part(self, slots: Tensor, bounds: tuple[int, ...]) -> Part:
        rows = self.rows
        positions = rows.length.index_select(0, slots)
        tables = rows.tables[slots, : self._pages(max(bounds))]
        lens = positions + 1
        rows.length.index_copy_(0, slots, lens)
        segment = Segment(tables, lens, (1,) * len(bounds), bounds)
        mapping = self._slot_mapping(tables, positions, None)
        count = torch.arange(len(bounds), device=self.platform.device)
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
