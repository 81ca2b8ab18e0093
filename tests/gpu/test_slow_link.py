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
from rorqual.parallel.group_axis import LEAST_SECONDS, SlowLink

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


def test_messages_leave_one_after_the_other() -> None:
    device = torch.device("cuda")
    link = SlowLink(GBITS, device)
    seen = torch.zeros(2, device=device)

    def send(place: int) -> None:
        with link.carries(2_000_000):
            seen[place] += 1

    def both() -> None:
        send(0)
        send(1)
        torch.cuda.current_stream().wait_stream(link.stream)

    both()
    assert 4.0 <= milliseconds(both) <= 4.2
    assert seen.tolist() == [2, 2]


def test_a_message_begins_early_by_what_it_takes_itself() -> None:
    """And the next one no earlier for that."""
    link = SlowLink(GBITS, torch.device("cuda"))
    link.own = [(0, 1e-4), (4_000_000, 1.9e-3)]

    def send() -> torch.cuda.Event:
        with link.carries(2_000_000):
            begun = torch.cuda.Event(enable_timing=True)
            begun.record()
        return begun

    send()
    torch.cuda.synchronize()
    time.sleep(0.01)  # until the link has carried that one
    start = torch.cuda.Event(enable_timing=True)
    delay(LAUNCHED)
    start.record()
    first, second = send(), send()
    torch.cuda.synchronize()
    assert 1.0 <= start.elapsed_time(first) <= 1.2
    assert 3.0 <= start.elapsed_time(second) <= 3.2


def test_a_message_is_carried_from_when_it_was_ready() -> None:
    """Though what launches it waited for something else since."""
    link = SlowLink(GBITS, torch.device("cuda"))
    at = torch.zeros(1, dtype=torch.int64, device="cuda")

    def sent() -> None:
        stamp(at)
        delay(1e-3)
        with link.carries(2_000_000, waits=True, ready=at):
            pass

    sent()
    assert 2.0 <= milliseconds(sent) <= 2.2


def test_what_waits_comes_after_the_message() -> None:
    link = SlowLink(GBITS, torch.device("cuda"))
    came = torch.zeros(1, device="cuda")

    def waited() -> None:
        with link.carries(1_000_000, waits=True):
            came.fill_(1)

    waited()
    assert 1.0 <= milliseconds(waited) <= 1.2
    assert came.clone().item() == 1


def test_short_messages_are_late_together() -> None:
    link = SlowLink(GBITS, torch.device("cuda"))
    count = int(0.4 * LEAST_SECONDS * 1e9)
    for _ in range(2):
        with link.carries(count):
            pass
    assert 0.7 * LEAST_SECONDS < link.owed < LEAST_SECONDS
    with link.carries(count):
        pass
    assert link.owed == 0
