"""Prompts: exact lengths, seeds, shared prefixes, files and traces; and the times at which they
are sent."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.bench.serving.datasets import Trace, sharegpt_prompts, trace_prompts
from rorqual.bench.serving.load import ArrivalLoad
from rorqual.bench.serving.prompts import (
    PrefixGroups,
    Prompt,
    PromptLengths,
    Vocabulary,
    random_prompts,
    shared_prefix_prompts,
    warm_up_prompts,
)
from rorqual.errors import ConfigError
from rorqual.models.hub import BUNDLED

IDS = Vocabulary(BUNDLED, as_text=False)
TEXT = Vocabulary(BUNDLED, as_text=True)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ids(prompt: Prompt) -> list[int]:
    assert not isinstance(prompt.content, str)
    return prompt.content.tolist()


@settings(deadline=None, max_examples=40)
@given(length=st.integers(2, 400), seed=st.integers(0, 2**20))
def test_a_text_has_exactly_its_length_to_the_servers_tokenizer(length: int, seed: int):
    (prompt,) = random_prompts(TEXT, rng(seed), 1, PromptLengths(length, 1))
    assert isinstance(prompt.content, str)
    assert len(TEXT.tokenizer.encode(prompt.content)) == length == prompt.input_len


@given(length=st.integers(1, 400), seed=st.integers(0, 2**20))
def test_ids_have_exactly_their_length_and_are_never_special(length: int, seed: int):
    (prompt,) = random_prompts(IDS, rng(seed), 1, PromptLengths(length, 1))
    assert len(ids(prompt)) == length
    assert not set(ids(prompt)) & IDS.tokenizer.special_ids
    assert max(ids(prompt)) < IDS.size


def test_a_seed_gives_the_same_prompts_and_another_seed_others():
    first, again, other = (
        random_prompts(IDS, rng(seed), 5, PromptLengths(20, 3)) for seed in (1, 1, 2)
    )
    assert [ids(p) for p in first] == [ids(p) for p in again] != [ids(p) for p in other]
    assert len({tuple(ids(p)) for p in first}) == 5


@pytest.mark.parametrize(("convention", "low", "high"), [("vllm", 80, 120), ("sglang", 20, 100)])
def test_range_ratio_by_both_conventions(convention: str, low: int, high: int):
    prompts = random_prompts(IDS, rng(), 3000, PromptLengths(100, 100, 0.2, convention))
    for lengths in ([p.input_len for p in prompts], [p.output_len for p in prompts]):
        assert (min(lengths), max(lengths)) == (low, high)
        assert np.mean(lengths) == pytest.approx((low + high) / 2, rel=0.03)
    assert all(len(ids(p)) == p.input_len for p in prompts)


@pytest.mark.parametrize("vocabulary", [IDS, TEXT], ids=["ids", "text"])
def test_shared_prefixes_are_shared_within_groups_only(vocabulary: Vocabulary):
    prompts = shared_prefix_prompts(vocabulary, rng(), PrefixGroups(3, 4, 50), PromptLengths(10, 5))
    encoded = [
        vocabulary.tokenizer.encode(p.content) if isinstance(p.content, str) else ids(p)
        for p in prompts
    ]
    assert {len(e) for e in encoded} == {60} == {p.input_len for p in prompts}
    heads = [tuple(e[:50]) for e in encoded]
    assert sorted(heads.count(head) for head in set(heads)) == [4, 4, 4]
    assert len({tuple(e) for e in encoded}) == 12
    assert heads != sorted(heads), "groups are mixed"
    assert (
        len(
            shared_prefix_prompts(
                vocabulary, rng(), PrefixGroups(3, 4, 50), PromptLengths(10, 5), count=7
            )
        )
        == 7
    )


def test_warm_ups_are_alike_in_length_and_nothing_else():
    prompts = random_prompts(IDS, rng(), 3, PromptLengths(30, 100, 0.5))
    warm = warm_up_prompts(IDS, rng(9), prompts, 5)
    assert [p.input_len for p in warm] == [prompts[i % 3].input_len for i in range(5)]
    assert all(p.output_len <= 32 for p in warm)
    assert not {tuple(ids(p)) for p in warm} & {tuple(ids(p)) for p in prompts}


# ---- files


def conversation(question: str, answer: str, **names: str) -> dict[str, object]:
    return {
        "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    }


def test_sharegpt_takes_first_turns_of_usable_length(tmp_path: Path):
    path = tmp_path / "sharegpt.json"
    good = [
        conversation(f"tell me about whale number {i}", "they are large and swim far " * (i + 1))
        for i in range(6)
    ]
    bad = [
        conversation("hi", "x" * 400),
        conversation("word " * 3000, "a long answer it is"),
        {"conversations": []},
        conversation("why is it so", "a"),
    ]
    path.write_text(json.dumps(good + bad))
    prompts = sharegpt_prompts(TEXT, rng(), path, None)
    assert sorted(p.content for p in prompts if isinstance(p.content, str)) == sorted(
        f"tell me about whale number {i}" for i in range(6)
    )
    assert all(p.input_len == len(TEXT.tokenizer.encode(str(p.content))) for p in prompts)
    assert len({p.output_len for p in prompts}) == 6
    assert {p.output_len for p in sharegpt_prompts(TEXT, rng(), path, None, output_len=17)} == {17}
    assert len(sharegpt_prompts(TEXT, rng(), path, 2)) == 2
    lines = tmp_path / "sharegpt.jsonl"
    lines.write_text("\n".join(json.dumps(item) for item in good))
    assert {p.content for p in sharegpt_prompts(TEXT, rng(), lines, None)} == {
        p.content for p in prompts
    }


@pytest.mark.parametrize(
    ("content", "words"),
    [("[]", "usable length"), ("{not json", "neither"), (None, "cannot be read")],
)
def test_a_bad_sharegpt_file_is_named(tmp_path: Path, content: str | None, words: str):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        sharegpt_prompts(TEXT, rng(), path, None)


def write_trace(folder: Path, *rows: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_a_trace_gives_times_lengths_and_shared_blocks(tmp_path: Path):
    """Mooncake's format: times in ms, equal hash_ids are equal blocks, the last one cut to the
    length."""
    path = write_trace(
        tmp_path,
        {"timestamp": 5000, "input_length": 20, "output_length": 4, "hash_ids": [7, 9, 3]},
        {"timestamp": 4000, "input_length": 19, "output_length": 5, "hash_ids": [7, 9, 4]},
        {"timestamp": 7000, "input_length": 11, "output_length": 6},
        {"timestamp": 7000, "input_length": 30, "output_length": 6, "hash_ids": [7]},
    )
    prompts = trace_prompts(IDS, rng(), Trace(path, block=8, speed=2.0), seed=3)
    assert [p.at for p in prompts] == [0.0, 0.5, 1.5, 1.5]
    assert [(p.input_len, p.output_len) for p in prompts] == [(19, 5), (20, 4), (11, 6), (30, 6)]
    assert [len(ids(p)) for p in prompts] == [19, 20, 11, 30]
    first, second, alone, longer = map(ids, prompts)
    assert first[:16] == second[:16]
    assert first[16:] != second[16:19]
    assert longer[:8] == first[:8]
    assert alone[:8] != first[:8]
    assert len(trace_prompts(IDS, rng(), Trace(path, block=8), 3, count=2)) == 2
    again = trace_prompts(IDS, rng(5), Trace(path, block=8), seed=4)
    assert ids(again[0])[:16] != first[:16], "another seed, other blocks"


def test_a_trace_as_text_keeps_lengths_and_prefixes(tmp_path: Path):
    rows = [
        {"timestamp": i, "input_length": 30, "output_length": 2, "hash_ids": [1, 2, 10 + i]}
        for i in range(2)
    ]
    prompts = trace_prompts(TEXT, rng(), Trace(write_trace(tmp_path, *rows), block=10), 0)
    first, second = (TEXT.tokenizer.encode(str(p.content)) for p in prompts)
    assert len(first) == len(second) == 30
    assert first[:21] == second[:21], "the token a server puts before a text comes on top"


BAD_ROWS = [
    [1],
    {"input_length": 4, "output_length": 1},
    {"timestamp": 0, "input_length": 0, "output_length": 1},
    {"timestamp": -1, "input_length": 1, "output_length": 1},
    {"timestamp": 0, "input_length": 8, "output_length": 1, "hash_ids": [1, 2]},
]


@pytest.mark.parametrize("row", BAD_ROWS)
def test_a_bad_trace_line_is_named(tmp_path: Path, row: object):
    good = {"timestamp": 0, "input_length": 4, "output_length": 1}
    with pytest.raises(ConfigError, match="line 2"):
        trace_prompts(IDS, rng(), Trace(write_trace(tmp_path, good, row), block=8), 0)


# ---- arrivals


def test_an_infinite_rate_sends_all_at_once():
    assert ArrivalLoad().arrivals(rng(), 3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_are_gamma_distributed(burstiness: float):
    """Mean 1/rate, coefficient of variation 1/sqrt(shape), total exactly count/rate."""
    times = ArrivalLoad(rate=10.0, burstiness=burstiness).arrivals(rng(), 20_000)
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(2000)
    assert np.mean(gaps) == pytest.approx(0.1, rel=0.01)
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    if burstiness == 1.0:
        assert np.mean(gaps > 0.1) == pytest.approx(math.exp(-1), abs=0.02), "Poisson"


def test_arrivals_depend_on_the_seed_alone():
    load = ArrivalLoad(rate=3.0)
    assert load.arrivals(rng(1), 9) == load.arrivals(rng(1), 9) != load.arrivals(rng(2), 9)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PromptLengths(0, 1),
        lambda: PromptLengths(1, 1, 1.0),
        lambda: PromptLengths(1, 1, 0.1, "other"),
        lambda: PrefixGroups(0),
        lambda: Trace(Path("x"), speed=0),
        lambda: ArrivalLoad(0),
        lambda: ArrivalLoad(rate=0.0),
        lambda: ArrivalLoad(burstiness=0.0),
        lambda: TEXT.prompt(rng(), (0, 1)),
        lambda: IDS.prompt(rng(), (3, 1), np.zeros(4, np.int32)),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(ConfigError):
        make()
