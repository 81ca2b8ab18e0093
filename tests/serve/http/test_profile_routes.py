"""Profiles of a running server: who may ask for one, what may be asked, and that the files are
whole and the requests beside it unhurt."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from rorqual.engine import step_trace
from rorqual.errors import ConfigError
from rorqual.serve import launch
from rorqual.serve.config import ServeConfig
from rorqual.serve.http.app import create_app
from rorqual.serve.http.tracing import routes
from rorqual.serve.messages import TraceDone
from tests.serve.running import Running, start_server

HERE = ("127.0.0.1", 5000)
KEY = {"authorization": "Bearer s3cret"}


class Engine:
    """Stands for an engine's client: notes what is asked, ends when told."""

    def __init__(self, index: int = 0):
        self.index = index
        self.asked: list[tuple[str, int]] = []
        self.ready = SimpleNamespace(is_set=lambda: True)
        self.error = ""

    def start_trace(self, prefix: str, steps: int) -> asyncio.Future[TraceDone]:
        self.asked.append((prefix, steps))
        self.end = asyncio.get_running_loop().create_future()
        return self.end

    def stop_trace(self) -> None:
        path = Path(self.asked[-1][0] + ".json.gz")
        if not self.error:
            path.write_bytes(b"")
        self.end.set_result(TraceDone([str(path)], [self.error] if self.error else []))


def client_of(api: Any, folder: Path, key: str | None = None, host: Any = HERE) -> TestClient:
    return TestClient(create_app(api, key, folder), client=host, raise_server_exceptions=False)


@pytest.fixture
def api() -> Iterator[Any]:
    from tests.serve.http.test_text_routes import TOKENIZER, Api, EnginePool, ServerLimits

    pool = EnginePool([{}], ServerLimits())
    pool.engines[0].client = Engine()  # type: ignore[assignment]
    served = SimpleNamespace(names=("m",), tokenizer=TOKENIZER)
    yield Api(served, pool, ServerLimits(), "1", {"engine": {}})  # type: ignore[arg-type]
    pool.engines[0].client = None
    pool.kill()


