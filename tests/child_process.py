"""Processes that tests start: their environment, those that compile kernels, and how one is made
to stand still."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
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


def stand_still(pid: int, seconds: float = 60.0) -> None:
    """SIGSTOP, and back once every thread has stopped: until then some may go on for a moment.
    A process that has ended counts as standing still."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        while any(_state(task) not in "TtZX" for task in Path(f"/proc/{pid}/task").iterdir()):
            assert time.monotonic() < deadline, f"process {pid} goes on after SIGSTOP"
            time.sleep(0.005)


def _state(task: Path) -> str:
    """Of a thread: T where it was stopped, X where it is no more."""
    try:
        return (task / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
