"""NIXL and Mooncake themselves, where they are installed: two engines' parts in this process, each
with its library in a process of its own, and what befalls these."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rorqual.disagg import staged_reader
from rorqual.disagg.transports import isolated
from rorqual.disagg.transports.installed import package_of
from rorqual.disagg.transports.isolated import IsolatedTransport
from rorqual.disagg.transports.start import PageStaging, start_staging
from rorqual.errors import ConfigError
from tests.child_process import stand_still
from tests.disagg.staged_keeper import StagedKeeper, StagedReader, is_right
from tests.disagg.test_page_leases import MINE
from tests.disagg.test_staged_pages import wait_for

PAGE = 4096


def skip_without(library: str) -> None:
    """Where it is not installed, or what Debian adds to it is not."""
    try:
        package_of(library)
        if library == "mooncake":
            ctypes.CDLL("libibverbs.so.1")
    except (ConfigError, OSError) as error:
        pytest.skip(str(error))


def start(library: str, sends: bool, fetches: bool) -> PageStaging:
    return start_staging(library, 64, PAGE, "127.0.0.1", sends, fetches)


class Sides:
    """A keeper and a reader, with a library each."""

    def __init__(self, library: str):
        self.theirs = start(library, True, False)
        self.ours = start(library, False, True)
        assert self.theirs.offered is not None
        assert self.ours.fetched is not None
        self.keeper = StagedKeeper((self.theirs.transport, self.theirs.offered))
        self.reader = StagedReader((self.ours.transport, self.ours.fetched))

    def close(self) -> None:
        self.keeper.server.close()
        self.reader.reader.close()
        self.theirs.close()
        self.ours.close()

    def come(self) -> bool:
        """Whether all pages come, as they are."""
        found = self.reader.fetch(self.keeper)
        assert is_right(self.keeper, found)
        return found.found == len(self.keeper.pages) and not found.error

    def restarts(self) -> tuple[int, int]:
        found = (self.theirs.transport, self.ours.transport)
        assert isinstance(found[0], IsolatedTransport)
        assert isinstance(found[1], IsolatedTransport)
        return found[0].restarts, found[1].restarts


def library_pid(staging: PageStaging) -> int:
    assert isinstance(staging.transport, IsolatedTransport)
    assert staging.transport.child is not None
    return staging.transport.child.process.pid


@pytest.fixture(scope="module", params=["nixl", "mooncake"])
def sides(request: pytest.FixtureRequest) -> Iterator[Sides]:
    skip_without(request.param)
    made = Sides(request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def over_tcp() -> Iterator[Sides]:
    """NIXL without the transports of one machine, of which a stopped process is no hindrance."""
    skip_without("nixl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        made = Sides("nixl")
        yield made
        made.close()


pytestmark = pytest.mark.exhaustive


def test_pages_come_as_they_are(sides: Sides) -> None:
    assert sides.come()
    assert sides.come()
    wait_for(lambda: not sides.keeper.windows.held)


def test_it_listens_where_it_is_told(sides: Sides) -> None:
    """Every port of its process takes connections to 127.0.0.1 and to no other address."""
    pid = library_pid(sides.theirs)
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        link = os.readlink(f"/proc/{pid}/fd/{name}")
        inodes.add(link.removeprefix("socket:[").removesuffix("]"))
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and parts[9] in inodes:
                ports.append(int(parts[1].rsplit(":", 1)[1], 16))
    assert ports
    for port in ports:
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), 0.2)


def test_its_process_dies(sides: Sides) -> None:
    assert sides.come()
    os.kill(library_pid(sides.theirs), signal.SIGKILL)
    assert sides.come() or sides.come(), "a new one was started"
    os.kill(library_pid(sides.ours), signal.SIGKILL)
    assert sides.come() or sides.come()


def test_the_keeper_returns_under_its_address(sides: Sides) -> None:
    port = sides.keeper.server.port
    assert sides.come()
    sides.keeper.server.close()
    sides.theirs.transport.restart()

    def back() -> bool:
        try:
            sides.keeper.server = sides.keeper.serve(MINE, port)
        except ConfigError:
            return False
        return True

    wait_for(back)
    assert sides.come()


def test_the_peer_stops_and_goes_on(over_tcp: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """The read does not end; its window is used again only by a library that began anew."""
    monkeypatch.setattr(staged_reader, "READ_SECONDS", 1.0)
    assert over_tcp.come()
    _, before = over_tcp.restarts()
    pid = library_pid(over_tcp.theirs)
    stand_still(pid)
    try:
        found = over_tcp.reader.fetch(over_tcp.keeper)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (found.found, found.error) == (0, "the pages did not come within 1 s")
    assert over_tcp.restarts()[1] == before + 1
    assert not over_tcp.reader.windows.aside
    assert over_tcp.come()


def test_a_process_that_stops_for_good(over_tcp: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine finds out that it does not answer, and starts another."""
    monkeypatch.setattr(staged_reader, "READ_SECONDS", 0.5)
    monkeypatch.setattr(isolated, "SILENT_SECONDS", 0.2)
    assert over_tcp.come()
    stand_still(library_pid(over_tcp.theirs))
    assert not over_tcp.come()
    wait_for(over_tcp.come)
    transport = over_tcp.ours.transport
    assert isinstance(transport, IsolatedTransport)
    pid = library_pid(over_tcp.ours)
    stand_still(pid)
    for _ in range(2000):  # more than the socket holds: nobody waits for it
        transport.serve(1)
        transport.serve(-1)
    assert not Path(f"/proc/{pid}").exists()
    assert over_tcp.come()


