"""A conversation with a server that speaks the OpenAI API, over the standard library alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any

from rorqual.errors import TargetError

TIMEOUT = 600.0


def base_of(url: str) -> str:
    """Of a server's address with or without /v1. Raises TargetError."""
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise TargetError(
            f"url={url!r} is no address of a server; accepted: http://... or https://..."
        )
    return base


@contextmanager
def talking(base: str, lost: str = "cannot be reached") -> Iterator[None]:
    """Raises TargetError where the server is not there, of which `lost` says so much, or does not
    answer as it should."""
    try:
        yield
    except urllib.error.HTTPError as error:
        raise TargetError(f"{base} answers {error.code}: {_message(error.read())}") from None
    except OSError as error:
        raise TargetError(f"{base} {lost}: {getattr(error, 'reason', error)}") from None
    except (HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
        raise TargetError(
            f"{base} is no server of the OpenAI API ({type(error).__name__}: {error})"
        ) from None


def answer(url: str, body: dict[str, Any], key: str | None = None) -> Iterator[str]:
    """The pieces of a chat response as they arrive. `url` is the server's, with or without /v1.
    Raises TargetError."""
    base = base_of(url)
    data = json.dumps({**body, "stream": True}).encode()
    headers = {"content-type": "application/json", **_authorization(key)}
    with talking(base):
        request = urllib.request.Request(f"{base}/v1/chat/completions", data, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as stream:
            yield from _pieces(stream)


def _authorization(key: str | None) -> dict[str, str]:
    """Raises TargetError."""
    if key and not (key.isascii() and key.isprintable()):
        raise TargetError("--api-key holds a character that no header can have")
    return {"authorization": f"Bearer {key}"} if key else {}


def _pieces(lines: Iterator[bytes] | Any) -> Iterator[str]:
    for line in lines:
        data = line.strip().removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise TargetError(f"the answer broke off: {event['error'].get('message')}")
        for choice in event["choices"]:
            yield choice["delta"].get("reasoning_content") or choice["delta"].get("content") or ""


def _message(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace")[:200]


def served_model(url: str, key: str | None = None) -> str:
    """The first model a server names. Raises TargetError."""
    base = base_of(url)
    with talking(base, "is no server of the OpenAI API"):
        request = urllib.request.Request(f"{base}/v1/models", headers=_authorization(key))
        with urllib.request.urlopen(request, timeout=30) as found:
            return str(json.load(found)["data"][0]["id"])
