"""Where experts lie when an engine starts. No torch."""

from __future__ import annotations

import numpy as np

from rorqual.config.model import ModelConfig
from rorqual.engine.config import EngineConfig
from rorqual.parallel.eplb.load_file import loads_by_layer, read_expert_load
from rorqual.parallel.eplb.placement import place


def expert_layers(model: ModelConfig) -> list[int]:
    """Numbers of all layers with experts; prediction modules stand behind the others."""
    modules = range(model.num_layers, model.num_layers + model.num_mtp_layers)
    return [layer for layer, sparse in enumerate(model.moe_layers) if sparse] + list(modules)


def initial_maps(config: EngineConfig, model: ModelConfig) -> dict[int, tuple[int, ...]]:
    """The logical expert of each slot, by layer; empty where experts lie in order and stay there.
    The same on all ranks."""
    sizes = config.parallel
    experts = model.moe.num_experts
    layers = expert_layers(model)
    slots = sizes.expert_slots(experts)
    if not layers or not (sizes.places_experts or config.init_expert_load):
        return {}
    if config.init_expert_load is not None:
        path = config.init_expert_load
        loads = loads_by_layer(read_expert_load(path), layers, experts, path)
    elif slots == experts:
        return dict.fromkeys(layers, tuple(range(experts)))
    else:
        loads = np.ones((len(layers), experts))
    rows = place(loads, slots, sizes.ep)
    return {layer: tuple(row) for layer, row in zip(layers, rows.tolist(), strict=True)}
