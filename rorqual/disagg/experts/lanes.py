"""What an expert server computes for one caller over memory that both GPUs see.

The caller says which calls come (wire.py, STEP), and the server launches, on a stream of each lane,
what waits for each call's rows on the device, computes, and sends the sums back. Calls of a whole
step are captured once and replayed; one by one they are launched as they come. A word in host
memory ends all waits when the caller has ended.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rorqual.config.host_memory import host_number
from rorqual.disagg.experts.caller_links import CallerLinks
from rorqual.disagg.experts.shard import ExpertShard, check_rows
from rorqual.disagg.experts.step_gate import StepGate
from rorqual.disagg.experts.steps_in_flight import Calls, StepLauncher, StepsInFlight
from rorqual.errors import RorqualError
from rorqual.parallel.remote.handles import map_block, new_block
from rorqual.parallel.remote.link import LinkError, receive, send, shut
from rorqual.parallel.remote.wire import (
    MAX_LANES_BYTES,
    MAX_STEP,
    BlockName,
    ExpertMessage,
    LanesOffer,
    Step,
    lanes_made,
    lanes_refused,
    read_step,
)
from rorqual.parallel.shared.handle_passing import DescriptorServer

if TYPE_CHECKING:
    from rorqual.ops.triton.comm.remote_dispatch import ServerLane

log = logging.getLogger("rorqual.experts")


@dataclass
class ServedLane:
    """lane: the caller's calls; warm_up: of the same size, and never waited for."""

    lane: ServerLane
    warm_up: ServerLane


class CallerLanes:
    """Of one caller, from its offer. computing: held while anything is launched. Raises LinkError
    with the reason where memory cannot be shared."""

    def __init__(
        self, shard: ExpertShard, offer: LanesOffer, gate: StepGate, computing: threading.Lock
    ):
        _check(shard, offer)
        from rorqual.ops.triton.comm import remote_dispatch as kernels

        self.kernels = kernels
        self.shard = shard
        self.offer = offer
        self.computing = computing
        self.device = shard.platform.device
        self.words = shard.platform.host_empty((2,), torch.int32)  # stop, and one that is set
        self.words.copy_(torch.tensor([0, 1], dtype=torch.int32))
        self.steps = StepsInFlight(gate)
        areas = kernels.LaneAreas(
            offer.rows, offer.columns, offer.top_k, torch.empty(0, dtype=shard.dtype).element_size()
        )
        with self._stream():
            self.homes = map_block(offer.block, offer.lanes * areas.home_size, self.device)
            self.inboxes = new_block(offer.lanes * areas.inbox_size, self.device)
            memory = self.inboxes.tensor(self.device)
            memory.zero_()
            spare = torch.full((areas.inbox_size + areas.home_size,), 255, dtype=torch.uint8)
            self.spare = spare.to(self.device)  # ids of -1
            self.lanes = [self._lane(number, areas, memory) for number in range(offer.lanes)]
            if self.on_gpu:
                # not the whole device: other callers' lanes wait on it
                torch.cuda.current_stream(self.device).synchronize()
        self.launcher = StepLauncher(
            shard.platform,
            self.steps,
            computing,
            offer.lanes if self.on_gpu else 0,
            lambda number, calls: self._compute(self.lanes[number].warm_up, calls),
            lambda number, calls: self._compute(self.lanes[number].lane, calls),
        )
        if self.on_gpu:
            try:  # also kernels of rows in fp8, which only a caller that sends such needs
                self.launcher.load_kernels(next(iter(shard.layers)), offer.rows)
            except BaseException:
                self.close()
                raise

    def _lane(self, number: int, areas: Any, memory: Tensor) -> ServedLane:
        inbox = memory.view(self.offer.lanes, areas.inbox_size)[number]
        home = self.homes.pointer + number * areas.home_size
        spare = self.spare[: areas.inbox_size]
        spare_home = self.spare.data_ptr() + areas.inbox_size
        stop, stopped = (word.data_ptr() for word in self.words)
        shape = (areas.rows, areas.top_k)
        made = [
            self.kernels.ServerLane(
                areas,
                torch.tensor([place.data_ptr(), back, word], device=self.device),
                place,
                torch.full(shape, -1, dtype=torch.int32, device=self.device),
                torch.zeros(1, dtype=torch.int32, device=self.device),
            )
            for place, back, word in ((inbox, home, stop), (spare, spare_home, stopped))
        ]
        return ServedLane(made[0], made[1])

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def _stream(self) -> AbstractContextManager[object]:
        return self.shard.platform.stream()

    # ---- any thread

    def stop(self) -> None:
        """The caller has ended: end all waits."""
        self.words[0] = 1

    # ---- the link's thread

    def serve(self, sock: socket.socket) -> None:
        """Until the link ends, with all that was launched."""
        try:
            while True:
                self.steps.await_message(sock)
                kind, data = receive(sock, MAX_STEP)
                if kind != ExpertMessage.STEP:
                    raise LinkError(f"a message of kind {kind} came where a step was to")
                self.launch(read_step(data, self.offer.lanes, self.offer.rows))
        finally:
            self.stop()
            try:
                self.launcher.synchronize()
            finally:
                self.steps.leave_all()
                self.close()

    def close(self) -> None:
        """Nothing of it runs."""
        self.launcher.close()

    def launch(self, step: Step) -> None:
        """Without a GPU lanes are computed one after the other, so a step there has one."""
        if self.on_gpu:
            self.launcher.launch(step)
            return
        self.steps.enter()
        self.steps.begin()
        with self.computing, torch.inference_mode():
            for number, calls in step.items():
                self._compute(self.lanes[number].lane, calls)
        self.steps.leave_all()

    def _compute(self, lane: ServerLane, calls: Calls) -> None:
        kernels = self.kernels
        for call in calls:
            kernels.arrive(lane, self.shard.places_of(call.layer), call.rows)
            parts, slots, weights = kernels.arrived(
                lane, call.rows, self.shard.dtype, self.offer.fp8
            )
            y = self.shard.run(call.layer, slots, weights, parts)
            kernels.send_home(lane, y.contiguous())


