"""ModelRunner: turns a scheduler output into a forward batch on the device, runs the model or
replays a captured step, and hands hidden states to the sampler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.engine.captured_forward import CapturedForward
from rorqual.engine.execution.cuda_graphs import AFTER_FORWARD, DecodeGraphs
from rorqual.engine.execution.drafters import Drafter, MTPDrafter, NgramDrafter, Speculation
from rorqual.engine.execution.forward_batch_builder import (
    BatchPart,
    BuiltBatch,
    ForwardBatchBuilder,
)
from rorqual.engine.execution.piecewise.attention import (
    PART_ROWS,
    PROMPT_ROWS,
    CapturedAttention,
    CapturedRows,
    DecodeRows,
    PromptRows,
    prompt_bounds,
)
from rorqual.engine.execution.piecewise.graphs import PiecewiseGraphs
from rorqual.engine.execution.piecewise.parts import PartRecorder, PiecewiseParts
from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.execution.sampled_token_broadcast import SampledTokenBroadcast
from rorqual.engine.execution.sampler import PendingStep, Sampler
from rorqual.engine.execution.verifier import Verifier
from rorqual.engine.kernels_ahead import Parts
from rorqual.engine.micro_batches.policy import FixedParts, MicroBatchPolicy
from rorqual.engine.scheduling.buckets import bucket_sizes
from rorqual.engine.scheduling.scheduler_output import (
    PrefillChunk,
    SamplingVariant,
    SchedulerOutput,
    StepMetadata,
    StepResult,
)
from rorqual.errors import ExpertsMissing
from rorqual.layers.forward_batch import ForwardBatch, PieceRecorder
from rorqual.models.transformer import Layer, Transformer
from rorqual.ops.interface import TokenPlaces
from rorqual.ops.padded_rows import PaddedRows
from rorqual.parallel.exchange_policy import captured_prompt_tokens
from rorqual.parallel.overlap import run, run_one
from rorqual.parallel.remote.step_calls import StepCalls
from rorqual.parallel.remote.steps_in_turns import StepsInTurns
from rorqual.platforms.base import Platform, Uncaptured

if TYPE_CHECKING:
    from rorqual.cache.host_memory import HostMemory, LayersToCome
    from rorqual.cache.written_layers import WrittenLayers
    from rorqual.engine.balance.mover import ExpertMover
    from rorqual.engine.execution.compiled import CompiledForward
    from rorqual.engine.npu.compiled import NpuCompiledForward


class ModelRunner:
    """Runs steps of a model on one device."""

    def __init__(
        self,
        model: Transformer,
        pool: KVPool,
        platform: Platform,
        max_num_seqs: int,
        max_len: int,
        graphs: bool = False,
        speculation: Speculation | None = None,
        compiled: CompiledForward | NpuCompiledForward | None = None,
        piecewise_tokens: int = 0,
        captured: CapturedForward | None = None,
    ):
        """`max_len`: positions a row may reach, the drafts of all steps in flight included.
        `compiled` computes steps of decoding alone. piecewise_tokens: steps with prompts of up to
        this many tokens are captured piecewise. captured: forward passes of decode-only steps, on a
        CPU."""
        self.compiled = compiled
        self.captured = captured
        self.mover: ExpertMover | None = None
        self.calls: StepCalls | None = None  # to expert servers, from the device
        # whether a step is dropped: requested after it; the reply waits for the device
        self.agree: Callable[[], Callable[[], str]] | None = None
        self.shares_prefixes = False  # whether requests may have pages in common
        self.batched_tokens = 0  # most of a step; 0: steps launched eagerly are not run ahead
        self.micro_batches: MicroBatchPolicy = FixedParts()
        self.host: HostMemory | None = None
        self.watch: WrittenLayers | None = None  # of the next step, where transfers read its pages
        self.turns: StepsInTurns | None = None
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
        # of several ranks each layer's exchange counts its calls
        few_layers = self._few_layers if model.mesh.is_single else None
        self.build = ForwardBatchBuilder(self.rows, pool, model.rotary, exact, len(model.mtp))
        verifier = Verifier(self.rows, most, speculation.rates if speculation else ())
        self.drafter = self._drafter(speculation)
        self.sampler = Sampler(model, self.rows, verifier, self.drafter, max_len)
        self.shared = SampledTokenBroadcast(self.rows, model.mesh)
        self.graphs = (
            DecodeGraphs(
                self._decode_body,
                Uncaptured(platform) if compiled and compiled.fixed_shapes else platform,
                max_num_seqs,
                self.rows.padding,
                self._sample_body,
                few_layers,
            )
            if graphs
            else None
        )
        # of captured forward passes, by requests and drafts: what is sampled from
        self.unsampled: dict[tuple[int, int], tuple[BuiltBatch, Tensor]] = {}
        self.pieces = (
            PiecewiseGraphs(self._piecewise_body, platform, piecewise_tokens, few_layers)
            if graphs and piecewise_tokens
            else None
        )
        self.parts: PiecewiseParts | None = None  # in `pieces`

    def capture_parts(self, most: Callable[[int], int]) -> None:
        """Capture steps in two micro-batches too, in pieces, where steps are captured in pieces and
        messages are the process group's. most: tokens of a micro-batch, for the most tokens of a
        captured step. Call before `compile_ahead` and `capture`."""
        mesh = self.model.mesh
        axes = mesh.group_axes
        if self.pieces is None or not axes or mesh.sizes.pp > 1:
            return
        if any(axis.shares_memory for axis in axes):
            return
        tokens = most(self.pieces.sizes[-1])
        if tokens > 0:
            self.parts = PiecewiseParts(self._parts_body, self.platform, tokens)

    def _drafter(self, speculation: Speculation | None) -> Drafter | None:
        if speculation is None:
            return None
        if speculation.drafter == "mtp":
            return MTPDrafter(self.model, self.pool, self.rows, speculation.window, self.captured)
        self.rows.keep_history(self.max_len + 1)
        return NgramDrafter(self.rows)

    @torch.inference_mode()
    def compile_ahead(
        self,
        variants: tuple[SamplingVariant, ...],
        draft_counts: tuple[int, ...] = (0,),
        sizes: Sequence[int] | None = None,
        known: Collection[str] | None = None,
    ) -> list[str] | None:
        """Compile the kernels of what `capture` will capture, in parallel. They are launched empty,
        for one layer of each kind: launching all layers would take as long again as compiling.
        known: what an earlier call for the same engine returned, so that no more is launched.
        Returns the parts that met new kernels, None where nothing is compiled."""
        if self.graphs is None:
            return None
        parts = Parts(known)
        self._compile(draft_counts)
        self._keep_probs(variants)
        # a compiled forward pass would be recompiled for fewer layers
        layers = nullcontext() if self.compiled else self.model.one_layer_of_each_kind()
        unannounced = self.calls.only_compiled() if self.calls else nullcontext()
        with self.platform.stream(), self.model.ops.compiling() as count, layers, unannounced:
            parts.count = count
            self.graphs.warm_up(variants, draft_counts, sizes, parts)
            if self.pieces:
                self.pieces.warm_up(parts)
                if self.parts:
                    self.parts.warm_up(parts)
                self._warm_mixed_steps(self.pieces, draft_counts, parts)
            self._warm_eager_steps(draft_counts, parts)
        self.graphs.loaded = not self.compiled
        if self.pieces:
            self.pieces.loaded = self.graphs.loaded
        return None if count is None else parts.met

    @torch.inference_mode()
    def capture(
        self,
        variants: tuple[SamplingVariant, ...],
        draft_counts: tuple[int, ...] = (0,),
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Compile the forward pass where configured; with graphs, capture those of every batch
        bucket, or of batch sizes `sizes`."""
        self._compile(draft_counts)
        if self.graphs:
            self._keep_probs(variants)
            self.graphs.calls = self.calls
            with self.platform.stream():
                self.graphs.capture(variants, draft_counts, sizes)
                if self.pieces:
                    self.pieces.calls = self.calls
                    self._capture_prompts(self.pieces)
                    if not self.graphs.loaded:
                        self._warm_mixed_steps(self.pieces, draft_counts, Parts())
                    attention = self.pieces.attention
                    rows = self._decode_rows(attention, self.pieces.sizes[-1], draft_counts)
                    self.pieces.capture_attention(rows)
                if self.parts:
                    most = self.parts.sizes[-1]
                    self.parts.capture_attention(
                        lambda part: self._decode_rows(part, most, draft_counts)
                    )

    @torch.inference_mode()
    def capture_prompts(self) -> None:
        """Capture steps with prompts alone, and leave that out of `capture`."""
        if self.pieces:
            with self.platform.stream():
                self._capture_prompts(self.pieces)

    def _capture_prompts(self, pieces: PiecewiseGraphs) -> None:
        if pieces.graphs:
            return
        pieces.capture()
        pieces.capture_attention(self._prompt_rows_of_pieces(pieces))
        if self.parts:
            self.parts.capture()
            self.parts.capture_attention(self._prompt_rows_of_part)

    def _compile(self, draft_counts: tuple[int, ...]) -> None:
        """Compile the forward pass, where configured and not yet done."""
        if self.compiled:
            with self.platform.stream():
                self.compiled.compile(self._examples(draft_counts))

    def _few_layers(self) -> AbstractContextManager[None]:
        return self.model.only(self.kinds)

    @cached_property
    def kinds(self) -> list[Layer]:
        """One layer of each kind; comparing them takes longer than launching them."""
        return self.model.first_of_each_kind()

    def _keep_probs(self, variants: tuple[SamplingVariant, ...]) -> None:
        """Allocate draft probabilities before capture, so that captured graphs keep their
        address."""
        reads = self.drafter is not None and self.drafter.reads_hidden
        if reads and set(variants) != {SamplingVariant.GREEDY}:
            self.rows.keep_probs()

    def drop_captured(self) -> None:
        """Release captured steps."""
        if self.captured:
            self.captured.forget()
        if self.graphs:
            self.graphs.graphs.clear()
            self.unsampled.clear()
        if self.pieces:
            self.pieces.drop()
        if self.parts:
            self.parts.drop()

    def _examples(self, draft_counts: tuple[int, ...]) -> list[ForwardBatch]:
        """Steps of padding rows: one of a single token and one of several, as far as either can
        occur."""
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
    def launch(self, output: SchedulerOutput, metadata: StepMetadata) -> PendingStep:
        """`output` is this data-parallel rank's part of a step, `metadata` what all ranks agree
        on."""
        watch, self.watch = self.watch, None
        with self.platform.stream():
            epoch = 0 if self.calls is None else self.calls.begin(self._finish_begun)
            if metadata.switch:
                assert self.mover is not None, "experts move where enable_eplb is on"
                self.mover.switch(metadata.switch)
            named = [*output.decode_slots, *(row.slot for row in output.new_requests)]
            self.shared.settle(named)
            coming = self._start_copies(output, metadata)  # first, as they take longest
            self.rows.apply(output)
            # a step of copies alone; all ranks know that it has no tokens
            pending = PendingStep()
            if any(metadata.tokens):
                with self.model.ops.computing(not output.chunks):
                    pending = self._launch(output, metadata, watch, coming)
            if watch is not None:
                watch.whole()
            self.shared.start(output.sampled_slots)
            if self.host is not None and output.copies_settled:
                self.host.settle()
            if self.agree is not None:
                pending.drop_reason = self.agree()
            elif self.calls is not None:
                pending.epoch = epoch
                if pending.begun is None:  # else at its end
                    pending.computed = self.platform.fetch(self.calls.sent[:1, :1])
            return pending

    def _finish_begun(self) -> None:
        if self.turns is not None:
            self.turns.finish(self.turns.begun)

    def _start_copies(self, output: SchedulerOutput, metadata: StepMetadata) -> LayersToCome | None:
        """Start copies between the cache and host memory. Returns those that the step waits for
        while it runs."""
        if self.host is None:
            return None
        self.host.settle(*output.copies_running)
        by_layer = output.copies_by_layer and self._waits_by_layer(output, metadata)
        coming = self.host.start(output.copies, by_layer)
        if output.copies_first:
            self.host.settle()
        elif output.copies_by_layer and not by_layer:
            self.host.settle(0, None)
        return coming if by_layer else None

    def _waits_by_layer(self, output: SchedulerOutput, metadata: StepMetadata) -> bool:
        """Whether each layer of the step may wait for its own pages. Captured steps and
        micro-batches do not, and steps in turns would wait for only some of each other's copies. A
        step that decodes is launched in pieces instead, where no other rank would replay it."""
        if metadata.micro_batches or self.turns is not None:
            return False
        if not metadata.decodes:
            return bool(output.chunks)
        alone = self.model.mesh.is_single and self.calls is None and self.compiled is None
        return alone and self.pieces is not None and self.pieces.fits(max(metadata.tokens))

    def _launch(
        self,
        output: SchedulerOutput,
        metadata: StepMetadata,
        watch: WrittenLayers | None,
        coming: LayersToCome | None,
    ) -> PendingStep:
        if self.graphs is not None and metadata.decodes and coming is None:
            return self._replay(self.graphs, output, metadata)
        batch = self.batch(output, metadata)
        if watch is not None and not batch.step.parts:
            batch.step.layer_written = watch.layer
        if coming is not None:
            batch.step.layer_read = coming.layer
        if self.turns is not None:
            pending = PendingStep()

            def end(hidden: Tensor) -> None:
                pending.take(self.sampler.sample(output, batch, hidden, metadata))
                if self.calls is not None:
                    pending.computed = self.platform.fetch(self.calls.sent[:1, :1])

            forward = self.model.forward(batch.step, self._every_row(metadata))
            pending.begun = self.turns.launch(forward, end)
            return pending
        hidden = self._forward(batch, metadata)
        if coming is not None and self.host is not None:
            self.host.settle(0, None)  # prediction modules read theirs next
        if not self.model.mesh.last_stage:
            return PendingStep()
        return self.sampler.sample(output, batch, hidden, metadata)

    def _replay(
        self, graphs: DecodeGraphs, output: SchedulerOutput, metadata: StepMetadata
    ) -> PendingStep:
        """Replay the whole step or, where some row needs the host, only the forward pass, whose
        hidden states are then sampled eagerly."""
        result = graphs.run(output.decode_slots, metadata, output.decode_bounds)
        if not self.model.mesh.last_stage:
            return PendingStep()
        if not metadata.host:
            return PendingStep(self.platform.fetch(result))
        batch = self.batch(output, metadata)
        return self.sampler.sample(output, batch, result.flatten(0, 1), metadata)

    def batch(self, output: SchedulerOutput, metadata: StepMetadata) -> BuiltBatch:
        decode = prefill = None
        if output.decode_slots:
            slots = self.platform.to_device(torch.tensor(output.decode_slots))
            decode = self.build.decode(
                slots, tuple(output.decode_bounds), metadata.num_speculative_tokens
            )
            decode.segment.may_share = self.shares_prefixes
        if output.chunks:
            prefill = self.build.prefill(output)
        return self._built(decode, prefill, metadata)

    def _built(
        self,
        decode: BatchPart | None,
        prefill: BatchPart | None,
        metadata: StepMetadata,
        padded: PaddedRows | None = None,
    ) -> BuiltBatch:
        layout = self.model.layout(metadata.tokens, metadata.decodes).with_padding(padded)
        batch = self.build.batch(decode, prefill, layout)
        if metadata.micro_batches:
            self.model.split(batch.step, metadata.micro_batches, metadata.decodes)
        return batch

    def _decode_body(
        self, slots: Tensor, variant: SamplingVariant, num_speculative_tokens: int
    ) -> Tensor:
        """One decode step of padded rows, entirely on the device: nothing here may depend on a
        value the host would have to read. Returns the sampled tokens (see DecodeSamples.result),
        or, where sampling needs the host, the hidden states [R, num_speculative_tokens + 1,
        hidden]."""
        metadata = self._captured_metadata(slots, variant, num_speculative_tokens)
        requests = self.graphs.num_requests if self.graphs is not None else None
        batch, hidden = self.decode_pass(slots, metadata, requests)
        if metadata.host:
            self.unsampled[slots.shape[0], num_speculative_tokens] = batch, hidden
        return self._end_captured(slots, batch, hidden, metadata)

    def _sample_body(
        self, slots: Tensor, variant: SamplingVariant, num_speculative_tokens: int
    ) -> Tensor:
        """What `_decode_body` does after the forward pass, for that of its latest call for FULL
        with as many slots and drafts. Returns the sampled tokens."""
        batch, hidden = self.unsampled[slots.shape[0], num_speculative_tokens]
        metadata = self._captured_metadata(slots, variant, num_speculative_tokens)
        return self._end_captured(slots, batch, hidden, metadata)

    def _end_captured(
        self, slots: Tensor, batch: BuiltBatch, hidden: Tensor, metadata: StepMetadata
    ) -> Tensor:
        """What follows the forward pass. Returns what `_decode_body` does."""
        result = slots
        if self.model.mesh.last_stage and metadata.host:
            result = hidden.unflatten(0, (slots.shape[0], metadata.num_speculative_tokens + 1))
        elif self.model.mesh.last_stage:
            result = self.sampler.sample_captured(batch, hidden, metadata)
        self.model.mesh.pp.flush()  # a captured graph must wait for the sends it starts
        self.rows.length[self.rows.padding :].zero_()
        return result

    def _captured_metadata(
        self, slots: Tensor, variant: SamplingVariant, num_speculative_tokens: int
    ) -> StepMetadata:
        count = slots.shape[0]
        dp = self.model.mesh.sizes.dp
        parts = self.micro_batches.decode_parts(count, num_speculative_tokens + 1, dp)
        return StepMetadata.padded(count, dp, variant, num_speculative_tokens, parts)

    def decode_pass(
        self, slots: Tensor, metadata: StepMetadata, requests: Tensor | None = None
    ) -> tuple[BuiltBatch, Tensor]:
        """The forward pass of `_decode_body`; can be captured. requests: see PaddedRows; None:
        nothing is padding."""
        count = slots.shape[0]
        width = metadata.num_speculative_tokens + 1
        decode = self.build.decode(slots, (self.max_len,) * count, width - 1)
        decode.segment.may_share = self.shares_prefixes
        padded = None if requests is None else PaddedRows(requests, width)
        batch = self._built(decode, None, metadata, padded)
        return batch, self._forward(batch, metadata)

    def forward_pass(self, output: SchedulerOutput, metadata: StepMetadata) -> Tensor:
        """Only the forward pass of a step: replayed if it is one with prompts that was captured."""
        return self._forward(self.batch(output, metadata), metadata)

    def _decode_rows(
        self, attention: CapturedAttention, most: int, draft_counts: tuple[int, ...]
    ) -> list[DecodeRows]:
        """What is captured of the attention of decoding requests, in up to `most` rows."""
        queries = sorted({count + 1 for count in draft_counts})
        sizes = (self.max_len, self.rows.padding, most)
        return attention.decode_rows(self.pool, *sizes, queries, self.shares_prefixes)

    def _prompt_rows(
        self, attention: CapturedAttention, sizes: Iterable[int], most: int, single: bool
    ) -> list[PromptRows]:
        """What is captured of the attention of prompts; arguments as of `prompt_bounds`."""
        prompts = self.model.layers[0].attention.capturable_prompts(self.pool)
        if prompts is None or len(attention.gaps[0].inputs) > 1:
            return []
        bounds = prompt_bounds(sizes, most, self.max_len, prompts, single)
        return attention.prompt_rows(self.pool, bounds, prompts.packed is not None)

    def _prompt_rows_of_pieces(self, pieces: PiecewiseGraphs) -> list[PromptRows]:
        return self._prompt_rows(pieces.attention, PROMPT_ROWS, pieces.sizes[-1], single=True)

    def _prompt_rows_of_part(self, attention: CapturedAttention) -> list[PromptRows]:
        assert self.parts is not None
        return self._prompt_rows(attention, PART_ROWS, self.parts.sizes[-1], single=False)

    def _warm_attention(
        self, captured: Iterable[CapturedRows], of: CapturedAttention, parts: Parts
    ) -> None:
        for rows in captured:
            for index, work in enumerate(rows.works(of.gaps)):
                parts(f"{rows.name}, {index}", work)

    def _warm_mixed_steps(
        self, pieces: PiecewiseGraphs, draft_counts: tuple[int, ...], parts: Parts
    ) -> None:
        """Run the attention between the pieces, and what larger steps launch eagerly, for various
        mixes of requests: its kernels are compiled by the first step that needs them, and no user
        should wait for that."""
        padding = self.rows.padding
        longest = self.max_len - 1
        lengths = [n for n in (64, 256, 1024, 4096, 16384) if n < longest] + [longest]
        buckets = bucket_sizes(min(self.rows.padding, pieces.sizes[-1] // 2))
        captured: list[CapturedRows] = []
        captured += self._decode_rows(pieces.attention, pieces.sizes[-1], draft_counts)
        captured += self._prompt_rows_of_pieces(pieces)
        self._warm_attention(captured, pieces.attention, parts)
        if self.parts:  # both have the same kernels, decoding requests those of steps in one part
            first = self.parts.attention[0]
            self._warm_attention(self._prompt_rows_of_part(first), first, parts)
        for drafts, count, length in product(draft_counts, buckets, lengths):
            if count * (drafts + 1) < pieces.sizes[-1]:  # with the chunk's token
                given = ([padding] * count, max(length, drafts + 1), 1, drafts)
                run = partial(self._attend_padding, pieces, *given)
                name = f"mixed {count} at {length}, {drafts} drafts"
                parts(name, run, always=count == buckets[0])
        most = min(longest // 2, pieces.sizes[-1] // 2)
        for tokens in (n for n in (16, 64, most) if n <= most):
            for length in (tokens, tokens + most):
                run = partial(self._attend_padding, pieces, [], length, tokens)
                parts(f"chunk {tokens} to {length}", run, always=True)

    def _warm_eager_steps(self, draft_counts: tuple[int, ...], parts: Parts) -> None:
        """Launch steps of prompts and decoding requests as serving does where nothing is captured:
        above the sizes of pieces, or all, with the sampling that pieces leave out. Kernels are
        chosen by the number of tokens, some for a range between two powers of two. All ranks launch
        the same; not where ranks first tell one another how many rows come, which no kernel has
        computed here."""
        mesh = self.model.mesh
        whole = mesh.sizes.pp == 1 and self.calls is None
        most = captured_prompt_tokens(mesh.sizes, self.model.config.moe, self.batched_tokens)
        if not (whole and self.platform.compiles and most) or self.compiled:
            return
        # prediction modules draft after a step in pieces too, for its tokens and for each request
        drafts = self.sampler.reads_hidden
        pieces = self.pieces.sizes[-1] if self.pieces and not drafts else 0
        powers = [1 << power for power in range(most.bit_length())]
        between = [  # odd, as rows whose count is a multiple of 16 have kernels of their own
            power * quarters // 4 + 1
            for power in powers
            for quarters in ((4, 5, 6, 7) if power >= 1024 else (6,))
        ]
        sizes = sorted({*powers, *between, most})
        few = [(size, 2) for size in sizes if pieces < size <= most] or [(most, 2)]
        many = [(most, power) for power in powers if power <= self.rows.padding] if drafts else []
        for count in draft_counts:
            for tokens, decoding in (*few, *many):
                part = min(decoding, tokens // (2 * (count + 1)))
                run = partial(self._run_ahead, tokens, part, count)
                name = f"eager {tokens}, {part} decode with {count} drafts"
                parts(name, run, always=decoding == 2)
        if self.pieces is None:  # else `_warm_mixed_steps` has run these
            longest = self.max_len - 1 - self.rows.most_drafts
            half = min(longest, most) // 2
            for tokens in (n for n in (16, 64, half) if 0 < n <= half):
                chunk = PrefillChunk(self.rows.padding, half, [0] * tokens, sample=True)
                run = partial(self._run_ahead, tokens, 0, 0, [chunk])
                parts(f"eager chunk {tokens}", run, always=True)

    def _run_ahead(
        self,
        tokens: int,
        decoding: int,
        num_speculative_tokens: int,
        chunks: list[PrefillChunk] | None = None,
    ) -> None:
        """A step of so many tokens: requests that decode, and `chunks`, or whole prompts."""
        padding = self.rows.padding
        rest = tokens - decoding * (num_speculative_tokens + 1)
        output = SchedulerOutput(
            decode_slots=[padding] * decoding,
            decode_bounds=[self.max_len - 1] * decoding,
            chunks=chunks or self._padding_chunks(rest),
            num_speculative_tokens=num_speculative_tokens,
        )
        ranks = [output] * self.model.mesh.sizes.dp
        metadata = StepMetadata.of(ranks, SamplingVariant.GREEDY, host=False)
        batch = self.batch(output, metadata)
        self.model.compute(batch.step, self._every_row(metadata))
        # for every row the last norm also does what, with few layers, is the only one to do: the
        # sum over each token's experts
        hidden = self.model.compute(batch.step, every_row=True)
        for variant in (SamplingVariant.GREEDY, *AFTER_FORWARD):
            self.sampler.run_ahead(output, batch, hidden, replace(metadata, sampling=variant))
        self.rows.length[padding:].zero_()

    def _padding_chunks(self, tokens: int) -> list[PrefillChunk]:
        """Whole prompts of the padding row, of so many tokens in all; drafts have positions after
        their ends."""
        longest = self.max_len - 1 - self.rows.most_drafts
        lengths = [longest] * (tokens // longest)
        if tokens % longest:
            lengths.append(tokens % longest)
        return [PrefillChunk(self.rows.padding, 0, [0] * n, sample=True) for n in lengths]

    def _attend_padding(
        self,
        pieces: PiecewiseGraphs,
        slots: list[int],
        length: int,
        tokens: int,
        num_speculative_tokens: int = 0,
    ) -> None:
        """Run attention for `slots` padding rows that decode at `length` cached entries, and a
        prompt chunk that ends there."""
        rows = self.rows
        output = SchedulerOutput(
            decode_slots=slots,
            decode_bounds=[length] * len(slots),
            chunks=[PrefillChunk(rows.padding, length - tokens, [0] * tokens, sample=False)],
            num_speculative_tokens=num_speculative_tokens,
        )
        ranks = [output] * self.model.mesh.sizes.dp
        metadata = StepMetadata.of(ranks, SamplingVariant.GREEDY, host=False)
        pieces.attend(self.batch(output, metadata).step)
        rows.length[rows.padding :].zero_()

    def _piecewise_body(
        self, ids: Tensor, positions: Tensor, slots: Tensor, recorder: PieceRecorder
    ) -> Tensor:
        """The forward pass of packed tokens, independent of the requests they belong to."""
        assert self.pieces is not None
        step = self._recorded_step((ids, positions, slots), self.pieces.num_tokens, recorder)
        return run_one(self.model.forward(step, every_row=True))

    def _recorded_step(
        self, columns: Iterable[Tensor], num_tokens: Tensor, recorder: PieceRecorder
    ) -> ForwardBatch:
        """Token ids, positions and cache slots, as many on every data-parallel rank, of which
        num_tokens [1] are not padding."""
        model = self.model
        ids, positions, slots = columns
        places = TokenPlaces(*model.rotary.rows(positions), slots)
        layout = model.layout((ids.shape[0],) * model.mesh.sizes.dp)
        layout = layout.with_padding(PaddedRows(num_tokens, 1))
        if isinstance(recorder, PartRecorder):
            layout = layout.alternating()
        return ForwardBatch(
            ids, positions, places, ids, self.pool, layout=layout, recorder=recorder
        )

    def _parts_body(self, columns: Sequence[Tensor], recorders: Sequence[PartRecorder]) -> Tensor:
        """`_piecewise_body` of two micro-batches, each [3, tokens], one after the other."""
        model = self.model
        assert self.parts is not None
        passes = []
        for part, tokens, recorder in zip(columns, self.parts.num_tokens, recorders, strict=True):
            forward = model.forward(self._recorded_step(part, tokens, recorder), every_row=True)
            passes.append(recorder.recording(forward, model.mesh.group_axes))
        with model.ops.beside_messages():
            return torch.cat(run(passes))

    def _forward(self, batch: BuiltBatch, metadata: StepMetadata) -> Tensor:
        """Hidden states [T, hidden] where a drafter or a scored prompt reads them or the pass was
        captured, else only of the step's logits rows. A decode-only step has no other rows, so its
        last norm may also sum over each token's experts."""
        if self.compiled and metadata.decodes:
            return self.compiled(batch.step)
        step = batch.step
        if self.captured and metadata.decodes and self.captured.takes(step):
            return self.captured.run("model", self._whole_pass, step)
        if self.parts and not metadata.decodes and self.parts.fits(metadata.micro_batches):
            return self.parts.run(step.parts, max(map(max, metadata.micro_batches)))
        whole = metadata.decodes and step.layer_read is None
        if self.pieces and not whole and not step.parts:
            longest = max(metadata.tokens)
            if self.pieces.fits(longest):
                return self.pieces.run(step, longest)
        return self.model.compute(step, self._every_row(metadata))

    def _whole_pass(self, step: ForwardBatch) -> Tensor:
        return self.model.compute(step, every_row=True)

    def _every_row(self, metadata: StepMetadata) -> bool:
        return metadata.decodes or self.sampler.reads_hidden or metadata.scores

    def abandon(self) -> None:
        """See Worker."""
        if self.turns is not None:
            self.turns.abandon()
        if self.calls is not None:
            self.calls.abandon()

    def collect(self, pending: PendingStep) -> StepResult:
        """Wait for a launched step's tokens. Raises ExpertsMissing for a step that all ranks
        drop."""
        if self.turns is not None and pending.begun is not None:
            with torch.inference_mode(), self.platform.stream():
                self.turns.finish(pending.begun)
        if pending.drop_reason is not None:
            reason = pending.drop_reason()
            if self.calls is not None:
                self.calls.ended()
            if reason:
                raise ExpertsMissing(reason)
        elif self.calls is not None and pending.computed is not None:
            self.calls.check(pending.epoch, int(pending.computed()))
        return self.sampler.collect(pending)
