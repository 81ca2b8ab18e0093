"""A small OpenAI-compatible server for the tests: no model, timing by the clock. A request chooses
its behaviour with the body's field `fake` (see `Behaviour`), and the server keeps the times at
which it really wrote each chunk (CLOCK_MONOTONIC, which other processes of the machine share), so
that a measurement can be compared with what was injected rather than with what was meant.

    python tests/bench/serving/fake_openai.py

prints its port, and serves until its standard input closes. With `--port N` it serves there until
it is ended; then `--itl SECONDS` is for requests that do not say theirs, and with `--requests N` it
dies at the request after the N-th.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, fields
from typing import Any

API_KEY = "sk-fake"


@dataclass(frozen=True)
class Behaviour:
    """Seconds and counts. `per_chunk`: tokens a chunk carries. `fail`: "" or one of status,
    error, cut, hang."""

    ttft: float = 0.0
    itl: float = 0.0
    itl_per_open: float = 0.0
    per_chunk: int = 1
    fail: str = ""
    status: int = 500
    usage: bool = True
    role_first: float | None = None
    empty_last: bool = True
    accepted: int = 0
    cached: int | None = None


class Log:
    """What the server did, for the tests to read."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.flushes = self.running = self.peak = 0
        self.drafts = self.accepted = 0
        self.most: float = math.inf
        self.how: dict[str, float] = {}  # of requests that do not say otherwise

    def metrics(self) -> str:
        pairs = {"drafts": self.drafts, "accepted_tokens": self.accepted}
        lines = [
            f'fake:spec_decode_num_{name}_total{{model_name="fake"}} {float(value)}'
            for name, value in pairs.items()
        ]
        return "# HELP x\n" + "\n".join(lines) + "\n"


