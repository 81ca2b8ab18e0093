"""Steps whose micro-batches cut a prompt: the tokens of one process, in every form of attention and
over every exchange, with cached contexts, drafts and prompt log probabilities."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual import LLM
from rorqual.engine.distributed.rendezvous import Rendezvous
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.models.transformer import Transformer
from rorqual.ops.interface import AttentionMetadata
from rorqual.parallel.mesh import ProcessGroups
from tests.engine.mixed_batch import COMMON, comparable, params
from tests.models import checkpoints
from tests.models.checkpoints import save

LONG = {**COMMON, "max_model_len": 512, "num_pages": 320, "max_num_batched_tokens": 640}
PROMPTS = [[(i * i + 7 * i) % 480 + 5 for i in range(count)] for count in (340, 21, 200)]
FORMS = ("CD", "CC", "A_CC", "A_CC_ME", "AM_CC_ME")
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2, "micro_batches": 2, "num_speculative_tokens": 2},
    {"tp": 2, "micro_batches": 3, "chunked_prefill_size": 256},
    {"dp": 2, "ep": 2, "exchange": "alltoall", "micro_batches": 3, "num_speculative_tokens": 1},
    {"dp": 2, "ep": 2, "exchange": "low_latency", "micro_batches": 2},
    {"pp": 2, "micro_batches": 2, "num_speculative_tokens": 1},
    {"tp": 2, "micro_batches": 2, "sequence_parallel": True, "num_speculative_tokens": 1},
]


def alike(found: list[Any], expected: list[Any]) -> bool:
    """Equal tokens, and log probabilities within what the order of sums changes."""
    values = [
        [value for _, _, steps in outs for step in steps for value in step.values()]
        for outs in (found, expected)
    ]
    chosen = [
        [(tokens, why, [*map(list, steps)]) for tokens, why, steps in outs]
        for outs in (found, expected)
    ]
    return chosen[0] == chosen[1] and values[0] == pytest.approx(values[1], abs=0.005)


def answers(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """Of each prompt alone, which every rank with data of its own gets, and of all together."""
    own = llm.engine.config.dp
    settings = params(max_tokens=6, logprobs=1, prompt_logprobs=1)
    try:
        found = []
        for together in (*([prompt] for prompt in prompts), prompts):
            outs = llm.generate([one for one in together for _ in range(own)], settings)
            known = [comparable(out) for out in outs]
            assert all(alike([one], [known[i - i % own]]) for i, one in enumerate(known))
            found += known[::own]
        return found
    finally:
        llm.engine.close()


def cuts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Queries of each part of this process's steps that cut a prompt."""
    found: list[tuple[int, ...]] = []
    plain = Transformer.compute

    def compute(self: Transformer, step: ForwardBatch, every_row: bool = False) -> Tensor:
        segments = [part.prefill for part in step.parts]
        if step.prefill and sum(len(one) for one in segments if one) > len(step.prefill):
            found.append(tuple(one.tokens for one in segments if one))
        return plain(self, step, every_row)

    monkeypatch.setattr(Transformer, "compute", compute)
    return found


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
def test_tokens_are_those_of_one_process(
    layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**LONG, "enable_prefix_caching": False}
    expected = answers(LLM(**options), PROMPTS)
    found = cuts(monkeypatch)
    assert alike(answers(LLM(**{**options, **layout}), PROMPTS), expected)
    assert len(found) >= 3, "of each long prompt alone, and of all together"
    assert all(len(parts) == layout["micro_batches"] for parts in found)
    assert min(min(parts) for parts in found) >= 64


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_attention(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**LONG, "mla_prefill": form, "mla_decode": "CD" if form == "CD" else "A_CC_ME"}
    expected = answers(LLM(**options), PROMPTS)
    found = cuts(monkeypatch)
    layout = {"tp": 2, "micro_batches": 3, "chunked_prefill_size": 256}
    assert alike(answers(LLM(**options, **layout), PROMPTS), expected)
    assert found


