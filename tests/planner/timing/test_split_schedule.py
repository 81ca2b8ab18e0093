"""How long a step of attention and experts apart takes, against examples by hand and the engine's
order of execution."""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import replace

import pytest

from rorqual.config.hardware import Interconnect, load_device
from rorqual.config.parallel import ParallelConfig
from rorqual.parallel import overlap
from rorqual.planner.costs.catalog import published
from rorqual.planner.costs.costs import BatchShape, GroupWork
from rorqual.planner.timing.profiles import load_profile
from rorqual.planner.timing.roofline import StepModel
from rorqual.planner.timing.split import decode_step, once_seconds, split_pass, split_step
from rorqual.planner.timing.split_schedule import (
    ATTENTION,
    COMBINE,
    DISPATCH,
    EXPERTS,
    SplitPass,
    SplitStep,
    Task,
    schedule,
)

# Layers: one dense, two with experts. Attention 2, the dense layer's feed-forward 3, the embedding
# 1: before the first dispatch 1 + (2 + 3) + 2, before the second 2.
THREE = SplitPass((8.0, 2.0), 0.0, 1.0, latency=1.0, sent=1.0, experts=4.0, exclusive=2.0)


def model(name: str = "deepseek-v3", profile: str = "roofline", layers: int = 8) -> StepModel:
    config = published(name, overrides={"num_hidden_layers": layers})
    return StepModel(config, ParallelConfig(), load_device("h200"), load_profile(profile))


def test_two_micro_batches_through_three_layers_by_hand() -> None:
    tasks: list[Task] = []
    found = schedule([THREE, THREE], once=5.0, tasks=tasks)
    spans = {
        name: [
            (task.name, task.batch, task.start, task.end) for task in tasks if task.resource == name
        ]
        for name in (ATTENTION, DISPATCH, EXPERTS, COMBINE)
    }
    assert spans == {
        ATTENTION: [
            ("attention", 0, 0, 8),
            ("attention", 1, 8, 16),
            ("shared experts", 0, 16, 17),
            ("shared experts", 1, 17, 18),
            ("attention", 0, 18, 20),  # its sums are there at 16
            ("attention", 1, 24, 26),  # waits for its sums
            ("shared experts", 0, 26, 27),
            ("shared experts", 1, 27, 28),
            ("head", 0, 34, 39),
        ],
        DISPATCH: [
            ("dispatch", 0, 8, 10),
            ("dispatch", 1, 16, 18),
            ("dispatch", 0, 20, 22),
            ("dispatch", 1, 26, 28),
        ],
        EXPERTS: [
            ("experts", 0, 10, 14),
            ("experts", 1, 18, 22),
            ("experts", 0, 22, 26),
            ("experts", 1, 28, 32),
        ],
        COMBINE: [
            ("combine", 0, 14, 16),
            ("combine", 1, 22, 24),
            ("combine", 0, 26, 28),
            ("combine", 1, 32, 34),
        ],
    }
    assert (found.seconds, found.attention, found.experts, found.network) == (39, 29, 16, 4)


def test_calls_on_an_expert_device_overlap_but_for_what_excludes_others() -> None:
    one = SplitPass((1.0,), experts=10.0, exclusive=4.0)
    found = schedule([one] * 3)  # 1 to 11, 5 to 15, 9 to 19
    assert (found.seconds, found.experts) == (19, 18)
    alone = replace(one, exclusive=10.0)  # 1 to 11, 11 to 21, 21 to 31
    found = schedule([alone] * 3)
    assert (found.seconds, found.experts) == (31, 30)


def test_whole_layers_on_devices_of_their_own_do_not_compete() -> None:
    one = SplitPass((1.0, 1.0), experts=10.0, exclusive=10.0)
    # device 0: 1-11, 11-21; the first micro-batch's second layer is on device 1: 12-22, then 22-32
    assert schedule([one, one], devices=(0, 1)).seconds == 32
    # one device: 1-11, 11-21, the first one's second layer from 21 on, 31-41
    assert schedule([one, one]).seconds == 41


def test_dense_layers_after_the_last_experts() -> None:
    assert schedule([SplitPass((1.0,), last=3.0, experts=2.0)]).seconds == 6


def test_attention_goes_in_the_engines_order() -> None:
    """What the device of attention executes, and overlap.run with generators that hand over as
    those of models do (transformer.py, forward_layers)."""
    order: list[tuple[str, int]] = []

    def forward(batch: int) -> Generator[None, None, None]:
        for _ in range(3):
            order.append(("attention", batch))  # up to the dispatch
            yield
            order.append(("shared experts", batch))
            yield

    overlap.run([forward(batch) for batch in range(3)])
    tasks: list[Task] = []
    schedule([SplitPass((5.0, 3.0, 2.0), 0.0, 1.0, 0.5, 0.5, 6.0, 2.0)] * 3, tasks=tasks)
    assert [(task.name, task.batch) for task in tasks if task.resource == ATTENTION] == order


