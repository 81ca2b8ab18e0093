"""Grouped-query attention with per-head norms on queries and keys (Qwen3)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.config.model import GQAConfig, ModelConfig
from rorqual.layers.forward_batch import CapturablePrompts, ForwardBatch
from rorqual.layers.linear import Linear, Part
from rorqual.layers.norm import Norm
from rorqual.layers.parameter import Build, Target
from rorqual.ops.activation import Activation, hidden_of
from rorqual.ops.interface import GQAWeights
from rorqual.parallel.shard import Shard


def kv_shard(tp: Shard, groups: int) -> Shard:
    """The key-value heads of a rank: a share of them, or one head that several ranks replicate if
    tp exceeds `groups`."""
    return tp if groups >= tp.count else Shard(tp.index * groups // tp.count, groups)


class GQA:
    """forward: this rank's rows of the residual stream, [rows, hidden], to [T, hidden] of the
    step's tokens, a partial sum over tp. Writes the step's keys and values to the cache before it
    attends."""

    def __init__(self, build: Build, config: ModelConfig, index: int, prefix: str):
        assert isinstance(config.attention, GQAConfig)
        self.config = config.attention
        self.index = index
        self.ops = build.ops
        heads = self.config.num_heads
        groups = self.config.num_kv_heads
        dim = self.config.head_dim
        shard = build.mesh.tp.shard
        shared = kv_shard(shard, groups)
        names = (("q_proj", heads, shard), ("k_proj", groups, shared), ("v_proj", groups, shared))
        parts = [
            Part(f"{prefix}.{name}", count * dim, self.config.bias, held)
            for name, count, held in names
        ]
        self.qkv = Linear(build, parts, config.hidden_size, merged=f"{prefix}.qkv_proj")
        out = Part(f"{prefix}.o_proj", config.hidden_size, self.config.bias)
        self.out = Linear(build, [out], heads * dim, gain=build.residual_gain, shard=shard)
        self.q_norm = Norm(build, f"{prefix}.q_norm", dim, config.norm_eps)
        self.k_norm = Norm(build, f"{prefix}.k_norm", dim, config.norm_eps)
        self.weights = GQAWeights(self.q_norm.weight, self.k_norm.weight, config.norm_eps)
        self.scale = dim**-0.5
        self.dtype = build.dtype

    def forward(self, x: Activation, step: ForwardBatch) -> Tensor:
        if step.idle:
            return hidden_of(x)
        planes = step.pool.layers[self.index]
        qkv = self.qkv.forward(step.layout.gather(x)).view(
            step.num_tokens, -1, self.config.head_dim
        )
        q = self.ops.gqa_prologue(qkv, self.weights, step.places, tuple(planes.values()))
        out = step.between(self._attend, (q,), tuple(q.shape))
        return self.out.forward(out.flatten(1))

    def _attend(self, step: ForwardBatch, q: Tensor) -> Tensor:
        planes = step.read(self.index)
        cache = (planes["k"], planes["v"])
        rest = (planes.get("scales"), step.attention_out)
        outs = [
            self.ops.attention(q[part], *cache, segment, self.scale, *rest)
            for segment, part in step.segments
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def capturable_prompts(self, pool: KVPool) -> CapturablePrompts | None:
        """How attention to prompts can be captured, if at all."""
        planes = pool.layers[self.index]
        if "scales" not in planes and planes["k"].dtype != self.dtype:
            return None
        return CapturablePrompts() if self.ops.captures_prompts(self.config.head_dim) else None

    def finalize(self) -> None:
        for layer in (self.qkv, self.out):
            layer.finalize()

    def targets(self) -> Iterator[Target]:
        for layer in (self.qkv, self.out, self.q_norm, self.k_norm):
            yield from layer.targets()
