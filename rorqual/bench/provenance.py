"""Where a figure comes from: versions, machine, GPU, commit and command line of the process
that measured."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rorqual import __version__

HIDDEN = ("--api-key", "--header")
REPOSITORY = Path(__file__).resolve().parents[2]


def client_facts(packages: Sequence[str] = ("aiohttp", "numpy")) -> dict[str, Any]:
    return {
        "rorqual": __version__,
        "git_commit": git_commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "host": {
            "system": platform.platform(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
    }


def command_line(arguments: Sequence[str]) -> list[str]:
    """With what follows --api-key and --header left out: results are shared, keys are not."""
    shown = ["rorqual"] if arguments else []
    hide = False
    for argument in arguments[1:]:
        name, equals, _ = argument.partition("=")
        shown.append("***" if hide else f"{name}=***" if equals and name in HIDDEN else argument)
        hide = argument in HIDDEN
    return shown


def git_commit() -> str | None:
    """Of the checkout the package runs from, `+` added where it has changes; None for an
    installed package."""
    if not (REPOSITORY / ".git").exists():
        return None
    commit = _output("git", "-C", str(REPOSITORY), "rev-parse", "--short=12", "HEAD")
    changes = _output("git", "-C", str(REPOSITORY), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+" if commit and changes else commit


def local_cards() -> list[str] | None:
    """Name and driver of this machine's NVIDIA GPUs; None where there are none."""
    text = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return text.splitlines() if text else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
