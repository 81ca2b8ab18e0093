"""kv_cache_dtype=fp8 and int8: the tokens do not depend on how they were computed, and the cache
is as large as the planner says.

Attention reads what the cache holds, the step's own tokens included, so a chunked prompt, a cached
prefix and a recomputed request see the same entries as a whole prompt. fp32 activations, tiny
checkpoints; entries differ only where the order of a sum tips a rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual import SamplingParams
from rorqual.config.hf import read_config_file
from rorqual.engine.config import EngineConfig
from rorqual.errors import ConfigError
from rorqual.ops.cpu.backend import CpuOps
from rorqual.planner.costs import costs
from rorqual.platforms.cpu import CpuPlatform
from tests.engine.execution.test_cuda_graphs import ReplayingPlatform
from tests.engine.execution.test_identity import engine, greedy, prompts
from tests.models.checkpoints import save, save_with_mtp
from tests.models.driver import all_logits, load

pytestmark = pytest.mark.exhaustive(but_first=True)

FP8 = {"kv_cache_dtype": "fp8"}
BATCH = prompts(14)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All random, so that what the cache loses shows in the tokens."""
    path = tmp_path_factory.mktemp("v3")
    save("v3", path)
    return path


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a prediction module whose drafts are often right."""
    path = tmp_path_factory.mktemp("mtp")
    save_with_mtp(path, agreement=2.0)
    return path


def one_by_one(folder: Path, **options: Any) -> list[list[int]]:
    """One request at a time, whole prompts, no prefix cache, no drafts."""
    return greedy(engine(folder, enable_prefix_caching=False, **options), BATCH, one_by_one=True)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    found = one_by_one(folder, **FP8)
    assert sum(a != b for a, b in zip(found, one_by_one(folder), strict=True)) > len(BATCH) // 2, (
        "nothing was quantized"
    )
    return found


@pytest.fixture(scope="module")
def expected_drafting(drafting: Path) -> list[list[int]]:
    return one_by_one(drafting, **FP8)


def assert_same(got: list[list[int]], want: list[list[int]]) -> None:
    """All equal, but for one request at most: the order of a sum may move an entry across the
    edge between two e4m3 values."""
    different = sum(a != b for a, b in zip(got, want, strict=True))
    print(f"different: {different} of {len(want)}")
    assert different <= 1


def name_of(options: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in options.items()) or "default"


SETTINGS: list[dict[str, Any]] = [
    {},
    {"chunked_prefill_size": 1},
    {"chunked_prefill_size": 7, "enable_prefix_caching": False},
    {"max_num_batched_tokens": 33, "steps_in_flight": 2},
    {"num_pages": 30},
    {"mla_prefill": "CC", "mla_decode": "CC"},
    {"mla_prefill": "A_CC", "mla_decode": "A_CC"},
    {"mla_prefill": "A_CC_ME", "mla_decode": "AM_CC_ME"},
    {"kv_cache_dtype": "float8_e4m3fn", "num_speculative_tokens": 2, "drafter": "ngram"},
]


@pytest.mark.parametrize("options", SETTINGS, ids=name_of)
def test_tokens_do_not_depend_on_how_they_were_computed(
    folder: Path, expected: list[list[int]], options: dict[str, Any]
) -> None:
    llm = engine(folder, **{**FP8, **options})
    assert {
        plane.dtype for layer in llm.engine.worker.runner.pool.layers for plane in layer.values()
    } == {torch.uint8}
    assert_same(greedy(llm, BATCH), expected)
    assert_same(greedy(llm, BATCH), expected)  # the prefix cache holds these very prompts now
    if "num_pages" in options:
        assert llm.engine.scheduler.schedulers[0].num_preemptions > 0
    cached = llm.generate(BATCH[0], SamplingParams(temperature=0, max_tokens=1))[
        0
    ].num_cached_tokens
    assert (cached > 0) == options.get("enable_prefix_caching", True)


DRAFTS: list[dict[str, Any]] = [
    {"num_speculative_tokens": 1},
    {"num_speculative_tokens": 3, "chunked_prefill_size": 5, "steps_in_flight": 2},
    {"num_speculative_tokens": 2, "num_pages": 34},
]


@pytest.mark.parametrize("options", DRAFTS, ids=name_of)
def test_drafts_change_no_token(
    drafting: Path, expected_drafting: list[list[int]], options: dict[str, Any]
) -> None:
    """The prediction module's cache is fp8 as well; rows under verification attend to several
    entries that the step wrote itself."""
    llm = engine(drafting, **FP8, **options)
    assert_same(greedy(llm, BATCH), expected_drafting)
    assert_same(greedy(llm, BATCH), expected_drafting)
    assert sum(llm.engine.stats.accepted) > 0


# ---- the other two: int8 latents, and heads in either number


OTHERS = [("v3", "int8"), ("qwen", "fp8"), ("qwen", "int8")]
OTHER_SETTINGS: list[dict[str, Any]] = [
    {"chunked_prefill_size": 7, "steps_in_flight": 2},
    {"num_pages": 30, "enable_prefix_caching": False},
    {"num_speculative_tokens": 2, "drafter": "ngram"},
]


@pytest.fixture(scope="module", params=OTHERS, ids="-".join)
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, list[list[int]]]:
    """(checkpoint, the cache's dtype, the tokens of one request after another)."""
    option, dtype = request.param
    path = tmp_path_factory.mktemp(option)
    save(option, path)
    found = one_by_one(path, kv_cache_dtype=dtype)
    assert found != one_by_one(path), "nothing was quantized"
    return path, dtype, found


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", OTHER_SETTINGS, ids=name_of)
def test_other_8bit_caches_do_not_depend_on_it_either(
    other: tuple[Path, str, list[list[int]]], options: dict[str, Any]
) -> None:
    path, dtype, expected = other
    llm = engine(path, kv_cache_dtype=dtype, **options)
    held = torch.uint8 if dtype == "fp8" else torch.int8
    layers = llm.engine.worker.runner.pool.layers
    assert {planes.get("k", planes.get("latent")).dtype for planes in layers} == {held}
    assert_same(greedy(llm, BATCH), expected)
    assert_same(greedy(llm, BATCH), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2, "chunked_prefill_size": 5}], ids=str)
