"""What a caller and one expert server share: memory, and a socket over which steps are told."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rorqual.parallel.remote.link import shut
from rorqual.parallel.shared.shared_block import SharedBlock


@dataclass(eq=False)
class HandleLink:
    """inboxes: the server's memory for rows, homes: this process' for sums; of all lanes. told:
    rows that the server was told of, by lane. heads [lanes, 2] int32: of homes, what the server has
    answered and what it is to. why_late: why it is to be left out though it lives, if anything."""

    sock: socket.socket
    inboxes: SharedBlock
    homes: SharedBlock
    told: list[int]
    heads: Tensor
    why_late: Callable[[], str] = str

    def close(self) -> None:
        shut(self.sock)
        self.sock.close()
