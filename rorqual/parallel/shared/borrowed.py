"""Tensors over memory that torch did not allocate, on an explicitly given device.

torch by itself asks the driver for an address's device. For mapped memory of another GPU it would
make a tensor on that GPU, with a context there and copies on its streams. With DLPack we declare
it to be on this GPU.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

DEVICE_TYPES = {"cpu": 1, "cuda": 2}  # DLDeviceType
UNSIGNED = 1  # DLDataTypeCode


class _View(ctypes.Structure):
    """DLManagedTensor of one dimension, of bytes."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_lent: dict[int, tuple[Any, ...]] = {}  # by the view's address: objects it must keep alive


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _returned(view: int) -> None:
    _lent.pop(view, None)


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def borrowed_bytes(pointer: int, size: int, device: torch.device, holder: object) -> Tensor:
    """[size] uint8 at `pointer` in the address space of `device`. The tensor and all its views keep
    `holder` alive."""
    shape = (ctypes.c_int64 * 1)(size)
    strides = (ctypes.c_int64 * 1)(1)
    view = _View(
        data=pointer,
        device_type=DEVICE_TYPES[device.type],
        device_id=device.index or 0,
        dimensions=1,
        code=UNSIGNED,
        bits=8,
        lanes=1,
        shape=shape,
        strides=strides,
        byte_offset=0,
        context=None,
        deleter=ctypes.cast(_returned, ctypes.c_void_p),
    )
    address = ctypes.addressof(view)
    _lent[address] = (view, shape, strides, holder)
    try:
        return from_dlpack(_new_capsule(address, b"dltensor", None))
    except BaseException:
        _lent.pop(address, None)
        raise
