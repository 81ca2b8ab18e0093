"""Whether a window still holds what its reader was told, without a message: the keeper writes to
host memory that peers of the same host map read-only, with the descriptor of its device memory.

A window's stamp is the generation of the last holder that it was taken back from. The keeper writes
it before it fills the window again. So a reader whose generation is newer than the stamp after its
copy has ended has read what the window was filled with, even if either process was stopped in
between.
"""

from __future__ import annotations

import fcntl
import mmap
import os

MAX_WINDOWS = 1024
STAMP = 8  # bytes
SIZE = MAX_WINDOWS * STAMP
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class WindowStamps:
    """The keeper's side. Raises OSError where the system has no such memory."""

    def __init__(self) -> None:
        self.handle = os.memfd_create("rorqual windows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.handle, SIZE)
        fcntl.fcntl(self.handle, fcntl.F_ADD_SEALS, SEALS)
        self.stamps = memoryview(mmap.mmap(self.handle, SIZE)).cast("Q")

    def fd(self) -> int:
        """A new descriptor, which can only be read from."""
        return os.open(f"/proc/self/fd/{self.handle}", os.O_RDONLY | os.O_CLOEXEC)

    def revoke(self, window: int, generation: int) -> None:
        """Before the window of this number is filled again, whose holder's reader may still
        read."""
        self.stamps[window] = generation

    def close(self) -> None:
        """Readers that mapped them keep what they say now."""
        if self.handle >= 0:
            os.close(self.handle)
        self.handle = -1


class MappedStamps:
    """A reader's side. The descriptor stays the caller's. Raises ValueError and OSError where it
    has no stamps."""

    def __init__(self, fd: int):
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if seals & SEALS != SEALS or os.fstat(fd).st_size != SIZE:
            raise ValueError("its memory can be cut off, or is of another size")
        self.stamps = memoryview(mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)).cast("Q")

    def holds(self, window: int, generation: int) -> bool:
        """Whether the window of this number has not been taken back from this holder."""
        return self.stamps[window] < generation
