"""Maps Hugging Face ids of published models to shipped shapes with the same sizes, so that costs
need no network. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rorqual.config.hf import read_config_file
from rorqual.config.model import ModelConfig
from rorqual.config.quant import QUANTIZATIONS, quantization_named
from rorqual.errors import ConfigError
from rorqual.models.hub import model_folder

QUANTS = tuple(dict.fromkeys(("auto", "fp8", "none", *QUANTIZATIONS)))
SHAPES = Path(__file__).resolve().parents[2] / "shapes"
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_V3 = ("V3", "V3-Base", "V3-0324", "V3.1", "V3.1-Base", "V3.1-Terminus", "R1", "R1-Zero", "R1-0528")
_QWEN = ("", "-Base", "-Instruct-2507", "-Thinking-2507")
_SIZES = ("30B-A3B", "235B-A22B")
_K2 = ("Instruct", "Instruct-0905", "Base")
IDS: dict[str, tuple[str, bool]] = {  # (shape, fp8 weights)
    **{f"deepseek-ai/DeepSeek-{name}": ("deepseek-v3", True) for name in _V3},
    **{f"moonshotai/Kimi-K2-{name}": ("kimi-k2", True) for name in _K2},
    **{
        f"deepseek-ai/DeepSeek-V2-Lite{suffix}": ("deepseek-v2-lite", False)
        for suffix in ("", "-Chat")
    },
    **{
        f"Qwen/Qwen3-{size}{suffix}": (f"qwen3-{size.lower()}", False)
        for size in _SIZES
        for suffix in _QWEN
    },
    **{
        f"Qwen/Qwen3-{size}{suffix}-FP8": (f"qwen3-{size.lower()}", True)
        for size in _SIZES
        for suffix in _QWEN
        if suffix != "-Base"
    },
}


def shape_of(name: str) -> tuple[Path, bool] | None:
    """(folder of the config.json, whether weights are fp8) of a published id or a shape's own
    name; None for others."""
    if name in IDS:
        shape, fp8 = IDS[name]
        return SHAPES / shape, fp8
    folder = SHAPES / name
    return (
        (folder, name in ("deepseek-v3", "kimi-k2"))
        if (folder / "config.json").is_file() and "/" not in name
        else None
    )


def published(
    name: str, quant: str = "auto", overrides: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The configuration of a published model. quant: auto (as published) or one of QUANTS."""
    found = shape_of(name)
    if found is None:
        raise ConfigError(
            f"{name!r} is no published shape; known: "
            f"{', '.join(sorted({shape for shape, _ in IDS.values()}))} and their ids"
        )
    return with_quant(
        found[0], ("fp8" if found[1] else "none") if quant == "auto" else quant, overrides
    )


def with_quant(folder: Path, quant: str, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """A folder's configuration with its weights unchanged (auto), in fp8 with 128 x 128 blocks,
    unquantized (none), or in one of the engine's `quantization` formats."""
    if quant not in QUANTS:
        raise ConfigError(f"quant={quant!r} is not known; accepted: {', '.join(QUANTS)}")
    changed = dict(overrides or {})
    if quant != "auto":
        changed["quantization_config"] = FP8 if quant == "fp8" else None
    model = read_config_file(folder, overrides=changed)
    if quant in ("auto", "fp8", "none"):
        return model
    return replace(model, quant=quantization_named(quant))


def model_of(model: str, quant: str) -> ModelConfig:
    """The configuration of a shape that ships, or of a folder or an id, without its weights."""
    shape = shape_of(model)
    if shape is None:
        return with_quant(model_folder(model, weights=False), quant)
    published = "fp8" if shape[1] else "none"
    return with_quant(shape[0], published if quant == "auto" else quant)
