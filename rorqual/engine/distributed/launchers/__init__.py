"""Launchers start the other ranks of an engine and connect to them. All ranks then run
engine/distributed/worker_process.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rorqual.engine.config import EngineConfig

if TYPE_CHECKING:
    from rorqual.engine.distributed.launchers.base import Launcher


def make_launcher(config: EngineConfig) -> Launcher:
    """Raises ConfigError where the launcher's requirements are not met."""
    if config.launcher == "torchrun":
        from rorqual.engine.distributed.launchers.torchrun import TorchrunLauncher

        return TorchrunLauncher(config)
    if config.launcher == "ray":
        from rorqual.engine.distributed.launchers.ray_cluster import RayLauncher

        return RayLauncher(config)
    from rorqual.engine.distributed.launchers.local import LocalLauncher

    return LocalLauncher(config)


def check_alone(config: EngineConfig) -> None:
    """Raises ConfigError where torchrun has started several ranks for an engine of one."""
    if config.launcher == "torchrun":
        from rorqual.engine.distributed.launchers.torchrun import TorchrunPlace

        TorchrunPlace.read().check(config)
