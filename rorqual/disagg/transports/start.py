"""Starts a transport's library and lays out its memory."""

from __future__ import annotations

from dataclasses import dataclass

from rorqual.disagg.transports.handles import DeviceStaging, HandleTransport, handles_label
from rorqual.disagg.transports.installed import HANDLES, package_of
from rorqual.disagg.transports.interface import Transport, TransportError
from rorqual.disagg.transports.isolated import IsolatedTransport
from rorqual.disagg.transports.ranges import StagingRanges
from rorqual.disagg.transports.staging import (
    StagingMemory,
    StagingWindows,
    window_count,
    window_size,
)
from rorqual.disagg.transports.window_stamps import MAX_WINDOWS
from rorqual.errors import ConfigError
from rorqual.platforms.base import Platform

HANDLES_WINDOW = 128 * 2**20  # bytes: a third of a millisecond to copy, as long as the host's work
MIN_WINDOWS = 4  # where pages are small enough


@dataclass
class PageStaging:
    """A running transport and its memory: windows that this engine fills for peers, and windows or
    ranges that it reads into; none where unused. label: name and version, the same on both
    sides."""

    label: str
    transport: Transport
    memory: StagingMemory | DeviceStaging
    offered: StagingWindows | None
    fetched: StagingWindows | None
    ranges: StagingRanges | None = None

    def close(self) -> None:
        self.transport.close()


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


def start_handles(
    megabytes: int, page: int, platform: Platform, sends: bool, fetches: bool
) -> PageStaging:
    """On the platform's GPU, in windows where it is read from, and ranges of any size where it
    reads into. page: bytes of one. Raises ConfigError where there is no GPU, or it has no room."""
    if not _shares_memory(platform):
        raise ConfigError(
            f"kv_transport={HANDLES!r} is between NVIDIA GPUs; the device is {platform.device.type}"
        )
    sides = sends + fetches
    most = min(HANDLES_WINDOW, megabytes * 2**20 // sides // MIN_WINDOWS)
    count = min(window_count(megabytes, page, sides, most), MAX_WINDOWS)
    size = window_size(page, most)
    try:
        memory = DeviceStaging(megabytes * 2**20, platform)
        transport = HandleTransport(memory, platform, sends)
    except (RuntimeError, OSError, TransportError) as error:
        raise ConfigError(f"kv_transport={HANDLES!r}: {error}") from None
    offered = StagingWindows(memory.bytes, 0, size, count) if sends else None
    start = size * count if sends else 0
    ranges = StagingRanges(memory.bytes, start, memory.size - start) if fetches else None
    return PageStaging(handles_label(), transport, memory, offered, None, ranges)


def _shares_memory(platform: Platform) -> bool:
    return platform.device.type == "cuda"
