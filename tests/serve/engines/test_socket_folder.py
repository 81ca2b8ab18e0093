"""Folders of sockets: whose are removed, and whose are not."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rorqual.config.locked_folder import LOCK, STORE, YOUNG_SECONDS, LockedFolder, sweep
from rorqual.serve.engines.pool import EngineFailure, EnginePool, EngineSlot
from rorqual.serve.limits import ServerLimits


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def aged(folder: Path) -> Path:
    then = os.stat(folder / LOCK).st_mtime - YOUNG_SECONDS - 1
    os.utime(folder / LOCK, (then, then))
    return folder


def killed(parent: Path) -> Path:
    """The folder of a server that was killed while it served."""
    code = (
        "import os, signal, tempfile, zmq\n"
        f"tempfile.tempdir = {str(parent)!r}\n"
        "from rorqual.config.locked_folder import LockedFolder\n"
        "folder = LockedFolder()\n"
        "bound = zmq.Context().socket(zmq.PULL)\n"
        "bound.bind(f'ipc://{folder.path}/engine-0-0-in')\n"
        "print(folder.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout
    return Path(out.strip())


def test_what_a_killed_server_left_goes_when_the_next_starts(parent: Path):
    left = aged(killed(parent))
    assert {path.name for path in left.iterdir()} == {LOCK, "engine-0-0-in"}
    pool = EnginePool([{}], ServerLimits())
    assert not left.exists()
    assert oct(pool.folder.stat().st_mode & 0o777) == "0o700"
    pool.kill()
    pool.kill()
    assert list(parent.iterdir()) == []


def test_what_killed_ranks_left_goes_as_well(parent: Path):
    code = (
        "import os, signal, tempfile\n"
        f"tempfile.tempdir = {str(parent)!r}\n"
        "from rorqual.config.locked_folder import STORE, LockedFolder\n"
        "folder = LockedFolder('ranks-')\n"
        "(folder.path / STORE).write_text('came')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code])
    (left,) = parent.iterdir()
    assert left.name.startswith("rorqual-ranks-")
    assert {path.name for path in left.iterdir()} == {LOCK, STORE}
    aged(left)
    LockedFolder().remove()
    assert list(parent.iterdir()) == []


def test_a_server_that_runs_keeps_its_own(parent: Path):
    running = LockedFolder()
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(running.path / "in"))
    aged(running.path)
    LockedFolder().remove()
    assert (running.path / "in").exists()
    bound.close()
    running.remove()
    assert list(parent.iterdir()) == []


def without_lock(folder: Path) -> None:
    (folder / LOCK).unlink()


def young(folder: Path) -> None:
    os.utime(folder / LOCK)


def lock_elsewhere(folder: Path) -> None:
    (folder / LOCK).rename(folder / "other")
    (folder / LOCK).symlink_to("other")


def with_a_file(folder: Path) -> None:
    (folder / "notes.txt").write_text("")


def a_link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize(
    "change", [without_lock, young, lock_elsewhere, with_a_file, a_link], ids=lambda f: f.__name__
)
def test_what_may_be_anothers_stays(parent: Path, change: Callable[[Path], None]):
    folder = aged(killed(parent))
    change(folder)
    sweep(parent)
    assert folder.exists()
    assert change is not with_a_file or (folder / "notes.txt").exists()


@pytest.mark.parametrize(("restart", "lines"), [(False, 0), (True, 1)])
def test_the_end_of_an_engine_is_logged_by_one(
    parent: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    restart: bool,
    lines: int,
):
    """Without restart whoever waits for the pool logs its failure."""
    pool = EnginePool([{}], ServerLimits(), restart)

    async def live(engine: EngineSlot) -> int:
        pool.stopping = engine.deaths == 1
        return 9

    monkeypatch.setattr(pool, "_run_process", live)
    monkeypatch.setattr("rorqual.serve.engines.pool.BACKOFF", (0.0,))
    with caplog.at_level(logging.INFO, "rorqual.serve"):
        try:
            asyncio.run(pool.run())
        except ExceptionGroup as group:
            (error,) = group.exceptions
            assert isinstance(error, EngineFailure)
            assert "exit status 9" in str(error)
        else:
            assert restart
    assert len(caplog.records) == lines
    pool.kill()