@pytest.mark.parametrize("seed", range(20))
def test_bounds(seed: int) -> None:
    """One micro-batch takes the sum of its stages; several take at least as long as one of them,
    and as the busiest resource; never less on a slower link, with slower experts or one more
    micro-batch; at most one after another."""
    draw = random.Random(seed)
    layers = draw.randint(1, 6)
    devices = draw.choice([None, tuple(index * 2 // layers for index in range(layers))])

    def drawn() -> SplitPass:
        experts = draw.uniform(0, 4)
        own = tuple(draw.uniform(0, 3) for _ in range(layers))
        sent = draw.uniform(0, 1)
        share = draw.random()
        return SplitPass(own, draw.random(), 0.0, 0.1, sent, experts, share * experts)

    passes = [drawn() for _ in range(draw.randint(2, 5))]
    once = draw.random()
    alone = [schedule([one], once, devices).seconds for one in passes]
    for one, seconds in zip(passes, alone, strict=True):
        call = 2 * (one.latency + one.sent) + one.experts
        assert seconds == pytest.approx(sum(one.own) + one.last + layers * call + once)
    found = schedule(passes, once, devices)
    assert found.seconds >= max(alone) - 1e-9
    assert found.seconds >= max(found.attention, found.experts, found.network) - 1e-9
    places = devices or (0,) * layers
    for place in set(places):
        assert found.seconds >= places.count(place) * sum(one.exclusive for one in passes) - 1e-9
    assert found.seconds <= sum(alone) + 1e-9
    assert found.seconds >= schedule(passes[:-1], once, devices).seconds - 1e-9
    for change in ("latency", "sent", "experts", "exclusive"):
        slower = [replace(one, **{change: getattr(one, change) * 1.5}) for one in passes]
        assert schedule(slower, once, devices).seconds >= found.seconds - 1e-9


def test_shared_experts_are_computed_while_rows_are_away() -> None:
    one = SplitPass((1.0,), 0.0, 2.0, experts=5.0, exclusive=5.0)
    assert schedule([one]).seconds == 6
    assert schedule([replace(one, shared=7.0)]).seconds == 8


# ---- of models


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b"])
def test_one_micro_batch_is_the_step_with_experts_elsewhere(name: str) -> None:
    """All of a step is there once, and shared experts are hidden by the call."""
    one = model(name)
    work = GroupWork(BatchShape.decode(8, 1000))
    step = split_step(one, work, 1, 1)
    timed = one.step(work)
    parts = timed.by("part")
    own = timed.seconds - parts["routed_experts"]
    shared = parts.get("shared_experts", 0.0)
    assert step.attention == pytest.approx(own)
    assert step.seconds == pytest.approx(own - shared + step.experts + step.network)
    assert step.micro_batches[0].layers == sum(one.config.moe_layers)
    assert step.experts == pytest.approx(parts["routed_experts"])


def test_dense_layers_come_before_the_first_dispatch() -> None:
    one = model()
    work = GroupWork(BatchShape.decode(8, 1000))
    own = split_pass(one, work, 1, 1).own
    assert len(own) == 5
    assert len(set(own[1:])) == 1
    parts = one.step(work).by("part")
    each = own[1] - parts["router"] / 5
    assert own[0] == pytest.approx(
        4 * each + parts["router"] / 5 + parts["dense_ffn"] + parts["embedding"]
    )


def test_the_head_is_computed_once_for_all_rows() -> None:
    one = model()
    step = split_step(one, GroupWork(BatchShape.decode(64, 1000)), 1, 1, batches=4)
    items = one.step(GroupWork(BatchShape.decode(256, 1000))).items
    head = sum(item.seconds for item in items if item.part in ("lm_head", "engine"))
    assert step.once == pytest.approx(head)
    drafts = GroupWork(BatchShape.verify(64, 1000, 1), drafts=1)
    assert once_seconds(one, drafts) > 2 * head / 2, "a draft has a layer and a head of its own"


def test_uneven_micro_batches() -> None:
    one = model()
    equal = split_step(one, GroupWork(BatchShape.decode(4, 1000)), 1, 1, batches=2)
    assert decode_step(one, (4, 4), 1000, 1, 1) == equal
    uneven = decode_step(one, (3, 2, 3), 1000, 1, 1)
    assert [len(uneven.micro_batches), uneven.once] == [3, equal.once]
    assert uneven.micro_batches[1].experts < uneven.micro_batches[0].experts
    assert uneven.seconds < decode_step(one, (3, 3, 3), 1000, 1, 1).seconds


@pytest.mark.parametrize("placement", ["experts", "layers"])
def test_a_slower_link_is_never_faster(placement: str) -> None:
    one = model(layers=61)
    last = 0.0
    for factor in (1, 2, 8, 64):
        network = Interconnect(50e9 / factor, 10e-6 * factor)
        slow = replace(one, device=replace(one.device, network=network))
        work = GroupWork(BatchShape.decode(32, 1000))
        step = split_step(slow, work, 32, 32, placement, 3)
        assert step.seconds >= last
        assert step.seconds >= max(
            step.schedule.attention, step.schedule.experts, step.schedule.network
        )
        last = step.seconds


def test_experts_exclude_others_for_what_memory_needs() -> None:
    """Never for longer than they take; with measured kernels less, since those take longer than
    bytes over the rate that kernels reach."""
    for profile in ("roofline", "rorqual"):
        for rows in (1, 3, 8, 64, 512):
            one = split_pass(model(profile=profile), GroupWork(BatchShape.decode(rows, 9)), 1, 1)
            assert 0.5 * one.experts < one.exclusive <= one.experts
    few = split_pass(model(profile="rorqual"), GroupWork(BatchShape.decode(1, 9)), 1, 1)
    assert few.exclusive < few.experts


def test_means_over_micro_batches() -> None:
    step = SplitStep((THREE, THREE.slowed(2.0)), once=4.0)
    assert THREE.slowed(2.0) == replace(THREE, own=(16.0, 4.0), shared=2.0)
    assert step.batches == 2
    assert step.attention == (12 + 24 + 4) / 2
    assert (step.experts, step.network) == (8, 8)
