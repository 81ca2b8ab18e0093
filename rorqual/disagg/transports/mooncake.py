"""Mooncake's transfer engine, over TCP. No torch.

Reads block on threads: its asynchronous calls are polled in a loop that never sleeps. It times a
read out after 30 s, and may still write its bytes.
"""

from __future__ import annotations

import importlib
import json
import threading
from typing import Any

from rorqual.disagg.transports.bound_listeners import bind_listeners
from rorqual.disagg.transports.interface import ReadState, TransportError

PACKAGES = ("mooncake.engine",)


class MooncakeLibrary:
    """address, size: of the staging memory in this process."""

    polls = False

    def __init__(self, package: str, address: int, size: int, host: str):
        try:
            library = importlib.import_module(package)
        except ImportError as error:
            if "ibverbs" in str(error) or "libnl" in str(error):
                raise TransportError(
                    f"Mooncake needs libibverbs.so.1, over TCP too (Debian's package libibverbs1): "
                    f"{error}"
                ) from None
            raise
        self.engine: Any = library.TransferEngine()
        if self.engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise TransportError(f"Mooncake does not start on {host}")
        bind_listeners(host)
        if self.engine.register_memory(address, size):
            raise TransportError("Mooncake does not take the staging memory")
        self.address = address
        self.session = f"{host}:{self.engine.get_rpc_port()}"
        self.results: dict[int, int | None] = {}

    def describe(self) -> bytes:
        return json.dumps({"address": self.address, "session": self.session}).encode()

    def progress(self) -> None: ...

    def start(self, ticket: int, peer: bytes, remote: int, local: int, size: int) -> None:
        found = json.loads(peer)
        session, there = str(found["session"]), int(found["address"]) + remote
        self.results[ticket] = None
        where = (session, self.address + local, there, size)
        threading.Thread(target=self._read, args=(ticket, *where), daemon=True).start()

    def _read(self, ticket: int, session: str, here: int, there: int, size: int) -> None:
        try:
            code = self.engine.transfer_sync_read(session, here, there, size)
        except Exception:
            code = -1
        self.results[ticket] = code

    def poll(self, ticket: int) -> ReadState:
        result = self.results[ticket]
        if result is None:
            return ReadState.RUNNING
        del self.results[ticket]
        return ReadState.FAILED if result else ReadState.DONE

    def cancel(self, ticket: int) -> None:
        """The thread ends by itself; its result is ignored."""
