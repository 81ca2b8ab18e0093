"""Qwen3-MoE: 30B-A3B, 235B-A22B (arXiv 2505.09388)."""

from __future__ import annotations

from rorqual.layers.attention import GQA
from rorqual.layers.parameter import Build
from rorqual.models.transformer import Layer, Transformer


class Qwen3Moe(Transformer):
    def make_layer(self, build: Build, index: int, prefix: str) -> Layer:
        attention = GQA(build, self.config, index - self.held.start, f"{prefix}.self_attn")
        return Layer(build, prefix, self.config, attention, self.make_mlp(build, index, prefix))
