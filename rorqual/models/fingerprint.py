"""Fingerprint of a model's experts: a caller and an expert server must agree on it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import torch

from rorqual.config.model import ModelConfig
from rorqual.models.checkpoint import experts_digest

FORMAT = "2"  # version of the messages


def expert_fingerprint(
    folder: str, model: ModelConfig, dtype: torch.dtype, seed: int | None
) -> dict[str, str]:
    """folder: of the checkpoint. seed: of random weights; None: weights are the checkpoint's."""
    data = json.dumps(dataclasses.asdict(model), sort_keys=True, default=str).encode()
    return {
        "format": FORMAT,
        "model": hashlib.sha256(data).hexdigest()[:16],
        "weights": experts_digest(Path(folder)) if seed is None else f"random {seed}",
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": model.quant.describe() if model.quant is not None else "none",
    }
