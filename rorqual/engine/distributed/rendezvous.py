"""Where the process groups of an engine's ranks find each other: a file of one host, or a
TCPStore that rank 0 keeps on one address."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from rorqual.engine.distributed.listener import listening
from rorqual.parallel.mesh import ProcessGroups
from rorqual.platforms.base import Platform

START_SECONDS = 1800.0  # until a rank can compute: imports and loading may take this long
LOOK_SECONDS = 0.05  # between two checks for ranks that have joined


@dataclass(frozen=True)
class Rendezvous:
    """As sent to the ranks: a file's path, or a host and port."""

    file: str | None = None
    host: str = ""
    port: int = 0

    def join(
        self,
        platform: Platform,
        rank: int,
        world: int,
        watchdog: float,
        check: Callable[[], None] | None = None,
    ) -> ProcessGroups:
        """Join the other ranks; returns a factory of process groups whose collectives time out
        after `watchdog` seconds. The world group waits for ranks that are still loading.

        check: called while this rank waits for the others, and raises when one of them has failed.
        Joining itself blocks in torch, where neither that nor Ctrl-C is noticed."""
        patience = timedelta(seconds=START_SECONDS)
        if self.file is not None:
            store: dist.Store = dist.FileStore(self.file, world)
        else:
            store = dist.TCPStore(self.host, self.port, is_master=False, timeout=patience)
        store.set(f"came/{rank}", "1")
        if check is not None:
            keys = [f"came/{other}" for other in range(world)]
            while not store.check(keys):
                check()
                time.sleep(LOOK_SECONDS)
        dist.init_process_group(
            platform.collectives, store=store, rank=rank, world_size=world, timeout=patience
        )
        return ProcessGroups(timedelta(seconds=watchdog))


class RendezvousStore:
    """Rank 0's store. It listens only on `address`: torch by itself would listen on all
    interfaces."""

    def __init__(self, address: str, world: int):
        door = listening(address, world)
        port = door.getsockname()[1]
        patience = timedelta(seconds=START_SECONDS)
        self.store = dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=patience,
            wait_for_workers=False,
            master_listen_fd=door.detach(),
        )
        self.rendezvous = Rendezvous(host=address, port=port)
