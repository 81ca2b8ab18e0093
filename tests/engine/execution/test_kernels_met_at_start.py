"""Serving meets no kernel, in no variant that is compiled separately, that the start has not met: a
compilation would hold up every request for half a second."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None or DEVICE != "cpu":
    pytest.skip(SKIP_REASON or "kernels run on a GPU", allow_module_level=True)

from rorqual.engine.execution.model_runner import ModelRunner
from rorqual.engine.kernels_ahead import Parts
from tests.emulation.kernel_variants import met_again, met_while_serving
from tests.models.checkpoints import rewrite_config, save, save_with_mtp

ROOT = Path(__file__).parents[3]
LENGTH = 2048
SIZES: dict[str, Any] = {
    "max_num_seqs": 64,
    "max_model_len": LENGTH,
    "max_num_batched_tokens": LENGTH,
    "page_size": 64,
    "num_pages": 3000,
}
MTP = {
    "num_speculative_tokens": 3,
    "speculative_policy": "adaptive",
    "max_num_batched_tokens": LENGTH + 512,  # so that a prompt as long as can be is run ahead
}
NGRAM = {"num_speculative_tokens": 2, "drafter": "ngram"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RORQUAL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen", {"piecewise_tokens": 512}),
        *(
            pytest.param(model, options, marks=pytest.mark.exhaustive)
            for model, options in (
                ("qwen", {"piecewise_tokens": 0}),
                ("qwen", {"piecewise_tokens": 512, **NGRAM}),
                ("v3", {"piecewise_tokens": 512}),
                ("mtp", {"piecewise_tokens": 512, **MTP}),
            )
        ),
        *(
            pytest.param(model, options, marks=pytest.mark.longest)
            for model, options in (
                ("qwen", {}),
                ("qwen", {"piecewise_tokens": 512, "kv_cache_dtype": "fp8"}),
                ("v3", {"piecewise_tokens": 0}),
                ("v3", {"piecewise_tokens": 512, "kv_cache_dtype": "fp8"}),
                ("v3", {"quantization": "w4a16"}),
                ("mtp", {"piecewise_tokens": 0, "num_speculative_tokens": 1}),
            )
        ),
    ],
    ids=str,
)
def test_no_kernel_is_met_first_while_serving(
    model: str, options: dict[str, Any], tmp_path: Path
) -> None:
    if model == "mtp":
        save_with_mtp(tmp_path)
    else:
        save(model, tmp_path)
    rewrite_config(tmp_path, max_position_embeddings=LENGTH)
    new = met_while_serving(tmp_path, {**SIZES, **options}, LENGTH)
    assert not new, new[0]


@pytest.mark.parametrize("model", ["qwen", pytest.param("mtp", marks=pytest.mark.exhaustive)])
def test_a_second_start_meets_the_same_in_fewer_steps(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if model == "mtp":
        save_with_mtp(folder)
    else:
        save(model, folder)
    rewrite_config(folder, max_position_embeddings=LENGTH)
    run: list[int] = []  # parts, by start
    call = Parts.__call__

    def counted(self: Parts, name: str, work: Any, always: bool = False) -> None:
        def noted() -> None:
            run[-1] += 1
            work()

        call(self, name, noted, always)

    monkeypatch.setattr(Parts, "__call__", counted)
    warm = ModelRunner._keep_probs  # of every start's compiling ahead and capturing
    monkeypatch.setattr(
        ModelRunner, "_keep_probs", lambda self, variants: (run.append(0), warm(self, variants))
    )
    options = {**SIZES, "piecewise_tokens": 512, **(MTP if model == "mtp" else {})}
    first, second = met_again(folder, options)
    assert len(first) > 40
    assert second == first
    parts = [count for count in run if count]
    assert len(parts) == 2
    assert parts[1] < parts[0] / 2


@pytest.mark.exhaustive
@pytest.mark.longest
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen3-30b-a3b", {"num_layers": 2}),
        ("qwen3-30b-a3b", {"num_layers": 2, "quantization": "w4a16"}),
        ("deepseek-v2-lite", {"num_layers": 3}),
        # block-fp8, and steps with prompts that are never captured
        (
            "deepseek-v3",
            {
                "num_layers": 4,
                "piecewise_tokens": 0,
                "max_model_len": 2048,
                "max_num_batched_tokens": 1024,
                "max_num_seqs": 64,
            },
        ),
    ],
    ids=str,
)
def test_nor_of_a_real_shape_on_a_hopper_card(model: str, options: dict[str, Any]) -> None:
    """Nor after a second start, which launches what met kernels in the first."""
    command = [sys.executable, "-m", "tests.emulation.kernel_variants", model]
    for _ in range(2):
        done = subprocess.run(
            [*command, json.dumps(options)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr[-3000:]}"
