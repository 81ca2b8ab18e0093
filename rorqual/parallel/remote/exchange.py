"""RemoteExchange: experts in other processes, each row sent once to every server that holds any of
its experts, and coming back as one partial sum.

`dispatch` writes the calls, `combine` waits for the replies, so whatever is computed between the
two hides the trip. A server that fails in between is left out, and its part is sent to others that
hold the same experts, within the same layer; partial sums are added in the order of servers, in
fp32. The host waits, so no graph can hold it.

Each token must start from one rank alone: the layout shards tokens where attention groups have
several ranks.
"""

from __future__ import annotations

import select
import time
import weakref
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from rorqual.errors import ExpertsMissing
from rorqual.ops.reference import ExpertWeights, quantize_activation
from rorqual.parallel.exchange import SlotMap, count_experts, plus
from rorqual.parallel.layout import Layout
from rorqual.parallel.remote.control import DataLink, ServerLink, said
from rorqual.parallel.remote.link import LinkError
from rorqual.parallel.remote.servers import ExpertServers, Holders
from rorqual.parallel.remote.wire import CallHead, CallOutcome, ReplyHead, RowFormat

LOOK_MS = 20  # between two looks at whether a server still lives
CALL_SECONDS = 120.0  # after which a server that lives, and does not answer a call, is left out
MAX_MOVED = 16


@dataclass(eq=False)
class ExpertCall:
    """Rows that are sent to a server. rows: which, None for all. ids: [rows, K], -1 where another
    server's. reply: the partial sums, once `done`. moved: the server no longer holds some
    of these experts."""

    link: ServerLink
    data: DataLink
    rows: Tensor | None
    ids: Tensor
    sequence: int
    outgoing: list[memoryview]
    reply: Tensor
    sent: float = 0.0
    head: bytearray = field(default_factory=lambda: bytearray(ReplyHead.FORM.size))
    came: int = 0
    error: bytearray | None = None
    done: bool = False
    moved: bool = False

    @property
    def incoming(self) -> memoryview:
        """Where the next byte belongs."""
        size = len(self.head)
        if self.came < size:
            return memoryview(self.head)[self.came :]
        if self.error is not None:
            return memoryview(self.error)[self.came - size :]
        whole: memoryview = self.reply.view(-1).view(torch.uint8).numpy().data
        return whole[self.came - size :]


@dataclass(eq=False)
class RemoteTicket:
    """x: as it was dispatched. parts, ids, weights: of all rows, in the host's memory. moved: calls
    that came to a server after it had dropped an expert."""

    x: Tensor
    parts: list[Tensor]
    ids: Tensor
    weights: Tensor
    lane: int
    calls: list[ExpertCall] = field(default_factory=list)
    replies: list[ExpertCall] = field(default_factory=list)
    moved: int = 0


class MissedExperts:
    """Of one of several ranks: it must not leave a step by itself where no server holds an expert.
    It goes on with zeros, and the ranks agree at the end that the step is given up. error: of the
    current step."""

    error: ExpertsMissing | None = None

    def note(self, error: ExpertsMissing) -> None:
        if self.error is None:
            self.error = error.with_traceback(None)

    def take(self) -> ExpertsMissing | None:
        error = self.error
        self.error = None
        return error


class LaneTicket(Protocol):
    """Of a call in flight."""

    lane: int


class RemoteLanes:
    """Which data links calls of several micro-batches take. A ticket that is no longer referenced,
    since its step was given up, frees its lane."""

    def __init__(self, count: int):
        self.holders: list[weakref.ref[LaneTicket] | None] = [None] * count

    def take(self) -> int:
        for lane, holder in enumerate(self.holders):
            if holder is None or holder() is None:
                return lane
        return 0  # given up as well, and held by the error's traceback

    def hold(self, lane: int, ticket: LaneTicket) -> None:
        self.holders[lane] = weakref.ref(ticket)

    def clear(self) -> None:
        """Steps are given up; their tickets may still be referenced, as by a traceback."""
        self.holders = [None] * len(self.holders)

    def free(self, ticket: LaneTicket) -> None:
        holder = self.holders[ticket.lane]
        if holder is not None and holder() is ticket:
            self.holders[ticket.lane] = None


