"""No compiled kernel touches what lies before or behind its arrays, nor depends on where they lie:
see page_ends.py, which runs in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NO_COMPILER = 77
KINDS = pytest.mark.parametrize("kind", ["fp32", "bf16"])

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mmap's flags are Linux'")


def run(place: str, kind: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.ops.cpu.page_ends", place, kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if done.returncode == NO_COMPILER:
        pytest.skip("no compiler")
    return done


@KINDS
def test_an_access_behind_an_array_ends_the_process(kind: str) -> None:
    """Else the other test would show nothing."""
    assert run("beyond", kind).returncode == -signal.SIGSEGV


@pytest.mark.exhaustive(but_first=True)
@KINDS
@pytest.mark.parametrize("place", ["end", "start"])
def test_kernels_stay_within_their_arrays(place: str, kind: str) -> None:
    done = run(place, kind)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 900, "calls of all kernels"
