"""Sampler: from the hidden states of a step to its tokens. A separate segment after the forward
pass, in four variants: greedy, plain and filtered, which graphs can capture, and one for batches in
which some row needs the host (logits_processor.py).

Tokens stay in the device rows, where the next step reads them; the host gets a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rorqual.engine.execution.drafters import Drafter, Drafting
from rorqual.engine.execution.forward_batch_builder import BatchPart, BuiltBatch, join
from rorqual.engine.execution.logits_processor import HostSampling
from rorqual.engine.execution.prompt_scorer import PromptScorer, PromptScores
from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.execution.sampling import sample
from rorqual.engine.execution.verifier import Verifier
from rorqual.engine.scheduling.scheduler_output import (
    SamplingVariant,
    SchedulerOutput,
    StepMetadata,
    StepResult,
)
from rorqual.models.transformer import Transformer
from rorqual.parallel.remote.steps_in_turns import BegunStep


@dataclass
class PendingStep:
    """A launched step. tokens: waits for its sampled tokens, as `Sampler` packs them; None on
    pipeline stages that do not sample, and where no request of this rank samples. host: their
    processing on the host. scores: log probabilities of prompts. drop_reason: waits for the device,
    and returns why all ranks drop the step, empty where they do not; the tokens of a dropped step
    are meaningless. begun: the rest of a step that ends during the next one. epoch: of calls to
    expert servers in which it was launched; computed: waits until the device has finished it, where
    needed."""

    tokens: Callable[[], Tensor] | None = None
    host: HostSampling | None = None
    scores: PromptScores | None = None
    drop_reason: Callable[[], str] | None = None
    begun: BegunStep | None = None
    epoch: int = 0
    computed: Callable[[], Tensor] | None = None

    def take(self, drawn: PendingStep) -> None:
        self.tokens = drawn.tokens
        self.host = drawn.host
        self.scores = drawn.scores


@dataclass
class DecodeSamples:
    """Samples of decoding requests. result: for the host, [R] tokens, or with speculation [R,
    num_speculative_tokens + 2]: tokens and the number of drafts. tokens [R, num_speculative_tokens
    + 1]. With speculation, for the drafter: following [R (num_speculative_tokens + 1)], the token
    after each row, and last [R], each request's last accepted row."""

    result: Tensor
    tokens: Tensor
    following: Tensor | None = None
    last: Tensor | None = None