class RemoteExchange:
    """Of one layer. servers, lanes and misses are shared by all. fp8: rows are sent in that, with
    ue8m0 by scales that are powers of two. misses: where other ranks compute beside this one;
    without it ExpertsMissing is raised where no server holds an expert."""

    capturable = False

    def __init__(
        self,
        servers: ExpertServers,
        lanes: RemoteLanes,
        layer: int,
        device: torch.device,
        fp8: bool = False,
        misses: MissedExperts | None = None,
        ue8m0: bool = False,
    ):
        self.servers = servers
        self.lanes = lanes
        self.layer = layer
        self.fp8 = fp8
        self.ue8m0 = ue8m0
        self.misses = misses
        self.load = torch.zeros(servers.num_experts, dtype=torch.int64, device=device)
        self.record_load = False

    @property
    def experts(self) -> ExpertWeights:
        raise AssertionError("experts are in other processes")

    def remap(self, slots: SlotMap, rows: Tensor | None = None) -> None:
        raise AssertionError("experts are in other processes")

    def takes_absent(self, x: Tensor, top_k: int, layout: Layout) -> bool:
        return False

    def counts_first(self, layout: Layout) -> bool:
        return False

    def send(self, ticket: Any) -> None:
        raise AssertionError("rows have left with dispatch")

    def dense_rows(self, ticket: Any) -> Tensor | None:
        return None

    # ---- the stages

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> RemoteTicket:
        self.count(ids, layout)
        lane = self.lanes.take()
        ticket = RemoteTicket(
            x, self._payload(x), ids.to("cpu", torch.int64), weights.to("cpu", torch.float32), lane
        )
        if x.shape[0] and not self._given_up():
            self.lanes.hold(lane, ticket)
            self._try(ticket, ticket.ids)
        return ticket

    def count(self, ids: Tensor, layout: Layout) -> None:
        if self.record_load and layout.counted:
            count_experts(self.load, ids, layout.own_padded)

    def run_experts(self, ticket: RemoteTicket, dense: Tensor | None = None) -> None:
        assert dense is None, "no dense rows were offered"

    def combine(self, ticket: RemoteTicket, base: Tensor | None = None) -> Tensor:
        x = ticket.x
        if not x.shape[0]:
            return x
        while ticket.calls:
            lost = self._receive(ticket.calls)
            ticket.replies += [call for call in ticket.calls if call.done]
            ticket.calls = []
            for call in lost:
                self._count_moved(ticket, call)
                self._try(ticket, _spread(call, ticket.ids))
        self.lanes.free(ticket)
        y = torch.zeros_like(x) if self._given_up() else _summed(ticket.replies, x)
        return plus(y, base)

    def _given_up(self) -> bool:
        """Whether this step is."""
        return self.misses is not None and self.misses.error is not None

    def _try(self, ticket: RemoteTicket, ids: Tensor) -> None:
        try:
            self._assign(ticket, ids)
        except ExpertsMissing as error:
            if self.misses is None:
                raise
            self.misses.note(error)

    def _count_moved(self, ticket: RemoteTicket, call: ExpertCall) -> None:
        """A server drops an expert once its callers use newer holdings, so a few calls at most may
        still be sent by older ones."""
        if not call.moved:
            return
        ticket.moved += 1
        if ticket.moved > MAX_MOVED:
            self.servers.drop(call.link, "it does not hold what it says")
        else:
            self.servers.ask_anew(call.link)

    def _payload(self, x: Tensor) -> list[Tensor]:
        if not self.fp8:
            return [x.detach().to("cpu").contiguous()]
        data, scale = quantize_activation(x, self.ue8m0)
        return [data.view(torch.uint8).to("cpu").contiguous(), scale.to("cpu").contiguous()]

    # ---- calls

    def _assign(self, ticket: RemoteTicket, ids: Tensor) -> None:
        """Send rows to the holders of experts ids [T, K] (-1: none). Raises ExpertsMissing."""
        holders = self._holders(ids)
        links = holders.links
        picked = ids >= 0
        whole = bool(picked.all())
        if whole and len(links) == 1:
            self._call(ticket, links[0], None, ids)
            return
        places = holders.choose(ids.clamp(0), self.servers.next_turn()).masked_fill_(~picked, -1)
        for number, link in enumerate(links):
            here = places == number
            rows = here.any(1).nonzero()[:, 0]
            if not rows.numel():
                continue
            mine = ids.masked_fill(~here, -1)
            everywhere = rows.numel() == ids.shape[0]
            self._call(
                ticket,
                link,
                None if everywhere else rows,
                mine if everywhere else mine.index_select(0, rows),
            )

    def _holders(self, ids: Tensor) -> Holders:
        """Who holds the experts of this layer now. Raises ExpertsMissing."""
        holders = self.servers.holders(self.layer)
        missing = [] if holders.alone else holders.missing(ids[ids >= 0])
        if missing:
            raise self.servers.missing(self.layer, missing)
        return holders

    def _call(
        self, ticket: RemoteTicket, link: ServerLink, rows: Tensor | None, ids: Tensor
    ) -> None:
        """Send rows to a server; where that fails, `combine` finds the call undone."""
        data = link.data[ticket.lane]
        data.sequence = (data.sequence + 1) % 2**32
        parts = [part if rows is None else part.index_select(0, rows) for part in ticket.parts]
        weights = ticket.weights if rows is None else ticket.weights.index_select(0, rows)
        form = RowFormat.FP8 if self.fp8 else RowFormat.MODEL
        head = CallHead(data.sequence, self.layer, ids.shape[0], ids.shape[1], form)
        tensors = [ids.to(torch.int32), weights, *parts]
        outgoing = [memoryview(head.pack()), *map(_bytes, tensors)]
        reply = torch.empty(ids.shape[0], ticket.x.shape[1], dtype=ticket.x.dtype)
        call = ExpertCall(link, data, rows, ids, data.sequence, outgoing, reply)
        ticket.calls.append(call)
        if data.pending and not self._settled(link, data):
            return
        data.pending = True
        try:
            while call.outgoing:
                _write(call)
                if call.outgoing and not self._ready(call, select.POLLOUT):
                    return
            call.sent = time.perf_counter()
        except OSError as error:
            self.servers.drop(link, _said(error))

    def _ready(self, call: ExpertCall, event: int) -> bool:
        """Wait for the socket; False where the server ends before."""
        number = call.data.sock.fileno()
        if number < 0:  # another thread has just closed it
            return False
        poll = select.poll()
        poll.register(number, event)
        while not poll.poll(LOOK_MS):
            if not call.link.alive:
                return False
        return True

    def _settled(self, link: ServerLink, data: DataLink) -> bool:
        """A call of a step that was given up is still under way on this link. Nobody can tell its
        reply from a part of it, so the server is left out until it is linked anew."""
        self.servers.drop(link, "a step was given up while it computed")
        return False

    def _receive(self, calls: list[ExpertCall]) -> list[ExpertCall]:
        """Wait for the replies; the calls that were lost."""
        waiting = {}
        poll = select.poll()
        lost = []
        for call in calls:
            number = call.data.sock.fileno()
            if not call.sent or not call.link.alive or number < 0:
                lost.append(call)
                continue
            waiting[number] = call
            poll.register(number, select.POLLIN)
        while waiting:
            for number, _ in poll.poll(LOOK_MS):
                call = waiting[number]
                try:
                    self._read(call)
                except (OSError, LinkError) as error:
                    self.servers.drop(call.link, _said(error))
            for number, call in list(waiting.items()):
                late = time.perf_counter() - call.sent > CALL_SECONDS
                if late and not call.done:
                    self.servers.drop(call.link, f"a call took longer than {CALL_SECONDS:g} s")
                if call.done or call.moved or not call.link.alive:
                    poll.unregister(number)
                    del waiting[number]
                    if not call.done:
                        lost.append(call)
        return lost

    def _read(self, call: ExpertCall) -> None:
        """What has come of a reply. Raises OSError, LinkError."""
        while not (call.done or call.moved):
            try:
                count = call.data.sock.recv_into(call.incoming)
            except BlockingIOError:
                return
            if not count:
                raise LinkError("its process ended")
            call.came += count
            if call.came == len(call.head):
                self._check(call)
            if not len(call.incoming):
                self._ended(call)

    def _ended(self, call: ExpertCall) -> None:
        call.data.pending = False
        if call.error is None:
            call.done = True
            self.servers.observe(call.link, time.perf_counter() - call.sent)
        elif ReplyHead.unpack(call.head).outcome == CallOutcome.MOVED:
            call.moved = True
        else:
            raise LinkError(f"it says: {call.error.decode(errors='replace')}")

    def _check(self, call: ExpertCall) -> None:
        head = ReplyHead.unpack(call.head)
        if head.outcome and head.sequence == call.sequence:
            call.error = bytearray(head.rows)
            return
        if (head.sequence, head.rows) != (call.sequence, call.reply.shape[0]):
            raise LinkError(
                f"reply {head.sequence} of {head.rows} rows came where reply {call.sequence} of "
                f"{call.reply.shape[0]} was to"
            )


