"""The store by which the ranks of a process group connect: kept by the caller, and reached by
servers over their authenticated links. Nothing listens for it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from rorqual.parallel.remote.group.messages import (
    MAX_STORE_BYTES,
    StoreRequest,
    read_stored,
    stored,
)
from rorqual.parallel.remote.link import LinkError, receive, send
from rorqual.parallel.remote.wire import ExpertMessage

MAX_KEYS = 4096


class CallerStore(dist.Store):
    """The caller's own. seconds: that a key is waited for. Any thread."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.closed = False

    def close(self) -> None:
        """Ends all waits."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        with self.changed:
            if len(self.values) >= MAX_KEYS:
                raise LinkError(f"a store has {MAX_KEYS} keys, as many as can be")
            self.values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self.seconds if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        with self.changed:
            while not all(key in self.values for key in keys):
                left = deadline - time.monotonic()
                if self.closed or left <= 0:
                    raise LinkError("not every member of the group has come")
                self.changed.wait(left)

    def check(self, keys: Sequence[str]) -> bool:
        with self.changed:
            return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            total = int(self.values.get(key, b"0")) + amount
            self.set(key, str(total))
        return total

    def answer(self, request: StoreRequest) -> bytes:
        """For a server. Raises LinkError."""
        if request.operation == "set":
            self.set(request.key, request.value)
            return b""
        if request.operation == "get":
            return self.get(request.key)
        if request.operation == "check":
            return b"1" if self.check([request.key]) else b""
        return str(self.add(request.key, request.amount)).encode()


class LinkStore(dist.Store):
    """A server's. Each operation is a request to the caller. Raises LinkError, OSError."""

    def __init__(self, sock: socket.socket):
        super().__init__()
        self.sock = sock
        self.lock = threading.Lock()
        self.closed = False

    def close(self) -> None:
        """The link is for other messages from here on. Waits for a request under way: torch's own
        threads may make some, and its answer must not be read as one of those messages."""
        with self.lock:
            self.closed = True

    def _ask(self, request: StoreRequest) -> bytes:
        with self.lock:
            if self.closed:
                raise LinkError("the group is made: nothing is stored any more")
            send(self.sock, ExpertMessage.STORE, request.pack())
            kind, data = receive(self.sock, MAX_STORE_BYTES)
        if kind != ExpertMessage.STORED:
            raise LinkError(f"a message of kind {kind} came where a store answers")
        return read_stored(data)

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._ask(StoreRequest("set", key, data))

    def get(self, key: str) -> bytes:
        return self._ask(StoreRequest("get", key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """As long as the caller waits."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._ask(StoreRequest("check", key)) for key in keys)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(StoreRequest("add", key, amount=amount)))


def serve_store(sock: socket.socket, store: CallerStore) -> None:
    """Answer a server until it is ready. Raises LinkError, OSError."""
    while True:
        kind, data = receive(sock, MAX_STORE_BYTES)
        if kind == ExpertMessage.GROUP_READY:
            return
        if kind != ExpertMessage.STORE:
            raise LinkError(f"a message of kind {kind} came where a group is made")
        try:
            found = stored(store.answer(StoreRequest.unpack(data)))
        except LinkError as error:
            found = stored(why=str(error))
        send(sock, ExpertMessage.STORED, found)
