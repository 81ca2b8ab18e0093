"""DeepSeek-V2, V2-Lite, V3 and R1 (arXiv 2405.04434, 2412.19437)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from rorqual.config.model import ModelConfig
from rorqual.layers.mla import MLA
from rorqual.layers.moe import MoE
from rorqual.layers.parameter import Build, Target
from rorqual.models.mtp import MTPModule
from rorqual.models.transformer import Layer, Transformer


class Deepseek(Transformer):
    """`with_mtp`: also create the multi-token prediction modules, `mtp`, one for each depth that
    the checkpoint was trained for."""

    def __init__(
        self,
        config: ModelConfig,
        build: Build,
        max_len: int,
        mla_prefill: str = "CC",
        mla_decode: str = "A_CC_ME",
        with_mtp: bool = False,
    ):
        self.forms = (mla_prefill, mla_decode)
        self.with_mtp = with_mtp
        super().__init__(config, build, max_len)
        depths = range(
            config.num_layers, config.num_layers + config.num_mtp_layers * self.embeds_drafts(build)
        )
        self.modules = [
            MTPModule(
                build, config, f"model.layers.{i}", self.make_layer(build, i, f"model.layers.{i}")
            )
            for i in depths
        ]
        self.mtp = self.modules

    def embeds_drafts(self, build: Build) -> bool:
        """Prediction modules are on the last stage, with the head that they share."""
        return self.with_mtp and build.mesh.last_stage

    def make_layer(self, build: Build, index: int, prefix: str) -> Layer:
        attention = MLA(
            build, self.config, index - self.held.start, f"{prefix}.self_attn", *self.forms
        )
        return Layer(build, prefix, self.config, attention, self.make_mlp(build, index, prefix))

    def skips(self, name: str) -> bool:
        """Prediction modules follow the last layer. Without speculation they are not loaded; with
        it, only their copies of embedding and head are not."""
        first = self.config.num_layers
        modules = [f"model.layers.{i}." for i in range(first, first + self.config.num_mtp_layers)]
        copies = ("embed_tokens.weight", "shared_head.head.weight")
        left_out = [module + copy for module in modules for copy in copies] if self.mtp else modules
        # scales of an int8 cache: other backends compute their own
        scale = name.endswith(".self_attn.k_scale") and not self.ops.static_cache_scales
        return scale or super().skips(name) or name.startswith(tuple(left_out))

    def targets(self) -> Iterator[Target]:
        yield from super().targets()
        for module in self.modules:
            yield from module.targets()

    def moe_layers(self) -> list[MoE]:
        return super().moe_layers() + [
            module.layer.mlp for module in self.modules if isinstance(module.layer.mlp, MoE)
        ]

    def attentions(self) -> list[MLA]:
        layers = self.layers + [module.layer for module in self.modules]
        return [layer.attention for layer in layers if isinstance(layer.attention, MLA)]

    def finalize(self) -> None:
        super().finalize()
        for module in self.modules:
            module.finalize()

    def derived(self) -> list[Tensor]:
        return [
            weight.data
            for attention in self.attentions()
            for weight in attention.materialized or ()
        ]
