"""The routes: OpenAI's API, and monitoring and administration."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from rorqual.config.log import request_id
from rorqual.errors import RequestError, quoted
from rorqual.serve.engines.job import EngineJob, parameter_of
from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.errors import ApiError, bad_request, not_ready
from rorqual.serve.http.anthropic.protocol import CountRequest, MessagesRequest
from rorqual.serve.http.anthropic.translate import count_tokens, messages_call
from rorqual.serve.http.auth import Authenticator
from rorqual.serve.http.calls import Call, ChatCall, TextCall
from rorqual.serve.http.clients import CLIENT, ApiKeys, check_room
from rorqual.serve.http.dashboard import add_dashboard
from rorqual.serve.http.history import History
from rorqual.serve.http.key_guard import KeyGuard
from rorqual.serve.http.memory import MemoryTrimmer
from rorqual.serve.http.metrics import Rates, snapshot
from rorqual.serve.http.prometheus.collector import registry
from rorqual.serve.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from rorqual.serve.http.request_builder import RequestBuilder, Served
from rorqual.serve.http.response import StreamResponse, error_response
from rorqual.serve.http.responses.protocol import ResponsesRequest
from rorqual.serve.http.responses.translate import responses_call
from rorqual.serve.http.resume.marked import ResumableChatCall, ResumableTextCall, resumable
from rorqual.serve.http.spans.middleware import TracedRequests
from rorqual.serve.http.sse import encode
from rorqual.serve.http.tracing.routes import add_tracing
from rorqual.serve.http.unknown_fields import UnknownFields
from rorqual.serve.http.validation import invalid_body, is_json, not_json, unreadable
from rorqual.serve.limits import ServerLimits
from rorqual.serve.messages import Snapshot
from rorqual.telemetry.spans import RequestTracer

MAX_RETRY_SECONDS = 60
FIRST_TOKEN = "X-Rorqual-First-Token"  # of /health: this server hands over streams

ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request can never be served; `param` names the field."},
    401: {"description": "The API key is missing or wrong."},
    404: {"description": "No such model."},
    408: {"description": "The body took too long to arrive."},
    413: {"description": "The body is too large."},
    415: {"description": "The body is compressed, or not said to be JSON."},
    429: {
        "description": "As many sequences are open as the server or one client may have, or an "
        "address tried too many wrong keys; see Retry-After."
    },
    500: {"description": "The engine process ended while it worked on this request."},
    503: {
        "description": "No engine is ready, an expert has no server, or the server is shutting "
        "down."
    },
    504: {"description": "The request took longer than the server allows."},
}

ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, whole or as server-sent events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
    **ERRORS,
}
TEXT_ANSWERS: dict[int | str, dict[str, Any]] = {
    status: ERRORS[status] for status in (400, 401, 404, 408, 413, 415)
}


class Api:
    """State of the API process. `draining`: open requests continue, new ones are rejected.
    hands_over: a stream may end with its first token, for another server to continue."""

    def __init__(
        self,
        served: Served,
        pool: EnginePool,
        limits: ServerLimits,
        version: str,
        config: dict[str, Any],
        metrics_names: str = "rorqual",
        hands_over: bool = False,
    ):
        self.served = served
        self.pool = pool
        self.limits = limits
        self.version = version
        self.config = config
        self.hands_over = hands_over
        self.builder = RequestBuilder(served, pool, limits, hands_over)
        self.counts: Counter[str] = Counter()
        self.running: set[EngineJob] = set()
        self.rates = Rates(pool)
        self.history = History(pool)
        self.unknown = UnknownFields(limits.unknown_fields == "refuse")
        self.memory = MemoryTrimmer()
        self.draining = False
        self.created = int(time.time())
        speculates = bool(config["engine"].get("num_speculative_tokens"))
        self.registry = registry(pool, self.counts, metrics_names, served.names[0], speculates)

    def admit(self, call: Call) -> StreamResponse:
        """Raises ApiError where there is no engine or no room in the queue."""
        if call.wanted:
            check_room(self.pool, call.wanted, self._retry_after())
        more = self.unknown.headers()
        return StreamResponse(call, self.pool, self.counts, self.running, more)

    def check_open(self) -> None:
        """Check state before a completion's body is processed."""
        self.unknown.check()
        if self.draining:
            raise not_ready("it is shutting down")
        if not self.pool.clients:
            raise not_ready("no engine is ready")

    def _retry_after(self) -> int:
        """Roughly the current duration of a request."""
        recent = [one.e2e for client in self.pool.clients for one in list(client.ended)[-100:]]
        return min(MAX_RETRY_SECONDS, max(1, math.ceil(statistics.median(recent)))) if recent else 1


