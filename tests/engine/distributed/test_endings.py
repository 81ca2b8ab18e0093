"""How rank processes end: in order and with status 0; with an interrupted command; and when they
are killed while they are told to stop."""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from socket import socketpair
from typing import Any

import pytest

from rorqual import LLM, SamplingParams
from rorqual.engine.distributed.channel import Channel, FrameKind
from rorqual.engine.distributed.launchers.local import LocalLauncher
from rorqual.engine.distributed.rendezvous import Rendezvous
from rorqual.engine.distributed.worker_handle import ConnectedWorker, WorkerHandle
from rorqual.errors import ConfigError, EngineError
from rorqual.parallel.mesh import ProcessGroups
from tests.child_process import stand_still
from tests.engine.distributed.starting import (
    ENGINE,
    TEXT,
    finished,
    free_port,
    generating,
    gone,
    pids_below,
    start,
)

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 3,
    "page_size": 4,
    "threads": 1,
    "num_pages": 22,
    "weights": "random",
    "num_layers": 2,
}
STARTS = 20
FORK_SECONDS = 30  # for a child to run its first line
SHARED_MEMORY = Path("/dev/shm")


@pytest.mark.longest
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2, "ep": 2, "enable_eplb": True}])
def test_ranks_end_with_status_0_however_often_they_are_started(
    sizes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(STARTS):
        llm = LLM(**OPTIONS, **sizes)
        llm.generate([TEXT] * 2, SamplingParams(temperature=0, max_tokens=3))
        (handle,) = llm.engine.executor.handles
        llm.engine.close()
        assert handle.process.returncode == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.exhaustive
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to_all", [False, True], ids=["rank-0", "all-ranks"])
def test_an_interrupted_command_leaves_nothing(
    tmp_path: Path, blow: signal.Signals, to_all: bool
) -> None:
    """A terminal's Ctrl-C reaches every process of the command; `kill` reaches rank 0 alone."""
    shared = set(SHARED_MEMORY.iterdir())
    command = start(
        generating("local", tokens=100_000, tp=2, max_model_len=2048, num_pages=300),
        TMPDIR=str(tmp_path),
    )
    assert command.stdout is not None
    assert command.stdout.read(len(TEXT)) == TEXT
    ranks = pids_below(command.pid)
    assert len(ranks) == 1
    (os.killpg if to_all else os.kill)(command.pid, blow)
    status, _, err = finished(command)
    assert status == 128 + blow, err
    check_nothing_left(ranks, tmp_path, shared)


@pytest.mark.exhaustive
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_ranks_import_is_rank_0s_to_answer(
    tmp_path: Path, blow: signal.Signals
) -> None:
    command = start(generating("local", tp=2), TMPDIR=str(tmp_path))
    while not (ranks := pids_below(command.pid)):
        assert command.poll() is None
        time.sleep(0.001)
    os.killpg(command.pid, blow)
    status, _, err = finished(command)
    assert (status, err) == (128 + blow, "")
    check_nothing_left(ranks, tmp_path, set(SHARED_MEMORY.iterdir()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM])
def test_a_server_of_two_ranks_leaves_nothing(tmp_path: Path, blow: signal.Signals) -> None:
    shared = set(SHARED_MEMORY.iterdir())
    settings = [f"--set={name}={value}" for name, value in {**ENGINE, "tp": 2}.items()]
    port = str(free_port())
    arguments = ["-m", "rorqual", "serve", "--port", port, "--no-structured-output", *settings]
    server = start(arguments, TMPDIR=str(tmp_path))
    assert server.stderr is not None
    assert any("serving" in line for line in server.stderr)
    processes = pids_below(server.pid)
    assert len(processes) == 2, "the engine, and rank 1"
    os.killpg(server.pid, blow)
    status, _, err = finished(server)
    assert (status, err) == (0, "")
    check_nothing_left(processes, tmp_path, shared)


def check_nothing_left(pids: list[int], folder: Path, shared: set[Path]) -> None:
    assert all(gone(pid) for pid in pids)
    assert not list(folder.iterdir())
    # those of processes beside these are of other tests
    new = set(SHARED_MEMORY.iterdir()) - shared
    assert not [path for path in new if any(str(pid) in path.name for pid in pids)]


def test_a_rank_that_dies_before_it_has_come_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 does not wait for it in torch, where nothing could tell it."""
    start_ranks = LocalLauncher.start
    join = Rendezvous.join
    pids = []

    def start_and_halt(self: LocalLauncher) -> list[ConnectedWorker]:
        (joined,) = start_ranks(self)
        stand_still(joined.pid)
        pids.append(joined.pid)
        return [joined]

    def kill_and_join(self: Rendezvous, *arguments: Any) -> ProcessGroups:
        os.kill(*pids, signal.SIGKILL)
        return join(self, *arguments)

    monkeypatch.setattr(LocalLauncher, "start", start_and_halt)
    monkeypatch.setattr(Rendezvous, "join", kill_and_join)
    with pytest.raises(EngineError, match=r"rank 1 .* ended with status -9; rank 0 was loading"):
        LLM(**OPTIONS, tp=2)


def status_of_fork(work: Callable[[], int]) -> int:
    """The exit status, which `work` returns, of a child made by fork. The interpreter itself may
    hang in the child's start: the engine has threads, and one of them may have held one of its
    locks (seen with CPython 3.11.7, in PyOS_AfterFork_Child). Such a child never ran `work`, which
    would have said so; another one is made."""
    for _ in range(3):
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            status = 3
            try:
                os.write(writes, b".")
                status = work()
            finally:
                os._exit(status)
        os.close(writes)
        began = select.select([reads], [], [], FORK_SECONDS)[0] != []
        if not began:
            os.kill(child, signal.SIGKILL)
        os.close(reads)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if began:
            return status
    raise AssertionError("no child of three began to run Python")


def test_a_second_group_of_ranks_is_refused_and_a_fork_leaves_the_first_alone() -> None:
    """One process is in one group of ranks. A child made by fork neither uses nor ends it."""
    llm = LLM(**OPTIONS, tp=2)
    params = SamplingParams(temperature=0, max_tokens=3)
    (before,) = llm.generate(TEXT, params)
    with pytest.raises(ConfigError, match="in a process group already"):
        LLM(**OPTIONS, tp=2)

    def use_and_close() -> int:
        try:
            llm.generate(TEXT, params)
        except EngineError as error:
            return 0 if "belongs to process" in str(error) else 2
        finally:
            llm.engine.close()
        return 1

    assert status_of_fork(use_and_close) == 0
    (after,) = llm.generate(TEXT, params)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    llm.engine.close()


@pytest.mark.exhaustive
def test_a_rank_killed_while_it_stops_is_reported_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM(**OPTIONS, tp=2)
    (found,) = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=3))
    assert found.outputs[0].token_ids
    (handle,) = llm.engine.executor.handles
    stop_then_kill(monkeypatch, handle)
    llm.engine.close()
    assert handle.process.returncode == -signal.SIGKILL
    assert "rank 1 (pp 0, dp 0, tp 1) ended by SIGKILL when it was told to stop" in caplog.text


def stop_then_kill(monkeypatch: pytest.MonkeyPatch, handle: WorkerHandle) -> None:
    """The rank stands still from now on, and is killed as soon as it was told to stop."""
    stand_still(handle.pid)
    send = handle.channel.send

    def send_and_kill(kind: FrameKind, data: bytes = b"") -> None:
        send(kind, data)
        if kind is FrameKind.STOP:
            os.kill(handle.pid, signal.SIGKILL)

    monkeypatch.setattr(handle.channel, "send", send_and_kill)


# ---- a child of a few lines in a rank's place


def child(code: str) -> WorkerHandle:
    """A process that has `sock`, the other end of the link."""
    mine, theirs = socketpair()
    number = theirs.fileno()
    head = f"import os, signal, socket, sys; sock = socket.socket(fileno={number})\n"
    process = subprocess.Popen([sys.executable, "-c", head + code], pass_fds=[number])
    theirs.close()
    return WorkerHandle(1, "rank 1", ConnectedWorker(Channel(mine), process.pid, process=process))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("sys.exit(0)", None),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV when it was told to stop"),
        ("os.abort()", "ended by SIGABRT when it was told to stop"),
        ("sys.exit(3)", "ended with status 3 when it was told to stop"),
    ],
)
def test_what_a_rank_ended_with_is_said(code: str, words: str | None) -> None:
    handle = child(f"sock.recv(1)\n{code}")
    handle.channel.send(FrameKind.STOP)
    handle.listen()
    assert handle.wait_stopped(time.monotonic() + 60) == (words and f"rank 1 {words}")


def test_a_rank_that_does_not_stop_is_killed_and_that_is_said() -> None:
    handle = child("signal.pause()")
    handle.channel.send(FrameKind.STOP)
    said = handle.wait_stopped(time.monotonic())
    assert said == "rank 1 did not end in time when it was told to stop, and was killed"
    assert handle.process is not None
    assert handle.process.returncode == -signal.SIGKILL
