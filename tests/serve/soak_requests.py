"""What the soak asks, and how it knows a wrong answer: grammars must be kept to, tool calls be
JSON, streams end, counts be within their limits, and greedy answers be those of a quiet server."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.serve.running import Running

COMPLETE = "/v1/completions"
CHAT = "/v1/chat/completions"
BROKEN = [
    b"{",
    b"[]",
    b"null",
    b'{"prompt": 1}',
    b'{"prompt": "a", "n": -1}',
    b'{"prompt": "a", "use_beam_search": true}',
    b"\xff\xfe",
    b'{"messages": []}',
    b'{"prompt": "a", "guided_regex": "["}',
    b'{"prompt": [99999]}',
    b'{"prompt": "a", "max_tokens": 1.5}',
    b"[" * 2000,
]
WORDS = ("whale", "sea", "ship", "captain", "night")
STARTS = ("In the beginning", "Once upon a time", "The captain said", "My dear Elizabeth,")
MARGIN = 0.1  # by which a greedy token must be likelier than the next, to be the same in any batch
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "big": {"type": "boolean"}},
    "required": ["name", "big"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
FORCED = {"type": "function", "function": {"name": "look"}}


@dataclass
class Answer:
    """One choice of an answer, whole or put together from a stream."""

    text: str = ""
    arguments: str = ""
    finish: str | None = None


Check = Callable[[Answer], bool]


@dataclass(frozen=True)
class Ask:
    """`right` is asked of every choice."""

    kind: str
    path: str
    body: dict[str, Any]
    right: Check = lambda answer: True


def read(data: bytes, stream: bool) -> list[Answer]:
    """The choices of an HTTP answer; raises ValueError, KeyError or IndexError where it has not
    the shape of one."""
    head, _, rest = data.partition(b"\r\n\r\n")
    text = unchunked(rest) if b"transfer-encoding: chunked" in head.lower() else rest
    if not stream:
        choices = [(found, found.get("message")) for found in json.loads(text)["choices"]]
    else:
        events = [line[6:] for line in text.split(b"\n") if line.startswith(b"data: ")]
        if events[-1].strip() != b"[DONE]":
            raise ValueError("a stream without its end")
        choices = [
            (found, found.get("delta"))
            for event in events[:-1]
            for found in json.loads(event)["choices"]
        ]
    answers: dict[int, Answer] = {}
    for choice, message in choices:
        answer = answers.setdefault(choice["index"], Answer())
        answer.text += choice.get("text") or (message or {}).get("content") or ""
        for call in (message or {}).get("tool_calls") or ():
            answer.arguments += call["function"].get("arguments") or ""
        answer.finish = choice.get("finish_reason") or answer.finish
    return [answers[index] for index in sorted(answers)]


def unchunked(data: bytes) -> bytes:
    found = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        found += data[:length]
        data = data[length + 2 :]
    return found


def wrong(ask: Ask, data: bytes) -> str | None:
    """What is wrong with a 200."""
    try:
        answers = read(data, ask.body.get("stream", False))
    except (ValueError, KeyError, IndexError) as error:
        return f"{ask.kind}: {error!r} in {data[-200:]!r}"
    if len(answers) != ask.body.get("n", 1):
        return f"{ask.kind}: {len(answers)} choices of {ask.body}"
    for answer in answers:
        if answer.finish not in ("stop", "length", "tool_calls") or not ask.right(answer):
            return f"{ask.kind}: {answer} to {ask.body}"
    return None


# ---- the kinds


def learn(server: Running) -> list[Ask]:
    """Greedy answers of a quiet server, as far as no token was a close call."""
    found = []
    for start in STARTS:
        body = {"prompt": start, "max_tokens": 24, "temperature": 0, "logprobs": 2}
        status, answer = server.request("POST", COMPLETE, body)
        assert status == 200, answer
        chosen = answer["choices"][0]["logprobs"]
        tops = [sorted(it.values())[-2:] for it in chosen["top_logprobs"]]
        close = [i for i, (second, first) in enumerate(tops) if first - second < MARGIN]
        sure = close[0] if close else len(tops)
        if sure < 3:
            continue
        body = {"prompt": start, "max_tokens": sure, "temperature": 0}
        status, answer = server.request("POST", COMPLETE, body)
        assert status == 200, answer
        expected = answer["choices"][0]["text"]
        found.append(Ask("greedy", COMPLETE, body, lambda it, text=expected: it.text == text))
    return found


def plain(chance: random.Random) -> Ask:
    common: dict[str, Any] = {
        "max_tokens": chance.randint(1, 24),
        "temperature": chance.choice([0, 0.8]),
    }
    if chance.random() < 0.2:
        common["stop"] = chance.sample([" the", "and", "\n", "e"], 2)
    if chance.random() < 0.1:
        common["n"] = chance.randint(2, 4)
        common["temperature"] = 0.8
    words = " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 60)))
    if chance.random() < 0.4:
        return Ask("chat", CHAT, {**common, "messages": [{"role": "user", "content": words}]})
    more = {"logprobs": 3} if chance.random() < 0.2 else {}
    return Ask("completion", COMPLETE, {**common, "prompt": words, **more})


def grammar(chance: random.Random) -> Ask:
    body: dict[str, Any] = {
        "prompt": chance.choice(WORDS),
        "max_tokens": 48,
        "temperature": chance.choice([0, 1]),
    }
    kind = chance.choice(["regex", "choice", "json"])
    if kind == "regex":
        pattern = f"[a-f]{{1,{chance.randint(2, 6)}}}"
        return Ask(kind, COMPLETE, {**body, "guided_regex": pattern}, matches(pattern))
    if kind == "choice":
        words = chance.sample(WORDS, 2)
        right = matches("|".join(map(re.escape, words)))
        return Ask(kind, COMPLETE, {**body, "guided_choice": words}, right)
    right = lambda it: it.finish == "length" or fits(it.text)  # noqa: E731
    return Ask(kind, COMPLETE, {**body, "guided_json": SCHEMA}, right)


def matches(pattern: str) -> Check:
    return lambda it: it.finish == "length" or re.fullmatch(pattern, it.text) is not None


def fits(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return [type(found.get(name)) for name in ("name", "big")] == [str, bool] and len(found) == 2


def tools(chance: random.Random) -> Ask:
    message = {"role": "user", "content": chance.choice(WORDS)}
    body = {"messages": [message], "tools": [TOOL], "tool_choice": FORCED, "max_tokens": 80}
    right = lambda it: it.finish == "length" or fits(it.arguments)  # noqa: E731
    return Ask("tools", CHAT, {**body, "temperature": chance.choice([0, 1])}, right)


def ask(chance: random.Random, learned: list[Ask]) -> Ask:
    kind = chance.random()
    if kind < 0.15:
        found = grammar(chance)
    elif kind < 0.2:
        found = tools(chance)
    elif kind < 0.4 and learned:
        found = chance.choice(learned)
    else:
        found = plain(chance)
    stream = chance.random() < 0.6
    return Ask(found.kind, found.path, {**found.body, "stream": stream}, found.right)
