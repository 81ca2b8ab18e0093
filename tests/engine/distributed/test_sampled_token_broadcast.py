"""A stage that does not draw waits for drawn tokens when it needs them, and not before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.execution.sampled_token_broadcast import SampledTokenBroadcast
from rorqual.platforms import make_platform


@dataclass
class Transfer:
    """Arrives when asked: every row's state is `value`."""

    state: Tensor
    value: int
    waited: bool = False

    def wait(self) -> Tensor:
        self.waited = True
        return self.state.fill_(self.value)


@dataclass
class Axis:
    size: int = 2
    transfers: list[Transfer] = field(default_factory=list)

    def start_broadcast(self, x: Tensor, root: int) -> Transfer:
        assert root == 1
        self.transfers.append(Transfer(x, 10 + len(self.transfers)))
        return self.transfers[-1]


@dataclass
class Stage:
    axes: dict[str, Any]
    last_stage: bool = False


def make(last: bool = False) -> tuple[RequestState, Axis, SampledTokenBroadcast]:
    rows = RequestState(6, 4, 32, make_platform("cpu"), most_drafts=2)
    axis = Axis()
    return rows, axis, SampledTokenBroadcast(rows, Stage({"tokens": axis}, last))  # type: ignore[arg-type]


def test_other_requests_are_not_waited_for() -> None:
    rows, axis, shared = make()
    for slots in ([0, 1], [2, 3], [4]):
        shared.start(slots)
    shared.settle([5])
    assert [transfer.waited for transfer in axis.transfers] == [False, False, False]
    shared.settle([3])  # and what was sent before it
    assert [transfer.waited for transfer in axis.transfers] == [True, True, False]
    assert rows.last_token.tolist() == rows.length.tolist() == [10, 10, 11, 11, 0, 0, 0]
    assert rows.drafts[3].tolist() == [11, 11]
    shared.settle([3])
    assert not axis.transfers[2].waited


def test_a_row_set_up_anew_is_not_overwritten_by_what_its_last_request_drew() -> None:
    rows, axis, shared = make()
    shared.start([2])
    shared.settle([2])
    rows.length[2] = 0
    shared.settle([2])
    assert axis.transfers[0].waited
    assert rows.length[2] == 0


def test_the_last_stage_sends_what_it_has() -> None:
    rows, axis, shared = make(last=True)
    rows.last_token[3] = 7
    rows.length[3] = 8
    rows.num_drafts[3] = 1
    rows.drafts[3] = torch.tensor([5, 6])
    shared.start([3])
    assert axis.transfers[0].state.tolist() == [[7, 8, 1, 5, 6]]
    shared.settle([3])
    assert rows.last_token[3] == 7


def test_without_stages_or_rows_nothing_is_sent() -> None:
    _, axis, shared = make()
    shared.start([])
    axis.size = 1
    shared.start([1])
    assert not axis.transfers
