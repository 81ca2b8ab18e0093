"""The chain every supported model shares: embedding, layers of attention and feed-forward, norm, head."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from rorqual.config import ModelConfig
from rorqual.layers.linear import Linear, Part
from rorqual.layers.moe import DenseMLP, MoE
from rorqual.layers.norm import Norm
from rorqual.layers.parameter import Build, Target
from rorqual.layers.rotary import Rotary
from rorqual.layers.step import Step

Pass = Generator[None, None, Tensor]


class Attention(Protocol):
    def forward(self, x: Tensor, step: Step) -> Tensor: ...

    def targets(self) -> Iterator[Target]: ...


class Predictor(Protocol):
    """A module that looks one token further than the model, or module, before it (models/mtp.py)."""

    def forward(self, embedded: Tensor, hidden: Tensor, step: Step) -> Pass: ...


class Layer:
    """norm, attention, norm, feed-forward, on a residual stream that the norms carry along."""

    def __init__(self, build: Build, prefix: str, config: ModelConfig, attention: Attention, mlp: DenseMLP | MoE):
        self.attention, self.mlp = attention, mlp
        self.input_norm = Norm(build, f"{prefix}.input_layernorm", config.hidden_size, config.norm_eps)
        self.post_norm = Norm(build, f"{prefix}.post_attention_layernorm", config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, residual: Tensor | None, step: Step) -> Generator[None, None, tuple[Tensor, Tensor]]:
        h, residual = self.input_norm.add(x, residual)
        h = self.attention.forward(h, step)
        h, residual = self.post_norm.add(h, residual)
        h = yield from self.mlp.stages(h)
        return h, residual

    def targets(self) -> Iterator[Target]:
        for part in (self.input_norm, self.attention, self.post_norm, self.mlp):
            yield from part.targets()


class Transformer:
    """Subclasses say which attention and which feed-forward a layer has."""

    def __init__(self, config: ModelConfig, build: Build, max_len: int):
        self.config, self.ops, self.dtype = config, build.ops, build.dtype
        self.embedding = build.empty(config.vocab_size, config.hidden_size)
        self.layers = [self.make_layer(build, i, f"model.layers.{i}") for i in range(config.num_layers)]
        self.norm = Norm(build, "model.norm", config.hidden_size, config.norm_eps)
        # fp8 checkpoints keep embedding and head in their wide format.
        head = replace(build, quant=None)
        self.head = None if config.tie_embeddings else Linear(head, [Part("lm_head", config.vocab_size)], config.hidden_size)
        self.rotary = Rotary(config.rope, max_len, build.device)
        self.mtp: Sequence[Predictor] = ()

    def make_layer(self, build: Build, index: int, prefix: str) -> Layer:
        raise AssertionError("subclasses make their layers")

    def make_mlp(self, build: Build, index: int, prefix: str) -> DenseMLP | MoE:
        config = self.config
        if index >= config.num_layers or config.moe_layers[index]:  # prediction modules stand behind the layers and are sparse
            return MoE(build, f"{prefix}.mlp", config.hidden_size, config.moe)
        return DenseMLP(build, f"{prefix}.mlp", config.hidden_size, config.dense_intermediate)

    def forward(self, step: Step, every_row: bool = False) -> Pass:
        """Normed hidden states of the step's `logit_rows`, [N, hidden], or of all its tokens, [T, hidden]. Yields at every hand-over
        of an MoE layer."""
        x: Tensor = self.ops.embed(step.token_ids, self.embedding)
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = yield from layer.forward(x, residual, step)
        assert residual is not None
        if every_row:
            return self.norm.add(x, residual)[0]
        rows = step.logit_rows
        return self.norm.add(x.index_select(0, rows), residual.index_select(0, rows))[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] to fp32 [N, vocabulary]."""
        if self.head is not None:
            return self.head.forward(hidden).float()
        return torch.nn.functional.linear(hidden, self.embedding).float()

    def targets(self) -> Iterator[Target]:
        yield Target("model.embed_tokens.weight", self.embedding, std=1.0)
        for layer in self.layers:
            yield from layer.targets()
        yield from self.norm.targets()
        if self.head is not None:
            yield from self.head.targets()

    def skips(self, name: str) -> bool:
        """True for a checkpoint tensor that is left out by design."""
        return name.endswith("rotary_emb.inv_freq") or (self.head is None and name == "lm_head.weight")

    def finalize(self) -> None:
        """Called once after loading."""

    def derived(self) -> list[Tensor]:
        """Tensors made from weights by `finalize` and kept beside them."""
        return []

    def moe_layers(self) -> list[MoE]:
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoE)]
