"""Links: frames and their limits, who is let in, and what happens to those who are not."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rorqual.config.model import shared_secret
from rorqual.engine.distributed import handshake, listener
from rorqual.engine.distributed.channel import HEADER, Channel, FrameError, FrameKind
from rorqual.engine.distributed.handshake import HandshakeError, PeerIdentity
from rorqual.engine.distributed.launchers import remote
from rorqual.engine.distributed.listener import Listener, join
from rorqual.engine.distributed.network import interface_of, interfaces, named_address, route_to
from rorqual.engine.distributed.worker_handle import ConnectedWorker, WorkerHandle
from rorqual.errors import ConfigError, EngineError

SECRET = b"a secret of some length"


def identity(rank: int = 1, world: int = 3) -> PeerIdentity:
    return PeerIdentity(rank, world, 77, "host-b")


class Door:
    """A listener that gathers on a thread, as rank 0 does."""

    def __init__(self, world: int = 3, secret: bytes = SECRET):
        self.listener = Listener("127.0.0.1", world, secret)
        self.port = self.listener.port
        self.closed = threading.Event()
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._gather, daemon=True)
        self.thread.start()

    def _gather(self) -> None:
        try:
            self.listener.gather(self._check)
        except Exception as error:
            self.error = error

    def _check(self) -> None:
        if self.closed.is_set():
            raise EngineError("the test is over")

    def join(self, rank: int = 1, world: int = 3, secret: bytes = SECRET) -> Channel:
        return join("127.0.0.1", self.port, secret, identity(rank, world))

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def refused(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while self.listener.refused < count:
            assert time.monotonic() < deadline, f"{self.listener.refused} were refused"
            time.sleep(0.01)

    def close(self) -> None:
        self.closed.set()
        self.thread.join(60)
        self.listener.close()


@pytest.fixture
def door() -> Iterator[Door]:
    found = Door()
    yield found
    found.close()


def ended(connection: socket.socket) -> bool:
    """The other side has closed; what it had said before is passed over."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


# ---- who is let in


def test_ranks_that_know_the_secret_come_in_and_say_who_they_are(door: Door) -> None:
    links = [door.join(rank) for rank in (2, 1)]
    door.thread.join(60)
    assert {rank: found.host for rank, (_, found) in door.listener.joined.items()} == {
        1: "host-b",
        2: "host-b",
    }
    links[0].send(FrameKind.ALIVE)
    assert door.listener.joined[2][0].receive() == (FrameKind.ALIVE, b"")
    assert links[0].peer == "127.0.0.1"


def test_a_wrong_secret_is_refused_and_does_not_spend_the_rank(door: Door) -> None:
    with pytest.raises(HandshakeError, match="secret is not that of rank 0"):
        door.join(secret=SECRET + b"!")
    door.refused(1)
    assert not door.listener.joined
    assert door.join()


def test_a_listener_without_the_secret_is_found_out() -> None:
    """It accepts whatever comes; the worker does not believe it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def impostor() -> None:
            channel = Channel(server.accept()[0])
            channel.send(FrameKind.CHALLENGE, bytes(32))
            channel.receive()
            channel.send(FrameKind.WELCOME, bytes(32))
            channel.receive()

        threading.Thread(target=impostor, daemon=True).start()
        with pytest.raises(HandshakeError, match="does not know the secret"):
            join("127.0.0.1", server.getsockname()[1], SECRET, identity())


@pytest.mark.parametrize(
    ("rank", "world", "named"),
    [
        (1, 4, "knows of 4 ranks, the layout has 3"),
        (3, 3, "accepted: 1 to 2"),
        (0, 3, "accepted: 1 to 2"),
    ],
)
def test_a_rank_of_another_layout_is_refused(door: Door, rank: int, world: int, named: str) -> None:
    with pytest.raises(HandshakeError, match=named):
        door.join(rank, world)


def test_a_rank_that_is_there_already_is_refused(door: Door) -> None:
    assert door.join(1)
    with pytest.raises(HandshakeError, match="there already, from host-b"):
        door.join(1)


def test_an_answer_heard_once_cannot_be_sent_again(door: Door) -> None:
    """A different challenge each time."""
    with door.stranger() as first, door.stranger() as second:
        links = [Channel(first), Channel(second)]
        nonces = [channel.receive() for channel in links]
        assert nonces[0] != nonces[1]
        assert nonces[0] is not None
        rest = bytes(32) + identity().encode()
        answer = handshake.seal(SECRET, b"worker", nonces[0][1], rest) + rest
        links[1].send(FrameKind.ANSWER, answer)
        reply = links[1].receive()
        assert reply is not None
        assert reply[0] is FrameKind.REFUSED
        links[0].send(FrameKind.ANSWER, answer)
        welcome = links[0].receive()
        assert welcome is not None
        assert welcome[0] is FrameKind.WELCOME


# ---- what strangers cannot do


@pytest.mark.parametrize(
    "said",
    [
        HEADER.pack(FrameKind.ANSWER, handshake.FRAME + 1),
        HEADER.pack(FrameKind.ANSWER, 1 << 31) + b"x" * 4096,
        HEADER.pack(FrameKind.STEP, 2) + b"[]",
        HEADER.pack(FrameKind.ANSWER, 0),
        HEADER.pack(99, 0),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["too large", "huge", "no answer", "empty", "unknown kind", "http"],
)
def test_whoever_does_not_speak_the_protocol_is_cut_off(door: Door, said: bytes) -> None:
    with door.stranger() as stranger:
        stranger.sendall(said)
        assert ended(stranger)
    door.refused(1)
    assert door.join()


def test_nobody_may_take_long(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by silence nor by sending a byte now and then."""
    monkeypatch.setattr(handshake, "SECONDS", 0.5)
    start = time.monotonic()
    with door.stranger() as silent, door.stranger() as slow:
        slow.settimeout(0.1)
        for byte in HEADER.pack(FrameKind.ANSWER, 200) + bytes(200):
            try:
                slow.sendall(bytes([byte]))
            except OSError:
                break
            time.sleep(0.05)
        assert ended(silent)
    assert 0.4 < time.monotonic() - start < 9  # all bytes would take 10
    door.refused(2)


