"""A vocabulary in tiktoken's form (Kimi-K2: tiktoken.model) as a tokenizer of the `tokenizers`
library. A line holds a token's bytes in base64 and its rank; the pair of lowest rank is joined
first."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from rorqual.errors import LoadError

FILE = "tiktoken.model"
RESERVED = 256  # ids after the vocabulary for special tokens, as in Kimi-K2's tokenizer
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Kimi-K2's pre-tokenization pattern.
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Raises LoadError."""
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        parts = line.split()
        if not parts:
            continue
        try:
            token, rank = base64.b64decode(parts[0], validate=True), int(parts[1])
        except (binascii.Error, ValueError, IndexError):
            raise LoadError(f"{path} line {number} is no token and its rank") from None
        ranks[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        raise LoadError(f"{path} must hold every single byte, and ranks 0 to {len(ranks) - 1}")
    return ranks


def byte_letters() -> dict[int, str]:
    """The character by which byte-level BPE writes each byte: printable ones are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {byte: chr(byte) for byte in printable}
    return found | {byte: chr(256 + place) for place, byte in enumerate(others)}


def merges_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that joins to a third, by the rank of the result."""
    found = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair[0] in ranks and pair[1] in ranks:
                found.append((rank, ranks[pair[0]], pair))
    return [pair for _, _, pair in sorted(found)]


def tiktoken_tokenizer(path: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """`settings`: tokenizer_config.json, which names special tokens by their ids; ids after the
    vocabulary that it does not name are reserved."""
    ranks = read_ranks(path)
    letters = byte_letters()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {text(token): rank for token, rank in ranks.items()}
    merges = [(text(left), text(right)) for left, right in merges_of(ranks)]
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_special(settings, len(ranks), path))
    return tokenizer


def _special(settings: Mapping[str, Any], first: int, path: Path) -> list[AddedToken]:
    """Special tokens in order of their ids, which follow the vocabulary without gaps."""
    named = {
        int(number): str(token["content"])
        for number, token in (settings.get("added_tokens_decoder") or {}).items()
    }
    outside = [number for number in named if not first <= number < first + RESERVED]
    if outside:
        last = first + RESERVED - 1
        raise LoadError(f"{path}: special token {outside[0]} is outside {first} to {last}")
    return [
        AddedToken(named.get(number, f"<|reserved_token_{number}|>"), normalized=False)
        for number in range(first, first + RESERVED)
    ]
