"""Serves the experts of a shard to attention processes: stateless, no scheduler, no cache, no
router. Each caller has a control link, on which it asks for signs of life, and data links with one
call at a time each. A thread a link reads calls, computes them, one of all links at a time, and
answers: no call waits for another thread to wake."""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from rorqual.disagg.experts.group_lanes import GroupLinks
from rorqual.disagg.experts.lanes import SharedMemoryLinks
from rorqual.disagg.experts.shard import ExpertNotHereError, ExpertShard
from rorqual.disagg.experts.slot_moves import SlotMoves
from rorqual.disagg.experts.step_gate import StepGate
from rorqual.engine.balance.initial import expert_layers
from rorqual.engine.config import EngineConfig
from rorqual.engine.execution.worker import read_model
from rorqual.errors import ConfigError, RorqualError
from rorqual.models.fingerprint import expert_fingerprint
from rorqual.models.hub import model_folder
from rorqual.parallel.remote.config import read_address, read_link_secret
from rorqual.parallel.remote.link import (
    Fingerprint,
    LinkError,
    receive,
    receive_into,
    send,
)
from rorqual.parallel.remote.link_server import LinkServer
from rorqual.parallel.remote.orders import SlotOrder
from rorqual.parallel.remote.wire import (
    GROUP,
    HANDLES,
    MAX_ERROR,
    MAX_ORDER,
    PING,
    PURPOSE,
    CallHead,
    CallOutcome,
    ExpertMessage,
    Join,
    ReplyHead,
    RowFormat,
    ranges,
    read_ranges,
)
from rorqual.platforms import make_platform

log = logging.getLogger("rorqual.experts")
MAX_LINKS = 1024
MAX_JOIN_BYTES = 256
SOCKET_BYTES = 4 * 2**20
ALIVE = (30, 10, 3)  # seconds until a quiet link is probed, and between probes; probes


@dataclass
class ExpertStats:
    """Calls and their rows since the start; seconds computed."""

    calls: int = 0
    rows: int = 0
    seconds: float = 0.0
    failed: int = 0


