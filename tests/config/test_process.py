"""The end of a process that had process groups."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.child_process import python_path

# A thread is in collectives, again and again, whenever the process ends.
IN_A_COLLECTIVE = """
    import threading
    import torch, torch.distributed as dist
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    begun = threading.Event()
    def reduce():
        while True:
            dist.all_reduce(torch.ones(4))
            begun.set()
    threading.Thread(target=reduce, daemon=True).start()
    begun.wait()
"""


def run(code: str, before: str = "") -> subprocess.CompletedProcess[str]:
    whole = "from rorqual.config.process import end_process\n" + textwrap.dedent(before)
    return subprocess.run(
        [sys.executable, "-c", whole + textwrap.dedent(code)],
        env={"PYTHONPATH": python_path(), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_handlers_run_and_what_was_written_arrives(tmp_path: Path) -> None:
    code = f"""
        import atexit, logging, sys, tempfile
        atexit.register(print, "a handler", end="")
        folder = tempfile.TemporaryDirectory(dir={str(tmp_path)!r})
        logging.basicConfig(filename={str(tmp_path / "log")!r}, level=logging.INFO)
        logging.info("a line")
        print("no end of a line, ", end="")
        end_process(7)
    """
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (7, "no end of a line, a handler", "")
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    assert "a line" in (tmp_path / "log").read_text()


def test_output_that_nobody_reads_is_said_by_the_status() -> None:
    code = """
        import os, sys
        end, theirs = os.pipe()
        os.dup2(theirs, 1)
        os.close(theirs)
        os.close(end)
        print("lost")
        end_process(int(sys.argv[1]))
    """
    for given, found in ((0, 120), (3, 3)):
        assert run(code.replace("sys.argv[1]", str(given))).returncode == found


@pytest.mark.exhaustive
def test_a_thread_in_a_collective_does_not_abort_the_end() -> None:
    for _ in range(5):
        done = run("end_process(3)", IN_A_COLLECTIVE)
        assert (done.returncode, done.stderr) == (3, "")
