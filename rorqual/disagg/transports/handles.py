"""Pages between GPUs of one host, by handles of the driver: a peer's staging memory on its GPU is
mapped here, and copied over the link between the GPUs. With it come the stamps of its windows
(window_stamps.py).

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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rorqual.cache.written_layers import Mark
from rorqual.config.host_memory import host_number
from rorqual.disagg.transports.interface import MAX_DESCRIPTION, ReadState, TransportError
from rorqual.disagg.transports.window_stamps import MAX_WINDOWS, MappedStamps, WindowStamps
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
    stamps: MappedStamps
    link: socket.socket
    gone: bool = False


@dataclass(frozen=True)
class PeerRead:
    """`size` bytes at `remote` of a peer's memory. place: called to launch work that reads them
    there, with whose end the read ends; if none, they are copied to `local`. window: number and
    generation; `poll` says REVOKED if the peer has taken it back before the read was over."""

    remote: int
    local: int
    size: int
    place: Callable[[Tensor], None] | None = None
    window: tuple[int, int] | None = None


@dataclass
class Copying:
    """A running copy. done: whether it is finished, without waiting. memory keeps the mapping until
    then. window: number and generation of the peer's window, if it must not have been taken
    back."""

    done: Callable[[], bool]
    peer: MappedPeer
    memory: Tensor
    window: tuple[int, int] | None


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
        self.stamps: WindowStamps | None = None
        self.description = b""
        # the lowest priority, the same as the steps'; copy engines do this stream's work
        cuda = platform.device.type == "cuda"
        self.stream: Any = torch.cuda.Stream(platform.device) if cuda else None
        # writing pages to the cache at once is a kernel with few programs
        self.placing: Any = torch.cuda.Stream(platform.device) if cuda else None
        if serves:
            try:
                self.server = DescriptorServer()
                self.stamps = WindowStamps()
                self._offer()
            except (OSError, RuntimeError) as error:
                raise TransportError(str(error)) from None

    # ---- what peers read

    def _offer(self) -> None:
        assert self.server is not None
        assert self.stamps is not None
        descriptors: list[int] = []
        try:
            descriptors.append(self.memory.block.fd())
            descriptors.append(self.stamps.fd())
            token = self.server.offer(descriptors)
        finally:
            for fd in descriptors:
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

    def where_placed(self) -> AbstractContextManager[object]:
        """The context in which `place` of a read is called, for launching work before it."""
        return self.platform.background(self.placing)

    def _launching(self) -> Any:
        """The context in which copies are launched: no other thread may be capturing."""
        return self.platform.background(self.stream)

    def read(self, peer: bytes, remote: int, local: int, size: int) -> int:
        (ticket,) = self.read_windows(peer, [PeerRead(remote, local, size)])
        return ticket

    def read_windows(self, peer: bytes, reads: Sequence[PeerRead]) -> list[int]:
        """As `read`, one ticket each; all of them are placed by `place`, or none."""
        with self.lock:
            found = self._peer(peer)
            for one in reads:
                self._check(found, one)
            stream = self.placing if any(one.place for one in reads) else self.stream
            tickets = []
            with self.platform.background(stream):
                self.cancelled = [one for one in self.cancelled if not one.done()]
                for one in reads:
                    there = found.memory[one.remote : one.remote + one.size]
                    if one.place is None:
                        here = self.memory.bytes[one.local : one.local + one.size]
                        here.copy_(there, non_blocking=True)
                    else:
                        one.place(there)
                    self.tickets += 1
                    copying = Copying(_launched(stream), found, there, one.window)
                    self.copies[self.tickets] = copying
                    tickets.append(self.tickets)
            return tickets

    def _check(self, peer: MappedPeer, read: PeerRead) -> None:
        """Raises TransportError."""
        remote, local, size = read.remote, read.local, read.size
        if min(remote, local, size) < 0 or remote + size > peer.memory.numel():
            raise TransportError(f"{size} bytes at {remote} are not the peer's to read")
        if read.place is None and local + size > self.memory.size:
            raise TransportError(f"{size} bytes at {local} have no room here")
        if read.window is not None and not 0 <= read.window[0] < MAX_WINDOWS:
            raise TransportError(f"the peer has no window {read.window[0]}")

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
            held = copying.window is None or copying.peer.stamps.holds(*copying.window)
            del copying
        if gone:
            return ReadState.ENDED
        return ReadState.DONE if held else ReadState.REVOKED

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
        if self.stamps is not None:
            self.stamps.close()
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
            (block, stamps), link = fetch_and_hold(address.name, address.token, 2, START_SECONDS)
        except HandleError as error:
            raise TransportError(f"the peer's memory is not to be had: {error}") from None
        try:
            with self._launching():
                device = self.platform.device
                memory = SharedBlock.of(block, address.size, device).tensor(device)
            found = MappedPeer(memory, MappedStamps(stamps), link)
        except (RuntimeError, ValueError, OSError) as error:
            link.close()
            raise TransportError(f"the peer's memory cannot be mapped: {error}") from None
        finally:
            os.close(block)
            os.close(stamps)
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
