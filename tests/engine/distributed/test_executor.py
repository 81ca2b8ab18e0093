"""Engines of several processes: the tokens of one process, whatever the layout; and what happens
when a rank dies or hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rorqual import LLM
from rorqual.errors import ConfigError, EngineError
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.models.transformer import Transformer
from rorqual.ops.interface import Ops
from tests.engine.mixed_batch import COMMON, TEXTS, everything, params
from tests.models.checkpoints import save

pytestmark = pytest.mark.exhaustive(but_first=True)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """One process, no speculation."""
    return everything(LLM(**COMMON), TEXTS)


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "num_speculative_tokens": 2, "chunked_prefill_size": 3},
    {"dp": 2, "ep": 2, "num_speculative_tokens": 1},
    {"pp": 2, "num_speculative_tokens": 2},
    {"dp": 2, "ep": 2, "exchange": "low_latency", "num_speculative_tokens": 2},
]
MORE: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "dp": 2, "ep": 4, "exchange": "low_latency", "num_speculative_tokens": 2},
    {"dp": 2, "ep": 2, "exchange": "alltoall", "steps_in_flight": 2},
    {"tp": 4, "num_speculative_tokens": 3, "draft_window": False},
    {"dp": 2},
    {"dp": 2, "num_speculative_tokens": 3, "drafter": "ngram"},
    {"dp": 4, "num_speculative_tokens": 2, "embed_tp": 4, "head_tp": 4},
    {"pp": 2, "tp": 2, "num_speculative_tokens": 2},
    {"pp": 2, "dp": 2, "ep": 2, "num_speculative_tokens": 1, "chunked_prefill_size": 5},
    {"pp": 4},
    {"pp": 2, "pipeline_turns": 1, "num_speculative_tokens": 2},
    {"pp": 2, "pipeline_turns": 3, "steps_in_flight": 4, "chunked_prefill_size": 3},
    {"pp": 2, "num_speculative_tokens": 2, "drafter": "ngram", "steps_in_flight": 1},
    {"tp": 2, "sequence_parallel": True, "num_speculative_tokens": 2},
    {"tp": 2, "dp": 2, "ep": 2, "dense_tp": 1, "num_speculative_tokens": 2, "steps_in_flight": 2},
    {"tp": 2, "ep": 2, "exchange": "allgather_ep", "sequence_parallel": True},
    {"dp": 4, "ep": 4, "exchange": "low_latency", "num_speculative_tokens": 2, "num_pages": 34},
]
# of each: it is cut in some steps, not in those where a rank has too few requests
CUT: list[Any] = [
    pytest.param(  # the third is this one in two stages
        {"dp": 2, "ep": 2, "micro_batches": 2, "num_speculative_tokens": 1},
        marks=[pytest.mark.longest],
    ),
    {"tp": 2, "micro_batches": 2, "num_speculative_tokens": 3, "draft_window": False},
    {"pp": 2, "dp": 2, "ep": 2, "micro_batches": 2, "num_speculative_tokens": 1},
    {"dp": 2, "ep": 2, "micro_batches": 3, "exchange": "alltoall", "num_speculative_tokens": 2},
    {"dp": 2, "ep": 2, "micro_batches": 3, "exchange": "low_latency", "redundant_experts": 2},
]
CUT_FURTHER: list[dict[str, Any]] = [
    {
        "tp": 2,
        "dp": 2,
        "ep": 4,
        "micro_batches": 2,
        "exchange": "alltoall",
        "redundant_experts": 4,
        "num_speculative_tokens": 1,
    },
    {"dp": 2, "micro_batches": 3, "chunked_prefill_size": 3},
    {"tp": 2, "dp": 2, "ep": 2, "dense_tp": 1, "micro_batches": 2, "num_speculative_tokens": 1},
]


def name_of(layout: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in layout.items())


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_layouts_give_the_tokens_of_one_process(
    expected: list[Any], layout: dict[str, Any]
) -> None:
    llm = LLM(**{**COMMON, **layout})
    assert everything(llm, TEXTS) == expected
    if "exchange" in layout:
        assert (
            llm.engine.stats.all2all_backend
            == "low_latency (process group: cpu has no symmetric memory)"
        )
    reason = (
        "tokens are sharded: sums are scattered"
        if llm.engine.model.layout([1] * layout.get("dp", 1), True).sharded
        else "cpu has no symmetric memory"
    )
    assert llm.engine.stats.allreduce_backend == (
        f"process group ({reason})" if layout.get("tp", 1) > 1 else "local"
    )


@pytest.mark.full_matrix
@pytest.mark.parametrize(
    "layout",
    [{"tp": 2, "sequence_parallel": True}, {"tp": 2, "dp": 2, "ep": 2, "dense_tp": 1}],
    ids=name_of,
)
def test_latents_are_gathered_for_drafts_as_well(tmp_path: Path, layout: dict[str, Any]) -> None:
    """A model whose latents are narrower than its hidden states (the bundled one's are not),
    with a prediction module."""
    save("v3-narrow-latents", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    options = {**COMMON, "model": str(tmp_path), "weights": "random", "skip_tokenizer_init": True}
    prompts = [[7, 3, 9, 11, 4, 4, 8], [5, 1], [40, 2, 60]]
    assert everything(LLM(**options, **layout, num_speculative_tokens=2), prompts) == everything(
        LLM(**options), prompts
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [*CUT, *(pytest.param(layout, marks=pytest.mark.full_matrix) for layout in CUT_FURTHER)],
    ids=name_of,
)
def test_steps_in_parts(
    expected: list[Any], layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = []
    room_left = []
    plain = Transformer.compute

    def compute(self: Transformer, step: ForwardBatch, every_row: bool = False) -> Tensor:
        parts.append(len(step.parts))
        before = len(room_left)
        result = plain(self, step, every_row)
        assert len(room_left) - before == bool(step.parts)
        return result

    def beside_messages(self: Ops) -> AbstractContextManager[None]:
        room_left.append(self)
        return nullcontext()

    monkeypatch.setattr(Transformer, "compute", compute)  # of rank 0, which is this process
    monkeypatch.setattr(Ops, "beside_messages", beside_messages)
    assert everything(LLM(**{**COMMON, **layout}), TEXTS) == expected
    assert set(parts) == {0, layout["micro_batches"]}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "micro_batches": 3, "num_speculative_tokens": 2},
        {"pp": 2, "micro_batches": 2, "num_speculative_tokens": 1},
        {"tp": 2, "micro_batches": 2, "chunked_prefill_size": 40},
    ],
    ids=name_of,
)
def test_a_burst_shares_pages_that_its_own_step_fills(layout: dict[str, Any]) -> None:
    """In parts, and in stages: requests of one step read each other's prompts."""
    shared = [300 + i % 50 for i in range(96)]
    prompts = [[*shared, *range(360 + i, 360 + 3 * i)] for i in range(1, 5)]
    prompts += [prompts[0], [*shared, 300 + 96 % 50]]  # and one that ends with a page and a token
    given = {**COMMON, "num_pages": 320, "max_num_batched_tokens": 512}
    alone = LLM(**given, enable_prefix_caching=False)
    expected = [alone.generate([prompt], params())[0].outputs[0].token_ids for prompt in prompts]
    alone.engine.close()
    llm = LLM(**given, **layout)
    found = [out.outputs[0].token_ids for out in llm.generate(prompts, params())]
    hits = llm.engine.scheduler.schedulers[0].prefix.hits
    llm.engine.close()
    assert found == expected
    assert hits >= 5 * 80  # of 96; a chunk or a draft's entry ends before


@pytest.mark.full_matrix
@pytest.mark.parametrize("layout", MORE, ids=name_of)
def test_more_layouts(expected: list[Any], layout: dict[str, Any]) -> None:
    assert everything(LLM(**{**COMMON, **layout}), TEXTS) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layout", [{"tp": 2, "num_speculative_tokens": 2, "drafter": "ngram"}], ids=name_of
)
def test_qwen(tmp_path: Path, layout: dict[str, Any]) -> None:
    save("qwen", tmp_path)
    prompts = [[5, 6, 7, 5, 6], [9] * 11, [1, 2, 3], [4, 4, 5], [8], [11, 12]]
    options = {**COMMON, "skip_tokenizer_init": True, "max_model_len": 64}
    single = everything(LLM(tmp_path, **options), prompts)
    assert everything(LLM(tmp_path, **options, **layout), prompts) == single


