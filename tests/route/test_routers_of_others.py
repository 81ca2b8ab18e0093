"""Our servers behind smg and vLLM's router, where these are installed: requests, streams, and
vLLM's way of having prompts computed elsewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.serve.running import Running, start_server

pytestmark = pytest.mark.exhaustive

ENGINE = ("--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "512")
PROMPT = "My dear Elizabeth, what a fine day it is to walk and see the countryside, said he to her"
COMPLETE = {"model": "rorqual-bundled", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
CHAT = {
    "model": "rorqual-bundled",
    "messages": [{"role": "user", "content": "hello my friend"}],
    "max_tokens": 8,
    "temperature": 0,
}
needs_smg = pytest.mark.skipif(
    importlib.util.find_spec("smg") is None, reason="smg is not installed"
)
needs_vllm_router = pytest.mark.skipif(
    importlib.util.find_spec("vllm_router") is None, reason="vllm-router is not installed"
)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def other_router(tmp_path: Path, *words: str) -> Iterator[str]:
    """Its URL, once it passes a request on."""
    port = free_port()
    more = ("--port", str(port), "--prometheus-port", str(free_port()))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *words, *more], stdout=log, stderr=log, env=dict(os.environ)
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                post(url, "/v1/completions", {**COMPLETE, "prompt": "Hello", "max_tokens": 1})
                break
            except OSError:
                text = (tmp_path / "log").read_text(errors="replace")
                assert process.poll() is None, text
                assert time.monotonic() < deadline, text
                time.sleep(0.3)
        yield url
    finally:
        process.kill()
        process.wait()


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def streamed(url: str, body: dict[str, Any]) -> str:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps({**body, "stream": True}).encode(), headers
    )
    text = ""
    with urllib.request.urlopen(request, timeout=30) as answer:
        lines = [line.decode().strip() for line in answer if line.strip()]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            text += choice["delta"].get("content") or ""
    return text


def same_answers(server: Running, url: str) -> None:
    want = post(server.url, "/v1/completions", COMPLETE)["choices"][0]["text"]
    chat = post(server.url, "/v1/chat/completions", CHAT)["choices"][0]["message"]["content"]
    for _ in range(3):  # each server has its turn
        assert post(url, "/v1/completions", COMPLETE)["choices"][0]["text"] == want
        assert streamed(url, CHAT) == chat
    with urllib.request.urlopen(url + "/v1/models", timeout=30) as answer:
        assert json.loads(answer.read())["data"][0]["id"] == "rorqual-bundled"


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Running]]:
    with start_server(*ENGINE) as first, start_server(*ENGINE) as second:
        yield [first, second]


@needs_smg
def test_smg(servers: list[Running], tmp_path: Path) -> None:
    urls = [server.url for server in servers]
    words = ("smg.launch_router", "--worker-urls", *urls, "--policy", "round_robin")
    with other_router(tmp_path, *words) as url:
        same_answers(servers[0], url)


@needs_vllm_router
def test_vllm_router(servers: list[Running], tmp_path: Path) -> None:
    urls = [server.url for server in servers]
    words = ("vllm_router.launch_router", "--worker-urls", *urls, "--policy", "round_robin")
    with other_router(tmp_path, *words) as url:
        same_answers(servers[0], url)


@needs_vllm_router
def test_vllm_router_with_prompts_apart(tmp_path: Path) -> None:
    """Pages travel as they do behind our own router."""
    secret = tmp_path / "kv-secret"
    secret.write_text("of all who exchange pages")
    transfer = ("--kv-secret-file", str(secret))
    with (
        start_server(*ENGINE, "--role", "prefill", *transfer) as prefill,
        start_server(*ENGINE, "--role", "decode", *transfer) as decode,
        other_router(
            tmp_path,
            *("vllm_router.launch_router", "--vllm-pd-disaggregation", "--kv-connector", "nixl"),
            *("--prefill", prefill.url, "--decode", decode.url),
        ) as url,
    ):
        found = post(url, "/v1/completions", COMPLETE)
        # the usage that this router tells has the prefill server's cached_tokens
        text = decode.get("/metrics")
        came = re.search(r"^rorqual:kv_transfer_pages_received_total\S* (\S+)", text, flags=re.M)
        assert came is not None
        assert float(came[1]) >= 1
        want = post(prefill.url, "/v1/completions", COMPLETE)["choices"][0]["text"]
        assert found["choices"][0]["text"] == want
        same_answers(prefill, url)