def status_and_message(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json().get("error", {}).get("message", "")


def test_only_where_a_folder_was_given(api: Any) -> None:
    app = TestClient(create_app(api, None), client=HERE)
    assert app.post("/start_profile", json={}).status_code == 404
    assert app.post("/stop_profile").status_code == 404


@pytest.mark.parametrize("host", ["10.0.0.7", "testclient", "::ffff:10.0.0.7", "fe80::1"])
def test_only_from_this_machine(api: Any, tmp_path: Path, host: str) -> None:
    client = client_of(api, tmp_path, host=(host, 1))
    for path in ("/start_profile", "/stop_profile"):
        status, message = status_and_message(client.post(path))
        assert status == 403
        assert "from another address" in message
    assert not api.pool.engines[0].client.asked


@pytest.mark.parametrize("header", ["x-forwarded-for", "Forwarded", "Origin", "via", "x-real-ip"])
def test_nobody_passes_it_on(api: Any, tmp_path: Path, header: str) -> None:
    """A proxy on this machine has its address, and so has a browser with a stranger's page."""
    answer = client_of(api, tmp_path).post("/start_profile", headers={header: "127.0.0.1"})
    assert status_and_message(answer)[0] == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_the_key_is_asked_for_as_well(api: Any, tmp_path: Path, host: str) -> None:
    with client_of(api, tmp_path, "s3cret", (host, 1)) as client:
        assert client.post("/start_profile", json={}).status_code == 401
        assert client.post("/stop_profile").status_code == 401
        assert client.post("/start_profile", headers=KEY, json={}).status_code == 200


def test_one_at_a_time(api: Any, tmp_path: Path) -> None:
    with client_of(api, tmp_path) as client:
        assert status_and_message(client.post("/stop_profile")) == (409, "no profile is under way")
        started = client.post("/start_profile", json={"num_steps": 7, "output": "a"})
        assert started.json() == {"status": "started", "output": "a", "num_steps": 7}
        assert api.pool.engines[0].client.asked == [(str(tmp_path / "a"), 7)]
        status, message = status_and_message(client.post("/start_profile", json={"output": "b"}))
        assert (status, message) == (409, "a profile is under way; /stop_profile ends it")
        stopped = client.post("/stop_profile")
        assert stopped.json() == {"status": "written", "files": ["a.json.gz"]}
        assert status_and_message(client.post("/stop_profile"))[0] == 409
        status, message = status_and_message(client.post("/start_profile", json={"output": "a"}))
        assert (status, message) == (409, "there is a profile 'a' already")
        assert client.post("/start_profile").status_code == 200  # as vLLM's clients ask
        assert api.pool.engines[0].client.asked[-1][1] == routes.DEFAULT_STEPS


def test_what_was_not_written_is_told(api: Any, tmp_path: Path) -> None:
    api.pool.engines[0].client.error = "a: no room"
    with client_of(api, tmp_path) as client:
        client.post("/start_profile", json={"output": "a"})
        assert status_and_message(client.post("/stop_profile")) == (
            500,
            "the profile was not written: a: no room",
        )
        assert client.post("/start_profile", json={"output": "a"}).status_code == 200


@pytest.mark.parametrize(
    "name",
    ["../a", "/tmp/a", "a/b", ".hidden", "", "a\u0000b", "a b", "é", "-x", "x" * 65, "..", "*"],
)
def test_no_name_leads_out_of_the_folder(api: Any, tmp_path: Path, name: str) -> None:
    with client_of(api, tmp_path) as client:
        answer = client.post("/start_profile", json={"output": name})
    if name:
        assert status_and_message(answer)[0] == 400
        assert answer.json()["error"]["param"] == "output"
        assert not api.pool.engines[0].client.asked
    else:
        assert answer.status_code == 200  # the time


@pytest.mark.parametrize("steps", [0, -1, 201, 2.5, "3", True])
def test_the_number_of_steps_is_bounded(api: Any, tmp_path: Path, steps: Any) -> None:
    with client_of(api, tmp_path) as client:
        assert (
            status_and_message(client.post("/start_profile", json={"num_steps": steps}))[0] == 400
        )
    assert not api.pool.engines[0].client.asked
    assert routes.MAX_STEPS == step_trace.MAX_STEPS


def test_a_full_folder_takes_no_more(
    api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_PROFILES", 2)
    for name in ("x", "y"):
        (tmp_path / f"{name}.json.gz").write_bytes(b"")
    with client_of(api, tmp_path) as client:
        assert status_and_message(client.post("/start_profile", json={})) == (
            409,
            "the folder holds 2 profiles; accepted: 2",
        )


def test_replicas_have_files_of_their_own(api: Any, tmp_path: Path) -> None:
    from rorqual.serve.engines.pool import EngineSlot

    second = EngineSlot(1)
    second.client = Engine(1)  # type: ignore[assignment]
    api.pool.engines.append(second)
    with client_of(api, tmp_path) as client:
        client.post("/start_profile", json={"output": "a"})
        found = client.post("/stop_profile").json()["files"]
    api.pool.engines.pop()
    assert found == ["a-engine0.json.gz", "a-engine1.json.gz"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="profile_dir="):
        launch.profile_dir(ServeConfig(profile_dir=str(tmp_path / "file" / "in")))
    made = launch.profile_dir(ServeConfig(profile_dir=str(tmp_path / "new")))
    assert made == tmp_path / "new"
    assert made.stat().st_mode & 0o777 == 0o700
    assert launch.profile_dir(ServeConfig()) is None


# ---- a real server


def complete(server: Running, tokens: int) -> str:
    body = {"model": "rorqual-bundled", "prompt": "My dear", "max_tokens": tokens}
    status, answer = server.request(
        "POST", "/v1/completions", {**body, "temperature": 0, "ignore_eos": True}
    )
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def test_a_server_records_its_steps_beside_requests(server: Running, profile_dir: Path) -> None:
    folder = profile_dir
    plain = complete(server, 40)
    status, started = server.request("POST", "/start_profile", {"num_steps": 6, "output": "one"})
    assert (status, started["num_steps"]) == (200, 6)
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(complete(server, 40))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [plain] * 3
    server.wait_until((folder / "one.json.gz").exists)
    with gzip.open(folder / "one.json.gz") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    steps = [name for name in names if name.startswith("step ")]
    assert len(steps) == 6
    assert any(" prefill: " in name or " mixed: " in name for name in steps)
    assert any(name.startswith("aten::") for name in names)
    server.wait_until(lambda: "profile written: one.json.gz" in server.text())
    assert [path.name for path in folder.iterdir()] == ["one.json.gz"]


@pytest.mark.exhaustive
def test_a_server_that_stops_drops_what_is_under_way(tmp_path: Path) -> None:
    options = ("--max-num-seqs", "8", "--max-model-len", "512", "--dtype", "float32")
    with start_server(*options, "--profile-dir", str(tmp_path)) as server:
        assert server.request("POST", "/start_profile", {"num_steps": 200})[0] == 200
        complete(server, 5)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    assert not [*tmp_path.iterdir()]