def test_strangers_cannot_fill_the_house(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "SECONDS", 1.0)
    monkeypatch.setattr(listener, "MAX_PENDING", 2)
    crowd = [door.stranger() for _ in range(2)]
    time.sleep(0.3)
    with door.stranger() as late:
        assert ended(late)
    assert door.join(), "a worker tries again until strangers' time is up"
    for stranger in crowd:
        stranger.close()


def test_waiting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "JOIN_SECONDS", 0.3)
    found = Door()
    assert found.join(2)
    found.thread.join(60)
    assert "ranks 1; connections refused: 0" in str(found.error)
    found.close()
    with pytest.raises(EngineError, match="cannot reach rank 0"):
        found.join(1)


# ---- frames


def pair() -> tuple[Channel, Channel]:
    first, second = socket.socketpair()
    return Channel(first), Channel(second)


def test_an_address_is_named_between_hosts_alone() -> None:
    assert pair()[0].network_address is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as here:
            assert Channel(here).network_address is None, "both are on this host"
        with socket.create_connection(server.getsockname(), source_address=("127.0.0.2", 0)) as far:
            assert Channel(far).network_address == "127.0.0.2"


def test_a_frame_too_large_or_of_no_kind_is_an_error() -> None:
    for header, named in (
        (struct.pack("!BI", FrameKind.RESULT, (1 << 30) + 1), "accepted: at most 1073741824"),
        (HEADER.pack(99, 0), "kind 99"),
    ):
        mine, theirs = pair()
        theirs.socket.sendall(header)
        with pytest.raises(FrameError, match=named):
            mine.receive()
        theirs.send(FrameKind.ALIVE)


def test_a_member_that_sends_one_is_named() -> None:
    mine, theirs = pair()
    member = WorkerHandle(1, "rank 1", ConnectedWorker(mine, 7, host="host-b"))
    theirs.socket.sendall(HEADER.pack(99, 0))
    member.listen()
    assert member.liveness_error(60) is None
    assert member.reported_failure() == (
        "rank 1 on host-b failed: a frame of kind 99 came; accepted: 1 to 17"
    )


def test_a_member_that_leaves_or_falls_silent_is_named() -> None:
    mine, theirs = pair()
    member = WorkerHandle(1, "rank 1", ConnectedWorker(mine, 7, host="host-b"))
    assert member.liveness_error(60) is None
    assert "rank 1 on host-b has given no sign of life" in str(member.liveness_error(-1))
    theirs.close()
    member.listen()
    assert "rank 1 on host-b has closed its link" in str(member.liveness_error(60))


def test_patience_ends_a_wait() -> None:
    mine, _theirs = pair()
    mine.patience(0.1)
    assert mine.receive() is None


# ---- addresses and secrets


def test_interfaces_are_named_one_by_one() -> None:
    assert named_address("lo") == named_address("127.0.0.1") == interfaces()["lo"] == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert route_to("localhost") == "127.0.0.1"
    for name in ("0.0.0.0", "", "eth-nowhere", "203.0.113.250", "::"):
        with pytest.raises(ConfigError, match="neither an interface of this host nor its address"):
            named_address(name)
    with pytest.raises(ConfigError, match="no way leads to the host"):
        route_to("no.such.host.invalid")


def test_a_public_address_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "route_to", lambda peer: "8.8.8.8")
    with pytest.raises(ConfigError, match=r"8\.8\.8\.8, a public address"):
        remote.own_address(None, "host-a")
    assert remote.own_address("lo", "host-a") == "127.0.0.1"


def test_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RORQUAL_SECRET", raising=False)
    assert shared_secret(None) is None
    monkeypatch.setenv("RORQUAL_SECRET", "0123456789abcdef")
    assert shared_secret(None) == b"0123456789abcdef"
    monkeypatch.setenv("RORQUAL_SECRET", "short")
    with pytest.raises(ConfigError, match="has 5 bytes; accepted: at least 16"):
        shared_secret(None)
    path = tmp_path / "secret"
    with pytest.raises(ConfigError, match="cannot be read"):
        shared_secret(str(path))
    path.write_text("fedcba9876543210\n")
    os.chmod(path, 0o644)
    with pytest.raises(ConfigError, match="can be read by other users"):
        shared_secret(str(path))
    os.chmod(path, 0o600)
    assert shared_secret(str(path)) == b"fedcba9876543210"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="has 0 bytes"):
        shared_secret(str(path))
