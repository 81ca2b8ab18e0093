"""A process that holds a transport's library and the staging memory, and nothing else. No torch.

Neither library authenticates readers, and UCX over TCP reads and writes any address of its process
that a peer names, registered or not. So a peer can only reach what is mapped here: the windows; no
cache, no weights, no secret. A cancelled read can write while this process runs; killing it frees
the memory for certain. And a crash of the library does not crash the engine.

    parent -> {"read": ticket, "peer": description, "remote", "local", "size"}
              {"cancel": ticket}    {"serve": windows that peers may be reading}
    child  -> {"ready": description} or {"failed": sentence}, once; then {"serve"} as an answer, and
              {"ticket": ticket, "state": "done" or "failed", "error": sentence}

Messages are JSON on a pair of local sockets. The process ends when its parent's socket does.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from rorqual.disagg.transports.interface import ReadState
from rorqual.disagg.transports.mooncake import MooncakeLibrary
from rorqual.disagg.transports.nixl import NixlLibrary

MAX_MESSAGE = 65_536
POLL_SECONDS = 0.0001  # seconds between two polls while reads are running
IDLE_POLL_SECONDS = 0.05  # and while none is
MAX_ERROR = 500  # characters


class Library(Protocol):
    polls: bool

    def describe(self) -> bytes: ...
    def progress(self) -> None: ...
    def start(self, ticket: int, peer: bytes, remote: int, local: int, size: int) -> None: ...
    def poll(self, ticket: int) -> ReadState: ...
    def cancel(self, ticket: int) -> None: ...


# made of a package's name, address and size of the staging memory, and the host to listen on
LIBRARIES: dict[str, Callable[[str, int, int, str], Library]] = {
    "nixl": NixlLibrary,
    "mooncake": MooncakeLibrary,
}


class LibraryProcess:
    def __init__(self, sock: socket.socket, library: Library):
        self.sock = sock
        self.library = library
        self.running: set[int] = set()
        self.serving = 0

    def run(self) -> None:
        """Run until the parent is gone."""
        while True:
            busy = bool(self.running) or (self.serving > 0 and self.library.polls)
            if select.select([self.sock], [], [], POLL_SECONDS if busy else IDLE_POLL_SECONDS)[0]:
                data = self.sock.recv(MAX_MESSAGE)
                if not data:
                    return
                self._handle(json.loads(data))
            self.library.progress()
            for ticket in list(self.running):
                self._poll(ticket)

    def _handle(self, message: dict[str, Any]) -> None:
        if "serve" in message:
            self.serving = message["serve"]
            send(self.sock, message)
        elif "cancel" in message:
            self.running.discard(message["cancel"])
            self.library.cancel(message["cancel"])
        else:
            ticket = message["read"]
            where = (message["remote"], message["local"], message["size"])
            try:
                self.library.start(ticket, message["peer"].encode(), *where)
            except Exception as error:
                self._report(ticket, ReadState.FAILED, error)
                return
            self.running.add(ticket)

    def _poll(self, ticket: int) -> None:
        problem: Exception | None = None
        try:
            state = self.library.poll(ticket)
        except Exception as error:
            self.library.cancel(ticket)
            state, problem = ReadState.FAILED, error
        if state is not ReadState.RUNNING:
            self.running.discard(ticket)
            self._report(ticket, state, problem)

    def _report(self, ticket: int, state: ReadState, error: Exception | None) -> None:
        text = "" if error is None else f"{type(error).__name__}: {error}"[:MAX_ERROR]
        send(self.sock, {"ticket": ticket, "state": state.value, "error": text})


def send(sock: socket.socket, message: dict[str, Any], flags: int = 0) -> None:
    sock.send(json.dumps(message).encode(), flags)


def end_with(sock: socket.socket) -> None:
    """On a thread: exit with the parent even where a library call never returns."""
    poll = select.poll()
    poll.register(sock, select.POLLHUP | select.POLLRDHUP)
    while not poll.poll():
        time.sleep(IDLE_POLL_SECONDS)
    os._exit(0)


def main() -> int:
    name, package, handle, size, end, host = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(end))
    threading.Thread(target=end_with, args=(sock,), daemon=True).start()
    area = mmap.mmap(int(handle), int(size))
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    try:
        library = LIBRARIES[name](package, address, int(size), host)
        found = library.describe()
    except Exception as error:
        send(sock, {"failed": str(error)[:MAX_ERROR] or type(error).__name__})
        return 1
    send(sock, {"ready": found.decode()})
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        LibraryProcess(sock, library).run()
    os._exit(0)  # skips the libraries' exit handlers, which may wait for peers


if __name__ == "__main__":
    sys.exit(main())
