"""Which deployment to choose: every admissible layout is costed, those that miss the goal are
dropped, the rest are ranked. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rorqual.config.parallel import ParallelConfig, check_parallel
from rorqual.errors import ConfigError
from rorqual.planner.costs.shards import rank_kv_bytes_per_token
from rorqual.planner.search.deployments import (
    Goal,
    Option,
    Question,
    aggregated,
    disaggregated,
    prompt_seconds,
    remote_experts,
    step_tokens,
)


@dataclass(frozen=True)
class Rejected:
    """short: bytes a device that are missing; infinite where memory is not the reason."""

    sizes: ParallelConfig
    reason: str
    short: float = float("inf")


@dataclass(frozen=True)
class DeploymentPlan:
    question: Question
    options: tuple[Option, ...]  # that meet the goal, best first
    missed: tuple[Option, ...]  # that fit and miss the goal, nearest first
    rejected: tuple[Rejected, ...]

    def pareto(self) -> list[Option]:
        """Options that no other beats in both tokens/s a user and tokens/s a device."""
        found: list[Option] = []
        for option in sorted(
            (*self.options, *self.missed), key=lambda item: (-item.per_user, -item.per_gpu)
        ):
            if not found or option.per_gpu > found[-1].per_gpu:
                found.append(option)
        return found


# ---- the space


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def layouts(question: Question) -> Iterator[ParallelConfig]:
    """Layouts of `count` devices or of a divisor of it (then replicated): tp within a node,
    experts split by columns, whole, or both."""
    span = question.device.link.span
    for world in _divisors(question.count):
        for pp in (size for size in _divisors(world) if size <= 8):
            stage = world // pp
            for tp in (
                size for size in _divisors(stage) if size <= max(span, 1) and size & (size - 1) == 0
            ):
                yield from _expert_cuts(
                    ParallelConfig(tp=tp, dp=stage // tp, pp=pp, pipeline_turns=pp), question
                )


def _expert_cuts(sizes: ParallelConfig, question: Question) -> Iterator[ParallelConfig]:
    moe = question.config.moe
    for ep in sorted({1, sizes.stage, sizes.stage // 2 if sizes.stage % 2 == 0 else 1}):
        if ep <= moe.num_experts and sizes.stage % ep == 0:
            yield replace(sizes, ep=ep)


def rejection(question: Question, sizes: ParallelConfig) -> Rejected | None:
    """Why a layout is no option before any time is taken."""
    try:
        check_parallel(question.config, sizes)
    except ConfigError as error:
        return Rejected(sizes, str(error))
    model = question.model(sizes)
    tokens = step_tokens(question, sizes)
    left = model.memory_left(tokens)
    usable = model.device.memory * model.utilization
    if left <= 0:
        needs = (
            f"weights {model.weight_bytes / 1e9:.1f} GB and activations "
            f"{(usable - left - model.weight_bytes) / 1e9:.1f} GB"
        )
        return Rejected(
            sizes,
            f"{needs} on a GPU, {-left / 1e9:.1f} GB more than the {usable / 1e9:.1f} that "
            "may be used",
            -left,
        )
    context = question.goal.prompt + question.goal.output
    wanted = context * rank_kv_bytes_per_token(question.config, sizes, question.fmt)
    if wanted > left:
        return Rejected(
            sizes,
            f"leaves {left / 1e9:.2f} GB a GPU; the cache of one request of {context:,} "
            f"tokens is {wanted / 1e9:.2f} GB",
            wanted - left,
        )
    return None


# ---- the search


def meets(goal: Goal, option: Option) -> bool:
    return (goal.ttft is None or option.ttft <= goal.ttft) and (
        goal.tpot is None or option.tpot <= goal.tpot
    )


def _excess(goal: Goal, option: Option) -> float:
    over = [
        option.ttft / goal.ttft if goal.ttft else 0.0,
        option.tpot / goal.tpot if goal.tpot else 0.0,
    ]
    return max(over)


def search(question: Question) -> DeploymentPlan:
    """Cost everything that fits. Raises ConfigError where the profile has no data for the
    device."""
    found: list[Option] = []
    rejected: list[Rejected] = []
    admitted: list[ParallelConfig] = []
    for sizes in layouts(question):
        refused = rejection(question, sizes)
        if refused:
            rejected.append(refused)
        else:
            admitted.append(sizes)
            found += aggregated(question, sizes)
    if question.splits and question.config.moe.num_experts:
        for prefill, decode in _role_layouts(question, admitted):
            found += disaggregated(question, decode, prefill)
        found += remote_experts(question)
    good = sorted(
        (option for option in found if meets(question.goal, option)),
        key=lambda item: -item.per_gpu,
    )
    bad = sorted(
        (option for option in found if not meets(question.goal, option)),
        key=lambda item: _excess(question.goal, item),
    )
    return DeploymentPlan(
        question, tuple(good), tuple(bad), tuple(sorted(rejected, key=lambda item: item.short))
    )


def _role_layouts(
    question: Question, admitted: list[ParallelConfig]
) -> Iterator[tuple[ParallelConfig, ParallelConfig]]:
    """Prefill: the layouts with the most prompt tokens/s a device. Decode: everything admitted but
    pipelines."""
    small = [sizes for sizes in admitted if sizes.world < question.count and sizes.pp == 1]
    ranked = sorted(
        small, key=lambda sizes: prompt_seconds(question, question.model(sizes)) * sizes.tp
    )
    for prefill in ranked[:2]:
        for decode in small:
            if prefill.world + decode.world <= question.count:
                yield prefill, decode


def distinct_best(options: tuple[Option, ...], number: int) -> list[Option]:
    """The best of each layout, best first: another batch of the same layout is no other answer."""
    seen: dict[tuple[str, ParallelConfig, str], Option] = {}
    for option in options:
        key = (option.kind, option.sizes, option.detail if option.kind != "aggregated" else "")
        seen.setdefault(key, option)
    return list(seen.values())[:number]