def test_other_8bit_caches_on_several_ranks(
    other: tuple[Path, str, list[list[int]]], layout: dict[str, Any]
) -> None:
    """Scales are cut with the heads."""
    path, dtype, expected = other
    llm = engine(path, threads=1, num_pages=200, kv_cache_dtype=dtype, **layout)
    try:
        assert_same(greedy(llm, BATCH), expected)
    finally:
        llm.engine.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_other_8bit_caches_in_compiled_steps(
    other: tuple[Path, str, list[list[int]]], monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    from rorqual.engine.execution.compiled import CompiledForward

    path, dtype, expected = other
    monkeypatch.setattr(CompiledForward, "_inductor", lambda self, graph, inputs: graph.forward)
    monkeypatch.setattr("rorqual.engine.execution.worker.ops_for", lambda name: CpuOps(native))
    llm = engine(path, exe_mode="compile", kv_cache_dtype=dtype)
    assert_same(greedy(llm, BATCH), expected)


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_heads_in_8_bits_stay_near_fp32(tmp_path: Path, dtype: str) -> None:
    save("qwen", tmp_path)
    ids = torch.randint(0, 128, (3, 23), generator=torch.Generator().manual_seed(0))
    exact = all_logits(load(tmp_path, CpuOps()), ids, [9, 17])
    ours = all_logits(load(tmp_path, CpuOps()), ids, [9, 17], kv_dtype=dtype)
    similar = torch.cosine_similarity(exact, ours, dim=-1)
    print(f"{dtype}: least {similar.min():.5f}, median {similar.median():.5f}")
    assert similar.median() > {"fp8": 0.998, "int8": 0.9998}[dtype]
    assert similar[:, 1:].max() < 1 - 1e-9, "nothing was quantized"


def test_recorded_steps(
    drafting: Path, expected_drafting: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    assert_same(
        greedy(engine(drafting, max_num_seqs=5, num_speculative_tokens=1, **FP8), BATCH),
        expected_drafting,
    )
    assert platform.replays > 10


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("native", "form"), [(True, "A_CC_ME"), (False, "AM_CC_ME")], ids=["native", "torch"]
)
def test_compiled_steps(
    folder: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    native: bool,
    form: str,
) -> None:
    """Traced, not compiled: with the C++ kernels as operators, and without them, where what is
    left is traced from the reference."""
    from rorqual.engine.execution.compiled import CompiledForward

    monkeypatch.setattr(CompiledForward, "_inductor", lambda self, graph, inputs: graph.forward)
    monkeypatch.setattr("rorqual.engine.execution.worker.ops_for", lambda name: CpuOps(native))
    assert_same(greedy(engine(folder, exe_mode="compile", mla_decode=form, **FP8), BATCH), expected)


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "num_speculative_tokens": 2}, {"pp": 2, "chunked_prefill_size": 5}],
    ids=str,
)
def test_several_ranks(
    drafting: Path, expected_drafting: list[list[int]], layout: dict[str, Any]
) -> None:
    """The latent cache is on every tensor-parallel rank; a pipeline stage holds its layers'
    planes."""
    llm = engine(drafting, threads=1, num_pages=200, **FP8, **layout)
    try:
        assert_same(greedy(llm, BATCH), expected_drafting)
    finally:
        llm.engine.close()


