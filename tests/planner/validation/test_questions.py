"""The documents' questions: the figures that must not drift."""

from __future__ import annotations

import pytest

from rorqual.errors import ConfigError
from rorqual.planner.validation.deployed import R1
from rorqual.planner.validation.questions import QUESTIONS, answer


def values(name: str) -> dict[str, str]:
    return {line.what.strip(): f"{line.value} | {line.how}" for line in answer(name)[1]}


def test_every_question_has_an_answer() -> None:
    for name in QUESTIONS:
        title, lines = answer(name)
        assert title
        assert all(line.what for line in lines)
    with pytest.raises(ConfigError, match="question 'why' is not known"):
        answer("why")


def test_parameters() -> None:
    found = answer("parameters")[1]
    totals = [line.value for line in found if line.what.endswith(": parameters")]
    assert totals == ["671,026,419,200", "15,706,484,224", "30,532,122,624", "235,093,634,560"]
    assert "37,552,297,472 active" in found[0].how
    assert found[1].value == "653,908,770,816"
    assert "653.9 B, not 638 B" in found[-1].how


def test_cache() -> None:
    found = values("kv-tokens")
    assert found["MLA, bf16 latent"].startswith("152,797 tokens")
    assert found["MHA, values counted 192 wide"].startswith("1,790 tokens")


def test_cache_of_every_kind_of_attention() -> None:
    found = values("cache-kinds")
    assert found[f"{R1}: MHA"].startswith("4,997,120 B a token")  # 61 x 128 x (192 + 128) x 2
    assert found[f"{R1}: MLA, as published"].startswith("70,272 B a token")
    assert "71.1 times less than MHA; 152,797 tokens" in found[f"{R1}: MLA, as published"]
    qwen = "Qwen/Qwen3-30B-A3B"
    assert found[f"{qwen}: GQA, 4 groups, as published"].startswith("98,304 B a token")
    assert found[f"{qwen}: MQA"].startswith("24,576 B a token")
    assert found[f"{qwen}: MLA"].startswith("55,296 B a token")


def test_batches_in_flight() -> None:
    found = values("in-flight")
    assert found["the study's MoE times: batches in flight"].startswith("5 |")
    assert found["natural routing, 252 experts read: batches in flight"].startswith("22 |")
    assert "the wire with 85 ms" in found["natural routing on 10 Gb/s Ethernet: batches in flight"]


def test_factor_thirty_two() -> None:
    found = values("data-parallel")
    assert found["tokens of a batch for one of an expert"].startswith("32 |")
    assert "1,184 in all" in found["NVIDIA H20 96 GB: compute-bound from"]


def test_network_and_embedding() -> None:
    assert values("network")["rate for 1 ms a layer"].startswith("14.7 Gb/s")
    assert values("host-embedding")["the table"].startswith("1.8534 GB, 1.7261 GiB")
    assert values("host-embedding")["cache it makes room for"].startswith("26,374 tokens")


def test_atlas() -> None:
    found = values("a3-decode")
    assert found["tokens/s a chip"].startswith("2,138")
    assert found["the step itself"].startswith("76.3 ms")
