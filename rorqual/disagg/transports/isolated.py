"""The engine's side of library_process.py: starts it, sends it reads and receives their results. It
is restarted when it has ended, or to free its memory."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rorqual.config.model import environment_for_child
from rorqual.disagg.transports.interface import MAX_DESCRIPTION, ReadState, TransportError
from rorqual.disagg.transports.library_process import MAX_MESSAGE, send
from rorqual.disagg.transports.staging import StagingMemory

log = logging.getLogger("rorqual.engine")
RUNNING = ReadState.RUNNING
START_SECONDS = 60.0
SILENT_SECONDS = 10.0  # without a response: it is restarted on next use
RESTART_PAUSE = 2.0  # seconds between a failed start and the next
SIOCGIFADDR = 0x8915  # the address of a network interface
LINE = 2048  # bytes of a line of the library's that are logged
MAX_LINES = 200  # per run of the process
# Environment variables passed to the process: no keys, no tokens.
PASSED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
PASSED_OF_LIBRARIES = ("UCX_", "NIXL_", "MC_", "CUDA_", "NVIDIA_")


@dataclass
class Child:
    """One run of the process. states: of its reads; asked_at: time of an unanswered request, 0 for
    none."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    description: bytes = b""
    failed: str = ""
    alive: bool = True
    ready: bool = False
    asked_at: float = 0.0
    states: dict[int, ReadState] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)


