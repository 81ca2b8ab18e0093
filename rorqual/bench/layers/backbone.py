"""A model without its routed experts: what stays on one side when the experts live on another.
It keeps routers and shared experts."""

from __future__ import annotations

import torch
from torch import Tensor

from rorqual.config.model import ModelConfig
from rorqual.layers.moe import MoE
from rorqual.layers.parameter import Build
from rorqual.models.deepseek import Deepseek
from rorqual.models.qwen3_moe import Qwen3Moe
from rorqual.models.transformer import MLP, Transformer
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.parallel.exchange import SlotMap, plus
from rorqual.parallel.layout import Layout


class NowhereExchange:
    """An exchange that returns tokens unchanged."""

    record_load = False
    capturable = True

    def __init__(self, device: torch.device):
        nothing = Weight(torch.empty(0, device=device))
        self.experts = ExpertWeights(nothing, nothing)
        self.load = torch.empty(0, device=device)

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout) -> Tensor:
        return x

    def takes_absent(self, x: Tensor, top_k: int, layout: Layout) -> bool:
        return False

    def counts_first(self, layout: Layout) -> bool:
        return False

    def send(self, ticket: Tensor) -> None: ...

    def dense_rows(self, ticket: Tensor) -> None: ...

    def remap(self, slots: SlotMap, rows: Tensor | None = None) -> None:
        """A no-op: it has no experts."""

    def run_experts(self, ticket: Tensor, dense: Tensor | None = None) -> None: ...

    def combine(self, ticket: Tensor, base: Tensor | None = None) -> Tensor:
        return plus(ticket, base)


class ExpertlessMoE(MoE):
    def __init__(self, build: Build, prefix: str, config: ModelConfig):
        nowhere = NowhereExchange(build.device)
        super().__init__(build, prefix, config.hidden_size, config.moe, remote=nowhere)


class Backbone(Transformer):
    def make_mlp(self, build: Build, index: int, prefix: str) -> MLP:
        sparse = self.config.moe_layers[index]
        return (
            ExpertlessMoE(build, f"{prefix}.mlp", self.config)
            if sparse
            else super().make_mlp(build, index, prefix)
        )


class DeepseekBackbone(Backbone, Deepseek): ...


class QwenBackbone(Backbone, Qwen3Moe): ...


def make_backbone(config: ModelConfig, build: Build) -> Transformer:
    """Parameters are allocated, uninitialized; the step has the rotary angles, so the rotary tables
    are empty."""
    return DeepseekBackbone(config, build, 1) if config.is_mla else QwenBackbone(config, build, 1)
