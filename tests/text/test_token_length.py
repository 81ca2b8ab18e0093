"""How many characters one token can stand for, and tokenizing that leaves other threads alone."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder

from rorqual.models.hub import BUNDLED
from rorqual.text.token_length import longest_token
from rorqual.text.tokenizer import Tokenizer as OurTokenizer


def byte_level(normalizer: object = None, split: object = None) -> Tokenizer:
    letters = pre_tokenizers.ByteLevel.alphabet()
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.pre_tokenizer = byte if split is None else pre_tokenizers.Sequence([split, byte])
    raw.decoder = ByteLevelDecoder()
    if normalizer is not None:
        raw.normalizer = normalizer
    return raw


@pytest.fixture(scope="module")
def bundled() -> OurTokenizer:
    return OurTokenizer(BUNDLED)


def test_bundled(bundled: OurTokenizer) -> None:
    assert bundled.longest == 32


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60) | st.text(" \n=a", max_size=300))
def test_no_text_has_fewer_tokens_than_that_says(bundled: OurTokenizer, text: str) -> None:
    assert bundled.longest is not None
    assert len(text) <= bundled.longest * len(bundled.encode(text, add_special_tokens=False))


@settings(max_examples=200, deadline=None)
@given(text=st.text("aαe\u0301\u0313\u0300\u0345\u1100\u1161\u11a8\u0323", max_size=60))
def test_composing_characters_is_allowed_for(text: str) -> None:
    raw = byte_level(normalizers.NFC())
    longest = longest_token(raw)
    assert longest == 4
    assert len(text) <= longest * len(raw.encode(text).ids)


@pytest.mark.parametrize(
    "raw",
    [
        byte_level(normalizers.Strip()),
        byte_level(normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
        byte_level(normalizers.Replace("aaaa", "a")),
        byte_level(normalizers.Replace(Regex("a+"), "aaaaaa")),
        byte_level(split=pre_tokenizers.Whitespace()),
        byte_level(split=pre_tokenizers.Split(" ", "removed")),
        Tokenizer(models.BPE(vocab={"a": 0, "<unk>": 1}, merges=[], unk_token="<unk>")),
        Tokenizer(models.WordLevel(vocab={"<unk>": 0}, unk_token="<unk>")),
    ],
    ids=["strip", "accents", "replace", "pattern", "words", "removed", "unknown", "word level"],
)
def test_where_text_may_be_dropped_nothing_is_promised(raw: Tokenizer) -> None:
    assert longest_token(raw) is None


def test_a_token_that_eats_spaces_promises_nothing() -> None:
    raw = byte_level()
    assert longest_token(raw) == 1
    raw.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert longest_token(raw) is None
    raw = byte_level()
    raw.enable_truncation(10)
    assert longest_token(raw) is None


def longest_pause(bundled: OurTokenizer, texts: list[str]) -> tuple[float, list[list[int]]]:
    """Of a thread beside one that tokenizes, as a share of what that takes; and the ids."""
    found: list[list[int]] = []
    start = time.monotonic()
    working = threading.Thread(target=lambda: found.extend(bundled.encode_all(texts)))
    working.start()
    pause = 0.0
    last = start
    while working.is_alive():
        time.sleep(0.001)
        now = time.monotonic()
        pause = max(pause, now - last)
        last = now
    return pause / (last - start), found


def test_others_run_while_a_long_text_is_tokenized(bundled: OurTokenizer) -> None:
    """Another thread's pause was all of it. On a loaded machine one may be long for other reasons,
    but not each time."""
    text = "word " * 200_000
    pauses = []
    while not pauses or (pauses[-1] >= 0.5 and len(pauses) < 5):
        pause, found = longest_pause(bundled, [text, "a"])
        assert found == [bundled.encode(text), bundled.encode("a")]
        pauses.append(pause)
    assert min(pauses) < 0.5, pauses
