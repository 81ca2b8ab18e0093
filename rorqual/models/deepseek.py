"""DeepSeek-V2, V2-Lite, V3 and R1 (arXiv 2405.04434, 2412.19437)."""

from __future__ import annotations

from torch import Tensor

from rorqual.config import ModelConfig
from rorqual.layers.mla import MLA
from rorqual.layers.parameter import Build
from rorqual.models.transformer import Layer, Transformer


class Deepseek(Transformer):
    def __init__(self, config: ModelConfig, build: Build, max_len: int, mla_prefill: str = "CC", mla_decode: str = "A_CC_ME"):
        self.forms = (mla_prefill, mla_decode)
        super().__init__(config, build, max_len)

    def make_layer(self, build: Build, index: int, prefix: str) -> Layer:
        attention = MLA(build, self.config, index, f"{prefix}.self_attn", *self.forms)
        return Layer(build, prefix, self.config, attention, self.make_mlp(build, index, prefix))

    def skips(self, name: str) -> bool:
        """The multi-token prediction modules stand after the last layer; without speculation they are not loaded."""
        first = self.config.num_layers
        modules = range(first, first + self.config.num_mtp_layers)
        return super().skips(name) or any(name.startswith(f"model.layers.{i}.") for i in modules)

    def attentions(self) -> list[MLA]:
        return [layer.attention for layer in self.layers if isinstance(layer.attention, MLA)]

    def finalize(self) -> None:
        for attention in self.attentions():
            attention.finalize()

    def derived(self) -> list[Tensor]:
        return [weight.data for attention in self.attentions() for weight in attention.materialised or ()]
