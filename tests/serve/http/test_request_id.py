"""X-Request-Id: as the caller gave it, or a new one; in every answer and in the log."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from rorqual.config.log import LineFormatter
from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.http.app import Api, create_app
from rorqual.serve.limits import MAX_REQUEST_ID_LENGTH, ServerLimits


@pytest.fixture
def api() -> Iterator[Api]:
    pool = EnginePool([{}], ServerLimits())
    yield Api(SimpleNamespace(names=("m",)), pool, ServerLimits(), "1", {"engine": {}})  # type: ignore[arg-type]
    pool.kill()


def named(api: Api, given: str | None, path: str = "/version", key: str | None = None) -> str:
    headers = {} if given is None else {"x-request-id": given}
    answer = TestClient(create_app(api, key)).get(path, headers=headers)
    (found,) = answer.headers.get_list("x-request-id")
    return found


@pytest.mark.parametrize("path", ["/version", "/nowhere", "/health", "/v1/completions"])
@pytest.mark.parametrize("key", [None, "secret"])
def test_the_callers_own_comes_back(api: Api, path: str, key: str | None):
    assert named(api, "abc-123", path, key) == "abc-123"
    assert named(api, "x" * MAX_REQUEST_ID_LENGTH, path, key) == "x" * MAX_REQUEST_ID_LENGTH


@pytest.mark.parametrize("given", [None, "", "a b", "a\tb", "x" * (MAX_REQUEST_ID_LENGTH + 1)])
def test_else_a_new_one(api: Api, given: str | None):
    first = named(api, given)
    assert len(first) == 32
    assert named(api, given) != first


def test_lines_of_the_log_name_it(api: Api):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("rorqual: %(message)s"))
    log = logging.Logger("one")
    log.addHandler(handler)
    app = create_app(api, None)

    @app.get("/slow/{name}")
    async def slow(name: str) -> dict[str, str]:
        await asyncio.sleep(0.01)
        log.warning("here is %s", name)
        return {}

    client = TestClient(app)
    for name in ("a", "b"):
        client.get(f"/slow/{name}", headers={"x-request-id": f"id-{name}"})
    log.warning("outside")
    assert stream.getvalue().splitlines() == [
        "rorqual: here is a [request id-a]",
        "rorqual: here is b [request id-b]",
        "rorqual: outside",
    ]


def test_a_defect_has_it_too(api: Api, monkeypatch: pytest.MonkeyPatch):
    app = create_app(api, None)
    monkeypatch.setattr(api, "version", object())
    client = TestClient(app, raise_server_exceptions=False)
    answer = client.get("/version", headers={"x-request-id": "mine"})
    assert answer.status_code == 500
    assert answer.headers.get_list("x-request-id") == ["mine"]
