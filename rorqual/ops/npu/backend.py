"""The op table of Ascend NPUs: each entry is the largest piece that one of torch_npu's operators,
or a short chain of them, computes. docs/design/ascend.md lists them, and what is fused.

Activations are bf16 or fp16, or quantized per token to int8 for int8 weights. Rope keys and the
rope parts of queries are stored in halves (all even columns, then all odd ones), as the operators
write them; their products are the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rorqual.config.model import MoEConfig
from rorqual.ops import reference, rng
from rorqual.ops.activation import Activation, hidden_of
from rorqual.ops.interface import (
    AttentionMetadata,
    GQAWeights,
    LatentCache,
    MLAWeights,
    Ops,
    PartialAttention,
    SplitLatent,
    TokenPlaces,
)
from rorqual.ops.npu import limits
from rorqual.ops.npu.dispatch import DispatchCombine
from rorqual.ops.npu.layouts import PrologueWeights, turn
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.reference import ExpertWeights, RouterWeights, Weight

npu = torch.ops.npu
MASK = 2048  # rows and columns of the mask that all causal calls use
CAUSAL = 3  # sparse_mode: query i of Q sees keys up to L - Q + i
EVERYTHING = 0
LEFT_IS_GATE = True
COUNTS = 1  # group_list_type, expert_tokens_num_type: rows of each expert
ROWS = 0  # group_type: rows are grouped by expert
ONE_OUTPUT = 3  # split_item
DROPLESS = 2  # drop_pad_mode: row of token t's k-th expert at t * K + k
NO_QUANT = -1
TOKEN_QUANT = 1
PROLOGUE_INT8 = 2  # weight_quant_mode: the three matrices in int8
CACHE_INT8 = 1  # kv_cache_quant_mode: one scale a layer
QUERY_INT8 = 1  # query_quant_mode of the prologue: one scale per token and head
QUERY_TOKEN_HEAD = 3  # the same mode in attention's numbering
SIGMOID = 1  # norm_type
TOP_TWO = 1  # group_select_mode: a group's score is the sum of its two best
SIDE_PRIORITY = 3
TILE = "PA_BSND"  # cache_mode: pages of tokens


@dataclass
class SegmentLists:
    """A segment's arguments for attention calls: tables [R, pages] int32; on the host, cumulative
    query counts and cached entries of each request."""

    tables: Tensor
    queries: list[int]
    lens: list[int]

    @property
    def single(self) -> bool:
        """One query per request, which sees all its keys."""
        return self.queries[-1] == len(self.queries)


@dataclass
class SegmentTensors:
    """The same on the device, int64 [R], for compiled steps, whose graph reads nothing from the
    host. single: one query a request."""

    tables: Tensor
    queries: Tensor
    lens: Tensor
    single: bool


def lists_of(segment: AttentionMetadata) -> SegmentLists | SegmentTensors:
    """Computed once per step. If the host knows only bounds, it reads the lengths from the
    device."""
    if segment.scratch is None:
        lens = list(segment.max_kv_lens) if segment.exact else segment.kv_lens.tolist()
        queries = list(accumulate(segment.query_lens))
        segment.scratch = SegmentLists(segment.tables.to(torch.int32), queries, lens)
    found: SegmentLists | SegmentTensors = segment.scratch
    return found


def host_lists(segment: AttentionMetadata) -> SegmentLists:
    """For a step that is not compiled."""
    found = lists_of(segment)
    assert isinstance(found, SegmentLists)
    return found


def angles(places: TokenPlaces, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, rope] of both halves, in the activations' type. Made once a step."""
    if places.scratch is None:
        places.scratch = tuple(
            torch.cat((angle, angle), -1).to(dtype) for angle in (places.cos, places.sin)
        )
    cos, sin = places.scratch
    return cos, sin


