"""Which layers a step goes through while kernels are compiled ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rorqual.config.hf import read_config_file
from rorqual.layers.moe import DenseMLP, MoE
from rorqual.layers.parameter import Build
from rorqual.models.loader import load_weights
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.ops.cpu.backend import CpuOps
from tests.models.checkpoints import OPTIONS_FP8, save, save_fp8


def model_of(folder: Path, option: str) -> Transformer:
    (save_fp8 if option in OPTIONS_FP8 else save)(option, folder)
    config = read_config_file(folder)
    build = Build(CpuOps(), torch.float32, torch.device("cpu"), config.quant)
    model = make_model(config, build, 64)
    load_weights(model, folder)
    return model


@pytest.mark.parametrize("option", ["v3", "qwen-mlp-only", "qwen-tied", "fp8-aligned"])
def test_one_layer_of_each_kind(tmp_path: Path, option: str) -> None:
    """The first dense layer, where there is one, and the first with experts; all come back."""
    model = model_of(tmp_path, option)
    every = model.layers
    assert len(every) > 1
    kinds = {type(layer.mlp) for layer in every}
    with model.one_layer_of_each_kind():
        chosen = model.layers
        assert {type(layer.mlp) for layer in chosen} == kinds <= {DenseMLP, MoE}
        assert len(chosen) == len(kinds)
        assert all(layer in every for layer in chosen)
        assert chosen[0] is every[0]
    assert model.layers is every


def test_a_layer_in_another_format_is_another_kind(tmp_path: Path) -> None:
    """As a list of layers left in bf16 makes one; and an error inside puts all back."""
    model = model_of(tmp_path, "qwen-tied")
    every = model.layers
    last = every[-1].attention.out.weight
    object.__setattr__(last, "data", last.data.bfloat16())
    inside = []

    def fail() -> None:
        with model.one_layer_of_each_kind():
            inside.extend(every.index(layer) for layer in model.layers)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert inside == [0, len(every) - 1]
    assert model.layers is every
