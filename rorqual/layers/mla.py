"""Multi-head latent attention (arXiv 2405.04434) in five forms that compute the same thing at
different costs.

| form     | cached per token         | how a query meets the cache                                |
| -------- | ------------------------ | ---------------------------------------------------------- |
| CD       | keys and values per head | plain attention                                            |
| CC       | latent + rope key        | every cached latent is decompressed again at each step     |
| A_CC     | latent + rope key        | W_UK moves to the query, W_UV to the output; query parts   |
|          |                          | are concatenated                                           |
| A_CC_ME  | latent + rope key        | the same, rope and latent scores computed apart, nothing   |
|          |                          | concatenated                                               |
| AM_CC_ME | latent + rope key        | the same, with W_UQ W_UK and W_UV W_O multiplied out       |
|          |                          | beforehand: many more weights                              |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.cache.spec import check_forms
from rorqual.config.model import MLAConfig, ModelConfig
from rorqual.layers.forward_batch import CapturablePrompts, ForwardBatch
from rorqual.layers.linear import Linear, Part
from rorqual.layers.norm import Norm
from rorqual.layers.parameter import Build, Target
from rorqual.ops.activation import Activation, hidden_of
from rorqual.ops.interface import (
    AttentionMetadata,
    LatentCache,
    MLAWeights,
    PartialAttention,
    SplitLatent,
    Stretch,
)
from rorqual.ops.reference import Weight, dequantize, in_8_bits, whole_keys
from rorqual.ops.stretch import stretch_tokens
from rorqual.parallel.exchange_policy import gathers_latents

# the published models use this for both latent norms, not rms_norm_eps
LATENT_NORM_EPS = 1e-6
RANDOM_SCALE = 0.04  # int8 cache scale with random weights: normed latents are below about 5


class MLA:
    """forward: this rank's rows of the residual stream, [rows, hidden], to [T, hidden] of the
    step's tokens, a partial sum over tp. Writes the step's cache entries before it attends.

    tp splits the heads; the down projections and the latent cache are replicated. `config` counts
    this rank's heads.
    """

    def __init__(
        self,
        build: Build,
        config: ModelConfig,
        index: int,
        prefix: str,
        prefill: str = "CC",
        decode: str = "A_CC_ME",
    ):
        assert isinstance(config.attention, MLAConfig)
        check_forms(prefill, decode)
        self.shard = build.mesh.tp.shard
        heads = config.attention.num_heads
        mla = replace(config.attention, num_heads=heads // self.shard.count)
        self.config = mla
        self.hidden = config.hidden_size
        self.index = index
        self.ops = build.ops
        self.prefill_form = prefill
        self.decode_form = decode
        self.interleaved = config.rope.interleaved
        self.gathers_latents = gathers_latents(config)
        self.scale = mla.qk_dim**-0.5 * config.rope.softmax_scale
        self._make_query(build, config, prefix)
        self.kv_norm = Norm(build, f"{prefix}.kv_a_layernorm", mla.kv_lora_rank, LATENT_NORM_EPS)
        up = Part(f"{prefix}.kv_b_proj", heads * (mla.nope_dim + mla.v_dim), shard=self.shard)
        self.kv_b = Linear(build, [up], mla.kv_lora_rank)
        out = Part(f"{prefix}.o_proj", config.hidden_size, mla.bias)
        self.out = Linear(
            build, [out], heads * mla.v_dim, gain=build.residual_gain, shard=self.shard
        )
        self.dtype = build.dtype
        self.name = prefix
        # scale of an int8 cache, from the checkpoint
        self.cache_scale: Tensor | None = None
        if build.ops.static_cache_scales:
            self.cache_scale = build.empty(1, dtype=torch.float32).fill_(torch.nan)

    def _make_query(self, build: Build, config: ModelConfig, prefix: str) -> None:
        """One GEMM maps the hidden state to [query or its latent | key-value latent | rope key]."""
        mla = config.attention
        assert isinstance(mla, MLAConfig)
        rows = mla.num_heads * mla.qk_dim
        latent = Part(f"{prefix}.kv_a_proj_with_mqa", mla.latent_dim, mla.bias)
        rank = mla.q_lora_rank
        queries = Part(
            f"{prefix}.{'q_proj' if rank is None else 'q_b_proj'}", rows, shard=self.shard
        )
        first = queries if rank is None else Part(f"{prefix}.q_a_proj", rank, mla.bias)
        self.query_rows = first.local
        self.down = Linear(
            build, [first, latent], config.hidden_size, merged=f"{prefix}.fused_qkv_a_proj_with_mqa"
        )
        self.q_norm = (
            None if rank is None else Norm(build, f"{prefix}.q_a_layernorm", rank, LATENT_NORM_EPS)
        )
        self.q_b = None if rank is None else Linear(build, [queries], rank)

    def targets(self) -> Iterator[Target]:
        for layer in (self.down, self.q_norm, self.q_b, self.kv_norm, self.kv_b, self.out):
            if layer is not None:
                yield from layer.targets()
        if self.cache_scale is not None:
            name = f"{self.name}.k_scale"
            yield Target(name, self.cache_scale, fill=RANDOM_SCALE, is_scale=True, optional=True)

    def finalize(self) -> None:
        """Call once, after loading: derives what the chosen forms need. fp8 kv_b becomes bf16,
        since absorbed products read it head by head."""
        self.kv_b.widen(self.dtype)
        materialized = "AM_CC_ME" in (self.prefill_form, self.decode_form)
        q_norm, q_b = (
            (self.q_norm.weight, self.q_b.weight) if self.q_norm and self.q_b else (None, None)
        )
        self.weights = MLAWeights(
            self.config,
            self.down.weight,
            self.down.bias,
            q_norm,
            q_b,
            self.kv_norm.weight,
            self.kv_b.weight,
            LATENT_NORM_EPS,
            self.interleaved,
            keep_query_input=materialized,
            quantize_output=self.out.weight.activation if self.out.weight.fp8_blocks else None,
            layer=self.index,
        )
        self.materialized: tuple[Weight, Weight, Weight] | None = None
        if materialized:
            self.materialized = self._materialize()
            for weight in self.materialized:
                self.ops.prepare_weight(weight, f"layers.{self.index}.self_attn")
        self.ops.prepare_mla(self.weights, self.hidden)
        self.out.finalize()

    def query_matrix(self) -> Tensor:
        """[H, qk, q_lora or hidden]: the matrix that makes per-head queries."""
        weight = self.q_b.weight if self.q_b is not None else self.down.weight
        rows = self.config.num_heads * self.config.qk_dim
        return dequantize(weight, torch.float32)[:rows].view(
            self.config.num_heads, self.config.qk_dim, -1
        )

    def _materialize(self) -> tuple[Weight, Weight, Weight]:
        """(W_UK^T W_UQ [H C, q_in], the rope rows of W_UQ [H rope, q_in], W_O W_UV [hidden, H
        C])."""
        mla = self.config
        matrix = self.query_matrix()
        absorbed = torch.einsum(
            "hnc,hnq->hcq", self.weights.w_uk.float(), matrix[:, : mla.nope_dim]
        ).flatten(0, 1)
        rope = matrix[:, mla.nope_dim :].flatten(0, 1)
        out = dequantize(self.out.weight, torch.float32).view(-1, mla.num_heads, mla.v_dim)
        merged = torch.einsum("ohv,hcv->ohc", out, self.weights.w_uv.float()).flatten(1)
        first, second, third = (
            Weight(w.to(self.dtype).contiguous()) for w in (absorbed, rope, merged)
        )
        return first, second, third

    def form_weights(self, form: str) -> list[Tensor]:
        """The matrices that the form reads at each step."""
        first = (
            [self.down.weight.data]
            if self.q_b is not None
            else [self.down.weight.data[self.query_rows :]]
        )
        if form == "AM_CC_ME":
            assert self.materialized is not None
            return first + [weight.data for weight in self.materialized]
        query = (
            self.q_b.weight.data
            if self.q_b is not None
            else self.down.weight.data[: self.query_rows]
        )
        return [*first, query, self.kv_b.weight.data, self.out.weight.data]

    def forward(self, x: Activation, step: ForwardBatch) -> Tensor:
        if step.idle:
            return hidden_of(x)
        planes = step.pool.layers[self.index]
        plane = self._latents(planes)
        if self._decodes_alone(step):
            assert plane is not None
            assert step.decode is not None
            x = step.layout.gather(x)
            return self.out.forward(
                self.ops.mla_decode(x, self.weights, step.places, plane, step.decode, self.scale)
            )
        query_in, q, entries = self._prologue(x, step, plane)
        if entries is not None:
            nope, rope, v = self.decompress(entries)
            k = whole_keys(nope, rope)
            self.ops.write_cache(planes["k"], step.places.slots, k)
            self.ops.write_cache(planes["v"], step.places.slots, v)
        mixed = step.decode is not None and step.prefill is not None
        if self.materialized is None and (mixed or step.recorder is not None):
            # the last product does not depend on the segments: one for all, and part of a piece
            shape = (step.num_tokens, q.shape[1] * self.config.v_dim)
            return self.out.forward(step.between(self._heads_of_segments, (q,), shape))
        inputs = (q, query_in) if self.materialized is not None else (q,)
        shape = (step.num_tokens, self.down.columns)
        return step.between(self._attend_segments, inputs, shape)

    def capturable_prompts(self, pool: KVPool) -> CapturablePrompts | None:
        """How attention to prompts can be captured, if at all: decompressed, in one stretch."""
        mla = self.config
        if self.prefill_form != "CC" or self.materialized is not None:
            return None
        if not self.ops.captures_prompts(max(mla.qk_dim, mla.v_dim)):
            return None
        page = pool.spec.page_size
        device = self.kv_b.weight.data.device.type
        return CapturablePrompts(stretch_tokens(mla, self.dtype.itemsize, device, page))

    def _latents(self, planes: dict[str, Tensor]) -> LatentCache | None:
        """The latent cache; None in the form CD, which caches keys and values."""
        latent = planes.get("latent")
        if latent is None or "rope" not in planes:
            return latent
        scale = self.cache_scale if in_8_bits(latent) else None
        return SplitLatent(latent, planes["rope"], scale)

    def _decodes_alone(self, step: ForwardBatch) -> bool:
        """Whether prologue and attention can be one op: all tokens decode, in the absorbed form,
        and no latents are gathered."""
        layout = step.layout
        return (
            self.decode_form == "A_CC_ME"
            and step.decode is not None
            and step.prefill is None
            and not (layout.sharded and self.gathers_latents)
        )

    def _attend_segments(
        self, step: ForwardBatch, q: Tensor, query_in: Tensor | None = None
    ) -> Tensor:
        # the common case: nothing to slice or concatenate
        if step.prefill is None and step.decode is not None:
            return self.attend(self.decode_form, query_in, q, step, step.decode, slice(None))
        outs = []
        for segment, part in step.segments:
            form = self.decode_form if segment is step.decode else self.prefill_form
            own = None if query_in is None else query_in[part]
            outs.append(self.attend(form, own, q[part], step, segment, part))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _heads_of_segments(self, step: ForwardBatch, q: Tensor) -> Tensor:
        """[T, H v], for forms that are not materialized."""
        outs = []
        for segment, part in step.segments:
            form = self.decode_form if segment is step.decode else self.prefill_form
            outs.append(hidden_of(self._heads(form, q[part], step, segment)))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _prologue(
        self, x: Activation, step: ForwardBatch, plane: LatentCache | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As ops.mla_prologue. If tokens are sharded, each rank projects its own tokens to latents,
        which are then gathered."""
        w = self.weights
        layout = step.layout
        places = step.places
        if not (layout.sharded and self.gathers_latents):
            return self.ops.mla_prologue(layout.gather(x), w, places, plane)
        own = self.ops.mla_down(x, w, layout.enter(places.cos), layout.enter(places.sin))
        gathered = hidden_of(layout.gather(torch.cat(own, -1)))
        query, entries = gathered.split([part.shape[1] for part in own], -1)
        return query, *self.ops.mla_up(query, entries, w, places, plane)

    def decompress(self, entries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cache entries [N, C + rope] to keys [N, H, nope], rope keys [N, rope] shared by all
        heads, and values [N, H, v]."""
        mla = self.config
        latent, k_rope = entries.split((mla.kv_lora_rank, mla.rope_dim), -1)
        up = self.kv_b.forward(latent.contiguous()).view(
            -1, mla.num_heads, mla.nope_dim + mla.v_dim
        )
        k_nope, v = up.split((mla.nope_dim, mla.v_dim), -1)
        return k_nope, k_rope, v

    def attend(
        self,
        form: str,
        query_in: Tensor | None,
        q: Tensor,
        step: ForwardBatch,
        segment: AttentionMetadata,
        part: slice,
    ) -> Tensor:
        """`query_in`: the input of the query projection, for the materialized form."""
        if form == "AM_CC_ME":
            assert query_in is not None
            plane = self._latents(step.read(self.index))
            assert plane is not None
            return self._attend_materialized(query_in, plane, step, segment, part)
        return self.out.forward(self._heads(form, q, step, segment))

    def _heads(
        self, form: str, q: Tensor, step: ForwardBatch, segment: AttentionMetadata
    ) -> Activation:
        """Concatenated heads [T, H v]: the input of the last product."""
        planes = step.read(self.index)
        if form == "CD":
            heads = self.ops.attention(q, planes["k"], planes["v"], segment, self.scale)
            return heads.flatten(1)
        plane = self._latents(planes)
        assert plane is not None
        if form == "CC":
            return self._attend_decompressed(q, plane, segment, step.attention_out).flatten(1)
        # an 8-bit cache has no concatenated latent and rope key
        if form == "A_CC" and isinstance(plane, Tensor) and not in_8_bits(plane):
            return self._attend_joined(q, plane, segment)
        return self.ops.mla_absorbed(q, self.weights, plane, segment, self.scale)

    def _attend_decompressed(
        self,
        q: Tensor,
        plane: LatentCache,
        segment: AttentionMetadata,
        out: Tensor | None = None,
    ) -> Tensor:
        """Decompresses at most as many cached tokens at once as ops/stretch.py allows: keys and
        values of all heads are many times larger than their latents. The step's own tokens are
        read from the cache too, so the bound holds for a step of any size."""
        page = (plane if isinstance(plane, Tensor) else plane.latent).shape[1]
        tokens = stretch_tokens(self.config, q.element_size(), q.device.type, page)
        shares = self.ops.shares(segment, tokens, page)
        if len(shares) > 1:
            out = None
        outs = [
            self._attend_share(q[share.queries], plane, share.segments, out) for share in shares
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_share(
        self,
        q: Tensor,
        plane: LatentCache,
        segments: list[AttentionMetadata],
        out: Tensor | None,
    ) -> Tensor:
        if len(segments) == 1:
            nope, rope, v = self._decompressed(plane, segments[0], q.dtype)
            return self.ops.decompressed_attention(
                q, (nope, rope), v, segments[0], self.scale, out=out
            )
        # fp32: rounding after each stretch would let errors grow with the number of stretches
        found = PartialAttention.over_no_keys(q, self.config.v_dim)
        for stretch in segments:
            assert isinstance(stretch, Stretch)
            nope, rope, v = self._decompressed(plane, stretch, q.dtype)
            self.ops.decompressed_attention(q, (nope, rope), v, stretch, self.scale, found)
            del nope, rope, v  # free them before the next stretch is decompressed
        return found.out.to(q.dtype)

    def _decompressed(
        self,
        plane: LatentCache,
        segment: AttentionMetadata,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rank = self.config.kv_lora_rank
        return self.decompress(self.ops.latent_entries(plane, segment, rank, dtype))

    def _attend_joined(self, q: Tensor, plane: Tensor, segment: AttentionMetadata) -> Activation:
        nope = self.config.nope_dim
        rank = self.config.kv_lora_rank
        joined = torch.cat(
            (self.ops.heads_matmul(q[..., :nope], self.weights.w_uk), q[..., nope:]), -1
        )
        key = plane[:, :, None]
        latent = self.ops.attention(joined, key, key[..., :rank], segment, self.scale)
        return self.ops.joined_heads(latent, self.weights)

    def _attend_materialized(
        self,
        query_in: Tensor,
        plane: LatentCache,
        step: ForwardBatch,
        segment: AttentionMetadata,
        part: slice,
    ) -> Tensor:
        assert self.materialized is not None
        mla = self.config
        (absorbed, rope_rows, merged) = self.materialized
        q_latent = self.ops.linear(query_in, absorbed).view(-1, mla.num_heads, mla.kv_lora_rank)
        q_rope = self.ops.linear(query_in, rope_rows).view(-1, mla.num_heads, mla.rope_dim)
        q_rope = self.ops.rope(
            q_rope, step.places.cos[part], step.places.sin[part], self.interleaved
        )
        latent = self.ops.latent_attention(q_latent, q_rope, plane, segment, self.scale)
        return self.ops.linear(latent.flatten(1), merged, self.out.bias)
