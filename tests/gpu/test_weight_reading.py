"""Weights read straight to a GPU: bit for bit those that a CPU gets, however often buffers are
filled anew while the GPU copies from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from rorqual.config.hf import read_config
from rorqual.layers.parameter import Build
from rorqual.models import weight_reader
from rorqual.models.loader import load_weights
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.ops.interface import Ops
from rorqual.platforms import make_platform
from tests.models.test_loader_errors import DEEPSEEK, model_of, save, tensors_of


def loaded(folder: Path, device: str, dtype: torch.dtype, threads: int) -> Transformer:
    config = read_config(DEEPSEEK)
    model = make_model(config, Build(Ops(), dtype, torch.device(device), config.quant), 64)
    model.finalize = lambda: None  # type: ignore[method-assign]
    load_weights(model, folder, threads)
    return model


@pytest.mark.parametrize("stage", [64, 4096, 8 * 2**20])
@pytest.mark.parametrize("merged", [False, True])
def test_a_gpu_gets_what_a_cpu_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, merged: bool
) -> None:
    held = tensors_of(model_of(DEEPSEEK), split=not merged)
    save(tmp_path, {name: x.bfloat16() if x.numel() % 3 else x for name, x in held.items()})
    monkeypatch.setattr(weight_reader, "STAGE", stage)
    for dtype in (torch.float32, torch.bfloat16):
        want = loaded(tmp_path, "cpu", dtype, 1)
        found = loaded(tmp_path, "cuda", dtype, 8)
        for mine, theirs in zip(found.targets(), want.targets(), strict=True):
            assert torch.equal(mine.view.cpu(), theirs.view), mine.name


def test_a_buffer_waits_for_its_copies() -> None:
    """Each is filled anew at once after copies from it were started."""
    platform = make_platform("cuda")
    size = 32 << 20
    with platform.staging(size) as staging:
        placed = []
        for number in range(40):
            buffer = staging.buffer()
            buffer.fill_(number)
            placed.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            placed[-1].copy_(buffer, non_blocking=True)
            staging.sent()
    assert [int(x.min()) for x in placed] == [int(x.max()) for x in placed] == list(range(40))