def test_a_layout_the_model_cannot_have_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="tp=3 does not divide"):
        LLM(tp=3)
    with pytest.raises(ConfigError, match="ep=3"):
        LLM(dp=2, ep=3)


def run_until_it_fails(llm: LLM, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            llm.generate(TEXTS, params(max_tokens=100))
    except EngineError as error:
        return str(error)
    pytest.fail(f"the engine went on for {seconds} s")


@pytest.mark.parametrize(
    ("blow", "named"), [(signal.SIGKILL, "status -9"), (signal.SIGSTOP, "no sign of life")]
)
def test_a_rank_that_dies_or_hangs_ends_the_engine_with_its_name(
    blow: signal.Signals, named: str
) -> None:
    llm = LLM(**COMMON, tp=2, watchdog_seconds=6)
    assert llm.engine.executor is not None
    process = llm.engine.executor.handles[0].process
    llm.generate(TEXTS[:1], params(max_tokens=2))
    os.kill(process.pid, blow)
    message = run_until_it_fails(llm, 60)
    assert "rank 1 (pp 0, dp 0, tp 1)" in message
    assert named in message
    with pytest.raises(EngineError):
        llm.generate(TEXTS[:1], params(max_tokens=2))
    llm.engine.close()
    assert process.wait(60) is not None


def test_a_process_that_leaves_its_groups_behind_ends_with_its_own_status(tmp_path: Path) -> None:
    code = f"""
import atexit, sys
import torch.distributed as dist
from rorqual.engine.distributed.executor import skip_group_teardown
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
atexit.register(print, "handlers run")
skip_group_teardown()
sys.exit(7)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (7, "handlers run\n"), done.stderr
