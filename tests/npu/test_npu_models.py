"""Whole models through the NPU path, on emulated operators, against the definitions: the same
greedy tokens and log probabilities, on every layout with one, two and four processes.

In fp32 (standing for bf16 in the operators) every token must be the same. With int8 weights a sum
that differs in its last bit may round an activation to the next number: there a token may differ
where the definitions' two best lie close together, and such cases are counted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torch_npu", exc_type=ImportError)

from rorqual.llm.llm import LLM
from rorqual.request import SamplingParams
from tests.emulation import npu_platform
from tests.npu.npu_models import write_model

LENGTHS = (5, 17, 140, 33)
TOKENS = 10
SIZES = {
    "num_pages": 24,
    "page_size": 128,
    "max_num_seqs": 4,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "watchdog_seconds": 300.0,
}
EXACT = 1e-4  # of a log probability in fp32
INT8 = 0.15  # where activations are rounded to int8
MARGIN = 0.1
INT8_GAIN = 1.0
W8A8 = {"quantization": "w8a8"}
C8 = {"quantization": "w8a8", "kv_cache_dtype": "int8"}
W4A16 = {"quantization": "w4a16"}
LOW = {"exchange": "low_latency"}
MTP = {"num_speculative_tokens": 2}


@dataclass(frozen=True)
class Answers:
    """Of each prompt: tokens, and at each place the best log probabilities by token."""

    tokens: list[list[int]]
    best: list[list[dict[int, float]]]


@pytest.fixture(autouse=True)
def bench() -> Iterator[None]:
    npu_platform.install(wide=True)
    yield
    npu_platform.set_wide(False)


def answers(folder: Path, device: str, dtype: str, options: dict[str, Any]) -> Answers:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 500, (n,), generator=generator).tolist() for n in LENGTHS]
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        weights="random",
        dtype=dtype,
        device=device,
        **SIZES,
        **options,
    )
    try:
        wanted = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, logprobs=4)
        outputs = [one.outputs[0] for one in llm.generate(prompts, wanted)]
    finally:
        llm.engine.close()
    best = [
        [{token: each.logprob for token, each in place.items()} for place in output.logprobs]
        for output in outputs
    ]
    return Answers([list(output.token_ids) for output in outputs], best)


@cache
def reference(folder: Path, dtype: str, gain: float, options: str) -> Answers:
    """The definitions', over a cache of the same planes, in one process each."""
    del gain  # set by the caller; part of the key
    os.environ[npu_platform.PLAIN] = "1"
    try:
        return answers(folder, "cpu", dtype, json.loads(options))
    finally:
        del os.environ[npu_platform.PLAIN]


def compare(found: Answers, want: Answers, tolerance: float, margin: float) -> int:
    """Prompts whose tokens part where they may. Fails on any other difference."""
    parted = 0
    for mine, theirs, best, their_best in zip(
        found.tokens, want.tokens, found.best, want.best, strict=True
    ):
        for at, (token, other) in enumerate(zip(mine, theirs, strict=True)):
            if token != other:
                first, second, *_ = sorted(their_best[at].values(), reverse=True)
                assert first - second < margin, (at, mine, theirs)
                parted += 1
                break
            common = best[at].keys() & their_best[at].keys()
            assert len(common) >= 2
            worst = max(abs(best[at][key] - their_best[at][key]) for key in common)
            assert worst < tolerance, (at, worst)
    return parted


def check(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    options: dict[str, Any],
    layout: dict[str, Any],
) -> None:
    folder = write_model(tmp_path_factory.getbasetemp(), name)
    eight_bits = options.get("quantization") == "w8a8"
    gain = INT8_GAIN if eight_bits else npu_platform.RESIDUAL_GAIN
    npu_platform.set_gain(gain)
    # rounded by each rank on its own columns: the definitions must be cut alike
    cut = {k: v for k, v in layout.items() if eight_bits and k != "exchange"}
    numerics = {k: v for k, v in options.items() if k != "num_speculative_tokens"}
    want = reference(folder, "float32", gain, json.dumps({**numerics, **cut}))
    found = answers(folder, "npu", "float32", {**options, **layout})
    if eight_bits:
        parted = compare(found, want, INT8, MARGIN)
        print(f"{name} {options} {layout}: {parted} of {len(LENGTHS)} part at a near tie")
    else:
        assert compare(found, want, EXACT, 0) == 0


