"""Files that commands write, and what they print: mistakes are said before the work, a full disk
after it, and nothing is half written."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import SHUT_WR, create_server

import pytest
from typer.testing import CliRunner

from rorqual.bench.offline.work import OfflineWork
from rorqual.cli import bench
from rorqual.cli.app import app
from rorqual.cli.output import check_output, write_output
from rorqual.cli.remote import answer, served_model
from rorqual.errors import ConfigError, RorqualError, TargetError, WriteError
from rorqual.planner.search import planner
from rorqual.planner.simulator.simulator import Simulation

WORK = "--requests 2 --arrivals at-once --input-len 64 --output-len 4"
PLAN = "plan qwen3-30b-a3b --count 1 --no-splits"
SIMULATE = f"simulate qwen3-30b-a3b --gpu h20-96 {WORK}"
WRITING = [
    f"{PLAN} --csv",
    f"{PLAN} --png",
    f"{PLAN} --yaml",
    f"{SIMULATE} --json",
    f"{SIMULATE} --gantt",
    "eplb counts.json --ep 4 --write",
    "bench serve --json",
    "bench serve --chart",
    "bench offline --json",
    "bench offline --expert-load",
    "bench comm --json",
    "bench peers --results",
    "bench peers --table --chart",
    "bench calibrate --full --based-on h200 --out",
    "bench steps --based-on h200 --out",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands run; the work itself is not to begin."""
    counts = [[1, 2, 3, 4, 5, 6, 7, 8]]
    (tmp_path / "counts.json").write_text(json.dumps({"logical_count": counts}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(text: str, kind: type[RorqualError] = ConfigError) -> str:
    with pytest.raises(kind) as found:
        CliRunner().invoke(app, text.split(), catch_exceptions=False)
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize("command", WRITING)
def test_a_missing_folder_is_said_before_the_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def work(*given: object) -> None:
        pytest.fail("the work began")

    monkeypatch.setattr(planner, "search", work)
    monkeypatch.setattr(Simulation, "run", work)
    said = refused(f"{command} {folder}/no/x.html")
    flag = command.split()[-1]
    assert said.startswith(f"{flag}='{folder}/no/x.html")
    assert said.endswith(f"cannot be written: there is no folder '{folder}/no'")
    assert not (folder / "no").exists()


def test_a_file_that_is_only_read_needs_no_place_to_write() -> None:
    asked = {"single_rank_bench": True}
    found = bench._load_options(OfflineWork(expert_load=Path("/no/counts.json")), asked)
    assert found["simulated_expert_load"] == "/no/counts.json"


def test_places_where_nothing_can_be_written(folder: Path) -> None:
    for path, why in (
        ("/proc/x", "no such file|permission denied"),
        (str(folder), "it is a folder"),
        ("counts.json/x", "there is no folder"),
        (".", "it is a folder"),
        ("x" * 300, "name too long"),
    ):
        with pytest.raises(ConfigError, match=f"^--json='{path}' cannot be written: .*(?i:{why})"):
            check_output(Path(path), "--json")
    before = sorted(folder.iterdir())
    for path in ("new.json", "counts.json", "/dev/null"):
        check_output(Path(path), "--json")
    assert sorted(folder.iterdir()) == before


def test_endings_of_charts_are_checked_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simulation, "run", lambda run: pytest.fail("the run began"))
    assert "x.pdf has no known ending" in refused(f"{SIMULATE} --gantt x.pdf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "need matplotlib" in refused(f"{SIMULATE} --gantt x.png")
    assert "needs matplotlib" in refused(f"{PLAN} --png x.png")


@pytest.mark.parametrize(
    "command",
    [
        f"{PLAN} --csv /dev/full",
        f"{PLAN} --yaml /dev/full",
        f"{SIMULATE} --json /dev/full",
        "eplb counts.json --ep 4 --write /dev/full",
    ],
)
def test_a_full_disk_is_said_after_the_work(folder: Path, command: str) -> None:
    assert refused(command, WriteError) == "/dev/full cannot be written: No space left on device"
    assert WriteError("").status == 1


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """Files end at so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_does_not_fit_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with (
        small_files(1000),
        pytest.raises(WriteError, match=r"run\.json cannot be written: File too"),
    ):
        write_output(path, "x" * 2000)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# ---- standard output


def ended(command: str, target: str) -> tuple[int, str]:
    """(status, what was said) of a command that prints to a file."""
    with open(target, "wb") as file:
        done = subprocess.run(
            [sys.executable, "-m", "rorqual", *command.split()],
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", ["version", "info", "generate --threads 1 -q -n 4", "--help"])
def test_output_that_cannot_be_written_is_one_sentence(command: str) -> None:
    said = "rorqual: output cannot be written: No space left on device\n"
    assert ended(command, "/dev/full") == (1, said)


def test_a_mistake_is_said_once_where_output_is_full() -> None:
    status, said = ended("info --memory -1", "/dev/full")
    assert status == 2
    assert said.startswith("rorqual: --memory=-1.0 is out of range")
    assert said.count("\n") == 1


def test_a_reader_that_is_gone_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as file:
        command = [sys.executable, "-m", "rorqual", "version"]
        done = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, timeout=300)
    assert done.returncode in (1, 141)
    assert done.stderr == b""


# ---- chat --url


@pytest.mark.parametrize("url", ["foo", "", "http:/x", "ftp://there"])
def test_what_is_no_address_is_said(url: str) -> None:
    with pytest.raises(TargetError, match=f"^url='{url}' is no address of a server; accepted: "):
        CliRunner().invoke(app, ["chat", "--url", url], catch_exceptions=False)


@pytest.mark.parametrize("url", ["http://a:b", "http://a b", "http://[::1", "http://x..y"])
def test_addresses_that_name_nothing(url: str) -> None:
    for ask in (served_model, lambda url: list(answer(url, {}))):
        with pytest.raises(TargetError) as found:
            ask(url)
        assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\n[]",
        b"HTTP/1.0 200 OK\r\n\r\ndata: {\n\n",
        b'HTTP/1.0 200 OK\r\n\r\ndata: {"choices": [1]}\n\n',
    ],
)
def test_another_kind_of_server_is_said(reply: bytes) -> None:
    with create_server(("127.0.0.1", 0)) as listener:

        def respond() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(reply)
                    connection.shutdown(SHUT_WR)
                    while connection.recv(65536):  # closed with data unread, it would be reset
                        pass

        thread = threading.Thread(target=respond)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TargetError, match="is no server of the OpenAI API"):
            served_model(url)
        if b"[]" in reply:  # nothing that a stream would show
            assert list(answer(url, {})) == []
        else:
            with pytest.raises(TargetError, match="is no server of the OpenAI API"):
                list(answer(url, {}))
        thread.join()


def test_a_key_is_not_said_back() -> None:
    with pytest.raises(TargetError) as found:
        served_model("http://127.0.0.1:9", "secret\nkey")
    assert "secret" not in str(found.value)
