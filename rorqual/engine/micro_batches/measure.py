"""Times steps on the ranks, kernels and network that will serve, for MeasuredParts to decide from.

All ranks call `measure` together, before decode steps are captured and before any request, on the
runner's own cache pages and device rows. Steps with prompts that are captured already are
replayed. Each size is timed in two ways: the stages of one MoE layer, each alone,
started by all ranks together and waiting for its messages before the next; and whole forward passes
in 1 to 4 parts in turn. Times are the slowest rank's, so that all ranks have the same ones, and
they alone decide whether another size is timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rorqual.config.parallel import MAX_AUTO_MICRO_BATCHES, REMOTE
from rorqual.engine.micro_batches.step_times import (
    MeasuredSize,
    PhaseTimes,
    StageSeconds,
    StepTimes,
)
from rorqual.engine.scheduling.scheduler_output import (
    PrefillChunk,
    SamplingVariant,
    SchedulerOutput,
    StepMetadata,
)
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.layers.moe import ExpertLayer, MoE
from rorqual.models.transformer import Layer
from rorqual.parallel.group_axis import GroupAxis
from rorqual.parallel.layout import MultiRankLayout
from rorqual.parallel.remote.exchange import RemoteExchange
from rorqual.parallel.remote.handle_exchange import HandleExchange

if TYPE_CHECKING:
    from rorqual.engine.execution.model_runner import ModelRunner

SECONDS = 30.0  # of measuring, after which no further size is timed; half of it for decode steps
SIZE_SECONDS = 1.2  # of passes of one size that may win, as far as REPEATS allow
REPEATS = (3, 20)  # of a pass, least and most
SETTLED = 0.01  # noise below which a pass is not repeated further
FAR = 1.5  # times the fastest, from which a pass is not repeated further either
VERY_FAR = 3.0  # the same after two repeats
STAGE_REPEATS = (5, 40)  # of the stages of a layer, least and most
STAGE_SECONDS = 0.4  # of stages of one size, as far as STAGE_REPEATS allow
LAUNCHING = 0.005  # seconds in which a stage is launched, and at most, where others are slower
MOST_LAUNCHING = 0.04
GROWTH = 2  # from one size to the next
BOUND = 0.9  # relative to a pass of twice the tokens: then launches dominate
PROMPTS = 12  # requests of a step with prompts: divisible by 2, 3 and 4
CONFIRMED = 0.25  # seconds of the longest pass that is chosen for re-timing
CONTEXT = 512  # cached tokens of decoding requests

Pass = Callable[[], object]


@dataclass(frozen=True)
class Limits:
    """requests: most that decode on a rank; width: tokens of each; tokens: most of a step with
    prompts; context: most cached tokens of a request. captured: decode steps are replayed.
    compiles: kernels can be compiled in parallel before they are timed."""

    requests: int
    width: int
    tokens: int
    context: int
    captured: bool = False
    compiles: bool = False


def measure(runner: ModelRunner, limits: Limits, seconds: float = SECONDS) -> StepTimes:
    """Collective over all ranks. Takes `seconds`, plus at most one size's time for each phase."""
    return PartsTimer(runner, limits, seconds).measure()


def deviation(runner: ModelRunner, limits: Limits, times: StepTimes) -> float:
    """Collective: how far times of an earlier start deviate from two re-timed sizes, relative."""
    return PartsTimer(runner, limits, SECONDS).deviation(times)


def why_whole(runner: ModelRunner, decode: bool) -> str:
    """Why splitting steps of this phase cannot help; empty where it may. The same on all ranks."""
    model = runner.model
    mesh = model.mesh
    if mesh.sizes.pp > 1:
        return "stages of a pipeline work on different requests already"
    if not any(isinstance(layer.mlp, ExpertLayer) for layer in model.layers):
        return "no layer is sparse"
    layout = model.layout([1] * mesh.sizes.dp, decode)
    if layout.exchange == "local" and not _calls_servers(runner):
        return "every rank holds every token: nothing travels to experts"
    if any(axis.size > 1 and not isinstance(axis, GroupAxis) for axis in mesh.axes.values()):
        return "one rank alone stands for all: nothing travels"
    if decode and layout.moe_axis.p2p_dispatch is not None:
        return "rows go through memory that GPUs share, by kernels on the stream that computes"
    if decode and layout.exchange == "low_latency" and model.ops.dispatch_combine is not None:
        return "operators on the stream that computes carry the rows"
    return ""


