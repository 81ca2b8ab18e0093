"""Streams that can be continued: read with their comments, cut, gone on with, and put together."""

from __future__ import annotations

import json
import re
import urllib.request
from dataclasses import dataclass, field
from typing import Any

COMMENT = re.compile(r": rorqual (\d+) ((?:\d+(?:,\d+)*)?)( end)?")


@dataclass
class Event:
    """One of a stream's. named: by choice the tokens its comments name, and whether they end it."""

    data: dict[str, Any]
    named: dict[int, tuple[list[int], bool]] = field(default_factory=dict)


def parsed(text: str) -> list[Event]:
    """All but [DONE], which must be there."""
    blocks = text.removesuffix("\n\n").split("\n\n")
    assert blocks[-1] == "data: [DONE]", text[-500:]
    return [_event(block) for block in blocks[:-1]]


def _event(block: str) -> Event:
    *comments, data = block.split("\n")
    event = Event(json.loads(data.removeprefix("data: ")))
    for comment in comments:
        found = COMMENT.fullmatch(comment)
        assert found is not None, comment
        tokens = [int(token) for token in found[2].split(",") if token]
        event.named[int(found[1])] = (tokens, found[3] is not None)
    choices = {choice["index"]: choice for choice in event.data["choices"]}
    assert event.named.keys() == choices.keys(), "one comment a choice"
    for index, choice in choices.items():
        assert event.named[index][1] == (choice["finish_reason"] is not None)
    return event


def resume_field(events: list[Event]) -> dict[str, Any]:
    """How to go on behind these."""
    tokens: dict[int, list[int]] = {}
    ended: dict[int, bool] = {}
    for event in events:
        for choice, (new, end) in event.named.items():
            assert not ended.get(choice), "nothing follows the end"
            tokens.setdefault(choice, []).extend(new)
            ended[choice] = end
    first = events[0].data
    choices = [
        {"index": index, "token_ids": tokens[index], "ended": ended[index]} for index in tokens
    ]
    return {"id": first["id"], "created": first["created"], "choices": choices}


def joined(events: list[Event]) -> dict[str, Any]:
    """What a client has of a stream: of each choice its parts put together, and the last usage.
    How tokens were grouped to events does not show, nor do random ids of calls."""
    heads = {(e.data["id"], e.data["created"], e.data["model"]) for e in events}
    assert len(heads) == 1
    found: dict[str, Any] = {}
    for event in events:
        for choice in event.data["choices"]:
            _join(found.setdefault(choice["index"], {}), choice)
    usage = dict(events[-1].data.get("usage") or {})
    usage.pop("prompt_tokens_details", None)  # another server's cache has other prefixes
    return {**found, "head": heads.pop(), "usage": usage}


def _join(found: dict[str, Any], choice: dict[str, Any]) -> None:
    assert found.get("finish_reason") is None, "nothing follows the end"
    for name in ("finish_reason", "stop_reason"):
        found[name] = choice.get(name)
    delta = choice.get("delta", {})
    for name, part in (("text", choice.get("text")), *delta.items()):
        if isinstance(part, str):
            found[name] = found.get(name, "") + part
    for call in delta.get("tool_calls", ()):
        calls = found.setdefault("tool_calls", [])
        if "id" in call:
            assert call["index"] == len(calls), "a call begins once"
            calls.append([call["function"]["name"], ""])
        calls[call["index"]][1] += call["function"].get("arguments", "")
    for name in ("token_ids", "prompt_token_ids"):
        if choice.get(name) is not None:
            found.setdefault(name, []).extend(choice[name])
    for name, entries in (choice.get("logprobs") or {}).items():
        found.setdefault(f"logprobs {name}", []).extend(entries or ())


def stream(url: str, path: str, body: dict[str, Any], **more: Any) -> list[Event]:
    """A stream with comments; more: fields."""
    made = urllib.request.Request(
        url + path,
        json.dumps({**body, **more, "stream": True}).encode(),
        {"content-type": "application/json", "x-rorqual-resumable": "1"},
    )
    with urllib.request.urlopen(made, timeout=60) as answer:
        return parsed(answer.read().decode())


def cuts(count: int, some: bool) -> list[int]:
    """After how many events to cut. some: the first, the last ones and a few between."""
    every = list(range(1, count + 1))
    return (
        every
        if not some
        else sorted({1, 2, count // 3, count // 2, count - 2, count - 1, count} & {*every})
    )


def check_resumed(url: str, path: str, body: dict[str, Any], some: bool) -> dict[str, Any]:
    """Wherever the stream is cut, what goes on behind it makes the undisturbed one. Returns
    that."""
    whole = stream(url, path, body)
    want = joined(whole)
    for count in cuts(len(whole), some):
        kept = whole[:count]
        rest = stream(url, path, body, rorqual_resume=resume_field(kept))
        assert near(joined(kept + rest), want), f"cut after {count} of {len(whole)} events"
    return want


def near(found: Any, want: Any) -> bool:
    """Equal but for rounding: a prompt's rows and a decoded token's are computed by products of
    other shapes."""
    if isinstance(want, float):
        return abs(found - want) < 1e-3
    if isinstance(want, dict):
        return found.keys() == want.keys() and all(near(found[key], want[key]) for key in want)
    if isinstance(want, list):
        return len(found) == len(want) and all(map(near, found, want))
    return bool(found == want)
