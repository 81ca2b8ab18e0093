"""Into how many parts a step is cut, by measured times: a pure function."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from rorqual.config.parallel import MAX_AUTO_MICRO_BATCHES, ParallelConfig
from rorqual.engine.config import EngineConfig
from rorqual.engine.micro_batches.policy import (
    MARGIN,
    FixedParts,
    MeasuredParts,
    best_parts,
    predicted,
    shapes,
    simulated_seconds,
)
from rorqual.engine.micro_batches.report import lines, parts_of
from rorqual.engine.micro_batches.step_times import (
    MeasuredSize,
    PhaseTimes,
    StageSeconds,
    StepTimes,
)
from rorqual.engine.scheduling.dp_scheduler import DataParallelScheduler
from rorqual.engine.scheduling.scheduler import SchedulerConfig
from rorqual.engine.scheduling.scheduler_output import PrefillChunk, SchedulerOutput
from rorqual.errors import ConfigError
from rorqual.request import Request, SamplingParams

LAYERS = 6
SIZES = (1, 4, 16, 64, 256)


def size(
    tokens: int, fixed: float, each: float, wire: float, hand_over: float = 0.0, noise: float = 0.0
) -> MeasuredSize:
    """Computing costs `fixed` and `each` a token, the wire `wire` a token and way; passes in parts
    are those of the two resources, and what a hand-over costs."""

    def stages(count: int) -> tuple[StageSeconds, ...]:
        work = fixed + each * count
        return (
            StageSeconds(work / 2, wire * count),
            StageSeconds(work / 2, wire * count),
            StageSeconds(0.0),
        )

    passes = []
    for parts in range(1, min(MAX_AUTO_MICRO_BATCHES, tokens) + 1):
        each_part = [tokens // parts + (i < tokens % parts) for i in range(parts)]
        over = hand_over * 2 * parts * LAYERS if parts > 1 else 0.0
        passes.append(simulated_seconds([stages(count) for count in each_part], LAYERS) + over)
    return MeasuredSize(
        tokens,
        min(tokens, 12),
        "allgather_ep",
        0.0,
        stages(tokens),
        tuple(passes),
        (noise,) * len(passes),
    )


def times(
    fixed: float, each: float, wire: float, hand_over: float = 0.0, noise: float = 0.0
) -> StepTimes:
    sizes = tuple(size(tokens, fixed, each, wire, hand_over, noise) for tokens in SIZES)
    return StepTimes(LAYERS, PhaseTimes(sizes), PhaseTimes(sizes))


def prompts(tokens: int, requests: int = 12) -> tuple[tuple[int, ...], ...]:
    return ((tokens // requests,) * requests,)


def test_two_resources_side_by_side() -> None:
    even = (StageSeconds(1.0, 1.0), StageSeconds(1.0, 1.0), StageSeconds(0.0))
    half = tuple(StageSeconds(s.compute / 2, s.wire / 2) for s in even)
    assert simulated_seconds([even], LAYERS) == 4 * LAYERS
    # both are busy but for what the last message takes
    assert simulated_seconds([half, half], LAYERS) == 2 * LAYERS + 0.5
    assert simulated_seconds([half, half], 3) == 6.5
    # weights that are read once for each part: nothing is gained
    reading = tuple(StageSeconds(s.compute, s.wire / 2) for s in even)
    assert simulated_seconds([reading, reading], LAYERS) >= 4 * LAYERS


def test_a_wire_as_slow_as_computing_is_hidden() -> None:
    slow = times(fixed=0.0, each=1e-4, wire=5e-5)
    assert best_parts(slow, prompts(240), (0,)) > 1
    assert best_parts(slow, ((1,) * 64,), (64,)) > 1


@pytest.mark.parametrize(
    "table",
    [
        times(fixed=0.0, each=1e-4, wire=1e-8),  # a fast wire
        times(fixed=1e-2, each=1e-6, wire=1e-5),  # weights are all that costs
        times(fixed=0.0, each=1e-4, wire=5e-5, hand_over=1e-2),
        times(fixed=0.0, each=1e-4, wire=5e-5, noise=2.0),
    ],
)
def test_nothing_is_cut_that_gains_nothing(table: StepTimes) -> None:
    for tokens in (1, 3, 4, 16, 60, 64, 240, 256):
        assert best_parts(table, ((1,) * min(tokens, 64),), (min(tokens, 64),)) == 1
        if tokens >= 12:
            assert best_parts(table, prompts(tokens), (0,)) == 1


def test_passes_that_were_short_by_chance_do_not_cut_what_computes_longer() -> None:
    """Both measurements must say that it gains."""
    heavy = times(fixed=1e-2, each=1e-6, wire=1e-5)
    lucky = [replace(one, passes=(one.passes[0], 1e-3, 1e-3, 1e-3)) for one in heavy.prompts.sizes]
    table = replace(heavy, prompts=PhaseTimes(tuple(lucky)))
    assert best_parts(table, prompts(60), (0,)) == 1
    servers = [replace(one, exchange="remote") for one in lucky]
    assert best_parts(replace(heavy, prompts=PhaseTimes(tuple(servers))), prompts(60), (0,)) > 1


def test_noise_keeps_a_step_whole_and_does_not_hold_back_a_third_part() -> None:
    """A gain must stand out to begin with; then the fastest is taken."""

    def table(noise: float) -> StepTimes:
        slow = times(fixed=0.0, each=1e-4, wire=5e-5)
        whole = slow.prompts.sizes[-1]
        passes = tuple(whole.passes[0] * share for share in (1.0, 0.8, 0.74, 0.75))
        item = replace(whole, passes=passes, noise=(0.0, noise, noise, noise))
        return replace(slow, prompts=PhaseTimes((*slow.prompts.sizes[:-1], item)))

    lengths = (table(0.0).prompts.sizes[-1].lengths,)
    assert best_parts(table(0.0), lengths, (0,)) == 3
    assert best_parts(table(0.1), lengths, (0,)) == 3
    assert best_parts(table(0.3), lengths, (0,)) == 1


def random_times(draw: random.Random) -> StepTimes:
    """Whatever a machine may say, sense or not."""

    def one(tokens: int) -> MeasuredSize:
        stages = tuple(
            StageSeconds(draw.uniform(0, 1e-2), draw.choice([0.0, draw.uniform(0, 1e-2)]))
            for _ in range(draw.choice([3, 4]))
        )
        count = min(MAX_AUTO_MICRO_BATCHES, tokens)
        passes = tuple(draw.uniform(1e-3, 0.2) for _ in range(count))
        name = "alltoall" if len(stages) == 4 else "allgather_ep"
        noise = tuple(draw.choice([0.0, draw.uniform(0, 0.3)]) for _ in passes)
        return MeasuredSize(
            tokens, min(tokens, 12), name, draw.uniform(0, 1e-2), stages, passes, noise
        )

    phases = [PhaseTimes(tuple(one(tokens) for tokens in SIZES)) for _ in range(2)]
    return StepTimes(draw.randint(1, 60), *phases)


@pytest.mark.exhaustive
def test_never_in_parts_where_the_measured_passes_say_loss() -> None:
    """Of every size that was measured."""
    draw = random.Random(5)
    cut = 0
    for _ in range(500):
        table = random_times(draw)
        for decodes, phase in ((True, table.decode), (False, table.prompts)):
            for item in phase.sizes:
                found = parts_of(table, item, decodes)
                assert found == 1 or item.passes[found - 1] < item.passes[0] * (1 - MARGIN)
                cut += found > 1
    assert cut > 20


def test_all_ranks_decide_alike() -> None:
    """From the same numbers, whoever read them, in whatever order steps came."""
    draw = random.Random(7)
    for _ in range(20):
        table = random_times(draw)
        others = [MeasuredParts(StepTimes.of_json(table.as_json())) for _ in range(2)]
        assert others[0].times == table
        steps = []
        for _ in range(20):
            decoding = draw.randint(0, 20)
            chunks = [draw.randint(1, 80) for _ in range(draw.randint(0, 4))]
            if decoding or chunks:
                steps.append((((1,) * decoding + tuple(chunks),), (decoding,)))
        found = [others[0]._best(*step) for step in steps]
        assert [others[1]._best(*step) for step in reversed(steps)] == found[::-1]
        assert set(found) <= {1, 2, 3, 4}


def test_a_step_that_cannot_be_cut_stays_whole() -> None:
    slow = times(fixed=0.0, each=1e-4, wire=5e-5)
    assert best_parts(slow, ((127,),), (0,)) == 1
    assert best_parts(slow, ((64, 64), (127,)), (0, 0)) == 1
    assert best_parts(slow, ((64, 64), ()), (0, 0)) == 1
    assert best_parts(slow, ((256,),), (0,)) > 1, "a long chunk can be cut"
    assert best_parts(slow, ((64, 64), (256,)), (0, 0)) > 1


def test_mixed_steps_count_both_kinds() -> None:
    slow = times(fixed=0.0, each=1e-4, wire=5e-5)
    # of rank 0: 6 that decode and 10 of prompts, then 12; of rank 1: 6 that decode, twice
    assert shapes(((16, 6), (12, 6)), (6, 12)) == ((6, 10), (0, 12))
    lengths = ((1,) * 16 + (60, 60),)
    assert best_parts(slow, lengths, (16,)) > 1
    assert predicted(slow, False, ((16, 120),)) == pytest.approx(
        predicted(slow, False, ((0, 136),)), rel=0.2
    )


def test_phases_that_are_not_measured_stay_whole() -> None:
    slow = times(fixed=0.0, each=1e-4, wire=5e-5)
    table = StepTimes(LAYERS, PhaseTimes(reason="nothing travels"), slow.prompts)
    assert best_parts(table, ((1,) * 64,), (64,)) == 1
    assert best_parts(table, prompts(240), (0,)) > 1
    assert best_parts(table, ((1,) * 16 + (60, 60),), (16,)) > 1
    assert "decode: 1 part: nothing travels" in list(lines(table))


def test_the_log_has_a_line_for_each_size() -> None:
    found = list(lines(times(fixed=0.0, each=1e-4, wire=5e-5)))
    assert len(found) == 2 + 2 * len(SIZES)
    assert found[1].split()[:3] == ["phase", "tokens", "exchange"]
    assert found[-1].split()[:3] == ["prompts", "256", "allgather_ep"]


def test_the_scheduler_asks_for_each_step() -> None:
    config = SchedulerConfig(16, 512, 256, 400, 8)
    slow = MeasuredParts(times(fixed=0.0, each=1e-4, wire=5e-5))
    scheduler = DataParallelScheduler(config, 2, slow)
    for name in range(16):
        scheduler.add(Request(str(name), (1,) * 30, SamplingParams(max_tokens=9)))
    step = scheduler.schedule()
    assert step is not None
    assert step.output.micro_batches == slow.parts(step.output.parts) > 1
    assert len(step.output.metadata().micro_batches) == step.output.micro_batches


def test_captured_steps_ask_by_size() -> None:
    slow = MeasuredParts(times(fixed=0.0, each=1e-4, wire=5e-5))
    assert slow.decode_parts(64, 1, 2) == slow.parts(
        [SchedulerOutput(list(range(64)), [9] * 64)] * 2
    )
    assert slow.decode_parts(1, 1, 2) == 1
    assert FixedParts(3).decode_parts(1, 1, 2) == 3
    chunks = [PrefillChunk(i, 0, [1] * 20, True) for i in range(12)]
    assert slow.parts([SchedulerOutput(chunks=chunks)] * 2) > 1


def test_the_option() -> None:
    assert ParallelConfig(dp=2, micro_batches="auto").most_micro_batches == 4
    assert EngineConfig("", dp=2, micro_batches="3").parallel.micro_batches == 3
    assert EngineConfig("", dp=2, micro_batches="auto").micro_batches == "auto"
    for wrong, message in (("automatic", "or 'auto'"), (0, "at least 1"), (9, "1 to 8, auto")):
        with pytest.raises(ConfigError, match=message):
            ParallelConfig(dp=2, micro_batches=wrong)
    with pytest.raises(ConfigError, match="micro_batches=auto needs several ranks"):
        ParallelConfig(micro_batches="auto")
