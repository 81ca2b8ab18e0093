"""The expert placement when an engine starts. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from rorqual.config.model import ModelConfig
from rorqual.engine.config import EngineConfig
from rorqual.parallel.eplb.load_file import loads_by_layer, read_expert_load
from rorqual.parallel.eplb.placement import Ints, by_rank, identity_placement, place, rank_loads


def expert_layers(model: ModelConfig) -> list[int]:
    """Numbers of all layers with experts; prediction modules come after the others."""
    modules = range(model.num_layers, model.num_layers + model.num_mtp_layers)
    return [layer for layer, sparse in enumerate(model.moe_layers) if sparse] + list(modules)


def initial_maps(config: EngineConfig, model: ModelConfig) -> dict[int, tuple[int, ...]]:
    """The logical expert of each slot, by layer; empty where experts are in order and never move.
    The same on all ranks."""
    sizes = config.parallel
    experts = model.moe.num_experts
    layers = expert_layers(model)
    simulated = config.simulated_expert_load
    if not layers or not (sizes.places_experts or config.init_expert_load or simulated):
        return {}
    rows = _rows(config, model, layers)
    if simulated is not None:
        loads = loads_by_layer(read_expert_load(simulated), layers, experts, simulated)
        rows = with_rank_0_as(rows, loads, sizes.ep, config.simulated_rank)
    return {layer: tuple(row) for layer, row in zip(layers, rows.tolist(), strict=True)}


def _rows(config: EngineConfig, model: ModelConfig, layers: list[int]) -> Ints:
    sizes = config.parallel
    experts = model.moe.num_experts
    slots = sizes.expert_slots(experts)
    if config.init_expert_load is not None:
        path = config.init_expert_load
        loads = loads_by_layer(read_expert_load(path), layers, experts, path)
    elif slots == experts:
        return identity_placement(len(layers), experts)
    else:
        loads = np.ones((len(layers), experts))
    return place(loads, slots, sizes.ep)


def with_rank_0_as(placement: Ints, loads: Any, ranks: int, which: str) -> Ints:
    """In each layer swap rank 0's experts with those of the rank with the highest load (`hottest`)
    or the load nearest the mean (`mean`)."""
    found = placement.copy()
    times = rank_loads(placement, loads, ranks)
    near = -np.abs(times - times.mean(1, keepdims=True))
    chosen = (times if which == "hottest" else near).argmax(1)
    by_rank_of = by_rank(found, ranks)
    for layer, rank in enumerate(chosen.tolist()):
        by_rank_of[layer, [0, rank]] = by_rank_of[layer, [rank, 0]]
    return found


def simulated_loads(config: EngineConfig, model: ModelConfig) -> dict[int, Any]:
    """Counts by layer from which topk_ids are drawn; empty without simulated_expert_load."""
    path = config.simulated_expert_load
    if path is None:
        return {}
    layers = expert_layers(model)
    rows = loads_by_layer(read_expert_load(path), layers, model.moe.num_experts, path)
    return dict(zip(layers, rows, strict=True))
