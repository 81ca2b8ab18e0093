"""Padding rows of captured steps have no experts, in replays of whole steps and of pieces, are in
no expert's load, and have no cached tokens to attend to. The kernels' side of experts:
tests/ops/triton/moe/test_padded_rows.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual import LLM, SamplingParams
from rorqual.ops.interface import Ops
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.reference import RouterWeights
from tests.demo_script import load_demo
from tests.engine.execution.replaying import ReplayingPlatform
from tests.models.checkpoints import save, save_with_mtp

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_num_seqs": 8,
    "max_model_len": 64,
    "page_size": 8,
    "steps_in_flight": 2,
}
PROMPTS = [[5, 3 + i, 9, 2 * i][: 2 + i] for i in range(3)]
PARAMS = [SamplingParams(temperature=0, max_tokens=4 + 3 * i, ignore_eos=True) for i in range(3)]


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> ReplayingPlatform:
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    return platform


@pytest.mark.parametrize(
    "options",
    [{"piecewise_tokens": 128}, {"num_speculative_tokens": 2, "piecewise_tokens": 128}],
    ids=str,
)
def test_replays_have_no_experts_for_padding(
    options: dict[str, Any],
    tmp_path: Path,
    replaying: ReplayingPlatform,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same graph at other numbers of requests, and mixed steps."""
    if "num_speculative_tokens" in options:
        save_with_mtp(tmp_path, agreement=2.0)
    else:
        save("v3", tmp_path)
    llm = LLM(tmp_path, **OPTIONS, **options)
    runner = llm.engine.worker.runner
    plain = Ops.router
    found: dict[str, set[tuple[int, int]]] = {"steps": set(), "pieces": set()}

    def router(
        self: Ops, x: Tensor, w: RouterWeights, padded: PaddedRows | None = None
    ) -> tuple[Tensor, Tensor]:
        ids, weights = plain(self, x, w, padded)
        if padded is not None:
            count = min(len(ids), int(padded.requests) * padded.each)
            assert (ids[:count] >= 0).all()
            assert (ids[count:] == -1).all()
            assert not weights[count:].any()
            whole = padded.requests.data_ptr() == runner.graphs.num_requests.data_ptr()
            found["steps" if whole else "pieces"].add((len(ids), count))
        return ids, weights

    plain_rows = Ops.decode_rows
    padding = runner.rows.padding
    attended: set[tuple[int, int]] = set()

    def decode_rows(self: Ops, length: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        rows = plain_rows(self, length, *rest)
        if length is runner.rows.length:  # not a draft's pass
            slots = rest[3]
            assert not rows[3][slots == padding].any()
            assert (rows[3][slots < padding] > 0).all()
            attended.add((len(slots), int((slots < padding).sum())))
        return rows

    monkeypatch.setattr(Ops, "router", router)
    monkeypatch.setattr(Ops, "decode_rows", decode_rows)
    llm.generate(PROMPTS, PARAMS)
    assert (4, 3) in attended
    assert not runner.rows.length[padding].any()
    assert replaying.replays
    assert replaying.pieces
    width = options.get("num_speculative_tokens", 0) + 1
    assert (4 * width, 3 * width) in found["steps"]
    assert {rows for rows, count in found["pieces"] if rows > count}


def test_the_load_of_experts_has_no_padding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("v3", tmp_path)
    eager = counted(LLM(tmp_path, **OPTIONS))
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    assert counted(LLM(tmp_path, **OPTIONS, piecewise_tokens=128)) == eager
    assert platform.replays
    assert platform.pieces
    assert sum(eager[1][0]) > 0


def counted(llm: LLM) -> tuple[list[list[int]], list[list[int]]]:
    """(the requests' tokens, the load of each layer's experts)"""
    layers = llm.engine.model.moe_layers()
    for layer in layers:
        layer.exchange.record_load = True
        layer.exchange.load.zero_()
    texts = [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, PARAMS)]
    return texts, [layer.exchange.load.tolist() for layer in layers]


def test_forced_experts_of_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For benchmarks ids are replaced, except those of padding."""
    save("v3", tmp_path)
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    plain = Ops.experts
    found: list[list[int]] = []

    def experts(self: Ops, x: Tensor, ids: Tensor, *rest: Any) -> Tensor:
        found.append((ids >= 0).sum(1).tolist())
        return plain(self, x, ids, *rest)

    monkeypatch.setattr(Ops, "experts", experts)
    llm = LLM(tmp_path, **OPTIONS, expert_balance="forced")
    found.clear()
    llm.generate(PROMPTS, PARAMS)
    top_k = llm.engine.model.config.moe.top_k
    assert [top_k] * 3 + [0] in found
    assert all(set(rows) <= {top_k, 0} for rows in found)


def test_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the bundled model on a CPU: three requests in four rows, and four."""
    demo = load_demo("padded_batches")
    path = tmp_path / "padded.json"
    words = ["--device", "cpu", "--requests", "3,4", "--layers", "3", "--steps", "2"]
    padded, full = demo.main([*words, "--turns", "1", "--json", str(path)])
    assert (padded.rows, full.rows) == (4, 4)
    assert padded.experts <= padded.counted_experts <= padded.experts + 4
    assert full.experts == full.counted_experts
    assert min(padded.ms, padded.counted_ms) > 0
    assert [row["requests"] for row in json.loads(path.read_text())] == [3, 4]
    assert len(capsys.readouterr().out.splitlines()) == 4