def quantized_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, columns] to int8 and one scale per token [T] fp32."""
    rows, scale = npu.npu_dynamic_quant(x)
    return rows, scale


class NpuOps(Ops):
    name = "npu"
    splits_latents = True
    static_cache_scales = True

    def __init__(self) -> None:
        # in compiled steps: all decoder layers in one SuperKernel; shared experts on a second
        # stream
        self.superkernel = False
        self.multi_streams = False
        self.scopes: Any = None  # torchair's module, if either is on: tracing cannot import
        self.masks: dict[torch.device, Tensor] = {}
        self.fused_dispatch = DispatchCombine(self.grouped_mlp)

    @property
    def dispatch_combine(self) -> DispatchCombine:
        return self.fused_dispatch

    def mask(self, device: torch.device) -> Tensor:
        """True above the diagonal: keys that a query must not see."""
        if device not in self.masks:
            self.masks[device] = torch.ones(MASK, MASK, dtype=torch.bool, device=device).triu(1)
        return self.masks[device]

    def decoder_scope(self) -> AbstractContextManager[Any]:
        """Context around all layers of a compiled step."""
        if not self.superkernel:
            return nullcontext()
        return self.scopes.super_kernel("decoder_layers", "stream-fusion=1")

    def side_stream(self) -> AbstractContextManager[Any]:
        if not (self.multi_streams and torch.compiler.is_compiling()):
            return nullcontext()
        return self.scopes.npu_stream_switch("shared_experts", SIDE_PRIORITY)

    # ---- weights

    def prepare_weight(self, weight: Weight, name: str) -> None:
        limits.check_weight(weight, name)
        if not weight.data.is_meta:
            turn(weight)

    def prepare_mla(self, w: MLAWeights, hidden: int) -> None:
        limits.check_weight(w.down, f"layers.{w.layer}.self_attn.q_a_proj")
        if w.q_b is not None:
            limits.check_weight(w.q_b, f"layers.{w.layer}.self_attn.q_b_proj")
        if w.down.data.is_meta:
            return
        w.scratch = PrologueWeights(w, hidden)
        # free the matrix that was split into parts
        w.down.data = w.down.data.new_empty(0)
        if w.q_b is not None:
            w.q_b.data = w.q_b.data.new_empty(0)

    # ---- rows

    # A rank of several may have no rows in a step; operators are not called with empty tensors.

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not x.shape[0]:
            return x
        return npu.npu_rms_norm(x.contiguous(), weight, eps)[0]

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        quantize_output: str | None = None,
    ) -> tuple[Activation, Tensor]:
        if residual is None or not x.shape[0]:
            return self.norm(x, weight, eps), x
        normed, _, total = npu.npu_add_rms_norm(x, residual, weight, eps)
        return normed, total

    def linear(self, x: Activation, weight: Weight, bias: Tensor | None = None) -> Tensor:
        x = hidden_of(x)
        if not weight.turned:
            return reference.linear(x, weight, bias)
        if weight.scale is None:
            y = torch.matmul(x, weight.data)
            return y if bias is None else y + bias
        if not x.shape[0]:
            return x.new_empty(0, _outputs(weight))
        if weight.data.dtype == torch.int8:
            return self.int8_product(*quantized_rows(x), weight, x.dtype, bias)
        assert weight.scale is not None
        groups = weight.scale.shape[0]
        group = weight.data.shape[0] // groups if groups > 1 else 0
        return npu.npu_weight_quant_batchmatmul(
            x,
            weight.data,
            weight.scale if group else weight.scale[0],
            bias=bias,
            antiquant_group_size=group,
        )

    def int8_product(
        self, rows: Tensor, scale: Tensor, weight: Weight, dtype: torch.dtype, bias: Tensor | None
    ) -> Tensor:
        """int8 rows with one scale per token, times int8 weights, in `dtype`."""
        return npu.npu_quant_matmul(
            rows,
            weight.data,
            weight.scale,
            pertoken_scale=scale,
            bias=None if bias is None else bias.float(),
            output_dtype=dtype,
        )

    def swiglu(self, x: Tensor) -> Tensor:
        if not x.shape[0]:
            return x[:, : x.shape[1] // 2]
        return npu.npu_swiglu(x)

    def mlp(self, x: Activation, gate_up: Weight, down: Weight) -> Tensor:
        x = hidden_of(x)
        if not x.shape[0]:
            return x.new_empty(0, _outputs(down))
        if gate_up.data.dtype != torch.int8:
            return super().mlp(x, gate_up, down)
        rows, scale = quantized_rows(x)
        sums = npu.npu_quant_matmul(rows, gate_up.data, gate_up.scale, output_dtype=torch.int32)
        inner, inner_scale = npu.npu_dequant_swiglu_quant(
            sums,
            weight_scale=_row(gate_up),
            activation_scale=scale,
            activate_left=LEFT_IS_GATE,
            quant_mode=TOKEN_QUANT,
        )
        return self.int8_product(inner, inner_scale, down, x.dtype, None)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        wide = [torch.cat((angle, angle), -1).to(x.dtype)[:, None] for angle in (cos, sin)]
        return self._rotated(x, wide[0], wide[1], interleaved)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """Rotate x [T, H, D] by cos and sin [T, 1, D]; interleaved pairs are returned as halves."""
        if not x.shape[0]:
            return x
        if interleaved:
            # heads as the operator's batch: [T, H, 1, D] with angles [T, 1, 1, D]
            y = npu.npu_interleave_rope(
                x.contiguous()[:, :, None], cos[:, :, None], sin[:, :, None]
            )
            return y[:, :, 0]
        y = npu.npu_rotary_mul(x.contiguous()[None], cos[None], sin[None], "half")
        return y[0]

    def write_cache(self, plane: Tensor, slots: Tensor, values: Tensor) -> None:
        npu.npu_scatter_nd_update_(
            plane.flatten(0, 1), slots[:, None], values.to(plane.dtype).contiguous()
        )

    def heads_matmul(self, x: Tensor, matrices: Tensor) -> Tensor:
        return npu.npu_transpose_batchmatmul(
            x.contiguous(),
            matrices,
            perm_x1=(1, 0, 2),
            perm_x2=(0, 1, 2),
            perm_y=(1, 0, 2),
        )

    # ---- latent attention

    def _down(self, x: Tensor, w: MLAWeights) -> tuple[Tensor, Tensor]:
        """(unnormed query latent, or queries; key-value latent | rope key)"""
        own: PrologueWeights = w.scratch
        bias = own.bias or (None, None)
        if own.first.data.dtype != torch.int8:
            return self.linear(x, own.first, bias[0]), self.linear(x, own.latent, bias[1])
        rows, scale = quantized_rows(x)
        first = self.int8_product(rows, scale, own.first, x.dtype, bias[0])
        return first, self.int8_product(rows, scale, own.latent, x.dtype, bias[1])

    def mla_down(
        self, x: Activation, w: MLAWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        mla = w.config
        query, entries = self._down(hidden_of(x), w)
        if w.q_norm is not None:
            query = self.norm(query, w.q_norm, w.eps)
        latent, key = entries.split((mla.kv_lora_rank, mla.rope_dim), -1)
        key = self.rope(key[:, None], cos, sin, w.interleaved)[:, 0]
        return query, torch.cat((self.norm(latent, w.kv_norm, w.eps), key), -1)

    def mla_up(
        self,
        query: Tensor,
        entries: Tensor,
        w: MLAWeights,
        places: TokenPlaces,
        plane: LatentCache | None,
    ) -> tuple[Tensor, Tensor | None]:
        q = self._queries(query, w, places)
        if plane is None:
            return q, entries
        latent, key = entries.split((w.config.kv_lora_rank, w.config.rope_dim), -1)
        self.write_cache(plane.latent, places.slots, plane.packed(latent))
        self.write_cache(plane.rope, places.slots, key)
        return q, None

    def _queries(self, query: Tensor, w: MLAWeights, places: TokenPlaces) -> Tensor:
        """[T, H, nope + rope], rotated."""
        mla = w.config
        own: PrologueWeights = w.scratch
        if own.up is not None:
            query = self.linear(query.contiguous(), own.up)
        nope, turned = query.unflatten(-1, (mla.num_heads, mla.qk_dim)).split(
            (mla.nope_dim, mla.rope_dim), -1
        )
        cos, sin = angles(places, query.dtype)
        rope = self._rotated(turned, cos[:, None], sin[:, None], w.interleaved)
        return torch.cat((nope, rope), -1)

    def mla_prologue(
        self,
        x: Activation,
        w: MLAWeights,
        places: TokenPlaces,
        plane: LatentCache | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Norm, rotation and cache write of the latent are one operator if pairs are
        interleaved."""
        rows = hidden_of(x)
        if plane is None or not w.interleaved:
            return super().mla_prologue(x, w, places, plane)
        assert isinstance(plane, SplitLatent)
        query, entries = self._down(rows, w)
        if w.q_norm is not None:
            query = self.norm(query, w.q_norm, w.eps)
        cos, sin = angles(places, rows.dtype)
        scale = {} if plane.scale is None else {"c_kv_scale": _every_column(plane)}
        npu.npu_kv_rmsnorm_rope_cache_v2(
            entries[:, None, None],
            w.kv_norm,
            cos[:, None, None],
            sin[:, None, None],
            places.slots,
            plane.rope[:, :, None],
            plane.latent[:, :, None],
            epsilon=w.eps,
            cache_mode="PA",
            **scale,
        )
        return (rows if w.q_b is None else query), self._queries(query, w, places), None

    def mla_decode(
        self,
        x: Activation,
        w: MLAWeights,
        places: TokenPlaces,
        plane: LatentCache,
        segment: AttentionMetadata,
        scale: float,
    ) -> Activation:
        """Prologue, cache write and absorption in one operator, if it supports the model's widths;
        attention in the next."""
        assert isinstance(plane, SplitLatent)
        own: PrologueWeights = w.scratch
        rows = hidden_of(x)
        fused = w.interleaved and limits.fuses_prologue(w.config, own.hidden, w.config.num_heads)
        if not fused:
            return super().mla_decode(x, w, places, plane, segment, scale)
        q_latent, q_rope, q_scale = self._fused_prologue(rows, w, places, plane)
        latent = self._absorbed(q_latent, q_rope, plane, segment, scale, q_scale)
        return self.joined_heads(latent, w)

    def _fused_prologue(
        self, x: Tensor, w: MLAWeights, places: TokenPlaces, plane: SplitLatent
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(absorbed queries [T, H, C], int8 if the cache is; rope parts [T, H, rope]; scales [T, H]
        or None). Also writes the cache."""
        own: PrologueWeights = w.scratch
        assert own.up is not None
        assert w.q_norm is not None
        cos, sin = angles(places, x.dtype)
        modes: dict[str, object] = {}
        if own.up.data.dtype == torch.int8:
            x, x_scale = quantized_rows(x)
            modes.update(
                dequant_scale_x=x_scale[:, None],
                dequant_scale_w_dq=_row(own.first),
                dequant_scale_w_uq_qr=_row(own.up),
                dequant_scale_w_dkv_kr=_row(own.latent),
                weight_quant_mode=PROLOGUE_INT8,
            )
        if plane.scale is not None:
            modes.update(
                quant_scale_ckv=plane.quant_scale,
                kv_cache_quant_mode=CACHE_INT8,
                query_quant_mode=QUERY_INT8,
            )
        q_latent, q_rope, q_scale, _, _ = npu.npu_mla_prolog_v3(
            x,
            own.first.data,
            own.up.data,
            own.uk,
            own.latent.data,
            w.q_norm,
            w.kv_norm,
            sin,
            cos,
            plane.latent[:, :, None],
            plane.rope[:, :, None],
            cache_index=places.slots,
            rmsnorm_epsilon_cq=w.eps,
            rmsnorm_epsilon_ckv=w.eps,
            cache_mode=TILE,
            **modes,
        )
        return q_latent, q_rope, q_scale if plane.scale is not None else None

    def mla_absorbed(
        self,
        q: Tensor,
        w: MLAWeights,
        plane: LatentCache,
        segment: AttentionMetadata,
        scale: float,
    ) -> Activation:
        assert isinstance(plane, SplitLatent)
        own: PrologueWeights = w.scratch
        nope = w.config.nope_dim
        q_latent = self.heads_matmul(q[..., :nope], own.uk)
        q_scale = None
        if plane.scale is not None:
            q_latent, q_scale = npu.npu_dynamic_quant(q_latent)
        latent = self._absorbed(
            q_latent, q[..., nope:].contiguous(), plane, segment, scale, q_scale
        )
        return self.joined_heads(latent, w)

    def joined_heads(self, latent: Tensor, w: MLAWeights) -> Activation:
        """`latent` [H, T, C], as attention returns it."""
        own: PrologueWeights = w.scratch
        return npu.npu_transpose_batchmatmul(
            latent, own.uv, perm_x1=(0, 1, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2)
        ).flatten(1)

    def latent_attention(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        plane: LatentCache,
        segment: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        assert isinstance(plane, SplitLatent)
        q_scale = None
        if plane.scale is not None:
            q_latent, q_scale = npu.npu_dynamic_quant(q_latent)
        out = self._absorbed(q_latent, q_rope, plane, segment, scale, q_scale)
        return out.transpose(0, 1)

    def _absorbed(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        plane: SplitLatent,
        segment: AttentionMetadata,
        scale: float,
        q_scale: Tensor | None,
    ) -> Tensor:
        """Attention over latents: [H, T, C]. q_scale [T, H]: of int8 queries."""
        found = lists_of(segment)
        heads = q_latent.shape[1]
        modes: dict[str, object] = {}
        if plane.scale is not None:
            assert q_scale is not None
            modes.update(
                dequant_scale_query=q_scale.view(-1, heads),
                dequant_scale_key=plane.scale,
                dequant_scale_value=plane.scale,
                query_quant_mode=QUERY_TOKEN_HEAD,
            )
        latent = plane.latent[:, None]
        return self.fused_attention(
            q_latent,
            latent,
            latent,
            found,
            query_rope=q_rope,
            key_rope=plane.rope[:, None],
            num_query_heads=heads,
            num_key_value_heads=1,
            softmax_scale=scale,
            input_layout="TND_NTD",
            block_size=plane.latent.shape[1],
            **modes,
        )

    def fused_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        found: SegmentLists | SegmentTensors,
        **options: object,
    ) -> Tensor:
        """Paged attention of a segment's queries, causal if a request has several. With lengths as
        tensors it is torchair's variant, which only works in its graphs."""
        causal = not found.single
        attention = (
            npu.npu_fused_infer_attention_score_v2
            if isinstance(found, SegmentLists)
            else torch.ops.air.npu_fused_infer_attention_score_v2
        )
        return attention(
            q,
            k,
            v,
            atten_mask=self.mask(q.device) if causal else None,
            actual_seq_qlen=found.queries,
            actual_seq_kvlen=found.lens,
            block_table=found.tables,
            sparse_mode=CAUSAL if causal else EVERYTHING,
            **options,
        )[0]

    def decompressed_attention(
        self,
        q: Tensor,
        keys: tuple[Tensor, Tensor],
        v: Tensor,
        segment: AttentionMetadata,
        scale: float,
        found: PartialAttention | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The operator takes the rope part separately: nothing is concatenated. A context in
        stretches is computed with torch, which merges them in fp32."""
        if found is not None:
            return super().decompressed_attention(q, keys, v, segment, scale, found)
        nope, rope = keys
        width = nope.shape[2]
        heads = q.shape[1]
        lists = host_lists(segment)
        return npu.npu_fused_infer_attention_score(
            q[..., :width].contiguous(),
            nope.contiguous(),
            v.contiguous(),
            query_rope=q[..., width:].contiguous(),
            key_rope=rope[:, None].expand(-1, heads, -1).contiguous(),
            atten_mask=self.mask(q.device),
            actual_seq_lengths=lists.queries,
            actual_seq_lengths_kv=list(accumulate(lists.lens)),
            num_heads=heads,
            num_key_value_heads=heads,
            scale=scale,
            input_layout="TND",
            sparse_mode=CAUSAL,
        )[0]

    def gather(self, plane: Tensor, segment: AttentionMetadata) -> Tensor:
        """Gathers pages, then the entries in use; the host knows both."""
        lens = host_lists(segment).lens
        page = plane.shape[1]
        parts = [
            plane.index_select(0, table[: -(-length // page)]).flatten(0, 1)[:length]
            for table, length in zip(segment.tables, lens, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # ---- grouped-query attention

    def gqa_prologue(
        self, qkv: Tensor, w: GQAWeights, places: TokenPlaces, planes: tuple[Tensor, ...]
    ) -> Tensor:
        groups = planes[0].shape[2]
        heads = qkv.shape[1] - 2 * groups
        q, k, v = qkv.split((heads, groups, groups), 1)
        cos, sin = angles(places, qkv.dtype)
        q, k = npu.npu_apply_rotary_pos_emb(
            self.norm(q, w.q_norm, w.eps),
            self.norm(k, w.k_norm, w.eps),
            cos[:, None],
            sin[:, None],
            "TND",
            "half",
        )
        self.write_heads(planes, places.slots, k, v)
        return q

    def attention(
        self,
        q: Tensor,
        k_plane: Tensor,
        v_plane: Tensor,
        segment: AttentionMetadata,
        scale: float,
        scales: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        assert scales is None, "an NPU's cache of grouped-query attention is not in 8 bits"
        page, groups = k_plane.shape[1:3]
        return self.fused_attention(
            q.contiguous(),
            k_plane.flatten(2),
            v_plane.flatten(2),
            lists_of(segment),
            num_query_heads=q.shape[1],
            num_key_value_heads=groups,
            softmax_scale=scale,
            input_layout="TND",
            block_size=page,
        )

    # ---- request state by slot

    def decode_rows(
        self,
        length: Tensor,
        last_token: Tensor,
        drafts: Tensor,
        tables: Tensor,
        slots: Tensor,
        num_speculative_tokens: int,
        page_size: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Padding rows write to different entries of the null page, since operators do not allow a
        slot twice, and attend to those, since the host gives the lengths to a captured step."""
        ids, positions, mapping, lens = super().decode_rows(
            length, last_token, drafts, tables, slots, num_speculative_tokens, page_size
        )
        own = torch.arange(mapping.shape[0], device=mapping.device) % page_size
        mapping = torch.where(mapping < page_size, own, mapping)
        return ids, positions, mapping, lens.clamp(min=num_speculative_tokens + 1)

    # ---- sampling

    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        """fp32: the device has no fp64, and its conversion could round to 1."""
        return rng.uniform(seeds, positions, stream, fp64=False)

    # ---- experts

    def route(self, logits: Tensor, bias: Tensor | None, moe: MoEConfig) -> tuple[Tensor, Tensor]:
        ids, weights = self._chosen(logits, bias, moe)
        return ids.long(), weights

    def _chosen(self, logits: Tensor, bias: Tensor | None, moe: MoEConfig) -> tuple[Tensor, Tensor]:
        """(ids [T, K] int32, weights [T, K] fp32)"""
        if not limits.fuses_gating(moe):
            ids, weights = reference.route(logits, bias, moe)
            return ids.int(), weights
        grouped = moe.method != "greedy" and moe.n_group > 1
        if moe.scoring == "softmax" and not grouped and bias is None:
            weights, ids, _ = npu.npu_moe_gating_top_k_softmax(logits, None, moe.top_k)
            if moe.norm_topk_prob:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            return ids, weights * moe.scaling
        weights, ids, _ = npu.npu_moe_gating_top_k(
            logits,
            moe.top_k,
            bias=bias,
            k_group=moe.topk_group if grouped else 1,
            group_count=moe.n_group if grouped else 1,
            group_select_mode=TOP_TWO if moe.method == "noaux_tc" else 0,
            renorm=0,
            norm_type=SIGMOID if moe.scoring == "sigmoid" else 0,
            routed_scaling_factor=moe.scaling,
            eps=1e-20,
        )
        return ids, weights

    def router(
        self, x: Tensor, w: RouterWeights, padded: PaddedRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Padding rows have experts too: the operators that sort rows by expert take every row."""
        ids, weights = self._routed(x, w)
        return ids.long(), weights

    def _routed(self, x: Tensor, w: RouterWeights) -> tuple[Tensor, Tensor]:
        moe = w.config
        if not x.shape[0]:
            shape = (0, moe.top_k)
            return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)
        dtype = torch.float32 if moe.router_fp32 else w.gate.dtype
        logits = F.linear(x.to(dtype), w.gate.to(dtype)).float()
        ids, weights = self._chosen(logits, w.bias, moe)
        return ids, weights if moe.router_fp32 else weights.to(x.dtype).float()

    def routed_experts(
        self,
        x: Activation,
        router: RouterWeights,
        w: ExpertWeights,
        base: Tensor | None = None,
        padded: PaddedRows | None = None,
    ) -> Tensor:
        ids, weights = self._routed(hidden_of(x), router)
        return self._sorted_experts(hidden_of(x), ids, weights, w, base, everywhere=False)

    def experts(
        self,
        x: Activation,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
        base: Tensor | None = None,
    ) -> Tensor:
        return self._sorted_experts(hidden_of(x), ids.int(), weights, w, base, everywhere=True)

    def _sorted_experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
        base: Tensor | None,
        everywhere: bool,
    ) -> Tensor:
        """Sort rows by expert, two grouped GEMMs, weighted sums. everywhere: ids may be -1 (an
        expert on another rank); these are sorted as one additional last expert, whose rows are
        zero."""
        here = w.gate_up.data.shape[0]
        slots = here + everywhere
        if everywhere:
            ids = torch.where(ids < 0, here, ids)
        eight_bits = w.gate_up.data.dtype == torch.int8
        rows, places, counts, scale = npu.npu_moe_init_routing_v2(
            x,
            ids,
            active_num=ids.numel(),
            expert_num=slots,
            expert_tokens_num_type=COUNTS,
            expert_tokens_num_flag=True,
            active_expert_range=[0, slots],
            quant_mode=TOKEN_QUANT if eight_bits else NO_QUANT,
            row_idx_type=0,
        )
        y = self.grouped_mlp(rows, counts[:here], scale if eight_bits else None, w, x.dtype)
        if everywhere:
            used = torch.arange(y.shape[0], device=y.device) < counts[:here].sum()
            y = torch.where(used[:, None], y, 0)
        return npu.npu_moe_finalize_routing(
            y, base, None, None, weights.to(y.dtype), places, None, DROPLESS
        )

    def grouped_mlp(
        self,
        rows: Tensor,
        counts: Tensor,
        scale: Tensor | None,
        w: ExpertWeights,
        dtype: torch.dtype,
    ) -> Tensor:
        """rows [N, hidden] sorted by expert, `counts` [experts] of each, to the experts' results,
        [N, hidden] in `dtype`; rows after the last expert's are undefined. scale [N]: of int8
        rows."""
        if scale is None:
            return self._wide_mlp(rows, counts, w)
        sums = _grouped(rows, w.gate_up.data, counts, output_dtype=torch.int32)
        inner, inner_scale = npu.npu_dequant_swiglu_quant(
            sums,
            weight_scale=w.gate_up.scale,
            activation_scale=scale,
            group_index=counts,
            activate_left=LEFT_IS_GATE,
            quant_mode=TOKEN_QUANT,
        )
        assert w.down.scale is not None
        return _grouped(
            inner,
            w.down.data,
            counts,
            scale=[w.down.scale.to(dtype)],
            per_token_scale=[inner_scale],
            output_dtype=dtype,
        )

    def _wide_mlp(self, rows: Tensor, counts: Tensor, w: ExpertWeights) -> Tensor:
        inner = npu.npu_swiglu(_grouped(rows, w.gate_up.data, counts, **_groups(w.gate_up)))
        return _grouped(inner, w.down.data, counts, **_groups(w.down))


def _outputs(weight: Weight) -> int:
    """Output columns of a product with a transposed matrix."""
    return weight.data.shape[-1] * (8 if weight.data.dtype == torch.int32 else 1)


def _every_column(plane: SplitLatent) -> Tensor:
    """The scale of an int8 cache, expanded to its columns, [C]."""
    return plane.quant_scale.repeat(plane.latent.shape[-1])


def _row(weight: Weight) -> Tensor:
    """Scales of a matrix as [1, rows] fp32."""
    assert weight.scale is not None
    return weight.scale[None]


def _groups(weight: Weight) -> dict[str, object]:
    """Arguments for int4 weights: their group scales."""
    return {} if weight.scale is None else {"antiquant_scale": [weight.scale]}


def _grouped(rows: Tensor, weight: Tensor, counts: Tensor, **options: object) -> Tensor:
    return npu.npu_grouped_matmul(
        [rows],
        [weight],
        group_list=counts,
        split_item=ONE_OUTPUT,
        group_type=ROWS,
        group_list_type=COUNTS,
        **options,
    )[0]
