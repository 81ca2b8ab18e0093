"""Speculative decoding, the second half: make drafts for the next step (verifier.py verifies them
there). A fixed sequence of device operations, so that a graph can capture it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.engine.captured_forward import CapturedForward
from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.execution.sampling import DRAFT, TOKEN, distribution
from rorqual.engine.scheduling.scheduler_output import SamplingVariant, StepMetadata
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.models.transformer import Pass, Predictor, Transformer
from rorqual.ops.interface import AttentionMetadata, TokenPlaces
from rorqual.parallel.overlap import run, run_one


@dataclass(frozen=True)
class Speculation:
    """drafter: `mtp` or `ngram`; num_speculative_tokens: the most drafts a step. window: see
    MTPDrafter. rates: simulated acceptance by position."""

    drafter: str
    num_speculative_tokens: int
    window: bool = True
    rates: tuple[float, ...] = ()


@dataclass
class Drafting:
    """A drafter's input once a step has been sampled. N requests continue.

    slots [N]; last_rows [N]: the packed row of each request's last verified token, whose hidden
    state predicts the newest one; max_kv_lens: host bounds of the cached entries once every draft
    is written. step, hidden [T, hidden] and following [T], the token after each row, are those of
    the step. common: the metadata shared by all ranks, which draft together; its `sampled` is N of
    each data-parallel rank. ends: see BatchPart; rows of the step.
    """

    slots: Tensor
    last_rows: Tensor
    max_kv_lens: tuple[int, ...]
    step: ForwardBatch
    hidden: Tensor
    following: Tensor
    common: StepMetadata
    ends: tuple[Tensor, Tensor] | None = None


class Drafter(Protocol):
    """`reads_hidden`: the step must keep the hidden states of all its rows."""

    reads_hidden: bool

    def draft(self, work: Drafting) -> None:
        """Write into the device rows the drafts, up to work.common.num_speculative_tokens a
        request, their number, and the distributions they were drawn from."""


class MTPDrafter:
    """Drafts with the checkpoint's prediction modules; the last module is applied again where
    num_speculative_tokens exceeds their number.

    `window` runs a module over all rows of a step, so that its cache is computed from the main
    model's hidden states; without it a step in which all ranks only decode runs only the last row
    and keeps the entries that drafting wrote.
    """

    reads_hidden = True

    def __init__(
        self,
        model: Transformer,
        pool: KVPool,
        rows: RequestState,
        window: bool = True,
        captured: CapturedForward | None = None,
    ):
        self.captured = captured
        self.model = model
        self.pool = pool
        self.rows = rows
        self.window = window
        self.page_size = pool.spec.page_size

    def draft(self, work: Drafting) -> None:
        """Every module in use updates its cache in every step: num_speculative_tokens may rise
        again."""
        hidden = work.hidden
        step = work.step
        following = work.following
        last = work.last_rows
        common = work.common
        num_speculative_tokens = work.common.num_speculative_tokens
        variant = work.common.sampling
        positions = step.positions.index_select(0, last)
        if not self.window and common.decodes:
            step = self._row_step(work, positions)
            hidden = hidden.index_select(0, last)
            following = following.index_select(0, last)
            last = self._all(last)
        target = positions + 2  # of the first draft: after the newest token
        newest = following.index_select(0, last)
        modules = self.model.mtp
        kept = min(len(modules), self.rows.most_drafts)
        for place in range(max(kept, num_speculative_tokens if any(common.sampled) else 0)):
            if place >= len(modules):
                hidden = hidden.index_select(0, last)
                last = self._all(last)
                positions = positions + 1
                step = self._row_step(work, positions)
                following = newest
            hidden = self._hidden(min(place, len(modules) - 1), following, hidden, step)
            if any(common.sampled) and place < max(num_speculative_tokens, kept - 1):
                wide = variant is not SamplingVariant.GREEDY
                logits = self.model.logits(hidden.index_select(0, last), common.sampled, wide)
                newest = self._propose(logits, place, variant, work.slots, target + place)
            if place + 1 < len(modules):
                following = following.roll(-1, 0).index_copy(0, last, newest)
                if work.ends is not None:  # else the next request's first row would follow
                    rows, after = work.ends
                    following = following.index_copy(0, rows, after[:, place + 1])
        self.rows.num_drafts.index_copy_(
            0,
            work.slots,
            self.rows.limit.index_select(0, work.slots).clamp(max=num_speculative_tokens),
        )

    def _hidden(self, index: int, following: Tensor, hidden: Tensor, step: ForwardBatch) -> Tensor:
        """A module's output for the tokens after the step's and the previous hidden states."""
        module = self.model.mtp[index]
        captured = self.captured
        if captured is not None and captured.takes(step):
            work = partial(self._one_pass, module)
            return captured.run(f"module {index}", work, step, following, hidden)
        passes = []
        start = 0
        for part in step.parts or (step,):
            rows = slice(start, start + part.num_tokens)
            passes.append(self._pass(module, part, following[rows], hidden[rows]))
            start = rows.stop
        with self.rows.ops.beside_messages() if step.parts else nullcontext():
            found = run(passes)
        return found[0] if len(found) == 1 else torch.cat(found)

    def _pass(
        self, module: Predictor, step: ForwardBatch, following: Tensor, hidden: Tensor
    ) -> Pass:
        assert self.model.embed is not None, "prediction modules have the embedding beside them"
        return module.forward(self.model.embed.forward(following, step.layout), hidden, step)

    def _one_pass(
        self, module: Predictor, step: ForwardBatch, following: Tensor, hidden: Tensor
    ) -> Tensor:
        return run_one(self._pass(module, step, following, hidden))

    def _all(self, rows: Tensor) -> Tensor:
        return torch.arange(rows.shape[0], device=rows.device)

    def _row_step(self, work: Drafting, positions: Tensor) -> ForwardBatch:
        """One row for each request, at the given positions."""
        longest = -(-max(work.max_kv_lens, default=1) // self.page_size)
        tables = self.rows.tables[work.slots, :longest]
        bounds = work.max_kv_lens
        each = self._all(positions)
        # a row's position equals its cached length; its token is not known yet
        _, _, mapping, lens = self.rows.ops.decode_rows(
            positions, positions, self.rows.drafts, tables, each, 0, self.page_size
        )
        segment = (
            AttentionMetadata(tables, lens, (1,) * len(bounds), bounds, exact=False)
            if bounds
            else None
        )
        places = TokenPlaces(*self.model.rotary.rows(positions), mapping)
        padded = work.step.layout.padded
        layout = self.model.layout(work.common.sampled, decode=True)
        layout = layout.with_padding(padded and replace(padded, each=1))
        step = ForwardBatch(
            positions, positions, places, positions, self.pool, segment, layout=layout
        )
        parts = work.common.row_micro_batches
        if parts:
            self.model.split(step, parts, decode=True)
        return step

    def _propose(
        self, logits: Tensor, place: int, variant: SamplingVariant, slots: Tensor, positions: Tensor
    ) -> Tensor:
        """Draft number `place` of each request, [N], for the token at `positions`."""
        rows = self.rows
        ops = self.rows.ops
        if variant is SamplingVariant.GREEDY:
            tokens = ops.argmax(logits)
        else:
            given = distribution(logits, variant, slots, rows)
            ops.write_probs(
                given, rows.keep_probs().flatten(0, 1), slots * rows.most_drafts + place
            )
            coupled = rows.coupled.index_select(0, slots)
            seeds = rows.seed.index_select(0, slots)
            numbers = torch.where(
                coupled, ops.uniform(seeds, positions, TOKEN), ops.uniform(seeds, positions, DRAFT)
            )
            tokens = ops.sample_from(given, numbers)
        rows.drafts[slots, place] = tokens
        return tokens


class NgramDrafter:
    """N-gram prompt lookup: drafts the tokens that followed the latest of the longest earlier
    occurrences of the last tokens.

    At least `shortest`, at most `longest` tokens are matched. Works for every model; good where
    outputs repeat their inputs.
    """

    reads_hidden = False

    def __init__(self, rows: RequestState, shortest: int = 2, longest: int = 4):
        self.rows = rows
        self.shortest = shortest
        self.longest = longest

    def draft(self, work: Drafting) -> None:
        rows = self.rows
        slots = work.slots
        num_speculative_tokens = work.common.num_speculative_tokens
        if not slots.shape[0]:
            return
        if not num_speculative_tokens:
            rows.num_drafts.index_fill_(0, slots, 0)  # drafts of an earlier step are outdated
            return
        assert rows.history is not None
        known = rows.length.index_select(0, slots) + 1
        history = rows.history.index_select(0, slots)[:, : max(work.max_kv_lens) + 1]
        end, agree = self._best_match(history, known)
        places = torch.arange(num_speculative_tokens, device=slots.device)
        ahead = end[:, None] + 1 + places
        rows.drafts[slots, :num_speculative_tokens] = history.gather(
            1, ahead.clamp(max=history.shape[1] - 1)
        )
        found = torch.where(
            agree >= self.shortest, (known - 1 - end).clamp(max=num_speculative_tokens), 0
        )
        rows.num_drafts.index_copy_(
            0, slots, torch.minimum(found, rows.limit.index_select(0, slots))
        )

    def _best_match(self, history: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """(position at which the best earlier match ends, its length), [N] each."""
        width = history.shape[1]
        places = torch.arange(width, device=history.device)
        run = (places < known[:, None] - 1).long()
        length = torch.zeros_like(run)
        for back in range(self.longest):
            last = history.gather(1, (known - 1 - back).clamp(min=0)[:, None])
            shifted = torch.nn.functional.pad(history, (back, 0), value=-1)[:, :width]
            run = run * (shifted == last) * (known > back)[:, None]
            length = length + run
        best = (length * width + places).max(1).values
        return best % width, best // width
