"""A comparison of two servers, from start to table: what is measured, kept, skipped and left
running."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rorqual.bench.peers import call, run, server_process
from rorqual.bench.peers.engines import ServerSide
from rorqual.bench.peers.results import Results
from rorqual.bench.peers.server_process import RunningServer, running_server
from rorqual.bench.peers.settings import PeerSettings
from rorqual.errors import ConfigError, TargetError

FAKE = Path(__file__).parents[1] / "serving" / "fake_openai.py"
ROWS = "6/4@2,3 poisson:6/4@50"


def fake(*more: str) -> list[str]:
    return [sys.executable, str(FAKE), "--port", "{port}", "--itl", "0.002", *more]


def settings(folder: Path, *more: str, **given: Any) -> PeerSettings:
    asked = {"rows": ROWS, "seconds": 0.5, "results": folder / "peers.jsonl"} | given
    return PeerSettings(peer="command", peer_command=shlex.join(fake(*more)), **asked)


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In place of our server another fake; what it was started with."""
    started: list[str] = []

    def command(port: int, prefix_cache: bool, most: int) -> list[str]:
        started.append(f"{prefix_cache} {most}")
        return [word.replace("{port}", str(port)) for word in fake()]

    side = ServerSide("rorqual", "default", command)
    monkeypatch.setattr(call, "our_side", lambda model, asked: side)
    return started


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def never(*_: Any) -> Iterator[RunningServer]:
        raise AssertionError("a server is started")
        yield

    monkeypatch.setattr(call, "running_server", never)


def running(word: str) -> list[str]:
    """Of this worker's processes: others run such servers at the same time."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode(errors="replace").replace("\0", " ")
            around = path.with_name("environ").read_bytes()
        except OSError:
            continue
        if worker and f"PYTEST_XDIST_WORKER={worker}\0".encode() not in around:
            continue
        if word in text:
            found.append(text)
    return found


def kept(asked: PeerSettings) -> list[tuple[str, str]]:
    return [(row.engine, row.row) for row in Results(asked.results).rows]


@pytest.mark.exhaustive
def test_pairs_are_measured_shown_and_not_measured_again(
    tmp_path: Path,
    ours: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    asked = settings(tmp_path, logs=tmp_path / "logs")
    run.run(None, asked)
    names = ["6/4@2", "6/4@3", "poisson:6/4@50"]
    assert kept(asked) == [(side, row) for side in ("command", "rorqual") for row in names]
    rows = Results(asked.results).rows
    assert len({row.call for row in rows}) == 1
    assert all(row.good and row.date and row.card for row in rows)
    peak = max(row.figures["request_throughput"] for row in rows[:2])
    rates = [row.figures["request_rate"] for row in rows if row.row.startswith("poisson")]
    assert rates == pytest.approx([peak / 2] * 2), "the same rate for both"
    for theirs, own in zip(rows[:3], rows[3:], strict=True):
        assert own.figures["num_prompts"] == theirs.figures["num_prompts"]
        assert own.api_us is not None
    page = capsys.readouterr().out
    assert "| 6/4@3 |" in page
    assert "output tokens/s at least 1.10x" in page
    assert running(str(FAKE)) == []

    ours.clear()
    run.run(None, settings(tmp_path, rows=f"{ROWS} 6/4@4"))
    assert kept(asked)[6:] == [("command", "6/4@4"), ("rorqual", "6/4@4")]
    assert len(ours) == 2 + 1, "one start for one row; the rest are its texts"
    assert capsys.readouterr().out.count("| 6/4@") == 3


def test_a_table_alone_starts_nothing(
    tmp_path: Path, ours: list[str], no_server: None, capsys: pytest.CaptureFixture[str]
):
    asked = settings(tmp_path, table=True)
    run.run(None, asked)
    assert "no pair counts" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="a server is started"):
        run.run(None, settings(tmp_path))


@pytest.mark.exhaustive
def test_rows_with_and_without_a_prefix_cache_have_a_start_each(tmp_path: Path, ours: list[str]):
    rows = {"rows": "6/4@2 prefix:6/4@2"}
    run.run(None, settings(tmp_path, **rows))
    assert {text.split()[0] for text in ours} == {"True", "False"}
    prefix = Results(tmp_path / "peers.jsonl").rows[-1]
    assert prefix.prefix_cache
    assert prefix.figures["total_input_tokens"] == 4006 * prefix.figures["num_prompts"]
    ours.clear()
    run.run(None, settings(tmp_path, prefix_cache="on", again=True, **rows))
    assert {text.split()[0] for text in ours} == {"True"}


@pytest.mark.exhaustive
def test_a_peer_that_dies_leaves_what_it_had_and_no_process(tmp_path: Path, ours: list[str]):
    asked = settings(tmp_path, "--requests", "12", rows="6/4@2,3")
    with pytest.raises(TargetError, match="6/4@3: "):
        run.run(None, asked)
    assert kept(asked) == [("command", "6/4@2")]
    assert running(str(FAKE)) == []
    assert not ours
    run.run(None, settings(tmp_path, rows="6/4@2,3"))
    assert len(kept(asked)) == 1 + 4, "a row without its pair is measured again, on both sides"


def test_an_interrupted_call_leaves_what_it_had_and_no_process(
    tmp_path: Path, ours: list[str], monkeypatch: pytest.MonkeyPatch
):
    asked = settings(tmp_path, rows="6/4@2,3")
    tell = call.PeerCall._tell
    seen: list[str] = []

    def interrupted(*arguments: Any) -> None:
        tell(*arguments)
        seen.extend(running(str(FAKE)))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(call.PeerCall, "_tell", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.run(None, asked)
    assert kept(asked) == [("command", "6/4@2")]
    assert seen
    assert running(str(FAKE)) == []


@pytest.mark.exhaustive
def test_rows_that_no_longer_fit_are_left(tmp_path: Path, ours: list[str], capfd: Any):
    asked = settings(tmp_path, budget=call.OUR_START + 5.0, rows="6/4@2")
    run.run(None, asked)
    assert len(kept(asked)) == 2
    asked = settings(tmp_path, budget=call.OUR_START - 1.0, rows="6/4@3")
    run.run(None, asked)
    assert len(kept(asked)) == 2
    assert "left for another call" in capfd.readouterr().err


def test_a_rate_needs_the_peers_peak(tmp_path: Path, ours: list[str]):
    with pytest.raises(ConfigError, match="no closed row of 6/4"):
        run.run(None, settings(tmp_path, rows="poisson:6/4@50"))


def test_ours_alone_needs_no_peer(
    tmp_path: Path, ours: list[str], capsys: pytest.CaptureFixture[str]
):
    asked = PeerSettings(peer="none", rows="6/4@2", results=tmp_path / "peers.jsonl")
    run.run(None, asked)
    assert kept(asked) == [("rorqual", "6/4@2")]
    assert "| 6/4@2 |" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="the concurrency of a row asked for"):
        run.run(None, replace(asked, offline=3))


@pytest.mark.exhaustive
def test_failed_requests_make_no_pair(
    tmp_path: Path, ours: list[str], monkeypatch: pytest.MonkeyPatch
):
    body = call.ServerTarget.body

    def refused(target: Any, prompt: Any) -> bytes:
        more = {"fake": {"fail": "status"}} if prompt.output_len == 5 else {}
        return body(call.replace(target, extra_body=more), prompt)

    monkeypatch.setattr(call.ServerTarget, "body", refused)
    monkeypatch.setattr(call, "WARM_UP_TOKENS", 2)
    asked = settings(tmp_path, rows="6/5@2 6/4@2")
    run.run(None, asked)
    assert kept(asked) == [("command", "6/5@2"), ("command", "6/4@2"), ("rorqual", "6/4@2")]
    assert not Results(asked.results).rows[0].good


# ---- a server's processes


def started(script: str, log: Path, seconds: float = 20.0) -> Any:
    return running_server(lambda port: [sys.executable, "-c", script, str(port)], log, seconds)


def test_a_server_that_never_gets_ready_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mark = f"time.sleep({1000 + os.getpid()})"
    child = f"[sys.executable, '-c', 'import time, signal; {mark}']"
    script = f"""