def test_the_peer_dies_while_it_is_read(over_tcp: Sides) -> None:
    pid = library_pid(over_tcp.theirs)
    name = over_tcp.keeper.offer()
    assert over_tcp.come()
    stand_still(pid)
    found, done = over_tcp.reader.start(over_tcp.keeper, name)
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    assert done.wait(60)
    assert found.found == 0
    assert found.error == "the transport did not bring the pages"
    assert over_tcp.come()


@pytest.mark.longest
def test_it_ends_with_its_engine() -> None:
    skip_without("nixl")
    text = (
        "import time\n"
        "from rorqual.disagg.transports.start import start_staging\n"
        f"found = start_staging('nixl', 64, {PAGE}, '127.0.0.1', True, True)\n"
        "print(found.transport.child.process.pid, flush=True)\n"
        "time.sleep(100)\n"
    )
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.longest
@pytest.mark.parametrize("ways", ["tcp", "all"])
@pytest.mark.parametrize("library", ["nixl", "mooncake"])
def test_no_wrong_page_while_processes_die(
    library: str, ways: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetches, four at once, while the libraries' processes of both sides are killed, and stopped
    for longer than a read may take: whatever counts as come is right, and no window is lost."""
    if library == "mooncake" and ways != "tcp":
        pytest.skip("it has one way")
    skip_without(library)
    monkeypatch.setenv("UCX_TLS", ways)
    monkeypatch.setattr(staged_reader, "READ_SECONDS", 0.5)
    monkeypatch.setattr(isolated, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(isolated, "RESTART_PAUSE", 0.1)
    sides = Sides(library)
    sides.keeper.leases.most_pages = 4 * 50
    chance = random.Random(7)
    came: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        for _ in range(12):
            with lock:
                sides.keeper.leases.settle(sides.keeper.prefix)
                name = sides.keeper.offer()
            found = sides.reader.fetch(sides.keeper, name)
            right = found.rows is None or is_right(sides.keeper, found)
            with lock:
                came.append(found.found if right else -1)

    def trouble(done: threading.Event) -> None:
        while not done.wait(chance.uniform(0.5, 2.0)):
            transport = chance.choice((sides.theirs, sides.ours)).transport
            assert isinstance(transport, IsolatedTransport)
            child = transport.child
            if child is None:
                continue
            number = chance.choice((signal.SIGKILL, signal.SIGSTOP))
            child.process.send_signal(number)
            if number == signal.SIGSTOP:
                done.wait(0.8)
                child.process.send_signal(signal.SIGCONT)

    workers = [threading.Thread(target=work) for _ in range(4)]
    done = threading.Event()
    troubler = threading.Thread(target=trouble, args=(done,))
    for thread in (troubler, *workers):
        thread.start()
    for thread in workers:
        thread.join(200)
    done.set()
    troubler.join(10)
    try:
        assert len(came) == 48
        assert -1 not in came
        assert came.count(4) > 0
        wait_for(sides.come)
        sides.reader.staged.recover()
        assert not sides.reader.windows.held
        wait_for(lambda: not sides.keeper.windows.held)
    finally:
        sides.close()
    print(f"\n{library} over {ways}: {came.count(4)} of {len(came)} came whole")
