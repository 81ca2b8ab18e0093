"""What rank 0 asks of a launcher."""

from __future__ import annotations

from collections.abc import Callable

from rorqual.engine.config import EngineConfig
from rorqual.engine.distributed.rendezvous import Rendezvous
from rorqual.engine.distributed.worker_handle import JoinedWorker

Check = Callable[[], None]


class Launcher:
    """`start` once, then `meeting` and `interface` are known; `close` when all members have
    left, or were ended."""

    rendezvous: Rendezvous
    interface: str  # the network interface rank 0's collectives take

    def __init__(self, config: EngineConfig):
        self.config = config
        self.world = config.parallel.world

    def start(self) -> list[JoinedWorker]:
        """Ranks 1 to world - 1, connected. Raises EngineError when they do not come, ConfigError
        for what the user can mend."""
        raise AssertionError("launchers say how ranks are started")

    def device_index(self) -> int:
        """Which of its host's GPUs rank 0 takes."""
        return self.config.first_device

    def close(self) -> None:
        """Give back what was taken for the start."""
