"""The compiled kernels of another processor in the place of this one's: compiled by a cross
compiler, run by an emulator, called over a pipe. Tests of `Native` run on them as they are."""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from rorqual.ops.cpu import native, quantized

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
# for each processor of the emulator: the instructions that the compiler may use
AARCH64 = {"cortex-a72": "armv8-a", "max": "armv8.2-a+dotprod+i8mm+bf16"}
LEFT_OUT = ("-shared", "-fPIC", native.THIS_PROCESSOR)
# which arguments point to what: words of a struct, or so many numbers of eight bytes
STRUCTS: dict[str, dict[int, Any]] = {
    "rq_mla_prologue": {1: native._MlaLayer},
    "rq_mla_absorbed": {1: native._MlaLayer},
    "rq_route": {2: native._Router},
    "rq_linear_packed": {1: quantized._Packed},
    "rq_mlp_packed": {1: quantized._Packed, 2: quantized._Packed},
    "rq_mla_prologue_packed": {1: native._MlaLayer, 2: quantized._Packed, 3: quantized._Packed},
    "rq_experts_packed": {1: quantized._Packed, 2: quantized._Packed},
    "rq_causal": {4: ctypes.c_int64 * 4},
}


@functools.cache
def build(processor: str) -> Path:
    """A program that runs without the processor's own libraries."""
    source = Path(__file__).with_name("remote.cpp")
    folder = tempfile.mkdtemp(prefix="rorqual-remote-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = Path(folder) / "kernels"
    flags = [flag for flag in native.FLAGS if flag not in LEFT_OUT]
    flags += ["-static", f"-march={AARCH64[processor]}", f"-I{native.SOURCE.parent}"]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(made)], check=True)
    return made


class Remote:
    """In the place of the library that `native.library` loads."""

    def __init__(self, process: subprocess.Popen[bytes]):
        assert process.stdin is not None
        assert process.stdout is not None
        self.to = process.stdin
        self.answers = process.stdout
        self.sizes: dict[int, int] = {}  # bytes from an address on that a tensor covers

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("rq_"):
            raise AttributeError(name)
        return lambda *given: self.call(name, given)

    def call(self, name: str, given: tuple[Any, ...]) -> int:
        types = native.SIGNATURES[name]
        assert len(types) == len(given)
        structs = STRUCTS.get(name, {})
        parts = [struct.pack("<q", len(name)), name.encode(), struct.pack("<q", len(given))]
        for i, (kind, value) in enumerate(zip(types, given, strict=True)):
            parts.append(self.struct(structs[i], value) if i in structs else self.word(kind, value))
        self.to.write(b"".join(parts))
        self.to.flush()
        (result,) = struct.unpack("<q", self.read(8))
        for i, (kind, value) in enumerate(zip(types, given, strict=True)):
            if kind is ctypes.c_void_p and value and i not in structs:
                ctypes.memmove(value, self.read(self.sizes[value]), self.sizes[value])
        return int(result)

    def read(self, size: int) -> bytes:
        found = self.answers.read(size)
        assert len(found) == size, "the kernels' process has ended"
        return found

    def word(self, kind: Any, value: Any) -> bytes:
        if kind is ctypes.c_double:
            return b"d" + struct.pack("<d", value)
        if kind is not ctypes.c_void_p:
            return b"i" + struct.pack("<q", value)
        if not value:
            return b"0"
        size = self.sizes[value]
        return b"b" + struct.pack("<q", size) + ctypes.string_at(value, size)

    def struct(self, kind: Any, address: int) -> bytes:
        found = kind.from_address(address)
        if isinstance(found, ctypes.Array):
            words = [self.word(kind._type_, number) for number in found]
        else:
            words = [self.word(field, getattr(found, name)) for name, field in kind._fields_]
        return b"s" + struct.pack("<q", len(words)) + b"".join(words)


def need_tools() -> None:
    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool}: apt install g++-aarch64-linux-gnu qemu-user")


@contextmanager
def kernels_of(processor: str) -> Iterator[Remote]:
    """The kernels of a processor that is emulated here; skips where the tools are missing."""
    need_tools()
    command = [EMULATOR, "-cpu", processor, str(build(processor))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        remote = Remote(process)
        address = Tensor.data_ptr

        def noted(tensor: Tensor) -> int:
            found = address(tensor)
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((size - 1) * step for size, step in steps)
            size = (last + 1) * tensor.element_size() if tensor.numel() else 0
            remote.sizes[found] = size
            return found

        with mock.patch.object(Tensor, "data_ptr", noted):
            yield remote
        remote.to.close()
        assert process.wait(60) == 0
