"""The imitated slow link takes the time it should, one message after the other."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from rorqual.ops.triton.comm.delay import delay, stamp
from rorqual.parallel.group_axis import Arriving
from rorqual.parallel.p2p_memory import P2PMemory
from rorqual.parallel.shared.slow_link import LEAST_SECONDS, LinkArrival, MeetingPlace, SlowLink

GBITS = 8.0  # a byte takes a nanosecond
LAUNCHED = 3e-3  # seconds in which the host launches what is timed


def milliseconds(work: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    delay(LAUNCHED)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def test_a_delay_is_as_long_as_asked() -> None:
    delay(1e-6)  # compiles
    for asked in (0.2, 3.0):
        took = milliseconds(lambda asked=asked: delay(asked / 1e3))
        assert asked <= took <= asked + 0.1


def link_of_one() -> SlowLink:
    """With an axis "ep" of this rank alone."""
    device = torch.device("cuda")
    link = SlowLink(GBITS, device)
    flags = torch.zeros(1, dtype=torch.int32, device=device)
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    table = torch.tensor([flags.data_ptr(), stop.data_ptr()], device=device)
    memory = P2PMemory(flags, table, stop)
    link.places["ep"] = MeetingPlace(0, memory, device)
    return link


def event() -> torch.cuda.Event:
    return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))


@pytest.mark.parametrize("axis", ["ep", ""])
def test_messages_leave_one_after_the_other(axis: str) -> None:
    link = link_of_one()
    seen = torch.zeros(2, device="cuda")

    def send(place: int) -> Arriving:
        def message() -> Arriving:
            seen[place] += 1
            return LinkArrival(torch.cuda.current_stream())

        return link.carry(message, 2_000_000, axis)

    def both() -> None:
        first, second = send(0), send(1)
        first.wait()
        second.wait()

    both()
    assert 4.0 <= milliseconds(both) <= 4.2
    assert seen.tolist() == [2, 2]


@pytest.mark.parametrize("axis", ["ep", ""])
def test_collectives_begin_at_once_and_others_late(axis: str) -> None:
    link = link_of_one()
    begun = []

    def send() -> Arriving:
        begun.append(event())
        return LinkArrival(torch.cuda.current_stream())

    link.carry(send, 2_000_000, axis)
    torch.cuda.synchronize()
    time.sleep(0.01)  # until the link has carried that one
    delay(LAUNCHED)
    start = event()
    arrivals = [link.carry(send, 2_000_000, axis) for _ in range(2)]
    for arrival in arrivals:
        arrival.wait()
    end = event()
    torch.cuda.synchronize()
    first, second = (start.elapsed_time(one) for one in begun[1:])
    late = 0.0 if axis else 2.0
    assert late <= first <= late + 0.1
    assert late + 2.0 <= second <= late + 2.2
    assert 4.0 <= start.elapsed_time(end) <= 4.2


def test_what_a_message_takes_itself_is_part_of_its_time() -> None:
    link = link_of_one()

    def sent(itself: float) -> None:
        def send() -> Arriving:
            delay(itself)
            return LinkArrival(torch.cuda.current_stream())

        link.carry(send, 2_000_000, "ep").wait()

    sent(1e-3)
    assert 2.0 <= milliseconds(lambda: sent(1e-3)) <= 2.2
    assert 3.0 <= milliseconds(lambda: sent(3e-3)) <= 3.2


def test_a_message_is_carried_from_when_it_was_ready() -> None:
    """Though what launches it waited for something else since."""
    link = link_of_one()
    at = torch.zeros(1, dtype=torch.int64, device="cuda")

    def sent() -> None:
        stamp(at)
        delay(1e-3)
        link.carry(lambda: LinkArrival(torch.cuda.current_stream()), 2_000_000, "ep", at).wait()

    sent()
    assert 2.0 <= milliseconds(sent) <= 2.2


def test_collectives_wait_for_all_ranks_but_not_after_a_stop() -> None:
    link = link_of_one()
    place = link.places["ep"]
    peer = torch.zeros(2, dtype=torch.int32, device="cuda")  # a rank that never comes
    memory = place.memory
    table = torch.tensor([peer.data_ptr(), peer.data_ptr(), memory.stop.data_ptr()]).cuda()
    place.memory = P2PMemory(peer, table, memory.stop)
    arrival = link.carry(lambda: LinkArrival(torch.cuda.current_stream()), 2_000_000, "ep")
    assert isinstance(arrival, LinkArrival)
    time.sleep(0.1)
    assert not arrival.event.query()
    memory.stop.fill_(1)
    deadline = time.monotonic() + 10
    while not arrival.event.query():
        assert time.monotonic() < deadline
    assert peer.tolist() == [1, 0], "this one came"


def test_short_messages_are_late_together() -> None:
    link = link_of_one()
    count = int(0.4 * LEAST_SECONDS * 1e9)

    def send() -> Arriving:
        return LinkArrival(torch.cuda.current_stream())

    for _ in range(2):
        link.carry(send, count, "ep")
    assert 0.7 * LEAST_SECONDS < link.owed < LEAST_SECONDS
    link.carry(send, count, "ep")
    assert link.owed == 0
