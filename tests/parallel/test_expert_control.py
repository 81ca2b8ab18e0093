"""What an expert server may say on its control link, and what ends it: sizes, kinds and numbers
that nobody sends, and silence."""

from __future__ import annotations

import fcntl
import json
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest

from rorqual.parallel.remote.control import ControlLink, ServerLink
from rorqual.parallel.remote.link import HEAD, readable
from rorqual.parallel.remote.link_server import LinkServer
from rorqual.parallel.remote.orders import SlotOrder
from rorqual.parallel.remote.wire import (
    MAX_ERROR,
    MAX_HOLDINGS,
    PING,
    ExpertMessage,
    Holdings,
)

EXPERTS = 4
OWN = Holdings(64, {0: (0, 1, 2, 3)})


def said(kind: int, data: bytes) -> bytes:
    return HEAD.pack(kind, len(data)) + data


def pong(number: int, version: int = 1) -> bytes:
    return said(ExpertMessage.PONG, PING.pack(number, version))


def newer(data: bytes) -> bytes:
    """Holdings of another version behind a sign of life."""
    return pong(1, 2) + said(ExpertMessage.HOLDINGS, data)


def held(**changes: object) -> bytes:
    return json.dumps({**json.loads(OWN.pack()), **changes}).encode()


GARBAGE = {
    "another kind": (said(77, b""), "accepted: kind"),
    "a size that nobody sends": (HEAD.pack(ExpertMessage.PONG, 2**31), "accepted: kind"),
    "a short sign of life": (said(ExpertMessage.PONG, b"x"), "an invalid heartbeat"),
    "another's number": (pong(7), "an invalid heartbeat"),
    "bytes": (b"\xff" * 64, "accepted: kind"),
    "an end": (b"", "its process ended"),
    "an end in the midst": (pong(1)[:7], "its process ended"),
    "holdings too large": (
        pong(1, 2) + HEAD.pack(ExpertMessage.HOLDINGS, MAX_HOLDINGS + 1),
        "accepted: kind",
    ),
    "holdings that are none": (newer(b"{"), "no JSON"),
    "a list": (newer(b"[]"), "no object"),
    "experts that there are not": (newer(held(layers={"0": "0-9"})), "out of range"),
    "a layer that is none": (newer(held(layers={"x": "0"})), ""),
    "no rows": (newer(held(max_rows=-5)), ""),
}


def linked(answer: Callable[[socket.socket], None], timeout: float = 2.0) -> tuple[str, ServerLink]:
    """Why a link ended whose server does this."""
    near, far = socket.socketpair()
    link = ServerLink(("127.0.0.1", 1), OWN, near, [])

    def renew(link: ServerLink, holdings: Holdings) -> None:
        link.holdings = holdings

    def serve() -> None:
        answer(far)
        far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    reason = ControlLink(link, timeout, EXPERTS, renew).watch()
    near.shutdown(socket.SHUT_RDWR)
    thread.join()
    near.close()
    return reason, link


def read(sock: socket.socket) -> bytes:
    kind, size = HEAD.unpack(sock.recv(HEAD.size, socket.MSG_WAITALL))
    assert kind in (ExpertMessage.PING, ExpertMessage.ORDER)
    return sock.recv(size, socket.MSG_WAITALL)


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_ends_the_link(name: str) -> None:
    data, reason = GARBAGE[name]

    def answer(sock: socket.socket) -> None:
        read(sock)
        sock.sendall(data)

    found, link = linked(answer)
    assert found, "says why"
    assert reason in found
    assert link.holdings == OWN


def test_silence_ends_the_link_and_slowness_does_not() -> None:
    def answer(sock: socket.socket) -> None:
        number, _ = PING.unpack(read(sock))
        for byte in struct.iter_unpack("c", pong(number)):
            sock.sendall(byte[0])
        read(sock)
        while sock.recv(64):  # and says nothing, until the link has ended
            pass

    assert linked(answer, 0.2)[0] == "silent for 0.2 s"


def test_an_answer_to_an_order_has_a_bound() -> None:
    answered: list[str] = []

    def answer(sock: socket.socket) -> None:
        number, _ = PING.unpack(read(sock))
        sock.sendall(pong(number))
        read(sock)  # the order, or the next sign of life
        sock.sendall(HEAD.pack(ExpertMessage.ORDERED, MAX_ERROR + 1))

    near, far = socket.socketpair()
    link = ServerLink(("127.0.0.1", 1), OWN, near, [])
    asking = threading.Thread(target=lambda: answered.append(link.order(SlotOrder(1, {}), 5)))
    asking.start()
    while link.orders.empty():
        time.sleep(0.001)
    serving = threading.Thread(target=answer, args=(far,))
    serving.start()
    reason = ControlLink(link, 2.0, EXPERTS, lambda link, holdings: None).watch()
    asking.join()
    serving.join()
    assert "accepted: kind" in reason
    assert answered == ["its link ended"]
    near.close()
    far.close()


def test_an_order_behind_the_last_look_is_answered_with_the_link_s_end() -> None:
    """The link's thread has ended, and the link is closed a little later."""
    near, far = socket.socketpair()
    far.close()
    link = ServerLink(("127.0.0.1", 1), OWN, near, [])
    assert ControlLink(link, 2.0, EXPERTS, lambda link, holdings: None).watch()
    assert link.alive, "nobody has closed it yet"
    answered: list[str] = []
    asking = threading.Thread(target=lambda: answered.append(link.order(SlotOrder(1, {}), 600)))
    asking.daemon = True
    asking.start()
    while link.orders.empty():
        time.sleep(0.001)
    link.close()
    asking.join(60)
    (answer,) = answered
    assert answer in ("its link ended", "it does not answer")


def test_a_link_that_comes_while_its_server_is_closed_is_not_served() -> None:
    server = LinkServer("127.0.0.1", 0, b"secret" * 6, {}, "late links", lambda sock: None, 4)
    lock = server.lock
    accepted = threading.Event()
    closed = threading.Event()

    class HeldUp:
        """The accepting thread gets the lock behind the one that closes."""

        def __enter__(self) -> None:
            if threading.current_thread() is not threading.main_thread():
                accepted.set()
                assert closed.wait(60)
            lock.acquire()

        def __exit__(self, *raised: object) -> None:
            lock.release()

    server.lock = HeldUp()  # type: ignore[assignment]
    with socket.create_connection((server.host, server.port), 60) as caller:
        assert accepted.wait(60)
        server.close()
        closed.set()
        assert caller.recv(1) == b"", "not even a challenge"
    assert not server.links


def test_a_link_of_a_high_number_is_looked_at() -> None:
    """Above what select takes: a server may have so many files open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most <= 1100:
        pytest.skip("this process may not open so many files")
    near, far = socket.socketpair()
    number = fcntl.fcntl(near.fileno(), fcntl.F_DUPFD_CLOEXEC, 1050)
    with near, far, socket.socket(fileno=number) as high:
        assert high.fileno() > 1024
        assert not readable(high, 0.001)
        far.sendall(b"x")
        assert readable(high, 5.0)
        assert high.recv(1) == b"x"
        far.close()
        assert readable(high, 5.0)
