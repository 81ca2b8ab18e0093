"""Two steps that take turns: which advances when, and what is left of a step that is given up."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest
import torch

from rorqual.parallel.remote.steps_in_turns import BegunStep, StepsInTurns


class Steps:
    """Steps of three hand-overs each, which write down what they do."""

    def __init__(self) -> None:
        self.turns = StepsInTurns()
        self.done: list[str] = []

    def launch(self, name: str, fails_at: int = -1) -> BegunStep:
        return self.turns.launch(self._forward(name, fails_at), self._end(name))

    def _forward(self, name: str, fails_at: int) -> Generator[None, None, torch.Tensor]:
        for number in range(3):
            if number == fails_at:
                raise KeyboardInterrupt
            self.done.append(f"{name}{number}")
            yield
        self.done.append(f"{name}3")
        return torch.zeros(0)

    def _end(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda hidden: self.done.append(name)


def test_a_step_ends_beside_the_next() -> None:
    steps = Steps()
    a = steps.launch("a")
    assert steps.done == ["a0"]
    b = steps.launch("b")
    assert steps.done == ["a0", "a1", "b0", "a2", "b1", "a3", "a", "b2"]
    assert a.over
    assert not b.over
    steps.turns.finish(a)
    c = steps.launch("c")
    assert steps.done[8:] == ["b3", "b", "c0"]
    steps.turns.finish(b)
    assert b.over
    assert not c.over
    steps.turns.finish(c)
    assert steps.done[11:] == ["c1", "c2", "c3", "c"]
    assert c.over


@pytest.mark.parametrize("older", [True, False])
def test_neither_goes_on_after_an_error(older: bool) -> None:
    steps = Steps()
    steps.launch("a", 2 if older else -1)
    with pytest.raises(KeyboardInterrupt):
        steps.launch("b", -1 if older else 1)
    count = len(steps.done)
    c = steps.launch("c")
    assert steps.done[count:] == ["c0"]
    steps.turns.finish(c)
    assert c.over


def test_what_is_abandoned_computes_nothing_more() -> None:
    steps = Steps()
    a = steps.launch("a")
    steps.turns.abandon()
    steps.turns.finish(a)
    steps.launch("b")
    assert not a.over
    assert steps.done == ["a0", "b0"]
