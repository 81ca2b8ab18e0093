"""Keys: how they may be sent, how often they may be wrong, and what is counted."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient

from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.http import key_guard
from rorqual.serve.http.app import Api, create_app
from rorqual.serve.http.clients import ApiKeys, address_of, bearer
from rorqual.serve.http.key_guard import KeyGuard
from rorqual.serve.limits import GUESS_SECONDS, MAX_GUESSERS, ServerLimits

KEY = "sesame"


@pytest.fixture
def api() -> Iterator[Api]:
    limits = ServerLimits(wrong_keys=3)
    pool = EnginePool([{}], limits)
    yield Api(SimpleNamespace(names=("model",)), pool, limits, "1", {"engine": {}})  # type: ignore[arg-type]
    pool.kill()


def browse(api: Api, address: str = "192.0.2.1", app: object = None) -> TestClient:
    return TestClient(app or create_app(api, KEY), client=(address, 1), follow_redirects=False)


def status(client: TestClient, key: str | None, path: str = "/version") -> int:
    return client.get(path, headers={"authorization": f"Bearer {key}"} if key else {}).status_code


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(key_guard, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR"])
@pytest.mark.parametrize("path", ["/version", "/dashboard/data"])
def test_the_name_of_the_scheme_may_have_any_case(api: Api, scheme: str, path: str):
    client = browse(api)
    assert client.get(path, headers={"authorization": f"{scheme} {KEY}"}).status_code == 200
    assert client.get(path, headers={"authorization": f"{scheme} {KEY}x"}).status_code == 401


@pytest.mark.parametrize("header", [KEY, f"Basic {KEY}", f"Bearer{KEY}", "Bearer", "", "Bearer é"])
def test_nothing_else_opens(api: Api, header: str):
    given = {"authorization": header.encode("latin-1")}
    assert browse(api).get("/version", headers=given).status_code == 401
    assert bearer(None) is None


def test_refusals_are_counted(api: Api):
    client = browse(api)
    status(client, None)
    status(client, "wrong")
    client.post("/dashboard/login", data={"key": "wronger"})
    assert api.counts["failed_401"] == 3
    client.post("/version", headers={"authorization": f"Bearer {KEY}", "content-length": "9" * 9})
    assert api.counts["failed_413"] == 1
    text = client.get("/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    assert 'rorqual:http_events_total{event="failed_401"} 3.0' in text


def test_an_address_that_guesses_is_turned_away_for_a_while(api: Api, clock: list[float]):
    client = browse(api)
    other = browse(api, "192.0.2.2", client.app)
    assert [status(client, f"guess {i}") for i in range(5)] == [401] * 3 + [429] * 2
    answer = client.get("/version", headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 429, "a right guess is not told from a wrong one"
    assert 0 < int(answer.headers["retry-after"]) <= GUESS_SECONDS
    assert answer.json()["error"]["code"] == "too_many_wrong_keys"
    login = client.post("/dashboard/login", data={"key": KEY})
    assert login.status_code == 429
    assert login.headers["retry-after"]
    assert "set-cookie" not in login.headers
    assert api.counts["failed_429"] == 4
    assert status(other, KEY) == 200, "others are served"
    assert client.get("/live").status_code == 200, "what needs no key is answered"
    clock[0] += GUESS_SECONDS
    assert status(client, KEY) == 200


@pytest.mark.parametrize("path", ["/version", "/dashboard", "/dashboard/data"])
def test_logins_and_headers_count_together(api: Api, clock: list[float], path: str):
    client = browse(api)
    client.post("/dashboard/login", data={"key": "guess 0"})
    assert [status(client, f"guess {i}", path) for i in (1, 2, 3)] == [401, 401, 429]


def test_a_session_goes_on_at_an_address_that_guesses(api: Api, clock: list[float]):
    client = browse(api)
    assert client.post("/dashboard/login", data={"key": KEY}).status_code == 303
    assert [status(client, f"guess {i}") for i in range(4)][-1] == 429
    assert client.get("/dashboard/data").status_code == 200


def test_a_client_with_a_wrong_key_or_none_guesses_nothing(api: Api, clock: list[float]):
    client = browse(api)
    assert {status(client, "wrong") for _ in range(20)} == {401}
    assert {status(client, None) for _ in range(20)} == {401}
    assert {client.get("/dashboard/data").status_code for _ in range(20)} == {401}
    assert status(client, KEY) == 200


def test_an_ipv6_network_is_one_address(clock: list[float]):
    guard = KeyGuard(ApiKeys(KEY), 2)
    for i in range(2):
        assert guard.refusal(b"guess %d" % i, f"2001:db8::{i}").status == 401  # type: ignore[union-attr]
    assert guard.refusal(KEY.encode(), "2001:db8::ffff").status == 429  # type: ignore[union-attr]
    assert guard.refusal(KEY.encode(), "2001:db8:0:1::1") is None


def test_so_many_addresses_are_remembered(clock: list[float]):
    guard = KeyGuard(ApiKeys(KEY), 2)
    for i in range(MAX_GUESSERS + 10):
        guard.refusal(b"guess", f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}")
    assert len(guard.guesses) == MAX_GUESSERS


@pytest.mark.parametrize("path", ["/live", "/health"])
def test_probes_may_ask_for_the_head_alone(api: Api, path: str):
    client = browse(api)
    assert client.head(path).status_code == client.get(path).status_code


def test_addresses_of_one_ipv6_network_are_one_client() -> None:
    found = [address_of({"client": (address, 1)}) for address in ("2001:db8::1", "2001:db8::2")]
    assert found == ["address 2001:db8::/64"] * 2
    assert address_of({"client": ("2001:db8:0:1::1", 1)}) != found[0]
    assert address_of({"client": ("192.0.2.7", 1)}) == "address 192.0.2.7"
    assert address_of({}) == address_of({"client": None}) == "address unknown"