@pytest.mark.exhaustive
def test_grouped_query_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("qwen", tmp_path)
    prompts = [[token % 50 + 3 for token in prompt[:200]] for prompt in PROMPTS]
    options = {**LONG, "skip_tokenizer_init": True, "max_model_len": 256}
    expected = answers(LLM(tmp_path, **options), prompts)
    found = cuts(monkeypatch)
    found_there = answers(LLM(tmp_path, **options, tp=2, micro_batches=2), prompts)
    assert alike(found_there, expected)
    assert found


@pytest.mark.exhaustive
def test_one_exchange_for_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 and 488 tokens `auto` would send the first by an exchange that hands over once more a
    layer, so that the second part would overtake it."""
    more = {"num_experts_per_tok": 1, "max_position_embeddings": 1024, "num_hidden_layers": 4}
    monkeypatch.setitem(checkpoints.OPTIONS, "long", ("qwen", more))
    save("long", tmp_path)
    prompts = [[token % 120 + 4 for token in PROMPTS[0]] * 3]
    prompts[0] = prompts[0][:1000]
    options = {**LONG, "max_model_len": 1020, "skip_tokenizer_init": True, "threads": 1}
    options |= {"max_num_batched_tokens": 2048, "enable_prefix_caching": False}
    expected = answers(LLM(tmp_path, **options), prompts)
    found = cuts(monkeypatch)
    layout = {"dp": 2, "ep": 2, "micro_batches": 2}
    assert alike(answers(LLM(tmp_path, **options, **layout), prompts), expected)
    assert found[0] == (512, 488)


def test_queries_between_two_places() -> None:
    tables = torch.arange(12).view(3, 4)
    whole = AttentionMetadata(tables, torch.tensor([9, 20, 7]), (4, 10, 7), (9, 20, 7))
    found = whole.between(4, 14)
    assert found.query_lens == (10,)
    assert found.max_kv_lens == (20,)
    found = whole.between(2, 9)
    assert found.query_lens == (2, 5)
    assert found.max_kv_lens == (9, 15)
    assert found.kv_lens.tolist() == [9, 15]
    assert found.tokens == 7
    assert torch.equal(found.tables, tables[:2])
    found = whole.between(6, 11)
    assert (found.query_lens, found.max_kv_lens, found.kv_lens.tolist()) == ((5,), (17,), [17])
    found = whole.between(11, 21)
    assert (found.query_lens, found.max_kv_lens, found.kv_lens.tolist()) == (
        (3, 7), (20, 7), [20, 7],
    )  # fmt: skip
    loose = AttentionMetadata(tables, torch.tensor([9, 20, 7]), (4, 4, 4), (9, 20, 7), exact=False)
    with pytest.raises(AssertionError, match="decodes"):
        loose.between(0, 6)
    assert loose.between(4, 12).query_lens == (4, 4)


@pytest.mark.parametrize(
    ("parts", "given", "expected"), [(2, None, "0"), (1, None, None), (2, "2", "2")]
)
def test_programs_of_nccl_start_one_by_one_beside_micro_batches(
    parts: int, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first communicator, unless the environment says otherwise."""
    monkeypatch.setenv("NCCL_CGA_CLUSTER_SIZE", given or "")  # as it was, at the end
    if given is None:
        monkeypatch.delenv("NCCL_CGA_CLUSTER_SIZE")
    joined: list[str | None] = []
    join = Rendezvous.join

    def noted(self: Rendezvous, *args: Any) -> ProcessGroups:
        joined.append(os.environ.get("NCCL_CGA_CLUSTER_SIZE"))
        return join(self, *args)

    monkeypatch.setattr(Rendezvous, "join", noted)
    LLM(**COMMON, dp=2, ep=2, micro_batches=parts).engine.close()
    assert joined == [expected]
