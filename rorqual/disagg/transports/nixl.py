"""NIXL, over UCX. No torch.

Its own progress thread never sleeps, so it is off: the loop of library_process.py drives progress.
It reports a released read as ended, but still writes its bytes (UCX over TCP, 1.5.1), so only a
finished read frees its memory.
"""

from __future__ import annotations

import base64
import importlib
import json
import secrets
from collections import OrderedDict
from contextlib import suppress
from typing import Any

from rorqual.disagg.transports.interface import ReadState, TransportError

PACKAGES = ("nixl_cu12", "nixl_cu13")
MAX_PEERS = 64  # known at once; a restarted peer counts as a new one


class NixlLibrary:
    """address, size: of the staging memory in this process."""

    polls = True  # it progresses only while polled

    def __init__(self, package: str, address: int, size: int, host: str):
        api = importlib.import_module(f"{package}._api")
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        # A unique name, so that a known agent is never confused with another.
        self.agent: Any = api.nixl_agent(f"rorqual-{secrets.token_hex(16)}", config)
        if "UCX" not in self.agent.backends:
            raise TransportError("NIXL has no UCX plugin here")
        self.address = address
        self.agent.register_memory([(address, size, 0, "")], "DRAM")
        self.peers: OrderedDict[bytes, tuple[str, int]] = OrderedDict()
        self.handles: dict[int, Any] = {}

    def describe(self) -> bytes:
        agent = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return json.dumps({"address": self.address, "agent": agent}).encode()

    def progress(self) -> None:
        self.agent.get_new_notifs()

    def start(self, ticket: int, peer: bytes, remote: int, local: int, size: int) -> None:
        name, address = self._peer(peer)
        here = self.agent.get_xfer_descs([(self.address + local, size, 0)], "DRAM")
        there = self.agent.get_xfer_descs([(address + remote, size, 0)], "DRAM")
        handle = self.agent.initialize_xfer("READ", here, there, name)
        if self.agent.transfer(handle) == "ERR":
            raise TransportError("NIXL does not start the read")
        self.handles[ticket] = handle

    def _peer(self, peer: bytes) -> tuple[str, int]:
        """The agent's name, and where its staging memory is in its process."""
        known = self.peers.get(peer)
        if known is None:
            found = json.loads(peer)
            name = self.agent.add_remote_agent(base64.b64decode(found["agent"]))
            if isinstance(name, bytes):
                name = name.decode()
            known = (name, int(found["address"]))
        self.peers[peer] = known
        self.peers.move_to_end(peer)
        while len(self.peers) > MAX_PEERS:
            _, (name, _) = self.peers.popitem(last=False)
            with suppress(Exception):
                self.agent.remove_remote_agent(name)
        return known

    def poll(self, ticket: int) -> ReadState:
        handle = self.handles[ticket]
        state = self.agent.check_xfer_state(handle)
        if state == "PROC":
            return ReadState.RUNNING
        self.cancel(ticket)
        return ReadState.DONE if state == "DONE" else ReadState.FAILED

    def cancel(self, ticket: int) -> None:
        handle = self.handles.pop(ticket, None)
        if handle is not None:
            with suppress(Exception):
                handle.release()
