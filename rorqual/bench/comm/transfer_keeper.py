"""The keeper of pages that `bench comm` moves: a process that is asked on its standard input, and
answers on its standard output."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import zlib
from typing import Any

import torch

from rorqual.bench.comm.transfer_setup import (
    CHUNK,
    HOST,
    TransferSetup,
    keys_of,
    spec_of,
    staging_of,
)
from rorqual.cache.page_memory import PageMemory
from rorqual.cache.pool import KVPool
from rorqual.disagg.handle_server import offered_pages
from rorqual.disagg.leases import LeaseTable, lease_name
from rorqual.disagg.page_server import PageServer
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.platforms import make_platform


class NoEvents:
    """A no-op: this process has no engine that reacts to reads."""

    def reading(self, lease: bytes, pages: int, size: int) -> None:
        pass

    def done(self, lease: bytes) -> None:
        pass


class KeeperSide:
    """In the keeper's process."""

    def __init__(self, transport: str, setup: TransferSetup, secret: str):
        platform = make_platform(setup.devices[0])
        pool = KVPool(spec_of(setup), setup.pages + 1, platform.device)
        for layer in pool.layers:
            for plane in layer.values():
                plane.view(torch.uint8).random_(0, 256)
        platform.synchronize()  # pages are read on another stream
        self.memory = PageMemory(pool, platform)
        self.pages = range(1, setup.pages + 1)
        self.secret = bytes.fromhex(secret)
        self.leases = LeaseTable(self.secret)
        self.newest = b""
        self.staging = staging_of(transport, setup, self.memory, True, False)
        staged = offered_pages(self.staging, self.leases, self.memory)
        config = TransferConfig("prefill", secret)
        self.server = PageServer(
            config, self.secret, self.leases, self.memory, {}, NoEvents(), staged
        )

    def crc(self) -> int:
        row = self.memory.rows(1)[0]
        value = 0
        for page in self.pages:
            self.memory.read(page, row)
            value = zlib.crc32(row.numpy().data, value)
        return value

    def gather(self) -> float:
        """Seconds for all pages, to one piece of the device's memory."""
        count = len(self.pages)
        device = self.memory.platform.device
        rows = torch.empty(count, self.memory.size, dtype=torch.uint8, device=device)
        places = [(page, None) for page in self.pages]
        self.memory.platform.synchronize()
        start = time.perf_counter()
        self.memory.gather(places, rows, self.memory.held)()
        return time.perf_counter() - start

    def lease(self) -> str:
        self.leases.close([self.newest])
        self.newest = lease_name(self.secret, self.leases.newest + 1)
        pages = dict(zip(keys_of(len(self.pages)), self.pages, strict=True))
        self.leases.open(self.newest, pages)()
        return self.newest.hex()

    def send(self, size: int) -> int:
        """The port of a socket that sends this many bytes to each client."""
        listener = socket.create_server((HOST, 0))
        data = memoryview(bytes(CHUNK))

        def work() -> None:
            with listener, listener.accept()[0] as sock:
                for start in range(0, size, CHUNK):
                    sock.sendall(data[: min(CHUNK, size - start)])

        threading.Thread(target=work, daemon=True).start()
        return int(listener.getsockname()[1])

    def run(self) -> None:
        """A line in, a line out, until the caller is gone."""
        say({"port": self.server.port, "crc": self.crc()})
        for line in sys.stdin:
            word, _, rest = line.strip().partition(" ")
            if word == "lease":
                say(self.lease())
            elif word == "gather":
                say(self.gather())
            elif word == "send":
                say(self.send(int(rest)))
            elif self.staging is not None:
                self.staging.transport.serve(int(rest))
                say(self.staging.transport.describe().decode())


def say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def keep() -> None:
    """Main of a keeper, which reads its settings from stdin. It ends where none come: its caller
    met an error."""
    line = sys.stdin.readline()
    if not line:
        return
    settings = json.loads(line)
    torch.set_num_threads(1)
    given = settings["setup"]
    tuples = {name: tuple(given[name]) for name in ("transports", "devices")}
    setup = TransferSetup(**{**given, **tuples})
    KeeperSide(settings["transport"], setup, settings["secret"]).run()


if __name__ == "__main__":
    keep()
