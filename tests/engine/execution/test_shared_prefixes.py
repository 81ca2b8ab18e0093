"""Backends are told of steps whose requests may have pages in common: those that decode, captured
or beside prompts, where prefixes are cached. What kernels make of it:
tests/ops/triton/attention/test_shared_prefix.py, tests/gpu/test_prefixes_read_once.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual import LLM, SamplingParams
from rorqual.errors import ConfigError
from rorqual.ops.interface import AttentionMetadata, Ops
from tests.demo_script import load_demo
from tests.engine.execution.replaying import ReplayingPlatform
from tests.models.checkpoints import save


@pytest.mark.parametrize("caching", [True, False])
def test_steps_say_whether_requests_may_share_pages(
    caching: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = ReplayingPlatform(torch.device("cpu"))
    monkeypatch.setattr("rorqual.engine.executor.make_platform", lambda device: platform)
    save("qwen", tmp_path)
    said: set[tuple[int, bool]] = set()  # (most query tokens of a request, may share)
    attention = Ops.attention

    def recorded(
        ops: Ops, q: Tensor, k: Tensor, v: Tensor, segment: AttentionMetadata, *rest: Any
    ) -> Tensor:
        said.add((max(segment.query_lens), segment.may_share))
        return attention(ops, q, k, v, segment, *rest)

    monkeypatch.setattr(Ops, "attention", recorded)
    llm = LLM(
        tmp_path,
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=4,
        max_model_len=64,
        max_num_batched_tokens=8,
        page_size=8,
        enable_prefix_caching=caching,
    )
    prompts = [[1 + i, *range(2, 20)] for i in range(3)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert {most for most, shares in said if shares} == ({1} if caching else set())
    assert max(said)[0] > 1  # prompts too


def test_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the bundled model on a CPU, where nothing is read once."""
    demo = load_demo("prefixes_read_once")
    path = tmp_path / "prefixes.json"
    words = ["--device", "cpu", "--requests", "3", "--layers", "2", "--steps", "2", "--turns", "1"]
    rows = demo.main([*words, "--prefix", "40", "--own", "8", "--json", str(path)])
    cases = ["8 prefixes", "one prefix", "nothing shared", "short, nothing shared"]
    assert [row.case for row in rows] == cases
    assert all(min(row.once_ms, row.each_ms) > 0 for row in rows)
    assert [row["case"] for row in json.loads(path.read_text())] == cases
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(cases)


def test_the_demo_says_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = load_demo("prefixes_read_once")

    def measure(self: object, case: str, prompts: list[list[int]]) -> Any:
        if case == "one prefix":
            return demo.Compared(case, len(prompts), 1.0, 2.0)
        raise ConfigError("3 requests never decode together")

    monkeypatch.setattr(demo.Steps, "measure", measure)
    words = ["--device", "cpu", "--requests", "3", "--layers", "2", "--steps", "2", "--turns", "1"]
    (row,) = demo.main([*words, "--prefix", "40", "--own", "8"])
    assert row.case == "one prefix"
    assert capsys.readouterr().out.count("not measured: 3 requests never decode together") == 3