class ExpertServer:
    """`host`, `port`: where it listens. Raises ConfigError where it cannot."""

    def __init__(
        self,
        shard: ExpertShard,
        address: tuple[str, int],
        secret: bytes,
        fingerprint: Fingerprint,
        max_rows: int,
    ):
        self.shard = shard
        self.stats = ExpertStats()
        self.max_rows = max_rows
        self.computing = threading.Lock()
        gate = StepGate()
        self.moves = SlotMoves(shard, self.computing, max_rows, gate)
        self.shared = SharedMemoryLinks(shard, gate, self.computing)
        self.groups = GroupLinks(shard, gate, self.computing)
        self.server = LinkServer(*address, secret, fingerprint, PURPOSE, self._serve, MAX_LINKS)
        self.host = self.server.host
        self.port = self.server.port

    def close(self) -> None:
        self.moves.close()
        self.server.close()
        self.shared.close()
        self.groups.close()

    # ---- one thread a link

    def _serve(self, sock: socket.socket) -> None:
        kind, data = receive(sock, MAX_JOIN_BYTES)
        if kind != ExpertMessage.JOIN:
            raise LinkError(f"a message of kind {kind} came where one joins")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in zip(
            (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT), ALIVE, strict=True
        ):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        joined = Join.unpack(data)
        if joined.lane is None:
            caller = joined.caller
            with self.shared.controlled(caller, sock), self.groups.controlled(caller, sock):
                self._control(sock)
        elif joined.lane == HANDLES:
            self.shared.serve(sock, joined.caller)
        elif joined.lane == GROUP:
            self.groups.serve(sock, joined.caller)
        else:
            self._calls(sock)

    def _control(self, sock: socket.socket) -> None:
        moves = self.moves
        holdings = moves.holdings
        moves.callers.knows(sock, holdings.version)
        try:
            send(sock, ExpertMessage.HOLDINGS, holdings.pack())
            while True:
                kind, data = receive(sock, MAX_ORDER)
                if kind == ExpertMessage.PING and len(data) == PING.size:
                    self._pong(sock, *PING.unpack(data))
                elif kind == ExpertMessage.ORDER:
                    order = SlotOrder.unpack(data, self.shard.config.moe.num_experts)
                    send(sock, ExpertMessage.ORDERED, moves.take(order, sock).encode())
                else:
                    raise LinkError(
                        f"a message of kind {kind} came where signs of life are asked for"
                    )
        finally:
            moves.leave(sock)

    def _pong(self, sock: socket.socket, number: int, version: int) -> None:
        """The caller calls by holdings of that version."""
        self.moves.callers.knows(sock, version)
        holdings = self.moves.holdings
        send(sock, ExpertMessage.PONG, PING.pack(number, holdings.version))
        if holdings.version != version:
            send(sock, ExpertMessage.HOLDINGS, holdings.pack())

    def _calls(self, sock: socket.socket) -> None:
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, buffer, SOCKET_BYTES)
        head = bytearray(CallHead.FORM.size)
        memory = torch.empty(0, dtype=torch.uint8)
        while True:
            receive_into(sock, memoryview(head))
            call = CallHead.unpack(head, self.max_rows)
            self._check_form(call)
            sizes = call.sizes(self.shard.config.hidden_size, self.shard.dtype.itemsize)
            if sum(sizes) > memory.numel():
                memory = torch.empty(sum(sizes), dtype=torch.uint8)
            data = memory[: sum(sizes)]
            receive_into(sock, data.numpy().data)
            came = time.perf_counter()
            try:
                result = self._compute(call, list(data.split(sizes)))
            except ExpertNotHereError as error:
                self._tell(sock, call, CallOutcome.MOVED, str(error))
                continue
            except Exception as error:  # sent to the caller
                if not isinstance(error, RorqualError):
                    log.exception("a call failed")
                self._refuse(sock, call, str(error) or type(error).__name__)
            busy = min(int(1e6 * (time.perf_counter() - came)), 2**32 - 1)
            self._reply(sock, ReplyHead(call.sequence, call.rows, busy, CallOutcome.DONE), result)

    def _check_form(self, call: CallHead) -> None:
        if call.form == RowFormat.FP8 and self.shard.config.hidden_size % 4:
            raise LinkError("rows of this model do not travel in fp8")

    def _refuse(self, sock: socket.socket, call: CallHead, reason: str) -> NoReturn:
        self.stats.failed += 1
        self._tell(sock, call, CallOutcome.FAILED, reason)
        raise LinkError(reason)

    def _tell(self, sock: socket.socket, call: CallHead, outcome: CallOutcome, reason: str) -> None:
        text = reason.encode()[:MAX_ERROR]
        sock.sendall(ReplyHead(call.sequence, len(text), 0, outcome).pack() + text)

    def _reply(self, sock: socket.socket, head: ReplyHead, result: Tensor) -> None:
        data = result.contiguous().view(torch.uint8).view(-1).numpy().data
        parts = [memoryview(head.pack()), data]
        while parts:
            count = sock.sendmsg(parts)
            while parts and count >= len(parts[0]):
                count -= len(parts.pop(0))
            if count:
                parts[0] = parts[0][count:]

    def _compute(self, head: CallHead, parts: list[Tensor]) -> Tensor:
        with self.computing:
            start = time.perf_counter()
            result = self._run(head, parts)
            self.stats.calls += 1
            self.stats.rows += head.rows
            self.stats.seconds += time.perf_counter() - start
            return result

    def _run(self, head: CallHead, parts: list[Tensor]) -> Tensor:
        ids, weights, *rows = parts
        topk_shape = (head.rows, head.top_k)
        width = self.shard.config.hidden_size
        shaped = [rows[0].view(torch.uint8 if len(rows) == 2 else self.shard.dtype)]
        shaped += [part.view(torch.float32) for part in rows[1:]]
        return self.shard.compute(
            head.layer,
            ids.view(torch.int32).view(topk_shape),
            weights.view(torch.float32).view(topk_shape),
            [shaped[0].view(head.rows, width), *(part.view(head.rows, -1) for part in shaped[1:])],
        )


def serve_experts(
    model: str | None,
    options: dict[str, Any],
    layers: str,
    slots: str,
    listen: str,
    secret_file: str | None,
    max_rows: int,
    max_slots: int = 0,
) -> ExpertServer:
    """Loads and listens. options: of EngineConfig. layers, slots: as wire.read_ranges. max_slots:
    experts of a layer that there is to be memory for, at least those of `slots`. Raises
    ConfigError, LoadError, CapacityError."""
    address = read_address(listen, "listen", least=0)
    secret = read_link_secret(secret_file, "expert_secret_file")
    config = EngineConfig(str(model_folder(model)), **options)
    found = read_model(config)
    sparse = expert_layers(found)
    try:
        numbers = sparse if layers == "all" else read_ranges(layers, max(sparse, default=0) + 1)
    except ValueError as error:
        raise ConfigError(f"layers: {error}") from None
    dense = sorted(set(numbers) - set(sparse))
    if dense or not numbers:
        raise ConfigError(f"layers={layers!r}: layer {ranges(dense)} of this model has no experts")
    try:
        experts = read_ranges(slots, found.moe.num_experts)
    except ValueError as error:
        raise ConfigError(f"slots: {error}") from None
    most = found.moe.num_experts
    if max_slots and not max(1, len(experts)) <= max_slots <= most:
        raise ConfigError(
            f"max_slots={max_slots} is out of range; accepted: {max(1, len(experts))} to {most}"
        )
    if not experts and not max_slots:
        raise ConfigError(f"slots={slots!r} needs max_slots; accepted: 1 to {most}")
    if config.threads:
        torch.set_num_threads(config.threads)
    shard = ExpertShard(config, make_platform(config.device), numbers, experts, max_slots)
    if shard.platform.compiles:
        shard.load_kernels()
    seed = config.seed if config.weights == "random" else None
    fingerprint = expert_fingerprint(config.model, found, shard.dtype, seed)
    return ExpertServer(shard, address, secret, fingerprint, max_rows)