def _write(call: ExpertCall) -> None:
    """As much of a call as the socket takes."""
    try:
        count = call.data.sock.sendmsg(call.outgoing)
    except BlockingIOError:
        return
    while call.outgoing and count >= len(call.outgoing[0]):
        count -= len(call.outgoing.pop(0))
    if count:
        call.outgoing[0] = call.outgoing[0][count:]


def _bytes(tensor: Tensor) -> memoryview:
    found: memoryview = tensor.contiguous().view(torch.uint8).numpy().data.cast("B")
    return found


def _spread(call: ExpertCall, ids: Tensor) -> Tensor:
    """A call's expert ids at their rows among all, [T, K], -1 elsewhere."""
    if call.rows is None:
        return call.ids
    return torch.full_like(ids, -1).index_copy_(0, call.rows, call.ids)


def _summed(replies: list[ExpertCall], x: Tensor) -> Tensor:
    if len(replies) == 1 and replies[0].rows is None:
        return replies[0].reply.to(x.device)
    total = torch.zeros(x.shape, dtype=torch.float32)
    for call in sorted(replies, key=lambda call: call.link.address):
        part = call.reply.float()
        if call.rows is None:
            total += part
        else:
            total.index_add_(0, call.rows, part)
    return total.to(x.dtype).to(x.device)


def _said(error: Exception) -> str:
    if isinstance(error, ConnectionError):
        return "its process ended"
    return said(error)
