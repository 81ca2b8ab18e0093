"""Unknown fields of a body: those that would change the output are rejected; others are ignored and
named in a response header, or rejected too."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

from rorqual.errors import quoted
from rorqual.serve.errors import bad_request

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

# State of the body being parsed, by task: pydantic's validators can keep it nowhere else.
ignored: ContextVar[tuple[str, ...]] = ContextVar("ignored", default=())


def set_aside(data: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """The `known` fields; names of others are added to `ignored`. Raises ApiError for one of
    REFUSED with an effect."""
    others = [name for name in data if name not in known and data[name] is not None]
    for name in others:
        if name in REFUSED and data[name] not in REFUSED[name]:
            raise bad_request(f"{name} is not supported here", name)
    ignored.set(tuple(name for name in others if name not in REFUSED))
    return {name: value for name, value in data.items() if name in known}


class UnknownFields:
    """refuse: reject any unknown field, not only more than MOST. warned: names already logged."""

    def __init__(self, refuse: bool):
        self.refuse = refuse
        self.warned: set[str] = set()

    def check(self) -> None:
        """Called after parsing a body. Raises ApiError where unknown fields are rejected."""
        names = ignored.get()
        if len(names) > MOST or (names and self.refuse):
            shown = quoted(names[0], "")
            raise bad_request(f"the field '{shown}' is not known here", shown)
        for name in names[:LISTED]:
            if name not in self.warned and len(self.warned) < WARNED:
                self.warned.add(name)
                log.warning("a request's unknown field %s is ignored", quoted(name))

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers that name the ignored fields."""
        names = ignored.get()
        listed = [quote(name[:LONGEST], safe="") for name in names[:LISTED]]
        return [(HEADER, ", ".join(listed).encode())] if listed else []
