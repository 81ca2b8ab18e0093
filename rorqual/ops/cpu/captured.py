"""Compiled calls captured with their arguments, and replayed by one call into the library: no
Python between them. What they read is expected where it was, with other contents."""

from __future__ import annotations

import ctypes
import logging
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rorqual.ops.cpu.native import SIGNATURES, Native

MOST_ARGUMENTS = 16  # as in captured.h
ALIGNMENT = 64  # bytes
aten = torch.ops.aten
ALLOCATIONS = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
log = logging.getLogger("rorqual")
capturing = threading.Lock()  # one at a time: each puts itself in place of the library


class _Call(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_int64),
        ("result", ctypes.c_int64),
        ("arguments", ctypes.c_int64 * MOST_ARGUMENTS),
    ]


class CapturedCalls:
    """replay: the calls once more. Returns the same tensor each time, whose contents the next
    replay overwrites. kept: what the calls point at and nothing else may hold."""

    def __init__(self, lib: ctypes.CDLL, calls: Sequence[_Call], kept: list[Any], out: Tensor):
        self.lib = lib
        self.calls = (_Call * len(calls))(*calls)
        self.kept = kept
        self.out = out

    def replay(self) -> Tensor:
        done = self.lib.rq_replay(ctypes.addressof(self.calls), len(self.calls))
        if done < len(self.calls):
            raise IndexError("a token or an expert of a captured step is out of range")
        return self.out


def capture(
    native: Native, work: Callable[[], Tensor], memory: Tensor
) -> tuple[Tensor, CapturedCalls | None]:
    """The result of `work`, and the compiled calls that it made, or None where it did more than
    make such calls, allocate and view tensors: the result is right, but could not be had again
    without Python. memory [bytes] uint8 takes the tensors that `work` allocates; captures that are
    never replayed at the same time may share it."""
    with capturing:
        found = _Capture(native.lib, memory)
        lib = native.lib
        native.lib = found.library  # type: ignore[assignment]
        native.kept = []
        try:
            with found:
                out = work()
            kept = [*native.kept, memory]
        finally:
            native.lib = lib
            native.kept = None
    if found.why_not:
        log.debug("a decode step is not captured: %s", found.why_not)
        return out, None
    return out, CapturedCalls(lib, found.calls, kept, out)


class _Capture(TorchDispatchMode):
    """Sees every torch operator of its thread, and through `library` every compiled call."""

    def __init__(self, lib: ctypes.CDLL, memory: Tensor):
        super().__init__()
        self.memory = memory
        self.used = 0
        self.calls: list[_Call] = []
        self.why_not = ""
        self.thread = threading.get_ident()
        self.library = _CapturingLibrary(lib, self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler, a second's work, to keep it from compiling this."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            return self._placed(made)
        if not _is_view(func, args, made):
            self.why_not = self.why_not or f"it calls {func}"
        return made

    def _placed(self, made: Tensor) -> Tensor:
        """The same tensor in the memory of captures."""
        start = self.used
        size = made.numel() * made.element_size()
        self.used += -(-size // ALIGNMENT) * ALIGNMENT
        if self.used > self.memory.numel():
            self.why_not = self.why_not or f"its tensors take over {self.memory.numel()} bytes"
            return made
        return self.memory[start : start + size].view(made.dtype).view(made.shape)

    def note(self, name: str, function: int, arguments: Sequence[Any], result: int | None) -> None:
        if function < 0:
            self.why_not = self.why_not or f"it calls {name}"
            return
        words = [
            _word(value, kind) for value, kind in zip(arguments, SIGNATURES[name], strict=True)
        ]
        words += [0] * (MOST_ARGUMENTS - len(words))
        self.calls.append(_Call(function, result or 0, (ctypes.c_int64 * MOST_ARGUMENTS)(*words)))


class _CapturingLibrary:
    """In place of the library while calls are captured; those of other threads pass through."""

    def __init__(self, lib: ctypes.CDLL, found: _Capture):
        self._lib = lib
        self._found = found

    def __getattr__(self, name: str) -> Callable[..., int | None]:
        function = getattr(self._lib, name)
        found = self._found
        number = self._lib.rq_capturable(name.encode())

        def call(*arguments: Any) -> int | None:
            result: int | None = function(*arguments)
            if threading.get_ident() == found.thread:
                found.note(name, number, arguments, result)
            return result

        return call


def _word(value: Any, kind: Any) -> int:
    """An argument as 64 bits."""
    if kind is ctypes.c_double:
        (bits,) = struct.unpack("q", struct.pack("d", value))
        return int(bits)
    return int(value)


def _is_view(func: Any, args: Sequence[Any], made: Any) -> bool:
    """Whether an operator has returned its argument or views of it, and written nothing. Some that
    may do so copy where they must (contiguous, reshape, to), which only the memory tells."""
    returned = func._schema.returns
    if not all(one.alias_info and not one.alias_info.is_write for one in returned):
        return False
    views = [made] if isinstance(made, Tensor) else made
    given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
    return all(view.untyped_storage().data_ptr() in given for view in views)
