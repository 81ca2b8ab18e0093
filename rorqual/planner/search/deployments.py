"""Times and rates of a deployment: a layout at a batch size, with prefill on the same devices as
decode or on separate ones. No torch.

Times are steady-state means. A group of `batch` requests decodes; each request's prompt interrupts
the others once, so a token takes step / (1 + accepted) + (batch - 1) x prompt / output. TTFT is the
prompt's own step, the steps already launched, and the mean wait of a queue with one server,
deterministic service and the load the prompts make (M/D/1: rho / 2 (1 - rho) of a service).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from rorqual.config.hardware import DeviceSpec
from rorqual.config.model import ModelConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.planner.costs.costs import DEFAULT_FORMAT, BatchShape, Format, GroupWork
from rorqual.planner.costs.routing import UNIFORM, Routing
from rorqual.planner.costs.shards import rank_kv_bytes_per_token
from rorqual.planner.search.settings import PlanSettings
from rorqual.planner.timing.profiles import Profile
from rorqual.planner.timing.roofline import StepModel
from rorqual.planner.timing.split import (
    PLACEMENTS,
    split_memory,
    split_step,
    transfer_seconds,
)
from rorqual.planner.timing.split_schedule import SplitStep
from rorqual.planner.timing.tables import STALE

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class Goal:
    """Tokens of prompt and output; seconds of TTFT and TPOT at most, None where they do not
    matter."""

    prompt: int = PlanSettings.prompt
    output: int = PlanSettings.output
    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} seconds must be above 0 and finite")


@dataclass(frozen=True)
class Question:
    """What is asked of the planner. num_speculative_tokens: draft counts to try; splits: also
    roles on devices of their own."""

    config: ModelConfig
    device: DeviceSpec
    count: int
    profile: Profile
    goal: Goal = field(default_factory=Goal)
    fmt: Format = DEFAULT_FORMAT
    routing: Routing = UNIFORM
    num_speculative_tokens: tuple[int, ...] = PlanSettings.num_speculative_tokens
    acceptance: float = PlanSettings.acceptance
    utilization: float = PlanSettings.memory_utilization
    splits: bool = PlanSettings.splits

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"count={self.count} must be at least 1")
        if not 0 <= self.acceptance <= 1:
            raise ConfigError(f"acceptance={self.acceptance} must lie between 0 and 1")
        if any(n < 0 for n in self.num_speculative_tokens) or not self.num_speculative_tokens:
            raise ConfigError(
                f"num_speculative_tokens={self.num_speculative_tokens} must be counts of at least 0"
            )
        if any(self.num_speculative_tokens) and not self.config.num_mtp_layers:
            raise ConfigError(
                f"{self.config.architecture} has no prediction module; "
                "num_speculative_tokens must be 0"
            )
        self.profile.check(self.device)

    def model(self, sizes: ParallelConfig) -> StepModel:
        longest = self.goal.prompt + self.goal.output
        given = (self.config, sizes, self.device, self.profile, self.fmt, self.routing)
        return StepModel(*given, self.utilization, longest)

    def accepted(self, num_speculative_tokens: int) -> float:
        """Drafts a step accepts on average: a + a^2 + ... up to num_speculative_tokens."""
        return sum(self.acceptance**index for index in range(1, num_speculative_tokens + 1))


@dataclass(frozen=True)
class Option:
    """One deployment. seconds; tokens/s of output for a device and for a user; `limiter`: what
    most of a decode step's time goes to."""

    kind: str  # aggregated | prefill:decode | attention:experts
    sizes: ParallelConfig
    replicas: int
    batch: int
    num_speculative_tokens: int
    ttft: float
    tpot: float
    throughput: float
    gpus: int
    limiter: str
    shares: tuple[tuple[str, float], ...]
    cache_tokens: int
    weight_bytes: float
    detail: str = ""
    prefill_sizes: ParallelConfig | None = None
    prefill_replicas: int = 0
    stale: tuple[str, ...] = ()  # kernels that have changed since the times it stands on

    @property
    def per_user(self) -> float:
        return 1 / self.tpot

    @property
    def per_gpu(self) -> float:
        return self.throughput / self.gpus

    @property
    def layout(self) -> str:
        return layout_name(self.sizes)


def layout_name(sizes: ParallelConfig) -> str:
    parts = [
        f"{name}{getattr(sizes, name)}" for name in ("dp", "tp", "pp") if getattr(sizes, name) > 1
    ]
    parts += [f"ep{sizes.ep}"] if sizes.ep > 1 else []
    return " ".join(parts) or "one GPU"


