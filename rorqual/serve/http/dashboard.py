"""`/dashboard`: one page that draws the server's figures, and login sessions for browsers where
there is an API key.

The page contains no figures: it fetches /dashboard/data, which needs the session's cookie. The
cookie is a signed expiry date. The signing secret is derived from the API key with a slow function,
so that sessions survive a restart, end when the key changes, and reveal nothing about it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import time
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from starlette.responses import Response

from rorqual.serve.engines.pool import EngineSlot
from rorqual.serve.errors import ApiError
from rorqual.serve.http.clients import bearer
from rorqual.serve.http.history import KEPT_SECONDS, History, HistoryRow, LatencyRow
from rorqual.serve.http.key_guard import KeyGuard
from rorqual.serve.http.metrics import snapshot
from rorqual.serve.http.response import error_response
from rorqual.serve.http.sse import encode

PAGE = Path(__file__).with_name("dashboard.html")
SESSION_SECONDS = 12 * 3600
MAX_LOGIN_BYTES = 8192  # of a login's body


class Sessions:
    """Access control: everyone where there is no key, else clients that send it, or have logged in
    with it."""

    def __init__(self, key: str | None):
        self.key = key.encode() if key else None
        self.secret = (
            hashlib.scrypt(self.key, salt=b"rorqual dashboard", n=1 << 14, r=8, p=1)
            if self.key
            else b""
        )
        # Cookies are per host, not per port: servers with different keys on one host need different
        # names.
        self.cookie = f"rorqual-session-{self._sign('name')[:12]}"

    def _sign(self, text: str) -> str:
        return hmac.new(self.secret, text.encode(), hashlib.sha256).hexdigest()

    def token(self, now: float) -> str:
        body = f"{int(now) + SESSION_SECONDS}.{secrets.token_hex(16)}"
        return f"{body}.{self._sign(body)}"

    def valid(self, token: str, now: float) -> bool:
        body, _, signature = token.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(body).encode()):
            return False
        return now < int(body.partition(".")[0])  # signed by us, so it is a number

    def has_cookie(self, request: Request) -> bool:
        try:
            cookies = SimpleCookie(request.headers.get("cookie", ""))
        except CookieError:
            return False
        return self.cookie in cookies and self.valid(cookies[self.cookie].value, time.time())

    def set_cookie(self, response: Response, request: Request, token: str) -> Response:
        """An empty token ends the session. `secure` is not set on plain HTTP: a browser would drop
        the cookie."""
        seconds = SESSION_SECONDS if token else 0
        secure = request.url.scheme == "https"
        response.set_cookie(
            self.cookie,
            token,
            max_age=seconds,
            path="/dashboard",
            secure=secure,
            httponly=True,
            samesite="strict",
        )
        return response


def add_dashboard(app: FastAPI, api: Any, key: str | None, guard: KeyGuard) -> None:
    """Add the page's routes. `api` is app.Api. The middleware does not check the key on these
    paths: they check the cookie themselves."""
    sessions = Sessions(key)
    body = PAGE.read_bytes()
    headers = {
        "content-security-policy": policy(body.decode()),
        "cache-control": "no-store",
        "x-content-type-options": "nosniff",
    }
    headers |= {"referrer-policy": "no-referrer", "x-frame-options": "DENY"}

    def page(status: int) -> Response:
        return Response(body, status, headers, "text/html")

    def refusal(given: bytes | None, request: Request) -> ApiError | None:
        """None where the key is right, or none is required."""
        error = guard.refusal(given, request.client.host if request.client else "")
        if error is not None:
            api.counts[f"failed_{error.status}"] += 1
        return error

    def unseen(request: Request) -> ApiError | None:
        """The error for a request with neither a session nor the key; else None."""
        if sessions.key is None or sessions.has_cookie(request):
            return None
        given = request.headers.get("authorization")
        if given is not None:
            return refusal(bearer(given.encode("latin-1")), request)
        return ApiError(
            401, "log in at /dashboard first", "authentication_error", code="no_session"
        )

    def to_page() -> Response:
        return Response(
            status_code=303, headers={"location": "/dashboard", "cache-control": "no-store"}
        )

    @app.get("/dashboard", include_in_schema=False)
    async def dashboard(request: Request) -> Response:
        error = unseen(request)
        return page(200 if error is None else error.status)

    @app.get("/dashboard/data", include_in_schema=False)
    async def figures(request: Request, since: float = 0.0, experts: bool = False) -> Response:
        error = unseen(request)
        if error is not None:
            return error_response(error)
        found = {
            **data(api, since, experts),
            "session": sessions.key is not None and sessions.has_cookie(request),
        }
        return Response(
            encode(found), media_type="application/json", headers={"cache-control": "no-store"}
        )

    @app.post("/dashboard/login", include_in_schema=False)
    async def login(request: Request) -> Response:
        if sessions.key is None:
            return to_page()
        error = refusal(_form_key(await request.body()).encode(), request)
        if error is not None:
            return page(401) if error.status == 401 else error_response(error)
        return sessions.set_cookie(to_page(), request, sessions.token(time.time()))

    @app.post("/dashboard/logout", include_in_schema=False)
    async def logout(request: Request) -> Response:
        return sessions.set_cookie(to_page(), request, "")


def _form_key(body: bytes) -> str:
    """The field `key` of a form; empty if the body is not a form."""
    if len(body) > MAX_LOGIN_BYTES:
        return ""
    try:
        return parse_qs(body.decode(), max_num_fields=8).get("key", [""])[0]
    except ValueError:
        return ""


def policy(page: str) -> str:
    """A Content-Security-Policy that allows only the page's own style and script, by their
    hashes."""
    style, script = (
        _hash(re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)) for tag in ("style", "script")
    )
    allowed = (
        f"script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "form-action 'self'"
    )
    return f"default-src 'none'; {allowed}; base-uri 'none'; frame-ancestors 'none'"


def _hash(found: list[str]) -> str:
    return " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in found
    )


def data(api: Any, since: float, experts: bool) -> dict[str, Any]:
    """The page's data: the figures of /stats, the served model and devices, and the rows after
    `since` (seconds, as in `now`).

    `expert_load` [layer][expert], summed over the engines, is large and changes slowly, so it is
    included only with `experts`."""
    history: History = api.history
    stats = snapshot(api.pool, api.rates, api.counts)
    load = [engine.pop("expert_load") for engine in stats["engines"]]
    return {
        **stats,
        "now": time.monotonic(),
        "boot": history.boot,
        "uptime": time.monotonic() - history.started,
        "kept_seconds": KEPT_SECONDS,
        "version": api.version,
        "models": api.served.names,
        "draining": api.draining,
        "places": [_place(engine, api.config["engine"]) for engine in api.pool.engines],
        "fields": HistoryRow._fields,
        "rows": [row for row in history.rows if row.at > since],
        "latency_fields": LatencyRow._fields,
        "latency_rows": [row for row in history.latencies if row.at > since],
        "records_experts": any(
            api.config["engine"].get(name) for name in ("record_expert_load", "enable_eplb")
        ),
        "expert_load": _summed(load) if experts else None,
    }


def _place(engine: EngineSlot, options: dict[str, Any]) -> dict[str, Any]:
    """One engine slot of the pool, with or without a serving process."""
    info = engine.client.info if engine.client is not None else None
    state = "serving" if engine.serving else "down" if info is not None else "starting"
    shown = ("dtype", "device", "max_model_len", "max_num_seqs", "num_pages", "page_size")
    facts = {name: getattr(info, name) for name in shown} if info is not None else {}
    return {
        "engine": engine.index,
        "state": state,
        "deaths": engine.deaths,
        "num_speculative_tokens": options.get("num_speculative_tokens", 0),
        **facts,
    }


def _summed(loads: list[list[list[int]]]) -> list[list[int]]:
    """Sum over a server's engines, which have the same layers; skips those without counts."""
    return [
        [sum(counts) for counts in zip(*layers, strict=True)]
        for layers in zip(*(load for load in loads if load), strict=True)
    ]
