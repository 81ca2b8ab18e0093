"""The most text one token can cover: a lower bound of a text's tokens before it is tokenized."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

# Code points that normalization can merge into one: no character decomposes into more than four.
SHRINKS = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Prepend": 1, "ByteLevel": 1}
KEEPS = frozenset(("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation"))


def longest_token(raw: Tokenizer) -> int | None:
    """Most characters of a text that become one token; None if unknown: parts of the text may be
    dropped, or become one unknown token."""
    shrink = 1
    for part in _parts(raw.normalizer):
        found = _shrinks(part)
        if found is None:
            return None
        shrink *= found
    pre = list(_parts(raw.pre_tokenizer))
    if any(part["type"] not in KEEPS or part.get("behavior") == "Removed" for part in pre):
        return None
    vocabulary = raw.get_vocab(with_added_tokens=True)
    stripped = any(it.lstrip or it.rstrip for it in raw.get_added_tokens_decoder().values())
    if stripped or raw.truncation is not None or not _covers(raw.model, pre, vocabulary):
        return None
    return shrink * max(map(len, vocabulary))


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """The parts of a (nested) sequence, or the component itself."""
    waiting = [] if component is None else [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop()
        inner = part.get("normalizers", part.get("pretokenizers"))
        if inner is None:
            yield part
        else:
            waiting.extend(inner)


def _shrinks(part: dict[str, Any]) -> int | None:
    if part["type"] == "Replace":
        old = part["pattern"].get("String")
        return 1 if old is not None and len(part["content"]) >= len(old) else None
    return SHRINKS.get(part["type"])


def _covers(model: Any, pre: list[dict[str, Any]], vocabulary: dict[str, int]) -> bool:
    """Whether every text can be tokenized: each byte has its own token."""
    if not isinstance(model, BPE):
        return False
    if any(part["type"] == "ByteLevel" for part in pre):
        return all(letter in vocabulary for letter in ByteLevel.alphabet())
    return model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
