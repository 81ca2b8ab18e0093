"""rorqual chat --url: against the session's server, and against addresses where there is none."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from rorqual.cli.app import app
from rorqual.cli.remote import answer, served_model
from rorqual.errors import TargetError
from tests.serve.conftest import MODEL
from tests.serve.running import Running

BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}


def test_pieces_make_the_answer(server: Running):
    whole = server.request("POST", "/v1/chat/completions", BODY)[1]["choices"][0]["message"][
        "content"
    ]
    for url in (server.url, server.url + "/", server.url + "/v1"):
        pieces = list(answer(url, BODY))
        assert "".join(pieces) == whole
        assert len(pieces) > 3
        assert served_model(url) == MODEL


def test_chat_command(server: Running):
    done = CliRunner().invoke(
        app,
        ["chat", "--url", server.url, "-n", "6", "--temperature", "0"],
        input="Hello\nAgain\n\n",
    )
    assert done.exit_code == 0, done.output
    assert done.output.count("> ") == 3


def test_errors_are_said(server: Running):
    with pytest.raises(TargetError, match="answers 400: temperature"):
        list(answer(server.url, {**BODY, "temperature": -1}))
    with pytest.raises(TargetError, match="cannot be reached"):
        list(answer("http://127.0.0.1:9", BODY))
    with pytest.raises(TargetError, match="no address"):
        list(answer("file:///etc", BODY))
    with pytest.raises(TargetError, match="no server"):
        served_model("http://127.0.0.1:9")
