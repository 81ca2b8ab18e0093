"""The engine process's two sockets, and a pipe with which other threads wake its loop."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import zmq

from rorqual.serve import messages


class EngineSockets:
    """`inbox` and `outbox` are addresses the API process has bound."""

    def __init__(self, inbox: str, outbox: str):
        context: Any = zmq.Context.instance()
        self.inbox = context.socket(zmq.PULL)
        self.outbox = context.socket(zmq.PUSH)
        for socket, address in ((self.inbox, inbox), (self.outbox, outbox)):
            socket.set_hwm(0)  # the API process limits the queue, and always reads
            socket.linger = 1000
            socket.connect(address)
        self.wake_read, self.wake_write = os.pipe()
        for end in (self.wake_read, self.wake_write):
            os.set_blocking(end, False)
        self.poller = zmq.Poller()
        self.poller.register(self.inbox, zmq.POLLIN)
        self.poller.register(self.wake_read, zmq.POLLIN)
        self.decoder = messages.engine_decoder()
        self.encoder = messages.encoder()

    def send(self, message: messages.FromEngine) -> None:
        self.outbox.send(self.encoder.encode(message))

    def wait(self, milliseconds: int) -> None:
        self.poller.poll(milliseconds)
        with suppress(BlockingIOError):
            os.read(self.wake_read, 4096)

    def wake(self) -> None:
        """From any thread. Never blocks: a loop that always has work does not read the pipe, and a
        full one wakes it as well."""
        with suppress(BlockingIOError):
            os.write(self.wake_write, b"\0")

    def receive(self) -> messages.ToEngine | None:
        try:
            return self.decoder.decode(self.inbox.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        self.inbox.close()
        self.outbox.close()
