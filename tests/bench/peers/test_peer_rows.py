"""Rows by their names, and the model folder that every engine is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from rorqual.bench.peers import engines
from rorqual.bench.peers.model_folder import served_model, special_ids, write_tokenizer
from rorqual.bench.peers.routing import below_floor
from rorqual.bench.peers.rows import DEFAULT_ROWS, Row, parse_rows
from rorqual.bench.peers.settings import PRESETS, PeerSettings
from rorqual.engine.execution import worker
from rorqual.errors import ConfigError
from rorqual.text.tokenizer import Tokenizer

KINDS = st.sampled_from(("closed", "prefix", "poisson"))
COUNTS = st.integers(1, 5000)


@given(kind=KINDS, input_len=COUNTS, output_len=st.integers(2, 5000), count=COUNTS)
def test_a_name_says_the_row(kind: str, input_len: int, output_len: int, count: int):
    row = Row(kind, input_len, output_len, count)
    assert parse_rows(row.name) == [row]


def test_rows_come_once_and_those_at_a_rate_last():
    names = [row.name for row in parse_rows("poisson@70 8000/1000@8,1 1000/1000@8,8 prefix@64")]
    assert names == ["8000/1000@8", "8000/1000@1", "1000/1000@8", "prefix@64", "poisson@70"]
    assert [row.must for row in parse_rows(DEFAULT_ROWS)] == [1.1] * 4 + [1.05] * 4 + [None]


@pytest.mark.parametrize("text", ["", "1000/1000", "1000@8", "a/b@1", "1/1@1", "0/4@1", "4/4@0"])
def test_a_wrong_row_is_refused(text: str):
    with pytest.raises(ConfigError):
        parse_rows(text)


def test_how_many_requests_a_row_has():
    counts = {1: 3, 8: 24, 64: 128, 256: 512, 2048: 2048}
    for count, requests in counts.items():
        assert Row("closed", 10, 10, count).requests(None, None, 60.0) == requests
    assert Row("closed", 10, 10, 8).requests(5, None, 60.0) == 40
    assert Row("poisson", 10, 10, 70).requests(None, 2.5, 60.0) == 150


def test_every_id_is_a_text_of_its_own(tmp_path: Path):
    size = 700
    write_tokenizer(tmp_path, size, {"eos": 650, "bos": 640})
    tokenizer = Tokenizer(tmp_path)
    ids = [token for token in range(size) if token not in (640, 650)]
    texts = tokenizer.raw.decode_batch([[token] for token in ids])
    assert len(set(texts)) == len(ids)
    assert all(texts)
    assert tokenizer.special_ids == {640, 650}
    assert tokenizer.encode(tokenizer.decode([99, 650 - 1, 698])) == [99, 649, 698]
    stream = DecodeStream(skip_special_tokens=True)
    assert all(stream.step(tokenizer.raw, token) for token in ids), "each step is a chunk"
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|eos|>"


def test_a_shape_becomes_a_folder(tmp_path: Path):
    model = served_model("deepseek-v2-lite", tmp_path, layers=3)
    assert (model.name, model.random, model.layers) == ("deepseek-v2-lite-3-layers", True, 3)
    assert json.loads((model.folder / "config.json").read_text())["num_hidden_layers"] == 3
    assert Tokenizer(model.folder).raw.get_vocab_size() == model.vocabulary
    with pytest.raises(ConfigError, match="has weights"):
        served_model(None, tmp_path, layers=3)
    assert not served_model(None, tmp_path).random


def test_special_ids_lie_in_the_vocabulary():
    assert special_ids({"vocab_size": 9, "eos_token_id": [3, 4], "bos_token_id": 3}) == {"eos": 3}
    assert special_ids({"vocab_size": 9, "eos_token_id": 12}) == {"eos": 8}
    assert special_ids({"vocab_size": 9, "bos_token_id": 1}) == {"eos": 8, "bos": 1}


@pytest.mark.parametrize("peer", ["vllm", "sglang"])
def test_a_peer_is_started_as_its_users_do(tmp_path: Path, peer: str):
    model = served_model("deepseek-v2-lite", tmp_path, layers=2)
    asked = PeerSettings(
        peer=peer,
        peer_settings=(*PRESETS[peer], "mine=--flag '{\"a\": 1}'"),
        peer_env=("PYTHONPATH=/there",),
        peer_python="py",
    )
    sides = engines.peer_sides(model, asked, tmp_path)
    assert [side.settings for side in sides] == [*PRESETS[peer], "mine"]
    command = sides[-1].command(8123, False, 64)
    assert command[:2] == ["py", "-m"]
    assert command[-2:] == ["--flag", '{"a": 1}']
    for words in (["--load-format", "dummy"], ["--port", "8123"], [engines.CACHE_OFF[peer]]):
        assert " ".join(words) in " ".join(command)
    assert engines.CACHE_OFF[peer] not in sides[0].command(8123, True, 64)
    plugin, there = sides[0].environment["PYTHONPATH"].split(":")
    assert there == "/there"
    assert (Path(plugin) / "rorqual_natural_weights.py").exists()
    assert sides[0].routing("nothing")[0] is False
    assert sides[0].routing("x rorqual-natural-weights 5 parameters")[0] is True


def test_ours_lets_as_many_wait_as_a_row_has(tmp_path: Path):
    side = engines.our_side(served_model(None, tmp_path), PeerSettings(our_options="--threads 1"))
    assert "--max-waiting" not in side.command(1, True, 1024)
    assert "--max-waiting 2048" in " ".join(side.command(1, True, 2048))
    assert engines.RESIDUAL_GAIN == worker.RESIDUAL_GAIN


def test_steps_too_short_for_tokens_that_spread_are_found(tmp_path: Path):
    model = served_model("qwen3-30b-a3b", tmp_path)
    row = Row("closed", 1000, 1000, 64)
    figures = {"median_tpot_ms": 5.0, "num_prompts": 128}
    said = below_floor(model, row, figures, "NVIDIA H200, 580.159")
    assert said is not None
    assert "5.00 ms is shorter than" in said
    assert below_floor(model, row, figures | {"median_tpot_ms": 17.0}, "NVIDIA H200") is None
    assert below_floor(model, row, figures, "no GPU, x86_64") is None


@pytest.mark.parametrize(
    "given",
    [
        {"peer": "other"},
        {"peer": "command"},
        {"seconds": 0.0},
        {"waves": 0},
        {"prefix_cache": "maybe"},
    ],
)
def test_wrong_settings_are_refused(given: dict[str, object]):
    with pytest.raises(ConfigError):
        PeerSettings(**given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="accepted"):
        _ = PeerSettings(peer_settings=("fast",)).flags
