"""A dense layer computed as experts: its intermediate columns are split into pieces as wide as an
expert. The first piece is a shared expert; every token is routed to all others with weight 1. The
dense layers then use the expert-parallel ranks and need no group of their own. DeepSeek-V3: 18432
columns are one shared and eight fixed experts of 2048."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from rorqual.config.model import ModelConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.config.quant import scheme_of
from rorqual.errors import ConfigError
from rorqual.layers.experts import mlp_targets
from rorqual.layers.moe import ExpertLayer, MoEInFlight, Stage
from rorqual.layers.parameter import Build, Target
from rorqual.layers.weight_format.base import WeightFormat
from rorqual.layers.weight_format.select import format_of
from rorqual.ops.activation import Activation, hidden_of
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.parallel.exchange import Exchange, ExpertStore, SlotMap
from rorqual.parallel.exchange_select import make_exchange
from rorqual.parallel.layout import Layout
from rorqual.parallel.mesh import SINGLE_LAYOUT


def fixed_experts_of(model: ModelConfig) -> int:
    """Fixed experts of each dense layer, without the shared one."""
    return model.dense_intermediate // model.moe.intermediate_size - 1


def check_fixed_experts(model: ModelConfig, sizes: ParallelConfig) -> None:
    """Raises ConfigError if dense layers cannot be split into experts."""
    size = model.moe.intermediate_size
    if model.dense_intermediate % size or fixed_experts_of(model) < 1:
        raise ConfigError(
            f"fixed_experts: a dense layer of {model.dense_intermediate} columns is no multiple, "
            f"of at least two, of an expert's {size}"
        )
    if fixed_experts_of(model) % sizes.ep:
        raise ConfigError(
            f"fixed_experts: ep={sizes.ep} does not divide the {fixed_experts_of(model)} experts "
            "of a dense layer"
        )
    each = size // (sizes.dense_tp or 1)
    down = scheme_of(model.quant, ["model.layers.0.mlp.down_proj"], model.dense_intermediate)
    block = down.column_unit if down else 1
    if size % (sizes.dense_tp or 1) or each % block:
        raise ConfigError(
            f"fixed_experts: dense_tp={sizes.dense_tp} cuts the shared {size} columns inside a "
            f"block of {block}"
        )


class SharedColumns:
    """This rank's part of the shared expert: the first columns of a dense MLP."""

    def __init__(
        self, build: Build, hidden: int, size: int, formats: tuple[WeightFormat, WeightFormat]
    ):
        self.ops = build.ops
        self.columns = range(*build.mesh.axes["dense"].shard.span(size))
        width = len(self.columns)
        edges = (width, self.columns.start)
        self.gate_up = formats[0].empty(build, 2 * width, hidden, edges)
        self.down = formats[1].empty(build, hidden, width)

    def forward(self, x: Activation, layout: Layout = SINGLE_LAYOUT) -> Tensor:
        return layout.dense(self.ops.mlp, x, self.gate_up, self.down)

    def partial(self, rows: Activation) -> Tensor:
        return self.ops.mlp(rows, self.gate_up, self.down)


class FixedExperts(ExpertLayer):
    """Replaces the DenseMLP of a dense layer and loads its weights."""

    def __init__(self, build: Build, prefix: str, model: ModelConfig):
        moe = model.moe
        mesh = build.mesh
        self.ops = build.ops
        self.prefix = prefix
        self.hidden = model.hidden_size
        self.width = model.dense_intermediate
        self.size = moe.intermediate_size
        ups = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        self.formats = (
            format_of(build.scheme(ups, self.hidden)),
            format_of(build.scheme([f"{prefix}.down_proj"], self.width)),
        )
        self.std = (self.hidden**-0.5, build.residual_gain * self.width**-0.5)
        self.first = SharedColumns(build, self.hidden, self.size, self.formats)
        self.shared = self.first
        count = fixed_experts_of(model)
        self.ids = torch.arange(count, device=build.device)
        self.columns = range(*mesh.axes["expert_tp"].shard.span(self.size))
        slots = SlotMap.identity(count)
        shard = mesh.axes["ep"].shard
        self.held = slots.local(shard)
        store = ExpertStore(
            slots, self._weights(build), build.ops.experts, build.device, shard,
            build.ops.experts_fp8, ops=build.ops,
        )  # fmt: skip
        self.exchange: Exchange = make_exchange(mesh.sizes, moe, store, self.ops.dispatch_combine)

    def _weights(self, build: Build) -> ExpertWeights:
        stack = (len(self.held),)
        size = len(self.columns)
        edges = (size, self.columns.start)
        return ExpertWeights(
            self.formats[0].empty(build, 2 * size, self.hidden, edges, stack),
            self.formats[1].empty(build, self.hidden, size, stack=stack),
            local_fraction=1 / build.mesh.axes["ep"].shard.count,
        )

    def finalize(self) -> None:
        """Call once, after loading: converts weights to the backend's layout."""
        for weight in (self.first.gate_up, self.first.down):
            self.ops.prepare_weight(weight, self.prefix)
        self.ops.prepare_experts(self.exchange.experts, self.prefix)

    def stages(self, layout: Layout = SINGLE_LAYOUT) -> tuple[Stage, ...]:
        return self.exchange_stages(partial(self.dispatch, layout=layout), layout)

    def dispatch(self, x: Activation, layout: Layout) -> MoEInFlight:
        rows = hidden_of(x)
        ids = self.ids.expand(rows.shape[0], -1).contiguous()
        weights = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
        return MoEInFlight(x, layout, self.exchange.dispatch(rows, ids, weights, layout))

    def targets(self) -> Iterator[Target]:
        """The first columns of the dense layer are the shared expert."""
        first = self.first
        yield from self._part(first.gate_up, first.down, first.columns.start)
        experts = self.exchange.experts
        for place, expert in enumerate(self.held):
            start = (1 + expert) * self.size + self.columns.start
            yield from self._part(experts.gate_up[place], experts.down[place], start)

    def _part(self, gate_up: Weight, down: Weight, start: int) -> Iterator[Target]:
        shape = (self.width, self.hidden)
        yield from mlp_targets(self.prefix, gate_up, down, start, shape, self.std, self.formats)
