"""Calls to expert servers by messages of process groups: NCCL between GPUs, where a decode step
with all its calls is one captured graph, and gloo on a CPU.

As with shared memory (handles.py) the host announces calls to each server before it launches them,
writes the experts' holders into tables on the device between steps, and gives up a step whose
result is not valid: each step carries the number of the `epoch` in which it began.

A group's members are fixed: the caller, and every server that was configured. When one is lost the
group is over. A thread ends all waits in it; the step runs to its end with zeros and is given up,
and it and all later ones go over sockets, to the remaining servers.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rorqual.errors import ConfigError, ExpertsMissing
from rorqual.parallel.remote.control import Address, ServerLink, said
from rorqual.parallel.remote.group.forming import GroupForming, GroupMember
from rorqual.parallel.remote.group.lane_group import Flight, LaneGroup, Message
from rorqual.parallel.remote.group.messages import BACKENDS, GroupOffer
from rorqual.parallel.remote.group.rows import OUT_OF_STEP, GroupRows, marked
from rorqual.parallel.remote.handles import NO_HOLDER, Members
from rorqual.parallel.remote.link import LinkError
from rorqual.parallel.remote.step_calls import StepCalls
from rorqual.parallel.remote.wire import (
    GROUP,
    MAX_CALLS,
    ExpertMessage,
    SharedCall,
    Step,
    pack_step,
)
from rorqual.platforms.base import Platform

log = logging.getLogger("rorqual.engine")
WATCH_SECONDS = 0.25
STEP_SECONDS = 120.0  # after which a group whose servers live, and do not end a step, is over
DRAIN_SECONDS = 5.0  # for the sums of a call of a step that was given up
CLOSE_SECONDS = 5.0


class GroupServers(Members, Protocol):
    """The servers that were given (ExpertServers)."""

    def wait_until_linked(self) -> None: ...

    def open(self, address: Address, lane: str) -> socket.socket: ...


@dataclass(eq=False)
class CallingLane:
    """message, replies: bytes, the latter one row of memory a server. counts [2] int64: calls whose
    rows were sent, and whose sums were received. announced, recent: calls that were announced to
    servers, their number and the last of them."""

    group: LaneGroup
    message: Tensor
    replies: Tensor
    counts: Tensor
    announced: int = 0
    recent: deque[SharedCall] = field(default_factory=lambda: deque(maxlen=2 * MAX_CALLS))
    leaving: Flight | None = None
    coming: Flight | None = None


class GroupCalls(StepCalls):
    """Of one engine with one rank. rows: of a call, at most; larger ones go over sockets. layers:
    whose experts are used. bind: has NCCL take the network interface of an address. `on` from
    `decide` until the group is over; `left` is called then, between two steps."""

    def __init__(
        self,
        platform: Platform,
        form: GroupRows,
        rows: int,
        lanes: int,
        layers: Sequence[int],
        num_experts: int,
        bind: Callable[[str], None],
    ):
        super().__init__(platform)
        self.form = form
        self.rows = rows
        self.num_lanes = lanes
        self.layers = {layer: number for number, layer in enumerate(layers)}
        self.num_experts = num_experts
        self.bind = bind
        self.left: Callable[[], None] = lambda: None
        self.on = False
        self.why = "not decided yet"
        self.caller = secrets.token_hex(16)
        self.sent = torch.zeros(1, 1, dtype=torch.int32, device=platform.device)  # what was wrong
        self.servers: GroupServers | None = None
        self.members: list[GroupMember] = []
        self.lanes: list[CallingLane] = []
        self.count = torch.zeros(0)
        self.table = torch.zeros(0)
        self.tabled: tuple[ServerLink, ...] | None = None
        self.lock = threading.Lock()
        self.epoch = 0
        self.failure = ""  # of the epoch before
        self.over = ""  # why the group is
        self.ending = threading.Event()
        self.doubtful = False  # a call may have been announced and not launched
        self.began: deque[float] = deque()  # of steps that are not checked yet
        self.watch: threading.Thread | None = None

    @property
    def backend(self) -> str:
        return BACKENDS[self.device.type]

    # ---- the start

    def decide(self, servers: GroupServers) -> None:
        """Form the group with all servers that were given. Raises ConfigError."""
        self.servers = servers
        servers.wait_until_linked()
        links = sorted(servers.links, key=lambda link: link.address)
        form = self.form
        offer = GroupOffer(
            1,
            len(links) + 1,
            self.num_lanes,
            self.rows,
            form.columns,
            form.top_k,
            form.fp8,
            str(form.dtype).removeprefix("torch."),
            self.backend,
        )

        def given_up() -> str:
            lost = [link.name for link in links if not link.alive]
            return f"the link to {' and '.join(lost)} has ended" if lost else ""

        try:
            forming = GroupForming(offer, self.device, self.bind, given_up)
            members, groups = forming.run(links, lambda link: servers.open(link.address, GROUP))
        except LinkError as error:
            raise ConfigError(f"expert_transport='group' over {self.backend}: {error}") from None
        self.lanes = [self._lane(group, len(members)) for group in groups]
        shape = (len(self.layers), self.num_experts)
        self.count = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.table = torch.zeros(*shape, len(members), dtype=torch.int64, device=self.device)
        self.members = members
        self.on = True
        self.why = ""
        arguments = (weakref.ref(self), self.ending, members, groups)
        self.watch = threading.Thread(
            target=_watch, args=arguments, name="expert group", daemon=True
        )
        self.watch.start()
        lost = given_up()
        if lost:
            self._end(lost)
        self.begin()
        self.began.clear()

    def _lane(self, group: LaneGroup, servers: int) -> CallingLane:
        size = self.form.call_size(self.rows)
        back = (servers, self.form.reply_size(self.rows))
        return CallingLane(
            group,
            torch.zeros(size, dtype=torch.uint8, device=self.device),
            torch.zeros(back, dtype=torch.uint8, device=self.device),
            torch.zeros(2, dtype=torch.int64, device=self.device),
        )

    # ---- any thread

    def lost(self, link: ServerLink, reason: str) -> None:
        """A server is: with it the group is over."""
        if any(member.link is link for member in self.members):
            self._end(f"experts of {link.name} are left out: {reason}")

    def _end(self, reason: str) -> None:
        with self.lock:
            if self.over:
                return
            self.over = reason
            self.failure = reason
            self.epoch += 1
        self.ending.set()

    def close(self) -> None:
        """Captured graphs must be destroyed before: NCCL's abort waits for that."""
        for member in self.members:
            member.leave()
        self._end("the engine ends")
        if self.watch is not None:
            self.watch.join(CLOSE_SECONDS)

    # ---- the engine's thread

    def takes(self, rows: int) -> bool:
        return self.on and 0 < rows <= self.rows

    def begin(self, before_change: Callable[[], object] | None = None) -> int:
        """Before a step: the number of its epoch. before_change: not needed, as steps in turns do
        not use groups."""
        if not self.on:
            return self.epoch
        assert self.servers is not None
        if self.doubtful and not self.over:
            self._come_to_rest()
        epoch = self.epoch  # read before `over`: the group may end at any time from here on
        if self.over:
            self._leave()
            return self.epoch
        if self.tabled is not self.servers.links:
            self._write_tables()
        self.began.append(time.monotonic())
        return epoch

    def check(self, epoch: int, word: int = 0) -> None:
        """A step that began in that epoch is done on the device, and `word` is what `sent` was at
        its end. Raises ExpertsMissing where its result is not valid."""
        if self.began:
            self.began.popleft()
        if self.on and not self.over and word:
            if word >= OUT_OF_STEP:
                self._end("a server and this process do not count the same calls")
            else:
                with self.lock:
                    self.epoch += 1
                    self.failure = NO_HOLDER
                self._come_to_rest()
        if epoch != self.epoch:
            assert self.servers is not None
            missing = self.servers.without_holder() or self.failure
            raise ExpertsMissing(f"{missing}; {self.servers.describe()}")

    def ended(self) -> None:
        """A step is done on the device, and all ranks know whether its result is valid."""
        if self.began:
            self.began.popleft()

    def abandon(self) -> None:
        """Steps are given up, perhaps between the announcement of a call and its launch."""
        self.doubtful = True
        self.began.clear()

    def _leave(self) -> None:
        """For sockets. Nothing of the group runs on the device from here on."""
        self.platform.synchronize()
        self.on = False
        self.why = self.over
        self.left()
        log.warning("expert servers are called over tcp from here on: %s", self.over)

    def _send_step(self, step: Step) -> None:
        if self.over:
            return
        message = pack_step(step)
        for lane, calls in step.items():
            self.lanes[lane].announced += len(calls)
            self.lanes[lane].recent.extend(calls)
        for member in self.members:
            try:
                member.send(ExpertMessage.STEP, message)
            except OSError as error:
                assert self.servers is not None
                self.servers.drop(member.link, said(error))

    # ---- one call

    def send(self, lane: int, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Rows x [T, columns] to all servers, for their experts ids [T, K] with weights [T, K]."""
        if not self.compiling:
            self.announce(lane, layer, x.shape[0])
            self._send(self.lanes[lane], layer, x, ids, weights)

    def _send(self, own: CallingLane, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        rows = x.shape[0]
        parts = self.form.call(own.message, rows)
        sent = own.counts[:1]
        sent += 1
        parts.head[:1].copy_(sent)
        parts.head[1].fill_(layer)
        parts.head[2].fill_(rows)
        place = self.layers[layer]
        turn = torch.arange(rows, device=self.device)[:, None] + sent
        found, missed = marked(ids.to(torch.int64), self.count[place], self.table[place], turn)
        self.sent += missed
        parts.ids.copy_(found)
        parts.weights.copy_(weights)
        self.form.fill(parts.rows, x)
        if own.group.early:
            own.coming = self._receive(own, rows)
        data = own.message[: self.form.call_size(rows)]
        own.leaving = self._hand(own.group.send, [(member.rank, data) for member in self.members])

    def _receive(self, own: CallingLane, rows: int) -> Flight | None:
        size = self.form.reply_size(rows)
        messages = [(member.rank, own.replies[member.number][:size]) for member in self.members]
        return self._hand(own.group.receive, messages)

    def _hand(
        self, operation: Callable[[Sequence[Message]], Flight], messages: Sequence[Message]
    ) -> Flight | None:
        """To the library, unless the group is over."""
        try:
            return None if self.over else operation(messages)
        except LinkError as error:
            self._end(str(error))
            return None

    def receive(self, lane: int, x: Tensor, seconds: float = STEP_SECONDS) -> Tensor:
        """The weighted sums of the rows x that were sent last; zeros where the group is over.
        seconds: that a CPU waits for them."""
        own = self.lanes[lane]
        rows = x.shape[0]
        if self.compiling:
            return torch.zeros_like(x)
        own.coming = own.coming or self._receive(own, rows)
        for flight in (own.coming, own.leaving):
            self._await(flight, seconds)
        if self.over:
            return torch.zeros_like(x)
        own.counts[1:] += 1
        own.coming = None
        own.leaving = None  # captured, it cannot be awaited outside of its graph
        replies = [self.form.reply(data, rows) for data in own.replies]
        for reply in replies:
            strange = reply.head[0] != own.counts[0]
            self.sent += torch.where(strange, OUT_OF_STEP, reply.head[1]).to(torch.int32)
        if len(replies) == 1:
            return replies[0].sums.clone()
        total = replies[0].sums.float()
        for reply in replies[1:]:
            total += reply.sums
        return total.to(x.dtype)

    def _await(self, flight: Flight | None, seconds: float) -> None:
        try:
            if flight is not None and not self.over:
                flight.wait(seconds)
        except LinkError as error:
            self._end(str(error))

    # ---- between steps

    def _come_to_rest(self) -> None:
        """Nothing is in flight at the end of this, or the group is over. Calls that were announced
        and not launched are made with rows that no expert is to compute."""
        self.began.clear()
        self.began.append(time.monotonic())  # the watch ends what does not come to its end
        with torch.inference_mode(), self.platform.stream():
            for number, own in enumerate(self.lanes):
                self._finish(number, own)
            self.platform.synchronize()
            self.sent.zero_()
        self.began.clear()
        self.doubtful = False
        self.tabled = None

    def _finish(self, number: int, own: CallingLane) -> None:
        self.platform.synchronize()
        sent, received = own.counts.tolist()
        owed = own.announced - sent
        due = sent - received
        if self.over:
            return
        if not (0 <= owed <= len(own.recent) and 0 <= due <= 1 and owed + due <= len(own.recent)):
            self._end("a step was given up in the midst of a call")
            return
        last = [*own.recent][len(own.recent) - owed - due :]
        for place, call in enumerate(last):
            x = torch.zeros(call.rows, self.form.columns, dtype=self.form.dtype, device=self.device)
            if place >= due:
                ids = torch.full((call.rows, self.form.top_k), -1, device=self.device)
                self._send(own, call.layer, x, ids, torch.zeros_like(ids))
            self.receive(number, x, DRAIN_SECONDS)

    def _write_tables(self) -> None:
        """Behind all that was launched, for all that will be."""
        assert self.servers is not None
        links = self.servers.links
        count = torch.zeros(self.count.shape, dtype=torch.int64)
        table = torch.zeros(self.table.shape, dtype=torch.int64)
        for member in self.members:
            for layer, place in self.layers.items():
                held = torch.tensor(member.link.holdings.layers.get(layer, ()), dtype=torch.int64)
                table[place, held, count[place, held]] = member.number
                count[place, held] += 1
        self.count.copy_(count)
        self.table.copy_(table)
        self.tabled = links


class StepWatch:
    """How long the oldest step that is not checked yet has taken. What this process itself slept
    through does not count."""

    def __init__(self) -> None:
        self.waited = 0.0
        self.oldest: float | None = None
        self.before = time.monotonic()

    def look(self, began: Iterable[float]) -> float:
        """Seconds."""
        now = time.monotonic()
        oldest = next(iter(began), None)
        more = min(now - self.before, 2 * WATCH_SECONDS)
        self.waited = self.waited + more if oldest is not None and oldest == self.oldest else 0.0
        self.oldest = oldest
        self.before = now
        return self.waited


def _watch(
    owner: weakref.ref[GroupCalls],
    ending: threading.Event,
    members: Sequence[GroupMember],
    groups: Sequence[LaneGroup],
) -> None:
    """A thread: until the group is over, or its engine was dropped; then end all that waits in
    it."""
    watch = StepWatch()
    while not ending.wait(WATCH_SECONDS):
        calls = owner()
        if calls is None:
            break
        if watch.look(tuple(calls.began)) > STEP_SECONDS:
            calls._end(f"a step took longer than {STEP_SECONDS:g} s")
        del calls
    threads = [threading.Thread(target=group.abort, daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for member in members:
        member.leave()
    for thread in threads:
        thread.join()
