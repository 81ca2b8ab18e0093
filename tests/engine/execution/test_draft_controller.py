"""The controller of num_speculative_tokens against machines with known step times and
acceptance."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from rorqual.engine.execution.draft_controller import MARGIN, PROBE_EVERY, DraftController


@dataclass
class Machine:
    """seconds[n] a step that verifies n drafts, gains[n] new tokens a request in it; both with a
    little noise."""

    seconds: list[float]
    gains: list[float]
    noise: float = 0.02
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, controller: DraftController, steps: int, batch: int = 8) -> Counter[int]:
        """How often each num_speculative_tokens was chosen."""
        chosen: Counter[int] = Counter()
        for _ in range(steps):
            n = controller.next_count(batch)
            chosen[n] += 1
            controller.observe(batch, n, self.tokens(batch, n), self.time(n))
        return chosen

    def tokens(self, batch: int, n: int) -> int:
        """Whole tokens, right on average."""
        wanted = batch * self.gains[n]
        return int(wanted) + (self.rng.random() < wanted % 1)

    def time(self, n: int) -> float:
        return self.seconds[n] * (1 + self.noise * self.rng.uniform(-1, 1))

    def best(self) -> int:
        return max(range(len(self.seconds)), key=lambda n: self.gains[n] / self.seconds[n])


GAINS = [1.0, 1.85, 2.57, 3.19]  # 0.85 of the drafts are right at every place
CASES = {
    "drafts are nearly free": [1.0, 1.02, 1.04, 1.06],
    "drafts cost what they bring": [1.0, 1.95, 2.9, 3.8],
    "one is best": [1.0, 1.2, 1.9, 2.6],
    "two are best": [1.0, 1.5, 1.7, 2.5],
    "not monotone": [1.0, 2.2, 1.9, 1.8],
}


@pytest.mark.parametrize("name", CASES)
def test_it_finds_the_best(name: str) -> None:
    machine = Machine(CASES[name], GAINS)
    controller = DraftController(3, adaptive=True)
    machine.run(controller, 100)
    chosen = machine.run(controller, 2000)
    assert chosen.most_common(1)[0][0] == machine.best()
    assert chosen[machine.best()] > 0.9 * 2000, "trying others costs a tenth at most"
    assert set(chosen) == {0, 1, 2, 3}, "the others are tried now and then"


def test_it_recovers_when_the_text_changes() -> None:
    """Acceptance falls, then rises: within a few probes of every alternative the choice follows."""
    controller = DraftController(3, adaptive=True)
    steps = 4 * 3 * PROBE_EVERY
    easy = Machine([1.0, 1.1, 1.2, 1.3], GAINS)
    hard = Machine([1.0, 1.1, 1.2, 1.3], [1.0, 1.03, 1.03, 1.03])
    for machine in (easy, hard, easy, hard):
        machine.run(controller, steps)
        assert machine.run(controller, 500).most_common(1)[0][0] == machine.best()


def test_a_small_advantage_moves_nothing() -> None:
    """Two choices within the margin of one another, and noise above their difference: the first
    one found good stays."""
    near = 1 + (MARGIN - 1) / 3
    machine = Machine([1.0, 1.85 / near], GAINS[:2], noise=0.1)
    controller = DraftController(1, adaptive=True)
    machine.run(controller, 300)
    held = [machine.run(controller, 200).most_common(1)[0][0] for _ in range(30)]
    assert sum(a != b for a, b in itertools.pairwise(held)) <= 2


def test_every_bucket_of_batch_sizes_is_on_its_own() -> None:
    controller = DraftController(3, adaptive=True)
    small = Machine(CASES["drafts are nearly free"], GAINS)
    large = Machine(CASES["drafts cost what they bring"], GAINS)
    for _ in range(60):
        small.run(controller, 10, batch=3)
        large.run(controller, 10, batch=100)
    assert small.run(controller, 200, batch=2).most_common(1)[0][0] == 3
    assert large.run(controller, 200, batch=127).most_common(1)[0][0] == 0


@pytest.mark.parametrize("num_speculative_tokens", range(4))
def test_a_disturbed_step_says_nothing(num_speculative_tokens: int) -> None:
    """One step in forty takes a hundred times as long; also each choice's very first, as where a
    kernel is made on first use."""
    machine = Machine(CASES["two are best"], GAINS)
    controller = DraftController(3, adaptive=True)
    seen: Counter[int] = Counter()
    for step in range(1200):
        n = controller.next_count(8)
        seen[n] += 1
        slow = 100 if step % 40 == 7 or (n == num_speculative_tokens and seen[n] == 1) else 1
        controller.observe(8, n, machine.tokens(8, n), machine.time(n) * slow)
    assert machine.run(controller, 200).most_common(1)[0][0] == 2


def test_steps_that_stay_slow_are_believed() -> None:
    """The choice in use becomes ten times slower for good: not a disturbance, however large."""
    controller = DraftController(1, adaptive=True)
    Machine([1.0, 1.1], GAINS[:2]).run(controller, 500)
    assert controller.next_count(8) == 1
    changed = Machine([1.0, 11.0], GAINS[:2])
    changed.run(controller, 3 * PROBE_EVERY)
    assert changed.run(controller, 200).most_common(1)[0][0] == 0


def test_the_first_step_after_a_change_verifies_what_was_drafted_before() -> None:
    """A step that may verify n drafts finds no more than the step before made: that is not what
    n brings in the long run."""
    seconds = [1.0, 1.2, 1.55, 1.9]
    gains = GAINS
    machine = Machine(seconds, gains, noise=0.005)
    controller = DraftController(3, adaptive=True)
    before = 0
    assert machine.best() == 3
    for _ in range(3000):
        n = controller.next_count(64)
        controller.observe(64, n, round(64 * gains[min(n, before)]), machine.time(n))
        before = n
    rates = {n: estimate.rate / 64 for n, estimate in controller.buckets[7].estimates.items()}
    assert rates == pytest.approx({n: gains[n] / seconds[n] for n in range(4)}, rel=0.02)


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_pinned_choice_stays(adaptive: bool) -> None:
    """With one choice, and with adaptive off, nothing is ever tried."""
    machine = Machine(CASES["drafts cost what they bring"], GAINS)
    controller = DraftController(3, adaptive=False)
    assert controller.choices == (3,)
    assert set(machine.run(controller, 500)) == {3}
    assert not controller.buckets
    assert set(machine.run(DraftController(0, adaptive), 20)) == {0}


def test_late_observations_count_for_what_they_ran_with() -> None:
    """With steps in flight, results of a choice come in after another was made."""
    machine = Machine(CASES["one is best"], GAINS)
    controller = DraftController(3, adaptive=True)
    waiting = []
    for _ in range(1500):
        waiting.append(controller.next_count(8))
        if len(waiting) == 3:
            n = waiting.pop(0)
            controller.observe(8, n, machine.tokens(8, n), machine.time(n))
    assert Counter(controller.next_count(8) for _ in range(1)).most_common(1)[0][0] == 1


def test_nothing_decodes() -> None:
    assert DraftController(3, adaptive=True).next_count(0) == 3
