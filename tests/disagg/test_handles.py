"""Pages by handles of the driver: a keeper and a reader with the transport itself, whose driver is
a stand-in with the host's memory; and what befalls it."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual.cache.page_memory import PageMemory
from rorqual.disagg import handle_reader, handle_server, page_reader
from rorqual.disagg.handle_reader import HandleReads
from rorqual.disagg.handle_server import HandlePages
from rorqual.disagg.page_reader import PageFetch, PageReader
from rorqual.disagg.page_server import PageServer
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.disagg.transports import handles, staging
from rorqual.disagg.transports.handles import (
    DeviceStaging,
    HandleAddress,
    HandleTransport,
    PeerRead,
)
from rorqual.disagg.transports.interface import ReadState, TransportError
from rorqual.disagg.transports.ranges import StagingRanges
from rorqual.disagg.transports.staging import HeldWindow, StagingWindows
from rorqual.disagg.transports.start import start_handles
from rorqual.disagg.transports.window_stamps import MAX_WINDOWS
from rorqual.errors import ConfigError
from rorqual.parallel import cuda_ipc
from rorqual.serve.config import ServeConfig
from tests.child_process import stand_still
from tests.disagg.apart import Apart
from tests.disagg.staged_keeper import is_right
from tests.disagg.test_page_leases import CPU, LINKS, MINE, SECRET, Keeper, fetch_of, memory
from tests.disagg.test_ranks_travel import nothing_is_held, prompt, travels
from tests.disagg.test_staged_pages import wait_for
from tests.parallel.memfd_driver import MemfdDriver, no_device

ROOT = Path(__file__).resolve().parents[2]
WINDOW_PAGES = 1
WINDOWS = 3  # of the four pages that a prompt has
SIZE = 1 << 16


def gives_back(driver: MemfdDriver) -> bool:
    """What is held in circles needs a collection."""
    return not driver.holds or (gc.collect() >= 0 and not driver.holds)


@pytest.fixture(scope="module")
def stand_in() -> Iterator[MemfdDriver]:
    """One for all tests: blocks are given back when threads of an earlier one have ended."""
    found = MemfdDriver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_ipc, "driver", lambda: found)
        patch.setattr(cuda_ipc, "on_device", no_device)
        yield found
        wait_for(lambda: gives_back(found))


@pytest.fixture
def driver(stand_in: MemfdDriver) -> MemfdDriver:
    """Each test begins without memory of an earlier one; what a failed one holds stays its own, and
    is waited for once."""
    try:
        wait_for(lambda: gives_back(stand_in))
    finally:
        stand_in.forget()
    stand_in.calls.clear()
    return stand_in


def transport(serves: bool) -> HandleTransport:
    return HandleTransport(DeviceStaging(SIZE, CPU), CPU, serves)


class HandingKeeper(Keeper):
    def __init__(self, windows: int = WINDOWS) -> None:
        super().__init__()
        self.leases.most_pages = 100
        self.server.close()
        self.transport = transport(True)
        size = WINDOW_PAGES * self.memory.size
        self.windows = StagingWindows(self.transport.memory.bytes, 0, size, windows)
        self.handed = HandlePages(self.transport, self.windows, self.table, self.memory)
        config = TransferConfig("prefill", SECRET)
        self.server = PageServer(config, LINKS, self.table, self.memory, MINE, self, self.handed)

    def close(self) -> None:
        """Lets go of the memory as well: pytest keeps what a fixture made until all teardowns of a
        test are over, and the module's waits for the memory."""
        self.server.close()
        self.transport.close()
        del self.server, self.handed, self.windows, self.transport


class HandedReader:
    def __init__(self, size: int = SIZE):
        self.memory = memory()
        self.transport = transport(False)
        self.ranges = StagingRanges(self.transport.memory.bytes, 0, size)
        self.reads = HandleReads(self.transport, self.ranges)
        self.reader = PageReader(self.memory, MINE, self.reads)

    def fetch(self, keeper: Keeper, name: bytes | None = None) -> PageFetch:
        found = fetch_of(
            (keeper.server.host, keeper.server.port), name or keeper.offer(), keeper.keys
        )
        done = threading.Event()
        self.reader.start(found, done.set)
        assert done.wait(60)
        return found

    def close(self) -> None:
        """As HandingKeeper.close."""
        self.reader.close()
        self.transport.close()
        del self.reader, self.reads, self.ranges, self.transport


