"""GPU memory shared between processes of one host: CUDA IPC handles, through the driver API.

torch's symmetric memory uses the same mechanism, but its rendezvous keeps a counter per process.
When rank 0's process starts a second engine, the other ranks' processes are new and their counters
differ from rank 0's, so the rendezvous would hang.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
ENABLE_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class Handle(ctypes.Structure):
    """CUipcMemHandle; the driver takes it by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


@functools.cache
def driver() -> Any:
    """libcuda, with argument types declared."""
    library = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_uint64
    size = ctypes.c_size_t
    library.cuMemAlloc_v2.argtypes = [ctypes.POINTER(pointer), size]
    library.cuMemFree_v2.argtypes = [pointer]
    library.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(Handle), pointer]
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(pointer), Handle, ctypes.c_uint]
    library.cuIpcCloseMemHandle.argtypes = [pointer]
    library.cuGetErrorName.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    # the virtual memory API (shared/shared_block.py); structures are passed by address
    word = ctypes.c_uint64
    flags = ctypes.c_ulonglong
    kind = ctypes.c_int
    address = ctypes.c_void_p
    library.cuMemGetAllocationGranularity.argtypes = [ctypes.POINTER(size), address, kind]
    library.cuMemCreate.argtypes = [ctypes.POINTER(word), size, address, flags]
    library.cuMemRelease.argtypes = [word]
    library.cuMemAddressReserve.argtypes = [ctypes.POINTER(pointer), size, size, pointer, flags]
    library.cuMemAddressFree.argtypes = [pointer, size]
    library.cuMemMap.argtypes = [pointer, size, size, word, flags]
    library.cuMemUnmap.argtypes = [pointer, size]
    library.cuMemSetAccess.argtypes = [pointer, size, address, size]
    library.cuMemExportToShareableHandle.argtypes = [address, word, kind, flags]
    library.cuMemImportFromShareableHandle.argtypes = [ctypes.POINTER(word), address, kind]
    return library


def call(function: str, *args: Any) -> None:
    """Call a driver function; raises RuntimeError with the driver's error name."""
    code = getattr(driver(), function)(*args)
    if code:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError(f"{function}: {(name.value or b'unknown').decode()} ({code})")


@contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make the GPU's context current on this thread."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()
        yield


def _undo(function: str, pointer: int, device: int) -> None:
    with on_device(device):
        getattr(driver(), function)(pointer)


class Mapping:
    """A block of memory at `pointer`, freed with the driver function `undo` when this object is
    garbage-collected. Created on torch's current GPU, which this thread must have used."""

    def __init__(self, pointer: int, size: int, undo: str):
        self.pointer = pointer
        self.size = size
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }
        end = weakref.finalize(self, _undo, undo, pointer, torch.cuda.current_device())
        end.atexit = False  # at process exit the context frees it

    @staticmethod
    def new(size: int) -> Mapping:
        pointer = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(pointer), size)
        return Mapping(pointer.value, size, "cuMemFree_v2")

    @staticmethod
    def of(handle: bytes, size: int) -> Mapping:
        """Map the memory of another process on this host; `handle` is from its Mapping.handle()."""
        pointer = ctypes.c_uint64()
        call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(pointer),
            Handle.from_buffer_copy(handle),
            ENABLE_PEERS,
        )
        return Mapping(pointer.value, size, "cuIpcCloseMemHandle")

    def handle(self) -> bytes:
        """The IPC handle, HANDLE_BYTES, for another process."""
        found = Handle()
        call("cuIpcGetMemHandle", ctypes.byref(found), self.pointer)
        return bytes(found.reserved)

    def tensor(self, device: torch.device) -> Tensor:
        """[size] uint8; keeps the mapping alive."""
        return torch.as_tensor(self, device=device)
