"""Kernels are compiled while weights are read, by a second model that is gone afterwards."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual import LLM, SamplingParams
from rorqual.engine import kernels_ahead
from rorqual.engine.config import EngineConfig
from rorqual.engine.execution import worker
from rorqual.engine.execution.model_runner import ModelRunner
from rorqual.engine.execution.worker import read_model
from rorqual.engine.kernels_ahead import KeptParts, Parts, beside, fits_beside, kept_path
from rorqual.errors import LoadError
from rorqual.models.transformer import Layer, Transformer
from rorqual.ops.interface import AttentionMetadata, Ops
from tests.engine.execution.replaying import CompilingPlatform
from tests.models.checkpoints import rewrite_config, save, save_with_mtp

OPTIONS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_seqs": 5,
    "max_model_len": 64,
    "page_size": 8,
}


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> CompilingPlatform:
    found = CompilingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: found)
    return found


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(thread, layers, tokens up to which steps are captured in pieces) of each model whose kernels
    were compiled."""
    found: list[tuple[str, int, int]] = []
    real = ModelRunner.compile_ahead

    def compile_ahead(self: ModelRunner, *steps: object) -> None:
        pieces = self.pieces.sizes[-1] if self.pieces else 0
        found.append((threading.current_thread().name, len(self.model.layers), pieces))
        real(self, *steps)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "compile_ahead", compile_ahead)
    return found


def test_parts_that_met_a_kernel_are_kept_and_others_left_out(tmp_path: Path) -> None:
    def run(known: frozenset[str] | None) -> tuple[list[str], list[str]]:
        parts = Parts(known)
        met: set[str] = set()
        parts.count = lambda: len(met)
        done = []
        for name, kernels in {"a": "xy", "b": "x", "c": "xz", "d": "z"}.items():
            parts(name, lambda n=name, k=kernels: (done.append(n), met.update(k)), name == "d")
        return parts.met, done

    path = tmp_path / "new" / "parts.json"
    kept = KeptParts(path)
    assert kept.names is None
    kept.learn(None)  # nothing is compiled
    assert not path.exists()
    met, done = run(kept.names)
    assert met == ["a", "c"]
    assert done == ["a", "b", "c", "d"]
    kept.learn(met)
    assert kept.names == KeptParts(path).names == {"a", "c"}
    kept.learn(["b"])  # of a walk that left parts out
    assert KeptParts(path).names == {"a", "c"}
    assert run(kept.names) == (["a", "c"], ["a", "c", "d"])


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '["a", 1]', "null", "[" * 100_000])
def test_a_file_that_says_nothing_is_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "parts.json"
    path.write_text(text)
    kept = KeptParts(path)
    assert kept.names is None
    kept.learn(["a"])
    assert KeptParts(path).names == {"a"}


def test_the_newest_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_ahead, "MOST_KEPT", 3)
    for age, name in enumerate("abcde"):
        (tmp_path / name).write_text("[]")
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    KeptParts(tmp_path / "new").learn(["part"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "new"]


def test_a_file_that_is_gone_while_the_package_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "module.py").write_text("")
    (tmp_path / ".#module.py").symlink_to("user@host.1234")  # an editor's lock
    monkeypatch.setattr(kernels_ahead, "__file__", str(tmp_path / "engine" / "kernels_ahead.py"))
    assert [path for path, *_ in kernels_ahead.package_state()] == [
        str(tmp_path / "engine" / "module.py")
    ]


def test_one_of_several_ranks_and_a_folder_that_cannot_be_written_keep_nothing(
    tmp_path: Path,
) -> None:
    alone = KeptParts(None)
    alone.learn(["a"])
    assert alone.names is None
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "parts.json"
    kept = KeptParts(path)
    kept.learn(["a"])
    assert kept.names == {"a"}  # of this start
    assert KeptParts(path).names is None


def test_kept_parts_are_of_one_engine_on_one_device_and_these_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("v3", tmp_path)
    config = EngineConfig(str(tmp_path))
    model = read_model(config)
    paths = [kept_path(config, model, "a GPU")]
    assert kept_path(config, model, "a GPU") == paths[0]
    paths.append(kept_path(config, model, "another"))
    paths.append(kept_path(replace(config, max_num_seqs=7), model, "a GPU"))
    rewrite_config(tmp_path, rope_theta=5000.0)
    paths.append(kept_path(config, read_model(config), "a GPU"))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    paths.append(kept_path(config, model, "a GPU"))
    state = kernels_ahead.package_state()
    assert len(state) > 300
    changed = [*state[:-1], (*state[-1][:2], state[-1][2] + 1)]
    monkeypatch.setattr(kernels_ahead, "package_state", lambda: changed)
    paths.append(kept_path(config, model, "a GPU"))
    assert len(set(paths)) == len(paths)


