"""Pages between GPUs of one host, by handles of the driver: a peer's staging memory on its GPU is
mapped here, and copied over the link between the GPUs.

The memory exists until its owner and all that mapped it are gone, so a running copy survives the
peer's death: it completes, but is not confirmed. A peer and its mapping are dropped when the socket
closes over which its descriptor was received.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rorqual.cache.written_layers import Mark
from rorqual.config.host_memory import host_number
from rorqual.disagg.transports.interface import MAX_DESCRIPTION, ReadState, TransportError
from rorqual.parallel.shared.handle_passing import (
    TOKEN,
    DescriptorServer,
    HandleError,
    fetch_and_hold,
)
from rorqual.parallel.shared.shared_block import SharedBlock
from rorqual.platforms.base import Platform

MAX_PEERS = 64  # mapped at once
MAX_BYTES = 1 << 40  # of a peer's memory
SPIN_SECONDS = 0.003  # of busy polling: a prompt's pages take about 1 ms
PAUSE = 0.0002
START_SECONDS = 2.0  # for a peer's descriptor


class DeviceStaging:
    """Staging memory on the platform's device. `bytes` [size] uint8. Raises RuntimeError."""

    def __init__(self, size: int, platform: Platform):
        self.size = size
        self.block = SharedBlock.new(size, platform.device)
        self.bytes = self.block.tensor(platform.device)


@dataclass(frozen=True)
class HandleAddress:
    """How to map a peer's memory of `size` bytes."""

    name: str
    token: bytes
    size: int

    def pack(self) -> bytes:
        fields = {"name": self.name, "token": self.token.hex(), "size": self.size}
        return json.dumps(fields).encode()

    @staticmethod
    def unpack(data: bytes) -> HandleAddress:
        """Raises TransportError."""
        try:
            if len(data) > MAX_DESCRIPTION:
                raise ValueError("it is too long")
            fields = json.loads(data)
            found = HandleAddress(
                str(fields["name"]), bytes.fromhex(fields["token"]), int(fields["size"])
            )
        except (ValueError, KeyError, TypeError) as error:
            raise TransportError(f"the peer's description is none: {error}") from None
        if len(found.token) != TOKEN or not 0 < found.size <= MAX_BYTES:
            raise TransportError("the peer's description is out of range")
        return found


@dataclass(eq=False)
class MappedPeer:
    """memory: [size] uint8 of the peer's device, mapped here. link: open while the peer's process
    is alive and offers the memory."""

    memory: Tensor
    link: socket.socket
    gone: bool = False


@dataclass
class Copying:
    """A running copy. done: whether it is finished, without waiting. memory keeps the mapping until
    then."""

    done: Callable[[], bool]
    peer: MappedPeer
    memory: Tensor


