"""What a kernel's entry function compiles to for sm_90, for ptx_interpreter.py; and what a test
may break in it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from tests.child_process import output_of_compiler

BEFORE = """
import json
import torch
from rorqual.ops.reference import FP8, Weight
from rorqual.ops.activation import Quantized
from tests.emulation.cross_compile import SHARED, compiling
def quantized(tokens, columns):
    return Quantized(torch.empty(tokens, columns, dtype=FP8), torch.empty(columns // 128,
        tokens).t())
def block_fp8(rows, columns):
    return Weight(torch.empty(rows, columns, dtype=FP8), torch.empty(-(-rows // 128),
        columns // 128))
with compiling(90) as launched:
"""
AFTER = """
found = [[kernel.name, kernel.ptx, kernel.resources()["shared"]] for kernel in launched]
json.dump(found, open({folder!r} + "/kernels.json", "w"))
"""


@dataclass
class Kernel:
    name: str
    ptx: str
    shared: int


def compiled(launches: str, folder: Path, checks: str = "") -> list[Kernel]:
    """launches: Python whose launches are compiled; checks: Python that may look at `launched`
    afterwards."""
    inside = "\n".join("    " + line for line in launches.strip().splitlines())
    after = AFTER.replace("{folder!r}", repr(str(folder)))
    code = BEFORE + inside + "\n" + checks + after
    output_of_compiler("-c", code, TRITON_CACHE_DIR=str(folder))
    return [Kernel(*found) for found in json.loads((folder / "kernels.json").read_text())]


def assembled(kernel: Kernel, folder: Path) -> str:
    """What the assembler says of it."""
    (folder / "kernel.ptx").write_text(kernel.ptx)
    command = [
        str(Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"),
        "-v",
        "--gpu-name=sm_90a",
    ]
    return subprocess.run(
        [*command, str(folder / "kernel.ptx"), "-o", "/dev/null"],
        capture_output=True,
        text=True,
        check=True,
    ).stderr


def run_time(*arguments: Any) -> list[Any]:
    """Without those that are constants of the compiled kernel: what is absent, and ones."""
    return [x for x in arguments if x is not None and not (isinstance(x, int) and x == 1)]


def caught(changed: Iterable[str], run: Callable[[str], object]) -> int:
    """How many of the changed programs `run` finds wrong."""
    found = 0
    for ptx in changed:
        try:
            run(ptx)
        except AssertionError:
            found += 1
    return found


def changes(ptx: str, pattern: str, by: str = "") -> Iterator[str]:
    """One text for each place where the pattern is found, with that place changed."""
    for match in re.finditer(pattern, ptx):
        yield ptx[: match.start()] + match.expand(by) + ptx[match.end() :]
