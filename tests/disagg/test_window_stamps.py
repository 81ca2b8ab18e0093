"""Stamps of a keeper's windows, as its readers see them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest

from rorqual.disagg.transports.window_stamps import MAX_WINDOWS, SIZE, MappedStamps, WindowStamps


@pytest.fixture
def stamps() -> Iterator[WindowStamps]:
    found = WindowStamps()
    yield found
    found.close()
    found.close()


def mapped(stamps: WindowStamps) -> MappedStamps:
    fd = stamps.fd()
    try:
        return MappedStamps(fd)
    finally:
        os.close(fd)


def test_a_window_is_its_holder_s_until_it_is_taken_back(stamps: WindowStamps) -> None:
    seen = mapped(stamps)
    last = MAX_WINDOWS - 1
    assert all(seen.holds(number, 1) for number in (0, last))
    stamps.revoke(last, 1 << 40)
    assert seen.holds(0, 1)
    assert not seen.holds(last, 1 << 40)
    assert seen.holds(last, (1 << 40) + 1)
    assert not mapped(stamps).holds(last, 5)


def test_readers_cannot_write(stamps: WindowStamps) -> None:
    fd = stamps.fd()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SIZE)
    with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument"):
        os.write(fd, b"x")
    os.close(fd)
    with pytest.raises(PermissionError):
        os.ftruncate(stamps.handle, 0)


@pytest.mark.parametrize("flags", [os.MFD_ALLOW_SEALING, 0])
def test_memory_that_could_be_cut_off_is_refused(flags: int) -> None:
    """Reading behind its end would end the process."""
    fd = os.memfd_create("other", flags)
    os.ftruncate(fd, SIZE)
    with pytest.raises(ValueError, match="can be cut off"):
        MappedStamps(fd)
    os.close(fd)
    read, write = os.pipe()
    with pytest.raises(OSError, match="Invalid argument"):
        MappedStamps(read)
    os.close(read)
    os.close(write)
