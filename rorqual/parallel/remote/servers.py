"""The expert servers that an attention process knows: links to them, and which experts each holds.

A thread for each address connects, and connects again; while linked it asks for a sign of life. A
server is left out once its link ends or it is silent for `timeout`, and taken in again when it
answers. The process' own pauses (a stop, a busy machine) do not count as another's silence.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from rorqual.errors import ConfigError, ExpertsMissing
from rorqual.parallel.remote.config import RemoteConfig
from rorqual.parallel.remote.control import Address, ControlLink, DataLink, ServerLink, said
from rorqual.parallel.remote.group.calls import GroupCalls
from rorqual.parallel.remote.handles import HandleCalls
from rorqual.parallel.remote.link import (
    GREETING_SECONDS,
    Fingerprint,
    LinkError,
    LinkRefused,
    introduce,
    receive,
    send,
)
from rorqual.parallel.remote.wire import (
    HANDLES,
    MAX_HOLDINGS,
    PURPOSE,
    ExpertMessage,
    Holdings,
    join,
    ranges,
)

log = logging.getLogger("rorqual.engine")
RETRY = (0.05, 1.0)  # seconds between two tries to connect: the first, and the most
CONNECT_SECONDS = 5.0
SOCKET_BYTES = 4 * 2**20
GOLDEN = (math.sqrt(5) - 1) / 2
MIN_SHARE = 0.05
DAMPING = 0.25  # of a correction of shares
# of a share's way back to 1, at each correction: without it one that was slow once, and answers as
# fast as the others since, would keep the share that it had fallen to
RECOVERY = 0.1
SMOOTH = 0.2  # weight of the newest call in a server's mean
RESHARE_SECONDS = 0.25
RESHARE_CHANGE = 0.1
ANEW_SECONDS = 0.05  # for newer holdings to come


@dataclass(frozen=True)
class Holders:
    """Holders of the experts of a layer: of `table` [E, most] the first `count` [E] are numbers of
    `links`; `upto` [E, most] the sums of their shares, the last of which is 1."""

    links: tuple[ServerLink, ...]
    count: Tensor
    table: Tensor
    upto: Tensor

    @property
    def alone(self) -> bool:
        """Whether no expert has two holders, and each has one."""
        return self.table.shape[1] == 1 and bool(self.count.all())

    def missing(self, ids: Tensor) -> list[int]:
        found: list[int] = ids[self.count[ids] == 0].unique().tolist()
        return found

    def choose(self, ids: Tensor, turn: float) -> Tensor:
        """The link of each expert of ids [T, K]. A row's experts take the same turn, so that it
        goes to one of two servers that hold the same. turn: of the first row, 0 to 1."""
        if self.table.shape[1] == 1:
            return self.table[:, 0][ids]
        row = torch.arange(ids.shape[0], dtype=torch.float64)
        turns = (turn + row * GOLDEN).frac().to(torch.float32)[:, None, None]
        place = (turns >= self.upto[ids]).sum(-1)
        return self.table[ids].gather(-1, place[..., None])[..., 0]


@dataclass
class KnownServer:
    """failure: why there is no link; logged: the last one in the log. refused: that is a matter of
    settings. gone: it is not to be linked again."""

    address: Address
    link: ServerLink | None = None
    failure: str = "has not answered yet"
    logged: str = ""
    refused: bool = False
    gone: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class ServerStats:
    """For metrics: by server its name, whether it is linked, seconds of a call, share."""

    name: str
    linked: bool
    seconds: float
    share: float


class ExpertServers:
    """needed: layers whose experts are used. num_experts: of each. lanes: calls that may be under
    way at each server. max_rows: of a call, at most. handles: memory to share with servers of this
    host, where that may be. group: process groups with all servers, where that is asked for."""

    def __init__(
        self,
        config: RemoteConfig,
        fingerprint: Fingerprint,
        needed: Iterable[int],
        num_experts: int,
        lanes: int,
        max_rows: int,
        handles: HandleCalls | None = None,
        group: GroupCalls | None = None,
    ):
        self.config = config
        self.fingerprint = fingerprint
        self.needed = tuple(needed)
        self.num_experts = num_experts
        self.lanes = lanes
        self.max_rows = max_rows
        self.handles = handles
        self.group = group
        self.known: list[KnownServer] = []  # replaced as a whole
        self.registry = ""  # its state, for messages
        self.changed = threading.Condition()
        self.links: tuple[ServerLink, ...] = ()  # replaced as a whole, in the order of addresses
        self.tables: dict[int, Holders] = {}
        self.tabled: tuple[ServerLink, ...] | None = None
        self.reshared = time.monotonic()
        self.turn = 0.0
        self.closing = threading.Event()
        for address in config.servers:
            self.join(address)

    def join(self, address: Address) -> None:
        """Link a server, and again whenever it answers anew. Any thread."""
        with self.changed:
            if self.closing.is_set() or any(one.address == address for one in self.known):
                return
            server = KnownServer(address)
            self.known = [*self.known, server]
        name = f"experts {address[0]}:{address[1]}"
        arguments = (weakref.ref(self), server)
        threading.Thread(target=_keep_linked, args=arguments, name=name, daemon=True).start()

    def leave(self, address: Address) -> bool:
        """Link a server no more: whether it is left out. One that is linked, and alone holds an
        expert, stays. Any thread."""
        with self.changed:
            server = next((one for one in self.known if one.address == address), None)
            if server is None:
                return True
            link = server.link
            if link is not None and link.alive and self._holds_alone(link):
                return False
            server.gone.set()
            self.known = [one for one in self.known if one is not server]
            self.links = tuple(one for one in self.links if one is not link)
            self.changed.notify_all()
        if link is not None:
            link.close()
            self._lost(link, "it left the registry")
        log.warning("experts of %s:%d are left out: they left the registry", *address)
        return True

    def _holds_alone(self, link: ServerLink) -> bool:
        others = [one for one in self.links if one is not link and one.alive]
        for layer in self.needed:
            held = {expert for one in others for expert in one.holdings.layers.get(layer, ())}
            if not held.issuperset(link.holdings.layers.get(layer, ())):
                return True
        return False

    def wait_for_all(self, seconds: float, starts: bool = False) -> None:
        """Until every expert that is needed has a holder. starts: where every server is linked or
        refuses to be, waiting would not help. Raises ConfigError."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while missing := self.without_holder():
                left = deadline - time.monotonic()
                refused = any(server.refused for server in self.known)
                told = all(server.link or server.refused for server in self.known)
                if left <= 0 or (starts and refused and told):
                    raise ConfigError(f"experts: {missing}; {self.describe()}")
                self.changed.wait(left)

    def wait_until_linked(self) -> None:
        """Until all servers that were given are, for as long as a step may wait for one. Raises
        ConfigError."""
        deadline = time.monotonic() + self.config.wait
        with self.changed:
            while not all(server.link for server in self.known):
                left = deadline - time.monotonic()
                if left <= 0 or any(server.refused for server in self.known):
                    raise ConfigError(f"experts: not all servers answer; {self.describe()}")
                self.changed.wait(left)

    def without_holder(self) -> str:
        """The first layer with an expert that no server holds; nothing where there is none."""
        for layer in self.needed:
            held = {
                expert
                for link in self.links
                if link.alive
                for expert in link.holdings.layers.get(layer, ())
            }
            missing = [expert for expert in range(self.num_experts) if expert not in held]
            if missing:
                return f"no server holds {ranges(missing)} of layer {layer}"
        return ""

    def describe(self) -> str:
        """Of every address whether it is linked, or why not."""
        found = [
            f"{server.address[0]}:{server.address[1]} "
            + ("is linked" if server.link else server.failure)
            for server in self.known
        ]
        return "; ".join([*found, self.registry] if self.registry else found)

    def holders(self, layer: int) -> Holders:
        """Of one moment: links may come and go at any time."""
        links = self.links
        if links is not self.tabled:
            self.tables = {}
            self.tabled = links
        if layer not in self.tables:
            self.tables[layer] = self._holders(layer, links)
        return self.tables[layer]

    def _holders(self, layer: int, links: tuple[ServerLink, ...]) -> Holders:
        held: list[list[int]] = [[] for _ in range(self.num_experts)]
        for number, link in enumerate(links):
            for expert in link.holdings.layers.get(layer, ()):
                held[expert].append(number)
        most = max(1, *map(len, held))
        table = torch.zeros(self.num_experts, most, dtype=torch.int64)
        upto = torch.ones(self.num_experts, most)
        for expert, numbers in enumerate(held):
            if not numbers:
                continue
            table[expert, : len(numbers)] = torch.tensor(numbers)
            shares = torch.tensor([links[number].share for number in numbers])
            upto[expert, : len(numbers) - 1] = (shares.cumsum(0) / shares.sum())[:-1]
        return Holders(links, torch.tensor(list(map(len, held))), table, upto)

    def next_turn(self) -> float:
        self.turn = (self.turn + GOLDEN) % 1.0
        return self.turn

    def observe(self, link: ServerLink, seconds: float) -> None:
        """A call took so long. Servers that are slower than others get less of what both hold."""
        mean = link.seconds
        link.seconds = mean + SMOOTH * (seconds - mean) if mean else seconds
        now = time.monotonic()
        if len(self.links) > 1 and now - self.reshared > RESHARE_SECONDS:
            self.reshared = now
            self._reshare()

    def _reshare(self) -> None:
        links = self.links
        measured = [link for link in links if link.seconds]
        if len(measured) < len(links):
            return
        middle = sum(link.seconds for link in measured) / len(measured)
        wanted = [
            link.share ** (1 - RECOVERY) * (middle / link.seconds) ** DAMPING for link in measured
        ]
        most = max(wanted)
        changed = False
        for link, share in zip(measured, wanted, strict=True):
            new = max(MIN_SHARE, share / most)
            changed = changed or abs(new - link.share) > RESHARE_CHANGE * link.share
            link.share = new
        if changed:
            self.tables = {}

    def missing(self, layer: int, experts: list[int]) -> ExpertsMissing:
        return ExpertsMissing(
            f"no server holds expert {ranges(experts)} of layer {layer}; {self.describe()}"
        )

    def drop(self, link: ServerLink, reason: str) -> None:
        """Leave a server out, until it answers anew. Any thread."""
        with self.changed:
            if link not in self.links:
                return
            self.links = tuple(other for other in self.links if other is not link)
            for server in self.known:
                if server.link is link:
                    server.link = None
                    server.failure = reason
            self.changed.notify_all()
        link.close()
        self._lost(link, reason)
        if not self.closing.is_set():
            log.warning("experts of %s are left out: %s", link.name, reason)

    def _lost(self, link: ServerLink, reason: str) -> None:
        if self.handles is not None:
            self.handles.lost(link, reason)
        if self.group is not None:
            self.group.lost(link, reason)

    def ask_anew(self, link: ServerLink) -> None:
        """A server lacks an expert of its holdings: wait a little for newer ones."""
        link.woken.set()
        version = link.holdings.version
        with self.changed:
            self.changed.wait_for(
                lambda: link.holdings.version != version or not link.alive, ANEW_SECONDS
            )

    def stats(self) -> list[ServerStats]:
        found = []
        for server in self.known:
            link = server.link
            name = f"{server.address[0]}:{server.address[1]}"
            found.append(
                ServerStats(
                    name,
                    link is not None,
                    link.seconds if link else 0.0,
                    link.share if link else 0.0,
                )
            )
        return found

    def close(self) -> None:
        self.closing.set()
        if self.group is not None:
            self.group.close()
        with self.changed:
            links = self.links
            self.links = ()
            for server in self.known:
                server.gone.set()
            self.changed.notify_all()
        for link in links:
            link.close()
            self._lost(link, "the engine ends")
        if self.handles is not None:
            self.handles.close()

    # ---- a thread for each address

    def _try(self, server: KnownServer) -> ServerLink | None:
        """A link to it, or None, with the reason in `failure`."""
        try:
            link = self._connect(server.address)
        except (OSError, LinkError) as error:
            self._failed(server, error)
            return None
        self._add(server, link)
        return link

    def _renew(self, link: ServerLink, holdings: Holdings) -> None:
        """Call a server by other holdings from the next call on."""
        with self.changed:
            link.holdings = holdings
            self.links = (*self.links,)  # another tuple, so tables are made anew
            self.changed.notify_all()

    def _failed(self, server: KnownServer, error: Exception) -> None:
        text = "does not answer" if isinstance(error, TimeoutError) else said(error)
        with self.changed:
            server.failure = text
            server.refused = isinstance(error, LinkRefused)
            self.changed.notify_all()
        if text != server.logged and not server.gone.is_set():
            server.logged = text
            log.warning("experts of %s:%d: %s", *server.address, text)

    def _add(self, server: KnownServer, link: ServerLink) -> None:
        with self.changed:
            if server.gone.is_set():
                link.close()
                return
            server.link = link
            server.logged = ""
            server.refused = False
            found = [known.link for known in self.known]
            self.links = tuple(other for other in found if other is not None)
            self.changed.notify_all()
        held = {ranges(experts) for experts in link.holdings.layers.values()}
        log.info(
            "experts of %s: %s of %d layers",
            link.name,
            held.pop() if len(held) == 1 else "differing ones",
            len(link.holdings.layers),
        )

    def _connect(self, address: Address) -> ServerLink:
        opened: list[socket.socket] = []
        try:
            for lane in (None, *range(self.lanes)):
                self._open(address, lane, opened)
            control, *data = opened
            kind, found = receive(control, MAX_HOLDINGS)
            if kind != ExpertMessage.HOLDINGS:
                raise LinkError(f"a message of kind {kind} came where holdings were to")
            holdings = Holdings.unpack(found, self.num_experts)
            if holdings.max_rows < self.max_rows:
                raise LinkRefused(
                    f"takes {holdings.max_rows} rows in a call, steps here have up to "
                    f"{self.max_rows}; start it with --max-rows {self.max_rows}"
                )
        except BaseException:
            for sock in opened:
                sock.close()
            raise
        for sock in data:
            sock.setblocking(False)
        link = ServerLink(address, holdings, control, [DataLink(sock) for sock in data])
        try:
            self._share_memory(link)
        except BaseException:
            link.close()
            raise
        return link

    def _open(self, address: Address, lane: int | str | None, opened: list[socket.socket]) -> None:
        """A socket more, that has joined for a lane."""
        sock = socket.create_connection(address, CONNECT_SECONDS)
        opened.append(sock)
        if sock.getsockname() == sock.getpeername():
            # on loopback a port without a listener may connect to itself, and be in use then
            raise LinkError("Connection refused")
        sock.settimeout(GREETING_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BYTES)
        introduce(sock, self.config.secret, self.fingerprint, PURPOSE)
        named = self.handles or self.group
        caller = "" if isinstance(lane, int) or named is None else named.caller
        send(sock, ExpertMessage.JOIN, join(lane, caller))

    def open(self, address: Address, lane: str) -> socket.socket:
        """Another link to a server, that has joined for `lane`. Raises LinkError, OSError."""
        opened: list[socket.socket] = []
        try:
            self._open(address, lane, opened)
        except BaseException:
            for sock in opened:
                sock.close()
            raise
        return opened[0]

    def _share_memory(self, link: ServerLink) -> None:
        """Where that is wanted. Raises LinkError where calls go by shared memory alone, and it
        cannot be."""
        handles = self.handles
        if handles is None or (handles.decided and not handles.on):
            return
        opened: list[socket.socket] = []
        try:
            if len(self.links) >= handles.most:
                raise LinkError(f"{len(self.links)} servers are linked, as many as can be")
            self._open(link.address, HANDLES, opened)
            link.handles = handles.open(opened[0])
        except (OSError, LinkError) as error:
            for sock in opened:
                sock.close()
            link.no_handles = said(error)
            if handles.on:
                raise LinkError(f"its memory cannot be shared: {link.no_handles}") from None


def _keep_linked(owner: weakref.ref[ExpertServers], server: KnownServer) -> None:
    """The thread of an address: connect, and connect again. It holds the servers of an engine only
    while it connects, so that it ends with an engine that was dropped without being closed."""

    def renew(link: ServerLink, holdings: Holdings) -> None:
        servers = owner()
        if servers is not None:
            servers._renew(link, holdings)

    pause = RETRY[0]
    while not server.gone.is_set():
        servers = owner()
        if servers is None:
            return
        timeout = servers.config.timeout
        num_experts = servers.num_experts
        link = servers._try(server)
        del servers
        if link is None:
            server.gone.wait(pause)
            pause = min(2 * pause, RETRY[1])
            continue
        pause = RETRY[0]
        wanted = partial(_lives, owner)
        reason = ControlLink(link, timeout, num_experts, renew, wanted).watch()
        servers = owner()
        if servers is None:
            link.close()
            return
        servers.drop(link, reason)
        del servers


def _lives(owner: weakref.ref[ExpertServers]) -> bool:
    return owner() is not None
