"""A dense layer computed as one shared expert and fixed ones: what the dense layer gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.config.hf import read_config_file
from rorqual.layers.fixed_experts import FixedExperts
from rorqual.layers.moe import run_stages
from rorqual.layers.parameter import Build
from rorqual.models.loader import load_weights
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.ops.cpu.backend import CpuOps
from tests.models.checkpoints import OPTIONS_FP8, save, save_fp8


def model_of(folder: Path, fixed: bool) -> Transformer:
    config = read_config_file(folder)
    cpu = torch.device("cpu")
    build = Build(CpuOps(), torch.float32, cpu, config.quant, fixed_experts=fixed)
    model = make_model(config, build, 64)
    load_weights(model, folder)
    return model


@pytest.mark.parametrize("option", ["v3", "fp8-aligned"])
def test_the_sums_of_the_dense_layer(tmp_path: Path, option: str) -> None:
    """From the checkpoint's dense tensors, scales included; without rows as well."""
    (save_fp8 if option in OPTIONS_FP8 else save)(option, tmp_path)
    dense, fixed = (model_of(tmp_path, fixed).layers[0].mlp for fixed in (False, True))
    assert isinstance(fixed, FixedExperts)
    assert len(fixed.ids) == (2 if option == "v3" else 1)
    for rows in (40, 1, 0):
        x = torch.randn(rows, fixed.hidden, generator=torch.Generator().manual_seed(rows))
        with torch.inference_mode():
            want, found = (run_stages(mlp.stages(), x) for mlp in (dense, fixed))
        assert torch.allclose(found, want, atol=1e-5, rtol=1e-5)


def test_tokens_with_random_weights(tmp_path: Path) -> None:
    """Also those are the dense layer's own."""
    save("v3", tmp_path)
    found = []
    for fixed in (False, True):
        llm = LLM(
            tmp_path,
            dtype="float32",
            weights="random",
            num_layers=2,
            max_model_len=32,
            max_num_seqs=2,
            threads=1,
            fixed_experts=fixed,
            skip_tokenizer_init=True,
        )
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outs = llm.generate([[5, 6, 7], [9]], params)
        found.append([list(out.outputs[0].token_ids) for out in outs])
    assert found[0] == found[1]
