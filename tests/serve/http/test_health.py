"""/health, and what else tells whether requests can be answered."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.http.app import Api, create_app
from rorqual.serve.limits import ServerLimits
from rorqual.serve.messages import Snapshot, client_decoder, encoder

MISSING = "no server holds 0-15 of layer 1"


@dataclass
class Client:
    """As much of an engine's client as the state's routes need."""

    index: int
    snapshot: Snapshot = field(default_factory=lambda: Snapshot(1.0))
    live: dict[str, Any] = field(default_factory=dict)
    ended: deque[Any] = field(default_factory=deque)
    ready: Any = field(default_factory=lambda: SimpleNamespace(is_set=lambda: True))


@pytest.fixture
def api() -> Iterator[Api]:
    served: Any = SimpleNamespace(names=("m",))
    pool = EnginePool([{}, {}], ServerLimits())
    for engine in pool.engines:
        engine.client = Client(engine.index)  # type: ignore[assignment]
    yield Api(served, pool, ServerLimits(), "1", {"engine": {}})
    pool.kill()


def told(api: Api, path: str = "/health") -> tuple[int, str]:
    """Status, and the message of a refusal."""
    answer = TestClient(create_app(api, None)).get(path)
    return answer.status_code, answer.json().get("error", {}).get("message", "")


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_experts_without_a_server(api: Api, path: str) -> None:
    assert told(api, path) == (200, "")
    client = api.pool.engines[1].client
    assert client is not None
    client.snapshot = Snapshot(2.0, experts_missing=MISSING)
    status, message = told(api, path)
    assert status == 503
    assert MISSING in message
    assert TestClient(create_app(api, None)).get("/stats").json()["healthy"] is False
    assert told(api, "/live")[0] == 200
    client.snapshot = Snapshot(3.0)
    assert told(api, path) == (200, "")
    assert TestClient(create_app(api, None)).get("/stats").json()["healthy"] is True


def test_an_engine_that_is_gone(api: Api) -> None:
    api.pool.engines[0].client = None
    status, message = told(api)
    assert status == 503
    assert "an engine is not ready" in message


def test_a_server_that_shuts_down(api: Api) -> None:
    api.draining = True
    status, message = told(api)
    assert status == 503
    assert "it is shutting down" in message


def test_a_snapshot_carries_it() -> None:
    sent = Snapshot(1.0, experts_missing=MISSING)
    assert client_decoder().decode(encoder().encode(sent)) == sent
