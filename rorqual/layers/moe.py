"""Feed-forward layers: dense, and sparse over an Exchange."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from rorqual.config import MoEConfig
from rorqual.layers.linear import Linear, Part, empty_weight
from rorqual.layers.parameter import Build, Target, matrix_targets
from rorqual.ops.reference import Weight
from rorqual.parallel.exchange import Exchange, LocalExchange, SlotMap

Stages = Generator[None, None, Tensor]


class DenseMLP:
    """SwiGLU of `intermediate` columns: [T, hidden] to [T, hidden]."""

    def __init__(self, build: Build, prefix: str, hidden: int, intermediate: int):
        self.ops = build.ops
        parts = [Part(f"{prefix}.gate_proj", intermediate), Part(f"{prefix}.up_proj", intermediate)]
        self.gate_up = Linear(build, parts, hidden, merged=f"{prefix}.gate_up_proj")
        self.down = Linear(build, [Part(f"{prefix}.down_proj", hidden)], intermediate, gain=build.residual_gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.mlp(x, self.gate_up.weight, self.down.weight)

    def stages(self, x: Tensor) -> Stages:
        return self.forward(x)
        yield  # a generator with no hand-over: dense layers have nobody to wait for

    def targets(self) -> Iterator[Target]:
        yield from self.gate_up.targets()
        yield from self.down.targets()


class MoE:
    """Routed experts behind an Exchange, plus shared experts computed while the exchange is under way."""

    def __init__(self, build: Build, prefix: str, hidden: int, moe: MoEConfig, slots: SlotMap | None = None):
        self.ops, self.moe, self.prefix = build.ops, moe, prefix
        gate_dtype = torch.float32 if moe.router_fp32 else build.dtype
        self.gate = build.empty(moe.num_experts, hidden, dtype=gate_dtype)
        self.bias = build.empty(moe.num_experts, dtype=torch.float32) if moe.has_bias else None
        shared = moe.num_shared * moe.intermediate_size
        self.shared = DenseMLP(build, f"{prefix}.shared_experts", hidden, shared) if shared else None
        self.block = build.quant.block[0] if build.quant else 1
        self.slots = slots or SlotMap.identity(moe.num_experts)
        gate_up, down = self._expert_weights(build, hidden)
        self.exchange: Exchange = LocalExchange(self.slots, gate_up, down, self.ops.experts, build.device)
        self.std = (hidden**-0.5, build.residual_gain * moe.intermediate_size**-0.5)

    def _expert_weights(self, build: Build, hidden: int) -> tuple[Weight, Weight]:
        stack, size = (self.slots.num_slots,), self.moe.intermediate_size
        quantised = build.is_quantised(f"{self.prefix}.experts")
        aligned = size % self.block == 0
        gate_up = empty_weight(build, 2 * size, hidden, quantised, aligned, stack)
        return gate_up, empty_weight(build, hidden, size, quantised, stack=stack)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(expert ids [T, K], weights [T, K] fp32) of hidden states [T, hidden]."""
        return self.ops.router(x, self.gate, self.bias, self.moe)

    def stages(self, x: Tensor) -> Stages:
        """submit | run_experts beside the shared expert | wait. Yields at each hand-over."""
        ids, weights = self.route(x)
        ticket = self.exchange.submit(x, ids, weights)
        yield
        self.exchange.run_experts(ticket)
        shared = self.shared.forward(x) if self.shared else None
        yield
        y = self.exchange.wait(ticket)
        return y if shared is None else y + shared

    def targets(self) -> Iterator[Target]:
        yield Target(f"{self.prefix}.gate.weight", self.gate, std=self.std[0])
        if self.bias is not None:
            yield Target(f"{self.prefix}.gate.e_score_correction_bias", self.bias)
        if self.shared:
            yield from self.shared.targets()
        yield from self._expert_targets()

    def _expert_targets(self) -> Iterator[Target]:
        gate_up, down, size = self.exchange.gate_up, self.exchange.down, self.moe.intermediate_size
        names = [f"{self.prefix}.experts.{expert}" for expert in range(self.moe.num_experts)]
        repeat = self.block // gate_up.block[0] if gate_up.quantised else 1
        for slot, expert in enumerate(self.slots.logical):
            up, out, name = gate_up[slot], down[slot], names[expert]
            for part, rows in (("gate_proj", slice(0, size)), ("up_proj", slice(size, None))):
                yield from matrix_targets(f"{name}.{part}.weight", up.data[rows], self._rows(up, rows), self.std[0], repeat=repeat)
            yield from matrix_targets(f"{name}.down_proj.weight", out.data, out.scale, self.std[1])
        if self.slots.is_identity and not gate_up.quantised:
            yield from self._stacked_targets(names)

    def _rows(self, weight: Weight, rows: slice) -> Tensor | None:
        if weight.scale is None:
            return None
        block, size = weight.block[0], self.moe.intermediate_size
        half = -(-size // block)
        return weight.scale[:half] if rows.start == 0 else weight.scale[half:]

    def _stacked_targets(self, names: list[str]) -> Iterator[Target]:
        """Checkpoints that keep all experts of a layer in one tensor."""
        up = tuple(f"{name}.{part}.weight" for name in names for part in ("gate_proj", "up_proj"))
        yield Target(f"{self.prefix}.experts.gate_up_proj", self.exchange.gate_up.data, std=self.std[0], covers=up)
        down = tuple(f"{name}.down_proj.weight" for name in names)
        yield Target(f"{self.prefix}.experts.down_proj", self.exchange.down.data, std=self.std[1], covers=down)