import subprocess, sys, time
subprocess.Popen({child}, start_new_session=True)
subprocess.Popen({child}, env={{}})
print("still compiling", flush=True)
{mark}
"""
    with (
        pytest.raises(TargetError, match=r"does not get ready:\nstill compiling"),
        started(script, tmp_path / "log", 1.0),
    ):
        raise AssertionError("never")
    assert running(mark) == []


def test_a_server_that_will_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_process, "STOP_SECONDS", 0.3)
    script = f"""
import runpy, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.argv = ["fake", "--port", sys.argv[1]]
runpy.run_path({str(FAKE)!r}, run_name="__main__")
"""
    with started(script, tmp_path / "log") as server:
        assert not server.lost()
        used = server.processor_seconds()
        assert used is not None
        assert used > 0
    assert server.lost()
    assert server.processor_seconds() is None


def test_a_server_that_ends_at_once_says_why(tmp_path: Path):
    with (
        pytest.raises(TargetError, match=r"ended with 3:\nno card here"),
        started("print('no card here'); raise SystemExit(3)", tmp_path / "log"),
    ):
        raise AssertionError("never")
    with (
        pytest.raises(TargetError, match="cannot be started"),
        running_server(lambda port: ["/nowhere/python"], tmp_path / "log", 1.0),
    ):
        raise AssertionError("never")


def test_a_server_ends_with_the_benchmark(tmp_path: Path):
    script = f"""
import os, signal, sys
from pathlib import Path
from rorqual.bench.peers.server_process import running_server
command = lambda port: [sys.executable, {str(FAKE)!r}, "--port", str(port)]
with running_server(command, Path({str(tmp_path / "log")!r}), 20.0) as server:
    print(server.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 10
    while server_process._alive(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not server_process._alive(int(done.stdout))


@pytest.mark.exhaustive
def test_a_chart_of_both(tmp_path: Path, ours: list[str]):
    chart = tmp_path / "pareto.png"
    run.run(None, settings(tmp_path, rows="6/4@2,3 7/4@2", chart=chart))
    assert chart.stat().st_size > 10_000
    page = chart.with_suffix(".html").read_text()
    assert "rorqual 9.8.7" in page
    assert "command 9.8.7" in page
    assert "6/4 in/out" in page
    run.run(None, PeerSettings(peer="none", table=True, results=tmp_path / "peers.jsonl"))
