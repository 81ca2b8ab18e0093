"""Pages that a library carries: what goes wrong on the way never counts as come."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual.config.model import environment_for_child
from rorqual.disagg import staged_reader, staged_server
from rorqual.disagg.page_link import PageMessage, introduce
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.disagg.transports import installed, staging
from rorqual.disagg.transports.interface import TransportError
from rorqual.disagg.transports.isolated import (
    PASSED,
    PASSED_OF_LIBRARIES,
    IsolatedTransport,
    environment,
    interface_of,
)
from rorqual.disagg.transports.staging import StagingMemory, StagingWindows, window_count
from rorqual.disagg.transports.start import start_staging
from rorqual.errors import ConfigError
from rorqual.parallel.remote.link import GREETING, LinkError, receive, send
from rorqual.serve.config import ServeConfig
from tests.disagg.staged_keeper import (
    WINDOW_PAGES,
    StagedKeeper,
    StagedReader,
    is_right,
    right_rows,
)
from tests.disagg.test_page_leases import LINKS, MINE, SECRET


@pytest.fixture
def keeper() -> Iterator[StagedKeeper]:
    made = StagedKeeper()
    yield made
    made.server.close()


@pytest.fixture
def reader() -> Iterator[StagedReader]:
    made = StagedReader()
    yield made
    made.reader.close()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def all_free(where: StagedKeeper | StagedReader) -> bool:
    return len(where.windows.free) == 4 and not where.windows.held and not where.windows.aside


def test_pages_come_window_by_window(keeper: StagedKeeper, reader: StagedReader) -> None:
    found = reader.fetch(keeper)
    assert (found.found, found.error) == (4, "")
    assert is_right(keeper, found)
    assert reader.transport.reads == 2, "three pages a window"
    wait_for(lambda: all_free(keeper) and not keeper.transport.serving)
    assert all_free(reader)
    wait_for(lambda: sum(pages for _, pages in keeper.announced) == 4)
    wait_for(lambda: keeper.leases.done)
    keeper.settle()
    assert keeper.held() == []


def test_an_error_half_way(keeper: StagedKeeper, reader: StagedReader) -> None:
    reader.transport.fault = "error"
    found = reader.fetch(keeper)
    assert (found.found, found.error) == (0, "the transport did not bring the pages")
    assert reader.transport.restarts == 1, "before the window is used again"
    assert all_free(reader)
    again = reader.fetch(keeper)
    assert (again.found, again.error) == (4, "")
    assert is_right(keeper, again)


def test_an_error_in_the_second_window(keeper: StagedKeeper, reader: StagedReader) -> None:
    def second() -> None:
        if reader.transport.reads == 0:
            reader.transport.fault = "error"

    reader.transport.before_read = second
    found = reader.fetch(keeper)
    assert (found.found, found.error) == (WINDOW_PAGES, "the transport did not bring the pages")
    assert is_right(keeper, found)


def test_a_read_that_never_ends(
    keeper: StagedKeeper, reader: StagedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_reader, "READ_SECONDS", 0.1)
    reader.transport.fault = "never"
    found = reader.fetch(keeper)
    assert (found.found, found.error) == (0, "the pages did not come within 0.1 s")
    assert (reader.transport.cancelled, reader.transport.restarts) == (1, 1)
    assert all_free(reader)


def test_bytes_that_come_late_find_nothing_to_spoil(
    keeper: StagedKeeper, reader: StagedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another read runs the library is not started anew: the window is left alone."""
    monkeypatch.setattr(staged_reader, "READ_SECONDS", 0.1)
    reader.staged.running = 1
    reader.transport.fault = "late"
    found = reader.fetch(keeper)
    assert found.found == 0
    (lost,) = reader.windows.aside
    assert reader.transport.restarts == 0
    for _ in range(3):
        again = reader.fetch(keeper)
        assert (again.found, is_right(keeper, again)) == (4, True)
    reader.transport.write_late()
    assert found.rows is not None
    assert not torch.equal(found.rows[0], right_rows(keeper)[0]), "nothing of it was taken"
    reader.windows.free.clear()  # no other window is left: now it has to be
    last = reader.fetch(keeper)
    assert (last.found, is_right(keeper, last)) == (4, True)
    assert reader.transport.restarts == 1
    assert not reader.windows.aside
    assert lost.place in reader.windows.free


def test_a_cancelled_request_ends_with_its_window(
    keeper: StagedKeeper, reader: StagedReader
) -> None:
    """The library is not killed for that."""
    found, done = reader.fetch_until_read(keeper)
    found.cancelled.set()
    reader.go_on.set()
    assert done.wait(60)
    assert (found.found, found.error, reader.transport.restarts) == (WINDOW_PAGES, "", 0)
    assert all_free(reader)