@pytest.fixture
def keeper(driver: MemfdDriver) -> Iterator[HandingKeeper]:
    made = HandingKeeper()
    yield made
    made.close()


@pytest.fixture
def reader(driver: MemfdDriver) -> Iterator[HandedReader]:
    made = HandedReader()
    yield made
    made.close()


def all_free(keeper: HandingKeeper) -> bool:
    return len(keeper.windows.free) == keeper.windows.count and not keeper.windows.held


# ---- pages


def test_what_fixtures_made_gives_its_memory_back_when_it_is_closed(driver: MemfdDriver) -> None:
    keeper = HandingKeeper()
    reader = HandedReader()
    found = reader.fetch(keeper)
    assert (found.found, found.error) == (4, "")
    found.release()
    del found
    assert len(driver.mapped) == 3
    reader.close()
    keeper.close()
    wait_for(lambda: gives_back(driver))
    assert keeper is not None, "pytest has it yet"
    assert reader is not None


def test_pages_come_to_where_they_stay(keeper: HandingKeeper, reader: HandedReader) -> None:
    found = reader.fetch(keeper)
    assert (found.found, found.error) == (4, "")
    assert is_right(keeper, found)
    assert found.rows is not None
    (held,) = reader.ranges.held
    assert found.rows.data_ptr() == held.bytes.data_ptr(), "no copy in between"
    found.release()
    assert not reader.ranges.held
    wait_for(lambda: all_free(keeper))
    wait_for(lambda: sum(pages for _, pages in keeper.announced) == 4)


def placing(keeper: HandingKeeper, reader: HandedReader) -> PageFetch:
    """A fetch of pages to others of the reader's cache."""
    return placing_of(keeper, keeper.offer())


def placing_of(keeper: HandingKeeper, name: bytes) -> PageFetch:
    found = fetch_of((keeper.server.host, keeper.server.port), name, keeper.keys)
    found.pages = [7, 3, 11, 5]
    return found


def run(reader: HandedReader, found: PageFetch) -> None:
    done = threading.Event()
    reader.reader.start(found, done.set)
    assert done.wait(60)


def page_bytes(where: PageMemory, pages: list[int]) -> torch.Tensor:
    rows = where.rows(len(pages))
    for page, row in zip(pages, rows, strict=True):
        where.read(page, row)
    return rows


def test_pages_come_to_the_cache_at_once(keeper: HandingKeeper, reader: HandedReader) -> None:
    others = [page for page in range(12) if page not in (7, 3, 11, 5)]
    before = page_bytes(reader.memory, others)
    found = placing(keeper, reader)
    run(reader, found)
    assert (found.found, found.error, found.rows) == (4, "", None)
    assert found.received == 4 * keeper.memory.size
    want = page_bytes(keeper.memory, keeper.pages)
    assert torch.equal(page_bytes(reader.memory, [7, 3, 11, 5]), want)
    assert torch.equal(page_bytes(reader.memory, others), before)
    assert not reader.ranges.held


def test_that_takes_no_memory_of_the_reader_s(keeper: HandingKeeper, driver: MemfdDriver) -> None:
    reader = HandedReader(0)
    found = placing(keeper, reader)
    run(reader, found)
    assert (found.found, found.error) == (4, "")
    want = page_bytes(keeper.memory, keeper.pages)
    assert torch.equal(page_bytes(reader.memory, [7, 3, 11, 5]), want)
    reader.close()


