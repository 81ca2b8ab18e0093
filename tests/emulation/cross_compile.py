"""Compile what entry functions launch, for a GPU that is not there.

`compiling(80)` swaps Triton's driver for one that names a target of that compute capability and
turns every launch into a compilation: the entry functions run on CPU tensors, whose contents nobody
reads. Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from rorqual.ops.triton.runtime import launch

# bytes a block may ask for, by compute capability
SHARED = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


class AbsentDriver:
    def __init__(self, capability: int):
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass
class Compiled:
    name: str
    kernel: Any
    constants: dict[str, Any]

    @property
    def ptx(self) -> str:
        return self.kernel.asm["ptx"]

    def resources(self) -> dict[str, int]:
        """registers, stack bytes (spills) and shared memory, from the machine code."""
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        with NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.kernel.asm["cubin"])
            file.flush()
            text = subprocess.run(
                [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        found = dict(re.findall(r"(REG|STACK):(\d+)", text))
        return {
            "registers": int(found["REG"]),
            "stack": int(found["STACK"]),
            "shared": self.kernel.metadata.shared,
        }

    def figures(self, words: Iterable[str]) -> dict[str, int]:
        """Its resources, and how often each word stands in its PTX."""
        return {**self.resources(), **{word: self.ptx.count(word) for word in words}}


@contextlib.contextmanager
def compiling(capability: int) -> Iterator[list[Compiled]]:
    """Collects one Compiled a launch. capability: a key of SHARED."""
    found: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        found.append(Compiled(self.__name__, kernel, kwargs))
        return kernel

    def hopper(device: torch.device) -> bool:
        return capability == 90

    before = driver._active
    driver.set_active(AbsentDriver(capability))
    patches = [mock.patch.object(JITFunction, "run", compile_only)]
    for module in _users_of_hopper():
        patches.append(mock.patch.object(module, "is_hopper", hopper))
    try:
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            yield found
    finally:
        driver._active = before


def _users_of_hopper() -> list[Any]:
    import sys

    return [
        m
        for n, m in sys.modules.items()
        if n.startswith("rorqual.ops.triton") and getattr(m, "is_hopper", None) is launch.is_hopper
    ]
