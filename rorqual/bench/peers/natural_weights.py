"""Random weights that keep the scale of activations and spread the routing, for another engine.

Dummy weights of vLLM and SGLang are within 0.001 of zero: nearly every token is then routed to the
same few experts, so the layer is too cheap. Both engines load plugins in each of their processes;
our plugin rewrites the weights before they are processed: `plugin_folder` is put on their path.

This file is copied into that folder and runs in those engines' processes: it imports nothing of
this project.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

TO_RESIDUAL = ("o_proj", "down_proj", "w2_weight")  # matrices that write to the residual stream
GAIN = "RORQUAL_RESIDUAL_GAIN"  # of those matrices; set by the benchmark
MARK = "rorqual-natural-weights"
MODULE = "rorqual_natural_weights"
ENTRY_POINTS = f"""\
[vllm.general_plugins]
{MODULE} = {MODULE}:in_vllm
[sglang.srt.plugins]
{MODULE} = {MODULE}:in_sglang
"""


def natural(model: torch.nn.Module, gain: float) -> int:
    """Random weights as this project's own: rows of unit norm, `gain` where they write to the
    residual stream, norms of one. Returns the number of parameters."""
    torch.manual_seed(0)
    seen = 0
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        data = parameter.data
        factor = gain if any(part in name for part in TO_RESIDUAL) else 1.0
        seen += data.numel()
        if data.dtype == torch.float8_e4m3fn:
            for part in data if data.dim() == 3 else (data,):
                part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=part.device))
        elif "scale" in name and data.dim() >= 2:  # of blocks of 128 columns
            data.fill_(factor * (128 * data.shape[-1]) ** -0.5)
        elif "bias" in name:
            data.zero_()
        elif "norm" in name:
            data.fill_(1.0)
        elif data.is_floating_point() and data.dim() >= 2 and "cos_sin" not in name:
            data.normal_(0, factor * data.shape[-1] ** -0.5)
    return seen


def rewritten(model: torch.nn.Module) -> None:
    """Says in the engine's log what was done."""
    print(f"{MARK} {natural(model, float(os.environ[GAIN]))} parameters", flush=True)


def in_vllm() -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class NaturalModelLoader(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            rewritten(model)

    register_model_loader("dummy")(NaturalModelLoader)


def in_sglang() -> None:
    from sglang.srt.model_loader import loader

    if getattr(loader.initialize_dummy_weights, "natural", False):
        return
    before = loader.initialize_dummy_weights

    def initialize(model: Any, *args: Any, **given: Any) -> None:
        before(model, *args, **given)
        rewritten(model)

    initialize.natural = True  # type: ignore[attr-defined]
    loader.initialize_dummy_weights = initialize


def plugin_folder(folder: Path) -> Path:
    """Makes a folder which, on an engine's path, is the plugin."""
    metadata = folder / f"{MODULE}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    shutil.copyfile(__file__, folder / f"{MODULE}.py")
    return folder
