"""GPU memory that other processes of the host map through a file descriptor: the driver's virtual
memory API.

cuda_ipc.py shares cuMemAlloc memory through a 64-byte handle. Such memory is freed when its process
exits, even while others map it: a kernel that reads it then faults and breaks the reader's context.
cuMemCreate memory is reference-counted by its exporter, importers and descriptors, so a kill -9 of
the exporter leaves an importer's mapping valid. Used between processes that may outlive each other,
which ranks of one engine do not.
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
Undo = tuple[str, tuple[int, ...]]  # a driver function and its arguments


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
    """`size` bytes, as requested, mapped at `pointer` for the GPU with index `device`; unmapped
    when this object is garbage-collected. Create it with `new` or `of`, which raise RuntimeError
    with the driver's error name; torch must have used the GPU in this process."""

    def __init__(self, handle: int, size: int, mapped: int, device: int):
        """handle: the driver's handle of the memory, which this object now owns. mapped: bytes."""
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
        end.atexit = False  # at process exit the context frees it

    @staticmethod
    def new(size: int, device: torch.device) -> SharedBlock:
        """Allocate uninitialized memory on this GPU."""
        index = _index(device)
        with cuda_ipc.on_device(index):
            wanted = _properties(index)
            mapped = _rounded(size, wanted)
            handle = ctypes.c_uint64()
            call("cuMemCreate", ctypes.byref(handle), mapped, ctypes.byref(wanted), 0)
            return SharedBlock(handle.value, size, mapped, index)

    @staticmethod
    def of(fd: int, size: int, device: torch.device) -> SharedBlock:
        """Map for `device` the memory that this or another process made with
        `SharedBlock.new(size)`, on this GPU or one that it can access. The caller closes `fd`, at
        any time. The driver refuses a size larger than the block."""
        index = _index(device)
        with cuda_ipc.on_device(index):
            handle = ctypes.c_uint64()
            call(
                "cuMemImportFromShareableHandle",
                ctypes.byref(handle),
                ctypes.c_void_p(fd),  # the number itself, passed as a pointer
                FILE_DESCRIPTOR,
            )
            mapped = _rounded(size, _properties(index))
            return SharedBlock(handle.value, size, mapped, index)

    def fd(self) -> int:
        """A new descriptor of the memory for another process; the caller closes it. An open
        descriptor keeps the memory allocated."""
        found = ctypes.c_int(-1)
        call("cuMemExportToShareableHandle", ctypes.byref(found), self.handle, FILE_DESCRIPTOR, 0)
        return found.value

    def tensor(self, device: torch.device) -> Tensor:
        """[size] uint8 on `device`, for which it must be mapped. The tensor and its views keep the
        mapping alive."""
        assert _index(device) == self.device, "mapped for another device"
        return borrowed_bytes(self.pointer, self.size, device, self)


def _index(device: torch.device) -> int:
    return device.index or 0


def _properties(device: int) -> Properties:
    return Properties(
        type=PINNED, handle_types=FILE_DESCRIPTOR, location=Location(ON_DEVICE, device)
    )


def _rounded(size: int, properties: Properties) -> int:
    """Round up to the driver's allocation granularity."""
    unit = ctypes.c_size_t()
    call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(properties), MINIMUM)
    return max(1, -(-size // unit.value)) * unit.value


def _map(handle: int, size: int, device: int, undo: list[Undo]) -> int:
    """Map the memory for `device` and return its address. Adds the calls that undo each step to
    `undo`."""
    pointer = ctypes.c_uint64()
    call("cuMemAddressReserve", ctypes.byref(pointer), size, 0, 0, 0)
    undo.append(("cuMemAddressFree", (pointer.value, size)))
    call("cuMemMap", pointer, size, 0, handle, 0)
    undo.append(("cuMemUnmap", (pointer.value, size)))
    access = Access(Location(ON_DEVICE, device), READ_WRITE)
    call("cuMemSetAccess", pointer, size, ctypes.byref(access), 1)
    return pointer.value


def _undo_all(undo: list[Undo], device: int) -> None:
    """Undo the steps, last first. Unmapping memory that a kernel still reads is the caller's
    mistake: a tensor keeps the mapping until its storage is freed, so wait for the kernels before
    dropping the tensor."""
    with cuda_ipc.on_device(device):
        for function, args in reversed(undo):
            getattr(cuda_ipc.driver(), function)(*args)
