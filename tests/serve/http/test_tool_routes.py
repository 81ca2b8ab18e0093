"""What load generators and evaluation harnesses ask of a server before they begin: SGLang's and
vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from rorqual.models.hub import BUNDLED, SHAPES, loaded_as
from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.http.app import Api, create_app
from rorqual.serve.limits import ServerLimits
from rorqual.serve.messages import Snapshot
from rorqual.text.tokenizer import Tokenizer

ROOT = "someone/some-model"
CONFIG = {"engine": {}, "root": ROOT, "tokenizer_root": "someone/words"}


class FakeClient:
    def __init__(self, snapshot: Snapshot):
        self.snapshot = snapshot
        self.info = None
        self.live: dict[int, Any] = {}
        self.resets = 0

    def reset_prefix(self) -> None:
        self.resets += 1


@pytest.fixture
def api() -> Iterator[Api]:
    served: Any = SimpleNamespace(names=("m",), tokenizer=Tokenizer(BUNDLED))
    pool = EnginePool([{}], ServerLimits())
    yield Api(served, pool, ServerLimits(), "1", dict(CONFIG))
    pool.kill()


@pytest.fixture
def client(api: Api) -> TestClient:
    return TestClient(create_app(api, None))


def with_engines(api: Api, monkeypatch: pytest.MonkeyPatch, *snapshots: Snapshot) -> list[Any]:
    clients = [FakeClient(snapshot) for snapshot in snapshots]
    monkeypatch.setattr(EnginePool, "clients", clients)
    return clients


def test_a_model_tells_by_what_name_transformers_loads_it(client: TestClient):
    """vLLM's load generator reads `root` as the tokenizer where no model is named."""
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["root"], model["parent"]) == ("m", ROOT, None)
    assert client.get("/v1/models/m").json()["root"] == ROOT


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(client: TestClient, path: str):
    found = client.get(path).json()
    assert found["model_path"] == ROOT
    assert found["tokenizer_path"] == "someone/words"
    assert found["is_generation"] is True


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_cache(api: Api, client: TestClient, monkeypatch: pytest.MonkeyPatch, method: str):
    engines = with_engines(api, monkeypatch, Snapshot(at=0.0), Snapshot(at=0.0))
    assert client.request(method, "/flush_cache", params={"timeout": 60.0}).status_code == 200
    assert [engine.resets for engine in engines] == [1, 1]


def test_server_info_tells_how_long_accepted_drafts_are(
    api: Api, client: TestClient, monkeypatch: pytest.MonkeyPatch
):
    drafting = Snapshot(at=0.0, drafted=[10, 10], accepted=[8, 5])
    with_engines(api, monkeypatch, drafting, Snapshot(at=0.0))
    for path in ("/server_info", "/get_server_info"):
        states = client.get(path).json()["internal_states"]
        assert states == [{"avg_spec_accept_length": pytest.approx(2.3)}, {}]


def test_tokenizer_info(api: Api, client: TestClient):
    """lm-evaluation-harness tokenizes through the server where this is there."""
    found = client.get("/tokenizer_info").json()
    assert found["eos_token"] == "<|end_of_text|>"
    assert found["bos_token"] == "<|begin_of_text|>"
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert found["chat_template"] is None


def test_tokenizer_info_of_tokens_with_properties(api: Api, client: TestClient):
    tokenizer: Any = api.served.tokenizer
    tokenizer.settings = {
        "eos_token": {"content": "<end>", "lstrip": False},
        "added_tokens_decoder": {"0": {"content": "<end>"}},
        "model_max_length": 7,
    }
    tokenizer.template = "{{ messages }}"
    assert client.get("/tokenizer_info").json() == {
        "eos_token": "<end>",
        "model_max_length": 7,
        "tokenizer_class": None,
        "chat_template": "{{ messages }}",
    }


def test_by_what_a_model_is_loaded_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    assert loaded_as(None, BUNDLED) == str(BUNDLED)
    assert loaded_as("model", Path("model")) == str(folder)
    assert loaded_as(folder, folder) == str(folder)
    assert loaded_as("deepseek-v3", SHAPES / "deepseek-v3") == str(SHAPES / "deepseek-v3")
    assert loaded_as("someone/some-model", folder) == "someone/some-model"
