"""The documents' questions: the figures that must not drift."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rorqual.errors import ConfigError
from rorqual.planner.validation.deployed import R1
from rorqual.planner.validation.questions import QUESTIONS, answer


def values(name: str) -> dict[str, str]:
    return {line.what.strip(): f"{line.value} | {line.how}" for line in answer(name)[1]}


# whole searches, or most of one
LONG = ("home-cluster", "one-node-or-two", "prefill-decode")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in LONG else [])
        for name in QUESTIONS
    ],
)
def test_every_question_has_an_answer(name: str) -> None:
    title, lines = answer(name)
    assert title
    assert all(line.what for line in lines)


def test_a_question_that_is_not_known() -> None:
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


def test_eight_experts_elsewhere_against_eight_here() -> None:
    """By hand: 8 x 44.04 MB at 1.008 TB/s; one of them, 10 us, and 8 copies of a row, 7168 + 224
    bytes out and 14,336 back, at 3.125 GB/s."""
    found = values("expert-rpc")
    here = 8 * 44.04e6 / 1.008e12
    line = found["NVIDIA GeForce RTX 4090: one row reads its 8 experts of a layer"]
    assert line.startswith(f"{here * 1e6:.0f} us | {58 * here * 1e3:.1f} ms")
    away = here / 8 + 10e-6 + 8 * (7168 + 224 + 14336) / 3.125e9
    line = found["NVIDIA GeForce RTX 4090: on 8 servers at once, 25 Gbit/s"]
    assert line.startswith(f"{away * 1e6:.0f}, ")
    assert line.endswith("shorter up to 100 us")
    assert sum("never shorter" in line for line in found.values()) == 4


def test_network_and_embedding() -> None:
    assert values("network")["rate for 1 ms a layer"].startswith("14.7 Gb/s")
    assert values("host-embedding")["the table"].startswith("1.8534 GB, 1.7261 GiB")
    assert values("host-embedding")["cache it makes room for"].startswith("26,374 tokens")


def test_atlas() -> None:
    found = values("a3-decode")
    assert found["tokens/s a chip"].startswith("2,138")
    assert found["the step itself"].startswith("76.3 ms")


# ---- which deployment to choose


def figure(text: str, after: str, before: str = "") -> float:
    """The number that stands between two words."""
    rest = text[text.index(after) + len(after) :]
    return float(rest.split(before or None)[0].replace(",", ""))


@pytest.mark.exhaustive
def test_one_node_or_two() -> None:
    """What the overview says, and where the prediction differs from it."""
    found = values("one-node-or-two")
    for concurrency in (8, 64, 2048):
        one, two = (found[f"{concurrency} at once, {nodes}"] for nodes in ("one node", "two nodes"))
        assert figure(one, "TPOT ") > figure(two, "TPOT ")
        rates = [float(text.split(" tok/s a GPU")[0].split()[-1]) for text in (one, two)]
        assert rates[0] > rates[1]
        assert (figure(one, "TTFT ") > figure(two, "TTFT ")) == (concurrency > 8)


def test_data_parallel_attention() -> None:
    """A latent is held by each rank of tensor parallelism: eight times the requests fit without
    it, less what whole attention weights take."""
    found = values("attention-data-parallel")
    rooms = [
        figure(found[name], "cache of ")
        for name in ("attention over 8 GPUs (tp8)", "the same, whole experts (dp8 ep8)")
    ]
    assert 4 < rooms[1] / rooms[0] < 8
    assert figure(found["data parallelism over tensor parallelism"], "x ") > 1.9


def test_four_bits_gain_where_weights_are_read() -> None:
    """Never as much as twice, and less with more requests."""
    found = values("w4a8")
    for device in ("NVIDIA H20 141 GB", "NVIDIA H200 SXM"):
        gains = [
            figure(found[f"8 x {device}, {batch} requests of 1,500 tokens"], "x ")
            for batch in (64, 256, 1024)
        ]
        assert 2 > gains[0] > gains[1] > gains[2] >= 1


def test_micro_batches_gain_on_slow_wires_and_lose_on_few_rows() -> None:
    found = values("micro-batches")
    rates = (50, 100, 200, 400, 800)
    prompts, many, few = (
        [figure(found[f"{title}, {rate} Gbit/s a GPU"], "x ") for rate in rates]
        for title in (
            "prompts: 4,096 tokens a GPU",
            "decoding: 128 requests a GPU",
            "decoding: 16 requests a GPU",
        )
    )
    assert all(1 <= gain <= 2 for gain in prompts)
    assert max(many) > 1.3
    assert few == sorted(few, reverse=True)
    assert few[-1] < 1


def test_redundant_experts_under_real_counts(tmp_path: Path) -> None:
    """One file has no other load; a hot expert in each layer makes experts in order uneven, and
    copies even it out."""
    rows = [[0] * 256] * 3 + [[2000] + [100] * 255] * 58
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"logical_count": rows}))
    lines = {line.what: line.value for line in answer("redundant-experts", [path])[1]}
    assert lines["loads"] == "load"
    assert not any("another" in name for name in lines)
    plain, alone, copied = (
        figure(lines[f"ep 32, {title}"], "balancedness ", ":")
        for title in (
            "experts in order",
            "placed by load, 0 redundant",
            "placed by load, 32 redundant",
        )
    )
    # 32 ranks of 8: the fullest has 2000 + 7 x 100 picks, the mean is (2000 + 255 x 100) / 32
    assert plain == pytest.approx(27500 / 32 / 2700, abs=1e-3)
    assert alone == pytest.approx(plain, abs=1e-3)
    assert copied > 0.9
    with pytest.raises(ConfigError, match="expert_load goes with the questions redundant-experts"):
        answer("w4a8", [path])


@pytest.mark.exhaustive
def test_more_prompt_replicas_for_longer_prompts() -> None:
    found = list(values("prefill-decode").values())[:-1]
    ratios = [float(text.split()[0]) for text in found]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 1 > ratios[-1]


def test_more_attention_for_longer_contexts() -> None:
    found = list(values("attention-experts").values())[:-1]
    numbers = [int(text.split(" : ")[0]) for text in found]
    assert numbers == sorted(numbers)
    assert numbers[-1] > numbers[0]
    rates = [figure(text, "32, ") for text in found]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.exhaustive
def test_a_cluster_at_home() -> None:
    """Faster wires are never slower, and every answer says that it is a bound."""
    lines = answer("home-cluster")[1]
    alone = [figure(line.value, "") for line in lines if "one request" in line.what]
    loaded = [figure(line.value, "") for line in lines if line.what.strip() == "at load"]
    assert alone == sorted(alone, reverse=True)
    assert loaded == sorted(loaded)
    assert all("least" in line.value for line in lines if "one request" in line.what)
    assert "no kernel of ours has been timed on a 4090" in lines[-1].how