class Sampler:
    """verifier and drafter: for speculation, which runs in the same segment. max_len: positions a
    request may reach."""

    def __init__(
        self,
        model: Transformer,
        rows: RequestState,
        verifier: Verifier,
        drafter: Drafter | None,
        max_len: int,
    ):
        self.model = model
        self.rows = rows
        self.verifier = verifier
        self.drafter = drafter
        self.max_len = max_len
        self.scorer = PromptScorer(model, rows)
        self.nothing = torch.zeros(0, dtype=torch.int64, device=rows.platform.device)

    @property
    def reads_hidden(self) -> bool:
        """Whether the forward pass must return the hidden states of all rows, not only of logits
        rows."""
        return self.drafter is not None and self.drafter.reads_hidden

    # ---- on the device

    def sample_captured(self, batch: BuiltBatch, hidden: Tensor, metadata: StepMetadata) -> Tensor:
        """Sample a decode-only step whose rows do not need the host; can be captured. Returns
        `DecodeSamples.result`."""
        assert batch.decode is not None
        wide = metadata.sampling is not SamplingVariant.GREEDY
        logits = self._logits(batch, hidden, metadata, wide)
        decoded = self._sample_decode(logits, batch.decode, metadata)
        self._draft(batch, hidden, decoded, None, metadata)
        return decoded.result

    def sample(
        self, output: SchedulerOutput, batch: BuiltBatch, hidden: Tensor, metadata: StepMetadata
    ) -> PendingStep:
        """Sample any step, eagerly. May wait for the device where some row needs the host."""
        scores = self.scorer.score(output, batch, hidden, metadata) if metadata.scores else None
        logits = raw = self._logits(batch, hidden, metadata) if any(metadata.logit_rows) else hidden
        host = None
        if any(params.needs_host for params in self.rows.sampling_params(output.sampled_slots)):
            host = HostSampling(output, self.rows)
            positions = batch.step.positions.index_select(0, batch.step.logit_rows) + 1
            logits = host.process(raw, positions)
        decoded, first = self._launch(output, batch, hidden, logits, metadata)
        if decoded is None and first is None:
            return PendingStep(scores=scores)
        if host is not None:
            drawn = [decoded.tokens.flatten() if decoded else None, first]
            host.record(raw, join([part for part in drawn if part is not None]))
        drawn_tokens = self.rows.platform.fetch(self._packed(decoded, first, metadata))
        return PendingStep(drawn_tokens, host, scores)

    def run_ahead(
        self, output: SchedulerOutput, batch: BuiltBatch, hidden: Tensor, metadata: StepMetadata
    ) -> None:
        """Launch what `sample` launches where no row needs the host."""
        self._launch(output, batch, hidden, self._logits(batch, hidden, metadata), metadata)

    def _launch(
        self,
        output: SchedulerOutput,
        batch: BuiltBatch,
        hidden: Tensor,
        logits: Tensor,
        metadata: StepMetadata,
    ) -> tuple[DecodeSamples | None, Tensor | None]:
        """Sample decoding requests and completed prompts, and draft."""
        decode = batch.decode
        prefill = batch.prefill
        split = output.logit_row(len(output.decode_slots))
        decoded = self._sample_decode(logits[:split], decode, metadata) if decode else None
        first = None
        if prefill and prefill.slots.shape[0]:
            first = self._sample_prefill(logits[split:], metadata.sampling, prefill)
        self._draft(batch, hidden, decoded, first, metadata)
        return decoded, first

    def _logits(
        self, batch: BuiltBatch, hidden: Tensor, metadata: StepMetadata, wide: bool = True
    ) -> Tensor:
        """wide: in fp32, see Transformer.logits."""
        if hidden.shape[0] != batch.step.logit_rows.shape[0]:  # hidden states of all rows
            hidden = hidden.index_select(0, batch.step.logit_rows)
        return self.model.logits(hidden, metadata.logit_rows, wide)

    def _sample_decode(
        self, logits: Tensor, decode: BatchPart, metadata: StepMetadata
    ) -> DecodeSamples:
        """Sample and verify; each request's row advances to its newest token."""
        rows = self.rows
        slots = decode.slots
        variant = metadata.sampling
        num_speculative_tokens = metadata.num_speculative_tokens
        if self.drafter is None:
            tokens = sample(logits, variant, slots, decode.segment.kv_lens, rows)
            rows.last_token.index_copy_(0, slots, tokens)
            rows.length.index_copy_(0, slots, decode.segment.kv_lens)
            return DecodeSamples(tokens, tokens[:, None])
        verified = self.verifier.verify(
            logits, variant, slots, decode.positions + 1, num_speculative_tokens
        )
        following, last = rows.ops.commit_tokens(
            rows.last_token,
            rows.length,
            slots,
            decode.segment.kv_lens,
            verified.tokens,
            verified.num_accepted,
        )
        if rows.history is not None:
            positions = decode.positions.view(-1, num_speculative_tokens + 1) + 1
            rows.history[slots[:, None], positions] = verified.tokens.clamp(min=0)
        return DecodeSamples(
            torch.cat((verified.tokens, verified.drafted[:, None]), 1),
            verified.tokens,
            following,
            last,
        )

    def _sample_prefill(
        self, logits: Tensor, variant: SamplingVariant, prefill: BatchPart
    ) -> Tensor:
        """First tokens [S] of completed prompts."""
        rows = self.rows
        slots = prefill.slots
        length = rows.length.index_select(0, slots)
        tokens = sample(logits, variant, slots, length, rows)
        rows.last_token.index_copy_(0, slots, tokens)
        if rows.history is not None:
            rows.history[slots, length] = tokens
        return tokens

    def _draft(
        self,
        batch: BuiltBatch,
        hidden: Tensor,
        decoded: DecodeSamples | None,
        first: Tensor | None,
        metadata: StepMetadata,
    ) -> None:
        """Run the drafter on every row of the step with the token after it."""
        if self.drafter is None:
            return
        following = []
        last = []
        slots = []
        ends = None
        bounds: tuple[int, ...] = ()
        count = 0
        num_drafts = metadata.num_speculative_tokens
        decode = batch.decode
        prefill = batch.prefill
        if decode and decoded and decoded.following is not None and decoded.last is not None:
            count = decode.ids.shape[0]
            following.append(decoded.following)
            last.append(decoded.last)
            slots.append(decode.slots)
            bounds = tuple(min(bound + num_drafts, self.max_len) for bound in decode.bounds)
        if prefill and prefill.following is not None:
            after = prefill.following
            if first is not None:
                after = after.index_copy(0, prefill.logit_rows, first)
                last.append(prefill.logit_rows + count)
                slots.append(prefill.slots)
                bounds += tuple(bound + num_drafts for bound in prefill.bounds)
            following.append(after)
            if prefill.ends is not None:
                ends = prefill.ends[0] + count, prefill.ends[1]
        work = Drafting(
            join(slots or [self.nothing]),
            join(last or [self.nothing]),
            bounds,
            batch.step,
            hidden,
            join(following or [self.nothing]),
            metadata,
            ends,
        )
        self.drafter.draft(work)

    def _packed(
        self, decoded: DecodeSamples | None, first: Tensor | None, metadata: StepMetadata
    ) -> Tensor:
        """Results of decoding and of finished prompts in one tensor, for a single copy to the
        host."""
        if self.drafter is not None and first is not None:
            columns = metadata.num_speculative_tokens + 2
            row = torch.full((first.shape[0], columns), -1, dtype=first.dtype, device=first.device)
            row[:, 0] = first
            row[:, -1] = 0
            first = row
        parts = [decoded.result if decoded else None, first]
        return join([part for part in parts if part is not None])

    # ---- on the host

    def collect(self, pending: PendingStep) -> StepResult:
        """Wait for a step's tokens and log probabilities, prompt scores included."""
        result = self._drawn(pending)
        if pending.host is not None:
            pending.host.finish(result)
        if pending.scores is not None:
            result.prompt_logprobs = pending.scores.finish()
        return result

    def _drawn(self, pending: PendingStep) -> StepResult:
        if pending.tokens is None:
            return StepResult([])
        drawn = pending.tokens().tolist()
        if self.drafter is None:
            return StepResult([[token] for token in drawn])
        return StepResult(
            [[token for token in row[:-1] if token >= 0] for row in drawn],
            [row[-1] for row in drawn],
        )
