"""What an expert server computes for one caller by messages of process groups (remote/group/).

The caller says which calls come (wire.py, STEP). On a GPU the server launches, on a stream of each
lane, what receives each call's rows, computes, and sends the sums; calls of a whole step are
captured once and replayed. On a CPU a thread of each lane does so. Whatever ends the link ends the
group, whose members are fixed.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rorqual.config.model import collectives_on
from rorqual.disagg.experts.caller_links import CallerLinks
from rorqual.disagg.experts.shard import ExpertShard, check_rows
from rorqual.disagg.experts.step_gate import StepGate
from rorqual.disagg.experts.steps_in_flight import Calls, StepLauncher, StepsInFlight
from rorqual.engine.distributed.network import interface_of
from rorqual.errors import RorqualError
from rorqual.parallel.remote.group.forming import FORM_SECONDS
from rorqual.parallel.remote.group.lane_group import LaneGroup
from rorqual.parallel.remote.group.messages import (
    BACKENDS,
    MAX_GROUP_BYTES,
    TOKEN,
    GroupOffer,
    group_made,
)
from rorqual.parallel.remote.group.rows import MISSED, OUT_OF_STEP, GroupRows, slots_of
from rorqual.parallel.remote.group.store import LinkStore
from rorqual.parallel.remote.link import LinkError, receive, send, shut
from rorqual.parallel.remote.wire import MAX_STEP, ExpertMessage, SharedCall, Step, read_step

log = logging.getLogger("rorqual.experts")
WAIT_SECONDS = 1e6  # for a call's rows: the end of the caller's link ends the wait
END_SECONDS = 5.0  # for a lane's thread to see that its caller has ended


@dataclass(eq=False)
class ServingLane:
    """call, reply: bytes. count [1] int64: calls so far. work, thread: of a CPU."""

    call: Tensor
    reply: Tensor
    count: Tensor
    group: LaneGroup | None = None
    work: queue.SimpleQueue[Calls | None] = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None


class GroupLanes:
    """Of one caller, from its offer. computing: held while anything is computed or launched. Raises
    LinkError with the reason where the server takes no part."""

    def __init__(
        self, shard: ExpertShard, offer: GroupOffer, gate: StepGate, computing: threading.Lock
    ):
        self.shard = shard
        self.offer = offer
        self.gate = gate
        self.computing = computing
        self.device = shard.platform.device
        _check(shard, offer)
        self.form = GroupRows(offer.columns, offer.top_k, shard.dtype, offer.fp8)
        self.over = threading.Event()
        self.failure = ""  # of what computes
        self.steps = StepsInFlight(gate)
        with self._stream():
            self.lanes = [self._lane(offer.rows) for _ in range(offer.lanes)]
        self.launcher = StepLauncher(
            shard.platform,
            self.steps,
            computing,
            offer.lanes if self.on_gpu else 0,
            self._warm_up,
            lambda number, calls: self._compute(self.lanes[number], calls),
        )
        if self.on_gpu:
            try:
                self.launcher.load_kernels(next(iter(shard.layers)), offer.rows)
            except BaseException:
                self.launcher.close()
                raise

    def _lane(self, rows: int) -> ServingLane:
        sizes = (self.form.call_size(rows), self.form.reply_size(rows))
        call, reply = (torch.zeros(size, dtype=torch.uint8, device=self.device) for size in sizes)
        return ServingLane(call, reply, torch.zeros(1, dtype=torch.int64, device=self.device))

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _stream(self) -> AbstractContextManager[object]:
        return self.shard.platform.stream()

    # ---- the link's thread

    def join(self, sock: socket.socket, token: bytes) -> None:
        """Form the groups with the caller and the other servers. Raises LinkError."""
        address = str(sock.getsockname()[0])
        offer = self.offer
        if offer.backend == "nccl":
            interface = interface_of(address)
            if interface is not None:
                collectives_on(interface)
        store = LinkStore(sock)
        sock.settimeout(FORM_SECONDS)
        with self._stream():
            for number, lane in enumerate(self.lanes):
                lane.group = LaneGroup(
                    offer.backend,
                    store,
                    number,
                    offer.rank,
                    offer.size,
                    self.device,
                    address,
                    FORM_SECONDS,
                )
                lane.group.prove({0: token}, FORM_SECONDS)
        store.close()
        sock.settimeout(None)
        send(sock, ExpertMessage.GROUP_READY)

    def serve(self, sock: socket.socket) -> None:
        """Until the caller ends the group. Raises LinkError where the link ends without that."""
        if not self.on_gpu:
            for number, lane in enumerate(self.lanes):
                lane.thread = threading.Thread(
                    target=self._run_lane, args=(lane, sock), name=f"lane {number}", daemon=True
                )
                lane.thread.start()
        while True:
            self.steps.await_message(sock)
            kind, data = receive(sock, MAX_STEP)
            if kind == ExpertMessage.GROUP_END:
                return
            if kind != ExpertMessage.STEP:
                raise LinkError(f"a message of kind {kind} came where a step was to")
            self.launch(read_step(data, self.offer.lanes, self.offer.rows))

    def stop(self) -> None:
        """End all waiting. Any thread."""
        self.over.set()
        for lane in self.lanes:
            if lane.group is not None:
                # by NCCL it takes as long as graphs last
                threading.Thread(target=lane.group.abort, daemon=True).start()

    def end(self) -> None:
        """With all that was launched."""
        self.stop()
        for lane in self.lanes:
            lane.work.put(None)
            if lane.thread is not None:
                lane.thread.join(END_SECONDS)
        try:
            self.launcher.synchronize()
        finally:
            self.steps.leave_all()
            self.launcher.close()

    # ---- steps

    def launch(self, step: Step) -> None:
        if self.on_gpu:
            self.launcher.launch(step)
            return
        for number, calls in step.items():
            self.steps.enter()
            self.lanes[number].work.put(calls)

    def _warm_up(self, number: int, calls: Calls) -> None:
        """Without messages."""
        self._compute(self._lane(max(call.rows for call in calls)), calls)

    def _run_lane(self, lane: ServingLane, sock: socket.socket) -> None:
        """The thread of a lane on a CPU."""
        try:
            while (calls := lane.work.get()) is not None:
                try:
                    with torch.inference_mode():
                        self._compute(lane, calls, self.computing)
                finally:
                    self.gate.leave()
            return
        except LinkError as error:  # the caller sees it as well, and says that the group is over
            if not self.over.is_set():
                log.info("a caller's group: %s", error)
        except Exception as error:  # the caller sees the end of its link
            log.exception("a step failed")
            self.failure = str(error) or type(error).__name__
            shut(sock)
        while (calls := lane.work.get()) is not None:
            self.gate.leave()

    def _compute(
        self,
        lane: ServingLane,
        calls: Calls,
        computing: AbstractContextManager[object] = nullcontext(),  # noqa: B008
    ) -> None:
        for call in calls:
            if lane.group is not None:
                data = lane.call[: self.form.call_size(call.rows)]
                lane.group.receive([(0, data)]).wait(WAIT_SECONDS)
            with computing:
                self._answer(lane, call)
            if lane.group is not None:
                data = lane.reply[: self.form.reply_size(call.rows)]
                lane.group.send([(0, data)]).wait(WAIT_SECONDS)

    def _answer(self, lane: ServingLane, call: SharedCall) -> None:
        parts = self.form.call(lane.call, call.rows)
        reply = self.form.reply(lane.reply, call.rows)
        lane.count += 1
        strange = parts.head[:1] != lane.count
        strange |= parts.head[1:2] != call.layer
        strange |= parts.head[2:3] != call.rows
        places = self.shard.places_of(call.layer)
        slots, missed = slots_of(parts.ids, self.offer.rank - 1, places)
        reply.sums.copy_(self.shard.run(call.layer, slots, parts.weights, parts.rows))
        reply.head[:1].copy_(lane.count)
        reply.head[1:2].copy_(strange * OUT_OF_STEP + missed * MISSED)


def _check(shard: ExpertShard, offer: GroupOffer) -> None:
    """Raises LinkError."""
    check_rows(shard, offer.columns, offer.top_k, offer.dtype)
    backend = BACKENDS.get(shard.platform.device.type, "none")
    if offer.backend != backend:
        raise LinkError(f"messages by {offer.backend} are called for; accepted: {backend}")


class GroupLinks(CallerLinks[GroupLanes]):
    """Their lanes are a group."""

    def __init__(self, shard: ExpertShard, gate: StepGate, computing: threading.Lock):
        super().__init__(shard, gate, computing)
        self.changed = threading.Condition(self.lock)

    def close(self) -> None:
        """Whose links have ended."""
        with self.changed:
            for lanes, sock in self.lanes.values():
                lanes.stop()
                shut(sock)
            self.changed.wait_for(lambda: not self.lanes, END_SECONDS)

    def serve(self, sock: socket.socket, caller: str) -> None:
        """A link over which a group is formed, and steps are announced. If it ends without
        GROUP_END, the caller's control link ends as well, by which the caller knows."""
        kind, data = receive(sock, MAX_GROUP_BYTES)
        if kind != ExpertMessage.GROUP:
            raise LinkError(f"a message of kind {kind} came where a group is offered")
        try:
            lanes = self._lanes(sock, caller, GroupOffer.unpack(data))
        except Exception as error:  # sent to the caller
            reason = " ".join(str(error).split()) or type(error).__name__
            send(sock, ExpertMessage.GROUP_MADE, group_made(reason))
            return
        ended = False
        try:
            send(sock, ExpertMessage.GROUP_MADE, group_made())
            kind, token = receive(sock, TOKEN)
            if kind != ExpertMessage.GROUP_BEGIN or len(token) != TOKEN:
                raise LinkError(f"a message of kind {kind} came where a group begins")
            lanes.join(sock, token)
            lanes.serve(sock)
            ended = True
        except (RorqualError, OSError) as error:
            raise LinkError(lanes.failure or str(error)) from None
        except Exception as error:
            log.exception("a group failed")
            raise LinkError(f"a group failed: {error}") from None
        finally:
            lanes.end()
            self._forget(caller, lanes, ended)

    def _lanes(self, sock: socket.socket, caller: str, offer: GroupOffer) -> GroupLanes:
        """Raises LinkError."""
        lanes = GroupLanes(self.shard, offer, self.gate, self.computing)
        with self.lock:
            reason = "" if caller in self.controls else "it has no control link"
            if caller in self.lanes:
                reason = "it has a group already"
            if not reason:
                self.lanes[caller] = (lanes, sock)
                return lanes
        lanes.end()
        raise LinkError(reason)

    def _forget(self, caller: str, lanes: GroupLanes, ended: bool) -> None:
        """ended: by the caller, on purpose."""
        with self.changed:
            known = self.lanes.get(caller)
            if known is None or known[0] is not lanes:
                return
            del self.lanes[caller]
            self.changed.notify_all()
            control = self.controls.get(caller)
            if control is not None and not ended:
                shut(control)
