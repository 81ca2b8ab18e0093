"""A rank other than 0: it computes the steps received on its channel, and ends when that closes.

Started by rank 0 on its own host (`python -m rorqual.engine.distributed.worker_process --fd FD`),
by a launcher on another (`--connect ADDRESS PORT RANK WORLD`, the secret as one line on standard
input), or a process of torchrun's that becomes one (launchers/torchrun.py).
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rorqual.config.model import collectives_on, nccl_without_clusters
from rorqual.config.process import (
    die_with_parent,
    end_process,
    freeze_loaded,
    ignore_group_signals,
)
from rorqual.engine.balance.moves import Move
from rorqual.engine.config import EngineConfig
from rorqual.engine.distributed.channel import Channel, FrameError, FrameKind
from rorqual.engine.distributed.codec import decode_output, encode_result, number_of, numbered
from rorqual.engine.distributed.expert_load import encode_load
from rorqual.engine.distributed.handshake import PeerIdentity
from rorqual.engine.distributed.listener import join
from rorqual.engine.distributed.network import interface_of, named_address
from rorqual.engine.distributed.rendezvous import START_SECONDS, Rendezvous
from rorqual.engine.distributed.tracing import RankTrace
from rorqual.engine.execution.grammar_matcher import ReceivedGrammars
from rorqual.engine.execution.sampler import PendingStep
from rorqual.engine.execution.worker import Worker
from rorqual.engine.rank_service import RankService, ServiceContext, make_service
from rorqual.engine.scheduling.dp_scheduler import DataParallelOutput
from rorqual.errors import EngineError, ExpertsMissing, RorqualError
from rorqual.models.hub import model_folder
from rorqual.parallel.mesh import Mesh
from rorqual.platforms import device_of, make_platform

ALIVE_SECONDS = 1.0
POLL_SECONDS = 20e-6  # between two looks at the device while no frame comes
LEAVE_SECONDS = 3.0  # from STOP until the process exits, even inside a collective
ORPHANED = 1  # exit status: rank 0 is gone without STOP


def rank_device(config: EngineConfig, device_index: int) -> str:
    """A rank's GPU or NPU; on a CPU all ranks share one device. `device` may name a GPU only with a
    single rank."""
    if config.device == "npu":
        return f"npu:{device_index}"
    return (
        f"cuda:{device_index}"
        if config.device in ("auto", "cuda") and device_of(config.device).type == "cuda"
        else config.device
    )


class Inbox:
    """Frames from rank 0, read by a thread that also detects rank 0's end: it then ends the
    process, which may be stuck in a collective with that rank."""

    def __init__(self, channel: Channel, rank: int, watchdog: float):
        self.channel = channel
        self.rank = rank
        self.watchdog = watchdog
        self.work: queue.SimpleQueue[tuple[FrameKind, bytes]] = queue.SimpleQueue()
        channel.patience(START_SECONDS)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while (frame := self.channel.receive()) is not None:
                if frame[0] is FrameKind.READY:
                    self.channel.patience(self.watchdog)
                elif frame[0] is not FrameKind.ALIVE:
                    self.work.put(frame)
                if frame[0] is FrameKind.STOP:
                    time.sleep(LEAVE_SECONDS)
                    os._exit(0)
            reason = "rank 0 has gone, or has been silent for too long"
        except FrameError as error:
            reason = str(error)
        print(f"rorqual: rank {self.rank} ends: {reason}", file=sys.stderr, flush=True)
        os._exit(ORPHANED)


@dataclass(frozen=True)
class Pending:
    """send: waits for the device, then responds. ready: whether that wait is over, or is not to be
    put off."""

    send: Callable[[], None]
    ready: Callable[[], bool]


def _at_once() -> bool:
    return True


class WorkerProcess:
    def __init__(self, channel: Channel, hello: dict[str, Any], config: EngineConfig):
        self.channel = channel
        number = hello["rank"]
        self.inbox = Inbox(channel, number, config.watchdog_seconds)
        platform = make_platform(rank_device(config, hello["device_index"]))
        if config.parallel.micro_batches != 1:
            nccl_without_clusters()
        groups = Rendezvous(**hello["meeting"]).join(
            platform, number, config.parallel.world, config.watchdog_seconds
        )
        self.worker = Worker(config, platform, Mesh.of(config.parallel, groups=groups))
        mesh = self.worker.mesh
        # it sends its data-parallel rank's results
        self.sends_results = mesh.last_stage and mesh.tp_rank == 0
        self.pending: deque[Pending] = deque()
        self.launched = 0  # the number of the newest step
        self.grammars = self.worker.runner.rows.grammars = ReceivedGrammars()
        self.trace = RankTrace(self.worker, partial(channel.send, FrameKind.TRACE))
        self.service: RankService | None = None

    def run(self) -> None:
        """Launch steps as they arrive, and collect those that the device has finished: a step is
        launched while the one before is computed, so never wait for the device alone."""
        work = self.inbox.work
        while True:
            if self.pending and work.empty():
                if self.pending[0].ready():
                    self._collect()
                else:
                    # not get(timeout=...): CPython 3.11's may wait forever once that has passed
                    time.sleep(POLL_SECONDS)
                continue
            kind, data = work.get()
            if kind is FrameKind.STOP:
                self.trace.drop()
                if self.service is not None:
                    self.service.close()
                return
            if kind is FrameKind.TRACE:
                self.trace.take(data)
            elif kind is FrameKind.GRAMMAR:
                self.grammars.receive(data)
            elif kind is FrameKind.LOAD:
                send = partial(self._send_load, data, self.worker.fetch_load())
                self._enqueue_response(send, self._finished())
            elif kind is FrameKind.MOVE:
                self._move(Move.decode(data))
            elif kind is FrameKind.SERVICE_START:
                self._start_service(data)
            elif kind is FrameKind.SERVICE:
                self._handle_service_message(data)
            else:
                number, encoded = number_of(data)
                self._launch(number, decode_output(encoded))

    def _launch(self, number: int, output: DataParallelOutput) -> None:
        if number != self.launched + 1:
            raise EngineError(f"step {number} came; accepted: {self.launched + 1}")
        self.launched = number
        while output.host and self.pending:
            self._collect()  # grammars need the tokens before
        part = output.parts[self.worker.mesh.dp_rank]
        pending = self.worker.runner.launch(part, output.metadata())
        self.grammars.used(output.structures)
        # the rest of a step that has only begun is launched when it is collected
        ready = self._finished() if pending.begun is None else _at_once
        self._enqueue_response(partial(self._send_result, number, pending), ready)

    def _finished(self) -> Callable[[], bool]:
        with self.worker.platform.stream():
            return self.worker.platform.finished()

    def _enqueue_response(self, send: Callable[[], None], ready: Callable[[], bool]) -> None:
        """Responses are sent in the order of requests. ready: whether `send` would not wait for the
        device for long."""
        self.pending.append(Pending(send, ready))
        if not self.worker.platform.asynchronous:
            self._collect()  # else rank 0 would also wait for the next step

    def _collect(self) -> None:
        self.pending.popleft().send()

    def _send_result(self, number: int, pending: PendingStep) -> None:
        try:
            result = self.worker.runner.collect(pending)
        except ExpertsMissing:  # rank 0 knows too, and waits for no result
            return
        if self.sends_results:
            self.channel.send(FrameKind.RESULT, numbered(number, encode_result(result)))

    def _move(self, move: Move) -> None:
        """Receive experts on a separate thread, while steps go on."""
        mover = self.worker.mover
        assert mover is not None, "experts move where enable_eplb is on"
        mover.begin(move, lambda result: self.channel.send(FrameKind.MOVE, result.encode()))

    def _start_service(self, data: bytes) -> None:
        name, _, config = data.partition(b"\n")
        send = partial(self.channel.send, FrameKind.SERVICE)
        context = ServiceContext(self.worker, self.channel.network_address, send)
        self.service = make_service(name.decode(), context, config)

    def _handle_service_message(self, message: bytes) -> None:
        assert self.service is not None, "it was started first"
        done = self.service.handle(message)
        if done is not None:
            self._enqueue_response(done, _at_once)

    def _send_load(self, request: bytes, load: Callable[[], torch.Tensor]) -> None:
        self.channel.send(FrameKind.LOAD, request + encode_load(load()))


def send_heartbeats(links: list[Channel], stopped: threading.Event) -> None:
    """Send heartbeats until `stopped` is set."""
    while not stopped.wait(ALIVE_SECONDS):
        for channel in links:
            try:
                channel.send(FrameKind.ALIVE)
            except OSError:
                continue  # the reading thread sees that the connection ended


def serve(
    channel: Channel,
    interface: str | None = None,
    device_index: int | None = None,
    model: str | None = None,
) -> int:
    """Run as the rank that rank 0 assigns, until STOP; returns the exit status. interface,
    device_index, model: this host's own, where rank 0 cannot know them; model as named on this
    process's command line."""
    frame = channel.receive()
    if frame is None or frame[0] is not FrameKind.HELLO:
        return ORPHANED
    ignore_group_signals()
    stopped = threading.Event()
    threading.Thread(target=send_heartbeats, args=([channel], stopped), daemon=True).start()
    try:
        hello = json.loads(frame[1])
        config = EngineConfig.from_dict(hello["config"])
        if model is not None:
            config = replace(config, model=str(model_folder(model)))
        collectives_on(interface or "lo")
        if device_index is not None:
            hello["device_index"] = device_index
        process = WorkerProcess(channel, hello, config)
        freeze_loaded()
        channel.send(FrameKind.READY)
        process.run()
        if process.worker.mover is not None:
            process.worker.mover.close()
        process.worker.runner.drop_captured()
        dist.destroy_process_group()
        return 0
    except Exception as error:  # rank 0 reports any error to the users
        reason = f"{type(error).__name__}: {error}"
        # on another host also print it there: rank 0 may be unreachable
        if interface is not None:
            print(f"rorqual: a rank ends: {' '.join(reason.split())}", file=sys.stderr, flush=True)
        channel.send(FrameKind.FAILED, reason.encode())
        return 1
    finally:
        stopped.set()


def connected(
    address: str, port: int, secret: bytes, place: tuple[int, int], named: str | None = None
) -> tuple[Channel, str]:
    """(connection to rank 0, the network interface it uses). place: rank and world."""
    channel = join(address, port, secret, PeerIdentity(*place, os.getpid(), socket.gethostname()))
    channel.patience(START_SECONDS)
    return channel, interface_of(named_address(named) if named else channel.own) or "lo"


def main() -> int:
    die_with_parent()
    kind, *rest = sys.argv[1:]
    if kind == "--fd":
        return serve(Channel(socket.socket(fileno=int(rest[0]))))
    assert kind == "--connect"
    secret = sys.stdin.buffer.readline().strip()
    try:
        channel, interface = connected(rest[0], int(rest[1]), secret, (int(rest[2]), int(rest[3])))
    except RorqualError as error:
        print(f"rorqual: {error}", file=sys.stderr, flush=True)
        return 2
    return serve(channel, interface)


if __name__ == "__main__":
    end_process(main())
