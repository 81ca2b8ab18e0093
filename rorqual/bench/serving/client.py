"""One OpenAI-compatible server as `bench serve` sees it: requests in, the times of their chunks
out.

aiohttp carries the streams: 12 us of CPU a chunk against 49 with httpx, on the same machine (see
docs/benchmarking.md)."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rorqual.bench.serving.prompts import Prompt
from rorqual.errors import ConfigError, TargetError

if TYPE_CHECKING:
    import aiohttp

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
MAX_CAUSE_LENGTH = 200


@dataclass(frozen=True)
class ServerTarget:
    """Where requests go and what each asks for. `timeout` and `connect_timeout` in seconds;
    `temperature` None leaves it to the server."""

    base_url: str = "http://127.0.0.1:8000"
    endpoint: str = COMPLETIONS
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    stream: bool = True
    ignore_eos: bool = True
    temperature: float | None = 0.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: float = 3600.0
    connect_timeout: float = 30.0
    keep_text: bool = False

    def __post_init__(self) -> None:
        if (
            urlsplit(self.base_url).scheme not in ("http", "https")
            or not urlsplit(self.base_url).hostname
        ):
            raise ConfigError(
                f"base URL {self.base_url!r}; accepted: http://host:port or https://host:port"
            )
        if not self.endpoint.endswith("/completions"):
            raise ConfigError(
                f"endpoint {self.endpoint!r}; accepted: {COMPLETIONS}, {CHAT} or another "
                "path that ends like them"
            )
        if self.timeout <= 0 or self.connect_timeout <= 0:
            raise ConfigError(
                f"timeout={self.timeout}, connect_timeout={self.connect_timeout}; both must "
                "be above 0 seconds"
            )

    @property
    def chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")

    def url(self, path: str) -> str:
        base = self.base_url.rstrip("/")
        return (
            base + path.removeprefix("/v1")
            if base.endswith("/v1") and path.startswith("/v1/")
            else base.removesuffix("/v1") + path
        )

    def body(self, prompt: Prompt) -> bytes:
        """The JSON of a request; encoded before a run, so that encoding takes no time in it."""
        content = prompt.content if isinstance(prompt.content, str) else prompt.content.tolist()
        asked: dict[str, Any] = {"model": self.model, "stream": self.stream}
        if self.chat:
            asked |= {
                "messages": [{"role": "user", "content": content}],
                "max_completion_tokens": prompt.output_len,
            }
        else:
            asked |= {"prompt": content, "max_tokens": prompt.output_len}
        if self.stream:
            asked["stream_options"] = {"include_usage": True}
        if self.temperature is not None:
            asked["temperature"] = self.temperature
        if self.ignore_eos:
            asked["ignore_eos"] = True
        return json.dumps(asked | dict(self.extra_body), separators=(",", ":")).encode()


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds of time.perf_counter: `due` in the load's schedule, `start`
    when it was sent, `chunks` of each chunk with tokens, `end` of the last chunk of the response.
    Token counts are the server's (None: it reported none)."""

    input_len: int
    output_len: int
    due: float
    start: float = 0.0
    end: float = 0.0
    chunks: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    spec_steps: int | None = None
    spec_accepted: int | None = None
    finish: str | None = None
    text: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """The server's count; without one, a token a chunk."""
        return len(self.chunks) if self.completion_tokens is None else self.completion_tokens

    @property
    def latency(self) -> float:
        return self.end - self.start

    @property
    def ttft(self) -> float | None:
        return self.chunks[0] - self.start if self.chunks else None

    @property
    def tpot(self) -> float | None:
        """TPOT, seconds: (end - first chunk) / (tokens - 1), independent of the tokens per
        chunk."""
        return (
            (self.end - self.chunks[0]) / (self.output_tokens - 1)
            if self.chunks and self.output_tokens > 1
            else None
        )

    @property
    def itls(self) -> list[float]:
        """Seconds between chunks that carried tokens."""
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


class Failure(Exception):
    """Why a request failed, in words that requests failing alike share."""