class IsolatedTransport:
    """library: a key of library_process.LIBRARIES; package: what it imports; host: the private IPv4
    address whose interface it uses. Raises TransportError where it does not start."""

    def __init__(self, library: str, package: str, memory: StagingMemory, host: str):
        self.library = library
        self.package = package
        self.memory = memory
        self.host = host
        self.lock = threading.Lock()
        self.serving = 0
        self.tickets = 0
        self.readers: dict[int, Child] = {}
        self.closed = False
        self.failed_at = -RESTART_PAUSE
        self.restarts = 0
        self.child: Child | None = self._start()

    # ---- reads

    def describe(self) -> bytes:
        with self.lock:
            return self._running_child().description

    def serve(self, windows: int) -> None:
        with self.lock:
            self.serving += windows
            if self.child is not None and self.child.alive:
                self._send_serving(self.child)

    def _send_serving(self, child: Child) -> None:
        if not child.asked_at:
            child.asked_at = time.monotonic()
        self._send(child, {"serve": self.serving})

    def read(self, peer: bytes, remote: int, local: int, size: int) -> int:
        if len(peer) > MAX_DESCRIPTION:
            raise TransportError(f"the peer's description has {len(peer)} bytes")
        text = peer.decode(errors="replace")
        where = {"peer": text, "remote": remote, "local": local, "size": size}
        with self.lock:
            child = self._running_child()
            self.tickets += 1
            ticket = self.tickets
            self.readers[ticket] = child
            child.states[ticket] = ReadState.RUNNING
            self._send(child, {"read": ticket, **where})
        return ticket

    def poll(self, ticket: int, seconds: float) -> ReadState:
        child = self.readers[ticket]
        with child.changed:
            child.changed.wait_for(lambda: self._state(child, ticket) is not RUNNING, seconds)
            state = self._state(child, ticket)
        if state is not RUNNING:
            self._forget(ticket, child)
        return state

    def _state(self, child: Child, ticket: int) -> ReadState:
        state = child.states[ticket]
        return ReadState.ENDED if state is RUNNING and not child.alive else state

    def cancel(self, ticket: int) -> None:
        with self.lock:
            child = self.readers.get(ticket)
            if child is not None:
                self._send(child, {"cancel": ticket})
                self._forget(ticket, child)

    def _forget(self, ticket: int, child: Child) -> None:
        self.readers.pop(ticket, None)
        with child.changed:
            child.states.pop(ticket, None)

    # ---- the process

    def restart(self) -> None:
        with self.lock:
            if self.child is not None:
                self._kill(self.child)
                self.restarts += 1
            self.child = None

    def close(self) -> None:
        with self.lock:
            self.closed = True
            if self.child is not None:
                self._kill(self.child)
            self.child = None
        self.memory.close()

    def _running_child(self) -> Child:
        child = self.child
        if child is not None and child.asked_at:
            silent = time.monotonic() - child.asked_at
            if silent > SILENT_SECONDS:
                log.warning("%s has said nothing for %.0f s: started anew", self.library, silent)
                self._kill(child)
        if child is not None and child.alive:
            return child
        if self.closed:
            raise TransportError("the engine ends")
        if child is not None:
            self._kill(child)
            self.restarts += 1
            self.child = None
        if time.monotonic() - self.failed_at < RESTART_PAUSE:
            raise TransportError(f"{self.library} does not start")
        try:
            self.child = self._start()
        except TransportError:
            self.failed_at = time.monotonic()
            raise
        if self.serving:
            self._send_serving(self.child)
        return self.child

    def _start(self) -> Child:
        mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            given = (self.memory.handle, self.memory.size, other.fileno(), self.host)
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "rorqual.disagg.transports.library_process"),
                    *(self.library, self.package, *map(str, given)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(self.memory.handle, other.fileno()),
                env=environment(environment_for_child(PASSED, PASSED_OF_LIBRARIES), self.host),
            )
        child = Child(process, mine)
        for work in (self._listen, self._log):
            threading.Thread(target=work, args=(child,), name=self.library, daemon=True).start()
        with child.changed:
            child.changed.wait_for(lambda: child.ready or not child.alive, START_SECONDS)
        if not child.ready:
            self._kill(child)
            raise TransportError(child.failed or f"{self.library} ends, or says nothing, at once")
        return child

    def _kill(self, child: Child) -> None:
        """When this returns the process writes nothing any more."""
        child.process.kill()
        child.process.wait()
        with child.changed:
            child.alive = False
            child.changed.notify_all()

    def _send(self, child: Child, message: dict[str, Any]) -> None:
        try:
            send(child.sock, message, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._kill(child)  # it has not read its socket for long
        except OSError:
            pass  # it has ended, which the listening thread notices

    def _listen(self, child: Child) -> None:
        """On a thread for each child."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            while data := child.sock.recv(MAX_MESSAGE):
                self._handle(child, json.loads(data))
        child.process.kill()
        child.process.wait()
        child.sock.close()
        with child.changed:
            child.alive = False
            child.changed.notify_all()

    def _handle(self, child: Child, message: dict[str, Any]) -> None:
        with child.changed:
            if "ready" in message:
                child.description = str(message["ready"]).encode()
                child.ready = len(child.description) <= MAX_DESCRIPTION
            elif "failed" in message:
                child.failed = str(message["failed"])
            elif "serve" in message:
                child.asked_at = 0.0
            elif message["ticket"] in child.states:
                child.states[message["ticket"]] = ReadState(message["state"])
                if message["error"]:
                    log.warning("%s: %s", self.library, message["error"])
            child.changed.notify_all()

    def _log(self, child: Child) -> None:
        assert child.process.stdout is not None
        with child.process.stdout as out:
            said = 0
            while line := out.readline(LINE):
                said += 1
                if said <= MAX_LINES:
                    log.info("%s: %s", self.library, line.decode(errors="replace").rstrip())
                if said == MAX_LINES:
                    log.info("%s says more, which is left out", self.library)


def environment(given: Mapping[str, str], host: str) -> dict[str, str]:
    """The environment of the library's process. UCX listens on each interface it may use: only on
    that of `host`, unless configured otherwise."""
    found = dict(given)
    if "UCX_NET_DEVICES" not in found:
        found["UCX_NET_DEVICES"] = interface_of(host)
    found.setdefault("NIXL_LOG_LEVEL", "WARN")
    found.setdefault("UCX_LOG_LEVEL", "error")
    found.setdefault("MC_LOG_LEVEL", "ERROR")
    return found


def interface_of(host: str) -> str:
    """The network interface that has the IPv4 address. Raises TransportError."""
    if host.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, asked)
                if socket.inet_ntoa(found[20:24]) == host:
                    return name
    raise TransportError(f"no network interface of this machine has the address {host}")