def create_app(
    api: Api,
    key: str | None,
    profile_dir: Path | None = None,
    tracer: RequestTracer | None = None,
) -> FastAPI:
    app = FastAPI(title="Rorqual", version=api.version, redirect_slashes=False)
    _completions(app, api)
    _other_apis(app, api)
    _state(app, api)
    _tools(app, api)
    guard = KeyGuard(ApiKeys(key), api.limits.wrong_keys)
    add_dashboard(app, api, key, guard)
    if profile_dir is not None:
        add_tracing(app, api.pool, profile_dir)
    _errors(app, api)
    if tracer is not None and tracer.active:
        app.add_middleware(TracedRequests, tracer=tracer)
    app.add_middleware(
        Authenticator, guard=guard, limits=api.limits, counts=api.counts, memory=api.memory
    )
    return app


def _completions(app: FastAPI, api: Api) -> None:
    @app.post("/v1/chat/completions", responses=ANSWERS, tags=["OpenAI"])
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation; with `stream`, as server-sent events."""
        api.check_open()
        make = ResumableChatCall if resumable(request.headers) else ChatCall
        return api.admit(await api.builder.chat(body, request.scope[CLIENT], make))

    @app.post("/v1/completions", responses=ANSWERS, tags=["OpenAI"])
    async def complete(request: Request, body: CompletionRequest) -> Response:
        """Continue one prompt or several."""
        api.check_open()
        make = ResumableTextCall if resumable(request.headers) else TextCall
        return api.admit(await api.builder.completion(body, request.scope[CLIENT], make))

    @app.post("/tokenize", responses=TEXT_ANSWERS, tags=["text"])
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a prompt or a conversation, as vLLM tells them."""
        api.unknown.check()
        ids = await api.builder.tokenize(body)
        lengths = _lengths(api)
        found = {
            "count": len(ids),
            "max_model_len": min(lengths) if lengths else None,
            "tokens": ids,
            "token_strs": _strings(api, ids) if body.return_token_strs else None,
        }
        return api.unknown.named(_json(found))

    @app.post("/detokenize", responses=TEXT_ANSWERS, tags=["text"])
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids."""
        return _json({"prompt": await api.builder.detokenize(body)})

    @app.get("/v1/models", tags=["OpenAI"])
    async def models() -> Response:
        """What is served, under each of its names."""
        return _json({"object": "list", "data": [_model(api, name) for name in api.served.names]})

    @app.get("/v1/models/{name:path}", responses={404: ERRORS[404]}, tags=["OpenAI"])
    async def model(name: str) -> Response:
        """One of them."""
        if name not in api.served.names:
            raise ApiError(
                404,
                f"the model {quoted(name)} is not served here",
                param="model",
                code="model_not_found",
            )
        return _json(_model(api, name))


def _other_apis(app: FastAPI, api: Api) -> None:
    """Chats in the formats of other APIs."""

    @app.post("/v1/responses", responses=ANSWERS, tags=["OpenAI"])
    async def respond(request: Request, body: ResponsesRequest) -> Response:
        """Answer a conversation in OpenAI's newer form, of which nothing is kept."""
        api.check_open()
        return api.admit(await responses_call(api.builder, body, request.scope[CLIENT]))

    @app.post("/v1/messages", responses=ANSWERS, tags=["Anthropic"])
    async def message(request: Request, body: MessagesRequest) -> Response:
        """Answer a conversation in Anthropic's form."""
        api.check_open()
        return api.admit(await messages_call(api.builder, body, request.scope[CLIENT]))

    @app.post("/v1/messages/count_tokens", responses=TEXT_ANSWERS, tags=["Anthropic"])
    async def count(body: CountRequest) -> Response:
        """The tokens of the prompt that /v1/messages would make."""
        api.unknown.check()
        found = {"input_tokens": await count_tokens(api.builder, body)}
        return api.unknown.named(_json(found))


def _lengths(api: Api) -> list[int]:
    return [client.info.max_model_len for client in api.pool.clients if client.info is not None]


def _strings(api: Api, ids: list[int]) -> list[str]:
    """The vocabulary's strings of the tokens."""
    raw = api.served.tokenizer.raw
    return [raw.id_to_token(token) or "" for token in ids]


def _model(api: Api, name: str) -> dict[str, Any]:
    lengths = _lengths(api)
    length = {"max_model_len": min(lengths)} if lengths else {}
    # `root`: vLLM's tools load the tokenizer from it if no model is named
    of = {"owned_by": "rorqual", "root": api.config.get("root", name), "parent": None}
    return {"id": name, "object": "model", "created": api.created, **of, **length}


