"""ModelRunner: turns a plan into a Step on the device, runs the model, samples, and leaves the
token ids there for the next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.engine.execution.cuda_graphs import DecodeGraphs
from rorqual.engine.execution.forward_batch_builder import (
    BatchPart,
    BuiltBatch,
    ForwardBatchBuilder,
    join,
)
from rorqual.engine.execution.grammar import Matcher, mask_words
from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.execution.sampled_token_broadcast import SampledTokenBroadcast
from rorqual.engine.execution.sampler import (
    LogitRow,
    Logprobs,
    apply_bitmask,
    apply_logits_processors,
    sample,
)
from rorqual.engine.execution.speculative import (
    Drafter,
    Drafting,
    MTPDrafter,
    NgramDrafter,
    Verifier,
)
from rorqual.engine.scheduling.scheduler_output import (
    SamplingVariant,
    SchedulerOutput,
    StepMetadata,
    StepResult,
    sampling_variant_of,
)
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.models.transformer import Transformer
from rorqual.parallel.overlap import run_one
from rorqual.platforms.base import Platform
from rorqual.request import SamplingParams

if TYPE_CHECKING:
    from rorqual.engine.execution.compiled import CompiledForward


@dataclass(frozen=True)
class Speculation:
    """drafter: `mtp` or `ngram`; num_speculative_tokens: the most drafts a step. window: see
    MTPDrafter. rates: simulated acceptance by place."""

    drafter: str
    num_speculative_tokens: int
    window: bool = True
    rates: tuple[float, ...] = ()


@dataclass
class PendingStep:
    """A launched step: `drawn` fetches its tokens, `extra` log probabilities; `params` and
    `matchers` are those of the sampled rows."""

    drawn: Callable[[], Tensor] | None = None
    extra: list[Callable[[], Tensor]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    matchers: dict[int, Matcher] = field(default_factory=dict)
    logit_rows: list[int] = field(default_factory=list)


@dataclass
class DecodeSamples:
    """What decoding requests got. result: what goes home, [R] tokens, or [R,
    num_speculative_tokens + 2] tokens and the number of drafts; tokens [R,
    num_speculative_tokens + 1]. With speculation, for who drafts: following [R
    (num_speculative_tokens + 1)], the token after each row, and last [R], each request's last
    row that stands."""

    result: Tensor
    tokens: Tensor
    following: Tensor | None = None
    last: Tensor | None = None


class ModelRunner:
    """The Runner protocol over a model on one device."""

    def __init__(
        self,
        model: Transformer,
        pool: KVPool,
        platform: Platform,
        max_num_seqs: int,
        max_len: int,
        graphs: bool = False,
        speculation: Speculation | None = None,
        compiled: CompiledForward | None = None,
    ):
        """`max_len`: positions a row may reach, the drafts of all steps in flight included.
        `compiled` computes steps of decoding alone."""
        self.compiled = compiled
        self.model = model
        self.pool = pool
        self.platform = platform
        self.max_len = max_len
        most = speculation.num_speculative_tokens if speculation else 0
        self.rows = RequestState(
            max_num_seqs,
            -(-max_len // pool.spec.page_size),
            model.config.vocab_size,
            platform,
            most,
            model.ops,
        )
        self.rows.draws = model.mesh.last_stage
        exact = speculation is None
        self.build = ForwardBatchBuilder(self.rows, pool, model.rotary, exact, len(model.mtp))
        self.verifier = Verifier(self.rows, most, speculation.rates if speculation else ())
        self.drafter = self._drafter(speculation)
        self.shared = SampledTokenBroadcast(self.rows, model.mesh)
        self.graphs = (
            DecodeGraphs(self._decode_body, platform, max_num_seqs, self.rows.padding)
            if graphs
            else None
        )

    def _drafter(self, speculation: Speculation | None) -> Drafter | None:
        if speculation is None:
            return None
        if speculation.drafter == "mtp":
            return MTPDrafter(self.model, self.pool, self.rows, speculation.window)
        self.rows.keep_history(self.max_len + 1)
        return NgramDrafter(self.rows)

    @torch.inference_mode()
    def capture(
        self,
        variants: tuple[SamplingVariant, ...],
        draft_counts: tuple[int, ...] = (0,),
        sizes: Sequence[int] | None = None,
        ahead: bool = False,
    ) -> None:
        """Compile the forward pass where asked to, and where there are graphs capture those of
        every batch bucket, or of batch `sizes`. ahead: kernels are compiled side by side before."""
        if self.compiled:
            with self.platform.stream():
                self.compiled.compile(self._examples(draft_counts))
        if self.graphs:
            if (
                self.drafter
                and self.drafter.reads_hidden
                and set(variants) != {SamplingVariant.GREEDY}
            ):
                self.rows.keep_probs()  # captured graphs must not see it move
            if ahead:
                with self.platform.stream(), self.model.ops.compiling():
                    self.graphs.warm_up(variants, draft_counts, sizes)
            with self.platform.stream():
                self.graphs.capture(variants, draft_counts, sizes)

    def forget(self) -> None:
        """Let go of captured steps."""
        if self.graphs:
            self.graphs.graphs.clear()

    def _examples(self, draft_counts: tuple[int, ...]) -> list[ForwardBatch]:
        """Steps of padding rows: one token if there can be one alone, and several if there can
        be several."""
        most = max(draft_counts)
        shapes = [(1, 0)] if 0 in draft_counts else []
        if most or self.rows.padding > 1:
            requests = 2 if self.pool.num_pages != 2 * (most + 1) else 3
            shapes.append((requests, most))
        return [self._padding_step(*shape) for shape in shapes]

    def _padding_step(self, requests: int, num_speculative_tokens: int) -> ForwardBatch:
        slots = torch.full(
            (requests,), self.rows.padding, dtype=torch.int64, device=self.platform.device
        )
        return self.build.batch(
            self.build.decode(
                slots, (num_speculative_tokens + 1,) * requests, num_speculative_tokens
            ),
            None,
        ).step

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput, common: StepMetadata | None = None) -> PendingStep:
        """`common`: what this step's ranks agree on, where there are several; the plan is then that
        of this data-parallel rank."""
        with self.platform.stream():
            self.shared.settle([*plan.decode_slots, *(row.slot for row in plan.new_requests)])
            self.rows.apply(plan)
            pending = self._launch(plan, common or self._alone(plan))
            self.shared.start(plan.sampled_slots)
            return pending

    def _alone(self, plan: SchedulerOutput) -> StepMetadata:
        """Without other ranks, or with those of a single-rank benchmark, which do as this one."""
        asked = self.rows.asked(plan.sampled_slots)
        parts = [plan] * self.model.mesh.sizes.dp
        return StepMetadata.of(
            parts, sampling_variant_of(asked), any(params.needs_host for params in asked)
        )

    def _launch(self, plan: SchedulerOutput, common: StepMetadata) -> PendingStep:
        if self.graphs is not None and common.decodes:
            return self._replay(self.graphs, plan, common)
        batch = self._batch(plan, common)
        hidden = self._hidden(batch, common)
        if not self.model.mesh.last_stage:
            return PendingStep()
        return self._sample(plan, batch, hidden, common)

    def _replay(
        self, graphs: DecodeGraphs, plan: SchedulerOutput, common: StepMetadata
    ) -> PendingStep:
        """The whole step; where some row needs the host, the forward pass, whose hidden states are
        then sampled and drafted from as those of a step that nobody captured."""
        result = graphs.run(plan.decode_slots, common)
        if not self.model.mesh.last_stage:
            return PendingStep()
        if not common.host:
            return PendingStep(self.platform.fetch(result))
        return self._sample(plan, self._batch(plan, common), result.flatten(0, 1), common)

    def _batch(self, plan: SchedulerOutput, common: StepMetadata) -> BuiltBatch:
        decode = prefill = None
        if plan.decode_slots:
            slots = self.platform.to_device(torch.tensor(plan.decode_slots))
            decode = self.build.decode(
                slots, tuple(plan.decode_bounds), common.num_speculative_tokens
            )
        if plan.chunks:
            prefill = self.build.prefill(plan)
        return self.build.batch(decode, prefill, self.model.layout(common.tokens, common.decodes))

    def _decode_body(
        self, slots: Tensor, variant: SamplingVariant, num_speculative_tokens: int
    ) -> Tensor:
        """One decode step of padded rows, on the device alone: nothing here may depend on a value
        the host would have to read. Returns what is drawn (see DecodeSamples.result), or, where
        that needs the host, the hidden states [R, num_speculative_tokens + 1, hidden]."""
        rows = self.rows
        count = slots.shape[0]
        common = StepMetadata.padded(
            count, self.model.mesh.sizes.dp, variant, num_speculative_tokens
        )
        decode = self.build.decode(slots, (self.max_len,) * count, num_speculative_tokens)
        batch = self.build.batch(decode, None, self.model.layout(common.tokens, common.decodes))
        hidden = self._hidden(batch, common)
        result = slots
        if self.model.mesh.last_stage and common.host:
            result = hidden.unflatten(0, (count, num_speculative_tokens + 1))
        elif self.model.mesh.last_stage:
            logits = self._logits(batch, hidden, common, wide=variant is not SamplingVariant.GREEDY)
            drawn = self._sample_decode(logits, decode, common)
            result = drawn.result
            if self.drafter:
                self._draft(self.drafter, batch, hidden, drawn, None, common)
        self.model.mesh.pp.flush()  # a captured graph must hold the end of what it starts
        rows.length[rows.padding :].zero_()
        return result

    def collect(self, pending: PendingStep) -> StepResult:
        if pending.drawn is None:
            return StepResult([])
        drawn = pending.drawn().tolist()
        if self.drafter is None:
            result = StepResult([[token] for token in drawn])
        else:
            result = StepResult(
                [[token for token in row[:-1] if token >= 0] for row in drawn],
                [row[-1] for row in drawn],
            )
        for row, matcher in pending.matchers.items():
            for token in result.tokens[row]:
                matcher.accept(token)
        if pending.extra:
            self._read_logprobs(pending, result)
        return result

    def _read_logprobs(self, pending: PendingStep, result: StepResult) -> None:
        found = Logprobs(*(fetch() for fetch in pending.extra))
        for row, params in enumerate(pending.params):
            if params.logprobs is not None:
                first = pending.logit_rows[row]
                result.logprobs[row] = [
                    found.row(first + i, params.logprobs) for i in range(len(result.tokens[row]))
                ]

    # ---- after the forward pass

    def _hidden(self, batch: BuiltBatch, common: StepMetadata) -> Tensor:
        """[T, hidden] where a drafter reads all of them, else those of the step's logit rows. One
        that only decodes has no others: nothing is picked there, and the last norm may add up what
        experts gave."""
        if self.compiled and common.decodes:
            return self.compiled(batch.step)
        every_row = common.decodes or (self.drafter is not None and self.drafter.reads_hidden)
        return run_one(self.model.forward(batch.step, every_row=every_row))

    def _logits(
        self, batch: BuiltBatch, hidden: Tensor, common: StepMetadata, wide: bool = True
    ) -> Tensor:
        if self.drafter is not None and self.drafter.reads_hidden and not common.decodes:
            # of a decode step every row is wanted
            hidden = hidden.index_select(0, batch.step.logit_rows)
        return self.model.logits(hidden, common.logit_rows, wide)

    def _sample_decode(
        self, logits: Tensor, decode: BatchPart, common: StepMetadata
    ) -> DecodeSamples:
        """Draw and verify; each request's row moves on to its newest token."""
        rows = self.rows
        slots = decode.slots
        variant = common.sampling
        num_speculative_tokens = common.num_speculative_tokens
        if self.drafter is None:
            tokens = sample(logits, variant, slots, decode.segment.kv_lens, rows)
            rows.last_token.index_copy_(0, slots, tokens)
            rows.length.index_copy_(0, slots, decode.segment.kv_lens)
            return DecodeSamples(tokens, tokens[:, None])
        verdict = self.verifier.verify(
            logits, variant, slots, decode.positions + 1, num_speculative_tokens
        )
        following, last = rows.ops.commit_tokens(
            rows.last_token,
            rows.length,
            slots,
            decode.segment.kv_lens,
            verdict.tokens,
            verdict.num_accepted,
        )
        if rows.history is not None:
            places = decode.positions.view(-1, num_speculative_tokens + 1) + 1
            rows.history[slots[:, None], places] = verdict.tokens.clamp(min=0)
        return DecodeSamples(
            torch.cat((verdict.tokens, verdict.drafted[:, None]), 1),
            verdict.tokens,
            following,
            last,
        )

    def _sample_prefill(
        self, logits: Tensor, variant: SamplingVariant, prefill: BatchPart
    ) -> Tensor:
        """First tokens [S] of the prompts that are complete."""
        rows = self.rows
        slots = prefill.slots
        length = rows.length.index_select(0, slots)
        tokens = sample(logits, variant, slots, length, rows)
        rows.last_token.index_copy_(0, slots, tokens)
        if rows.history is not None:
            rows.history[slots, length] = tokens
        return tokens

    def _sample(
        self, plan: SchedulerOutput, batch: BuiltBatch, hidden: Tensor, common: StepMetadata
    ) -> PendingStep:
        """The eager way, which may ask for the host's word in between."""
        host_slots = plan.sampled_slots
        decode = batch.decode
        prefill = batch.prefill
        params = self.rows.asked(host_slots)
        width = common.num_speculative_tokens + 1
        pending = PendingStep(params=params)
        logits = raw = self._logits(batch, hidden, common) if any(common.logit_rows) else hidden
        full = any(p.needs_host for p in params)
        places: list[LogitRow] = []
        if full:
            places = self._places(plan, decode)
            logits = self._edited(raw, places, batch, pending, plan)
        split = len(plan.decode_slots) * width
        drawn = self._sample_decode(logits[:split], decode, common) if decode else None
        first = None
        if prefill and prefill.slots.shape[0]:
            first = self._sample_prefill(logits[split:], common.sampling, prefill)
        if self.drafter:
            self._draft(self.drafter, batch, hidden, drawn, first, common)
        if not host_slots:
            return pending
        if full:
            self._after_full(pending, raw, drawn, first, places, plan)
        pending.drawn = self.platform.fetch(self._joined(drawn, first, width))
        return pending

    def _joined(self, drawn: DecodeSamples | None, first: Tensor | None, width: int) -> Tensor:
        """Results of decoding and of finished prompts in one tensor, so that one copy brings
        them home."""
        if self.drafter is not None and first is not None:
            row = torch.full(
                (first.shape[0], width + 1), -1, dtype=first.dtype, device=first.device
            )
            row[:, 0] = first
            row[:, -1] = 0
            first = row
        return join([part for part in (drawn.result if drawn else None, first) if part is not None])

    def _places(self, plan: SchedulerOutput, decode: BatchPart | None) -> list[LogitRow]:
        places = []
        if decode is not None:
            ahead = self.rows.drafts.index_select(0, decode.slots)
            for row, slot in enumerate(plan.decode_slots):
                places += [
                    LogitRow(slot, ahead[row, :j] if plan.num_speculative_tokens else None)
                    for j in range(plan.num_speculative_tokens + 1)
                ]
        return places + [LogitRow(chunk.slot) for chunk in plan.chunks if chunk.sample]

    def _edited(
        self,
        raw: Tensor,
        places: list[LogitRow],
        batch: BuiltBatch,
        pending: PendingStep,
        plan: SchedulerOutput,
    ) -> Tensor:
        positions = batch.step.positions.index_select(0, batch.step.logit_rows) + 1
        matchers = self.rows.matchers
        logits = apply_logits_processors(raw, places, positions, self.rows)
        pending.matchers = {
            row: matchers[slot] for row, slot in enumerate(plan.sampled_slots) if slot in matchers
        }
        if pending.matchers:
            logits = apply_bitmask(
                logits, self.platform.to_device(self._mask(pending.matchers, plan, len(places)))
            )
        return logits

    def _mask(self, matchers: dict[int, Matcher], plan: SchedulerOutput, rows: int) -> Tensor:
        """[logit rows, words]: what each grammar allows next, along the drafts as far as it
        allows them. Waits for the drafts."""
        decoding = len(plan.decode_slots)
        mask = torch.full((rows, mask_words(self.rows.vocab)), -1, dtype=torch.int32)
        drafts = self.rows.drafts[
            self.platform.to_device(torch.tensor(plan.decode_slots, dtype=torch.int64))
        ].tolist()
        for row, matcher in matchers.items():
            ahead = drafts[row][: plan.num_speculative_tokens] if row < decoding else []
            at = plan.logit_row(row)
            moved = 0
            matcher.fill(mask, at)
            for draft in ahead:
                if not matcher.accept(draft):
                    break
                moved += 1
                if matcher.done:
                    break
                matcher.fill(mask, at + moved)
            matcher.rollback(moved)
        return mask

    def _after_full(
        self,
        pending: PendingStep,
        raw: Tensor,
        drawn: DecodeSamples | None,
        first: Tensor | None,
        places: list[LogitRow],
        plan: SchedulerOutput,
    ) -> None:
        """Count what was put out, for penalties, and look up log probabilities."""
        tokens = join(
            [
                part
                for part in (drawn.tokens.flatten() if drawn else None, first)
                if part is not None
            ]
        )
        self.rows.count(
            self.platform.to_device(torch.tensor([place.slot for place in places])), tokens
        )
        most = max((p.logprobs for p in pending.params if p.logprobs is not None), default=None)
        if most is not None:
            pending.logit_rows = [plan.logit_row(row) for row in range(len(pending.params))]
            pending.extra = [
                self.platform.fetch(tensor)
                for tensor in Logprobs.of(raw, tokens.clamp(min=0), most).tensors()
            ]

    def _draft(
        self,
        drafter: Drafter,
        batch: BuiltBatch,
        hidden: Tensor,
        drawn: DecodeSamples | None,
        first: Tensor | None,
        common: StepMetadata,
    ) -> None:
        """Hand the drafter every row of the step with the token after it."""
        following = []
        last = []
        slots = []
        ends = None
        bounds: tuple[int, ...] = ()
        count = 0
        if batch.decode and drawn and drawn.following is not None and drawn.last is not None:
            decode = batch.decode
            count = batch.decode.ids.shape[0]
            following.append(drawn.following)
            last.append(drawn.last)
            slots.append(decode.slots)
            bounds = tuple(
                min(bound + common.num_speculative_tokens, self.max_len) for bound in decode.bounds
            )
        if batch.prefill and batch.prefill.following is not None:
            prefill = batch.prefill
            ahead = batch.prefill.following
            if first is not None:
                ahead = ahead.index_copy(0, prefill.logit_rows, first)
                last.append(prefill.logit_rows + count)
                slots.append(prefill.slots)
                bounds += tuple(bound + common.num_speculative_tokens for bound in prefill.bounds)
            following.append(ahead)
            if prefill.ends is not None:
                ends = prefill.ends[0] + count, prefill.ends[1]
        none = self.build.nothing
        rows = (join(slots or [none]), join(last or [none]))
        ahead = join(following or [none])
        drafter.draft(Drafting(*rows, bounds, batch.step, hidden, ahead, common, ends))
