"""The experts that an expert server holds: of some or all layers, some or all, and others from one
moment to the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rorqual.config.model import ModelConfig
from rorqual.engine.config import EngineConfig
from rorqual.engine.execution.worker import RESIDUAL_GAIN, read_model
from rorqual.errors import CapacityError, RequestError
from rorqual.layers.experts import LocalExperts
from rorqual.layers.parameter import Build, Target
from rorqual.models.loader import load_weights, random_weights
from rorqual.ops.select import ops_for
from rorqual.parallel.mesh import Mesh
from rorqual.parallel.remote.link import LinkError
from rorqual.platforms.base import Platform

NO_EXPERT = -1
# of which kernels are loaded at the start: powers of two, between which they hardly change
LOADED_ROWS = tuple(2**power for power in range(12))


class ExpertNotHereError(RequestError):
    """An expert was asked for that this server does not hold, or not any more."""


class ExpertLayers:
    """Experts of some layers, as models/loader.py fills them. experts: of each layer; room: slots
    of each that there is memory for, if more."""

    def __init__(
        self,
        build: Build,
        config: ModelConfig,
        experts: Mapping[int, Sequence[int]],
        room: int = 0,
    ):
        self.dtype = build.dtype
        self.mesh = build.mesh
        self.ops = build.ops
        self.layers = {
            layer: LocalExperts(
                build,
                f"model.layers.{layer}.mlp",
                config.hidden_size,
                config.moe,
                local_slots=tuple(held),
                room=room,
            )
            for layer, held in experts.items()
        }

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for held in self.layers.values() for part in held.parts())

    def fill(self, config: EngineConfig) -> None:
        """From the checkpoint, or the seed. Raises LoadError."""
        if config.weights == "random":
            random_weights(self, config.seed)
        else:
            load_weights(self, Path(config.model))

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


@dataclass
class LayerSlots:
    """Of one layer: `slots` says which expert each slot has the weights of, `held` which experts
    callers know of. A dropped expert stays in its slot, and computes for callers that do not know
    yet, until another expert takes the slot."""

    slots: list[int]
    held: set[int]

    def slot_of(self, expert: int) -> int | None:
        return self.slots.index(expert) if expert in self.slots else None

    def next_slot(self) -> int | None:
        """Where another expert may go: into an unused slot, or one of a dropped expert."""
        dropped = [slot for slot, expert in enumerate(self.slots) if expert not in self.held]
        return min(dropped, key=lambda slot: self.slots[slot] != NO_EXPERT, default=None)


class ExpertShard:
    """layers: numbers; experts: held of each at first; max_slots: of each that there is memory
    for. Raises ConfigError and CapacityError."""

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        layers: Sequence[int],
        experts: Sequence[int],
        max_slots: int = 0,
    ):
        self.engine_config = config
        self.config = read_model(config)
        self.max_slots = max(max_slots, len(experts))
        self.ops = ops_for(platform.name)
        name = self.config.dtype if config.dtype == "auto" else config.dtype
        self.dtype: torch.dtype = getattr(torch, name)
        self.platform = platform
        wanted = dict.fromkeys(layers, tuple(experts))
        on_meta = self._experts(wanted, torch.device("meta"), self.max_slots)
        on_meta.finalize()
        need = on_meta.nbytes
        free = platform.available_memory()
        if need > free:
            raise CapacityError(
                f"these experts need {need / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free on "
                f"{platform.name}"
            )
        experts_here = self._experts(wanted, platform.device, self.max_slots)
        experts_here.fill(config)
        self.layers = experts_here.layers
        unused = [NO_EXPERT] * (self.max_slots - len(experts))
        self.slots = {layer: LayerSlots([*experts, *unused], set(experts)) for layer in layers}
        self.places = {layer: self._places(layer) for layer in layers}
        self.no_places = self._no_places()

    def _experts(
        self, experts: Mapping[int, Sequence[int]], device: torch.device, room: int = 0
    ) -> ExpertLayers:
        config = self.config
        gain = RESIDUAL_GAIN * (2 * config.num_layers) ** -0.5
        build = Build(self.ops, self.dtype, device, config.quant, gain, mesh=Mesh.single())
        return ExpertLayers(build, config, experts, room)

    def _no_places(self) -> Tensor:
        return torch.full(
            (self.config.moe.num_experts + 1,), NO_EXPERT, device=self.platform.device
        )

    def _places(self, layer: int) -> Tensor:
        """The slot of each expert, -1 where it is in none; the last, which -1 finds, is none."""
        places = torch.full((self.config.moe.num_experts + 1,), NO_EXPERT)
        for slot, expert in enumerate(self.slots[layer].slots):
            places[expert] = slot
        places[NO_EXPERT] = NO_EXPERT
        return places.to(self.platform.device)

    # ---- other experts

    def holdings(self) -> dict[int, tuple[int, ...]]:
        return {layer: tuple(sorted(slots.held)) for layer, slots in self.slots.items()}

    def slot_bytes(self, layer: int) -> int:
        """Of one expert."""
        return sum(part[0].nbytes for part in self.layers[layer].parts())

    def read(self, experts: Mapping[int, Sequence[int]]) -> ExpertLayers:
        """Experts into memory set aside. Raises LoadError."""
        found = self._experts(experts, self.platform.device)
        found.fill(self.engine_config)
        return found

    def empty(self, layer: int) -> int:
        """A slot that no call computes with from here on. Nothing may be computed meanwhile.
        Raises CapacityError."""
        slots = self.slots[layer]
        slot = slots.next_slot()
        if slot is None:
            raise CapacityError(f"no slot of layer {layer} is free; there are {self.max_slots}")
        slots.slots[slot] = NO_EXPERT
        self._replace(layer)
        return slot

    def _replace(self, layer: int) -> None:
        """In place, for captured calls."""
        self.places[layer].copy_(self._places(layer))
        self.platform.synchronize()

    def put(self, layer: int, slot: int, expert: int, read: LocalExperts, place: int) -> None:
        """Expert number `place` of what was read into an empty slot. Nothing may be computed
        meanwhile."""
        with torch.inference_mode(), self.platform.stream():
            for live, new in zip(self.layers[layer].parts(), read.parts(), strict=True):
                live[slot].copy_(new[place])
            self.platform.synchronize()
        self.slots[layer].slots[slot] = expert
        self.slots[layer].held.add(expert)
        self._replace(layer)

    # ---- for the server

    def load_kernels(self) -> None:
        """Those that calls need, with nothing to compute. Loading one may wait until the GPU is
        idle, and it never is while a caller's rows are waited for (lanes.py)."""
        layer = next(iter(self.layers))
        device = self.platform.device
        with torch.inference_mode(), self.platform.stream():
            for rows in LOADED_ROWS:
                shape = (rows, self.config.moe.top_k)
                slots = torch.full(shape, NO_EXPERT, dtype=torch.int32, device=device)
                weights = torch.zeros(shape, device=device)
                x = torch.zeros(rows, self.config.hidden_size, dtype=self.dtype, device=device)
                self.run(layer, slots, weights, (x,))
            self.platform.synchronize()

    def compute(self, layer: int, ids: Tensor, weights: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """The weighted sums over the experts that are here: ids [T, K] (-1: elsewhere), weights
        [T, K], rows (hidden states [T, hidden],) or (e4m3, scales), all in the host's memory. [T,
        hidden] in the host's memory. Raises RequestError, and ExpertNotHereError for experts that
        are not here."""
        held = self.layers.get(layer)
        if held is None:
            raise RequestError(f"layer {layer} is not held here")
        if int(ids.min()) < -1 or int(ids.max()) >= self.config.moe.num_experts:
            raise RequestError("there is no such expert")
        device = self.platform.device
        with torch.inference_mode(), self.platform.stream():
            ids = ids.to(device, torch.int64)
            local = self.places[layer][ids]
            if bool(((local < 0) & (ids >= 0)).any()):
                raise ExpertNotHereError(f"an expert of layer {layer} is not held here")
            moved = [part.to(device) for part in rows]
            return self.run(layer, local, weights.to(device), moved).cpu()

    def places_of(self, layer: int) -> Tensor:
        """[experts + 1] on the device: the slot of each, -1 where it is in none. Changes in
        place."""
        return self.places.get(layer, self.no_places)

    def run(self, layer: int, slots: Tensor, weights: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """As `compute`, all on the device and by slots (-1: nothing), for a layer of which some
        are here, else zeros."""
        held = self.layers.get(layer)
        if held is None:
            return torch.zeros(rows[0].shape, dtype=self.dtype, device=rows[0].device)
        if len(rows) == 1:
            y = self.ops.experts(rows[0], slots, weights, held.weights)
        else:
            data, scale = rows
            y = self.ops.experts_fp8(
                data.view(torch.float8_e4m3fn), scale, self.dtype, slots, weights, held.weights
            )
        return y.to(self.dtype)


def check_rows(shard: ExpertShard, columns: int, top_k: int, dtype: str) -> None:
    """Raises LinkError where a caller's rows are not those of this model."""
    wanted = {
        "rows of": (columns, shard.config.hidden_size),
        "experts of a row, top_k": (top_k, shard.config.moe.top_k),
        "hidden states in": (dtype, str(shard.dtype).removeprefix("torch.")),
    }
    for name, (theirs, ours) in wanted.items():
        if theirs != ours:
            raise LinkError(f"{name} {theirs} are called for; accepted: {ours}")
