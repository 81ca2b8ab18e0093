"""Drafts on a GPU, whole steps captured, kernels compiled ahead: the bundled checkpoint's
tokens with and without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from rorqual import LLM, SamplingParams
from tests.gpu.choice import rarely

TEXTS = [
    "The captain of the ship",
    "In the beginning",
    "It was a dark night and the",
    "one two one two one two one",
]
PARAMS = [  # greedy and seeded requests get the tokens of plain decoding; side by side in one batch
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=4, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, speculate=False),
]


def tokens(params: list[SamplingParams], **options: Any) -> list[list[int]]:
    llm = LLM(device="cuda", dtype="float32", max_num_seqs=4, max_model_len=256, **options)
    return [out.outputs[0].token_ids for out in llm.generate(TEXTS, params)]


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 3},
        {"num_speculative_tokens": 2, "drafter": "ngram"},
        *rarely({"num_speculative_tokens": 1}),
    ],
    ids=["three", "ngram", "one"],
)
def test_drafts_change_no_token(options: dict[str, Any]) -> None:
    for params in ([PARAMS[0]] * 4, PARAMS):
        assert tokens(params, **options) == tokens(params)


def test_unseeded_requests_are_drawn() -> None:
    """Drafts of these are taken by lot; captured steps with what that needs, and tokens that
    exist."""
    params = [SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)] * 4
    for found in tokens(params, num_speculative_tokens=2):
        assert len(found) == 40
        assert all(0 <= token < 4096 for token in found)
