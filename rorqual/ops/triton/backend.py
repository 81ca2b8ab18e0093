"""The op table of NVIDIA GPUs: Triton kernels where supported, torch's GEMMs for unquantized
weights, the reference for the rest.

Every override checks what its kernel supports. Everything else falls back to `Ops`, which is
correct for any configuration but slow. Its attention and experts wait for the device, so a step
with such a fallback cannot be captured in a graph; no other entry waits.

| entry                        | falls back to the reference when                                  |
| ---------------------------- | ----------------------------------------------------------------- |
| linear, mlp, experts         | fp8 blocks are not 128x128, or columns no multiple of 128         |
|                              | (experts: rows as well); a GPU before sm_89                      |
|                              | int4 with rounded activations, desc_act, or groups that are no    |
|                              | multiple of 32 columns or do not divide them; int8; e4m3 with a   |
|                              | scale a row (quantized/backend.py has kernels for most of these)  |
| rope                         | the rotated size is no power of two                               |
| mla_prologue                 | no latent plane, or latent or rope size is no power of two        |
| mla_down, mla_up             | latent or rope size is no power of two; mla_up without a query    |
|                              | latent as well                                                    |
| gqa_prologue                 | the head size is no power of two                                  |
| latent_attention             | latent or rope size is no power of two of at least 16; the        |
|                              | cache's format is neither the queries' nor of 8 bits              |
|                              | on a GPU also: rows of an 8-bit cache no multiple of 16 bytes     |
| write_latent, latent_entries | an 8-bit cache whose latent or rope size is no power of two       |
| attention, dense_attention   | a head is wider than 256 columns; the cache's format is neither   |
|                              | the queries' nor of 8 bits                                        |
| stretch_attention            | as dense_attention                                                |
| quantize_activation          | a GPU before sm_89; columns lie apart                             |
| add_partial_sums             | `base` has another dtype                                          |

fp32 products have full fp32 precision in every kernel (`ieee`), so that tiny fp32 models give the
CPU's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rorqual.config.model import MoEConfig
from rorqual.ops import reference
from rorqual.ops.activation import (
    Activation,
    NormOutput,
    PendingNorm,
    Quantized,
    hidden_of,
    room_of,
)
from rorqual.ops.deferred_sum import DeferredMoESum, NormInput, summed
from rorqual.ops.interface import (
    AttentionMetadata,
    GQAWeights,
    MLAWeights,
    Ops,
    PartialAttention,
    Share,
    Stretch,
    TokenPlaces,
)
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.rank_rows import RankBlocks, RankParts
from rorqual.ops.reference import FP8, Distribution, ExpertWeights, RouterWeights, Weight
from rorqual.ops.triton.attention import gqa_decode as gqa
from rorqual.ops.triton.attention import latent_fp8, prefill, prefix_groups, rope_kv_write
from rorqual.ops.triton.attention import mla_decode as mla
from rorqual.ops.triton.attention.metadata import Derived, derived
from rorqual.ops.triton.comm import rank_rows
from rorqual.ops.triton.gemm import fp8_gemm, gemv, int4, int4_gemm, per_head_gemm, skinny_gemm
from rorqual.ops.triton.moe import column_pieces, combine
from rorqual.ops.triton.moe import grouped_gemm as experts_kernels
from rorqual.ops.triton.moe import router_gemm as gating
from rorqual.ops.triton.moe import topk as routing
from rorqual.ops.triton.moe.align import ExpertBlocks, empty_blocks
from rorqual.ops.triton.quantized import experts as quantized_experts
from rorqual.ops.triton.quantized import linear as quantized_linear
from rorqual.ops.triton.quantized import rounded_direct
from rorqual.ops.triton.rowwise import embedding, quantize
from rorqual.ops.triton.rowwise import norm as norm_kernels
from rorqual.ops.triton.runtime import tuning
from rorqual.ops.triton.runtime.cublas import products_on
from rorqual.ops.triton.runtime.launch import (
    INTERPRETED,
    beside_nccl,
    keep_compiled,
    multiprocessors,
    next_power,
    takes_fp8,
)
from rorqual.ops.triton.sampling import argmax, rng, sampling, spec_decode

WIDEST_HEAD = 256


class TritonOps(Ops):
    name = "triton"

    @contextmanager
    def beside_messages(self) -> Iterator[None]:
        self.contexts_beside_messages += 1
        try:
            with beside_nccl():
                if INTERPRETED or not torch.cuda.is_initialized():
                    yield
                    return
                device = torch.device("cuda", torch.cuda.current_device())
                with products_on(multiprocessors(device)):
                    yield
        finally:
            self.contexts_beside_messages -= 1

    def delay(self, seconds: float) -> None:
        from rorqual.ops.triton.comm import delay

        delay.delay(seconds)

    def compiling(self) -> AbstractContextManager[Callable[[], int] | None]:
        from rorqual.ops.triton.runtime import precompile

        return precompile.compiling()

    def watch_kernels(self, noted: Callable[[str, float], None] | None) -> None:
        from rorqual.ops.triton.runtime import late_kernels

        late_kernels.watch(noted)

    def kernel_choice(self, device: torch.device) -> str:
        return f"{tuning.all_choices(device)}, {multiprocessors(device)} multiprocessors"

    def __init__(self) -> None:
        keep_compiled()
        self.contexts_beside_messages = 0

    def opaque(self, entry: str, *weights: Tensor) -> bool:
        """Few entries are opaque: norms, SwiGLU and bf16 GEMMs are left to inductor, which fuses
        them."""
        return entry in ("mla_prologue", "gqa_prologue", "router", "write_cache")

    def draw_normal(self, view: Tensor, key: int, std: float, first: int, width: int) -> None:
        if view.stride(1) == 1 and (view.dtype != FP8 or takes_fp8(view.device)):
            rng.draw_normal(view, key, std, first, width)
        else:
            super().draw_normal(view, key, std, first, width)

    # ---- rows

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """A table in pinned host memory is read by the kernel itself: no copy, no wait, and it can
        be captured."""
        return (
            embedding.rows(ids, table) if table.device != ids.device else super().embed(ids, table)
        )

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm_kernels.norm(x, weight, eps)

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        quantize_output: str | None = None,
    ) -> tuple[Activation, Tensor]:
        return norm_kernels.add_norm(x, residual, weight, eps, _rounds_rows(x, quantize_output))

    def add_norm_for_router(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        quantize_output: str | None = None,
    ) -> tuple[Activation, Tensor]:
        """For a few tokens the router's kernel computes the norm too."""
        wanted_in_fp8 = _rounds_rows(x, quantize_output) is not None
        few = 0 < x.shape[0] <= routing.ROUTER_TOKENS and routing.takes_norm(x.shape[1])
        rows = x.stride(1) == residual.stride(1) == 1
        if few and rows and not wanted_in_fp8:
            pending = norm_kernels.pending(x, residual, weight, eps)
            return pending, pending.total
        return self.add_norm(x, residual, weight, eps, quantize_output)

    def sum_add_norm(
        self,
        gave: DeferredMoESum,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        quantize_output: str | None = None,
    ) -> tuple[Activation, Tensor]:
        return combine.combine_add_norm(
            gave, residual, weight, eps, _rounds_rows(residual, quantize_output)
        )

    def swiglu(self, x: Tensor) -> Tensor:
        return norm_kernels.swiglu(x)

    def linear(self, x: Activation, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if int4.supported(weight):
            return int4_gemm.linear(hidden_of(x), weight, bias)
        if weight.quantized:
            if not _fits_fp8(weight):
                return super().linear(x, weight, bias)
            if not isinstance(x, NormOutput) and _rounds_itself(room_of(x), weight):
                return quantized_linear.linear(hidden_of(x), weight, bias)
            return fp8_gemm.linear(x, weight, bias)
        rows = hidden_of(x)
        if gemv.chosen(rows, weight.data):
            return gemv.linear(rows, weight.data, bias)
        skinny = skinny_gemm.chosen(rows, weight.data)
        return (
            skinny_gemm.linear(rows, weight.data, bias)
            if skinny
            else F.linear(rows, weight.data, bias)
        )

    def mlp(self, x: Activation, gate_up: Weight, down: Weight) -> Tensor:
        """In fp8 SwiGLU also quantizes; for a few tokens in bf16 it is fused with the first
        GEMM."""
        rows = hidden_of(x)
        if not gate_up.quantized and gemv.chosen(rows, gate_up.data):
            return self.linear(gemv.gate_up(rows, gate_up.data), down)
        if int4.supported(gate_up) and int4.supported(down):
            return self.linear(norm_kernels.swiglu(self.linear(rows, gate_up)), down)
        if not (_fits_fp8(gate_up) and _fits_fp8(down)):
            return super().mlp(x, gate_up, down)
        if _rounds_itself(room_of(x), gate_up):
            return self.linear(self.swiglu(self.linear(x, gate_up)), down)
        inner = norm_kernels.swiglu_fp8(fp8_gemm.linear(x, gate_up), down.ue8m0)
        return fp8_gemm.linear(inner, down, dtype=rows.dtype)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        if not _power(x.shape[-1]):
            return super().rope(x, cos, sin, interleaved)
        return rope_kv_write.rope(x, cos, sin, interleaved)

    def write_latent(self, plane: Tensor, slots: Tensor, entries: Tensor, rank: int) -> None:
        """Used only if the prologue does not write the cache itself. Also quantizes."""
        if reference.in_8_bits(plane) and latent_fp8.supported(rank, entries.shape[1] - rank):
            latent_fp8.write(plane, slots, entries, rank)
        else:
            super().write_latent(plane, slots, entries, rank)

    def heads_matmul(self, x: Tensor, matrices: Tensor) -> Tensor:
        """The result is contiguous by token, so that no copy is needed."""
        if per_head_gemm.chosen(x):
            return per_head_gemm.heads_matmul(x, matrices)
        out = torch.empty(x.shape[0], x.shape[1], matrices.shape[2], dtype=x.dtype, device=x.device)
        torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
        return out

    def joined_heads(self, latent: Tensor, w: MLAWeights) -> Activation:
        """For a few tokens the kernel also quantizes, if `quantize_output`."""
        few = per_head_gemm.chosen(latent) and latent.shape[0] > per_head_gemm.TOKENS
        fits = w.config.v_dim == per_head_gemm.HEAD and takes_fp8(latent.device)
        if few and w.quantize_output and fits:
            ue8m0 = w.quantize_output.endswith("ue8m0")
            return per_head_gemm.joined_heads_dot(latent, w.w_uv, ue8m0)
        return super().joined_heads(latent, w)

    # ---- attention

    def mla_prologue(
        self,
        x: Activation,
        w: MLAWeights,
        places: TokenPlaces,
        plane: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One or two GEMMs with fused kernels between and after them. The query input is x unless
        `keep_query_input` asks for the latent."""
        sizes = w.config.kv_lora_rank, w.config.rope_dim
        if plane is None or not all(map(_power, sizes)):
            return super().mla_prologue(x, w, places, plane)
        joint = self.linear(x, w.down, w.down_bias)
        takes_e4m3 = w.q_b is not None and _fits_fp8(w.q_b) and not w.keep_query_input
        quant = w.q_b.activation if w.q_b is not None and takes_e4m3 else None
        # rotated by the same kernel, which saves a launch
        heads = w.config.num_heads if w.q_b is None else 0
        latent = rope_kv_write.latent_epilogue(
            joint, w.q_norm, w.kv_norm, places, plane, w.eps, w.interleaved, quant, heads
        )
        query_in, q = self._queries(hidden_of(x), joint, latent, w)
        if not heads:
            rotated = q[..., w.config.nope_dim :]
            rope_kv_write.rope(rotated, places.cos, places.sin, w.interleaved, out=rotated)
        return query_in, q, None

    def _queries(
        self, x: Tensor, joint: Tensor, latent: Tensor | Quantized | None, w: MLAWeights
    ) -> tuple[Tensor, Tensor]:
        """(query input, queries [T, H, qk]), not rotated here."""
        if w.q_b is None or latent is None:
            return x, joint[:, : w.query_rows].unflatten(1, (w.config.num_heads, -1))
        per_head = (-1, w.config.num_heads, w.config.qk_dim)
        if isinstance(latent, Quantized):
            return x, fp8_gemm.linear(latent, w.q_b, dtype=x.dtype).view(per_head)
        return latent, self.linear(latent, w.q_b).view(per_head)

    def mla_down(
        self, x: Activation, w: MLAWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The GEMM and one kernel, which writes the entries to a new tensor as it would to the
        cache."""
        rank = w.config.kv_lora_rank
        rotary = w.config.rope_dim
        if not (_power(rank) and _power(rotary)):
            return super().mla_down(x, w, cos, sin)
        joint = self.linear(x, w.down, w.down_bias)
        entries = joint.new_empty(joint.shape[0], rank + rotary)
        rows = TokenPlaces(cos, sin, torch.arange(joint.shape[0], device=joint.device))
        latent = rope_kv_write.latent_epilogue(
            joint, w.q_norm, w.kv_norm, rows, entries[:, None], w.eps, w.interleaved
        )
        assert latent is None or isinstance(latent, Tensor)
        return joint[:, : w.query_rows] if latent is None else latent, entries

    def mla_up(
        self,
        query: Tensor,
        entries: Tensor,
        w: MLAWeights,
        places: TokenPlaces,
        plane: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Queries from a latent are rotated by the GEMM's kernel."""
        if w.q_b is None or not _power(w.config.rope_dim):
            return super().mla_up(query, entries, w, places, plane)
        q = self.linear(query, w.q_b).unflatten(1, (w.config.num_heads, -1))
        rotated = q[..., w.config.nope_dim :]
        rope_kv_write.rope(rotated, places.cos, places.sin, w.interleaved, out=rotated)
        if plane is None:
            return q, entries
        self.write_latent(plane, places.slots, entries, w.config.kv_lora_rank)
        return q, None

    def gqa_prologue(
        self, qkv: Tensor, w: GQAWeights, places: TokenPlaces, planes: tuple[Tensor, ...]
    ) -> Tensor:
        if not _power(qkv.shape[2]):
            return super().gqa_prologue(qkv, w, places, planes)
        return rope_kv_write.heads_epilogue(qkv.flatten(1), w, places, planes)

    def captures_prompts(self, width: int) -> bool:
        return width <= WIDEST_HEAD

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
        """Decode kernel for a few query tokens per request, which share one pass over keys and
        values; prefill kernel for chunks."""
        rank = v_plane.shape[-1]
        if _one_storage(k_plane, v_plane):
            return self.latent_attention(
                q[..., :rank], q[..., rank:], k_plane[:, :, 0], segment, scale
            )
        fits = scales is not None or k_plane.dtype == v_plane.dtype == q.dtype
        if max(q.shape[-1], rank) > WIDEST_HEAD or not fits:
            return super().attention(q, k_plane, v_plane, segment, scale, scales)
        known = derived(segment)
        if (
            known.decodes
            and k_plane.shape == v_plane.shape
            and k_plane.is_contiguous()
            and v_plane.is_contiguous()
        ):
            return _gqa_decode(q, k_plane, v_plane, known, scale, scales)
        where = (segment.tables, known.query_starts(), segment.kv_lens, known.most_queries)
        return prefill.paged_prefill(q, k_plane, v_plane, *where, scale, out, scales=scales)

    def latent_attention(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        plane: Tensor,
        segment: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        """The decode kernel. It also handles prefill chunks, with each token as a separate request:
        many passes over the cache."""
        fits = all(_power(q.shape[-1]) and q.shape[-1] >= 16 for q in (q_latent, q_rope))
        packed = reference.in_8_bits(plane)
        if packed and plane.shape[-1] % 16 and not INTERPRETED:
            fits = False  # the compiler would assume a larger alignment than these rows have
        if not fits or not (packed or plane.dtype == q_latent.dtype):
            return super().latent_attention(q_latent, q_rope, plane, segment, scale)
        known = derived(segment)
        if not known.decodes:
            return self.latent_attention(q_latent, q_rope, plane, known.by_token(), scale)
        return _mla_decode(q_latent, q_rope, plane, known, scale)

    def dense_attention(
        self, q: Tensor, k: Tensor, v: Tensor, segment: AttentionMetadata, scale: float
    ) -> Tensor:
        """Keys and values packed as by this backend's `gather`: max_kv_lens rows per request."""
        if max(q.shape[-1], v.shape[-1]) > WIDEST_HEAD or not q.dtype == k.dtype == v.dtype:
            return _plain_dense(q, k, v, segment, scale)
        known = derived(segment)
        starts = known.query_starts(), known.key_starts()
        return prefill.dense_prefill(q, k, v, *starts, segment.kv_lens, known.most_queries, scale)

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
        """Hopper's kernel supports keys in two parts."""
        known = derived(segment)
        queries = q.shape[0] if found is not None else known.most_queries
        if not prefill.takes_parts(q, *keys, v, queries, len(segment), found is None):
            return super().decompressed_attention(q, keys, v, segment, scale, found)
        so_far = None
        if found is not None:
            assert isinstance(segment, Stretch)
            so_far = prefill.SoFar(found.out, found.total, segment.first)
        starts = (known.query_starts(), known.key_starts())
        given = (q, keys[0], v, *starts, segment.kv_lens, queries, scale, out)
        return prefill.dense_prefill(*given, so_far=so_far, k_rope=keys[1])

    def shares(self, segment: AttentionMetadata, tokens: int, page: int) -> list[Share]:
        """Computed once per step, as everything derived from segments."""
        return derived(segment).shares(tokens, page)

    def stretch_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        stretch: Stretch,
        scale: float,
        found: PartialAttention,
    ) -> None:
        """The kernel continues from the previous stretch's result: no separate merge."""
        if max(q.shape[-1], v.shape[-1]) > WIDEST_HEAD or not q.dtype == k.dtype == v.dtype:
            return super().stretch_attention(q, k, v, stretch, scale, found)
        known = derived(stretch)
        so_far = prefill.SoFar(found.out, found.total, stretch.first)
        starts = (known.query_starts(), known.key_starts())
        prefill.dense_prefill(q, k, v, *starts, stretch.kv_lens, q.shape[0], scale, so_far=so_far)

    def gather(self, plane: Tensor, segment: AttentionMetadata) -> Tensor:
        """Packed by host bounds: [sum of max_kv_lens, *shape]. Rows past a request's length are
        page 0's content and are never attended to."""
        return plane.flatten(0, 1).index_select(0, derived(segment).gather_slots(plane.shape[1]))

    def latent_entries(
        self, plane: Tensor, segment: AttentionMetadata, rank: int, dtype: torch.dtype
    ) -> Tensor:
        """Packed as by `gather`; an 8-bit cache is dequantized in the same pass."""
        rope = plane.shape[2] - rank - 4 * latent_fp8.groups_of(rank)
        if not reference.in_8_bits(plane) or not latent_fp8.supported(rank, rope // dtype.itemsize):
            return super().latent_entries(plane, segment, rank, dtype)
        return latent_fp8.read(plane, derived(segment).gather_slots(plane.shape[1]), rank, dtype)

    # ---- experts

    def prepare_router_weight(self, gate: Tensor, dtype: torch.dtype) -> Tensor:
        return gating.held(gate, dtype)

    def router(
        self, x: Tensor, w: RouterWeights, padded: PaddedRows | None = None
    ) -> tuple[Tensor, Tensor]:
        return _router(x, w, padded=padded)

    def route(self, logits: Tensor, bias: Tensor | None, moe: MoEConfig) -> tuple[Tensor, Tensor]:
        return routing.route(logits, bias, moe)

    @property
    def fuses_shared_experts(self) -> bool:
        return experts_kernels.JOINS_SHARED

    def experts(
        self,
        x: Activation,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
        base: Tensor | None = None,
    ) -> Tensor:
        if not _fits_experts(w):
            return super().experts(x, ids, weights, w, base)
        shared = w.num_fused_shared_experts
        most = experts_kernels.FUSED_SHARED_TOKENS[experts_kernels.kind_of(w.down)]
        if shared and ids.shape[0] > most:
            ids, weights = (topk[:, :-shared].contiguous() for topk in (ids, weights))
            base = self._add_fused_shared(x, w, base)
            w = replace(w, num_fused_shared_experts=0)
        num_picks = ids.numel() - ids.shape[0] * w.num_fused_shared_experts
        if quantized_experts.rounds_itself(w, ids.shape[0], num_picks):
            return quantized_experts.experts(hidden_of(x), ids, weights, w, base)
        return experts_kernels.experts(x, ids, weights, w, base)

    def routed_experts(
        self,
        x: Activation,
        router: RouterWeights,
        w: ExpertWeights,
        base: Tensor | None = None,
        padded: PaddedRows | None = None,
    ) -> Tensor:
        return summed(self.experts_deferred(x, router, w, base, padded))

    def experts_deferred(
        self,
        x: Activation,
        router: RouterWeights,
        w: ExpertWeights,
        base: Tensor | None = None,
        padded: PaddedRows | None = None,
    ) -> NormInput:
        """For a moderate number of tokens the sum is deferred to the norm. Up to a number of
        (token, expert) pairs the router's kernel also sorts them by expert."""
        rows = room_of(x)
        tokens = rows.shape[0]
        plan = None
        if tokens and _fits_experts(w):
            num_routed = tokens * router.config.top_k
            if quantized_experts.rounds_itself(w, tokens, num_routed):
                ids, weights = _router(x, router, padded=padded)
                tiles = quantized_experts.plan_of(w, tokens, num_routed, num_routed)
                y = quantized_experts.products(hidden_of(x), w, tiles, None, ids)
                return DeferredMoESum(y, None, weights, base, combine.combine, padded)
            plan = experts_kernels.grouped_plan(w, tokens, router.config.top_k, rows.dtype)
        if plan is None:
            return self.experts(x, *_router(x, router, padded=padded), w, base)
        num_picks = tokens * (router.config.top_k + w.num_fused_shared_experts)
        blocks = None
        if experts_kernels.sorts_while_routing(w.down, num_picks):
            slots = w.down.data.shape[0]
            blocks = empty_blocks(num_picks, slots, plan.rows, rows.device, buckets=True)
        ids, weights = _router(x, router, blocks, padded)
        gave = experts_kernels.experts_deferred(x, ids, weights, w, plan, base, blocks, padded)
        return gave if tokens <= combine.NORM_SUMS_TOKENS else gave.total()

    def _add_fused_shared(
        self, x: Activation, w: ExpertWeights, base: Tensor | None
    ) -> Tensor | None:
        """`base` plus the fused shared experts' results for all tokens, each computed as a dense
        layer."""
        slots = w.down.data.shape[0]
        for slot in range(slots - w.num_fused_shared_experts, slots):
            y = self.mlp(x, w.gate_up[slot], w.down[slot])
            base = y if base is None else base + y
        return base

    def experts_fp8(
        self,
        x: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
    ) -> Tensor:
        """The grouped kernels use fp8 rows directly with fp8 weights; the direct ones, for a few
        (token, expert) pairs, need dequantized rows."""
        if not w.gate_up.fp8_blocks or not _fits_experts(w):
            return super().experts_fp8(x, scale, dtype, ids, weights, w)
        if ids.numel() <= experts_kernels.DIRECT_PICKS["fp8"]:
            rows = reference.dequantize_activation(x, scale, dtype)
            return self.experts(rows, ids, weights, w)
        plan = experts_kernels.plan_for(w.down, round(ids.numel() * w.local_fraction), dtype=dtype)
        return experts_kernels.grouped_experts(Quantized(x, scale), ids, weights, w, plan, dtype)

    def experts_in_pieces(
        self,
        rows: Sequence[Tensor],
        dtype: torch.dtype,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
    ) -> Iterator[Tensor] | None:
        """Beside messages of other micro-batches: a rank that waits for its own has nothing to
        compute meanwhile."""
        if not self.contexts_beside_messages or not _fits_experts(w):
            return None
        if len(rows) > 1 and not w.gate_up.fp8_blocks:  # which are dequantized first
            return None
        if not column_pieces.in_pieces(rows[0].shape[0], w, dtype):
            return None
        plan = experts_kernels.plan_for(w.down, round(ids.numel() * w.local_fraction), dtype=dtype)
        x = Quantized(rows[0], rows[1]) if len(rows) > 1 else rows[0]
        return column_pieces.experts_in_pieces(x, ids, weights, w, plan, dtype)

    def quantize_for_experts(self, x: Tensor, w: ExpertWeights) -> tuple[Tensor, Tensor]:
        if not _fits_experts(w) or not x.shape[0] or x.stride(1) != 1:
            return super().quantize_for_experts(x, w)
        made = quantize.quantize(x, w.gate_up.ue8m0)
        return made.data, made.scale

    # ---- exchanges

    def quantize_activation(self, x: Tensor, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
        if not x.shape[0] or x.stride(1) != 1 or not takes_fp8(x.device):
            return super().quantize_activation(x, ue8m0)
        return quantize.quantize_exactly(x, ue8m0)

    def pack_routing(self, slots: Tensor, weights: Tensor) -> Tensor:
        return rank_rows.pack_routing(slots, weights)

    def unpack_routing(
        self, message: Tensor, dtype: torch.dtype, first: int, count: int
    ) -> tuple[Tensor, Tensor]:
        return rank_rows.unpack_routing(message, dtype, first, count)

    def rank_blocks(
        self, slots: Tensor, weights: Tensor, parts: RankParts, capacity: int
    ) -> RankBlocks:
        return rank_rows.rank_blocks(slots, weights, parts, capacity)

    def add_partial_sums(self, parts: Tensor, rows: Tensor, base: Tensor | None = None) -> Tensor:
        if base is not None and base.dtype != parts.dtype:
            return super().add_partial_sums(parts, rows, base)
        return rank_rows.add_partial_sums(parts, rows, base)

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
        return spec_decode.decode_rows(
            length, last_token, drafts, tables, slots, num_speculative_tokens, page_size
        )

    def verify_drafts(
        self,
        tokens: Tensor,
        drafts: Tensor,
        num_drafts: Tensor,
        slots: Tensor,
        accepted: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return spec_decode.verify_drafts(tokens, drafts, num_drafts, slots, accepted)

    def commit_tokens(
        self,
        last_token: Tensor,
        length: Tensor,
        slots: Tensor,
        lens: Tensor,
        tokens: Tensor,
        num_accepted: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return spec_decode.commit_tokens(last_token, length, slots, lens, tokens, num_accepted)

    # ---- sampling

    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        return rng.uniform(seeds, positions, stream)

    def argmax(self, logits: Tensor) -> Tensor:
        return argmax.argmax(logits)

    def distribution(self, logits: Tensor, settings: Tensor, filters: bool) -> Distribution:
        return sampling.distribution(logits, settings, filters)

    def sample_from(self, given: Distribution, numbers: Tensor) -> Tensor:
        return sampling.sample_from(given, numbers)

    def sample_residual(
        self,
        given: Distribution,
        rows: Tensor,
        numbers: Tensor,
        refused: Tensor,
        q: Tensor | None = None,
        q_rows: Tensor | None = None,
    ) -> Tensor:
        return sampling.sample_residual(given, rows, numbers, refused, q, q_rows)

    def write_probs(self, given: Distribution, plane: Tensor, rows: Tensor) -> None:
        sampling.write_probs(given, plane, rows)


def _router(
    given: Activation,
    w: RouterWeights,
    into: ExpertBlocks | None = None,
    padded: PaddedRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights are rounded to the activations' dtype if the router is not fp32."""
    fp32 = w.config.router_fp32
    rows = room_of(given)
    rounded, dtype = (torch.float32, torch.float32) if fp32 else (rows.dtype, w.gate.dtype)
    if routing.joint(rows, w.gate):
        waits = isinstance(given, PendingNorm) and not given.done
        one: Tensor | PendingNorm = given if waits else rows  # type: ignore[assignment]
        return routing.router(one, w, rounded=rounded, into=into, padded=padded)
    x = hidden_of(given)
    split = gating.chosen(x, w.gate, dtype)
    logits = gating.partial_logits(x, w.gate) if split else F.linear(x.to(dtype), w.gate.to(dtype))
    return routing.route(
        logits,
        w.bias,
        w.config,
        rounded=rounded,
        shared=w.num_fused_shared_experts,
        kind=dtype,
        into=into,
        padded=padded,
    )


def _power(size: int) -> bool:
    return size == next_power(size)


def _fits_fp8(weight: Weight) -> bool:
    return fp8_gemm.supported(weight) and takes_fp8(weight.data.device)


def _rounds_itself(x: Tensor, weight: Weight) -> bool:
    """Whether the product rounds a single token itself. The stream-K kernel is about as fast alone,
    but whole steps are a tenth longer with it and with norms that quantize."""
    return x.shape[0] == 1 and rounded_direct.takes(weight)


def _rounds_rows(x: Tensor, activation: str | None) -> str | None:
    """`activation`, if norms of these rows quantize for fp8 products: not if those round a single
    token."""
    alone = x.shape[0] == 1 and rounded_direct.takes_blocks_of(x.shape[1])
    return activation if takes_fp8(x.device) and not alone else None


def _fits_experts(w: ExpertWeights) -> bool:
    return experts_kernels.supported(w) and (
        takes_fp8(w.down.data.device) or not w.gate_up.fp8_blocks
    )


def _one_storage(k_plane: Tensor, v_plane: Tensor) -> bool:
    """MLA's latent cache as one shared key with values in its first columns; queries are
    concatenated."""
    return (
        k_plane.shape[2] == 1
        and k_plane.shape[-1] > v_plane.shape[-1]
        and k_plane.data_ptr() == v_plane.data_ptr()
    )


def _gqa_decode(
    q: Tensor,
    k_plane: Tensor,
    v_plane: Tensor,
    known: Derived,
    scale: float,
    scales: Tensor | None,
) -> Tensor:
    where = known.segment
    heads = q.shape[1]
    width = q.shape[2]
    groups = k_plane.shape[2]
    config = gqa.config_for(q, k_plane, len(where), known.longest)
    shared = None
    fits = config.per_sm <= prefix_groups.MOST_PROGRAMS
    if where.may_share and fits and len(where) >= prefix_groups.FEWEST_REQUESTS:
        workers = gqa.gqa_workers(len(where), known.longest, groups, config, q.device)
        page = k_plane.shape[1]
        shared = known.shared_prefixes(page, (heads, groups), width, q.dtype, workers)
    lens = where.kv_lens if shared is None else shared.own_lens
    sizes = (known.longest, known.most_queries, heads, groups, width)
    plan = known.plan(
        (config, heads, width, groups, shared is None),
        lambda: gqa.gqa_plan(lens, *sizes, config, shared),
    )
    cached = (where.tables, where.kv_lens, scale, known.longest, plan)
    return gqa.gqa_decode(q, k_plane, v_plane, *cached, config=config, scales=scales, shared=shared)


def _mla_decode(
    q_latent: Tensor, q_rope: Tensor, plane: Tensor, known: Derived, scale: float
) -> Tensor:
    where = known.segment
    heads = q_latent.shape[1]
    rank = q_latent.shape[2]
    config = mla.config_for(
        q_latent, known.most_queries * heads, plane.dtype, len(where), known.longest
    )
    plan = known.plan(
        (config, heads, rank),
        lambda: mla.mla_plan(where.kv_lens, known.longest, known.most_queries, heads, rank, config),
    )
    return mla.mla_decode(
        q_latent,
        q_rope,
        plane,
        where.tables,
        where.kv_lens,
        scale,
        known.longest,
        plan,
        config=config,
    )


def _plain_dense(
    q: Tensor, k: Tensor, v: Tensor, segment: AttentionMetadata, scale: float
) -> Tensor:
    lens = segment.kv_lens.tolist()
    packed = zip(
        q.split(segment.query_lens),
        k.split(segment.max_kv_lens),
        v.split(segment.max_kv_lens),
        lens,
        strict=True,
    )
    return torch.cat(
        [
            reference.causal_attention(queries, keys[:n], values[:n], scale)
            for queries, keys, values, n in packed
        ]
    )