ALONE = [
    ("v3", {}),
    ("v3", MTP),
    ("v3", W8A8),
    ("v3", {**C8, **MTP}),
    ("v2", {}),
    ("v2", W8A8),
    ("v2", W4A16),
    ("v2", {"mla_decode": "AM_CC_ME"}),
    ("v2", {"mla_decode": "A_CC"}),
    ("v2-groups", {}),
    ("qwen3", {}),
    ("qwen3", W8A8),
    ("qwen3", W4A16),
]
TWO = [
    ("v3", MTP, {"tp": 2}),
    ("v3", {}, {"tp": 2, "sequence_parallel": True}),
    ("v3", {**C8, **MTP}, {"dp": 2, "ep": 2, **LOW}),
    ("v2", {}, {"tp": 2, "ep": 2}),
    ("v2", {}, {"dp": 2, "ep": 2, "exchange": "alltoall"}),
    ("qwen3", {}, {"dp": 2, "ep": 2, **LOW}),
    ("qwen3", W8A8, {"tp": 2}),
    ("qwen3", {}, {"dp": 2, "embed_tp": 2, "head_tp": 2}),
    ("qwen3", {}, {"pp": 2}),
    ("v3", {}, {"dp": 2, "ep": 2, "micro_batches": 2, **LOW}),
    ("v2", {}, {"dp": 2, "ep": 2, "exchange": "alltoall", "micro_batches": 2}),
]
FOUR = [
    ("v3", MTP, {"tp": 2, "dp": 2, "ep": 4, **LOW}),
    ("v3", {}, {"tp": 4, "ep": 4, "dense_tp": 1}),
    ("qwen3", {}, {"tp": 4}),
    ("qwen3", {}, {"dp": 4, "ep": 4, **LOW}),
    ("qwen3", {}, {"tp": 2, "dp": 2, "ep": 2}),
    ("v2", {}, {"dp": 4, "ep": 4, "exchange": "allgather_ep", "head_tp": 4}),
    ("v2", {}, {"tp": 2, "dp": 2}),
    ("v3", {**C8, **MTP}, {"dp": 4, "ep": 4, **LOW}),
    ("qwen3", W8A8, {"dp": 4, "ep": 4, **LOW}),
]


@pytest.mark.parametrize(("name", "options"), ALONE)
def test_one_process_gives_the_definitions_tokens(tmp_path_factory, name, options):
    check(tmp_path_factory, name, options, {})


@pytest.mark.parametrize(("name", "options", "layout"), TWO)
def test_two_processes_give_the_definitions_tokens(tmp_path_factory, name, options, layout):
    check(tmp_path_factory, name, options, layout)


@pytest.mark.parametrize(("name", "options", "layout"), FOUR)
def test_four_processes_give_the_definitions_tokens(tmp_path_factory, name, options, layout):
    check(tmp_path_factory, name, options, layout)


BF16 = 0.4  # of a log probability, rounded in another order throughout


@pytest.mark.parametrize(
    ("name", "options"), [("v3", {}), ("v3", {**C8, **MTP}), ("v2", W4A16), ("qwen3", W8A8)]
)
def test_in_bf16_every_dtype_is_the_documented_one(tmp_path_factory, name, options):
    """Here the operators take nothing but what they take on the device."""
    npu_platform.set_wide(False)
    npu_platform.set_gain(INT8_GAIN)
    folder = write_model(tmp_path_factory.getbasetemp(), name)
    numerics = {k: v for k, v in options.items() if k != "num_speculative_tokens"}
    want = reference(folder, "bfloat16", INT8_GAIN, json.dumps(numerics))
    found = answers(folder, "npu", "bfloat16", options)
    parted = compare(found, want, BF16, BF16)
    print(f"{name} {options} in bf16: {parted} of {len(LENGTHS)} part at a near tie")


COMPILED = [
    ("v3", MTP, {}),
    ("v2", {}, {"tp": 2, "ep": 2}),
    ("v3", C8, {"dp": 2, "ep": 2, **LOW}),
    ("qwen3", {}, {"tp": 2, "dp": 2, "ep": 2}),
]
TRACED = 0.02  # of a log probability in bf16: batches are padded


@pytest.mark.parametrize(("name", "options", "layout"), COMPILED)
def test_compiled_steps_give_the_tokens_of_eager_ones(tmp_path_factory, name, options, layout):
    """Traced whole, collectives included, and computed from the trace."""
    npu_platform.set_wide(False)
    npu_platform.set_gain(npu_platform.RESIDUAL_GAIN)
    folder = write_model(tmp_path_factory.getbasetemp(), name)
    eager = answers(folder, "npu", "bfloat16", {**options, **layout})
    with torch._dynamo.config.patch(recompile_limit=1):  # more sizes than that are served
        graph = answers(folder, "npu", "bfloat16", {**options, **layout, "exe_mode": "ge_graph"})
    assert compare(graph, eager, TRACED, TRACED) <= 1


def test_forced_balance_sends_every_expert_as_many(tmp_path_factory):
    """The tokens mean nothing; that steps run, and that the load is even, is all there is to
    see."""
    folder = write_model(tmp_path_factory.getbasetemp(), "v3")
    options = {"expert_balance": "forced", "record_expert_load": True, **SIZES}
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        weights="random",
        dtype="float32",
        device="npu",
        **options,
    )
    try:
        llm.generate([[5] * 64], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
        (load,) = llm.engine.executor.worker.fetch_load()()
    finally:
        llm.engine.close()
    assert int(load.sum()) >= 64 * 4
    assert int(load.max() - load.min()) <= 4
