"""One workload through the engine on this processor, and through the simulator with step times
measured on it.

Times are this process's processor seconds, the least of several of the same step, so that other
processes change them little; measuring and running take turns."""

from __future__ import annotations

import pytest

from demo.engine_steps import StepDriver
from rorqual import LLM
from rorqual.engine.engine import Engine
from rorqual.planner.simulator.cost_runner import MeasuredCosts
from rorqual.planner.simulator.results import outcome
from rorqual.planner.simulator.simulator import Deployment, Pool, Simulation
from rorqual.planner.simulator.workload import Arrival, Arrivals, LengthDistribution, Workload

pytestmark = pytest.mark.exhaustive

ROWS = (0, 1, 4, 12)
PROMPTS = (0, 16, 64, 124)
PIECE = 40
WORK = Workload(
    Arrivals("at-once"),
    LengthDistribution("uniform", 40, 20, 60),
    LengthDistribution("uniform", 24, 8, 40),
    requests=48,
)
# rounds of measuring and running; further tries add rounds where a busy machine disturbed them
ROUNDS = 3
TRIES = 12  # as many until another program leaves the machine alone
TOLERANCE = 0.1


@pytest.fixture(scope="module")
def engine() -> Engine:
    return LLM(
        threads=1,
        max_num_seqs=16,
        max_num_batched_tokens=136,
        max_model_len=256,
        page_size=16,
        skip_tokenizer_init=True,
    ).engine


class Driver(StepDriver):
    def measure(self, rows: int, prompt: int, times: int = 3) -> list[float]:
        """Seconds of steps in which `rows` requests decode and `prompt` prompt tokens are
        computed, in pieces as long as WORK's prompts."""
        (scheduler,) = self.engine.scheduler.schedulers
        for _ in range(rows):
            self.add(PIECE, 200)
        while scheduler.waiting or scheduler.prefilling:
            self.step()
        found = []
        for _ in range(times):
            for start in range(0, prompt, PIECE):
                self.add(min(PIECE, prompt - start), 1)
            found.append(self.step())
            assert len(scheduler.sequences) == rows, "the prompts took one step"
        for name in list(scheduler.sequences):
            self.engine.abort(name)
        return found

    def run(self, jobs: list[Arrival]) -> list[float]:
        """Seconds of each step of a whole workload."""
        for job in jobs:
            self.add(job.prompt, job.output)
        seconds = []
        while self.engine.has_work:
            seconds.append(self.step())
        return seconds


@pytest.mark.longest
def test_simulated_throughput_is_that_of_the_engine(engine: Engine) -> None:
    driver = Driver(engine)
    jobs = list(WORK.jobs(0))
    driver.run(jobs[:16])  # warm up
    points: dict[tuple[int, int], list[float]] = {
        (r, p): [] for r in ROWS for p in PROMPTS if r or p
    }
    runs: list[list[float]] = []
    for _ in range(TRIES):
        for _ in range(ROUNDS):
            for (rows, prompt), times in points.items():
                times += driver.measure(rows, prompt)
            runs.append(driver.run(jobs))
        costs = MeasuredCosts({point: min(times) for point, times in points.items()})
        simulation = Simulation(
            Deployment((Pool("all", engine.scheduler.config, costs),)), WORK, 0
        ).run()
        found = outcome(simulation)
        assert found.output_tokens == sum(job.output for job in jobs)
        assert {len(steps) for steps in runs} == {simulation.timelines[0].steps}, (
            "the same scheduler takes the same steps"
        )
        real = found.output_tokens / sum(map(min, *runs))
        if abs(found.output_rate / real - 1) <= TOLERANCE:
            return
    pytest.fail(f"simulated {found.output_rate:.0f} tokens/s, the engine made {real:.0f}")
