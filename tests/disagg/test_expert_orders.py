"""Orders to an expert server to hold other experts, said by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from rorqual.disagg.experts import slot_moves
from rorqual.disagg.experts.server import ExpertServer
from rorqual.errors import ConfigError
from rorqual.parallel.remote.link import send
from rorqual.parallel.remote.orders import SlotChange
from rorqual.parallel.remote.wire import ExpertMessage, Holdings
from tests.disagg.expert_caller import Caller, Start

LAYER = 3


@pytest.fixture(scope="module")
def whole(start: Start) -> ExpertServer:
    return start(layers=f"1,{LAYER}")


@pytest.fixture
def server(start: Start) -> Iterator[ExpertServer]:
    server = start("0-3", layers=f"1,{LAYER}", max_slots=5)
    yield server
    server.close()


def carried_out(caller: Caller, number: int, version: int = 0) -> Holdings:
    """Of the holdings that come, those after the order."""
    deadline = time.monotonic() + 30
    while True:
        found = caller.ping(version)
        if found is not None:
            version = found.version
            if found.finished == number:
                return found
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_was_loaded_computes(server: ExpertServer, whole: ExpertServer) -> None:
    row = torch.randn(server.shard.config.hidden_size)
    control, data, other = Caller(server, None), Caller(server, 0), Caller(whole, 0)
    assert control.holdings().max_slots == 5
    assert control.order(9, l3=SlotChange((1,), (7, 14)), l1=SlotChange((), (15,))) == ""
    found = carried_out(control, 9)
    assert found.layers == {1: (0, 1, 2, 3, 15), 3: (0, 2, 3, 7, 14)}
    assert not found.failure
    for expert in found.layers[LAYER]:
        torch.testing.assert_close(
            data.call(LAYER, expert, row), other.call(LAYER, expert, row), rtol=0, atol=0
        )


def test_a_dropped_expert_serves_who_has_not_heard_of_it(
    server: ExpertServer, whole: ExpertServer
) -> None:
    """Until its slot is needed; and it comes back without being read."""
    row = torch.randn(server.shard.config.hidden_size)
    control, data = Caller(server, None), Caller(server, 0)
    version = control.holdings().version
    wanted = Caller(whole, 0).call(LAYER, 2, row)
    assert control.order(1, l3=SlotChange((2,))) == ""
    found = carried_out(control, 1, version)
    assert found.layers[LAYER] == (0, 1, 3)
    torch.testing.assert_close(data.call(LAYER, 2, row), wanted, rtol=0, atol=0)
    read = server.shard.read
    server.shard.read = None  # type: ignore[assignment,method-assign]
    assert control.order(2, l3=SlotChange((), (2,))) == ""
    found = carried_out(control, 2, found.version)
    assert (found.layers[LAYER], found.failure) == ((0, 1, 2, 3), "")
    server.shard.read = read  # type: ignore[method-assign]
    assert control.order(3, l3=SlotChange((2,), (8, 9))) == ""
    found = carried_out(control, 3, found.version)
    assert found.layers[LAYER] == (0, 1, 3, 8, 9)
    assert data.call(LAYER, 2, row) == f"an expert of layer {LAYER} is not held here"
    torch.testing.assert_close(
        data.call(LAYER, 8, row), Caller(whole, 0).call(LAYER, 8, row), rtol=0, atol=0
    )


def test_no_slot_is_written_over_before_callers_know(
    server: ExpertServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one is silent: the order waits for it, or until it has waited for long enough."""
    monkeypatch.setattr(slot_moves, "SETTLE_SECONDS", 60.0)
    row = torch.randn(server.shard.config.hidden_size)
    control, silent, data = Caller(server, None), Caller(server, None), Caller(server, 0)
    version = silent.holdings().version
    control.holdings()
    assert control.order(1, l3=SlotChange((2,), (8, 9))) == ""
    found = control.ping(version)
    while found is None or 2 in found.layers[LAYER]:
        found = control.ping(version)
    for _ in range(20):
        assert control.ping(found.version) is None
        assert not isinstance(data.call(LAYER, 2, row), str)
        time.sleep(0.01)
    newer = silent.ping(version)
    assert newer is not None
    silent.ping(newer.version)
    found = carried_out(control, 1, found.version)
    assert found.layers[LAYER] == (0, 1, 3, 8, 9)


@pytest.mark.parametrize(
    ("layer", "change", "text"),
    [
        ("l2", SlotChange((), (9,)), "layer 2 is not held here; accepted: 1,3"),
        ("l3", SlotChange((4, 5), ()), "expert 4-5 of layer 3 is not held here"),
        ("l3", SlotChange((), (0, 9)), "expert 0 of layer 3 is held here already"),
        ("l3", SlotChange((0,), (9, 10, 11)), "6 experts of layer 3 do not fit; accepted: at most"),
    ],
)
def test_orders_that_are_refused_change_nothing(
    layer: str, change: SlotChange, text: str, server: ExpertServer
) -> None:
    control = Caller(server, None)
    version = control.holdings().version
    assert text in control.order(1, **{layer: change})
    assert control.ping(version) is None
    assert control.order(2, l3=SlotChange((), (9,))) == ""
    assert carried_out(control, 2, version).layers[LAYER] == (0, 1, 2, 3, 9)


def test_one_caller_gives_orders_at_a_time(server: ExpertServer) -> None:
    first, second = Caller(server, None), Caller(server, None)
    first.holdings()
    second.holdings()
    assert first.order(0) == ""
    assert second.order(0) == "another process gives orders here"
    assert first.order(0, release=True) == ""
    assert second.order(0) == ""
    second.sock.close()
    deadline = time.monotonic() + 10
    while refused := first.order(0):
        assert time.monotonic() < deadline, refused
        time.sleep(0.01)


def test_an_order_that_cannot_be_read_is_given_up(
    server: ExpertServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = Caller(server, None)
    version = control.holdings().version

    def read(experts: object) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(server.shard, "read", read)
        assert control.order(4, l3=SlotChange((1,), (9,))) == ""
        found = carried_out(control, 4, version)
    assert found.failure == "OSError: the disk is gone"
    assert found.layers == {1: (0, 1, 2, 3), 3: (0, 2, 3)}
    assert control.order(5, l3=SlotChange((), (1,))) == ""
    assert carried_out(control, 5, found.version).layers[LAYER] == (0, 1, 2, 3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"number": -1, "layers": {}, "release": false}',
        b'{"number": 1, "layers": [], "release": false}',
        b'{"number": 1, "layers": {"3": ["none"]}, "release": false}',
        b'{"number": 1, "layers": {"3": ["none", "16"]}, "release": false}',
        b'{"number": 1, "layers": {"x": ["none", "1"]}, "release": false}',
        b'{"number": 1, "layers": {}}',
    ],
)
def test_orders_that_nobody_gives_end_the_link(data: bytes, server: ExpertServer) -> None:
    control = Caller(server, None)
    control.holdings()
    send(control.sock, ExpertMessage.ORDER, data)
    assert control.ended()


def test_slots_need_room(start: Start) -> None:
    with pytest.raises(ConfigError, match="slots='none' needs max_slots; accepted: 1 to 16"):
        start("none")
    with pytest.raises(ConfigError, match="max_slots=3 is out of range; accepted: 4 to 16"):
        start("0-3", max_slots=3)
    with pytest.raises(ConfigError, match="max_slots=17 is out of range; accepted: 4 to 16"):
        start("0-3", max_slots=17)
    server = start("none", layers="1", max_slots=2)
    assert Caller(server, None).holdings().layers == {1: ()}