def tokens(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    return list(llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids)


@pytest.mark.parametrize(("option", "least"), [("v3", 2), ("qwen-mlp-only", 2), ("qwen-tied", 1)])
def test_a_second_model_of_each_kind_of_layer_meets_the_same_steps(
    tmp_path: Path,
    platform: CompilingPlatform,
    compiled: list[tuple[str, int, int]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    least: int,
) -> None:
    few: list[int] = []  # layers of each run with some of them only
    only = Transformer.only

    def counted(self: Transformer, layers: list[Layer]) -> AbstractContextManager[None]:
        few.append(len(layers))
        return only(self, layers)

    monkeypatch.setattr(Transformer, "only", counted)
    save(option, tmp_path)
    with caplog.at_level(logging.WARNING):
        llm = LLM(tmp_path, **OPTIONS, piecewise_tokens=128)
    assert not caplog.records
    (first, layers, pieces), (second, whole, same) = compiled
    assert (first, second) == ("kernels", "MainThread")
    assert least <= layers <= whole
    assert pieces == same == 128
    runner = llm.engine.worker.runner
    assert runner.graphs is not None
    assert runner.pieces is not None
    steps = len(runner.graphs.graphs)
    sizes = len(runner.graphs.buckets)
    others = len(runner.pieces.graphs) + len(runner.pieces.attention.decodes)
    # before a size is captured it runs once, and with few layers
    assert platform.warmed == sizes + others
    assert steps > sizes
    runs = 3 + sizes + len(runner.pieces.graphs)  # 3: to count layers, to compile for both models
    assert few == [len(runner.kinds)] * runs
    platform.warmed = 0
    expected = LLM(tmp_path, **OPTIONS, piecewise_tokens=128, precompile_kernels=False)
    assert tokens(llm) == tokens(expected)
    assert len(compiled) == 2
    assert platform.warmed == steps + others


@pytest.mark.exhaustive
def test_prediction_modules_are_compiled_too(
    tmp_path: Path, platform: CompilingPlatform, compiled: list[tuple[str, int, int]]
) -> None:
    save_with_mtp(tmp_path, agreement=2.0)
    LLM(tmp_path, **OPTIONS, num_speculative_tokens=2)
    assert [thread for thread, _, _ in compiled] == ["kernels", "MainThread"]


def test_without_room_or_files_kernels_are_compiled_afterwards_alone(
    tmp_path: Path, platform: CompilingPlatform, compiled: list[tuple[str, int, int]]
) -> None:
    save("v3", tmp_path)
    platform.free = kernels_ahead.SPARE
    LLM(tmp_path, **OPTIONS)
    platform.free = 1 << 40
    LLM(tmp_path, **OPTIONS, weights="random")
    assert [thread for thread, _, _ in compiled] == ["MainThread", "MainThread"]
    assert fits_beside(10, kernels_ahead.SPARE + 10)
    assert not fits_beside(11, kernels_ahead.SPARE + 10)


def test_a_failure_of_either_is_told_and_the_thread_has_ended(
    tmp_path: Path,
    platform: CompilingPlatform,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise RuntimeError("no kernel")

    with caplog.at_level(logging.WARNING), beside(fail, platform):
        pass
    assert "could not be compiled" in caplog.text
    save("v3", tmp_path)
    ended: list[bool] = []

    def refuse(model: Transformer, folder: Path) -> None:
        ended.append(any(one.name == "kernels" for one in threading.enumerate()))
        raise LoadError("a torn file")

    monkeypatch.setattr(worker, "load_weights", refuse)
    with pytest.raises(LoadError, match="torn"):
        LLM(tmp_path, **OPTIONS)
    assert not any(one.name == "kernels" for one in threading.enumerate())
    assert ended


def test_attention_launched_beside_captured_pieces_is_run_ahead(
    tmp_path: Path, platform: CompilingPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For decoding requests too: steps of more tokens than pieces have are launched eagerly."""
    save("qwen", tmp_path)
    seen: set[tuple[int, int]] = set()  # requests that decode, the most they may have cached
    attention = Ops.attention

    def recorded(self: Ops, *given: Any) -> Tensor:
        segment = next(one for one in given if isinstance(one, AttentionMetadata))
        if set(segment.query_lens) == {1}:
            seen.add((len(segment), max(segment.max_kv_lens)))
        return attention(self, *given)

    monkeypatch.setattr(Ops, "attention", recorded)
    llm = LLM(tmp_path, **OPTIONS, piecewise_tokens=16, max_num_batched_tokens=48)
    ahead = set(seen)
    seen.clear()
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(90, (20 + i,), generator=generator).tolist() for i in range(9)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    llm.generate(prompts, [replace(params, max_tokens=5 + i) for i in range(9)])
    longest = max(bound for _, bound in ahead)
    eager = {(count, bound) for count, bound in seen if bound < longest}
    assert eager, "no larger step had requests that decode"
    for count, bound in eager:
        assert any(many >= count and far >= bound for many, far in ahead if far < longest)
