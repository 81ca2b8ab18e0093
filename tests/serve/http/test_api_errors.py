"""Whatever is wrong with a request is the caller's to know: a 4xx in OpenAI's shape that names
the field, never a 5xx."""

from __future__ import annotations

import gzip
import json
import re
import socket
from typing import Any

import pytest

from tests.serve.running import Running

COMPLETE = "/v1/completions"
CHAT = "/v1/chat/completions"
TURN = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORCED = {"tools": [TOOL], "tool_choice": "required"}


def check_shape(body: Any) -> dict[str, Any]:
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (COMPLETE, {"use_beam_search": True}, "use_beam_search", "not supported"),
        (COMPLETE, {"n": 0}, "n", "greater than or equal to 1"),
        (COMPLETE, {"n": 9}, "n", "1 to 8"),
        (COMPLETE, {"n": "2"}, "n", "integer"),
        (COMPLETE, {"prompt": ["a"] * 100, "n": 3}, "n", "at most 256"),
        (COMPLETE, {"prompt": []}, "prompt", ""),
        (COMPLETE, {"prompt": [4096]}, "prompt", "0 to 4095"),
        (COMPLETE, {"prompt": [[1], []]}, "prompt", ""),
        (COMPLETE, {"prompt": [-1]}, "prompt", ""),
        (COMPLETE, {"prompt": "word " * 1000}, "prompt", "maximum context length is 512 tokens"),
        (COMPLETE, {"prompt": None}, "prompt", ""),
        (COMPLETE, {"suffix": "end"}, "suffix", "not supported"),
        (COMPLETE, {"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
        (COMPLETE, {"prompt_logprobs": -1}, "prompt_logprobs", ""),
        (COMPLETE, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "in a stream"),
        (COMPLETE, {"prompt": [[5] * 500] * 60, "prompt_logprobs": 20}, None, "at most 500000"),
        (COMPLETE, {"max_tokens": 0, "min_tokens": 1}, "min_tokens", "max_tokens=0"),
        (CHAT, {"max_tokens": 0}, "max_tokens", ""),
        (COMPLETE, {"best_of": 2}, "best_of", "the value of n"),
        (COMPLETE, {"max_tokens": -1}, "max_tokens", ""),
        (COMPLETE, {"min_tokens": 20}, "min_tokens", "max_tokens=16"),
        (COMPLETE, {"temperature": -1}, "temperature", ""),
        (COMPLETE, {"temperature": 1e400}, "temperature", ""),
        (COMPLETE, {"top_p": 0}, "top_p", ""),
        (COMPLETE, {"top_k": -2}, "top_k", ""),
        (COMPLETE, {"presence_penalty": 3}, "presence_penalty", ""),
        (COMPLETE, {"seed": 2**63}, "seed", "should be less than 9223372036854775808"),
        (COMPLETE, {"logprobs": 21}, "logprobs", "at most 20"),
        (COMPLETE, {"kv_transfer_params": "a"}, "kv_transfer_params", "one for each prompt"),
        (COMPLETE, {"kv_transfer_params": [1]}, "kv_transfer_params.0", "should be an object"),
        (COMPLETE, {"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        (COMPLETE, {"logit_bias": {"5": 101}}, "logit_bias.5", ""),
        (COMPLETE, {"logit_bias": {"4096": 1}}, "logit_bias", "0 to 4095"),
        (COMPLETE, {"stop": ["x"] * 65}, "stop", ""),
        (COMPLETE, {"stop": ""}, "stop", ""),
        (COMPLETE, {"stop_token_ids": [4096]}, "stop_token_ids", "0 to 4095"),
        (COMPLETE, {"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        (COMPLETE, {"model": "other"}, "model", "available"),
        (COMPLETE, {"cache_salt": "x" * 1025}, "cache_salt", ""),
        (COMPLETE, {"prompt": "\ud800"}, None, "cannot be encoded"),
        (COMPLETE, {"guided_regex": "[a"}, "guided_regex", "regex cannot be compiled"),
        (COMPLETE, {"guided_regex": "a" * 513}, "guided_regex", "at most 512"),
        (COMPLETE, {"guided_json": "no json"}, "guided_json", "json_schema cannot be compiled"),
        (COMPLETE, {"guided_json": {"$ref": "#"}}, "guided_json", "no text"),
        (COMPLETE, {"guided_json": {"type": "nonsense"}}, "guided_json", "'type' should be one"),
        (COMPLETE, {"guided_json": "x" * 70000}, "guided_json", "at most 65536"),
        (
            COMPLETE,
            {"guided_grammar": "root ::= ("},
            "guided_grammar",
            "grammar cannot be compiled",
        ),
        (
            COMPLETE,
            {"structured_outputs": {"grammar": "root ::= ("}},
            "structured_outputs.grammar",
            "the grammar cannot be compiled",
        ),
        (COMPLETE, {"guided_choice": []}, "guided_choice", ""),
        (COMPLETE, {"guided_choice": [""]}, "guided_choice", "empty"),
        (
            COMPLETE,
            {"guided_choice": ["a"], "guided_regex": "a"},
            "guided_choice",
            "only one structure",
        ),
        (COMPLETE, {"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "ends by itself"),
        (COMPLETE, {"guided_choice": ["a"], "min_tokens": 2}, "min_tokens", "ends by itself"),
        (
            COMPLETE,
            {"structured_outputs": {"regexp": "a"}},
            "structured_outputs.regexp",
            "not known",
        ),
        (CHAT, {"messages": []}, "messages", ""),
        (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "messages.0.role", ""),
        (
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "messages.0.content.0",
            "a string or an array of text parts",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "a", "prefix": True}]},
            "messages.prefix",
            "not supported",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a", **{f"x{i}": 1 for i in range(101)}}]},
            "messages.x0",
            "not known",
        ),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
        (CHAT, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            CHAT,
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "'g'",
        ),
        (CHAT, {"tools": [TOOL] * 129}, "tools", "at most 128"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, None, ""),
        (
            CHAT,
            {"tools": [TOOL], "tool_choice": "required", "guided_choice": ["a"]},
            "tool_choice",
            "exclude",
        ),
        (CHAT, {**FORCED, "ignore_eos": True}, "ignore_eos", "ends by itself"),
        (CHAT, {**FORCED, "min_tokens": 2}, "min_tokens", "ends by itself"),
        (
            CHAT,
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "json_schema.schema",
        ),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type", ""),
        (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
        (
            CHAT,
            {"chat_template_kwargs": {"loops": 10**9}},
            "chat_template_kwargs",
            "too large a number",
        ),
    ],
)
def test_a_bad_field_is_named(
    server: Running, path: str, fields: dict[str, Any], param: str | None, words: str
):
    base = {"prompt": "Hello"} if path == COMPLETE else {"messages": TURN}
    status, body = server.request("POST", path, {**base, **fields})
    error = check_shape(body)
    assert status == (404 if param == "model" else 400), body
    assert words in error["message"]
    if param is not None:
        assert (error["param"] or "").startswith(param), error
    if "stream_options" not in fields:
        streamed, again = server.request("POST", path, {**base, "stream": True, **fields})
        assert streamed == status, "also where the answer would have been a stream"
        check_shape(again)


# untokenized: more characters than tokens could have
@pytest.mark.parametrize("text", ["word " * 1000, "w" * 90_000], ids=["tokens", "characters"])
@pytest.mark.parametrize(
    ("path", "param"),
    [(COMPLETE, "prompt"), (CHAT, "messages"), ("/v1/responses", "input"), ("/v1/messages", None)],
)
def test_a_prompt_that_is_too_long_is_known_to_clients(
    server: Running, path: str, param: str | None, text: str
):
    """By the code, or by parts of the message that clients look for."""
    turns = [{"role": "user", "content": text}]
    key = param or "messages"
    value = turns if key == "messages" else text
    limit = "max_output_tokens" if key == "input" else "max_tokens"
    status, body = server.request("POST", path, {key: value, limit: 5})
    assert status == 400
    message = body["error"]["message"]
    assert re.search(r"prompt is too long: \d+ tokens > 511 maximum", message)
    assert "this model's maximum context length is 512 tokens" in message
    if param is not None:
        error = check_shape(body)
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


# which xgrammar refuses
LARGE = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 10**30}}}
MESSAGE = {"messages": TURN, "max_tokens": 5}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            CHAT,
            {
                "messages": TURN,
                "response_format": {"type": "json_schema", "json_schema": {"schema": LARGE}},
            },
            "response_format",
        ),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": LARGE}}},
            "text.format",
        ),
        (
            "/v1/messages",
            {**MESSAGE, "output_config": {"format": {"type": "json_schema", "schema": LARGE}}},
            "output_config.format",
        ),
        (
            "/v1/messages",
            {
                **MESSAGE,
                "tools": [{"name": "f", "input_schema": LARGE}],
                "tool_choice": {"type": "any"},
            },
            "tools.0.input_schema",
        ),
    ],
)
def test_what_cannot_be_compiled_is_named_as_in_the_body(
    server: Running, path: str, body: dict[str, Any], param: str
):
    """The engine says it, which knows nothing of the body."""
    for more in ({}, {"stream": True}):
        status, answer = server.request("POST", path, {**body, **more})
        assert status == 400
        error = answer["error"]
        assert "cannot be compiled" in error["message"]
        if path == "/v1/messages":
            assert error["message"].startswith(f"{param}: ")
        else:
            assert check_shape(answer)["param"] == param