def _calls_servers(runner: ModelRunner) -> bool:
    layers = runner.model.moe_layers()
    return any(isinstance(layer.exchange, RemoteExchange | HandleExchange) for layer in layers)


class PartsTimer:
    def __init__(self, runner: ModelRunner, limits: Limits, seconds: float):
        self.runner = runner
        self.limits = limits
        self.model = runner.model
        self.mesh = runner.model.mesh
        self.platform = runner.platform
        self.seconds = seconds
        self.meeting = torch.zeros(1, device=self.platform.device)
        self.generator = torch.Generator().manual_seed(self.mesh.dp_rank)
        self.start = time.perf_counter()
        self.launching = LAUNCHING
        self.least = 0.0  # seconds of the newest size with the fewest repeats
        self.whole = 0.0  # of its pass in one part, the same on all ranks
        self.most_parts = MAX_AUTO_MICRO_BATCHES  # that are timed with the next size
        # the last: dense layers that are computed as experts come first
        sparse = [layer for layer in self.model.layers if isinstance(layer.mlp, ExpertLayer)]
        self.layer = sparse[-1] if sparse else None

    def measure(self) -> StepTimes:
        reasons = [why_whole(self.runner, decode) for decode in (True, False)]
        with self._rows(), torch.inference_mode(), self.platform.stream():
            self._compile_ahead(reasons)
            decode, prompts = (
                PhaseTimes(reason=reason) if reason else PhaseTimes(_ordered(sizes()))
                for reason, sizes in zip(reasons, (self._decode, self._prompts), strict=True)
            )
        return StepTimes(
            self._layers(), decode, prompts, self._slowest([time.perf_counter() - self.start])[0]
        )

    def deviation(self, times: StepTimes) -> float:
        """How far one re-timed size of each phase deviates from `times`, relative, beyond the noise
        of either; the same on all ranks. Infinite where `times` cannot be this engine's."""
        layers, reasons = self._layers(), [why_whole(self.runner, kind) for kind in (True, False)]
        phases = (times.decode, times.prompts)
        if (times.layers, [phase.reason for phase in phases]) != (layers, reasons):
            return math.inf
        found = [0.0]
        with self._rows(), torch.inference_mode(), self.platform.stream():
            for again, phase in zip((self._decode_size, self._prompt_size), phases, strict=True):
                short = [size for size in phase.sizes if size.passes[0] < CONFIRMED]
                if not phase.sizes:
                    continue
                # the longest of the short passes: the most informative about computing and
                # communication
                kept = max(short or phase.sizes[:1], key=lambda size: size.tokens)
                self.most_parts = len(kept.passes)
                now = again(kept.requests if again == self._decode_size else kept.tokens)
                if len(now.passes) != len(kept.passes) or now.exchange != kept.exchange:
                    return math.inf
                noise = [max(pair) for pair in zip(now.noise, kept.noise, strict=True)]
                pairs = zip(now.passes, kept.passes, noise, strict=True)
                found += [abs(new / old - 1) - beside for new, old, beside in pairs]
        return max(found)

    def _layers(self) -> int:
        return sum(isinstance(layer.mlp, ExpertLayer) for layer in self.model.layers)

    @contextmanager
    def _rows(self) -> Iterator[None]:
        """Device rows of dummy requests: random tokens, all pages but the first the null page (a
        row without a first page is padding, and attends to nothing). Their routed experts are not
        counted. No request has pages yet."""
        rows = self.runner.rows
        counted = [(layer.exchange, layer.exchange.record_load) for layer in self._moe()]
        generator = torch.Generator().manual_seed(self.mesh.dp_rank)
        drawn = torch.randint(rows.vocab, rows.last_token.shape, generator=generator)
        try:
            rows.last_token.copy_(drawn)
            rows.tables[: rows.padding, 0] = 1
            for exchange, _ in counted:
                exchange.record_load = False
            yield
        finally:
            rows.last_token.zero_()
            rows.tables[: rows.padding, 0] = 0
            rows.length.zero_()
            for exchange, counts in counted:
                exchange.record_load = counts

    def _moe(self) -> list[MoE]:
        return self.model.moe_layers()

    # ---- sizes

    def _decode(self) -> Iterator[MeasuredSize]:
        for requests in self._in_time((1, 4, 12), self.limits.requests, 0.5):
            yield self._decode_size(requests)

    def _decode_size(self, requests: int) -> MeasuredSize:
        return self._size(self._decode_step(requests), self.limits.captured)

    def _decode_step(self, requests: int) -> SchedulerOutput:
        limits = self.limits
        context = min(CONTEXT, limits.context - limits.width)
        self.runner.rows.length[:requests] = context
        slots = list(range(requests))
        bounds = [context + limits.width] * requests
        return SchedulerOutput(slots, bounds, num_speculative_tokens=limits.width - 1)

    def _prompts(self) -> Iterator[MeasuredSize]:
        for tokens in self._in_time((4, 12), self._most_tokens(), 1.0):
            yield self._prompt_size(tokens)

    def _most_tokens(self) -> int:
        limits = self.limits
        return min(limits.tokens, min(PROMPTS, limits.requests) * limits.context)

    def _prompt_size(self, tokens: int) -> MeasuredSize:
        return self._size(self._prompt_step(tokens), False)

    def _prompt_step(self, tokens: int) -> SchedulerOutput:
        requests = min(PROMPTS, self.limits.requests, tokens)
        each, over = divmod(tokens, requests)
        vocab = self.runner.rows.vocab
        drawn = torch.randint(vocab, (tokens,), generator=self.generator).tolist()
        chunks = []
        for slot in range(requests):
            length = each + (slot < over)
            chunks.append(PrefillChunk(slot, 0, drawn[:length], sample=False))
            drawn = drawn[length:]
        return SchedulerOutput(chunks=chunks, num_speculative_tokens=self.limits.width - 1)

    def _in_time(self, first: Sequence[int], last: int, share: float) -> Iterator[int]:
        """Sizes up to the last, while `share` of the time is left for the next; the same on all
        ranks. On a CPU from the smallest up: its largest may take minutes. On other devices from
        the largest down: kernels are compiled at each size, and small steps, which are bound by
        launches and gain nothing from splitting, would take up the time; they are skipped."""
        sizes = _sizes(first, last)
        if self._largest_first:
            sizes.reverse()
        self.most_parts = MAX_AUTO_MICRO_BATCHES
        whole = math.inf  # seconds of the previous size's pass in one part
        for size, following in pairwise((*sizes, sizes[-1])):
            yield size
            end = self.start + self.seconds * share
            late = time.perf_counter() + self.least * following / size - end
            bound = following < size and self.whole > BOUND * whole
            if self._slowest([late])[0] > 0 or bound:
                return
            whole = self.whole

    @property
    def _largest_first(self) -> bool:
        """Whether `_in_time` goes from the largest size down."""
        return self.platform.device.type != "cpu"

    def _compile_ahead(self, reasons: Sequence[str]) -> None:
        """Compile the kernels of all sizes to be timed in parallel, where the backend can: by empty
        launches, for one layer of each kind."""
        limits = self.limits
        if not limits.compiles:
            return
        steps: list[SchedulerOutput] = []
        if not reasons[0]:
            steps += map(self._decode_step, _sizes((1, 4, 12), limits.requests))
        if not reasons[1]:
            steps += map(self._prompt_step, _sizes((4, 12), self._most_tokens()))
        with self.model.ops.compiling(), self.model.one_layer_of_each_kind():
            for output in steps:
                for count in self._counts(output):
                    self.runner.forward_pass(output, self._metadata(output, count))
        self.start = time.perf_counter()

    def _size(self, output: SchedulerOutput, captured: bool) -> MeasuredSize:
        found = self._metadata(output, 1)
        layout = self.model.layout(found.tokens, found.decodes)
        attention, stages = self._layer(self.runner.batch(output, found).step)
        passes = [
            self._pass(output, self._metadata(output, count), captured)
            for count in self._counts(output)
        ]
        seconds, noise = self._times(passes)
        self.whole = seconds[0]
        if self._largest_first:
            # the next size is smaller: more parts, which are bound by launches, only fall behind
            self.most_parts = _within_reach(seconds)
        return MeasuredSize(
            output.num_tokens,
            len(output.lengths),
            REMOTE if _calls_servers(self.runner) else layout.exchange,
            attention,
            stages,
            seconds,
            noise,
        )

    def _counts(self, output: SchedulerOutput) -> list[int]:
        """The numbers of parts that such a step can be split into."""
        return [
            count
            for count in range(1, self.most_parts + 1)
            if count == 1 or self._metadata(output, count).micro_batches
        ]

    def _metadata(self, output: SchedulerOutput, parts: int) -> StepMetadata:
        ranks = [output] * self.mesh.sizes.dp
        return StepMetadata.of(ranks, SamplingVariant.GREEDY, host=False, micro_batches=parts)

    # ---- whole passes

    def _pass(self, output: SchedulerOutput, metadata: StepMetadata, captured: bool) -> Pass:
        runner = self.runner
        if not captured:
            return lambda: runner.forward_pass(output, metadata)
        slots = self.platform.to_device(torch.tensor(output.decode_slots))
        capture = self.platform.capture if runner.calls is None else runner.calls.capture
        replay = capture(lambda: runner.decode_pass(slots, metadata)[1])

        def once(read: Tensor = slots) -> object:
            """Keeps the memory that each replay reads."""
            return replay()

        return once

    def _times(self, passes: Sequence[Pass]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(shortest seconds of each, how much longer the second shortest are, relative). Passes
        alternate, so that a temporary slowdown affects all. Other load only ever adds time, so the
        shortest run has least of it. Those that are far from the fastest are not repeated further,
        which leaves the time to the others. All ranks see the slowest rank's times, so they agree
        on what is repeated."""
        for once in passes:  # compiles where needed
            self._timed(once)
        least, most = REPEATS
        times: list[list[float]] = [[] for _ in passes]
        repeated = list(range(len(passes)))
        for count in range(1, most + 1):
            order = repeated[:: 1 if count % 2 else -1]
            took = {number: self._timed(passes[number]) for number in order}
            found = self._slowest([took[number] for number in repeated])
            for number, seconds in zip(repeated, found, strict=True):
                times[number].append(seconds)
            shortest, noise = _shortest(times)
            self.least = sum(shortest) * (1 + least)
            if count == 1:
                continue
            near = min(shortest) * (FAR if count >= least else VERY_FAR)
            repeated = [number for number in repeated if shortest[number] <= near]
            if count < least:
                continue
            settled = max(noise[number] for number in repeated) <= SETTLED
            if settled or sum(sum(times[number]) for number in repeated) > SIZE_SECONDS:
                break
        return shortest, noise

    def _timed(self, once: Pass) -> float:
        self._barrier()
        start = time.perf_counter()
        once()
        self.platform.synchronize()
        return time.perf_counter() - start

    # ---- stages of one layer

    def _layer(self, step: ForwardBatch) -> tuple[float, tuple[StageSeconds, ...]]:
        """Times of the slowest rank. Other load only ever adds time, so the shortest of several
        runs counts: for computing, each rank's own shortest; for communication, that of the
        shortest run, because ranks share the wire, and what arrives early at one arrives late at
        another."""
        assert self.layer is not None, "a model without sparse layers is not measured"
        least, most = STAGE_REPEATS
        runs: list[list[float]] = []
        try:
            self._stages(self.layer, step)  # compiles where needed
            start = time.perf_counter()
            while len(runs) < least or (
                len(runs) < most and self._all_within(start, STAGE_SECONDS)
            ):
                runs.append(self._stages(self.layer, step))
        finally:
            for axis in self.mesh.group_axes:
                axis.watched = None
        values = list(zip(*runs, strict=True))  # attention, then both times of each stage
        computes = self._slowest([min(own) for own in (values[0], *values[1::2])])
        arrivals = [min(self._slowest(list(own))) for own in values[2::2]]
        pairs = zip(computes[1:], arrivals, strict=True)
        return computes[0], tuple(
            StageSeconds(compute, max(0.0, arrived - compute)) for compute, arrived in pairs
        )

    def _all_within(self, start: float, seconds: float) -> bool:
        """Whether no rank has spent `seconds` since `start`."""
        return self._slowest([time.perf_counter() - start])[0] < seconds

    def _stages(self, layer: Layer, step: ForwardBatch) -> list[float]:
        """Seconds of attention, and of each stage: until it has computed, and until its messages
        have arrived."""
        layout = step.layout
        count = layout.rows if isinstance(layout, MultiRankLayout) else step.num_tokens
        shape = (count, self.model.config.hidden_size)
        x, residual = (torch.randn(shape, device=step.token_ids.device) for _ in range(2))
        dtype = self.model.dtype
        given = (x.to(dtype), residual.to(dtype), step)
        (value, _), found = self._timed_stage(lambda: layer.attend(*given))
        del found[1:]
        for stage in layer.mlp.stages(layout):
            value, seconds = self._timed_stage(partial(stage, value))
            found += seconds
        return found

    def _timed_stage(self, stage: Callable[[], Any]) -> tuple[Any, list[float]]:
        """What a stage returns; seconds until this rank has computed it, and until its messages
        have arrived too. A device that computes while the host launches begins when all is
        launched: captured steps launch nothing, and what others take shows in whole passes."""
        self._settle()
        # together, and all devices begin together
        self.launching = self._slowest([self.launching])[0]
        clock = self.platform.clock()
        start = time.perf_counter()
        if clock is None:
            value = stage()
            self.platform.fetch(torch.zeros(1, device=self.platform.device))()
            computed = time.perf_counter() - start
            self._settle()
            return value, [computed, time.perf_counter() - start]
        self.model.ops.delay(self.launching)
        if not self.mesh.is_single:  # hosts launch the delay at different times
            dist.all_reduce(self.meeting)
        clock.mark()
        value = stage()
        clock.mark()
        for axis in self.mesh.group_axes:
            axis.settle()
        clock.mark()
        launched = time.perf_counter() - start
        self.launching = min(MOST_LAUNCHING, max(self.launching, 2 * launched))
        computed, waited = clock.seconds()
        return value, [computed, computed + waited]

    def _settle(self) -> None:
        for axis in self.mesh.group_axes:
            axis.settle()
        self.platform.synchronize()

    # ---- all ranks

    def _barrier(self) -> None:
        self._slowest([0.0])

    def _slowest(self, values: list[float]) -> list[float]:
        """The element-wise maximum over ranks."""
        if self.mesh.is_single:
            return values
        largest = torch.tensor(values, dtype=torch.float32, device=self.platform.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        found: list[float] = largest.tolist()
        return found


def _sizes(first: Sequence[int], last: int) -> list[int]:
    """The first, then twice as many each time, up to the last; none above it."""
    sizes = sorted({min(size, last) for size in (*first, last)})
    while sizes[-2:-1] and sizes[-2] * GROWTH < last:
        sizes.insert(-1, sizes[-2] * GROWTH)
    return sizes


def _within_reach(passes: Sequence[float]) -> int:
    """Passes in 1, 2, ... parts, seconds, without the last ones that are very far from the fastest:
    how many."""
    count = len(passes)
    while count > 2 and passes[count - 1] > VERY_FAR * min(passes):
        count -= 1
    return count


def _ordered(sizes: Iterator[MeasuredSize]) -> tuple[MeasuredSize, ...]:
    return tuple(sorted(sizes, key=lambda size: size.tokens))


def _shortest(passes: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(the shortest of each, how much longer the second shortest are)"""
    found = [sorted(times) for times in passes]
    noise = (times[1] / times[0] - 1 if len(times) > 1 else 1.0 for times in found)
    return tuple(times[0] for times in found), tuple(noise)
