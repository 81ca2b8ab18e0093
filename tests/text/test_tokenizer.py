"""Detokenizing token by token: whole characters only, and in the end exactly the text of all
tokens."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RawTokenizer

from rorqual.errors import LoadError, RequestError
from rorqual.text.chat_template import ChatTemplate
from rorqual.text.tokenizer import REPLACEMENT, TextStream, Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog " * 4,
    "鯨は海に住む 鯨は大きい",
    "naïve café cafe\u0301",
    "😀😀 👩‍👩‍👧‍👦",
]
TEXTS = [
    "plain words, 123",
    "  leading and trailing  ",
    "鯨は海に住む。한국어 हिन्दी",
    "emoji 😀 family 👩‍👩‍👧‍👦 flag 🇯🇵 skin 👍🏽",
    "combining cafe\u0301 a\u0308\u0323 z\u0351\u036b",
    "line\nbreaks\r\n\ttabs",
    "",
    "\u202eright to left\u202c עברית",
    "a real replacement character: \ufffd, kept \ufffd",
]


def save(raw: RawTokenizer, folder: Path, **settings_: object) -> Tokenizer:
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small byte-level BPE: of most characters above ASCII it knows the bytes alone."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=320, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
        ),
    )
    raw.add_tokens([AddedToken("<tool>", special=False)])
    return save(raw, tmp_path_factory.mktemp("byte_level"), eos_token="<eos>")


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Characters as tokens, everything else as <0xNN> tokens, in the manner of sentencepiece."""
    vocab = {"<eos>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for letter in "▁abcdefghijklmnopqrstuvwxyz,.":
        vocab[letter] = len(vocab)
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    raw.add_special_tokens(["<eos>"])
    return save(raw, tmp_path_factory.mktemp("byte_fallback"))


def stream_of(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> tuple[list[str], str]:
    stream = TextStream(tokenizer, skip)
    return [stream.push(token) for token in ids], stream.flush()


# ---- byte-level, as DeepSeek and Qwen have it


@pytest.mark.parametrize("text", TEXTS)
def test_each_character_comes_whole(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    pieces, rest = stream_of(byte_level, ids)
    assert "".join(pieces) + rest == text == byte_level.decode(ids)
    if REPLACEMENT not in text:
        assert REPLACEMENT not in "".join(pieces)
        assert rest == ""
    # Nothing is held back longer than needed: where the tokens so far end with a character, all of
    # it is out.
    shown = ""
    for count, piece in enumerate(pieces, 1):
        shown += piece
        so_far = byte_level.decode(ids[:count])
        assert so_far.startswith(shown)
        assert shown == so_far or so_far.endswith(REPLACEMENT)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=30))
def test_any_text_survives(byte_level: Tokenizer, text: str) -> None:
    pieces, rest = stream_of(byte_level, byte_level.encode(text))
    assert "".join(pieces) + rest == text


@settings(max_examples=500, deadline=None)
@given(ids=st.lists(st.integers(0, 319), max_size=40), skip=st.booleans())
def test_any_tokens_end_as_decode_has_them(
    byte_level: Tokenizer, ids: list[int], skip: bool
) -> None:
    """A model may put out bytes that are no text; they become replacements, the same ones in
    either way."""
    pieces, rest = stream_of(byte_level, ids, skip)
    assert "".join(pieces) + rest == byte_level.decode(ids, skip)
    shown = ""
    for count, piece in enumerate(pieces, 1):
        shown += piece
        assert byte_level.decode(ids[:count], skip).startswith(shown)
        assert not piece.endswith(REPLACEMENT), (
            "a replacement that a later byte may turn into a character"
        )


def test_an_unfinished_character_is_shown_by_flush(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ok 鯱")
    ids = ids[:-1] if len(byte_level.encode("鯱")) > 1 else ids
    pieces, rest = stream_of(byte_level, ids)
    assert "".join(pieces) == "ok "
    assert set(rest) == {REPLACEMENT}
    stream = TextStream(byte_level)
    for token in ids:
        stream.push(token)
    assert stream.flush() == rest
    assert stream.flush() == "", "flushed once"


def test_special_tokens_are_shown_on_request_only(byte_level: Tokenizer) -> None:
    eos = byte_level.raw.token_to_id("<eos>")
    ids = [eos, *byte_level.encode("fox"), eos, *byte_level.encode(" dog"), eos]
    assert "".join(stream_of(byte_level, ids)[0]) == "fox dog"
    assert "".join(stream_of(byte_level, ids, skip=False)[0]) == "<eos>fox<eos> dog<eos>"


def test_added_tokens_are_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("call <tool> now")
    assert byte_level.raw.token_to_id("<tool>") in ids
    assert "".join(stream_of(byte_level, ids)[0]) == "call <tool> now"


def test_the_text_of_one_token_alone(byte_level: Tokenizer) -> None:
    assert byte_level.token(byte_level.raw.token_to_id("<eos>")) == "<eos>"
    half = byte_level.encode("鯱")[0]
    assert byte_level.token(half) == REPLACEMENT


def test_a_long_run_without_text_stays_cheap(byte_level: Tokenizer) -> None:
    """With ignore_eos a model may repeat a token that shows nothing; the cost of a token must
    not grow with their number."""
    eos = byte_level.raw.token_to_id("<eos>")

    def seconds(count: int) -> float:
        stream = TextStream(byte_level)
        start = time.thread_time()
        for _ in range(count):
            stream.push(eos)
        return time.thread_time() - start

    seconds(10)
    few = min(seconds(500) for _ in range(3))
    many = seconds(4000)
    assert many < 3 * 8 * few, f"4,000 skipped tokens take {many:.3f} s, 500 take {few:.3f} s"


# ---- byte fallback


@pytest.mark.parametrize("text", [text for text in TEXTS if REPLACEMENT not in text])
def test_byte_fallback_puts_out_whole_characters(byte_fallback: Tokenizer, text: str) -> None:
    pieces, rest = stream_of(byte_fallback, byte_fallback.encode(text))
    assert "".join(pieces) + rest == text
    assert REPLACEMENT not in "".join(pieces)


def bytes_as_tokens(data: bytes) -> list[int]:
    return [1 + byte for byte in data]


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(
        st.one_of(st.integers(0, 285), st.sampled_from(bytes_as_tokens("鯨é".encode()))),
        max_size=20,
    )
)
@example(ids=[*bytes_as_tokens("鯨".encode()), *bytes_as_tokens(b"\xff"), 260])
def test_byte_fallback_survives_any_tokens(byte_fallback: Tokenizer, ids: list[int]) -> None:
    """Here `decode` may change its mind about bytes already shown (a run with one bad byte is
    all replacements), so the text need not equal it; but no tokens may raise, and letters must
    come through."""
    pieces, rest = stream_of(byte_fallback, ids)
    text = "".join(pieces) + rest
    letters = list(byte_fallback.decode([i for i in ids if i > 256]))
    left = iter(text)
    assert all(letter in left for letter in letters), f"{text!r} lacks letters of {letters}"


# ---- files


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)