@pytest.mark.parametrize(
    "schema", [{"a": 1} | {"b": 2}, {}, {"type": "string", "pattern": "(a{1,1000}){1,1000}"}]
)
def test_odd_schemas_are_answered(server: Running, schema: dict[str, Any]):
    status, body = server.request(
        "POST", COMPLETE, {"prompt": "Hello", "guided_json": schema, "max_tokens": 4}
    )
    assert status in (200, 400), body


def test_deep_schema(server: Running):
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        schema = {"type": "array", "items": schema}
    status, body = server.request("POST", COMPLETE, {"prompt": "Hello", "guided_json": schema})
    assert status == 400
    assert "deep" in check_shape(body)["message"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ""),
        (b"{", ""),
        (b"[]", ""),
        (b"null", ""),
        (b"[" * 50_000, "the body nests too deeply"),
        (b'{"prompt": "\xff"}', "the body is not valid utf-8: invalid start byte"),
        (b'{"prompt": NaN}', ""),
        (b'{"prompt":' + b"9" * 5000 + b"}", "an integer of too many digits"),
        (b"\x00" * 100, ""),
    ],
    ids=["nothing", "open", "list", "null", "deep", "bytes", "nan", "digits", "zeros"],
)
def test_malformed_bodies(server: Running, data: bytes, words: str):
    for path in (COMPLETE, CHAT):
        status, body = server.request("POST", path, data)
        assert status == 400
        assert words in check_shape(body)["message"]


