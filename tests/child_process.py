"""Environments of processes that tests start, and processes that compile kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python_path() -> str:
    """This tree, and behind it what is there already: another Triton may be tried by that."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def environment(**changes: str) -> dict[str, str]:
    """This process's, with this tree to import from."""
    return {**os.environ, "PYTHONPATH": python_path(), **changes}


def compiler_environment(**changes: str) -> dict[str, str]:
    """Where kernels are compiled and not interpreted: a process that imports Triton asks for the
    one or the other before."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**own, "PYTHONPATH": python_path(), **changes}


def output_of_compiler(*arguments: str, **changes: str) -> str:
    """What Python prints, started with these arguments to compile kernels."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env=compiler_environment(**changes),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
