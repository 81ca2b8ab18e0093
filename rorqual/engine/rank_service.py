"""A service that runs on every rank beside the steps, for a floor above. It is made on all ranks by
its class name, receives messages from rank 0 in the order of the steps, and sends messages to rank
0.

The engine imports nothing from above: rank 0's caller names the class, and the other ranks import
it by that name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from rorqual.engine.execution.worker import Worker

PACKAGE = "rorqual."


@dataclass(frozen=True)
class ServiceContext:
    """What a service is made with. address: this rank's on its connection to rank 0; None on rank
    0's host. send: sends rank 0 a message, from any thread; raises OSError where rank 0 is gone."""

    worker: Worker
    address: str | None
    send: Callable[[bytes], None]


class RankService(Protocol):
    def handle(self, message: bytes) -> Callable[[], None] | None:
        """Handle a message from rank 0, on the thread that launches steps: after the steps that
        rank 0 had launched when it sent this, before later ones. Must not wait for other ranks.

        A returned callable is called once this rank's device has also finished the steps whose
        results rank 0 had by then."""

    def close(self) -> None:
        """Called after the last message."""


def make_service(name: str, context: ServiceContext, config: bytes) -> RankService:
    """name: "module:class" of this package; the class is called with `context` and `config`."""
    module, _, wanted = name.partition(":")
    assert module.startswith(PACKAGE), "services are parts of this package"
    made: RankService = getattr(import_module(module), wanted)(context, config)
    return made
