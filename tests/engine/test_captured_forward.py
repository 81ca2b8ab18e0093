"""Decode steps whose forward pass is captured give the tokens of those that are not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rorqual import LLM, SamplingParams
from rorqual.engine.captured_forward import CapturedForward
from rorqual.ops.cpu.backend import CpuOps
from tests.engine.execution.test_identity import engine, greedy, prompts
from tests.models.checkpoints import save, save_with_mtp

pytestmark = [
    pytest.mark.skipif(CpuOps().native is None, reason="no compiler"),
    pytest.mark.exhaustive(but_first=True),
]
BATCH = prompts(6)


@pytest.fixture(scope="module", params=["v3", "v2-grouped", "qwen"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    save(request.param, path)
    return path


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mtp")
    save_with_mtp(path, agreement=2.0)
    return path


def captured(llm: LLM) -> CapturedForward | None:
    forward: CapturedForward | None = llm.engine.executor.worker.runner.captured  # type: ignore
    return forward


def sizes(llm: LLM, name: str = "model") -> dict[int, bool]:
    """Numbers of tokens that have been seen, and whether their steps were captured."""
    forward = captured(llm)
    assert forward is not None
    kind = forward.kinds.get(name)
    return {} if kind is None else {n: replay is not None for n, replay in kind.replays.items()}


def check(folder: Path, **options: Any) -> LLM:
    plain = engine(folder, exe_mode="eager", **options)
    assert captured(plain) is None
    llm = engine(folder, **options)
    assert greedy(llm, BATCH) == greedy(plain, BATCH)
    plain.engine.close()
    return llm


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"quantization": "w8a8"},
        {"quantization": "w4a16-g32", "dtype": "bfloat16"},
        {"mla_decode": "A_CC"},
        {"max_num_seqs": 3, "max_num_batched_tokens": 24},
        {"num_pages": 40},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "default",
)
def test_tokens_are_those_of_eager_steps(folder: Path, options: dict[str, Any]) -> None:
    llm = check(folder, **options)
    found = sizes(llm)
    assert found, "no step was replayed"
    assert all(found.values()) or "mla_decode" in options, found
    llm.engine.close()


@pytest.mark.parametrize("options", [{"num_speculative_tokens": 1}, {"num_speculative_tokens": 3}])
@pytest.mark.parametrize("window", [True, False])
def test_drafts(drafting: Path, options: dict[str, Any], window: bool) -> None:
    llm = check(drafting, draft_window=window, **options)
    for name in ("model", "module 0"):
        found = sizes(llm, name)
        assert found, f"no pass of {name} was replayed"
        assert all(found.values()), found
    llm.engine.close()


def test_sampled_tokens(folder: Path) -> None:
    params = [SamplingParams(temperature=0.9, seed=n, max_tokens=20, logprobs=2) for n in range(6)]
    found = []
    for mode in ("eager", "auto"):
        llm = engine(folder, exe_mode=mode)
        outs = [out.outputs[0] for out in llm.generate(BATCH, params)]
        found.append([(out.token_ids, [sorted(top) for top in out.logprobs]) for out in outs])
        llm.engine.close()
    assert found[0] == found[1]


def test_two_engines_at_once(folder: Path) -> None:
    """Each captures on its own thread while the other computes."""
    plain = engine(folder, exe_mode="eager")
    want = greedy(plain, BATCH)
    plain.engine.close()
    engines = [engine(folder) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            assert list(pool.map(lambda llm: greedy(llm, BATCH), engines)) == [want, want]
    for llm in engines:
        assert all(sizes(llm).values())
        llm.engine.close()


def test_what_is_not_captured(folder: Path) -> None:
    """A cache in 8 bits is widened by torch, fp16 has no compiled calls: nothing is tried in vain
    for the first, the second is computed as ever."""
    eight = engine(folder, kv_cache_dtype="fp8")
    greedy(eight, BATCH[:2])
    assert sizes(eight) == {}
    eight.engine.close()
    half = check(folder, dtype="float16")
    assert not any(sizes(half).values())
    half.engine.close()


def test_counts_of_experts_go_on(folder: Path) -> None:
    """Once they are counted, steps that were captured before are not replayed."""
    llm = engine(folder)
    want = greedy(llm, BATCH)
    forward = captured(llm)
    assert forward is not None
    layers = forward.moe
    assert layers
    for layer in layers:
        layer.exchange.record_load = True
    assert greedy(llm, BATCH) == want
    for layer in layers:
        assert layer.exchange.load.sum() > 0
    llm.engine.close()


def test_forgetting(folder: Path) -> None:
    llm = engine(folder)
    want = greedy(llm, BATCH)
    llm.engine.executor.worker.runner.drop_captured()  # type: ignore[attr-defined]
    assert sizes(llm) == {}
    assert greedy(llm, BATCH) == want
    assert all(sizes(llm).values())
    llm.engine.close()
