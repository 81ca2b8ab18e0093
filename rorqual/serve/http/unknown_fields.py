"""Unknown fields of a body: those that would change the output are rejected; others are ignored and
named in a response header, or rejected too."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from rorqual.errors import quoted
from rorqual.serve.errors import bad_request, encodable

log = logging.getLogger("rorqual.serve")

HEADER = b"x-rorqual-ignored"
LISTED = 20  # names in the header
LONGEST = 64  # characters of a name there
MOST = 100  # most unknown fields that are ignored; a body with more is rejected
WARNED = 1_000  # most names that are logged

# Known to OpenAI's or vLLM's API but not supported here, and they change tokens or the meaning of a
# response. Values without effect are accepted, as is null.
REFUSED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "truncation_side": ("left",),
    "thinking_token_budget": (),
    "logits_processors": ([],),
    "chat_template": (),
    "documents": ([],),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "web_search_options": (),
    "structural_tag": (),
    "top_a": (0, 0.0),
    "previous_response_id": (),
    "rorqual_resume": (),
}

# Likewise of a chat's messages and their parts, where servers give them a meaning.
REFUSED_WITHIN: dict[str, tuple[Any, ...]] = {
    "prefix": (False,),
    "partial": (False,),
    "tools": ([],),
    "images": ([],),
    "documents": ([],),
}

# State of the body being parsed, by task: pydantic's validators can keep it nowhere else.
ignored: ContextVar[Mapping[str, None]] = ContextVar("ignored", default=MappingProxyType({}))


def set_aside(data: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """The `known` fields; names of others are added to `ignored`. Raises ApiError for one of
    REFUSED with an effect."""
    others = [name for name in data if name not in known and data[name] is not None]
    for name in others:
        if name in REFUSED and data[name] not in REFUSED[name]:
            raise bad_request(f"{name} is not supported here", name)
    ignored.set(dict.fromkeys(name for name in others if name not in REFUSED))
    return {name: value for name, value in data.items() if name in known}


def set_aside_within(data: dict[str, Any], known: Collection[str], place: str) -> dict[str, Any]:
    """Likewise for an object within a chat's messages or tools; `place` is before the names."""
    found = ignored.get()
    others = [name for name in data if name not in known and data[name] is not None]
    for name in others:
        if name in REFUSED_WITHIN and data[name] in REFUSED_WITHIN[name]:
            continue
        path = f"{place}.{name}"
        if name in REFUSED_WITHIN:
            raise bad_request(f"{path} is not supported here", path)
        # beyond MOST the body is refused; no more need to be kept
        if path not in found and len(found) <= MOST:
            found = {**found, path: None}
            ignored.set(found)
    return {name: value for name, value in data.items() if name in known}


class UnknownFields:
    """refuse: reject any unknown field, not only more than MOST. warned: names already logged."""

    def __init__(self, refuse: bool):
        self.refuse = refuse
        self.warned: set[str] = set()

    def check(self) -> None:
        """Called after parsing a body. Raises ApiError where unknown fields are rejected."""
        names = list(ignored.get())
        if len(names) > MOST or (names and self.refuse):
            shown = quoted(names[0], "")
            raise bad_request(f"the field '{shown}' is not known here", shown)
        for name in names[:LISTED]:
            if name not in self.warned and len(self.warned) < WARNED:
                self.warned.add(name)
                log.warning("a request's unknown field %s is ignored", quoted(name))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers that name the ignored fields."""
        names = list(ignored.get())
        listed = [quote(encodable(name[:LONGEST]), safe="") for name in names[:LISTED]]
        return [(HEADER, ", ".join(listed).encode())] if listed else []

    def named(self, answer: Response) -> Response:
        """With these headers."""
        answer.raw_headers.extend(self.headers())
        return answer