class Stream:
    """One answer: writes chunk after chunk at the times its behaviour asks for."""

    def __init__(self, connection: Connection, body: dict[str, Any], chat: bool):
        self.connection = connection
        self.body = body
        self.chat = chat
        known = {field.name for field in fields(Behaviour)}
        self.how = Behaviour(
            **{
                name: value
                for name, value in (connection.log.how | body.get("fake", {})).items()
                if name in known
            }
        )
        self.left = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        self.tokens = self.left
        self.arrived = time.perf_counter()
        self.prompt = body.get("messages") if chat else body.get("prompt")
        self.entry = {
            "arrived": self.arrived,
            "writes": [],
            "body": body,
            "how": asdict(self.how),
            "done": False,
        }
        log = connection.log
        log.requests.append(self.entry)
        log.running += 1
        log.peak = max(log.peak, log.running)
        self.loop = asyncio.get_running_loop()
        self.next = self.loop.time() + self.how.ttft
        chunk = {
            "id": "cmpl-0123456789abcdef",
            "object": "text_completion",
            "created": 1750000000,
            "model": "fake",
            "choices": None,
        }
        self.head = json.dumps(chunk, separators=(",", ":"))[: -len("null}")]
        text = " word" * self.how.per_chunk
        self.piece = self.chunk(self.choice(text))

    def choice(self, text: str | None, finish: str | None = None, role: bool = False) -> str:
        if self.chat:
            delta = (
                {"role": "assistant", "content": ""}
                if role
                else {}
                if text is None
                else {"content": text}
            )
            return json.dumps(
                [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
                separators=(",", ":"),
            )
        return json.dumps(
            [{"index": 0, "text": text or "", "logprobs": None, "finish_reason": finish}],
            separators=(",", ":"),
        )

    def chunk(self, choices: str, extra: str = "") -> bytes:
        return framed(f"data: {self.head}{choices}{extra}}}\n\n".encode())

    def usage(self) -> dict[str, Any]:
        prompt = (
            sum(len(m["content"].split()) for m in self.prompt)
            if self.chat
            else len(words(self.prompt))
        )
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": self.tokens,
            "total_tokens": prompt + self.tokens,
        }
        if self.how.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.how.cached}
        return usage

    def start(self) -> None:
        if self.how.fail == "hang":
            return
        if self.how.fail == "status":
            return self.finish(
                lambda: self.connection.answer(
                    self.how.status, {"error": {"message": "the fake refuses"}}
                )
            )
        if self.body.get("stream"):
            self.connection.head(200, "text/event-stream")
            if self.how.role_first is not None:
                self.loop.call_later(
                    self.how.role_first,
                    lambda: self.connection.transport.write(
                        self.chunk(self.choice(None, role=True))
                    ),
                )
            self.loop.call_at(self.next, self.tick)
        else:
            self.loop.call_at(self.next + self.how.itl * (self.tokens - 1), self.whole)

    def tick(self) -> None:
        self.left -= self.how.per_chunk
        self.connection.transport.write(self.piece)
        self.entry["writes"].append(time.perf_counter())
        if self.how.fail in ("error", "cut") and self.left < self.tokens / 2:
            return self.finish(self.broken)
        if self.left <= 0:
            return self.finish(self.last)
        self.next += self.how.itl + self.how.itl_per_open * self.connection.log.running
        self.loop.call_at(self.next, self.tick)

    def broken(self) -> None:
        if self.how.fail == "error":
            self.connection.transport.write(
                framed(b'data: {"error":{"message":"the engine died","code":500}}\n\n')
            )
        self.connection.transport.close()

    def last(self) -> None:
        out = b""
        if self.how.empty_last:
            out += self.chunk(self.choice(None, finish="length"))
        if self.how.usage and (self.body.get("stream_options") or {}).get("include_usage"):
            out += self.chunk("[]", extra=',"usage":' + json.dumps(self.usage()))
        self.connection.transport.write(out + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def whole(self) -> None:
        text = " word" * self.tokens
        choice = {"index": 0, "finish_reason": "length"} | (
            {"message": {"content": text}} if self.chat else {"text": text}
        )
        self.entry["writes"].append(time.perf_counter())
        self.finish(
            lambda: self.connection.answer(200, {"choices": [choice], "usage": self.usage()})
        )

    def finish(self, write: Any) -> None:
        """Counters first: a client that has read the end must find them done."""
        log = self.connection.log
        log.running -= 1
        if self.how.accepted:
            log.drafts += 1
            log.accepted += self.how.accepted
        self.entry["done"] = True
        self.connection.stream = None
        write()


def words(prompt: Any) -> list[Any]:
    return prompt.split() if isinstance(prompt, str) else prompt


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """HTTP/1.1 with Content-Length bodies, one request at a time."""

    def __init__(self, log: Log, key: str | None):
        self.log = log
        self.key = key
        self.buffer = b""
        self.stream: Stream | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, gap, rest = self.buffer.partition(b"\r\n\r\n")
        if not gap:
            return
        lines = head.decode().split("\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines[1:])
        }
        size = int(headers.get("content-length", 0))
        if len(rest) < size:
            return
        self.buffer = rest[size:]
        method, path, _ = lines[0].split(" ")
        if (
            self.key
            and path.startswith("/v1")
            and headers.get("authorization") != f"Bearer {self.key}"
        ):
            return self.answer(401, {"error": {"message": "wrong API key"}})
        self.route(method, path, json.loads(rest[:size] or b"{}"))

    def route(self, method: str, path: str, body: dict[str, Any]) -> None:
        if path.endswith("/completions"):
            if len(self.log.requests) >= self.log.most:
                os._exit(1)
            self.stream = Stream(self, body, path.endswith("/chat/completions"))
            return self.stream.start()
        if path == "/metrics":
            return self.send(200, self.log.metrics().encode(), "text/plain")
        if path == "/flush_cache" and method == "POST":
            self.log.flushes += 1
            return self.answer(200, {})
        if path == "/log":
            return self.answer(
                200,
                {
                    name: value
                    for name, value in vars(self.log).items()
                    if name not in ("most", "how")
                },
            )
        pages = {
            "/health": {},
            "/v1/models": {"data": [{"id": "fake", "max_model_len": 4096}]},
            "/version": {"version": "9.8.7"},
            "/server_info": {"gpu": "Fake GPU", "tp_size": 2},
        }
        self.answer(
            200 if path in pages else 404, pages.get(path, {"error": {"message": f"no {path}"}})
        )

    def answer(self, status: int, page: dict[str, Any]) -> None:
        self.send(status, json.dumps(page).encode(), "application/json")

    def send(self, status: int, data: bytes, kind: str) -> None:
        self.transport.write(
            (
                f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: "
                f"{len(data)}\r\n\r\n"
            ).encode()
            + data
        )

    def head(self, status: int, kind: str) -> None:
        self.transport.write(
            (
                f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
            ).encode()
        )

    def connection_lost(self, error: Exception | None) -> None:
        if self.stream is not None:
            self.log.running -= 1
            self.stream.tick = lambda: None  # type: ignore[method-assign]


async def main(key: str | None, port: int = 0, most: float = math.inf, itl: float = 0.0) -> None:
    loop = asyncio.get_running_loop()
    log = Log()
    log.most = most
    log.how = {"itl": itl}
    server = await loop.create_server(lambda: Connection(log, key), "127.0.0.1", port, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    if port:
        await server.serve_forever()
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    given = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    with contextlib.suppress(KeyboardInterrupt):
        if "--port" in given:
            most = float(given.get("--requests", "inf"))
            itl = float(given.get("--itl", "0"))
            asyncio.run(main(None, int(given["--port"]), most, itl))
        else:
            asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else None))
