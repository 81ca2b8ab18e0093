"""What is said over a link of shared memory, and when a server may write over weights."""

from __future__ import annotations

import json
import random
import threading
import time

import pytest

from rorqual.config.host_memory import host_number
from rorqual.disagg.experts.server import ExpertServer
from rorqual.disagg.experts.step_gate import StepGate
from rorqual.errors import CapacityError
from rorqual.parallel.remote.link import LinkError, receive, send
from rorqual.parallel.remote.wire import (
    HANDLES,
    MAX_LANES_BYTES,
    BlockName,
    ExpertMessage,
    Join,
    LanesOffer,
    SharedCall,
    join,
    lanes_made,
    lanes_refused,
    pack_step,
    read_lanes_made,
    read_step,
)
from tests.disagg.expert_caller import Caller, Start

NAME = BlockName("0" * 32, "a" * 32)
CALLER = "12" * 16


def offer(**changes: object) -> bytes:
    given = LanesOffer(host_number(), 2, 64, 64, 4, False, "float32", NAME)
    return json.dumps({**json.loads(given.pack()), **changes}).encode()


def test_messages_come_back() -> None:
    step = {0: (SharedCall(3, 7), SharedCall(61, 1)), 2: (SharedCall(0, 64),)}
    assert read_step(pack_step(step), 3, 64) == step
    made = LanesOffer(5, 2, 64, 7168, 8, True, "bfloat16", NAME)
    assert LanesOffer.unpack(made.pack()) == made
    assert read_lanes_made(lanes_made(NAME)) == NAME
    with pytest.raises(LinkError, match="too far away"):
        read_lanes_made(lanes_refused("too far away"))
    for lane in (None, 3, HANDLES):
        assert Join.unpack(join(lane, CALLER)) == Join(lane, CALLER)
    assert Join.unpack(join(2)) == Join(2)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        pack_step({0: (SharedCall(1, 65),)}),
        pack_step({0: (SharedCall(1, 0),)}),
        pack_step({3: (SharedCall(1, 1),)}),
        pack_step({0: ()}),
        pack_step({0: (SharedCall(1, 1),)})[:-1],
        2 * pack_step({0: (SharedCall(1, 1),)}),
        b"\0\0\xff\xff" + 4 * b"\0",
    ],
)
def test_steps_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(LinkError, match="step"):
        read_step(data, 3, 64)


@pytest.mark.parametrize("lane", [-1, 8, "others", 1.5, True])
def test_lanes_that_are_none_are_refused(lane: object) -> None:
    with pytest.raises(LinkError, match="accepted"):
        Join.unpack(json.dumps({"lane": lane}).encode())


@pytest.mark.parametrize("caller", ["", "12", "Z" * 32, 5])
def test_who_shares_memory_says_who_it_is(caller: object) -> None:
    with pytest.raises(LinkError, match=r"caller|who"):
        Join.unpack(json.dumps({"lane": HANDLES, "caller": caller}).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"lanes": 0},
        {"lanes": 9},
        {"rows": 2**14 + 1},
        {"rows": -1},
        {"columns": 2**21},
        {"top_k": 65},
        {"fp8": 1},
        {"host": "here"},
        {"token": "b" * 31},
        {"name": "/tmp/socket"},
    ],
)
def test_offers_that_are_none_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(LinkError):
        LanesOffer.unpack(offer(**changes))


def test_a_server_says_why_it_shares_nothing_and_lives_on(start: Start) -> None:
    server: ExpertServer = start("all")
    dice = random.Random(5)

    def answer(data: bytes) -> dict[str, str]:
        caller = Caller(server, HANDLES, caller=CALLER)
        send(caller.sock, ExpertMessage.LANES, data)
        kind, found = receive(caller.sock, MAX_LANES_BYTES)
        assert kind == ExpertMessage.LANES_MADE
        assert caller.ended()
        reply: dict[str, str] = json.loads(found)
        return reply

    assert "another host" in answer(offer(host=host_number() ^ 1, **shape(server)))["why"]
    assert "accepted: float32" in answer(offer(dtype="int8", **shape(server)))["why"]
    assert "rows of 128" in answer(offer(**{**shape(server), "columns": 128}))["why"]
    assert "memory of cpu is not shared so" in answer(offer(**shape(server)))["why"]
    for _ in range(20):
        caller = Caller(server, HANDLES, caller=CALLER)
        send(caller.sock, dice.randrange(20), dice.randbytes(dice.randrange(200)))
        assert caller.ended()
    assert Caller(server, None).holdings().version == 1


def shape(server: ExpertServer) -> dict[str, object]:
    config = server.shard.config
    return {"columns": config.hidden_size, "top_k": config.moe.top_k}


def test_nothing_is_written_over_in_a_step() -> None:
    gate = StepGate()
    assert gate.enter(0)
    with pytest.raises(CapacityError, match="have not ended"), gate.between(0.1):
        pass
    assert gate.enter(0)  # nobody is held back by what did not come about
    gate.leave()
    order = []

    def end() -> None:
        time.sleep(0.15)
        order.append("end of the step")
        gate.leave()

    thread = threading.Thread(target=end)
    thread.start()
    with gate.between(5):
        order.append("between")
        assert not gate.enter(0.01)
        late = threading.Thread(target=lambda: (gate.enter(5), order.append("next step")))
        late.start()
        time.sleep(0.05)
        order.append("still between")
    for one in (thread, late):
        one.join(60)
    assert order == ["end of the step", "between", "still between", "next step"]


def test_who_is_held_back_sees_to_the_end_of_earlier_steps() -> None:
    """A caller has two steps under way, and its thread alone sees that the first is done."""
    gate = StepGate()
    assert gate.enter(0)
    changed = threading.Event()

    def change() -> None:
        with gate.between(5):
            changed.set()

    thread = threading.Thread(target=change)
    thread.start()
    while gate.enter(0.002):  # until it is held back
        gate.leave()
    gate.leave()
    assert changed.wait(60)
    assert gate.enter(5)
    thread.join(60)