@pytest.mark.parametrize("windows", [1, 3])
def test_nobody_looks_without_a_pause(
    keeper: HandingKeeper, reader: HandedReader, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with sleeps in place of looks; where windows are few, the reader hears of all that
    are filled before the keeper waits for one to become free."""
    monkeypatch.setattr(handle_reader, "SPIN_SECONDS", 0.0)
    monkeypatch.setattr(handle_server, "SPIN_SECONDS", 0.0)
    monkeypatch.setattr(handle_server, "AHEAD", 3)
    taken = [keeper.windows.take(0) for _ in range(WINDOWS - windows)]
    assert None not in taken
    for pages in ([7, 3, 11, 5], None):
        found = fetch_of((keeper.server.host, keeper.server.port), keeper.offer(), keeper.keys)
        found.pages = pages
        start = time.monotonic()
        run(reader, found)
        assert (found.found, found.error) == (4, "")
        assert time.monotonic() - start < min(handle_server.WINDOW_SECONDS, 10.0)
        found.release()
    want = page_bytes(keeper.memory, keeper.pages)
    assert torch.equal(page_bytes(reader.memory, [7, 3, 11, 5]), want)


def test_pages_that_are_there_are_told_before_others_are_waited_for(
    keeper: HandingKeeper, reader: HandedReader
) -> None:
    name, held = keeper.make()
    first = dict(list(held.items())[:2])
    rest = dict(list(held.items())[2:])
    keeper.table.open(name, first, complete=False)()
    found = fetch_of((keeper.server.host, keeper.server.port), name, keeper.keys)
    found.pages = [7, 3, 11, 5]
    done = threading.Event()
    reader.reader.start(found, done.set)
    want = page_bytes(keeper.memory, keeper.pages)
    wait_for(lambda: page_bytes(reader.memory, [7, 3]).equal(want[:2]))
    assert not done.is_set()
    keeper.table.add(name, rest, True)()
    assert done.wait(60)
    assert (found.found, found.error) == (4, "")
    assert torch.equal(page_bytes(reader.memory, [7, 3, 11, 5]), want)


def test_pages_that_are_another_s_are_not_written_to(
    keeper: HandingKeeper, reader: HandedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was given up after the first window had come."""
    found = placing(keeper, reader)
    place = page_reader.Placing.place
    before = page_bytes(reader.memory, [3, 11, 5])

    def ending(*given: Any) -> None:
        place(*given)
        reader.reader.end_placing([found])

    monkeypatch.setattr(page_reader.Placing, "place", ending)
    run(reader, found)
    assert torch.equal(page_bytes(reader.memory, [3, 11, 5]), before)
    want = page_bytes(keeper.memory, keeper.pages[:1])
    assert torch.equal(page_bytes(reader.memory, [7]), want)


def test_pages_that_have_no_room_on_the_device_come_to_the_host(
    keeper: HandingKeeper, driver: MemfdDriver
) -> None:
    reader = HandedReader(2 * keeper.memory.size)
    found = reader.fetch(keeper)
    assert (found.found, found.error) == (4, "")
    assert is_right(keeper, found)
    assert not reader.ranges.held
    reader.close()


def test_a_prompt_waits_for_room_and_then_goes_by_the_host(
    keeper: HandingKeeper, reader: HandedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle_reader, "ROOM_SECONDS", 0.05)
    taken = reader.ranges.take(SIZE - 2 * keeper.memory.size, 0)
    assert taken is not None
    found = reader.fetch(keeper)
    assert (found.found, found.error, is_right(keeper, found)) == (4, "", True)
    assert reader.ranges.held == [taken]


def test_no_room_at_all(
    keeper: HandingKeeper, reader: HandedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle_reader, "ROOM_SECONDS", 0.0)
    monkeypatch.setattr(handle_reader, "WINDOW_SECONDS", 0.05)
    monkeypatch.setattr(handle_server, "WINDOW_SECONDS", 0.05)
    taken = reader.ranges.take(SIZE, 0)
    error = reader.fetch(keeper).error
    assert error == "no room of the staging memory here became free"
    assert taken is not None
    reader.ranges.release(taken)
    wait_for(lambda: all_free(keeper))
    windows = [keeper.windows.take(0) for _ in range(WINDOWS)]
    error = reader.fetch(keeper).error
    assert error.endswith("cannot offer its pages: its staging memory is in use by others")
    assert None not in windows


def test_a_lease_that_ends_while_pages_are_gathered(
    keeper: HandingKeeper, reader: HandedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was gathered before counts, and nothing after."""
    name = keeper.offer()
    gather = keeper.memory.gather
    windows = []

    def ending(*given: Any) -> Any:
        found = gather(*given)
        windows.append(1)
        if len(windows) == 3:
            keeper.table.close([name])
        return found

    monkeypatch.setattr(keeper.memory, "gather", ending)
    found = reader.fetch(keeper, name)
    assert found.error == "the pages are kept no more"
    assert found.found < 3
    assert is_right(keeper, found)
    wait_for(lambda: all_free(keeper))


def test_a_lease_that_ran_out(keeper: HandingKeeper, reader: HandedReader) -> None:
    name = keeper.offer()
    keeper.table.close([name])
    found = reader.fetch(keeper, name)
    assert (found.found, found.error) == (0, "the pages are kept no more")
    found.release()
    assert not reader.ranges.held


def test_a_window_that_was_taken_from_a_late_reader(
    keeper: HandingKeeper, reader: HandedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = reader.transport.read_windows

    def late(*given: Any) -> list[int]:
        ticket = read(*given)
        monkeypatch.setattr(staging, "OFFERED_SECONDS", 0.0)
        time.sleep(0.002)
        while (window := keeper.windows.take(0)) is not None:
            window.bytes.fill_(255)
            taken.append(window)
        return ticket

    taken: list[HeldWindow] = []
    monkeypatch.setattr(reader.transport, "read_windows", late)
    found = reader.fetch(keeper)
    for window in taken:  # for which the keeper waits yet
        keeper.windows.release(window)
    assert (found.found, found.error) == (0, "the pages were given up while they were read")


def test_a_connection_that_ends_while_its_windows_are_read(
    keeper: HandingKeeper, reader: HandedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may fill them at once."""
    links = []
    link = keeper.handed.link

    def noted() -> handle_server.HandlePagesLink:
        links.append(link())
        return links[-1]

    poll = reader.transport.poll

    def ending(*given: Any) -> ReadState:
        links[-1].close()
        return poll(*given)

    monkeypatch.setattr(keeper.handed, "link", noted)
    monkeypatch.setattr(reader.transport, "poll", ending)
    found = placing(keeper, reader)
    run(reader, found)
    assert (found.found, found.error) == (0, "the pages were given up while they were read")
    wait_for(lambda: all_free(keeper))


def test_a_read_that_does_not_end_leaves_its_range_alone(
    keeper: HandingKeeper, reader: HandedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handle_reader, "READ_SECONDS", 0.05)
    stuck = True
    monkeypatch.setattr(handles, "_launched", lambda stream: lambda: not stuck)
    found = reader.fetch(keeper)
    assert (found.found, found.error) == (0, "the pages did not come within 0.05 s")
    found.release()
    (lost,) = reader.ranges.aside
    assert reader.ranges.held == [lost], "nobody else gets it"
    stuck = False
    again = reader.fetch(keeper)
    assert (again.found, again.error, is_right(keeper, again)) == (4, "", True)
    assert not reader.ranges.aside
    again.release()
    assert not reader.ranges.held


def test_a_cancelled_request_ends_with_its_window(
    keeper: HandingKeeper, reader: HandedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = reader.transport.read_windows
    found = fetch_of((keeper.server.host, keeper.server.port), keeper.offer(), keeper.keys)

    def cancelling(*given: Any) -> list[int]:
        found.cancelled.set()
        return read(*given)

    monkeypatch.setattr(reader.transport, "read_windows", cancelling)
    done = threading.Event()
    reader.reader.start(found, done.set)
    assert done.wait(60)
    assert 0 < found.found < 4
    found.release()
    assert not reader.ranges.held
    wait_for(lambda: all_free(keeper))


def test_a_link_is_kept_for_the_next_prompt_and_one_that_ended_is_not_used(
    keeper: HandingKeeper, reader: HandedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    connect = socket.create_connection

    def counted(address: tuple[str, int], *given: Any) -> Any:
        if address[1] == keeper.server.port:  # not what threads of others do
            made.append(address)
        return connect(address, *given)

    monkeypatch.setattr(socket, "create_connection", counted)
    for _ in range(3):
        found = reader.fetch(keeper)
        assert (found.found, found.error, is_right(keeper, found)) == (4, "", True)
        found.release()
    assert len(made) == 1
    name = keeper.offer()
    keeper.table.close([name])
    assert reader.fetch(keeper, name).error
    assert not reader.reader.idle.links, "who knows what is to come on it"
    assert reader.fetch(keeper).found == 4
    ((_, link, _),) = reader.reader.idle.links
    link.shutdown(socket.SHUT_RDWR)
    assert reader.fetch(keeper).found == 4
    assert len(made) == 3
    monkeypatch.setattr("rorqual.disagg.page_reader.IDLE_SECONDS", 0.0)
    assert reader.fetch(keeper).found == 4
    assert len(made) == 4


# ---- windows that are filled before they are asked for


def prepared(keeper: HandingKeeper, name: bytes) -> bool:
    return name in keeper.handed.prepared.ready


def test_a_first_window_is_filled_when_its_lease_opens(
    keeper: HandingKeeper, reader: HandedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = []
    gather = keeper.memory.gather

    def noted(places: Any, *given: Any) -> Any:
        gathered.append([page for page, _ in places])
        return gather(places, *given)

    monkeypatch.setattr(keeper.memory, "gather", noted)
    name = keeper.offer()
    wait_for(lambda: prepared(keeper, name))
    assert gathered == [keeper.pages[:1]]
    assert len(keeper.windows.free) == WINDOWS - 1
    found = reader.fetch(keeper, name)
    assert (found.found, found.error, is_right(keeper, found)) == (4, "", True)
    assert gathered == [[page] for page in keeper.pages], "each once"
    wait_for(lambda: all_free(keeper))
    again = reader.fetch(keeper, name)  # what was prepared is used once
    assert (again.found, again.error, is_right(keeper, again)) == (4, "", True)
    assert gathered == 2 * [[page] for page in keeper.pages]


def test_more_leases_than_windows_for_them(keeper: HandingKeeper, reader: HandedReader) -> None:
    """One of three windows may be held so. A reader that finds none gets it."""
    first = keeper.offer()
    wait_for(lambda: prepared(keeper, first))
    second = keeper.offer()
    wait_for(lambda: second not in keeper.handed.prepared.wanted)
    assert not prepared(keeper, second)
    taken = [keeper.windows.take(0) for _ in range(WINDOWS - 1)]
    assert None not in taken
    assert not keeper.windows.free
    found = reader.fetch(keeper, second)
    assert (found.found, found.error, is_right(keeper, found)) == (4, "", True)
    assert not prepared(keeper, first)
    found = reader.fetch(keeper, first)
    assert (found.found, found.error, is_right(keeper, found)) == (4, "", True)


def test_other_pages_than_those_that_were_prepared(
    keeper: HandingKeeper, reader: HandedReader
) -> None:
    """Of a reader that has the first ones, or whose pages end before the lease's."""
    for keys, pages in (
        (keeper.keys[1:], keeper.pages[1:]),
        (keeper.keys[:2], keeper.pages[:2]),
        ([keeper.keys[0], b"x" * len(keeper.keys[0])], keeper.pages[:1]),
    ):
        name = keeper.offer()
        wait_for(lambda name=name: prepared(keeper, name))  # type: ignore[misc]
        found = fetch_of((keeper.server.host, keeper.server.port), name, keys)
        run(reader, found)
        assert found.found == len(pages)
        assert found.rows is not None
        assert torch.equal(found.rows[: len(pages)], page_bytes(keeper.memory, pages))
        found.release()
        wait_for(lambda: all_free(keeper))


def test_a_lease_that_ends_gives_its_window_back(
    keeper: HandingKeeper, reader: HandedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its reader asks, and while the window is being filled."""
    name = keeper.offer()
    wait_for(lambda: prepared(keeper, name))
    keeper.table.close([name])
    wait_for(lambda: all_free(keeper))
    found = reader.fetch(keeper, name)
    assert (found.found, found.error) == (0, "the pages are kept no more")
    gather = keeper.memory.gather

    def ending(*given: Any) -> Any:
        keeper.table.close([names[-1]])
        return gather(*given)

    monkeypatch.setattr(keeper.memory, "gather", ending)
    names = [keeper.make()[0]]
    keeper.table.open(names[0], dict(zip(keeper.keys, keeper.pages, strict=True)))()
    wait_for(lambda: not keeper.handed.prepared.wanted and all_free(keeper))
    found = reader.fetch(keeper, names[0])
    assert (found.found, found.error) == (0, "the pages are kept no more")


def test_a_lease_that_ended_after_its_window_was_taken(
    keeper: HandingKeeper, reader: HandedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may write to its pages by then, so what was gathered is not told."""
    name = keeper.offer()
    wait_for(lambda: prepared(keeper, name))
    take = keeper.handed.prepared.take

    def ending(*given: Any) -> Any:
        found = take(*given)
        assert found is not None
        keeper.table.close([name])
        return found

    monkeypatch.setattr(keeper.handed.prepared, "take", ending)
    found = reader.fetch(keeper, name)
    assert (found.found, found.error) == (0, "the pages are kept no more")
    wait_for(lambda: all_free(keeper))


def test_a_reader_that_asks_while_its_window_is_being_filled_waits_for_that(
    keeper: HandingKeeper, reader: HandedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    gather = keeper.memory.gather
    first = []

    def slow(*given: Any) -> Any:
        if not first:
            first.append(threading.current_thread())
            assert go.wait(60)
        return gather(*given)

    monkeypatch.setattr(keeper.memory, "gather", slow)
    name = keeper.offer()
    wait_for(lambda: bool(first))
    found = fetch_of((keeper.server.host, keeper.server.port), name, keeper.keys)
    done = threading.Event()
    reader.reader.start(found, done.set)
    assert not done.wait(0.05)
    go.set()
    assert done.wait(60)
    assert (found.found, found.error, is_right(keeper, found)) == (4, "", True)
    assert first == [keeper.handed.prepared.thread]
    found.release()
    wait_for(lambda: all_free(keeper))


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_several_windows_of_a_lease(driver: MemfdDriver, fails: int) -> None:
    """Half of the windows; also where the device fails at the first or the second of them."""
    keeper, reader = HandingKeeper(5), HandedReader()
    gathered = []
    gather = keeper.memory.gather

    def noted(places: Any, *given: Any) -> Any:
        gathered.append(len(places))
        if len(gathered) == fails:
            raise RuntimeError("out of memory")
        return gather(places, *given)

    keeper.memory.gather = noted  # type: ignore[method-assign]
    name = keeper.offer()
    if fails:
        wait_for(lambda: len(gathered) == fails and all_free(keeper))
    else:
        wait_for(lambda: prepared(keeper, name))
        assert len(keeper.windows.free) == 3
    found = placing_of(keeper, name)
    run(reader, found)
    assert (found.found, found.error) == (4, "")
    assert gathered == [1] * (4 + fails)
    want = page_bytes(keeper.memory, keeper.pages)
    assert torch.equal(page_bytes(reader.memory, [7, 3, 11, 5]), want)
    wait_for(lambda: all_free(keeper))
    first, second = keeper.offer(), keeper.offer()
    wait_for(lambda: second not in keeper.handed.prepared.wanted)
    assert (prepared(keeper, first), prepared(keeper, second)) == (True, False)
    assert len(keeper.windows.free) == 3
    reader.close()
    keeper.close()


def test_a_device_that_fails_meanwhile_is_the_reader_s_to_meet(
    keeper: HandingKeeper,
    reader: HandedReader,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gather = keeper.memory.gather
    failed = []

    def failing(*given: Any) -> Any:
        if not failed:
            failed.append(1)
            raise RuntimeError("out of memory")
        return gather(*given)

    monkeypatch.setattr(keeper.memory, "gather", failing)
    name = keeper.offer()
    wait_for(lambda: bool(failed) and all_free(keeper))
    found = reader.fetch(keeper, name)
    assert (found.found, found.error, is_right(keeper, found)) == (4, "", True)
    assert "not prepared for their reader: out of memory" in caplog.text


# ---- the transport's contract


def test_what_is_read_is_what_lies_there(driver: MemfdDriver) -> None:
    there, here = transport(True), transport(False)
    there.memory.bytes.copy_(torch.arange(SIZE) % 251)
    here.memory.bytes.zero_()
    ticket = here.read(there.describe(), 100, 7, 1000)
    assert here.poll(ticket, 1.0) is ReadState.DONE
    assert torch.equal(here.memory.bytes[7:1007], there.memory.bytes[100:1100])
    assert not here.memory.bytes[:7].any()
    assert not here.memory.bytes[1007:].any()
    assert driver.calls.count("cuMemImportFromShareableHandle") == 1
    here.poll(here.read(there.describe(), 0, 0, 5), 1.0)
    assert driver.calls.count("cuMemImportFromShareableHandle") == 1, "mapped once"
    here.close()
    there.close()


@pytest.mark.parametrize(
    ("remote", "local", "size"), [(0, SIZE - 1, 2), (SIZE - 1, 0, 2), (-1, 0, 1), (0, 0, SIZE + 1)]
)
def test_nothing_beside_the_memory(driver: MemfdDriver, remote: int, local: int, size: int) -> None:
    there, here = transport(True), transport(False)
    with pytest.raises(TransportError, match=r"not the peer's to read|no room here"):
        here.read(there.describe(), remote, local, size)
    here.close()
    there.close()


def test_a_window_that_was_taken_back(driver: MemfdDriver) -> None:
    there, here = transport(True), transport(False)
    assert there.stamps is not None
    for number in (-1, MAX_WINDOWS):
        with pytest.raises(TransportError, match=f"the peer has no window {number}"):
            here.read_windows(there.describe(), [PeerRead(0, 0, 5, window=(number, 1))])
    last = MAX_WINDOWS - 1
    for revoked, state in ((6, ReadState.DONE), (7, ReadState.REVOKED), (8, ReadState.REVOKED)):
        reads = [PeerRead(0, 0, 5, window=(number, 7)) for number in (0, last)]
        first, second = here.read_windows(there.describe(), reads)
        there.stamps.revoke(last, revoked)
        assert here.poll(first, 1.0) is ReadState.DONE
        assert here.poll(second, 1.0) is state
    here.close()
    there.close()


@pytest.mark.parametrize(
    "description",
    [
        b"",
        b"[]",
        b"x" * 20_000,
        json.dumps({"name": "a" * 32, "token": "00", "size": 5}).encode(),
        json.dumps({"name": "a" * 32, "token": "00" * 16, "size": 1 << 50}).encode(),
        json.dumps({"name": "a" * 32, "token": "00" * 16, "size": 5}).encode(),
    ],
)
def test_descriptions_that_are_none(driver: MemfdDriver, description: bytes) -> None:
    here = transport(False)
    with pytest.raises(TransportError, match=r"description|not to be had"):
        here.read(description, 0, 0, 1)
    here.close()


def test_more_than_the_peer_has(driver: MemfdDriver) -> None:
    there, here = transport(True), transport(False)
    address = HandleAddress.unpack(there.describe())
    more = HandleAddress(address.name, address.token, 2 * SIZE).pack()
    with pytest.raises(TransportError, match="cannot be mapped: cuMemMap"):
        here.read(more, 0, 0, 1)
    here.close()
    there.close()


def test_a_restart_is_another_description(driver: MemfdDriver) -> None:
    there, here = transport(True), transport(False)
    before = there.describe()
    assert here.poll(here.read(before, 0, 0, 1), 1.0) is ReadState.DONE
    there.restart()
    assert there.describe() != before
    wait_for(lambda: not here.peers)
    with pytest.raises(TransportError, match="not to be had"):
        here.read(before, 0, 0, 1)
    assert here.poll(here.read(there.describe(), 0, 0, 1), 1.0) is ReadState.DONE
    here.close()
    there.close()
    with pytest.raises(TransportError, match="the engine ends"):
        here.read(before, 0, 0, 1)
    with pytest.raises(TransportError, match="the engine ends"):
        there.describe()


def test_all_is_given_back(driver: MemfdDriver) -> None:
    there, here = transport(True), transport(False)
    here.poll(here.read(there.describe(), 0, 0, 1), 1.0)
    assert len(driver.mapped) == 3
    there.close()
    del there
    peers = here.peers
    wait_for(lambda: not peers)
    wait_for(lambda: gc.collect() >= 0 and len(driver.mapped) == 1)
    here.close()
    del here
    wait_for(lambda: gc.collect() >= 0 and not driver.holds)


PEER = """
import sys, time, torch
from rorqual.parallel import cuda_ipc
from rorqual.disagg.transports.handles import DeviceStaging, HandleTransport
from rorqual.platforms.cpu import CpuPlatform
from tests.parallel.memfd_driver import MemfdDriver, no_device
driver = MemfdDriver()
cuda_ipc.driver = lambda: driver
cuda_ipc.on_device = no_device
platform = CpuPlatform(torch.device("cpu"))
memory = DeviceStaging(65536, platform)
memory.bytes.fill_(42)
print(HandleTransport(memory, platform, True).describe().decode(), flush=True)
time.sleep(60)
"""


def test_a_peer_that_is_killed(driver: MemfdDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that runs has its bytes and is not good; the memory is dropped."""
    here = transport(False)
    started = threading.Event()
    with subprocess.Popen([sys.executable, "-c", PEER], stdout=subprocess.PIPE, cwd=ROOT) as other:
        try:
            assert other.stdout is not None
            description = other.stdout.readline().strip()
            assert here.poll(here.read(description, 0, 0, 10), 1.0) is ReadState.DONE
            assert here.memory.bytes[:10].tolist() == [42] * 10
            monkeypatch.setattr(handles, "_launched", lambda stream: started.is_set)
            ticket = here.read(description, 0, 10, 10)
            (peer,) = here.peers.values()
            mapped = peer.memory
        finally:
            other.send_signal(signal.SIGKILL)
            other.wait()
    peers = here.peers
    wait_for(lambda: not peers)
    assert mapped[:100].unique().tolist() == [42], "it can be read yet"
    assert here.poll(ticket, 0.01) is ReadState.RUNNING
    started.set()
    assert here.poll(ticket, 1.0) is ReadState.ENDED
    with pytest.raises(TransportError, match="not to be had"):
        here.read(description, 0, 0, 1)
    del mapped, peer
    wait_for(lambda: gc.collect() >= 0 and len(driver.mapped) == 1)
    here.close()


# ---- ranges


def test_ranges_of_any_size() -> None:
    ranges = StagingRanges(torch.zeros(8192, dtype=torch.uint8), 1000, 7000)
    first, second, third = (ranges.take(size, 0) for size in (1000, 3000, 512))
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.offset, second.offset, third.offset) == (1024, 2048, 5120)
    assert second.bytes.numel() == 3000
    assert ranges.take(2500, 0) is None
    assert ranges.take(7001, 60) is None, "which nobody waits for"
    done = []
    ranges.release(second, lambda: done.append(2))
    ranges.release(second, lambda: done.append(0))
    fourth = ranges.take(1000, 0)
    assert fourth is not None
    assert (fourth.offset, len(fourth.marks)) == (2048, 1)
    fifth = ranges.take(1000, 0)
    assert fifth is not None
    assert (fifth.offset, len(fifth.marks)) == (3072, 1), "the rest of what was left behind"
    ranges.set_aside(fifth)
    ranges.release(fifth)
    assert fifth in ranges.held
    ranges.recover(ranges.unusable())
    assert fifth not in ranges.held
    timer = threading.Timer(0.05, ranges.release, (third,))
    timer.start()
    assert ranges.take(4000, 20) is not None
    timer.join()


# ---- options


def test_it_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is between NVIDIA GPUs; the device is cpu"):
        start_handles(64, 1024, CPU, True, True)
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    config = ServeConfig(role="both", kv_secret_file=str(secret), kv_transport="handles")
    found = config.transfer()
    assert found is not None
    assert found.transport == "handles"


# ---- engines


@pytest.mark.exhaustive
def test_tokens_are_those_of_one_engine_and_a_keeper_may_die() -> None:
    settings = {"transport": "handles", "stand_in": True}
    with Apart("both", **settings) as keeper, Apart("both", **settings) as reader:
        keeper.end()
        reader.end()
        assert reader.ask("state")["transport"] == handles.handles_label()
        for number in (1, 2):
            travels(keeper, reader, number, 99, count=number)
            travels(reader, keeper, number + 2, 99)
        ids = prompt(9)
        given = keeper.ask("prefill", ids)
        keeper.process.kill()
        keeper.process.wait()
        ((tokens, cached, error),) = reader.ask("answer", ids, given)
        ((want, _, _),) = reader.ask("answer", ids, None, salt="alone")
        assert (tokens, cached) == (want, 0)
        assert error
        nothing_is_held(reader)


@pytest.mark.exhaustive
def test_pages_on_their_way_into_a_cache_that_begins_anew() -> None:
    """Nothing is put into pages that others may have since."""
    settings = {"transport": "handles", "stand_in": True}
    with Apart("both", **settings) as keeper, Apart("both", **settings) as reader:
        keeper.end()
        reader.end()
        ids = prompt(1)
        given = keeper.ask("prefill", ids)
        stand_still(keeper.process.pid)
        try:
            kept, error = reader.ask("fetch_through_restart", ids, given)
        finally:
            os.kill(keeper.process.pid, signal.SIGCONT)
        assert kept == 13
        assert error == "0 of 13 pages of the prompt came: the cache began anew"
        nothing_is_held(reader)
        travels(keeper, reader, 2, 99)
        # what is given up gives its pages back
        given = keeper.ask("prefill", prompt(3))
        assert reader.ask("abandon", prompt(3), given)
        nothing_is_held(reader)
