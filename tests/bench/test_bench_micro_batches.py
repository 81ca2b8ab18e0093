"""`rorqual bench micro-batches` on the bundled model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rorqual import LLM
from rorqual.bench.micro_batches import run as bench
from rorqual.bench.micro_batches.run import BenchSizes, Cell, foretold, permitted, verdicts
from rorqual.engine.micro_batches.step_times import (
    MeasuredSize,
    PhaseTimes,
    StageSeconds,
    StepTimes,
)
from rorqual.errors import ConfigError

ENGINE: dict[str, Any] = {
    "dp": 2,
    "ep": 2,
    "threads": 1,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": 1024,
    "num_pages": 400,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
}


def test_what_overlap_permits() -> None:
    """Computing 3 ms and the wire 2 ms a layer, two layers, and 4 ms beside them."""
    stages = (StageSeconds(1e-3, 1e-3), StageSeconds(1e-3, 1e-3), StageSeconds(0.0))
    phase = PhaseTimes((MeasuredSize(8, 8, "alltoall", 1e-3, stages, (14e-3,)),))
    found = permitted(StepTimes(2, phase, PhaseTimes(reason="none")), True, 8)
    assert found == pytest.approx((0.4, 0.4))
    assert permitted(StepTimes(2, phase, PhaseTimes(reason="none")), False, 8) == (0, 0)
    # stages that take longer one by one than in the pass: what the wire leaves of it
    phase = PhaseTimes((MeasuredSize(8, 8, "alltoall", 1e-3, stages, (9e-3,)),))
    found = permitted(StepTimes(2, phase, PhaseTimes(reason="none")), True, 8)
    assert found == pytest.approx((9 / 5 - 1, 4 / 5))


def test_ratios_are_taken_within_a_repeat() -> None:
    cell = Cell("decode", 8, 8, 0.4, 0.4)
    cell.rates = {"1": [10.0, 20.0, 40.0], "2": [12.0, 22.0, 48.0], "auto": [12.0, 24.0, 48.0]}
    assert cell.ratio("2", "1") == pytest.approx(1.2)
    assert cell.best_fixed == "2"
    assert cell.ratio("auto", cell.best_fixed) == 1
    assert cell.spread("auto") == pytest.approx(0.0)


def cell(tokens: int, decided: int, auto: float, three: float = 1.0, share: float = 1.0) -> Cell:
    """permitted: twice as fast. Rates: 1 part 10 in every repeat, 2 parts 15."""
    rates = {"1": 10.0, "2": 15.0, "3": 10 * three, "auto": 10 * auto}
    repeats = {name: [rate, rate, rate] for name, rate in rates.items()}
    return Cell("prompts", tokens, 4, 1.0, share, decided, {}, repeats)


def test_cells_that_lose_are_named() -> None:
    cells = [cell(1, 2, 1.7), cell(2, 3, 0.9), cell(3, 1, 0.9, share=2.0), cell(4, 2, 1.3, 1.6)]
    cells += [cell(5, 3, 1.48, 1.48), cell(6, 3, 1.6, 1.6)]
    slower, behind, lost = verdicts(cells)
    assert slower == "auto is not slower than one part: not in prompts 2"
    assert behind.endswith("not in prompts 2, prompts 3, prompts 4")
    assert lost.startswith("auto gains 60% of what is permitted (5 cells")
    assert lost.endswith("not in prompts 2, prompts 4, prompts 5")
    assert [line.rpartition(": ")[2] for line in verdicts(cells[-1:])] == ["in every cell"] * 3


def test_a_spread_counts_against_a_loss() -> None:
    noisy = cell(1, 2, 0.97)
    noisy.rates["auto"] = [9.0, 9.7, 10.4]
    assert "in every cell" in next(verdicts([noisy]))


def test_ratios_are_predicted_from_the_measured_times() -> None:
    found = {8: (6.4e-3, 4.4e-3, 3.6e-3), 4: (3.2e-3, 3e-3), 2: (2e-3, 2e-3)}
    sizes = []
    for tokens, passes in found.items():
        each = StageSeconds(tokens * 1e-4, tokens * 1e-4)
        stages = (each, each, StageSeconds(0.0))
        sizes.append(MeasuredSize(tokens, tokens, "alltoall", 0.0, stages, passes))
    phase = PhaseTimes(tuple(sorted(sizes, key=lambda one: one.tokens)))
    times = StepTimes(2, phase, PhaseTimes(reason="none"))
    ratios = foretold(times, True, (1,) * 8, 2)
    assert ratios == pytest.approx({"2": 64 / 44, "3": 64 / 36, "auto": 64 / 36})
    assert foretold(times, False, (4, 4), 2) == {}


@pytest.mark.exhaustive
@pytest.mark.longest
def test_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(**ENGINE, micro_batches="auto", keep_step_times=False)
    sizes = BenchSizes(prompts=(24,), batches=(4,), requests=4, repeats=2)
    lines: list[str] = []
    cells = bench.run(llm.engine, sizes, lines.append)
    assert [(cell.phase, cell.tokens) for cell in cells] == [("prompts", 24), ("decode", 4)]
    for cell in cells:
        assert set(cell.rates) == {"1", "2", "3", "4", "auto"}
        assert all(len(rates) == 2 and min(rates) > 0 for rates in cell.rates.values())
        assert {"2", "auto"} <= set(cell.predicted), "before it was run"
    assert {2, 3, 4} <= set(llm.engine.stats.steps_by_parts)
    bench.print_table(cells)
    assert "tokens a rank" in capsys.readouterr().out
    times = llm.engine.worker.step_times
    assert times is not None
    assert json.loads(bench.as_json(cells, times))["measured"] == json.loads(times.as_json())
    with pytest.raises(ConfigError, match="batch 5 exceeds max_num_seqs=4"):
        bench.run(llm.engine, BenchSizes((24,), (5,), 4, 1), lines.append)
    llm.engine.close()
