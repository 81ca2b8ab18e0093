"""What every rank of an engine does beside its steps for a floor above: a service, made on all
ranks by its name, told things by rank 0 in the order of the steps, and heard by rank 0.

The engine imports nothing from above: rank 0's caller names the class, and other ranks' processes
import it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from rorqual.engine.execution.worker import Worker

PACKAGE = "rorqual."


@dataclass(frozen=True)
class ServicePlace:
    """Where a service is made. address: this rank's on its link to rank 0; None on rank 0's host.
    tell: sends rank 0 a message, from any thread; raises OSError where rank 0 has gone."""

    worker: Worker
    address: str | None
    tell: Callable[[bytes], None]


class RankService(Protocol):
    def take(self, message: bytes) -> Callable[[], None] | None:
        """On the thread that launches steps: after the steps that rank 0 had launched when it told
        this, before those to come. Must not wait for other ranks.

        What is returned is called once the steps whose results rank 0 had by then are done on this
        rank's device too."""

    def close(self) -> None:
        """No message comes any more."""


def make_service(name: str, place: ServicePlace, config: bytes) -> RankService:
    """name: "module:class" of this package; the class is called with the other two."""
    module, _, wanted = name.partition(":")
    assert module.startswith(PACKAGE), "services are parts of this package"
    made: RankService = getattr(import_module(module), wanted)(place, config)
    return made
