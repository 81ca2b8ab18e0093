"""The experts that an expert server holds: of some or all layers, some or all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rorqual.engine.config import EngineConfig
from rorqual.engine.execution.worker import RESIDUAL_GAIN, read_model, weight_bytes
from rorqual.errors import CapacityError, RequestError
from rorqual.layers.experts import HeldExperts
from rorqual.layers.parameter import Build, Target
from rorqual.models.loader import load_weights, random_weights
from rorqual.ops.select import ops_for
from rorqual.parallel.mesh import Mesh
from rorqual.platforms.base import Platform


class ExpertShard:
    """What models/loader.py fills. layers: numbers; experts: held of each layer. Raises ConfigError
    and CapacityError."""

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        layers: Sequence[int],
        experts: Sequence[int],
    ):
        self.config = read_model(config)
        self.experts = tuple(experts)
        self.mesh = Mesh.single()
        self.ops = ops_for(platform.name)
        name = self.config.dtype if config.dtype == "auto" else config.dtype
        self.dtype: torch.dtype = getattr(torch, name)
        self.platform = platform
        self.layers: dict[int, HeldExperts] = {}
        self._make(layers, torch.device("meta"))
        self.finalize()
        need = weight_bytes(self)
        free = platform.available_memory()
        if need > free:
            raise CapacityError(
                f"these experts need {need / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free on "
                f"{platform.name}"
            )
        self._make(layers, platform.device)
        if config.weights == "random":
            random_weights(self, config.seed)
        else:
            load_weights(self, Path(config.model))
        places = torch.full((self.config.moe.num_experts + 1,), -1)
        places[list(self.experts)] = torch.arange(len(self.experts))
        self.places = places.to(platform.device)  # the last, which -1 finds, is none

    def _make(self, layers: Sequence[int], device: torch.device) -> None:
        config = self.config
        gain = RESIDUAL_GAIN * (2 * config.num_layers) ** -0.5
        build = Build(self.ops, self.dtype, device, config.quant, gain, mesh=self.mesh)
        self.layers = {
            layer: HeldExperts(
                build,
                f"model.layers.{layer}.mlp",
                config.hidden_size,
                config.moe,
                held=self.experts,
            )
            for layer in layers
        }

    # ---- for the loader

    def targets(self) -> Iterator[Target]:
        for held in self.layers.values():
            yield from held.targets()

    def skips(self, name: str) -> bool:
        """All that is no routed expert of these layers."""
        return not any(name.startswith(f"{held.prefix}.experts.") for held in self.layers.values())

    def finalize(self) -> None:
        for held in self.layers.values():
            held.finalize(self.ops)

    def derived(self) -> list[Tensor]:
        return []

    # ---- for the server

    def compute(self, layer: int, ids: Tensor, weights: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """The weighted sums over the experts that are here: ids [T, K] (-1: elsewhere), weights
        [T, K], rows (hidden states [T, hidden],) or (e4m3, scales), all in the host's memory. [T,
        hidden] in the host's memory. Raises RequestError for experts that are not here."""
        held = self.layers.get(layer)
        if held is None:
            raise RequestError(f"layer {layer} is not held here")
        if int(ids.min()) < -1 or int(ids.max()) >= self.config.moe.num_experts:
            raise RequestError("there is no such expert")
        device = self.platform.device
        with torch.inference_mode(), self.platform.stream():
            ids = ids.to(device, torch.int64)
            local = self.places[ids]
            if bool(((local < 0) & (ids >= 0)).any()):
                raise RequestError(f"an expert of layer {layer} is not held here")
            weights = weights.to(device)
            moved = [part.to(device) for part in rows]
            if len(moved) == 1:
                y = self.ops.experts(moved[0], local, weights, held.weights)
            else:
                data, scale = moved
                y = self.ops.experts_fp8(
                    data.view(torch.float8_e4m3fn), scale, self.dtype, local, weights, held.weights
                )
            return y.to(self.dtype).cpu()