class Client:
    """A pool of kept-alive connections; use as an async context."""

    def __init__(self, target: ServerTarget):
        self.target = target
        self.session: aiohttp.ClientSession

    async def __aenter__(self) -> Client:
        try:
            import aiohttp
        except ImportError:
            raise ConfigError("bench serve needs aiohttp: install rorqual[bench]") from None
        own = {"Content-Type": "application/json"}
        if self.target.api_key:
            own["Authorization"] = f"Bearer {self.target.api_key}"
        timeout = aiohttp.ClientTimeout(
            total=self.target.timeout, sock_connect=self.target.connect_timeout
        )
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=300)
        headers = own | dict(self.target.headers)
        self.session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers, read_bufsize=2**18
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def send(self, body: bytes, record: RequestRecord) -> RequestRecord:
        """Fill in the record. Raises only on cancellation: any error becomes `record.error`."""
        import aiohttp

        record.start = time.perf_counter()
        try:
            async with self.session.post(
                self.target.url(self.target.endpoint), data=body
            ) as response:
                if response.status != 200:
                    raise Failure(f"HTTP {response.status}: {_message(await response.text())}")
                if self.target.stream:
                    await self._read_stream(response, record)
                else:
                    _take(
                        record,
                        await response.json(content_type=None),
                        time.perf_counter(),
                        self.target.keep_text,
                        whole=True,
                    )
            _check(record, self.target.stream)
        except Failure as error:
            record.error = str(error)[:MAX_CAUSE_LENGTH]
        except TimeoutError:
            record.error = f"timeout: no complete answer within {self.target.timeout:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            record.error = f"{type(error).__name__}: {error}"[:MAX_CAUSE_LENGTH]
        except (LookupError, TypeError, AttributeError) as error:
            record.error = (
                f"an answer of another shape than OpenAI's: {type(error).__name__} {error}"[
                    :MAX_CAUSE_LENGTH
                ]
            )
        record.end = record.end or time.perf_counter()
        return record

    async def _read_stream(self, response: aiohttp.ClientResponse, record: RequestRecord) -> None:
        """Server-sent events, line by line; lines read together share a time."""
        rest = b""
        keep = self.target.keep_text
        async for data in response.content.iter_any():
            now = time.perf_counter()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    _take_line(record, line[5:].strip(), now, keep)
        if rest.startswith(b"data:"):  # some end without a last newline
            _take_line(record, rest[5:].strip(), time.perf_counter(), keep)

    async def page(self, path: str, method: str = "GET") -> tuple[int, str]:
        """(status, body) of a page of the server; status 0 when there is no answer within 10 s."""
        import aiohttp

        brief = aiohttp.ClientTimeout(total=10)
        try:
            async with self.session.request(
                method, self.target.url(path), timeout=brief
            ) as response:
                return response.status, await response.text()
        except (
            aiohttp.ClientError,
            OSError,
            TimeoutError,
            UnicodeDecodeError,
            asyncio.IncompleteReadError,
        ) as error:
            return 0, f"{type(error).__name__}: {error}"

    async def first_model(self) -> str:
        status, text = await self.page("/v1/models")
        if status != 200:
            raise TargetError(
                f"{self.target.url('/v1/models')} answers {status or text}; is the server "
                "up, and the API key right?"
            )
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise TargetError(
                f"{self.target.url('/v1/models')} names no model; pass --model"
            ) from None


def _take_line(record: RequestRecord, payload: bytes, now: float, keep_text: bool) -> None:
    if payload == b"[DONE]":
        record.finish = record.finish or "done"
    elif payload:
        _take(record, json.loads(payload), now, keep_text)


def _take(
    record: RequestRecord, event: Any, now: float, keep_text: bool, whole: bool = False
) -> None:
    """One event of a stream, or the body of a whole answer. An empty delta that neither opens
    nor closes the answer is a token whose bytes make no character yet; the chunk that only names
    the role, and the one that only names the finish, carry none."""
    if not isinstance(event, dict):
        raise Failure("an answer that is no JSON object")
    if "error" in event:
        raise Failure(f"error in the answer: {_message(json.dumps(event))}")
    if choices := event.get("choices"):
        choice = choices[0]
        finish = choice.get("finish_reason")
        delta = choice.get("delta") or choice.get("message") or choice
        text = (
            delta.get("content")
            or delta.get("text")
            or delta.get("reasoning_content")
            or delta.get("reasoning")
        )
        carries = text or delta.get("tool_calls") or (finish is None and "role" not in delta)
        if carries and not whole:
            record.chunks.append(now)
        if keep_text and text:
            record.text.append(text)
        record.finish = finish or record.finish
        record.end = now
    if usage := event.get("usage"):
        _count(record, usage)
    if spec := (event.get("metrics") or {}).get("speculative_decoding"):
        record.spec_steps = spec.get("num_spec_steps")
        record.spec_accepted = spec.get("num_accepted_draft_tokens")


def _count(record: RequestRecord, usage: Mapping[str, Any]) -> None:
    record.prompt_tokens = usage.get("prompt_tokens")
    record.completion_tokens = usage.get("completion_tokens")
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _check(record: RequestRecord, stream: bool) -> None:
    if record.finish is None:
        raise Failure("the answer ended early: neither a finish_reason nor [DONE]")
    if record.end == 0.0:
        raise Failure("an answer without choices")
    if stream and not record.chunks and record.completion_tokens:
        record.chunks.append(record.end)  # the only token ended the answer and has no text


def _message(text: str) -> str:
    """The sentence inside an error body, in one line."""
    try:
        found = json.loads(text)
        found = found.get("error", found) if isinstance(found, dict) else found
        text = str(found.get("message", found) if isinstance(found, dict) else found)
    except ValueError:
        pass
    return " ".join(text.split()) or "no message"
