"""Engine processes that are begun before anybody knows what they are to be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rorqual.cli import main
from rorqual.serve.engines import begin, engine_main
from rorqual.serve.engines.begin import EarlyEngines, begin_engine, early_engines

pytest.importorskip("zmq")


def test_who_is_told_nothing_ends_quietly() -> None:
    """An interrupt of the whole group while it imports is not its to answer."""
    process = begin_engine()
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_who_is_not_taken_ends_with_its_server() -> None:
    with EarlyEngines() as early:
        early.begin(2)
        assert early.began is not None
        first, second = early.waiting
        taken = early.take()
        assert taken is first
        another = EarlyEngines()
        assert another.began is None
    try:
        assert second.poll() is not None
        assert taken.poll() is None
    finally:
        taken.kill()
        taken.communicate()


def test_more_are_begun_beside_the_first() -> None:
    with EarlyEngines() as early:
        early.begin(1)
        (first,) = early.waiting
        early.begin(2)
        assert early.take() is first
        first.kill()
        first.communicate()
        early.begin(1)
        assert len(early.waiting) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("serve", True),
        ("serve some/model --port 80", True),
        ("serve --help", False),
        ("bench serve", False),
        ("", False),
    ],
)
def test_a_command_line_that_serves_begins_one(
    words: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main.will_serve(words.split()) is expected
    monkeypatch.setenv("RANK", "0")  # of torchrun
    assert not main.will_serve(words.split())


@pytest.mark.parametrize(
    ("words", "status"), [(["--no-such-option"], 2), (["/no/such/folder"], 2), (["--config"], 2)]
)
def test_a_mistake_in_the_options_leaves_no_engine(
    words: list[str], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[begin.Process] = []

    def noted() -> begin.Process:
        begun.append(begin_engine())
        return begun[-1]

    monkeypatch.setattr(begin, "begin_engine", noted)
    monkeypatch.setattr(main, "end_process", sys.exit)
    monkeypatch.setattr(sys, "argv", ["rorqual", "serve", *words])
    monkeypatch.delenv("RANK", raising=False)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(SystemExit) as ended:
            main.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert ended.value.code == status
    (process,) = begun
    assert process.returncode is not None
    assert early_engines().waiting == []


@pytest.mark.parametrize(
    ("initialized", "hashes"), [(None, 0), (100, 0), (0, 1)], ids=["no driver", "no GPU", "a GPU"]
)
def test_what_begins_while_torch_is_imported(
    initialized: int | None, hashes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    asked: list[str] = []

    def load(name: str) -> SimpleNamespace:
        asked.append(name)
        if initialized is None:
            raise OSError(name)
        return SimpleNamespace(cuInit=lambda flags: initialized)

    def fail() -> str:
        asked.append("hash")
        raise PermissionError("its files")

    monkeypatch.setattr(engine_main, "ctypes", SimpleNamespace(CDLL=load))
    monkeypatch.setattr(cache, "triton_key", fail)
    engine_main.head_start()
    assert asked == ["libcuda.so.1", *["hash"] * hashes]


def test_signals_are_this_process_s_own_again() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    process = begin_engine()
    process.kill()
    process.communicate()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_server_that_is_killed_takes_it_along() -> None:
    code = "import os, signal, time\n"
    code += "from rorqual.serve.engines.begin import begin_engine\n"
    code += "process = begin_engine()\ntime.sleep(0.5)\nos.kill(os.getpid(), signal.SIGKILL)"
    server = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    assert server.wait(60) == -signal.SIGKILL
    deadline = time.monotonic() + 1  # importing torch takes longer
    while engines_of(server.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert engines_of(server.pid) == []


def engines_of(group: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(path.name)) != group:
                continue
            state = (path / "stat").read_text().rsplit(")", 1)[1].split()[0]
            if state != "Z":  # ended; its new parent has not asked for the status yet
                found.append(int(path.name))
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.5, 1.2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_of_the_group_at_any_moment(number: signal.Signals, seconds: float) -> None:
    """As Ctrl-C at a terminal: nothing is left, and at most the server itself says that it ends."""
    words = [sys.executable, "-m", "rorqual", "serve", "--port", "0", "--threads", "1"]
    words += ["--num-pages", "64"]
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    time.sleep(seconds)
    os.killpg(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert "engines/engine_" not in said, said
    deadline = time.monotonic() + 10
    while engines_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engines_of(process.pid) == []