def _check(shard: ExpertShard, offer: LanesOffer) -> None:
    """Raises LinkError."""
    check_rows(shard, offer.columns, offer.top_k, offer.dtype)
    if offer.host != host_number():
        raise LinkError("it is on another host")


class SharedMemoryLinks(CallerLinks[CallerLanes]):
    """Their lanes are memory that both GPUs see."""

    def __init__(self, shard: ExpertShard, gate: StepGate, computing: threading.Lock):
        super().__init__(shard, gate, computing)
        self.descriptors: DescriptorServer | None = None

    def close(self) -> None:
        if self.descriptors is not None:
            self.descriptors.close()

    def serve(self, sock: socket.socket, caller: str) -> None:
        """A link over which memory is shared, and steps are announced. Its end ends the caller's
        control link as well, by which the caller knows."""
        kind, data = receive(sock, MAX_LANES_BYTES)
        if kind != ExpertMessage.LANES:
            raise LinkError(f"a message of kind {kind} came where lanes are offered")
        offer = LanesOffer.unpack(data)
        try:
            lanes = CallerLanes(self.shard, offer, self.gate, self.computing)
            token = self._offer(lanes)
        except Exception as error:  # the caller may call over sockets
            reason = " ".join(str(error).split()) or type(error).__name__
            send(sock, ExpertMessage.LANES_MADE, lanes_refused(reason))
            return
        try:
            assert self.descriptors is not None
            block = BlockName(self.descriptors.name, token.hex())
            with self.lock:
                self.lanes[caller] = (lanes, sock)
                control = self.controls.get(caller)
            send(sock, ExpertMessage.LANES_MADE, lanes_made(block))
            if control is None:
                raise LinkError("its control link ended")
            lanes.serve(sock)
        except (RorqualError, OSError):
            raise
        except Exception as error:
            log.exception("a step failed")
            raise LinkError(f"a step failed: {error}") from None
        finally:
            lanes.stop()
            lanes.close()
            self._forget(caller, lanes, token)

    def _forget(self, caller: str, lanes: CallerLanes, token: bytes) -> None:
        assert self.descriptors is not None
        self.descriptors.withdraw(token)
        with self.lock:
            known = self.lanes.get(caller)
            if known is not None and known[0] is lanes:
                del self.lanes[caller]
                control = self.controls.get(caller)
                if control is not None:
                    shut(control)

    def _offer(self, lanes: CallerLanes) -> bytes:
        with self.lock:
            if self.descriptors is None:
                self.descriptors = DescriptorServer()
        with self.shard.platform.stream():
            fd = lanes.inboxes.fd()
        try:
            return self.descriptors.offer([fd])
        finally:
            os.close(fd)
