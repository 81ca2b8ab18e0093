"""/start_profile and /stop_profile: the engines' next steps recorded for Perfetto.

Recording slows the engines and writes files, so it is only for the server's operator: it needs
--profile-dir, the API key where there is one, and a direct connection from this machine, not
through a proxy or from a browser's page.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.errors import ApiError, bad_request, not_ready
from rorqual.serve.http.protocol import Model, Whole
from rorqual.serve.http.sse import encode
from rorqual.serve.messages import TraceDone

log = logging.getLogger("rorqual.serve")

MAX_STEPS = 200  # same as in engine/step_trace.py, which needs torch
DEFAULT_STEPS = 10
MAX_NAME_LENGTH = 64
MAX_PROFILES = 100  # files in the folder
WRITE_SECONDS = 120.0  # that /stop_profile waits for the files
NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_NAME_LENGTH - 1}}}")
PASSED_ON = ("forwarded", "x-forwarded-for", "x-real-ip", "via", "origin")

ANSWERS: dict[int | str, dict[str, Any]] = {
    403: {"description": "Not from this machine, or passed on by a proxy or a page."},
    409: {"description": "A profile is under way, or none is, or the folder is full."},
}


class StartProfile(Model):
    num_steps: Annotated[Whole, Field(ge=1, le=MAX_STEPS)] = Field(
        default=DEFAULT_STEPS, description="Steps of each engine to record."
    )
    output: str | None = Field(
        default=None, description="The files' name in --profile-dir; the time if left out."
    )


class Profiles:
    """The server's profiles: one at a time, of all its engines together."""

    def __init__(self, pool: EnginePool, folder: Path):
        self.pool = pool
        self.folder = folder
        self.under_way: asyncio.Task[list[TraceDone]] | None = None

    def start(self, wanted: StartProfile) -> str:
        """Start a profile; returns its files' prefix. Raises ApiError."""
        if self.under_way is not None and not self.under_way.done():
            raise conflict("a profile is under way; /stop_profile ends it")
        if not self.pool.complete:
            raise not_ready("an engine is not ready")
        name = wanted.output or time.strftime("%Y%m%d-%H%M%S")
        if not NAME.fullmatch(name):
            raise bad_request(
                f"output must be a name of up to {MAX_NAME_LENGTH} letters, digits, '_', '.' and "
                "'-', and begin with a letter or digit: no path",
                "output",
            )
        found = [path.name for path in self.folder.glob("*.json.gz")]
        if len(found) >= MAX_PROFILES:
            raise conflict(f"the folder holds {len(found)} profiles; accepted: {MAX_PROFILES}")
        if any(there == f"{name}.json.gz" or there.startswith(f"{name}-") for there in found):
            raise conflict(f"there is a profile {name!r} already", "output")
        several = len(self.pool.engines) > 1
        ends = [
            client.start_trace(
                str(self.folder / (f"{name}-engine{client.index}" if several else name)),
                wanted.num_steps,
            )
            for client in self.pool.clients
        ]
        self.under_way = asyncio.create_task(_ended(ends))
        return name

    async def stop(self) -> dict[str, Any]:
        """Stop the profile, and wait for its files. Raises ApiError."""
        if self.under_way is None or self.under_way.done():
            raise conflict("no profile is under way")
        for client in self.pool.clients:
            client.stop_trace()
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                found = await asyncio.shield(self.under_way)
        except TimeoutError:
            message = f"the profile is not written after {WRITE_SECONDS:g} s"
            raise ApiError(500, message, "server_error") from None
        errors = [error for one in found for error in one.errors]
        if errors:
            raise ApiError(500, f"the profile was not written: {errors[0]}", "server_error")
        return {"status": "written", "files": _names(found)}


async def _ended(ends: list[asyncio.Future[TraceDone]]) -> list[TraceDone]:
    found = [await end for end in ends]
    for error in (error for one in found for error in one.errors):
        log.error("profile: %s", error)
    log.info("profile written: %s", ", ".join(_names(found)) or "nothing")
    return found


def _names(found: list[TraceDone]) -> list[str]:
    return [Path(path).name for one in found for path in one.files]


def conflict(message: str, param: str | None = None) -> ApiError:
    return ApiError(409, message, param=param, code="conflict")


def check_near(request: Request) -> None:
    """Raises ApiError unless the request comes directly from this machine."""
    host = request.client.host if request.client else ""
    passed_on = [name for name in PASSED_ON if name in request.headers]
    if passed_on or not _is_loopback(host):
        why = f"with the header {passed_on[0]}" if passed_on else "from another address"
        raise ApiError(
            403,
            f"profiles are taken for this machine's loopback address alone; this came {why}",
            "permission_error",
            code="not_loopback",
        )


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def add_tracing(app: FastAPI, pool: EnginePool, folder: Path) -> None:
    """Add the routes; the middleware has checked the API key."""
    profiles = Profiles(pool, folder)

    @app.post("/start_profile", responses=ANSWERS, tags=["state"])
    async def start_profile(request: Request, body: StartProfile | None = None) -> Response:
        """Record the next steps of every engine, each rank into its own file."""
        check_near(request)
        wanted = body or StartProfile()
        name = profiles.start(wanted)
        return _json({"status": "started", "output": name, "num_steps": wanted.num_steps})

    @app.post("/stop_profile", responses=ANSWERS, tags=["state"])
    async def stop_profile(request: Request) -> Response:
        """Stop recording; responds when the files are written."""
        check_near(request)
        return _json(await profiles.stop())


def _json(value: Any) -> Response:
    return Response(encode(value), media_type="application/json")
