"""Descriptors of ordinary files, from one process to another, and who does not get them."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from rorqual.parallel.shared import handle_passing
from rorqual.parallel.shared.handle_passing import (
    MAX_DESCRIPTORS,
    REQUEST,
    DescriptorServer,
    HandleError,
    fetch_descriptors,
)
from tests.child_process import stand_still

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server() -> Iterator[DescriptorServer]:
    found = DescriptorServer()
    yield found
    found.close()


def file_of(path: Path, text: str) -> int:
    path.write_text(text)
    return os.open(path, os.O_RDONLY)


def text_of(fd: int) -> str:
    """Descriptors of one file share how far it was read."""
    text = os.pread(fd, 100, 0).decode()
    os.close(fd)
    return text


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def all_closed(before: int) -> bool:
    """In a while: the server closes its end of a connection behind its answer. Others' may be
    closed meanwhile."""
    deadline = time.monotonic() + 30
    while open_descriptors() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return open_descriptors() <= before


FETCHER = """
import os, sys
from rorqual.parallel.shared.handle_passing import fetch_descriptors
for fd in fetch_descriptors(sys.argv[1], bytes.fromhex(sys.argv[2]), 2):
    assert not os.get_inheritable(fd)
    print(os.pread(fd, 100, 0).decode(), end=" ")
"""


def test_another_process_gets_what_is_offered(server: DescriptorServer, tmp_path: Path) -> None:
    own = [file_of(tmp_path / name, name) for name in ("one", "two")]
    token = server.offer(own)
    for fd in own:
        os.close(fd)
    done = subprocess.run(
        [sys.executable, "-c", FETCHER, server.name, token.hex()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "one two ", done.stderr


def test_as_often_as_asked_until_withdrawn(server: DescriptorServer, tmp_path: Path) -> None:
    before = open_descriptors()
    first = file_of(tmp_path / "first", "first")
    other = file_of(tmp_path / "other", "other")
    token = server.offer([first])
    kept = server.offer([other])
    assert len(token) == 16
    assert token != kept
    os.close(first)
    os.close(other)
    assert text_of(fetch_descriptors(server.name, token, 1)[0]) == "first"
    (again,) = fetch_descriptors(server.name, token, 1)
    server.withdraw(token)
    with pytest.raises(HandleError, match="refused"):
        fetch_descriptors(server.name, token, 1)
    assert text_of(again) == "first", "what was given is the reader's"
    assert text_of(fetch_descriptors(server.name, kept, 1)[0]) == "other"
    server.withdraw(kept)
    assert all_closed(before)


def test_nothing_without_the_token(server: DescriptorServer, tmp_path: Path) -> None:
    fd = file_of(tmp_path / "file", "file")
    token = server.offer([fd])
    before = open_descriptors()
    wrong = bytes([token[0] ^ 1]) + token[1:]
    with pytest.raises(HandleError, match="refused"):
        fetch_descriptors(server.name, wrong, 1)
    with pytest.raises(HandleError, match="refused"):
        fetch_descriptors(server.name, token, 2)
    with pytest.raises(HandleError, match="accepted: 16 bytes, 1 to 64"):
        fetch_descriptors(server.name, token[:-1], 1)
    with pytest.raises(HandleError, match="accepted"):
        fetch_descriptors(server.name, token, MAX_DESCRIPTORS + 1)
    assert all_closed(before)
    os.close(fd)


def test_how_many_are_offered_is_bounded(server: DescriptorServer, tmp_path: Path) -> None:
    fd = file_of(tmp_path / "file", "file")
    before = open_descriptors()
    with pytest.raises(ValueError, match="accepted: 1 to 64"):
        server.offer([fd] * (MAX_DESCRIPTORS + 1))
    with pytest.raises(OSError):
        server.offer([fd, 10_000])
    assert all_closed(before)
    found = fetch_descriptors(server.name, server.offer([fd] * MAX_DESCRIPTORS), MAX_DESCRIPTORS)
    assert len(set(found)) == MAX_DESCRIPTORS
    for one in found:
        os.close(one)
    os.close(fd)


@pytest.mark.parametrize(
    ("theirs", "ours", "given"), [(1000, 1000, True), (0, 1000, True), (1001, 1000, False)]
)
def test_another_user_gets_nothing_and_gives_nothing(
    server: DescriptorServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    theirs: int,
    ours: int,
    given: bool,
) -> None:
    fd = file_of(tmp_path / "file", "file")
    token = server.offer([fd])
    os.close(fd)
    credentials = SimpleNamespace(size=12, unpack=lambda data: (1, theirs, 1))
    monkeypatch.setattr(handle_passing, "CREDENTIALS", credentials)
    monkeypatch.setattr(os, "geteuid", lambda: ours)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(60)
        sock.connect(f"\0rorqual-{server.name}")
        with suppress(OSError):  # it may have hung up already
            sock.send(REQUEST.pack(token, 1))
        try:
            answer, found, _, _ = socket.recv_fds(sock, 2, 1)
        except ConnectionResetError:
            answer, found = b"", []
    assert (answer, len(found)) == ((b"\1", 1) if given else (b"", 0))
    if given:
        os.close(found[0])
        os.close(fetch_descriptors(server.name, token, 1)[0])
    else:
        with pytest.raises(HandleError, match="another user's"):
            fetch_descriptors(server.name, token, 1)


def test_who_says_nothing_or_nonsense_holds_nobody_up(tmp_path: Path) -> None:
    server = DescriptorServer(seconds=0.3)
    fd = file_of(tmp_path / "file", "file")
    token = server.offer([fd])
    os.close(fd)
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    silent.connect(f"\0rorqual-{server.name}")
    for nonsense in (b"", b"x", REQUEST.pack(token, 1) + b"x"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(f"\0rorqual-{server.name}")
            sock.send(nonsense)
    assert text_of(fetch_descriptors(server.name, token, 1, seconds=20)[0]) == "file"
    silent.close()
    server.close()


def test_a_server_that_is_gone_or_stopped() -> None:
    server = DescriptorServer()
    server.close()
    with pytest.raises(HandleError, match="no descriptors"):
        fetch_descriptors(server.name, secrets.token_bytes(16), 1)
    with pytest.raises(HandleError, match="32 hexadecimal"):
        fetch_descriptors("x" * 32, secrets.token_bytes(16), 1)
    script = (
        "import time\n"
        "from rorqual.parallel.shared.handle_passing import DescriptorServer\n"
        "print(DescriptorServer().name, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as other:
        try:
            assert other.stdout is not None
            name = other.stdout.readline().strip()
            stand_still(other.pid)
            with pytest.raises(HandleError, match="no descriptors"):
                fetch_descriptors(name, secrets.token_bytes(16), 1, seconds=0.3)
        finally:
            other.kill()
            other.wait()


def test_its_thread_ends_and_its_descriptors_with_it(tmp_path: Path) -> None:
    before = open_descriptors()
    server = DescriptorServer()
    fd = file_of(tmp_path / "file", "file")
    server.offer([fd, fd])
    os.close(fd)
    server.close()
    assert not server.thread.is_alive()
    assert server.thread not in threading.enumerate()
    assert all_closed(before)
