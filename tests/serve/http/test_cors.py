"""Cross-origin requests: off by default; preflights need no key, errors and streams carry the
headers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from rorqual.cli.app import app as commands
from rorqual.errors import ConfigError
from rorqual.serve import launch
from rorqual.serve.config import ServeConfig
from rorqual.serve.cors import CorsConfig, with_cors
from tests.serve.scripted import Scripted, scripted

CHAT = "/v1/chat/completions"
HERE = "https://page.example"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
PREFLIGHT = {
    "origin": HERE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization, content-type",
}
KEY = {"authorization": "Bearer sesame", "origin": HERE}


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with scripted(reasoning=False, key="sesame") as found:
        yield found


def browse(server: Scripted, **options: Any) -> TestClient:
    app = with_cors(server.client.app, CorsConfig(**options))
    return TestClient(app, raise_server_exceptions=False)


def test_off_by_default(server: Scripted) -> None:
    app = server.client.app
    assert with_cors(app, ServeConfig().cors) is app
    assert server.client.options(CHAT, headers=PREFLIGHT).status_code == 401
    answer = server.client.post(CHAT, json=BODY, headers=KEY)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(("origin", "allowed"), [("*", "*"), (HERE, HERE)])
def test_a_preflight_needs_no_key(server: Scripted, origin: str, allowed: str) -> None:
    client = browse(server, allowed_origins=(origin,))
    answer = client.options(CHAT, headers=PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == allowed
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert client.options(CHAT).status_code == 401, "what is no preflight is a request"


def test_another_origin_and_what_is_not_allowed(server: Scripted) -> None:
    client = browse(
        server,
        allowed_origins=(HERE,),
        allowed_methods=("GET",),
        allowed_headers=("Content-Type",),
    )
    assert client.options(CHAT, headers=PREFLIGHT).status_code == 400
    asked = {"origin": HERE, "access-control-request-method": "GET"}
    assert client.options(CHAT, headers=asked).status_code == 200
    answer = client.get("/version", headers={**KEY, "origin": "https://other.example"})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("stream", [False, True])
def test_answers_carry_the_headers(server: Scripted, stream: bool) -> None:
    client = browse(server, allowed_origins=(HERE,), allow_credentials=True)
    answer = client.post(CHAT, json={**BODY, "stream": stream}, headers=KEY)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == HERE
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert answer.headers["x-request-id"]
    assert answer.text.startswith("data: ") is stream


def test_errors_carry_the_headers(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    client = browse(server, allowed_origins=("*",))

    def defect() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(server.api, "check_open", defect)
    answers = [
        (client.post(CHAT, json=BODY, headers={"origin": HERE}), 401),
        (client.post(CHAT, json={}, headers=KEY), 400),
        (client.get("/nothing", headers=KEY), 404),
        (client.post(CHAT, json=BODY, headers=KEY), 500),
        (client.post("/v1/messages", json={}, headers=KEY), 400),
    ]
    for answer, status in answers:
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"allowed_origins": ("*",), "allow_credentials": True}, "name the origins"),
        ({"allowed_origins": (HERE, "*"), "allow_credentials": True}, "name the origins"),
        ({"allow_credentials": True}, "without allowed_origins"),
        ({"allowed_origins": ("page.example",)}, "scheme://host:port"),
        ({"allowed_origins": (HERE + "/",)}, "scheme://host:port"),
        ({"allowed_origins": ("[",)}, "not valid JSON"),
        ({"allowed_origins": ("[5]",)}, "no list of strings"),
        ({"allowed_methods": ("a b",)}, "allowed_methods: 'a b' is none"),
        ({"allowed_headers": ("",)}, "allowed_headers: '' is none"),
    ],
)
def test_mistakes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CorsConfig(**options)


def test_flags_repeated_or_as_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeConfig] = []
    monkeypatch.setattr(launch, "run", lambda config, version, early: seen.append(config) or 0)
    line = "serve --allowed-origins http://a --allowed-origins http://b:1 --allow-credentials"
    assert CliRunner().invoke(commands, line.split()).exit_code == 0
    listed = ["serve", "--allowed-origins", '["*"]', "--allowed-methods", '["GET", "POST"]']
    assert CliRunner().invoke(commands, listed).exit_code == 0
    assert CliRunner().invoke(commands, ["serve"]).exit_code == 0
    several = CorsConfig(("http://a", "http://b:1"), allow_credentials=True)
    every = CorsConfig(("*",), allowed_methods=("GET", "POST"))
    assert [config.cors for config in seen] == [several, every, CorsConfig()]