def step_tokens(question: Question, sizes: ParallelConfig) -> int:
    """Prompt tokens of the largest step of a group."""
    return min(question.goal.prompt, question.profile.max_chunk)


def prompt_seconds(question: Question, model: StepModel) -> float:
    """A prompt of every group, chunk by chunk."""
    total = 0.0
    done = 0
    while done < question.goal.prompt:
        chunk = min(question.goal.prompt - done, question.profile.max_chunk)
        total += model.step(GroupWork(None, (BatchShape(1, chunk, done),))).seconds
        done += chunk
    return total


def decode_step(
    question: Question, model: StepModel, batch: int, num_speculative_tokens: int
) -> tuple[float, float, str, tuple[tuple[str, float], ...]]:
    """(seconds between the tokens of a request without other prompts, share of a pipeline's
    micro-batches, limiter, shares)."""
    context = question.goal.prompt + question.goal.output // 2
    micro = max(1, -(-batch // model.sizes.pp))
    work = GroupWork(
        BatchShape.verify(micro, context, num_speculative_tokens), drafts=num_speculative_tokens
    )
    time = model.step(work)
    parts = time.by("limiter")
    shares = tuple((name, seconds / sum(parts.values())) for name, seconds in parts.items())
    per_step = max(time.seconds, model.sizes.pp * time.stage)
    return (
        per_step / (1 + question.accepted(num_speculative_tokens)),
        per_step,
        shares[0][0],
        shares,
    )


def aggregated(question: Question, sizes: ParallelConfig) -> Iterator[Option]:
    """Prompts and decoding on the same devices, at every batch that fits."""
    model = question.model(sizes)
    goal = question.goal
    prompt = prompt_seconds(question, model)
    for num_speculative_tokens in question.num_speculative_tokens:
        tokens = model.cache_tokens(step_tokens(question, sizes), mtp=num_speculative_tokens > 0)
        for batch in (size for size in BATCHES if size * (goal.prompt + goal.output) <= tokens):
            step, _, limiter, shares = decode_step(question, model, batch, num_speculative_tokens)
            tpot = step + (batch - 1) * prompt / goal.output
            load = min(0.95, prompt / goal.output / max(tpot, 1e-12) * batch)
            ttft = (
                prompt * (1 + load / (2 * (1 - load)))
                + question.profile.queued_steps * step
                + question.profile.first_token_us * 1e-6
            )
            cycle = goal.output * step + batch * prompt
            rate = batch * sizes.dp * goal.output / cycle
            replicas = question.count // sizes.world
            yield Option(
                "aggregated",
                sizes,
                replicas,
                batch,
                num_speculative_tokens,
                ttft,
                tpot,
                rate * replicas,
                sizes.world * replicas,
                limiter,
                shares,
                tokens,
                model.weight_bytes,
                f"a step {step * 1e3:.1f} ms, a prompt {prompt * 1e3:.0f} ms",
                stale=model.families(STALE),
            )


def disaggregated(
    question: Question, decode_sizes: ParallelConfig, prefill_sizes: ParallelConfig
) -> Iterator[Option]:
    """Prompts on instances of their own; the ratio whose two sides are nearest to balance,
    prefill loaded to 80 % at most."""
    goal = question.goal
    count = question.count
    decode = question.model(decode_sizes)
    prefill = question.model(prefill_sizes)
    prompt = prompt_seconds(question, prefill)
    moved = transfer_seconds(prefill, goal.prompt)
    for num_speculative_tokens in question.num_speculative_tokens:
        tokens = decode.cache_tokens(1024, mtp=num_speculative_tokens > 0)
        for batch in (size for size in BATCHES if size * (goal.prompt + goal.output) <= tokens):
            step, _, limiter, shares = decode_step(question, decode, batch, num_speculative_tokens)
            able = 0.8 * prefill_sizes.dp / prompt
            wanted = decode_sizes.dp * batch / (goal.output * step)
            worlds = (prefill_sizes.world, decode_sizes.world)
            instances, rate = balanced(count, worlds, able, wanted)
            load = rate * prompt / (instances * prefill_sizes.dp)
            ttft = (
                prompt * (1 + load / (2 * (1 - load)))
                + moved
                + step
                + question.profile.first_token_us * 1e-6
            )
            yield Option(
                "prefill:decode",
                decode_sizes,
                (count - instances * prefill_sizes.world) // decode_sizes.world,
                batch,
                num_speculative_tokens,
                ttft,
                step,
                rate * goal.output,
                count,
                limiter,
                shares,
                tokens,
                decode.weight_bytes,
                f"{instances} x {layout_name(prefill_sizes)} prefill, cache moved in "
                f"{moved * 1e3:.0f} ms",
                prefill_sizes,
                instances,
                tuple(sorted({*decode.families(STALE), *prefill.families(STALE)})),
            )


def balanced(count: int, worlds: tuple[int, int], able: float, wanted: float) -> tuple[int, float]:
    """(prefill instances, requests/s) of so many devices where requests/s are most: the smaller of
    what all prefill instances are able to and what all decode instances want. worlds: devices of an
    instance of each, together `count` at most; able, wanted: requests/s of one."""

    def want(instances: int) -> float:
        return (count - instances * worlds[0]) // worlds[1] * wanted

    most = (count - worlds[1]) // worlds[0]
    # from this one on prefill is able to do all that is wanted, and less and less is
    first = bisect_left(range(1, most + 1), True, key=lambda n: n * able >= want(n)) + 1
    found = [(min(n * able, want(n)), -n) for n in (first - 1, first) if 1 <= n <= most]
    rate, instances = max(found)
    return -instances, rate


def remote_experts(question: Question) -> Iterator[Option]:
    """Attention devices and expert devices, at every ratio and placement that fits."""
    model = question.model(ParallelConfig())
    experts = question.config.moe.num_experts
    for gpus in range(1, question.count):
        for placement in PLACEMENTS:
            whole = (
                gpus > 1 and experts % gpus == 0
                if placement == "experts"
                else gpus <= sum(question.config.moe_layers)
            )
            if (
                whole
                and split_memory(model, gpus, placement, step_tokens(question, model.sizes)).fits
            ):
                yield from _remote(question, model, gpus, placement)


def _remote(question: Question, model: StepModel, experts: int, placement: str) -> Iterator[Option]:
    """Prompts use the same devices as decoding requests and interrupt them as in `aggregated`."""
    goal = question.goal
    attention = question.count - experts
    memory = split_memory(model, experts, placement, step_tokens(question, model.sizes))
    tokens = int(memory.left // rank_kv_bytes_per_token(model.config, model.sizes, model.fmt))
    prompt = split_step(
        model,
        GroupWork(None, (BatchShape(1, step_tokens(question, model.sizes)),)),
        attention,
        experts,
        placement,
    ).seconds
    for batch in (size for size in BATCHES if size * (goal.prompt + goal.output) <= tokens):
        step, shares = _best_in_flight(question, model, batch, attention, experts, placement)
        busy = max(step.schedule.busy)
        tpot = step.seconds + (batch - 1) * prompt / goal.output
        rate = batch * attention * goal.output / (goal.output * step.seconds + batch * prompt)
        what = "whole experts" if placement == "experts" else "whole layers"
        detail = (
            f"{attention} attention : {experts} expert GPUs ({what}), {step.batches} "
            f"batches in flight, busiest {busy:.0%}"
        )
        yield Option(
            "attention:experts",
            model.sizes,
            1,
            batch,
            0,
            prompt + 2 * step.seconds,
            tpot,
            rate,
            question.count,
            shares[0][0],
            shares,
            tokens,
            memory.attention,
            detail,
            stale=model.families(STALE),
        )


def _best_in_flight(
    question: Question, model: StepModel, batch: int, attention: int, experts: int, placement: str
) -> tuple[SplitStep, tuple[tuple[str, float], ...]]:
    """The number of micro-batches, out of those that divide the batch, with the shortest time
    between tokens."""
    context = question.goal.prompt + question.goal.output // 2
    tried = []
    for flight in (size for size in (1, 2, 3, 4, 6, 8, 12, 16) if batch % size == 0):
        tried.append(
            split_step(
                model,
                GroupWork(BatchShape.decode(batch // flight, context)),
                attention,
                experts,
                placement,
                flight,
            )
        )
    best = min(tried, key=lambda step: step.seconds)
    stages = {
        "attention GPUs": best.attention,
        "expert GPUs": best.experts,
        "network": best.network,
    }
    total = sum(stages.values())
    return best, tuple(
        sorted(((name, value / total) for name, value in stages.items()), key=lambda pair: -pair[1])
    )
