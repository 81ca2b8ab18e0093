"""Links to one expert server, and the messages of the control link: heartbeats, newer holdings,
orders to hold other experts.

A control link has a thread of its own. What this process itself sleeps through (a stop, a
busy machine) does not count as the server's silence.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from rorqual.parallel.remote.handle_link import HandleLink
from rorqual.parallel.remote.link import HEAD, LinkError, send, shut
from rorqual.parallel.remote.orders import SlotOrder
from rorqual.parallel.remote.wire import (
    MAX_ERROR,
    MAX_HOLDINGS,
    PING,
    ExpertMessage,
    Holdings,
)

Address = tuple[str, int]
PINGS = 8  # in the time after which silence counts


@dataclass
class DataLink:
    """One of a server's data links. sequence: of its last call. pending: a reply is yet to come."""

    sock: socket.socket
    sequence: int = 0
    pending: bool = False


@dataclass(eq=False)
class PostedOrder:
    """An order to a server. refused: why, once `answered`; nothing where it is taken."""

    order: SlotOrder
    answered: threading.Event = field(default_factory=threading.Event)
    refused: str = "its link ended"


@dataclass(eq=False)
class ServerLink:
    """A server that answered. holdings: replaced as they change. alive: no sign of its end so far.
    seconds: a call takes, smoothed; 0 before the first. share: what it gets of the rows that others
    could take too, at most 1. handles: memory shared with it; no_handles: why there is none.
    woken: there is something to say on the control link, an order of `orders` perhaps."""

    address: Address
    holdings: Holdings
    control: socket.socket
    data: list[DataLink]
    alive: bool = True
    seconds: float = 0.0
    share: float = 1.0
    handles: HandleLink | None = None
    no_handles: str = ""
    orders: queue.SimpleQueue[PostedOrder] = field(default_factory=queue.SimpleQueue)
    woken: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    def close(self) -> None:
        self.alive = False
        self.woken.set()
        self.end_orders()
        for sock in (self.control, *(data.sock for data in self.data)):
            shut(sock)
            sock.close()
        if self.handles is not None:
            self.handles.close()

    def order(self, order: SlotOrder, seconds: float) -> str:
        """Have the server hold other experts: why it refuses, nothing where it will do so. Its
        holdings say when it has. Any thread but the link's own."""
        posted = PostedOrder(order)
        self.orders.put(posted)
        self.woken.set()
        if not self.alive or not posted.answered.wait(seconds):
            return "it does not answer"
        return posted.refused

    def end_orders(self) -> None:
        """End all waits for answers to orders. Any thread."""
        with suppress(queue.Empty):
            while True:
                self.orders.get_nowait().answered.set()


class ControlLink:
    """The thread's side. timeout: seconds of silence that end a link. renew: takes newer holdings.
    wanted: whether anything still uses the link, asked with each heartbeat."""

    def __init__(
        self,
        link: ServerLink,
        timeout: float,
        num_experts: int,
        renew: Callable[[ServerLink, Holdings], None],
        wanted: Callable[[], bool] = lambda: True,
    ):
        self.link = link
        self.timeout = timeout
        self.tick = timeout / PINGS
        self.num_experts = num_experts
        self.renew = renew
        self.wanted = wanted

    def watch(self) -> str:
        """Until the server is silent or gone: why."""
        link = self.link
        number = 0
        try:
            link.control.settimeout(self.tick)
            while link.alive and self.wanted():
                number += 1
                version = link.holdings.version
                if not (self._beat(number) and self._pass_orders()):
                    return f"silent for {self.timeout:g} s"
                late = "" if link.handles is None else link.handles.why_late()
                if late:
                    return late
                if link.holdings.version != version:
                    continue  # it waits until it is called by these
                link.woken.wait(self.tick)
                link.woken.clear()
        except (OSError, LinkError) as error:
            return said(error)
        finally:
            link.end_orders()
        return "its link ended"

    def _beat(self, number: int) -> bool:
        """Whether a heartbeat is answered in time; newer holdings come with the answer."""
        link = self.link
        version = link.holdings.version
        send(link.control, ExpertMessage.PING, PING.pack(number, version))
        found = self._hear(ExpertMessage.PONG, PING.size)
        if found is None:
            return not link.alive
        if len(found) != PING.size or PING.unpack(found)[0] != number:
            raise LinkError("an invalid heartbeat came")
        if PING.unpack(found)[1] == version:
            return True
        found = self._hear(ExpertMessage.HOLDINGS, MAX_HOLDINGS)
        if found is None:
            return not link.alive
        self.renew(link, Holdings.unpack(found, self.num_experts))
        return True

    def _pass_orders(self) -> bool:
        link = self.link
        while True:
            try:
                posted = link.orders.get_nowait()
            except queue.Empty:  # another thread that closes the link takes them, too
                return True
            try:
                send(link.control, ExpertMessage.ORDER, posted.order.pack())
                found = self._hear(ExpertMessage.ORDERED, MAX_ERROR)
                if found is None:
                    return not link.alive
                posted.refused = found.decode(errors="replace")
            finally:
                posted.answered.set()

    def _hear(self, wanted: int, most: int) -> bytes | None:
        """A message of that kind; None where it does not come in time or the link ends."""
        control = self.link.control
        silent = 0.0
        data = bytearray()
        size = HEAD.size
        while silent < self.timeout and self.link.alive:
            before = time.monotonic()
            with suppress(TimeoutError):
                found = control.recv(size - len(data))
                if not found:
                    raise LinkError("its process ended")
                data += found
            if len(data) == size == HEAD.size:
                size += _bytes_behind(data, wanted, most)
            if len(data) == size:
                return bytes(data[HEAD.size :])
            silent += min(time.monotonic() - before, 2 * self.tick)
        return None


def _bytes_behind(head: bytes | bytearray, wanted: int, most: int) -> int:
    """Raises LinkError."""
    kind, size = HEAD.unpack(head)
    if kind != wanted or size > most:
        raise LinkError(
            f"a message of kind {kind} and {size} bytes came; accepted: kind {wanted}, at most "
            f"{most} bytes"
        )
    return int(size)


def said(error: Exception) -> str:
    """Without the system's number."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
