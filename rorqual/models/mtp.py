"""DeepSeek-V3's multi-token prediction module (arXiv 2412.19437, section 2.2): from a hidden state
and the next token's embedding to the hidden state that predicts the token after that. It shares
embedding, head and rope tables with the main model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from rorqual.config.model import ModelConfig
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.layers.linear import Linear, Part
from rorqual.layers.norm import Norm
from rorqual.layers.parameter import Build, Target
from rorqual.models.transformer import HiddenState, Layer, Pass, forward_layers


class MTPModule:
    """`layer`: the module's own decoder layer; its cache plane follows those of the main model."""

    def __init__(self, build: Build, config: ModelConfig, prefix: str, layer: Layer):
        self.ops = build.ops
        self.layer = layer
        self.token_norm = Norm(build, f"{prefix}.enorm", config.hidden_size, config.norm_eps)
        self.hidden_norm = Norm(build, f"{prefix}.hnorm", config.hidden_size, config.norm_eps)
        wide = replace(build, quant=None)  # fp8 checkpoints do not quantize eh_proj
        self.merge = Linear(
            wide, [Part(f"{prefix}.eh_proj", config.hidden_size)], 2 * config.hidden_size
        )
        self.norm = Norm(build, f"{prefix}.shared_head.norm", config.hidden_size, config.norm_eps)

    def forward(self, embedded: Tensor, hidden: Tensor, step: ForwardBatch) -> Pass:
        """embedded [T, hidden]: embeddings of the tokens after the step's positions. hidden [T,
        hidden]: normed output of the model, or of the previous module.

        Returns normed hidden states [T, hidden] for the shared head; writes the module's cache at
        the step's slots."""
        x = self.ops.concat_columns(
            self.token_norm.forward(embedded), self.hidden_norm.forward(hidden)
        )
        state = HiddenState(step.layout.enter(self.merge.forward(x)))
        yield from forward_layers([self.layer], state, step)
        assert state.residual is not None
        return step.layout.leave(self.norm, state.x, state.residual, None)

    def finalize(self) -> None:
        self.merge.finalize()
        self.layer.finalize()

    def targets(self) -> Iterator[Target]:
        for part in (self.token_norm, self.hidden_norm, self.merge, self.layer, self.norm):
            yield from part.targets()
