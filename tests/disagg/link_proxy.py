"""A network between callers and an expert server, for tests: it stalls, is slow, garbles the heads
of replies, and does something at one point of one call."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from rorqual.parallel.remote.link import HEAD, LinkError, receive_exactly, shut
from rorqual.parallel.remote.wire import CallHead, Join, ReplyHead

MAX_ROWS = 1 << 20
GREETINGS = 2  # messages that the caller sends before calls: HELLO, JOIN

# of a call, in their order; each is a place before which all bytes have gone on
POINTS = (
    "before the call",
    "in its head",
    "in its rows",
    "after it",
    "before the reply",
    "in the reply's head",
    "in the reply's rows",
    "after the reply",
)

GARBAGE: dict[str, Callable[[ReplyHead], bytes]] = {
    "another number": lambda head: ReplyHead(head.sequence + 1, head.rows, 0, 0).pack(),
    "more rows": lambda head: ReplyHead(head.sequence, head.rows + 1, 0, 0).pack(),
    "fewer rows": lambda head: ReplyHead(head.sequence, head.rows - 1, 0, 0).pack(),
    "all rows there are": lambda head: ReplyHead(head.sequence, 2**31, 0, 0).pack(),
    "a long error": lambda head: ReplyHead(head.sequence, 2**31, 0, 1).pack(),
    "ones": lambda head: b"\xff" * ReplyHead.FORM.size,
}


@dataclass
class Cut:
    """`act`, once, at `point` of the first call after `calls` others."""

    point: str
    calls: int
    act: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)


class LinkProxy:
    """port: of the server. hidden, itemsize: of its rows. While `stalled` is set nothing goes on.
    delay: seconds that each reply is held back. garbage: by which the next reply's head is
    replaced."""

    def __init__(self, port: int, hidden: int, itemsize: int = 4):
        self.target = port
        self.width = (hidden, itemsize)
        self.stalled = threading.Event()
        self.delay = 0.0
        self.garbage: Callable[[ReplyHead], bytes] | None = None
        self.garbled = 0
        self.cut: Cut | None = None
        self.calls = 0
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def stall(self, seconds: float) -> None:
        self.stalled.set()
        time.sleep(seconds)
        self.stalled.clear()

    def slow(self, delay: float, seconds: float) -> None:
        self.delay = delay
        time.sleep(seconds)
        self.delay = 0.0

    def close(self) -> None:
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
                other = socket.create_connection(("127.0.0.1", self.target), 5)
                other.settimeout(None)
            except OSError:
                if self.listener.fileno() < 0:
                    return
                sock.close()
                continue
            for one in (sock, other):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._link, args=(sock, other), daemon=True).start()

    def _link(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError, LinkError):
            self._message(far, near)  # the challenge
            self._message(near, far)
            self._message(far, near)  # welcome
            if Join.unpack(self._message(near, far)).lane is None:
                threading.Thread(target=self._pass, args=(near, far), daemon=True).start()
                self._pass(far, near)
            else:
                while True:
                    self._one_call(near, far)
        shut(near)
        shut(far)

    def _message(self, one: socket.socket, two: socket.socket) -> bytes:
        head = receive_exactly(one, HEAD.size)
        data = receive_exactly(one, HEAD.unpack(head)[1])
        self._send(two, head + data)
        return data

    def _pass(self, one: socket.socket, two: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 20):
                self._send(two, data)
        shut(one)
        shut(two)

    def _send(self, sock: socket.socket, data: bytes) -> None:
        while self.stalled.is_set():
            time.sleep(0.01)
        sock.sendall(data)

    def _one_call(self, near: socket.socket, far: socket.socket) -> None:
        raw = receive_exactly(near, CallHead.FORM.size)
        head = CallHead.unpack(raw, MAX_ROWS)
        call = raw + receive_exactly(near, sum(head.sizes(*self.width)))
        cut = self._next_cut()
        self._in_parts(far, call, len(raw), cut, POINTS[:4])
        raw = receive_exactly(far, ReplyHead.FORM.size)
        found = ReplyHead.unpack(raw)
        size = found.rows if found.outcome else found.rows * self.width[0] * self.width[1]
        reply = receive_exactly(far, size)
        if self.delay:
            time.sleep(self.delay)
        if self.garbage is not None and not found.outcome:
            made, self.garbage = self.garbage, None
            self.garbled += 1
            with suppress(struct.error):
                raw = made(found)
        self._in_parts(near, raw + reply, len(raw), cut, POINTS[4:])

    def _next_cut(self) -> Cut | None:
        with self.lock:
            self.calls += 1
            cut = self.cut
            if cut is None or self.calls <= cut.calls:
                return None
            self.cut = None
            return cut

    def _in_parts(
        self,
        sock: socket.socket,
        data: bytes,
        head: int,
        cut: Cut | None,
        points: tuple[str, ...],
    ) -> None:
        if cut is None or cut.point not in points:
            self._send(sock, data)
            return
        before, in_head, in_rows, _ = points
        middle = head + (len(data) - head) // 2
        place = {before: 0, in_head: head // 2, in_rows: middle}.get(cut.point, len(data))
        self._send(sock, data[:place])
        cut.act()
        cut.done.set()
        self._send(sock, data[place:])
