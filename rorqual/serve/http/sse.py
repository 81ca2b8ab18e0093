"""Responses as bytes. Chunks of a stream are assembled from pre-encoded parts: a token costs one
encoded string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from rorqual.request import Logprob
from rorqual.serve.http.choice import ChoiceBuilder
from rorqual.text.tokenizer import REPLACEMENT, Tokenizer

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
LOWEST = -9999.0  # represents minus infinity, which JSON lacks

Entries = list[tuple[int, dict[int, Logprob]]]
PromptEntries = list[dict[int, Logprob] | None]


class ChunkHead:
    """The head of every chunk of one response."""

    def __init__(self, name: str, kind: str, created: int, model: str, fingerprint: str):
        self.fields = {
            "id": name,
            "object": kind,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self.start = b"data: " + encode(self.fields)[:-1] + b',"choices":['
        self.kind = kind

    def event(self, choice: bytes, usage: bytes = b"") -> bytes:
        tail = b'],"usage":' + usage + b"}\n\n" if usage else b"]}\n\n"
        return self.start + choice + tail

    def whole(
        self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any], **more: Any
    ) -> bytes:
        return encode({**self.fields, "object": kind, "choices": choices, "usage": usage, **more})


class ChatChoice:
    """The chunks of one choice of a chat."""

    def __init__(self, index: int):
        self.start = b'{"index":%d,"delta":' % index
        self.text = self.start + b'{"content":'

    def role(self) -> bytes:
        return (
            self.start + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        )

    def content(self, text: str, logprobs: bytes = b"null") -> bytes:
        return self.text + encode(text) + b'},"logprobs":' + logprobs + b',"finish_reason":null}'

    def delta(self, fields: dict[str, Any], logprobs: bytes = b"null") -> bytes:
        return self.start + encode(fields) + b',"logprobs":' + logprobs + b',"finish_reason":null}'

    def other(self, name: str, value: Any) -> bytes:
        return self.start + encode({name: value}) + b',"logprobs":null,"finish_reason":null}'

    def last(self, finish: str, stop_reason: Any) -> bytes:
        return (
            self.start
            + b'{},"logprobs":null,"finish_reason":'
            + encode(finish)
            + b',"stop_reason":'
            + encode(stop_reason)
            + b"}"
        )


class TextChoice:
    """The chunks of one choice of a plain completion."""

    def __init__(self, index: int):
        self.start = b'{"index":%d,"text":' % index

    def content(
        self,
        text: str,
        logprobs: bytes = b"null",
        finish: str | None = None,
        stop_reason: Any = None,
    ) -> bytes:
        end = (
            b"null}"
            if finish is None
            else encode(finish) + b',"stop_reason":' + encode(stop_reason) + b"}"
        )
        return self.start + encode(text) + b',"logprobs":' + logprobs + b',"finish_reason":' + end


def usage(prompt: int, cached: int, replies: list[ChoiceBuilder]) -> dict[str, Any]:
    """Token counts; a prompt counts once for all its choices. cached: of prompt tokens, those that
    the prefix cache had."""
    output = sum(reply.tokens for reply in replies)
    details = {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": details,
    }


def chat_logprobs(
    entries: Entries, top: int, tokenizer: Tokenizer, as_ids: bool = False
) -> dict[str, Any]:
    return {
        "content": [_chat_entry(token, found, top, tokenizer, as_ids) for token, found in entries],
        "refusal": None,
    }


def _chat_entry(
    token: int, found: dict[int, Logprob], top: int, tokenizer: Tokenizer, as_ids: bool
) -> dict[str, Any]:
    ranked = sorted(found.items(), key=lambda item: item[1].rank or 0)[:top]
    likely = [_token(i, logprob, tokenizer, as_ids) for i, logprob in ranked]
    return {**_token(token, found[token], tokenizer, as_ids), "top_logprobs": likely}


def _named(token: int, text: str, as_ids: bool) -> str:
    """as_ids: several tokens may have the same text, or none that JSON can hold."""
    return f"token_id:{token}" if as_ids else text


def _token(token: int, found: Logprob, tokenizer: Tokenizer, as_ids: bool) -> dict[str, Any]:
    text = found.decoded_token or ""
    return {
        "token": _named(token, text, as_ids),
        "logprob": max(found.logprob, LOWEST),
        "bytes": token_bytes(token, text, tokenizer),
    }


def prompt_logprobs(
    prompt: Sequence[int], entries: PromptEntries, top: int
) -> list[dict[str, Any] | None]:
    """vLLM's format: each token and the `top` most likely ones, by token id."""
    return [
        None if entry is None else _by_id(token, entry, top)
        for token, entry in zip(prompt, entries, strict=True)
    ]


def _by_id(token: int, entry: dict[int, Logprob], top: int) -> dict[str, Any]:
    return {
        str(likely): {
            "logprob": max(found.logprob, LOWEST),
            "rank": found.rank,
            "decoded_token": found.decoded_token,
        }
        for likely, found in entry.items()
        if likely == token or (found.rank or 0) <= top
    }


def text_logprobs(
    entries: Iterable[tuple[int, dict[int, Logprob] | None]],
    top: int,
    offset: int,
    tokenizer: Tokenizer,
    as_ids: bool = False,
    shown: str | None = None,
) -> tuple[dict[str, Any], int]:
    """The lists of the completions API, and the text offset of the next token. The first token of a
    prompt has no entry. shown: the text of a prompt, which may lack special tokens that were
    added to it."""
    result: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for token, found in entries:
        text = tokenizer.token(token) if found is None else found[token].decoded_token or ""
        result["tokens"].append(_named(token, text, as_ids))
        result["text_offset"].append(offset)
        there = shown is None or shown.startswith(text, offset)
        if there or token not in tokenizer.special_ids:
            offset += len(text)
        if found is None:
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        ranked = sorted(found.items(), key=lambda item: item[1].rank or 0)
        kept = [item for rank, item in enumerate(ranked) if rank < top or item[0] == token]
        result["token_logprobs"].append(max(found[token].logprob, LOWEST))
        result["top_logprobs"].append(
            {
                _named(i, likely.decoded_token or "", as_ids): max(likely.logprob, LOWEST)
                for i, likely in kept
            }
        )
    return result, offset


def token_bytes(token: int, text: str, tokenizer: Tokenizer) -> list[int] | None:
    """The bytes of a token, also where it is part of a character; None where the vocabulary does
    not give them."""
    if REPLACEMENT not in text:
        return list(text.encode())
    found = [BYTE_OF.get(char) for char in tokenizer.raw.id_to_token(token) or "?"]
    return None if None in found else [byte for byte in found if byte is not None]


def _byte_alphabet() -> dict[str, int]:
    """The byte of each character in byte-level vocabularies: printable bytes are themselves, others
    are characters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + i): byte for i, byte in enumerate(others)},
    }


BYTE_OF = _byte_alphabet()
