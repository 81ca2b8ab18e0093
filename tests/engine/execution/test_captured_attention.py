"""Attention of prompts between pieces, captured for bounds of their number, rows and keys: the
tokens of steps that are launched, and of each step the graphs with the least to compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.engine.execution.piecewise.attention import (
    EMPTY_ROWS,
    MOST_KEYS,
    PART_ROWS,
    PROMPT_ROWS,
    PromptBounds,
    prompt_bounds,
)
from rorqual.layers.forward_batch import CapturablePrompts
from tests.engine.execution import bounded
from tests.engine.execution.replaying import ReplayingPlatform
from tests.models.checkpoints import VOCAB, save, save_with_mtp

PAGED = CapturablePrompts()


@pytest.mark.parametrize("sizes", [PROMPT_ROWS, PART_ROWS])
@pytest.mark.parametrize("prompts", [PAGED, CapturablePrompts(8192), CapturablePrompts(100)])
@pytest.mark.parametrize("longest", [90, 1000, 5000, 200_000])
@pytest.mark.parametrize("most", [9, 100, 1000, 4096, 4160])
def test_bounds_cover_fresh_prompts(
    sizes: tuple[int, ...], prompts: CapturablePrompts, longest: int, most: int
) -> None:
    """One prompt, and several of equal length, of any number of rows that are captured."""
    found = prompt_bounds(sizes, most, longest, prompts, single=True)
    assert found == sorted(set(found))
    limit = MOST_KEYS if prompts.packed is None else prompts.packed
    assert all(each.keys <= limit for each in found)
    assert all(each.requests * each.longest <= max(4 * each.rows, EMPTY_ROWS) for each in found)
    assert all(each.rows % each.longest == 0 for each in found)
    assert all(each.rows // each.longest <= each.requests for each in found)
    largest = min(most, sizes[-1])
    for rows in {1, 64, largest // 2, largest}:
        for requests in (1, 2):
            each = -(-rows // requests)
            keys = each if prompts.packed is None else each * requests
            if each <= longest and keys <= limit and each * requests <= largest:
                assert any(bounds.take(keys, each * requests, requests, each) for bounds in found)


def test_what_continues_a_cached_prefix_has_more_keys_than_rows() -> None:
    found = prompt_bounds(PROMPT_ROWS, 4096, 100_000, CapturablePrompts(8192), single=True)
    assert PromptBounds(8192, 64, 1, 64) in found
    assert PromptBounds(8192, 512, 16, 512) in found
    assert PromptBounds(4096, 2304, 4, 2304) in found
    assert PromptBounds(4096, 2304, 16, 576) in found
    paged = prompt_bounds(PROMPT_ROWS, 4096, 100_000, PAGED, single=True)
    assert {each.keys for each in paged if each.requests > 1 or each.rows > 512} == {MOST_KEYS}
    assert {PromptBounds(64, 64, 1, 64), PromptBounds(MOST_KEYS, 64, 1, 64)} <= set(paged)
    parts = prompt_bounds(PART_ROWS, 4608, 9, PAGED, single=False)
    assert {(each.rows, each.requests) for each in parts} == {
        (576, 16),
        (1088, 8),
        (1088, 16),
        (2112, 4),
        (2112, 16),
        (4160, 2),
        (4160, 16),
        (4608, 2),
        (4608, 16),
    }


SIZES: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_seqs": 5,
    "max_model_len": 96,
    "page_size": 8,
    "max_num_batched_tokens": 64,
    "chunked_prefill_size": 40,
}


def answers(llm: LLM) -> list[tuple[Any, ...]]:
    """Of prompts that come while others decode, twice, the second time with cached prefixes."""
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    params = [
        SamplingParams(temperature=0, max_tokens=3 + 4 * i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    outs = [out for _ in range(2) for out in llm.generate(prompts, params)]
    return [(out.outputs[0].token_ids, out.num_cached_tokens) for out in outs]


LENGTHS = (3, 50, 17, 8, 33, 1, 60, 24)


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("v3", {}),
        ("qwen", {}),
        ("qwen", {"piecewise_tokens": 16}),
        ("v3", {"piecewise_tokens": 24, "enable_prefix_caching": False}),
        ("mtp", {"num_speculative_tokens": 2}),
        ("v3", {"mla_prefill": "CD", "mla_decode": "CD"}),
        ("v3", {"mla_prefill": "A_CC_ME"}),
        ("v3", {"mla_decode": "AM_CC_ME"}),
        ("v3", {"kv_cache_dtype": "fp8"}),
        ("qwen", {"kv_cache_dtype": "int8"}),
    ],
    ids=str,
)
def test_replayed_prompts_give_the_launched_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, options: dict[str, Any]
) -> None:
    if model == "mtp":
        save_with_mtp(tmp_path, agreement=2.0)
    else:
        save(model, tmp_path)
    given = {"piecewise_tokens": 64, **SIZES, **options}
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    expected = answers(LLM(tmp_path, **given))
    bounded.put_in_place(monkeypatch.setattr)
    monkeypatch.setattr(bounded, "calls", [])
    llm = LLM(tmp_path, **given)
    started = len(bounded.calls)
    assert answers(llm) == expected
    forms = options.get("mla_prefill", "CC") == "CC" and "mla_decode" not in options
    assert (len(bounded.calls) > started) == forms
    if model == "qwen" or not options:
        assert max(map(len, bounded.calls[started:])) > 1, "several prompts in one graph"


def test_steps_without_a_graph_are_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More prompts, or more keys, than any graph takes."""
    save("v3", tmp_path)
    expected = answers(LLM(tmp_path, **SIZES, piecewise_tokens=0))
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    monkeypatch.setattr("rorqual.engine.execution.piecewise.attention.MOST_PROMPTS", 2)
    monkeypatch.setattr("rorqual.engine.execution.piecewise.attention.LONG_KEYS", ())
    bounded.put_in_place(monkeypatch.setattr)
    monkeypatch.setattr(bounded, "calls", [])
    llm = LLM(tmp_path, **SIZES, piecewise_tokens=64)
    started = len(bounded.calls)
    assert answers(llm) == expected
    assert {len(queries) for queries in bounded.calls[started:]} <= {1, 2}
    assert platform.pieces * len(llm.engine.worker.model.layers) > len(bounded.calls) - started