class HandleTransport:
    """A Transport (interface.py). serves: whether peers read from the memory here. Raises
    TransportError."""

    def __init__(self, memory: DeviceStaging, platform: Platform, serves: bool):
        self.memory = memory
        self.platform = platform
        self.lock = threading.Lock()
        self.peers: dict[bytes, MappedPeer] = {}
        self.copies: dict[int, Copying] = {}
        self.cancelled: list[Copying] = []
        self.tickets = 0
        self.closed = False
        self.server: DescriptorServer | None = None
        self.description = b""
        # the lowest priority, the same as the steps'; copy engines do this stream's work
        cuda = platform.device.type == "cuda"
        self.stream: Any = torch.cuda.Stream(platform.device) if cuda else None
        # writing pages to the cache at once is a kernel with few programs
        self.placing: Any = torch.cuda.Stream(platform.device) if cuda else None
        if serves:
            try:
                self.server = DescriptorServer()
                self._offer()
            except (OSError, RuntimeError) as error:
                raise TransportError(str(error)) from None

    # ---- what peers read

    def _offer(self) -> None:
        assert self.server is not None
        fd = self.memory.block.fd()
        try:
            token = self.server.offer([fd])
        finally:
            os.close(fd)
        self.description = HandleAddress(self.server.name, token, self.memory.size).pack()

    def describe(self) -> bytes:
        if self.closed:
            raise TransportError("the engine ends")
        assert self.server is not None, "made to be read from"
        return self.description

    def serve(self, windows: int) -> None:
        """Nothing to do: peers read without this process."""

    # ---- reads

    def wait_for(self, mark: Mark) -> None:
        """Make later reads wait for the mark."""
        with self._launching():
            mark()

    def mark(self) -> Mark:
        """A mark after everything launched so far: reads and placed pages."""
        if self.placing is None:
            return lambda: None
        event = torch.cuda.Event()
        event.record(self.placing)
        return lambda: torch.cuda.current_stream(self.platform.device).wait_event(event)

    def where_placed(self) -> AbstractContextManager[None]:
        """The context in which `place` of `read` is called, for launching work before it."""
        return _OnStream(self.platform, self.placing)

    def _launching(self) -> Any:
        """The context in which copies are launched: no other thread may be capturing."""
        return _OnStream(self.platform, self.stream)

    def read(
        self,
        peer: bytes,
        remote: int,
        local: int,
        size: int,
        place: Callable[[Tensor], None] | None = None,
    ) -> int:
        """place: if given, nothing is copied to `local`: it is called to launch work that reads the
        bytes directly from the peer's memory; the read ends with that work."""
        with self.lock:
            found = self._peer(peer)
            if min(remote, local, size) < 0 or remote + size > found.memory.numel():
                raise TransportError(f"{size} bytes at {remote} are not the peer's to read")
            if place is None and local + size > self.memory.size:
                raise TransportError(f"{size} bytes at {local} have no room here")
            there = found.memory[remote : remote + size]
            stream = self.stream if place is None else self.placing
            with _OnStream(self.platform, stream):
                self.cancelled = [one for one in self.cancelled if not one.done()]
                if place is None:
                    self.memory.bytes[local : local + size].copy_(there, non_blocking=True)
                else:
                    place(there)
                done = _launched(stream)
            self.tickets += 1
            self.copies[self.tickets] = Copying(done, found, there)
            return self.tickets

    def poll(self, ticket: int, seconds: float) -> ReadState:
        """ENDED also where the peer has ended, even if the bytes arrived: it can no longer confirm
        that they were valid."""
        started = time.monotonic()
        with self.lock:
            copying = self.copies[ticket]
        while not self._is_done(copying):
            waited = time.monotonic() - started
            if waited > seconds:
                return ReadState.RUNNING
            # 0 only yields the interpreter to other threads
            time.sleep(0 if waited < SPIN_SECONDS else PAUSE)
        with self.lock, self.platform.background():
            self.copies.pop(ticket, None)
            gone = copying.peer.gone
            del copying
        return ReadState.ENDED if gone else ReadState.DONE

    def _is_done(self, copying: Copying) -> bool:
        with self.platform.background():
            return copying.done()

    def cancel(self, ticket: int) -> None:
        with self.lock:
            copying = self.copies.pop(ticket, None)
            if copying is not None:
                self.cancelled.append(copying)

    def restart(self) -> None:
        """Copies cannot be cancelled; wait for them, milliseconds each."""
        with self.lock, self._launching():
            self._wait()
            self.cancelled.clear()
            if self.server is not None and not self.closed:
                self.server.withdraw(HandleAddress.unpack(self.description).token)
                self._offer()

    def close(self) -> None:
        with self.lock:
            self.closed = True
            peers = list(self.peers.values())
        for peer in peers:
            _shut_down(peer.link)
        if self.server is not None:
            self.server.close()
        with self.lock, self._launching():
            self._wait()
            self.cancelled.clear()
            self.peers.clear()

    def _wait(self) -> None:
        for stream in (self.stream, self.placing):
            if stream is not None:
                stream.synchronize()

    # ---- peers

    def _peer(self, description: bytes) -> MappedPeer:
        if self.closed:
            raise TransportError("the engine ends")
        found = self.peers.get(description)
        if found is not None and not found.gone:
            return found
        if len(self.peers) >= MAX_PEERS:
            raise TransportError(f"{MAX_PEERS} peers are mapped already")
        address = HandleAddress.unpack(description)
        try:
            (fd,), link = fetch_and_hold(address.name, address.token, 1, START_SECONDS)
        except HandleError as error:
            raise TransportError(f"the peer's memory is not to be had: {error}") from None
        try:
            with self._launching():
                device = self.platform.device
                memory = SharedBlock.of(fd, address.size, device).tensor(device)
        except RuntimeError as error:
            link.close()
            raise TransportError(f"the peer's memory cannot be mapped: {error}") from None
        finally:
            os.close(fd)
        found = MappedPeer(memory, link)
        self.peers[description] = found
        watch = threading.Thread(
            target=self._watch, args=(description, found), name="mapped peer", daemon=True
        )
        watch.start()
        return found

    def _watch(self, description: bytes, peer: MappedPeer) -> None:
        """Wait until the peer closes the socket, on which it sends nothing, then drop it."""
        with suppress(OSError):
            while peer.link.recv(64):
                pass
        peer.gone = True
        with self.lock, self.platform.background():
            if self.peers.get(description) is peer:
                del self.peers[description]
            peer.link.close()
            peer.memory = torch.empty(0, dtype=torch.uint8)  # running copies keep a reference


class _OnStream:
    """`platform.background()`, and within it our own stream."""

    def __init__(self, platform: Platform, stream: Any):
        self.background = platform.background()
        self.stream = torch.cuda.stream(stream) if stream is not None else None

    def __enter__(self) -> None:
        self.background.__enter__()
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__(*raised)
        self.background.__exit__(*raised)


def _launched(stream: Any) -> Callable[[], bool]:
    """A function that returns whether everything launched so far on the stream is done."""
    if stream is None:
        return lambda: True
    event = torch.cuda.Event()
    event.record(stream)
    found: Callable[[], bool] = event.query
    return found


def _shut_down(link: socket.socket) -> None:
    """Shut down the socket, which wakes threads waiting on it."""
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def handles_label() -> str:
    """A label that is equal for engines on the same running host, and different elsewhere."""
    return f"handles on host {host_number():014x}"