def test_damaged_settings_are_named(byte_level: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((byte_level.folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(LoadError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer(tmp_path)


def test_a_base_model_has_no_chat(byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        byte_level.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("place", ["settings", "file"])
def test_chat_template(byte_level: Tokenizer, tmp_path: Path, place: str) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor "
        "%}{% if add_generation_prompt %}[bot]{% endif %}"
    )
    raw = RawTokenizer.from_file(str(byte_level.folder / "tokenizer.json"))
    given_ = {"chat_template": template} if place == "settings" else {}
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = save(raw, tmp_path, eos_token={"content": "<eos>"}, **given_)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "fox"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "[user]fox<eos>[bot]"
    assert raw.token_to_id("<eos>") in ids
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "fox"}], add_generation_prompt=False
    )
    assert tokenizer.decode(ids, skip_special_tokens=False) == "[user]fox<eos>"


# ---- what stands around a text

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
WRAPPED = {"__type": "AddedToken", "content": EOS, "normalized": True}
WRAPPED.update(dict.fromkeys(("lstrip", "rstrip", "single_word"), False))
BYTES = processors.ByteLevel(trim_offsets=False)
TEMPLATE = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
POST: dict[str, Any] = {
    "nothing": None,
    "bytes": BYTES,
    "template": TEMPLATE,
    "both": processors.Sequence([BYTES, TEMPLATE]),
}


def saved(folder: Path, post: str, **settings_: object) -> Tokenizer:
    """In the form of DeepSeek's: byte-level, with tokens for the ends of a text."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[BOS, EOS],
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    if POST[post] is not None:
        raw.post_processor = POST[post]
    return save(raw, folder, **{"bos_token": BOS, "eos_token": WRAPPED, **settings_})


@pytest.mark.parametrize("ends", [None, False, True])
@pytest.mark.parametrize("begins", [None, False, True])
@pytest.mark.parametrize("post", POST)
@pytest.mark.parametrize(
    "kind",
    ["LlamaTokenizerFast", "LlamaTokenizer", "PreTrainedTokenizerFast", "Qwen2Tokenizer"],
)
def test_what_stands_around_a_text_is_as_transformers_has_it(
    tmp_path: Path,
    kind: str,
    post: str,
    begins: bool | None,
    ends: bool | None,
) -> None:
    """Llama's class follows its flags and puts each token once, whatever tokenizer.json does.
    Transformers from 5 on takes the flags from the caller; before, it read them in the folder."""
    transformers = pytest.importorskip("transformers")
    named = {"add_bos_token": begins, "add_eos_token": ends}
    flags = {name: value for name, value in named.items() if value is not None}
    tokenizer = saved(tmp_path, post, tokenizer_class=kind, **flags)
    follows = bool(flags) and kind.startswith("Llama")
    asked = {"add_bos_token": True, "add_eos_token": False, **flags} if follows else {}
    wanted = transformers.AutoTokenizer.from_pretrained(tmp_path, **asked)
    for text in ("the lazy dog", "naïve 鯨", ""):
        assert tokenizer.encode(text) == wanted(text).input_ids
        bare = tokenizer.encode(text, add_special_tokens=False)
        assert bare == wanted(text, add_special_tokens=False).input_ids
        first = asked["add_bos_token"] if follows else post in ("template", "both")
        assert tokenizer.encode(text) == [0] * first + bare + [1] * (follows and bool(ends))


def test_a_rendered_conversation_begins_once(tmp_path: Path) -> None:
    """Templates print the BOS token as text, so that none may be put before it."""
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    for post in POST:
        folder = tmp_path / post
        folder.mkdir()
        settings_ = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}
        tokenizer = saved(folder, post, chat_template=template, **settings_)
        turn = [{"role": "user", "content": "fox"}]
        served = ChatTemplate(tokenizer)
        ids = served.encode(served.render(turn, None))
        assert ids == tokenizer.apply_chat_template(turn)
        assert ids == [0, *tokenizer.encode("[user]fox", add_special_tokens=False)]


def test_a_base_models_built_in_form_begins_as_any_text_does(tmp_path: Path) -> None:
    tokenizer = saved(tmp_path, "bytes", tokenizer_class="LlamaTokenizerFast", add_bos_token=True)
    served = ChatTemplate(tokenizer)
    text = served.render([{"role": "user", "content": "fox"}], None)
    assert served.encode(text) == [0, *tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
@pytest.mark.parametrize("value", [None, "<nowhere>"])
def test_a_token_to_be_added_must_be_there(tmp_path: Path, name: str, value: str | None) -> None:
    settings_ = {"tokenizer_class": "LlamaTokenizerFast", f"add_{name}": True, name: value}
    with pytest.raises(LoadError, match=f"sets add_{name}, but {name}={value!r} is not in"):
        saved(tmp_path, "bytes", **settings_)


def test_random_pushes_after_flush_keep_counting(byte_level: Tokenizer) -> None:
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(320) for _ in range(30)]
        stream = TextStream(byte_level)
        shown = "".join(stream.push(token) for token in ids) + stream.flush()
        assert stream.length == len(shown)
