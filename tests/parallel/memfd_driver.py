"""A stand-in for CUDA's driver whose memory is the host's: blocks are files in memory, so processes
share them as GPUs' processes do, and they outlive who made them."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

GRANULARITY = 1 << 16  # the real one is 2 MiB
NOT_PERMITTED = 800
INVALID_VALUE = 1
NAMES = {
    NOT_PERMITTED: b"CUDA_ERROR_NOT_PERMITTED",
    INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
}
MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
MAP_FIXED = 16


@contextmanager
def no_device(device: int) -> Iterator[None]:
    """In place of cuda_ipc.on_device."""
    yield


class MemfdDriver:
    """fails: the function that does not work. calls: names, in order; open: blocks that this
    process holds; mapped: bytes at addresses."""

    def __init__(self, fails: str = ""):
        self.fails = fails
        self.calls: list[str] = []
        self.open: set[int] = set()
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.accessible: dict[int, int] = {}  # address: device
        self.lost = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not name.startswith("cu"):
            raise AttributeError(name)
        work = getattr(self, f"do_{name}")

        def function(*args: Any) -> int:
            self.calls.append(name)
            if name == self.fails:
                return NOT_PERMITTED
            return work(*args) or 0

        return function

    @property
    def holds(self) -> int:
        """How many things were not given back."""
        return max(0, len(self.mapped) + len(self.reserved) + len(self.open) - self.lost)

    def forget(self) -> None:
        """What is still held is not counted any more."""
        self.lost += self.holds

    def do_cuGetErrorName(self, code: int, name: Any) -> None:
        name._obj.value = NAMES[code]

    def do_cuMemGetAllocationGranularity(self, unit: Any, wanted: Any, kind: int) -> None:
        unit._obj.value = GRANULARITY

    def do_cuMemCreate(self, handle: Any, size: int, wanted: Any, flags: int) -> int:
        if size % GRANULARITY or wanted._obj.handle_types != 1:
            return INVALID_VALUE
        fd = os.memfd_create("block")
        os.ftruncate(fd, size)
        self.open.add(fd)
        handle._obj.value = fd
        return 0

    def do_cuMemRelease(self, handle: int) -> None:
        self.open.remove(handle)
        os.close(handle)

    def do_cuMemAddressReserve(
        self, pointer: Any, size: int, align: int, at: int, flags: int
    ) -> None:
        found = _libc.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        assert found != MAP_FAILED
        self.reserved[found] = size
        pointer._obj.value = found

    def do_cuMemAddressFree(self, pointer: int, size: int) -> None:
        assert self.reserved.pop(pointer) == size
        assert pointer not in self.mapped
        assert not _libc.munmap(pointer, size)

    def do_cuMemMap(self, pointer: Any, size: int, offset: int, handle: int, flags: int) -> int:
        if size > os.fstat(handle).st_size:
            return INVALID_VALUE
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        shared = mmap.MAP_SHARED | MAP_FIXED
        assert _libc.mmap(pointer.value, size, rights, shared, handle, 0) == pointer.value
        self.mapped[pointer.value] = size
        return 0

    def do_cuMemUnmap(self, pointer: int, size: int) -> None:
        assert self.mapped.pop(pointer) == size
        self.accessible.pop(pointer, None)

    def do_cuMemSetAccess(self, pointer: Any, size: int, access: Any, count: int) -> int:
        assert self.mapped[pointer.value] == size
        assert count == 1
        self.accessible[pointer.value] = access._obj.location.id
        return 0

    def do_cuMemExportToShareableHandle(
        self, found: Any, handle: int, kind: int, flags: int
    ) -> None:
        found._obj.value = os.dup(handle)

    def do_cuMemImportFromShareableHandle(self, handle: Any, fd: Any, kind: int) -> int:
        try:
            own = os.dup(fd.value)
        except (OSError, TypeError):
            return INVALID_VALUE
        self.open.add(own)
        handle._obj.value = own
        return 0