def test_other_content_types(server: Running):
    status, body = server.request(
        "POST", COMPLETE, b'{"prompt": "a"}', **{"content-type": "text/plain"}
    )
    assert status == 415
    check_shape(body)


@pytest.mark.parametrize("given", ["gzip", "br", "zstd", "identity, gzip", "x" * 300])
def test_compressed_bodies(server: Running, given: str):
    plain = b'{"prompt": "a", "max_tokens": 1}'
    for data in (plain, gzip.compress(plain)):
        for path in (COMPLETE, "/tokenize"):
            status, body = server.request("POST", path, data, **{"content-encoding": given})
            assert status == 415
            error = check_shape(body)
            assert error["code"] == "unsupported_encoding"
            assert given[:100] in error["message"]
    status, body = server.request("POST", "/v1/messages", plain, **{"content-encoding": given})
    assert (status, body["type"]) == (415, "error")


def test_bodies_said_to_be_plain(server: Running):
    plain = b'{"prompt": "a", "max_tokens": 1}'
    for given in ("identity", "Identity", ""):
        status, body = server.request("POST", COMPLETE, plain, **{"content-encoding": given})
        assert status == 200, body
    assert server.request("GET", "/v1/models", **{"content-encoding": "gzip"})[0] == 200


def test_unknown_routes_and_methods(server: Running):
    for method, path, expected in (
        ("GET", "/nowhere", 404),
        ("GET", COMPLETE, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/v1/models/", 405),
    ):
        status, body = server.request(method, path)
        assert status == expected, path
        check_shape(body)


def test_large_bodies_are_refused_before_they_are_read(server: Running):
    status, body = server.request("POST", COMPLETE, json.dumps({"prompt": "x" * 300_000}).encode())
    assert status == 413
    assert "200000 bytes" in check_shape(body)["message"]


def raw(server: Running, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(data)
        received = b""
        while part := sock.recv(65536):
            received += part
        return received


def test_a_chunked_body_is_counted_too(server: Running):
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: "
        b"application/json\r\n"
    )
    head += b"transfer-encoding: chunked\r\n\r\n"
    answer = raw(
        server,
        head + b"".join(b"%x\r\n%s\r\n" % (50_000, b"x" * 50_000) for _ in range(5)) + b"0\r\n\r\n",
    )
    assert answer.startswith(b"HTTP/1.1 413")


def test_large_headers_are_refused(server: Running):
    answer = raw(
        server,
        b"GET /live HTTP/1.1\r\nhost: x\r\n"
        + b"".join(b"x-%d: %s\r\n" % (i, b"y" * 1000) for i in range(100))
        + b"\r\n",
    )
    assert answer.startswith(b"HTTP/1.1 431")


def test_no_http_at_all(server: Running):
    assert raw(server, b"\x16\x03\x01 nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_the_document_names_every_field(server: Running):
    document = server.get("/openapi.json")
    fields = document["components"]["schemas"]["ChatRequest"]
    assert fields["additionalProperties"] is False
    assert {"messages", "tools", "guided_regex", "cache_salt", "top_k"} <= set(fields["properties"])
    assert set(document["paths"]) >= {COMPLETE, CHAT, "/v1/models", "/health", "/metrics", "/stats"}
