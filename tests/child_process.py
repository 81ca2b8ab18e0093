"""Environments of processes that tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python_path() -> str:
    """This tree, and behind it what is there already: another Triton may be tried by that."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def compiler_environment(**changes: str) -> dict[str, str]:
    """Where kernels are compiled and not interpreted: a process that imports Triton asks for the
    one or the other before."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return {**own, "PYTHONPATH": python_path(), **changes}
