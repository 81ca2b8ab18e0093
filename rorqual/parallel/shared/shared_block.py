"""GPU memory that other processes of the host map by a file descriptor: the driver's virtual memory
API.

cuda_ipc.py shares a block of cuMemAlloc by a handle of 64 bytes. Such a block is gone with the
process that allocated it, under the feet of who maps it: a kernel that reads it then faults, and
the reader's context with it. What cuMemCreate allocates is counted: it lives until the last of its
exporter, its importers and its descriptors is gone, so a kill -9 of the exporter leaves an
importer's mapping valid. That is for processes that may outlive each other; ranks of one engine do
not.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from rorqual.parallel import cuda_ipc
from rorqual.parallel.cuda_ipc import call
from rorqual.parallel.shared.borrowed import borrowed_bytes

PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
Undo = tuple[str, tuple[int, ...]]  # a function of the driver's, and what it takes


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class SharedBlock:
    """`size` bytes, as asked for, at `pointer` as this process' GPU `device` (its index) sees them;
    the mapping is undone when nobody holds this any more. Made by `new` or `of`, both of which
    raise RuntimeError with the driver's name for what went wrong; the GPU must have been used by
    torch in this process."""

    def __init__(self, handle: int, size: int, mapped: int, device: int):
        """handle: the driver's of the memory, owned by this from now on; mapped: bytes of it."""
        undo: list[Undo] = [("cuMemRelease", (handle,))]
        try:
            self.pointer = _map(handle, mapped, device, undo)
        except RuntimeError:
            _undo_all(undo, device)
            raise
        self.handle = handle
        self.size = size
        self.device = device
        end = weakref.finalize(self, _undo_all, undo, device)
        end.atexit = False  # a process's end frees it, with the context

    @staticmethod
    def new(size: int, device: torch.device) -> SharedBlock:
        """Memory of this GPU, not set to anything."""
        index = _index(device)
        with cuda_ipc.on_device(index):
            wanted = _properties(index)
            mapped = _rounded(size, wanted)
            handle = ctypes.c_uint64()
            call("cuMemCreate", ctypes.byref(handle), mapped, ctypes.byref(wanted), 0)
            return SharedBlock(handle.value, size, mapped, index)

    @staticmethod
    def of(fd: int, size: int, device: torch.device) -> SharedBlock:
        """What another process, or this one, made with `SharedBlock.new(size)` on this GPU or on
        one that it reaches, mapped for `device`. `fd` stays the caller's to close, and may be
        closed at once. The driver refuses what is larger than the block."""
        index = _index(device)
        with cuda_ipc.on_device(index):
            handle = ctypes.c_uint64()
            call(
                "cuMemImportFromShareableHandle",
                ctypes.byref(handle),
                ctypes.c_void_p(fd),  # the number itself, in a pointer's place
                FILE_DESCRIPTOR,
            )
            mapped = _rounded(size, _properties(index))
            return SharedBlock(handle.value, size, mapped, index)

    def fd(self) -> int:
        """A new descriptor of the memory for another process; the caller closes it. While one is
        open, the memory is kept."""
        found = ctypes.c_int(-1)
        call("cuMemExportToShareableHandle", ctypes.byref(found), self.handle, FILE_DESCRIPTOR, 0)
        return found.value

    def tensor(self, device: torch.device) -> Tensor:
        """[size] uint8 on `device`, the one that this is mapped for; it, and every view of it,
        holds the mapping."""
        assert _index(device) == self.device, "mapped for another device"
        return borrowed_bytes(self.pointer, self.size, device, self)


def _index(device: torch.device) -> int:
    return device.index or 0


def _properties(device: int) -> Properties:
    return Properties(
        type=PINNED, handle_types=FILE_DESCRIPTOR, location=Location(ON_DEVICE, device)
    )


def _rounded(size: int, properties: Properties) -> int:
    """To what the driver allocates in."""
    unit = ctypes.c_size_t()
    call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(properties), MINIMUM)
    return max(1, -(-size // unit.value)) * unit.value


def _map(handle: int, size: int, device: int, undo: list[Undo]) -> int:
    """Where `device` sees the memory from now on; what undoes each step is added to `undo`."""
    pointer = ctypes.c_uint64()
    call("cuMemAddressReserve", ctypes.byref(pointer), size, 0, 0, 0)
    undo.append(("cuMemAddressFree", (pointer.value, size)))
    call("cuMemMap", pointer, size, 0, handle, 0)
    undo.append(("cuMemUnmap", (pointer.value, size)))
    access = Access(Location(ON_DEVICE, device), READ_WRITE)
    call("cuMemSetAccess", pointer, size, ctypes.byref(access), 1)
    return pointer.value


def _undo_all(undo: list[Undo], device: int) -> None:
    """Last first. A mapping that goes while a kernel reads it is the holder's mistake: torch's
    tensors hold it until their storage is freed, so whoever launched work on one waits for it."""
    with cuda_ipc.on_device(device):
        for function, args in reversed(undo):
            getattr(cuda_ipc.driver(), function)(*args)
