"""Which libraries there are, and what of them is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from contextlib import suppress
from dataclasses import dataclass

from rorqual.disagg.transports.interface import Transport, TransportError
from rorqual.disagg.transports.isolated import IsolatedTransport
from rorqual.disagg.transports.mooncake import PACKAGES as MOONCAKE_PACKAGES
from rorqual.disagg.transports.nixl import PACKAGES as NIXL_PACKAGES
from rorqual.disagg.transports.staging import (
    StagingMemory,
    StagingWindows,
    window_count,
    window_size,
)
from rorqual.errors import ConfigError

TCP = "tcp"
# modules that can be imported, and the distributions they come with
LIBRARIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "nixl": (NIXL_PACKAGES, ("nixl-cu12", "nixl-cu13")),
    "mooncake": (
        MOONCAKE_PACKAGES,
        ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"),
    ),
}


@dataclass
class PageStaging:
    """A library that runs, and the windows of its memory: those that this engine fills for peers,
    and those that it reads into; none where it does not. label: name and version, the same on both
    sides."""

    label: str
    transport: Transport
    memory: StagingMemory
    offered: StagingWindows | None
    fetched: StagingWindows | None

    def close(self) -> None:
        self.transport.close()


def package_of(library: str) -> tuple[str, str]:
    """(module, version) of what is installed. Raises ConfigError."""
    modules, distributions = LIBRARIES[library]
    for module in modules:
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            return module, _version(distributions)
    raise ConfigError(
        f"kv_transport={library!r} needs the package {distributions[0]}, which is not installed: "
        f"pip install 'rorqual[{library}]'"
    )


def _version(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "of unknown version"


def start_staging(
    library: str, megabytes: int, page: int, host: str, sends: bool, fetches: bool
) -> PageStaging:
    """page: bytes of one. host: as of IsolatedTransport. Raises ConfigError where the library is
    not installed or does not start, or where its memory has no room."""
    package, version = package_of(library)
    count = window_count(megabytes, page, sends + fetches)
    size = window_size(page)
    memory = StagingMemory(size * count * (sends + fetches))
    try:
        transport = IsolatedTransport(library, package, memory, host)
    except TransportError as error:
        memory.close()
        raise ConfigError(f"kv_transport={library!r}: {error}") from None
    offered = StagingWindows(memory.bytes, 0, size, count) if sends else None
    start = size * count if sends else 0
    fetched = StagingWindows(memory.bytes, start, size, count) if fetches else None
    return PageStaging(f"{library} {version}", transport, memory, offered, fetched)
