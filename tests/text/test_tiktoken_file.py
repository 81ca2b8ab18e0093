"""A vocabulary in tiktoken's form, against joining by rank written out."""

from __future__ import annotations

import base64
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from rorqual.errors import LoadError
from rorqual.text.tiktoken_file import FILE, RESERVED, byte_letters
from rorqual.text.tokenizer import Tokenizer

SAMPLE = (
    "the cat sat on the mat, then 1234 rats ate that; It's THE END\n\n  naïve 中文字 🐋 of thanks"
)
SETTINGS = {"added_tokens_decoder": {"400": {"content": "[BOS]"}, "402": {"content": "<|im_end|>"}}}


def vocabulary(size: int = 400) -> list[bytes]:
    """Bytes, then joins of two known tokens, as training would make them."""
    known = [bytes([byte]) for byte in range(256)]
    draw = random.Random(4)
    text = SAMPLE.encode()
    while len(known) < size:
        start = draw.randrange(len(text))
        token = text[start : start + draw.randint(2, 5)]
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        if token not in known and any(a in known and b in known for a, b in halves):
            known.append(token)
    return known


def write(folder: Path, tokens: list[bytes]) -> Path:
    lines = (base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens))
    (folder / FILE).write_bytes(b"\n".join(lines) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    return folder


def joined(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The neighbours whose join has the lowest rank, the first of several, until none has one."""
    parts = [bytes([byte]) for byte in piece]
    while True:
        pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if piece in ranks:
            return [ranks[piece]]
        if not pairs:
            return [ranks[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_pieces_are_joined_by_rank(tmp_path: Path) -> None:
    tokens = vocabulary()
    ranks = {token: rank for rank, token in enumerate(tokens)}
    tokenizer = Tokenizer(write(tmp_path, tokens))
    split = tokenizer.raw.pre_tokenizer.pre_tokenize_str(SAMPLE)
    back = {letter: byte for byte, letter in byte_letters().items()}
    pieces = [bytes(back[letter] for letter in piece) for piece, _ in split]
    assert b"".join(pieces) == SAMPLE.encode()
    assert {b"123", b"4", b" THE", b" It's", "中文字".encode(), b"\n\n"} <= set(pieces)
    assert tokenizer.encode(SAMPLE) == [token for piece in pieces for token in joined(piece, ranks)]
    assert tokenizer.decode(tokenizer.encode(SAMPLE)) == SAMPLE


def test_special_tokens_stand_behind_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, vocabulary()))
    assert tokenizer.encode("[BOS]")[:1] == [400]
    assert tokenizer.encode("<|im_end|>") == [402]
    assert tokenizer.raw.get_vocab_size() == 400 + RESERVED
    assert tokenizer.token(401) == "<|reserved_token_401|>"
    assert 402 in tokenizer.special_ids


@pytest.mark.parametrize(
    ("line", "said"),
    [(b"!!! 3", "line 257 is no token"), (b"YWI= x", "line 257"), (b"YWI= 900", "ranks 0 to 256")],
)
def test_a_damaged_file_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    write(tmp_path, vocabulary(256))
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(LoadError, match=said):
        Tokenizer(tmp_path)
