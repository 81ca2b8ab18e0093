"""Who calls an expert server by hand, for tests."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from rorqual.disagg.experts.server import ExpertServer
from rorqual.parallel.remote.link import introduce, receive, send
from rorqual.parallel.remote.orders import SlotChange, SlotOrder
from rorqual.parallel.remote.wire import (
    MAX_HOLDINGS,
    PING,
    PURPOSE,
    CallHead,
    CallOutcome,
    ExpertMessage,
    Holdings,
    ReplyHead,
    join,
)

SECRET = b"a secret that is long enough"
FLOAT = {"dtype": "float32"}
Start = Callable[..., ExpertServer]


class Caller:
    """Speaks the protocol by hand."""

    def __init__(
        self,
        server: ExpertServer,
        lane: int | str | None,
        secret: bytes = SECRET,
        caller: str = "",
        **changes: str,
    ):
        self.sock = socket.create_connection((server.host, server.port), 5)
        introduce(self.sock, secret, {**server.server.fingerprint, **changes}, PURPOSE)
        send(self.sock, ExpertMessage.JOIN, join(lane, caller))

    def ended(self) -> bool:
        try:
            return self.sock.recv(1) == b""
        except OSError:
            return True

    # ---- on a control link

    def holdings(self) -> Holdings:
        kind, data = receive(self.sock, MAX_HOLDINGS)
        assert kind == ExpertMessage.HOLDINGS
        return Holdings.unpack(data, 16)

    def ping(self, version: int) -> Holdings | None:
        """Newer holdings than those of that version, if there are any."""
        send(self.sock, ExpertMessage.PING, PING.pack(7, version))
        kind, data = receive(self.sock, PING.size)
        number, newer = PING.unpack(data)
        assert (kind, number) == (ExpertMessage.PONG, 7)
        return self.holdings() if newer != version else None

    def order(self, number: int, release: bool = False, **layers: SlotChange) -> str:
        """layers: such as l1=SlotChange(...)."""
        changes = {int(name[1:]): change for name, change in layers.items()}
        send(self.sock, ExpertMessage.ORDER, SlotOrder(number, changes, release).pack())
        kind, data = receive(self.sock, 1000)
        assert kind == ExpertMessage.ORDERED
        return data.decode()

    # ---- on a data link

    def call(self, layer: int, expert: int, row: Tensor) -> Tensor | str:
        """One row [hidden] through one expert; or what an expert that is not there is answered."""
        self.sock.settimeout(30)
        self.sock.sendall(
            CallHead(1, layer, 1, 1, 0).pack() + struct.pack("<if", expert, 1.0) + _bytes(row)
        )
        head = ReplyHead.unpack(self.sock.recv(ReplyHead.FORM.size, socket.MSG_WAITALL))
        if head.outcome:
            assert head.outcome == CallOutcome.MOVED
            return self.sock.recv(head.rows, socket.MSG_WAITALL).decode()
        data = self.sock.recv(4 * row.shape[0], socket.MSG_WAITALL)
        return torch.frombuffer(bytearray(data), dtype=torch.float32)


def _bytes(row: Tensor) -> bytes:
    return row.to(torch.float32).numpy().tobytes()
