"""What is under way while something else computes: the order of calls of two parts of a step."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from rorqual.layers.moe import ExpertLayer, MoEInFlight
from rorqual.parallel.exchange import StoreExchange
from rorqual.parallel.layout import Layout
from rorqual.parallel.mesh import SINGLE_LAYOUT
from rorqual.parallel.overlap import run


class Told(StoreExchange):
    """Says what it is asked to do."""

    def __init__(self, calls: list[str], counts: bool):
        self.calls = calls
        self.counts = counts

    def counts_first(self, layout: Layout) -> bool:
        return self.counts

    def send(self, ticket: Any) -> None:
        self.calls.append(f"send {ticket}")

    def run_experts(self, ticket: Any, dense: Tensor | None = None) -> None:
        self.calls.append(f"experts {ticket}")

    def combine(self, ticket: Any, base: Tensor | None = None) -> Tensor:
        self.calls.append(f"combine {ticket}")
        return torch.zeros(1) if base is None else base


class Stages(ExpertLayer):
    shared = None

    def __init__(self, calls: list[str], counts: bool):
        self.exchange = Told(calls, counts)


def part(name: str, calls: list[str], counts: bool) -> Generator[None, None, Tensor]:
    """Attention and one sparse layer, as forward_layers chains them."""

    def dispatch(x: Tensor) -> MoEInFlight:
        calls.append(f"dispatch {name}")
        return MoEInFlight(x, SINGLE_LAYOUT, name)

    calls.append(f"attention {name}")
    first, *rest = Stages(calls, counts).exchange_stages(dispatch, SINGLE_LAYOUT)
    x = first(torch.zeros(1))
    for stage in rest:
        yield
        x = stage(x)
    return x


@pytest.mark.parametrize("counts", [False, True])
def test_attention_of_one_part_is_submitted_before_anything_waits_for_the_other(
    counts: bool,
) -> None:
    calls: list[str] = []
    run([part(name, calls, counts) for name in "ab"])
    assert calls[:4] == ["attention a", "dispatch a", "attention b", "dispatch b"]
    assert calls[4:] == [
        *(["send a", "send b"] if counts else []),
        "experts a",
        "experts b",
        "combine a",
        "combine b",
    ]


def test_the_shared_expert_computes_while_sums_travel_back() -> None:
    """Whatever the device: on a CPU nothing else would hide that trip in a step that is whole."""
    calls: list[str] = []
    layer = Stages(calls, False)
    layer.ops = cast(Any, SimpleNamespace(side_stream=nullcontext))

    def shared(x: Tensor, layout: Layout) -> Tensor:
        calls.append("shared")
        return x

    layer.shared = cast(Any, SimpleNamespace(forward=shared))
    work = MoEInFlight(torch.ones(1), SINGLE_LAYOUT, "a")
    assert float(layer.combine(layer.run_experts(work))) == 1
    assert calls == ["experts a", "shared", "combine a"]


class Gathered(Told):
    """It has the dense group's rows."""

    def dense_rows(self, ticket: Any) -> Tensor | None:
        return torch.ones(1)


@pytest.mark.parametrize("gathered", [False, True])
def test_shared_experts_of_parts_wait_until_all_routed_ones_are_submitted(gathered: bool) -> None:
    """A part's sums are sent before anything else of that part is computed, and the other part's
    routed experts come next. Shared experts whose sums the exchange returns are not repeated."""
    calls: list[str] = []
    layout = SINGLE_LAYOUT.alternating()
    assert not SINGLE_LAYOUT.alternates

    def part(name: str) -> Generator[None, None, Tensor]:
        layer = Stages(calls, False)
        layer.ops = cast(Any, SimpleNamespace(side_stream=nullcontext))
        if gathered:
            layer.exchange = Gathered(calls, False)

        def forward(x: Tensor, layout: Layout) -> Tensor:
            calls.append(f"shared {name}")
            return x

        def partial(x: Tensor) -> Tensor:
            calls.append(f"partial {name}")
            return x

        layer.shared = cast(Any, SimpleNamespace(forward=forward, partial=partial))
        work = MoEInFlight(torch.ones(1), layout, name)
        yield
        work = layer.run_experts(work)
        yield
        return layer.combine(work)

    found = run([part(name) for name in "ab"])
    if gathered:
        assert calls[:4] == ["partial a", "experts a", "partial b", "experts b"]
        assert calls[4:] == ["combine a", "combine b"]
        assert [float(x) for x in found] == [0, 0]
    else:
        assert calls[:2] == ["experts a", "experts b"]
        assert calls[2:] == ["shared a", "combine a", "shared b", "combine b"]
        assert [float(x) for x in found] == [1, 1]