@pytest.mark.parametrize(
    "forms", [("CC", "A_CC_ME"), ("A_CC", "CC"), ("AM_CC_ME", "AM_CC_ME")], ids="-".join
)
@pytest.mark.parametrize(
    ("option", "worst", "median"), [("v3-all-dense", 0.985, 0.998), ("v2-grouped", 0.8, 0.998)]
)
def test_logits_stay_near_those_of_fp32(
    tmp_path: Path, option: str, worst: float, median: float, forms: tuple[str, str]
) -> None:
    """Cosine of the logits; among 16 random experts a router now and then chooses another, so
    its worst position is bounded loosely. Every form, however the prompt was cut, reads the same
    entries: among each other logits agree to 2e-4."""
    save(option, tmp_path)
    ids = torch.randint(0, 128, (3, 23), generator=torch.Generator().manual_seed(0))
    exact = all_logits(load(tmp_path, CpuOps()), ids, [9, 17])
    ours = all_logits(load(tmp_path, CpuOps(), forms=forms), ids, [9, 17], kv_dtype="fp8")
    similar = torch.cosine_similarity(exact, ours, dim=-1)
    assert similar.min() > worst
    assert similar.median() > median
    assert similar[:, 1:].max() < 1 - 1e-6, "nothing was quantized"
    whole = all_logits(load(tmp_path, CpuOps(native=False)), ids, [23], kv_dtype="fp8")
    torch.testing.assert_close(ours, whole, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("option", ["v3", "qwen"])
def test_a_cache_of_another_width_than_the_activations(tmp_path: Path, option: str) -> None:
    """fp32 with a bf16 cache: every form reads it alike."""
    save(option, tmp_path)
    forms: list[dict[str, Any]] = [
        {},
        {"mla_prefill": "A_CC", "mla_decode": "A_CC"},
        {"chunked_prefill_size": 3, "mla_decode": "CC"},
    ]
    found = [greedy(engine(tmp_path, kv_cache_dtype="bfloat16", **more), BATCH) for more in forms]
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


# ---- sizes and refusals


def test_the_planner_counts_the_engines_bytes(drafting: Path) -> None:
    llm = engine(drafting, num_pages=40, num_speculative_tokens=1, **FP8)
    pool = llm.engine.worker.runner.pool
    config = llm.engine.model_config
    held = sum(plane.nbytes for layer in pool.layers for plane in layer.values())
    each = costs.kv_bytes_per_token(config, costs.Format("float32", "fp8"))
    assert held == 40 * 8 * each * (config.num_layers + 1) // config.num_layers
    assert each == config.num_layers * (32 + 4 + 16 * 4)
    shape = read_config_file("rorqual/shapes/deepseek-v3")
    assert costs.kv_bytes_per_token(shape, costs.Format(kv_dtype="fp8")) == 61 * 656


def test_the_same_memory_holds_more_tokens(folder: Path) -> None:
    room = {"kv_cache_bytes": 2**19, "max_num_seqs": 32}
    plain, quantized = (
        engine(folder, **room, **more).engine.scheduler.schedulers[0].allocator.capacity
        for more in ({}, FP8)
    )
    assert quantized > 1.8 * plain


def test_what_cannot_have_it_says_so_before_loading(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"does not go with MLA form CD"):
        engine(folder, mla_prefill="CD", mla_decode="CD", **FP8)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int4'.*accepted: .*fp8.*int8"):
        EngineConfig("x", kv_cache_dtype="int4")
    monkeypatch.setattr(CpuPlatform, "converts_fp8", False)
    with pytest.raises(ConfigError, match=r"compute capability 8\.9.*accepted here: int8"):
        engine(folder, **FP8)
    save("qwen", tmp_path)
    with pytest.raises(ConfigError, match=r"compute capability 8\.9"):
        engine(tmp_path, **FP8)
    assert greedy(engine(folder, kv_cache_dtype="int8"), BATCH[:1]), "any device holds int8"
