"""Calls to expert servers of this host over memory that the GPUs of both sides share, all of whose
waiting is done on the device: a decode step with all its calls is one captured graph.

Rows and sums are moved by ops/triton/comm/remote_dispatch.py. The host does the rest: before it
launches calls it announces them to each server over a link (`announce`, or `announce_step` for
those in a captured graph); between steps it writes the experts' holders into tables on the device
(`begin`); and when a server is lost it sets a stop word in host memory, which ends every wait on
the device. The step then runs to its end, its result is not valid, and it is given up (`check`):
steps carry the number of the `epoch` in which they began, and a loss begins another one. Before the
next step the device becomes idle, and each remaining server finishes what was announced to it; both
sides have counted the same then, and continue. A server for which that is not so is left out, and
linked again with new memory.

Where there are several ranks, each has memory of its own at every server, and losses of its own.
All must know of a loss of one before any uses the step's tokens: so the device itself notes, at the
end of the step, whether a wait may have been cut short (`note`), and the ranks add up their notes
there (engine/remote_experts.py).

Memory belongs to both sides: a process that ends, or is stopped and continues much later, writes
into memory that no other process reads any more.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from rorqual.config.host_memory import host_number
from rorqual.errors import ConfigError, ExpertsMissing
from rorqual.parallel.remote.control import ServerLink, said
from rorqual.parallel.remote.handle_link import HandleLink, LaneHeads
from rorqual.parallel.remote.link import LinkError, receive, send
from rorqual.parallel.remote.step_calls import StepCalls
from rorqual.parallel.remote.wire import (
    MAX_LANES_BYTES,
    BlockName,
    ExpertMessage,
    LanesOffer,
    Step,
    pack_step,
    read_lanes_made,
)
from rorqual.parallel.shared.handle_passing import DescriptorServer, fetch_descriptors
from rorqual.parallel.shared.shared_block import SharedBlock
from rorqual.platforms.base import Platform

if TYPE_CHECKING:
    from rorqual.ops.triton.comm.remote_dispatch import LaneAreas

log = logging.getLogger("rorqual.engine")
DRAIN_SECONDS = 5.0  # for a server to come to the end of a step that was given up
LOOK_SECONDS = 0.001
HEAD_SECONDS = 5.0  # for the device to copy a few bytes
LANES_SECONDS = 90.0  # for a server to compile kernels, make memory, and map another GPU's
SEND_SECONDS = 2.0  # for a server to take a step's message
STEP_SECONDS = 120.0  # after which a server that lives, and has not computed a step, is left out
WRAP = 2**32
NO_HOLDER = "no server held an expert that a step needed"
DEVICES = ("cuda",)  # whose memory can be shared


class Members(Protocol):
    """The servers that are linked, and how one is left out (ExpertServers)."""

    links: tuple[ServerLink, ...]

    def drop(self, link: ServerLink, reason: str) -> None: ...

    def without_holder(self) -> str: ...

    def describe(self) -> str: ...


class HandleCalls(StepCalls):
    """Of one rank. layers: whose experts are used. noted: `note` and `ended` are called of each
    step, not `check`. `on` once `decide` has found that all servers share memory; until then, and
    where they do not, calls go over sockets."""

    def __init__(
        self,
        platform: Platform,
        areas: LaneAreas,
        dtype: torch.dtype,
        fp8: bool,
        lanes: int,
        layers: Sequence[int],
        num_experts: int,
        noted: bool = False,
    ):
        from rorqual.ops.triton.comm import remote_dispatch as kernels

        super().__init__(platform)
        self.kernels = kernels
        self.areas = areas
        self.dtype = dtype
        self.fp8 = fp8
        self.noted = noted
        self.layers = {layer: number for number, layer in enumerate(layers)}
        self.num_experts = num_experts
        self.on = False
        self.decided = False
        self.why = "not decided yet"
        self.caller = secrets.token_hex(16)
        device = platform.device
        with torch.inference_mode(False):  # any thread writes them
            self.words = platform.host_empty((2,), torch.int32).zero_()  # stop, report
            self.halts = torch.zeros(lanes, 1, dtype=torch.int32, device=device)
        most = kernels.SERVERS
        self.tables = torch.zeros(lanes, 2 * most + 2, dtype=torch.int64, device=device)
        self.holders = torch.zeros(len(layers), num_experts, dtype=torch.int64, device=device)
        self.sent = torch.zeros(lanes, areas.rows, dtype=torch.int32, device=device)
        done = torch.zeros(lanes, 1, dtype=torch.int32, device=device)
        self.lanes = [
            kernels.CallerLane(areas, *parts)
            for parts in zip(self.tables, self.sent, done, self.halts, strict=True)
        ]
        self.descriptors: DescriptorServer | None = None
        self.servers: Members | None = None
        self.tabled: tuple[ServerLink, ...] | None = None
        self.active: tuple[ServerLink, ...] = ()
        self.lock = threading.Lock()
        self.epoch = 0
        self.failure = ""  # of the epoch before
        self.stopped = False
        self.doubtful = False  # a call may have been announced and not launched
        self.began: deque[float] = deque()  # of steps that are not checked yet
        self.kept: list[ServerLink] = []  # lost, and mapped until the device is at rest

    @property
    def most(self) -> int:
        """Servers at once."""
        return self.kernels.SERVERS

    # ---- a link's thread

    def open(self, sock: socket.socket) -> HandleLink:
        """Share memory with a server, over a link that has joined for that. Raises LinkError, with
        the reason where it cannot be."""
        lanes = len(self.lanes)
        with self._background():
            homes = new_block(lanes * self.areas.home_size, self.device)
            own = homes.tensor(self.device)
            own.zero_()
        token = self._offer(homes)
        try:
            offer = LanesOffer(
                host_number(),
                lanes,
                self.areas.rows,
                self.areas.columns,
                self.areas.top_k,
                self.fp8,
                str(self.dtype).removeprefix("torch."),
                BlockName(self._descriptors().name, token.hex()),
            )
            sock.settimeout(LANES_SECONDS)
            send(sock, ExpertMessage.LANES, offer.pack())
            kind, data = receive(sock, MAX_LANES_BYTES)
            if kind != ExpertMessage.LANES_MADE:
                raise LinkError(f"a message of kind {kind} came where lanes were to")
            block = read_lanes_made(data)
            with self._background():
                inboxes = map_block(block, lanes * self.areas.inbox_size, self.device)
        finally:
            self._descriptors().withdraw(token)
        sock.settimeout(SEND_SECONDS)
        heads = own.view(lanes, self.areas.home_size)[:, :8].view(torch.int32)
        with self.platform.stream():
            read = LaneHeads(heads, self.platform)
        return HandleLink(sock, inboxes, homes, [0] * lanes, read, _late_of(self))

    def _why_late(self, link: HandleLink) -> str:
        """Why a server that lives is to be left out: a step waits for it alone, perhaps."""
        try:
            waited = time.monotonic() - self.began[0]
        except IndexError:
            return ""
        if waited < STEP_SECONDS:
            return ""
        late = f"a step took longer than {STEP_SECONDS:g} s"
        with self.platform.stream():
            heads = link.heads.read(HEAD_SECONDS)
        if heads is None:
            return f"{late}, and the device copies nothing"
        # else the step waits for another server, or for another rank
        return late if any(done != due for done, due in heads) else ""

    @contextmanager
    def _background(self) -> Iterator[None]:
        """For another thread's work on the device; it is done at the end."""
        with self.platform.background() as settle:
            yield
            settle()

    def _descriptors(self) -> DescriptorServer:
        with self.lock:
            if self.descriptors is None:
                try:
                    self.descriptors = DescriptorServer()
                except OSError as error:
                    raise LinkError(f"no socket for descriptors: {said(error)}") from None
                # of an engine that is dropped without being closed
                weakref.finalize(self, self.descriptors.end).atexit = False
            return self.descriptors

    def _offer(self, block: SharedBlock) -> bytes:
        with self.platform.stream():
            fd = block.fd()
        try:
            return self._descriptors().offer([fd])
        finally:
            os.close(fd)

    # ---- any thread

    def lost(self, link: ServerLink, reason: str) -> None:
        """Steps in flight with it end, and their results are not valid."""
        with self.lock:
            if link not in self.active:
                return
            self.active = tuple(other for other in self.active if other is not link)
            self.kept.append(link)
            self._end_epoch(f"experts of {link.name} are left out: {reason}")
            self.stopped = True
            self.words[0] = 1

    def _end_epoch(self, failure: str) -> None:
        self.epoch += 1
        self.failure = failure

    def close(self) -> None:
        if self.descriptors is not None:
            self.descriptors.close()

    # ---- the engine's thread

    def decide(
        self, servers: Members, must: bool, agree: Callable[[str], str] = lambda why: why
    ) -> None:
        """Whether calls use shared memory from now on: all linked servers can, on every rank. must:
        raise ConfigError where they cannot. agree: from why not on this rank, or nothing, to why
        not on any rank; collective, and called by every rank."""
        self.servers = servers
        links = servers.links
        reasons = [f"{link.name}: {link.no_handles}" for link in links if link.handles is None]
        self.why = agree("; ".join(reasons))
        self.decided = True
        if self.why and must:
            raise ConfigError(f"expert_transport='handles': {self.why}")
        self.on = not self.why
        if not self.on:
            # a server ends the whole link with the memory: linked anew, it has none
            for link in links:
                if link.handles is not None:
                    servers.drop(link, "its memory is not needed")
            return
        self.begin()
        self.began.clear()
        if self.noted:
            self._load_note()

    def _load_note(self) -> None:
        """Its kernels are compiled and loaded here, not behind a step that waits: Triton has others
        for 0 and for 1, and for where rank 0's note is and the others' are not: on a multiple of 16
        bytes."""
        spare = torch.zeros(2, dtype=torch.int32, device=self.device)
        for own in (False, True):
            for place in range(2):
                self.note(own, spare[place : place + 1])

    def takes(self, rows: int) -> bool:
        return self.on and 0 < rows <= self.areas.rows

    def begin(self, before_change: Callable[[], object] | None = None) -> int:
        """Before a step: the number of its epoch. before_change: launches the rest of the step
        before this one, before servers are renumbered: its calls use the current numbers."""
        if not self.on:
            return self.epoch
        assert self.servers is not None
        while True:
            epoch = self.epoch  # first: a server may be lost at any time from here on
            links = self.servers.links
            self._lose_all_but(links)
            if self.noted and int(self.words[1]):
                self._end_epoch_of_report()
                self.doubtful = True
            resting = self.stopped or self.doubtful
            if not resting and self.tabled is links:
                break
            if before_change is not None:
                before_change()
            if resting:
                self._come_to_rest()
            else:
                self._write_tables(links)
                break
        self.began.append(time.monotonic())
        return epoch

    def check(self, epoch: int, word: int = 0) -> None:
        """A step that began in that epoch is done on the device. Raises ExpertsMissing where its
        result is not valid. word: not used here."""
        if self.began:
            self.began.popleft()
        if self.on and int(self.words[1]):
            self._end_epoch_of_report()
            self._come_to_rest()
        if epoch != self.epoch:
            raise ExpertsMissing(self.describe_failure())

    def note(self, own: bool, out: Tensor) -> None:
        """Behind all of a step: set out [1] int32, on the device, to whether the step's result is
        not valid on this rank, by its calls or by what the host knows (own)."""
        self.kernels.note(self.lanes[0], own, out)

    def ended(self) -> None:
        """A step is done on the device, and all ranks have its notes."""
        if self.began:
            self.began.popleft()

    def describe_failure(self) -> str:
        """Why a step was given up here, as far as it is still known."""
        assert self.servers is not None
        missing = self.servers.without_holder() or self.failure or NO_HOLDER
        return f"{missing}; {self.servers.describe()}"

    def _end_epoch_of_report(self) -> None:
        with self.lock:
            self._end_epoch(NO_HOLDER)

    def abandon(self) -> None:
        """Steps are given up, perhaps between the announcement of a call and its launch."""
        self.doubtful = True
        self.began.clear()

    def _send_step(self, step: Step) -> None:
        message = pack_step(step)
        for link in self.active:
            handles = link.handles
            assert handles is not None
            for lane, calls in step.items():
                handles.announced[lane] += sum(call.rows for call in calls)
            try:
                send(handles.sock, ExpertMessage.STEP, message)
            except OSError as error:
                assert self.servers is not None
                self.servers.drop(link, said(error))

    def _come_to_rest(self) -> None:
        """Nothing runs on the device at the end of this, and each server has finished its calls."""
        assert self.servers is not None
        self.platform.synchronize()
        for link in self.active:
            reason = self._why_not_at_rest(link)
            if reason:
                self.servers.drop(link, reason)
        self.halts.zero_()
        self.platform.synchronize()  # lanes may be on other streams
        with self.lock:
            self.words.zero_()
            self.stopped = False
            self.doubtful = False
            self.active = ()
            self.kept.clear()
        self.tabled = None

    def _why_not_at_rest(self, link: ServerLink) -> str:
        handles = link.handles
        assert handles is not None
        deadline = time.monotonic() + DRAIN_SECONDS
        while True:
            heads = handles.heads.read(DRAIN_SECONDS)
            if heads is None:
                return "the device copies nothing"
            done = [answered for answered, _ in heads]
            due = [to_answer for _, to_answer in heads]
            if [rows % WRAP for rows in handles.announced] != [count % WRAP for count in due]:
                return "a step was given up before its rows left"
            if done == due:
                return ""
            if not link.alive:
                return "its link ended"
            if time.monotonic() > deadline:
                return f"it does not end a step in {DRAIN_SECONDS:g} s"
            time.sleep(LOOK_SECONDS)

    def _lose_all_but(self, links: tuple[ServerLink, ...]) -> None:
        """`lost` is called after a link was removed from `links`; until then steps in flight may
        wait for it."""
        for link in self.active:
            if link not in links:
                self.lost(link, "its link ended")

    def _write_tables(self, links: tuple[ServerLink, ...]) -> None:
        """Behind all that was launched, for all that will be. Each active link is one of these."""
        assert self.servers is not None
        with self.lock:
            shared = [link for link in links if link.handles is not None]
            shared.sort(key=lambda link: link.address)
            self.active = tuple(shared[: self.kernels.SERVERS])
        tables = torch.zeros(self.tables.shape, dtype=torch.int64)
        most = self.kernels.SERVERS
        stop, report = (word.data_ptr() for word in self.words)
        tables[:, 2 * most :] = torch.tensor([stop, report])
        for number, link in enumerate(self.active):
            assert link.handles is not None
            for lane in range(len(self.lanes)):
                inbox = link.handles.inboxes.pointer + lane * self.areas.inbox_size
                tables[lane, number] = inbox
                home = link.handles.homes.pointer + lane * self.areas.home_size
                tables[lane, most + number] = home
        self.tables.copy_(tables)
        self.holders.copy_(self._holders())
        self.tabled = links
        for link in links:
            if link.handles is None:  # it was linked while this was decided
                self.servers.drop(link, f"its memory is not shared: {link.no_handles}")
        self._lose_all_but(self.servers.links)  # `lost` may have been called before it was active

    def _holders(self) -> Tensor:
        """[layers, E], as the kernels read it."""
        shape = (len(self.layers), self.num_experts)
        count = torch.zeros(shape, dtype=torch.int64)
        packed = torch.zeros(shape, dtype=torch.int64)
        for number, link in enumerate(self.active):
            held = torch.zeros(shape, dtype=torch.int64)
            for layer, place in self.layers.items():
                held[place, list(link.holdings.layers.get(layer, ()))] = 1
            packed += held * number << self.kernels.NUMBER_BITS * count
            count += held
        return packed + (count << 32)


def new_block(size: int, device: torch.device) -> SharedBlock:
    """Raises LinkError."""
    _check_device(device)
    try:
        return SharedBlock.new(size, device)
    except (RuntimeError, OSError, AttributeError) as error:  # or no driver, or an old one
        raise LinkError(f"no shared memory: {_first_line(error)}") from None


def map_block(block: BlockName, size: int, device: torch.device) -> SharedBlock:
    """What another process of this host shares. Raises LinkError."""
    _check_device(device)
    try:
        (fd,) = fetch_descriptors(block.name, bytes.fromhex(block.token), 1)
        try:
            return SharedBlock.of(fd, size, device)
        finally:
            os.close(fd)
    except (RuntimeError, OSError, AttributeError) as error:
        raise LinkError(f"no shared memory: {_first_line(error)}") from None


def _late_of(calls: HandleCalls) -> Callable[[HandleLink], str]:
    """Held by the thread of a link, which must not keep an engine alive that nothing else uses."""
    weak = weakref.ref(calls)

    def late(link: HandleLink) -> str:
        found = weak()
        return "" if found is None else found._why_late(link)

    return late


def _check_device(device: torch.device) -> None:
    if device.type not in DEVICES:
        raise LinkError(f"memory of {device.type} is not shared so")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
