"""When experts are moved, on loads made up for it: steps are counted, nothing is computed."""

from __future__ import annotations

import numpy as np
import pytest

from rorqual.engine.balance.moves import Move, MoveResult, changed_slots, moves
from rorqual.engine.balance.policy import LoadWindow, RebalancePolicy, noise_limit
from rorqual.parallel.eplb.placement import Floats, balancedness, place

LAYERS = 4
EXPERTS = 64
SLOTS = 72
RANKS = 8
WINDOW = 25
PICKS = 8192  # of a step and layer


def workload(seed: int) -> Floats:
    """Shares of picks."""
    load = np.random.default_rng(seed).lognormal(0, 1, (LAYERS, EXPERTS))
    return load / load.sum(1, keepdims=True)


class Served:
    """Steps under a workload; a move takes `taken` steps."""

    def __init__(self, first: Floats, picks: int = PICKS, taken: int = 2):
        self.policy = RebalancePolicy(
            place(first, SLOTS, RANKS), range(3, 3 + LAYERS), RANKS, 0.9, LoadWindow(WINDOW, 0.5), 8
        )
        self.generator = np.random.default_rng(0)
        self.totals = np.zeros((LAYERS, EXPERTS), np.int64)
        self.step = 0
        self.picks = picks
        self.taken = taken
        self.detected: int | None = None

    def run(self, load: Floats, steps: int) -> list[int]:
        """Steps at which moves were put in force."""
        applied = []
        pending: list[Move] = []
        for _ in range(steps):
            self.step += 1
            self.totals += np.stack([self.generator.multinomial(self.picks, row) for row in load])
            if pending:
                if self.step % self.taken == 0:
                    move = pending.pop(0)
                    self.policy.applied(move, 1, 1, 0.01)
                    self.policy.numbered(move)
                    applied.append(self.step)
            elif self.step % 5 == 0 and self.policy.observe(self.step, self.totals):
                self.detected = self.detected or self.step
                pending = self.policy.decide(self.policy.plan(), self.step, 0.05)
        return applied

    def balance(self, load: Floats) -> float:
        return balancedness(self.policy.placement, load, RANKS)


def test_a_load_that_changes_is_followed_at_once_and_then_left_alone() -> None:
    one, other = workload(1), workload(2)
    served = Served(one)
    assert served.run(one, 400) == [], "balanced from the start"
    assert served.balance(other) < 0.8
    changed = served.step
    applied = served.run(other, 600)
    assert served.detected is not None
    assert served.detected - changed <= 2 * WINDOW
    back = next(step for step in applied if step >= served.detected)
    assert back < served.detected + 100
    assert served.balance(other) > 0.9
    assert max(applied) < served.detected + 100, "and all of it is over by then"


def test_balance_is_back_within_a_hundred_steps() -> None:
    served = Served(workload(1))
    other = workload(2)
    while served.detected is None:
        served.run(other, 1)
    served.detected = None
    start = served.step
    # what was decided in the step above is lost with it: the next window decides again
    served.run(other, 100)
    assert served.step == start + 100
    assert served.balance(other) > 0.9


def test_noise_is_not_followed() -> None:
    """So few picks that no placement looks balanced: moving experts would never end."""
    load = workload(3)
    served = Served(load, picks=24)
    assert served.run(load, 2000) == []
    assert served.policy.stats.balancedness is not None
    assert served.policy.stats.balancedness < 0.9
    assert 0 < served.policy.stats.plans < 30, "of 80 windows"


def test_a_move_that_costs_more_than_it_brings() -> None:
    served = Served(workload(1))
    served.policy.slot_seconds = 1e4
    assert served.run(workload(2), 300) == []
    assert served.policy.stats.plans > 0


def test_windows_and_decay() -> None:
    window = LoadWindow(10, 0.5)
    assert not window.add(0, [[0, 0]])
    assert not window.add(9, [[9, 0]])
    assert window.add(10, [[10, 0]])
    assert window.add(20, [[10, 8]])
    assert window.newest is not None
    assert window.load is not None
    assert window.newest.tolist() == [[0, 8]]
    assert window.load.tolist() == [[5, 8]]
    assert not window.add(40, [[10, 8]]), "an engine without requests says nothing"
    assert not window.add(60, [[1, 0]]), "counted anew"


def test_noise_limit_is_what_sampling_gives() -> None:
    generator = np.random.default_rng(4)
    for mean in (100, 2000):
        counts = generator.poisson(mean, (500, RANKS))
        found = (counts.mean(1) / counts.max(1)).mean()
        limit = noise_limit(np.full((1, RANKS), mean), RANKS)
        assert found == pytest.approx(limit, abs=0.3 * (1 - limit))


def test_moves_change_few_slots_of_any_rank_at_a_time() -> None:
    old, new = place(workload(5), SLOTS, RANKS).tolist(), place(workload(6), SLOTS, RANKS).tolist()
    present = dict(enumerate(old))
    made = list(moves(present, list(enumerate(new)), RANKS, 4, 7))
    assert [move.number for move in made] == list(range(7, 7 + len(made)))
    now = {layer: list(row) for layer, row in present.items()}
    for move in made:
        assert Move.decode(move.encode()) == move
        used = np.zeros(RANKS, np.int64)
        for layer, row in move.layers:
            used += changed_slots(now[layer], row, RANKS)
            now[layer] = list(row)
            assert set(row) == set(range(EXPERTS))
        assert 0 < used.max() <= 4
    assert [now[layer] for layer in range(LAYERS)] == new


def test_answers_travel() -> None:
    answer = MoveResult(3, 2, 0.5, "RuntimeError: no", True)
    assert MoveResult.decode(answer.encode()) == answer