def test_a_window_that_was_taken_from_a_late_reader(
    keeper: StagedKeeper, reader: StagedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper gave it to another while it was read: the reader hears so, and takes nothing."""

    def steal() -> None:
        monkeypatch.setattr(staging, "OFFERED_SECONDS", 0.0)
        time.sleep(0.002)
        taken = [keeper.windows.take(0) for _ in range(4)]
        assert None not in taken
        for window in taken:
            assert window is not None
            window.bytes.fill_(255)

    reader.transport.before_read = steal
    found = reader.fetch(keeper)
    assert (found.found, found.error) == (0, "the pages were given up while they were read")
    wait_for(lambda: not keeper.transport.serving)


def test_damaged_bytes_are_refused(keeper: StagedKeeper, reader: StagedReader) -> None:
    def damage() -> None:
        (window,) = keeper.windows.held.values()
        window.bytes[5] ^= 1

    reader.transport.before_read = damage
    found = reader.fetch(keeper)
    assert (found.found, found.error) == (0, "the pages came damaged: their checksum differs")


def test_a_keeper_that_stops_before_it_confirms(
    keeper: StagedKeeper, reader: StagedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rorqual.disagg.page_reader.QUIET_SECONDS", 0.2)
    lock = keeper.windows.changed
    release = threading.Event()

    def stop() -> None:
        held = threading.Event()

        def hold() -> None:
            with lock:
                held.set()
                release.wait(60)

        threading.Thread(target=hold, daemon=True).start()
        assert held.wait(60)

    reader.transport.before_read = stop
    found = reader.fetch(keeper)
    assert (found.found, found.error) == (0, "the other engine has gone silent")
    release.set()
    wait_for(lambda: all_free(keeper) and not keeper.transport.serving)
    assert all_free(reader), "the bytes had come: the window is nobody's"


def test_a_lease_that_ran_out(keeper: StagedKeeper, reader: StagedReader) -> None:
    name = keeper.offer()
    keeper.leases.open[name].deadline = 0.0
    keeper.settle()
    found = reader.fetch(keeper, name)
    assert (found.found, found.error) == (0, "the pages are kept no more")


def test_no_window_is_free(
    keeper: StagedKeeper, reader: StagedReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_server, "WINDOW_SECONDS", 0.05)
    monkeypatch.setattr(staged_reader, "WINDOW_SECONDS", 0.05)
    taken = [keeper.windows.take(0) for _ in range(4)]
    error = reader.fetch(keeper).error
    assert error.endswith("cannot offer its pages: its staging memory is in use by others")
    for window in taken:
        assert window is not None
        keeper.windows.release(window)
    while reader.windows.take(0) is not None:
        pass
    assert reader.fetch(keeper).error == "no window of the staging memory here became free"


def test_sides_with_different_transports(keeper: StagedKeeper, reader: StagedReader) -> None:
    keeper.server.close()
    keeper.server = keeper.serve({**MINE, "transport": "nixl 1.5.1"})
    reader.reader.fingerprint = {**MINE, "transport": "tcp"}
    error = reader.fetch(keeper).error
    assert error == (
        "pages cannot be exchanged: transport is 'nixl 1.5.1' at the keeper, 'tcp' here"
    )


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (PageMessage.READ, bytes(64)),
        (PageMessage.STAGE, bytes(40)),
        (PageMessage.CONFIRM, bytes(7)),
    ],
)
def test_what_a_known_reader_may_not_send(
    keeper: StagedKeeper, kind: PageMessage, data: bytes
) -> None:
    with socket.create_connection((keeper.server.host, keeper.server.port), 5) as sock:
        introduce(sock, LINKS, MINE)
        send(sock, kind, data)
        with pytest.raises((LinkError, OSError)):
            receive(sock, GREETING)


def test_windows_are_of_one_holder() -> None:
    windows = StagingWindows(torch.zeros(64, dtype=torch.uint8), 32, 16, 2)
    first, second = windows.take(0), windows.take(0)
    assert first is not None
    assert second is not None
    assert {first.offset, second.offset} == {32, 48}
    assert windows.take(0) is None
    windows.offer(first)
    first.offered_at -= 2 * staging.OFFERED_SECONDS
    third = windows.take(0)
    assert third is not None
    assert third.place == first.place, "offered for too long; one that is filled is never taken"
    assert third.generation > second.generation > first.generation
    assert not windows.is_held(first)
    windows.release(first)
    assert windows.is_held(third), "a holder of before gives nothing back"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"transport": "carrier"}, "kv_transport='carrier'"),
        ({"staging_mb": 8}, "kv_staging_mb=8 is out of range; accepted: 32 to 65536"),
    ],
)
def test_options_out_of_range(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransferConfig("both", SECRET, **given)


def test_memory_that_holds_no_window() -> None:
    assert window_count(256, 2 * 2**20, 2) == 4
    with pytest.raises(ConfigError, match=r"a page has 33554432\); accepted: at least 64"):
        window_count(32, 32 * 2**20, 2)


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installed.importlib.util, "find_spec", lambda name: None)
    for library, package in (
        ("nixl", "nixl-cu12"),
        ("mooncake", "mooncake-transfer-engine-non-cuda"),
    ):
        with pytest.raises(ConfigError, match=rf"needs the package {package}.*rorqual\[{library}"):
            start_staging(library, 64, 1024, "127.0.0.1", True, True)
        secret = tmp_path / "secret"
        secret.write_text(SECRET)
        config = ServeConfig(role="both", kv_secret_file=str(secret), kv_transport=library)
        with pytest.raises(ConfigError, match=f"needs the package {package}"):
            config.transfer()


@pytest.mark.exhaustive
def test_a_library_that_does_not_start() -> None:
    memory = StagingMemory(4096)
    with pytest.raises(TransportError, match="No module named 'no_such_package'"):
        IsolatedTransport("nixl", "no_such_package", memory, "127.0.0.1")


def test_what_its_process_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"PATH": "/bin", "RORQUAL_API_KEY": "k", "HF_TOKEN": "t", "UCX_TLS": "tcp"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    passed = environment_for_child(PASSED, PASSED_OF_LIBRARIES)
    assert passed.keys() & given.keys() == {"PATH", "UCX_TLS"}
    found = environment(passed, "127.0.0.1")
    assert found["UCX_NET_DEVICES"] == "lo"
    assert environment({"UCX_NET_DEVICES": "mlx5_0:1"}, "x")["UCX_NET_DEVICES"] == "mlx5_0:1"
    with pytest.raises(TransportError, match=r"no network interface .* 192\.0\.2\.77"):
        interface_of("192.0.2.77")
