"""The interface of launchers, as rank 0 uses them."""

from __future__ import annotations

from collections.abc import Callable

from rorqual.engine.config import EngineConfig
from rorqual.engine.distributed.rendezvous import Rendezvous
from rorqual.engine.distributed.worker_handle import ConnectedWorker

Check = Callable[[], None]


class Launcher:
    """Call `start` once: it sets `rendezvous` and `interface`. Call `close` when all ranks have
    ended."""

    rendezvous: Rendezvous
    interface: str  # the network interface for rank 0's collectives

    def __init__(self, config: EngineConfig):
        self.config = config
        self.world = config.parallel.world

    def start(self) -> list[ConnectedWorker]:
        """Ranks 1 to world - 1, connected. Raises EngineError when they fail to connect,
        ConfigError for what the user can fix."""
        raise AssertionError("launchers say how ranks are started")

    def device_index(self) -> int:
        """Which of its host's GPUs rank 0 uses."""
        return self.config.first_device

    def close(self) -> None:
        """Release what was taken for the start."""
