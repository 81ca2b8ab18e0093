"""The ranks of one host, as child processes over inherited socket pairs, which no other process can
reach."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress

from rorqual.config.locked_folder import STORE, LockedFolder
from rorqual.config.model import child_environment
from rorqual.config.process import group_signals_blocked
from rorqual.engine.config import EngineConfig
from rorqual.engine.distributed.channel import Channel
from rorqual.engine.distributed.launchers.base import Launcher
from rorqual.engine.distributed.rendezvous import Rendezvous
from rorqual.engine.distributed.worker_handle import ConnectedWorker


class LocalLauncher(Launcher):
    """GPUs are assigned in order from `first_device` on. Process groups rendezvous through a file
    that only this user can read."""

    interface = "lo"

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self.folder = LockedFolder("ranks-")
        self.rendezvous = Rendezvous(file=str(self.folder.path / STORE))

    def start(self) -> list[ConnectedWorker]:
        return [self._child(self.config.first_device + rank) for rank in range(1, self.world)]

    def _child(self, device_index: int) -> ConnectedWorker:
        mine, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "rorqual.engine.distributed.worker_process",
            "--fd",
            str(theirs.fileno()),
        ]
        with group_signals_blocked():
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=child_environment())
        theirs.close()
        return ConnectedWorker(
            Channel(mine), process.pid, process=process, device_index=device_index
        )

    def close(self) -> None:
        with suppress(OSError):
            self.folder.remove()