def _state(app: FastAPI, api: Api) -> None:
    @app.head("/live", include_in_schema=False)
    @app.get("/live", tags=["state"])
    async def live() -> Response:
        """The API process answers."""
        return _json({"status": "ok"})

    @app.head("/health", include_in_schema=False)
    @app.get("/health", responses={503: ERRORS[503]}, tags=["state"])
    async def health() -> Response:
        """Every engine serves, each expert has a server, and new requests are taken."""
        fault = "it is shutting down" if api.draining else api.pool.fault
        if fault:
            return error_response(not_ready(fault))
        answer = _json({"status": "ok"})
        if api.hands_over:
            answer.headers[FIRST_TOKEN] = "1"
        return answer

    @app.head("/ping", include_in_schema=False)
    @app.post("/ping", include_in_schema=False)
    @app.get("/ping", tags=["state"], responses={503: ERRORS[503]})
    async def ping() -> Response:
        """As /health, by the name that SageMaker asks for."""
        return await health()

    @app.get("/load", tags=["state"])
    async def load() -> Response:
        """How many requests are open now, under vLLM's name."""
        return _json({"server_load": len(api.running)})

    @app.get("/version", tags=["state"])
    async def version() -> Response:
        return _json({"version": api.version})

    @app.get("/metrics", tags=["state"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(generate_latest(api.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/stats", tags=["state"])
    async def stats() -> Response:
        """The figures of this moment as one JSON object."""
        return _json(snapshot(api.pool, api.rates, api.counts))

    @app.get("/get_server_info", include_in_schema=False)
    @app.get("/server_info", tags=["state"])
    async def server_info() -> Response:
        """How the server was started and what its engines came to."""
        engines = [client.info for client in api.pool.clients]
        return _json(
            {
                "version": api.version,
                "config": api.config,
                "engines": [_info(info) for info in engines if info is not None],
                "internal_states": [_state_of(client.snapshot) for client in api.pool.clients],
            }
        )

    @app.get("/flush_cache", include_in_schema=False)
    @app.post("/flush_cache", tags=["state"])
    @app.post("/reset_prefix_cache", tags=["state"])
    async def reset_prefix_cache() -> Response:
        """Drop every cached page that no request uses; takes effect before each engine's next
        step."""
        for client in api.pool.clients:
            client.reset_prefix()
        return _json({"status": "ok"})


def _tools(app: FastAPI, api: Api) -> None:
    """Routes that load generators and evaluation harnesses query at start."""

    @app.get("/get_model_info", include_in_schema=False)
    @app.get("/model_info", tags=["state"])
    async def model_info() -> Response:
        """By what names clients load the model and its tokenizer, in SGLang's words."""
        name = api.served.names[0]
        return _json(
            {
                "model_path": api.config.get("root", name),
                "tokenizer_path": api.config.get("tokenizer_root", name),
                "is_generation": True,
            }
        )

    @app.get("/tokenizer_info", tags=["text"])
    async def tokenizer_info() -> Response:
        """The tokenizer's settings and the chat template, as vLLM tells them."""
        return _json(api.served.tokenizer.info())


def _state_of(snapshot: Snapshot) -> dict[str, Any]:
    """One engine's speculative acceptance, in SGLang's fields; empty before the first draft."""
    drafts = snapshot.drafted[0] if snapshot.drafted else 0
    return {"avg_spec_accept_length": 1 + sum(snapshot.accepted) / drafts} if drafts else {}


def _info(info: Any) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__struct_fields__}


def _errors(app: FastAPI, api: Api) -> None:
    """Every error has OpenAI's format, or Anthropic's on their routes, whatever raised it."""

    def answer(request: Request, error: ApiError) -> Response:
        api.counts[f"failed_{error.status}"] += 1
        return error_response(error, request.url.path)

    @app.exception_handler(ApiError)
    async def own(request: Request, error: ApiError) -> Response:
        return answer(request, error)

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> Response:
        return answer(request, bad_request(str(error), parameter_of(str(error))))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        kind = request.headers.get("content-type", "")
        wrong_kind = request.method == "POST" and not is_json(kind)
        return answer(request, not_json(kind) if wrong_kind else invalid_body(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        if error.status_code == 400:  # FastAPI's alone, of a body; no route raises one
            return answer(request, unreadable(error.__cause__))
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        found = answer(request, ApiError(error.status_code, str(error.detail), kind))
        found.headers.update(error.headers or {})
        return found

    @app.exception_handler(Exception)
    async def defect(request: Request, error: Exception) -> Response:
        message = f"internal error: {type(error).__name__}"
        found = answer(request, ApiError(500, message, "server_error"))
        found.headers["x-request-id"] = request_id.get()  # this response bypasses the middleware
        return found


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
