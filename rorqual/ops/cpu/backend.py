"""The CPU backend: the reference's results with fewer and larger torch calls. A call costs
microseconds, as much as the arithmetic of a small batch, so what matters is their number;
attention goes through torch's fused CPU kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rorqual.config.model import MoEConfig
from rorqual.ops import reference
from rorqual.ops.activation import Activation, hidden_of
from rorqual.ops.cpu import quantized
from rorqual.ops.cpu.captured import capture
from rorqual.ops.cpu.native import STORAGE, Native, library, unknown_expert
from rorqual.ops.interface import (
    AttentionMetadata,
    GQAWeights,
    MLAWeights,
    Ops,
    Replay,
    TokenPlaces,
)
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.reference import Distribution, ExpertWeights, RouterWeights, Weight

# Gathering expert weights copies them; above this many bytes a loop over the experts in use is
# cheaper.
GATHER_BYTES = 4 * 2**20
# Up to this many tokens every expert computes every token in one product when at least half of them
# are in use anyway.
DENSE_TOKENS = 64


# Rows up to which compiled products are faster than torch's whatever the dtype. Beyond, fp32 is
# torch's, and so is bf16 on processors that multiply it: elsewhere torch widens it at every call.
NATIVE_ROWS = 128
MANY_ROWS = 4096  # more would keep too much of the kernels' scratch
NATIVE_ENTRIES = (
    "add_norm",
    "linear",
    "mlp",
    "mla_prologue",
    "mla_absorbed",
    "gqa_prologue",
    "router",
)
log = logging.getLogger("rorqual")
# what each byte reads as: a table is faster than torch's cast
E4M3 = torch.arange(256, dtype=torch.uint8).view(reference.FP8).float()


@contextmanager
def threads(most: int) -> Iterator[None]:
    """torch's operations of this thread use at most so many threads."""
    before = torch.get_num_threads()
    if most >= before:
        yield
        return
    torch.set_num_threads(most)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CpuOps(Ops):
    """`native` False leaves out the compiled kernels."""

    name = "cpu"

    def __init__(self, native: bool = True):
        kernels = library() if native else None
        self.native = Native(kernels) if kernels else None
        self.many_rows = {torch.float32: NATIVE_ROWS, torch.bfloat16: MANY_ROWS}
        self.told: set[str] = set()  # reasons that the log has

    def computing(self, decodes: bool) -> AbstractContextManager[None]:
        """Where other programs need a processor, torch's operations in steps that decode have fewer
        threads as well. Not in prompts: their products in fp32 may depend on the number."""
        if self.native is None or not decodes:
            return nullcontext()
        return threads(self.native.threads_used())

    def opaque(self, entry: str, *weights: Tensor) -> bool:
        """Where the compiled kernels fit they fuse more than inductor would."""
        if self.native is None or entry not in NATIVE_ENTRIES:
            return False
        return all(weight.dtype in STORAGE and weight.is_contiguous() for weight in weights)

    def _native(self, x: Tensor, *weights: Tensor, rows: int = MANY_ROWS) -> Native | None:
        """The compiled kernels, where this call suits them: not too many rows of a known format,
        weights of the same format."""
        if (
            self.native is None
            or x.shape[0] > rows
            or x.dtype not in STORAGE
            or not x.is_contiguous()
        ):
            return None
        for weight in weights:
            if weight.dtype != x.dtype or not weight.is_contiguous():
                return None
        return self.native

    def _quantized(self, x: Tensor, refusal: str) -> Native | None:
        """The compiled kernels for weights of eight or four bits, unless `refusal` says why not."""
        if self.native is None:
            return None  # the log has it
        if not refusal and x.dtype not in STORAGE:
            refusal = f"activations in {x.dtype}"
        if refusal and refusal not in self.told:
            self.told.add(refusal)
            log.warning(
                "no compiled CPU kernel takes %s: such weights are widened at every call, which "
                "is several times slower",
                refusal,
            )
        return None if refusal else self.native

    def _products(self, x: Tensor, *weights: Tensor) -> Native | None:
        """The same for calls that are little but a product."""
        return self._native(x, *weights, rows=self.many_rows.get(x.dtype, 0))

    @property
    def captures_calls(self) -> bool:
        return self.native is not None

    def capture_calls(
        self, work: Callable[[], Tensor], memory: Tensor
    ) -> tuple[Tensor, Replay | None]:
        assert self.native is not None
        out, captured = capture(self.native, work, memory)
        return out, captured.replay if captured else None

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        fits = table.is_contiguous() and ids.is_contiguous() and ids.dtype == torch.int64
        native = self.native if fits else None
        return native.embed(ids, table) if native else super().embed(ids, table)

    def concat_columns(self, a: Tensor, b: Tensor) -> Tensor:
        fits = a.dtype == b.dtype and a.is_contiguous() and b.is_contiguous()
        native = self.native if fits else None
        return native.concat_columns(a, b) if native else super().concat_columns(a, b)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        native = self._native(x, weight) if x.dim() == 2 else None
        return (
            native.add_norm(x, None, weight, eps)[0]
            if native
            else F.rms_norm(x, weight.shape, weight, eps)
        )

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        quantize_output: str | None = None,
    ) -> tuple[Activation, Tensor]:
        native = self._native(x, weight)
        if native and (residual is None or residual.is_contiguous()):
            return native.add_norm(x, residual, weight, eps)
        total = x if residual is None else x + residual
        return F.rms_norm(total, weight.shape, weight, eps), total

    def linear(self, x: Activation, weight: Weight, bias: Tensor | None = None) -> Tensor:
        x = hidden_of(x)
        if weight.scale is not None:
            native = self._quantized(x, quantized.refused(weight))
            if native is None:
                return reference.linear(x, weight, bias)
            parts = x.split(MANY_ROWS)
            return _joined([quantized.linear(native, rows, weight, bias) for rows in parts])
        native = self._products(x, weight.data)
        return native.linear(x, weight.data, bias) if native else F.linear(x, weight.data, bias)

    def mlp(self, x: Activation, gate_up: Weight, down: Weight) -> Tensor:
        x = hidden_of(x)
        if gate_up.scale is not None and down.scale is not None:
            native = self._quantized(x, quantized.refused(gate_up, down))
            if native is None:
                return super().mlp(x, gate_up, down)
            return _joined(
                [quantized.mlp(native, part, gate_up, down) for part in x.split(MANY_ROWS)]
            )
        native = self._products(x, gate_up.data, down.data)
        return native.mlp(x, gate_up.data, down.data) if native else super().mlp(x, gate_up, down)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        if not interleaved:
            return reference.rope(x, cos, sin, interleaved)
        pairs = torch.view_as_complex(x.float().contiguous().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(-2).to(x.dtype)

    # ---- attention

    def mla_prologue(
        self,
        x: Activation,
        w: MLAWeights,
        places: TokenPlaces,
        plane: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        x = hidden_of(x)
        suits = (
            plane is not None
            and (plane.dtype == x.dtype or reference.in_8_bits(plane))
            and not w.keep_query_input
        )
        prologue = self._prologue(x, w) if suits else None
        if prologue is None or plane is None:
            return super().mla_prologue(x, w, places, plane)
        # the kernel writes entries as they are; torch's calls quantize them
        if reference.in_8_bits(plane):
            entries = x.new_empty(1, x.shape[0], w.config.latent_dim)
            rows = TokenPlaces(places.cos, places.sin, torch.arange(x.shape[0]))
            q = prologue(x, w, rows, entries)
            self.write_latent(plane, places.slots, entries[0], w.config.kv_lora_rank)
            return x, q, None
        return x, prologue(x, w, places, plane), None

    def _prologue(self, x: Tensor, w: MLAWeights) -> Callable[..., Tensor] | None:
        """The compiled one that takes these projections, if one does."""
        projections = [w.down] + ([w.q_b] if w.q_b else [])
        packed = [weight.scale is not None for weight in projections]
        if not any(packed):
            data = [weight.data for weight in (*projections, w.kv_b)]
            native = self._products(x, *data)
            return native.mla_prologue if native else None
        if not all(packed) or x.shape[0] > MANY_ROWS or not x.is_contiguous():
            return None
        native = self._quantized(x, quantized.refused(*projections))
        return partial(quantized.mla_prologue, native) if native else None

    def mla_absorbed(
        self, q: Tensor, w: MLAWeights, plane: Tensor, segment: AttentionMetadata, scale: float
    ) -> Activation:
        segment = _one_query_each(segment)
        packed = reference.in_8_bits(plane)
        native = self._native(q, w.kv_b.data) if packed or plane.dtype == q.dtype else None
        if native is None or segment.tokens != len(segment):
            return super().mla_absorbed(q, w, plane, segment, scale)
        tables = segment.tables
        if packed:
            plane, tables = _dequantized_pages(plane, segment, w.config.kv_lora_rank, q.dtype)
        return native.mla_absorbed(q, w, plane, tables, segment.kv_lens, scale).flatten(1)

    def gqa_prologue(
        self, qkv: Tensor, w: GQAWeights, places: TokenPlaces, planes: tuple[Tensor, ...]
    ) -> Tensor:
        packed = reference.in_8_bits(planes[0])
        suits = packed or planes[0].dtype == qkv.dtype
        native = self._native(qkv, w.q_norm) if suits else None
        if native is None:
            return super().gqa_prologue(qkv, w, places, planes)
        if packed:  # the kernel writes heads as they are; torch's calls quantize them
            tokens, _, width = qkv.shape
            k, v = qkv.new_empty(2, 1, tokens, planes[0].shape[2], width)
            rows = TokenPlaces(places.cos, places.sin, torch.arange(tokens))
            q = native.gqa_prologue(qkv, w, rows, (k, v))
            self.write_heads(planes, places.slots, k[0], v[0])
            return q
        return native.gqa_prologue(qkv, w, places, (planes[0], planes[1]))

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
        """The pages of an 8-bit cache that the segment reads are widened first."""
        if scales is not None:
            k_plane, v_plane, segment = _widened_pages(k_plane, v_plane, scales, segment, q.dtype)
        planes = (k_plane, v_plane)
        segment = _one_query_each(segment)
        same = all(
            p.dtype == q.dtype and p.is_contiguous() and p.shape[-1] == q.shape[-1] for p in planes
        )
        native = self._native(q) if same and segment.tokens == len(segment) else None
        if native:
            return native.gqa_decode(q, planes, segment.tables, segment.kv_lens, scale)
        index = _decode_index(segment, k_plane)
        if index is None:
            k, v = (self.gather(plane, segment).to(q.dtype) for plane in (k_plane, v_plane))
            return self.dense_attention(q, k, v, segment, scale)
        # [R, G, L, D]
        k, v = (_entries(plane, index).to(q.dtype).transpose(1, 2) for plane in (k_plane, v_plane))
        rows = len(segment)
        heads = q.shape[1]
        groups = k.shape[1]
        # The heads that share a key are its queries: nothing is repeated.
        out = _fused(q.view(rows, groups, heads // groups, -1), k, v, scale, mask=index.mask)
        return out.reshape(rows, heads, -1)

    def latent_attention(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        plane: Tensor,
        segment: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        """One fused call with the cache rows as keys and as values; the rope columns of the
        result are cut off."""
        segment = _one_query_each(segment)
        index = _decode_index(segment, plane)
        rank = q_latent.shape[-1]
        if index is None:
            q = torch.cat((q_latent, q_rope), -1)
            keys = self.latent_entries(plane, segment, rank, q_latent.dtype)[:, None]
            return self.dense_attention(q, keys, keys, segment, scale)[..., :rank]
        entries = _entries(plane, index)  # [R, L, C + rope]
        entries = (
            _unpack_latent(entries, rank, q_latent.dtype)
            if reference.in_8_bits(plane)
            else entries.to(q_latent.dtype)
        )
        q = torch.cat((q_latent, q_rope), -1)[:, None]
        return _fused(q, entries[:, None], entries[:, None], scale, mask=index.mask).squeeze(1)[
            ..., :rank
        ]

    def dense_attention(
        self, q: Tensor, k: Tensor, v: Tensor, segment: AttentionMetadata, scale: float
    ) -> Tensor:
        if not segment.exact:
            return super().dense_attention(q, k, v, segment, scale)
        dense = k.stride(-1) == 1 == v.stride(-1) and k.dtype == q.dtype == v.dtype
        native = self._native(q) if dense else None
        if native:
            return _each_request(native, q, k, v, segment, scale)
        if _alike(segment):
            q, k, v = (t.unflatten(0, (len(segment), -1)) for t in (q, k, v))
            return _fused_attention(q, k, v, scale).flatten(0, 1)
        parts = zip(
            q.split(segment.query_lens),
            k.split(segment.max_kv_lens),
            v.split(segment.max_kv_lens),
            strict=True,
        )
        return torch.cat(
            [_fused_attention(q[None], k[None], v[None], scale)[0] for q, k, v in parts]
        )

    def gather(self, plane: Tensor, segment: AttentionMetadata) -> Tensor:
        if not segment.exact:
            return super().gather(plane, segment)
        if _alike(segment):
            length = segment.max_kv_lens[0]
            pages = segment.tables[:, : -(-length // plane.shape[1])]
            return plane[pages].flatten(1, 2)[:, :length].flatten(0, 1)
        rows = zip(segment.tables, segment.max_kv_lens, strict=True)
        return torch.cat([reference.read_cache(plane, table, length) for table, length in rows])

    def latent_entries(
        self, plane: Tensor, segment: AttentionMetadata, rank: int, dtype: torch.dtype
    ) -> Tensor:
        rows = self.gather(plane, segment)
        packed = reference.in_8_bits(plane)
        return _unpack_latent(rows, rank, dtype) if packed else rows.to(dtype)

    # ---- experts

    def router(
        self, x: Tensor, w: RouterWeights, padded: PaddedRows | None = None
    ) -> tuple[Tensor, Tensor]:
        known = w.gate.dtype in (x.dtype, torch.float32) and w.gate.is_contiguous()
        native = self._native(x) if known else None
        if native is None:
            return super().router(x, w, padded)
        return self._finish_choice(*native.router(x, w), w, padded)

    def route(self, logits: Tensor, bias: Tensor | None, moe: MoEConfig) -> tuple[Tensor, Tensor]:
        return reference.route(logits, bias, moe)

    def experts(
        self,
        x: Activation,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
        base: Tensor | None = None,
    ) -> Tensor:
        y = self._experts(hidden_of(x), ids, weights, w)
        if base is None:
            return y
        native = self._native(y) if y.dtype == base.dtype and base.is_contiguous() else None
        return native.add_to(y, base) if native else y + base

    def _experts(self, x: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights) -> Tensor:
        """Three forms of the same sum: gather the chosen experts, let every expert see every
        token, or the reference's loop over experts. A token may pick one expert several times."""
        gate_up = w.gate_up
        down = w.down
        slots = gate_up.data.shape[0]
        num_picks = ids.numel()
        if gate_up.quantized or down.quantized:
            return self._quantized_experts(x, ids, weights, w)
        native = self._native(x, gate_up.data, down.data)
        if native:
            return native.experts(x, ids, weights, w)
        ids = ids.long()
        # picks of experts that are elsewhere: the loop alone passes them by
        if _least_id(ids, slots) < 0:
            return reference.experts(x, ids, weights, w)
        if (
            2 * num_picks >= slots
            and x.shape[0] <= DENSE_TOKENS
            and _bytes(gate_up.data) <= 4 * GATHER_BYTES
        ):
            return _dense_experts(x, ids, weights, gate_up.data, down.data)
        if num_picks * _bytes(gate_up.data[0]) <= GATHER_BYTES:
            return _gathered_experts(x, ids, weights, gate_up.data, down.data)
        return reference.experts(x, ids, weights, w)

    def _quantized_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights
    ) -> Tensor:
        native = self._quantized(x, quantized.experts_refusal(w))
        if native is None:
            _least_id(ids, w.gate_up.data.shape[0])
            return reference.experts(x, ids, weights, w)
        parts = zip(x.split(MANY_ROWS), ids.split(MANY_ROWS), weights.split(MANY_ROWS), strict=True)
        return _joined([quantized.experts(native, *part, w) for part in parts])

    # ---- random numbers and sampling

    def draw_normal(self, view: Tensor, key: int, std: float, first: int, width: int) -> None:
        fits = view.dtype in STORAGE and view.stride(1) == 1
        if self.native and fits:
            self.native.draw_normal(view, key, std, first, width)
        else:
            super().draw_normal(view, key, std, first, width)

    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        native = self.native if seeds.is_contiguous() and positions.is_contiguous() else None
        return (
            native.uniform(seeds, positions, stream)
            if native
            else super().uniform(seeds, positions, stream)
        )

    def distribution(self, logits: Tensor, settings: Tensor, filters: bool) -> Distribution:
        fits = logits.dtype == torch.float32 and logits.stride(1) == 1 and settings.is_contiguous()
        native = self.native if fits else None
        return (
            native.distribution(logits, settings, filters)
            if native
            else super().distribution(logits, settings, filters)
        )

    def sample_from(self, given: Distribution, numbers: Tensor) -> Tensor:
        native = self.native if given.scratch is not None and numbers.is_contiguous() else None
        return native.sample_from(given, numbers) if native else super().sample_from(given, numbers)

    def sample_residual(
        self,
        given: Distribution,
        rows: Tensor,
        numbers: Tensor,
        refused: Tensor,
        q: Tensor | None = None,
        q_rows: Tensor | None = None,
    ) -> Tensor:
        native = (
            self.native if given.scratch is not None and (q is None or q.is_contiguous()) else None
        )
        if native is None:
            return super().sample_residual(given, rows, numbers, refused, q, q_rows)
        return native.sample_residual(given, rows, numbers, refused, q, q_rows)

    def write_probs(self, given: Distribution, plane: Tensor, rows: Tensor) -> None:
        native = (
            self.native
            if given.scratch is not None and plane.dtype == torch.float32 and plane.is_contiguous()
            else None
        )
        if native is None:
            super().write_probs(given, plane, rows)
        else:
            native.write_probs(given, plane, rows)


def _one_query_each(segment: AttentionMetadata) -> AttentionMetadata:
    """Drafts under verification become requests of one query each: the CPU's decode kernels know
    no others."""
    if segment.exact or segment.tokens == len(segment):
        return segment
    if segment.scratch is None:
        segment.scratch = segment.by_token()
    return segment.scratch


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _least_id(ids: Tensor, slots: int) -> int:
    """Of a step's picks, 0 where there are none. Raises IndexError."""
    low, high = (int(end) for end in ids.aminmax()) if ids.numel() else (0, 0)
    if low < -1 or high >= slots:
        raise unknown_expert(low if low < -1 else high, slots)
    return low


def _bytes(data: Tensor) -> int:
    return data.numel() * data.element_size()


class DecodeIndex:
    """Pages of every request side by side, and which positions lie within its length. Built once a
    step.

    pages [R * P] flat; `length` the longest; `mask` [R, 1, 1, L] bool, None where every request
    fills all L positions.
    """

    def __init__(self, segment: AttentionMetadata, page_size: int):
        self.rows = len(segment)
        self.length = max(segment.max_kv_lens)
        self.pages = segment.tables[:, : -(-self.length // page_size)].reshape(-1)
        self.mask: Tensor | None = None
        if min(segment.max_kv_lens) < self.length or not segment.exact:
            within = (
                torch.arange(self.length, device=segment.kv_lens.device) < segment.kv_lens[:, None]
            )
            self.mask = within[:, None, None]
            self.beyond = ~within


def _decode_index(segment: AttentionMetadata, plane: Tensor) -> DecodeIndex | None:
    """The index of a segment in which every request has one query token, else None."""
    if segment.tokens != len(segment):
        return None
    if segment.scratch is None:
        segment.scratch = DecodeIndex(segment, plane.shape[1])
    return segment.scratch


def _entries(plane: Tensor, index: DecodeIndex) -> Tensor:
    """[R, L, *shape]: every request's cache, zero beyond its length (a masked NaN would still
    spoil the sum)."""
    found = plane.index_select(0, index.pages).view(index.rows, -1, *plane.shape[2:])[
        :, : index.length
    ]
    if index.mask is not None:
        found.masked_fill_(index.beyond.view(*index.beyond.shape, *(1,) * (found.dim() - 2)), 0)
    return found


def _unpack_latent(rows: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """reference.unpack_latent by table, the same bits."""
    _, scales, rope = reference.latent_parts(rows, rank, dtype)
    wide = _wide(rows[..., :rank])
    wide *= scales.repeat_interleave(reference.ACTIVATION_BLOCK, -1)[..., :rank]
    return torch.cat((wide.to(dtype), rope), -1)


def _wide(data: Tensor) -> Tensor:
    """Numbers of an 8-bit cache in fp32, e4m3 by table."""
    if data.dtype == torch.int8:
        return data.float()
    return E4M3.index_select(0, data.reshape(-1).int()).view(data.shape)


def _pages_read(segment: AttentionMetadata, page: int) -> tuple[Tensor, Tensor]:
    """The pages of a segment [R * P], and block tables [R, P] where these stand side by side."""
    tables = segment.tables[:, : -(-max(segment.max_kv_lens) // page)]
    return tables.reshape(-1), torch.arange(tables.numel()).view(tables.shape)


def _dequantized_pages(
    plane: Tensor, segment: AttentionMetadata, rank: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The pages of a segment side by side in `dtype`, [R * P, page, C + rope], and their block
    tables [R, P]."""
    pages, tables = _pages_read(segment, plane.shape[1])
    return _unpack_latent(plane[pages], rank, dtype), tables


def _widened_pages(
    k_plane: Tensor, v_plane: Tensor, scales: Tensor, segment: AttentionMetadata, dtype: torch.dtype
) -> tuple[Tensor, Tensor, AttentionMetadata]:
    """The pages of a segment side by side in `dtype`, [R * P, page, G, D] each, and the segment
    that finds them there."""
    pages, tables = _pages_read(segment, k_plane.shape[1])
    both = scales[pages]
    k, v = (
        (_wide(plane[pages]) * both[..., i, None]).to(dtype)
        for i, plane in enumerate((k_plane, v_plane))
    )
    where = AttentionMetadata(
        tables, segment.kv_lens, segment.query_lens, segment.max_kv_lens, segment.exact
    )
    return k, v, where


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """torch's fused attention on [batch, heads, length, D]. It wants values as wide as keys:
    they are padded, then cut."""
    width = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)[
        ..., :width
    ]


def _alike(segment: AttentionMetadata) -> bool:
    """All requests bring as many queries to as many cached entries: one batched call serves
    them."""
    return len(set(segment.query_lens)) == 1 == len(set(segment.max_kv_lens))


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """causal_attention of requests of equal lengths: q [R, Q, H, D], k [R, L, G, D], v [R, L, G,
    Dv] to [R, Q, H, Dv]."""
    queries = q.shape[1]
    length = k.shape[1]
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k = k.repeat_interleave(groups, 2)
        v = v.repeat_interleave(groups, 2)
    mask = None
    if 1 < queries < length:
        mask = torch.ones(queries, length, dtype=torch.bool, device=q.device).tril(length - queries)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return _fused(q, k, v, scale, mask, causal=queries == length and queries > 1).transpose(1, 2)


def _each_request(
    native: Native, q: Tensor, k: Tensor, v: Tensor, segment: AttentionMetadata, scale: float
) -> Tensor:
    out = q.new_empty(*q.shape[:2], v.shape[2])
    parts = zip(
        q.split(segment.query_lens),
        k.split(segment.max_kv_lens),
        v.split(segment.max_kv_lens),
        out.split(segment.query_lens),
        strict=True,
    )
    for part in parts:
        native.causal(*part, scale)
    return out


def _gathered_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    flat = ids.flatten()
    rows = x if ids.shape[0] == 1 else x.repeat_interleave(ids.shape[1], 0)
    rows = rows.expand(flat.shape[0], -1)[:, None]
    h = reference.swiglu(torch.bmm(rows, gate_up.index_select(0, flat).transpose(1, 2)))
    y = torch.bmm(h, down.index_select(0, flat).transpose(1, 2)).view(*ids.shape, -1)
    return torch.bmm(weights[:, None], y.float()).squeeze(1).to(x.dtype)


def _dense_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Experts nobody chose get weight 0, one chosen several times the sum of its weights."""
    slots = gate_up.shape[0]
    tokens = x.shape[0]
    table = torch.zeros(tokens, slots, device=x.device).scatter_add_(1, ids, weights)
    h = reference.swiglu(F.linear(x, gate_up.flatten(0, 1)).view(tokens, slots, -1))
    y = torch.bmm(h.transpose(0, 1), down.transpose(1, 2))  # [slots, tokens, hidden]
    return torch.bmm(table[:, None], y.transpose(0, 1).float()).squeeze(1).to(x.dtype)
