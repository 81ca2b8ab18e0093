"""How long streams wait for prompts, and prompts for streams, on machines with known costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rorqual import LLM, SamplingParams
from rorqual.engine.config import EngineConfig
from rorqual.engine.scheduling.chunk_controller import DELAY, GAP, ChunkController
from rorqual.engine.scheduling.sequence import PendingLoad
from rorqual.errors import ConfigError

MOST = 8192
Cost = Callable[[int, int], float]


def gpu(decoding: int, prompts: int) -> float:
    """Like Qwen3-30B on an H200, seconds: experts are read for few tokens as for many."""
    base = 0.0025 + 0.0006 * decoding**0.6 if decoding else 0.003
    added = prompts * 13e-6 + 0.012 * min(1.0, prompts / 300) if prompts else 0.0
    return base + added


def cpu(decoding: int, prompts: int) -> float:
    """Every token costs."""
    return 0.0005 + 0.00015 * decoding + 50e-6 * prompts


MACHINES: dict[str, Cost] = {"gpu": gpu, "cpu": cpu}


def run(
    controller: ChunkController, cost: Cost, decoding: int, prompts: list[int], steps: int
) -> tuple[list[float], list[float]]:
    """(seconds of each step, seconds each prompt took): one prompt after the other, each begun
    when the one before was done and 20 steps have passed."""
    gaps = []
    waits = []
    for prompt in prompts:
        for _ in range(steps):
            gaps.append(cost(decoding, 0))
            controller.observe(decoding, 0, gaps[-1])
        left = prompt
        waited = 0.0
        while left:
            tokens = min(left, controller.budget(PendingLoad(decoding, 1, left)))
            seconds = cost(decoding, tokens)
            controller.observe(decoding, tokens, seconds)
            gaps.append(seconds)
            waited += seconds
            left -= tokens
        waits.append(waited)
    return gaps, waits


def alone(controller: ChunkController, cost: Cost, prompt: int) -> float:
    seconds = cost(0, prompt)
    controller.observe(0, prompt, seconds)
    return seconds


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("prompt", [300, 2000, 5000])
@pytest.mark.parametrize("decoding", [1, 8, 30])
def test_streams_wait_little_and_prompts_at_most_twice_as_long(
    machine: str, prompt: int, decoding: int
) -> None:
    cost = MACHINES[machine]
    controller = ChunkController(MOST)
    least = alone(controller, cost, prompt)
    gaps, waits = run(controller, cost, decoding, [prompt] * 40, 20)
    usual = cost(decoding, 0)
    assert max(waits[5:]) <= 1.2 * DELAY * least + usual
    delay = 1 + (DELAY - 1) * min(1.0, MOST / (4 * prompt))
    sizes = range(16, MOST, 16)
    short = max((n for n in sizes if cost(decoding, n) <= GAP * usual), default=16)
    soon = min(n for n in sizes if cost(decoding, n) * prompt / n <= delay * least)
    # sizes come two in a doubling, and costs are means over such ranges
    best = max(GAP * usual, cost(decoding, max(short, soon * 3 // 2)))
    assert max(gaps[150:]) <= 1.2 * best
    assert max(gaps) <= 2 * best, "before the costs beside were measured"


@pytest.mark.parametrize("machine", MACHINES)
def test_a_burst_is_worked_off(machine: str) -> None:
    cost = MACHINES[machine]
    controller = ChunkController(MOST)
    whole = alone(controller, cost, MOST)
    run(controller, cost, 8, [1000] * 5, 20)
    left = 8 * MOST
    spent = 0.0
    while left > 0:
        tokens = controller.budget(PendingLoad(8, 7, left))
        spent += cost(8, tokens)
        controller.observe(8, tokens, cost(8, tokens))
        left -= tokens
    assert spent <= 1.4 * 8 * whole


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("target", [0.030, 0.060])
def test_a_target_is_kept_whatever_waits(machine: str, target: float) -> None:
    cost = MACHINES[machine]
    controller = ChunkController(MOST, target)
    alone(controller, cost, 4000)
    gaps, _ = run(controller, cost, 8, [MOST] * 20, 20)
    assert max(gaps) <= 1.5 * target, "before the costs beside were measured"
    assert max(gaps[60:]) <= 1.1 * target
    assert max(gaps) >= 0.5 * target, "and is made use of"


def test_nothing_is_held_back_where_nobody_decodes_or_nothing_waits() -> None:
    controller = ChunkController(MOST)
    assert controller.budget(PendingLoad(0, 1, 5000)) == MOST
    assert controller.budget(PendingLoad(9, 0, 0)) == MOST
    assert controller.budget(PendingLoad(9, 10, 5000)) == MOST
    assert 0 < controller.budget(PendingLoad(9, 1, 5000)) < 1000, "nothing is known yet"
    assert 0 < ChunkController(MOST, 0.05).budget(PendingLoad(9, 10, 5000)) < 1000


def test_one_disturbed_step_changes_little() -> None:
    controller = ChunkController(MOST)
    alone(controller, gpu, 2000)
    run(controller, gpu, 8, [2000] * 20, 20)
    before = controller.budget(PendingLoad(8, 1, 2000))
    controller.observe(8, 0, 5.0)
    controller.observe(8, before, 9.0)
    assert before / 2.1 <= controller.budget(PendingLoad(8, 1, 2000)) <= before * 2.1


@pytest.mark.parametrize("given", ["fast", "0", "-3", "1e9", "nan"])
def test_what_is_no_time_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="itl_ms="):
        EngineConfig("folder", itl_ms=given)


@pytest.mark.exhaustive
def test_tokens_are_the_same_however_prompts_are_chunked() -> None:
    """In fp32; and prompts are really taken in pieces."""
    prompts = [[(7 * i + j) % 4000 for j in range(90 + 40 * i)] for i in range(8)]
    params = [
        SamplingParams(temperature=0, max_tokens=5 + 9 * i, ignore_eos=True) for i in range(8)
    ]
    options = {"dtype": "float32", "max_num_seqs": 3, "max_model_len": 512, "page_size": 16}
    found = []
    steps = []
    for itl in ("off", "0.001"):
        llm = LLM(**options, itl_ms=itl, enable_prefix_caching=False)
        outs = llm.generate(prompts, params)
        found.append([out.outputs[0].token_ids for out in outs])
        steps.append(llm.engine.stats.steps)
    assert found[0] == found[1]
    assert steps[1] > steps[0] + 20
