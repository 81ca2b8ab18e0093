"""Expert load files: JSON with `logical_count` [layers, experts], the number of tokens routed to
each expert, as SGLang's recorder writes it. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rorqual.errors import ConfigError
from rorqual.parallel.eplb.placement import Floats

KEY = "logical_count"


def read_expert_load(path: str | Path) -> Floats:
    """[layers, experts]; layers without experts have zeros. Counts by step (one more axis, in
    front) are summed."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON: {' '.join(str(error).split())}"
        ) from None
    counts = data.get(KEY) if isinstance(data, dict) else None
    try:
        found = np.asarray(counts, np.float64)
    except (TypeError, ValueError):
        found = np.zeros(0)
    if found.ndim == 3:
        found = found.sum(0)
    if found.ndim != 2 or not found.size or not np.isfinite(found).all() or (found < 0).any():
        raise ConfigError(f"{path} must hold {KEY!r}, [layers, experts] of counts from 0 up")
    if not found.any():
        raise ConfigError(f"{path} holds no pick of any expert")
    return found


def moe_layers_of(load: Floats) -> Floats:
    """The rows of layers that have experts."""
    return load[load.any(1)]


def write_expert_load(
    path: str | Path, counts: Sequence[Sequence[int]], layers: Sequence[int], total: int
) -> None:
    """counts: of each MoE layer. layers: their indices among the model's `total` layers."""
    rows = [[0] * len(counts[0])] * total
    for layer, row in zip(layers, counts, strict=True):
        rows[layer] = list(row)
    Path(path).write_text(json.dumps({KEY: rows}, separators=(",", ":")) + "\n", encoding="utf-8")


def loads_by_layer(load: Floats, layers: Sequence[int], experts: int, name: Any) -> Floats:
    """The load of each MoE layer of a model; `layers`: their indices. The file has a row for each
    layer, or for each MoE layer. A layer beyond the file's rows (a prediction module) gets a
    uniform load."""
    if load.shape[1] != experts:
        raise ConfigError(
            f"{name} counts {load.shape[1]} experts, the model has {experts} in a layer"
        )
    rows = load if len(load) >= layers[-1] else None
    if rows is not None and all(layer >= len(rows) or rows[layer].any() for layer in layers):
        return np.stack([rows[n] if n < len(rows) else np.ones(experts) for n in layers])
    found = moe_layers_of(load)
    if len(found) > len(layers):
        raise ConfigError(f"{name} has {len(found)} layers of experts, the model {len(layers)}")
    return np.concatenate([found, np.ones((len(layers) - len(found), experts))])
