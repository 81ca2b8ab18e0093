"""`bench offline --compare vllm` with a stand-in for vLLM: what it is asked, what becomes of its
answers, and of its failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rorqual.bench.offline import vllm_baseline, vllm_process
from rorqual.engine.config import EngineConfig
from rorqual.errors import ConfigError

pytestmark = pytest.mark.exhaustive

STAND_IN = """
import json, os, time, types
import numpy as np
import torch

class SamplingParams:
    def __init__(self, **given):
        self.__dict__.update(given)

class LLM:
    def __init__(self, **given):
        if os.environ.get("BROKEN"):
            raise RuntimeError("no card here")
        config = json.load(open(given["model"] + "/config.json"))
        assert (config["num_hidden_layers"], given["load_format"], given["max_num_seqs"]) == (2,
            "dummy", 3), given
        self.routing = given.get("enable_return_routed_experts", False)
        assert self.routing == given.get("enforce_eager", False)
        model_config = types.SimpleNamespace(get_vocab_size=lambda: config["vocab_size"])
        self.llm_engine = types.SimpleNamespace(model_config=model_config)
        self.changed = False

    def apply_model(self, change):
        self.changed = change(torch.nn.Linear(8, 8)) == 72

    def generate(self, prompts, params, use_tqdm):
        assert self.changed and not use_tqdm and params.ignore_eos
        time.sleep(0.02 * params.max_tokens)
        outs = []
        for number, prompt in enumerate(prompts):
            assert len(prompt["prompt_token_ids"]) == 6
            picks = np.zeros((6 + params.max_tokens, 2, 2), dtype=np.uint8)
            picks[:, 1] = [2 * number, 2 * number + 1]  # the first layer routes nothing
            routed = picks if self.routing else None
            completion = types.SimpleNamespace(routed_experts=routed)
            outs.append(types.SimpleNamespace(outputs=[completion]))
        return outs
"""


def bench(folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    (folder / "vllm").mkdir()
    (folder / "vllm/__init__.py").write_text(STAND_IN)
    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "rorqual",
        "bench",
        "offline",
        "--weights",
        "random",
        "--layers",
        "2",
        "--concurrency",
        "2,3",
        "--repeats",
        "1",
        "--prompt-len",
        "6",
        "--output-len",
        "5",
        "--compare",
        "vllm",
        "--json",
        str(folder / "report.json"),
    ]
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{folder}"} | more
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_each_row_is_followed_by_its_peers(tmp_path: Path) -> None:
    done = bench(tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [(row["engine"], row["concurrency"]) for row in rows] == [
        ("rorqual", 2),
        ("vllm", 2),
        ("rorqual", 3),
        ("vllm", 3),
    ]
    for row in rows[1::2]:
        assert 15 < row["step_ms"] < 80
        assert row["tokens_per_s"] == pytest.approx(row["concurrency"] * 5 / row["seconds"])
        assert row["experts_hit"] == 2 * row["concurrency"]
        assert row["floor_ms"] == rows[rows.index(row) - 1]["floor_ms"]


def test_a_peer_that_fails_leaves_our_rows(tmp_path: Path) -> None:
    done = bench(tmp_path, BROKEN="1")
    assert done.returncode != 0
    assert "no card here" in done.stdout + done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [row["engine"] for row in rows] == ["rorqual"] * 2


def test_what_cannot_be_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="not installed"):
        vllm_baseline.check_installed()
    monkeypatch.setattr(vllm_baseline.importlib.util, "find_spec", lambda name: name)
    vllm_baseline.check(EngineConfig(""))
    with pytest.raises(ConfigError, match="speculation"):
        vllm_baseline.check(EngineConfig("", num_speculative_tokens=1))


def test_natural_weights() -> None:
    model = nn.Module()
    model.q_proj = nn.Linear(512, 64)
    model.o_proj = nn.Linear(512, 64)
    model.norm = nn.LayerNorm(16)
    model.register_parameter(
        "w2_weight",
        nn.Parameter(torch.zeros(3, 64, 256).to(torch.float8_e4m3fn), requires_grad=False),
    )
    model.register_parameter(
        "w2_weight_scale_inv", nn.Parameter(torch.zeros(3, 1, 2), requires_grad=False)
    )
    vllm_process.natural(model, 0.5)
    assert model.q_proj.weight.std().item() == pytest.approx(512**-0.5, rel=0.05)
    assert model.o_proj.weight.std().item() == pytest.approx(0.5 * 512**-0.5, rel=0.05)
    assert (model.norm.weight == 1).all()
    assert not model.q_proj.bias.any()
    rows = model.w2_weight.float() * model.w2_weight_scale_inv.repeat_interleave(128, 2)
    assert rows.std().item() == pytest.approx(0.5 * 256**-0.5, rel=0.05)
