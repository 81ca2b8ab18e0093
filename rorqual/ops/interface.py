"""The op table: the pieces a backend may replace. The base class composes the reference; a backend
overrides what it can.

Entries are as coarse as the largest piece some backend fuses (a whole attention prologue, a whole
expert layer), so that models never change when a kernel arrives. Attention entries come in two
shapes: `decode`, where every request has the same small number of query tokens, and `prefill`,
where each request brings its own chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rorqual.config.model import MLAConfig, MoEConfig
from rorqual.ops import reference, rng
from rorqual.ops.activation import Activation, hidden_of
from rorqual.ops.deferred_sum import DeferredMoESum, NormInput
from rorqual.ops.reference import Distribution, ExpertWeights, RouterWeights, Weight
from rorqual.ops.stretch import SCORES

Replay = Callable[[], Tensor]  # computes what was captured once more


class AttentionMetadata:
    """Where some requests of a step find their queries and their cache. Built once a step, used by
    every layer.

    tables [R, pages] int64 block tables; kv_lens [R] int64 cached entries after this step's tokens
    are written; query_lens, max_kv_lens host tuples: exact query lengths, and KV lengths: equal to
    kv_lens where `exact`, else upper bounds (while speculative steps are in flight nobody but the
    device knows how many tokens were accepted).
    """

    def __init__(
        self,
        tables: Tensor,
        kv_lens: Tensor,
        query_lens: tuple[int, ...],
        max_kv_lens: tuple[int, ...],
        exact: bool = True,
    ):
        self.tables = tables
        self.kv_lens = kv_lens
        self.query_lens = query_lens
        self.max_kv_lens = max_kv_lens
        self.exact = exact
        self.tokens = sum(query_lens)
        self.scratch: Any = None  # whatever a backend derives once a step: masks, tile schedules

    def __len__(self) -> int:
        return len(self.query_lens)

    def by_token(self) -> AttentionMetadata:
        """The same queries, each token a request of its own that sees the cache up to itself.
        All requests have equally many."""
        each = self.query_lens[0]
        assert self.tokens == each * len(self), "requests bring different numbers of queries"
        lens = self.kv_lens[:, None] + torch.arange(1 - each, 1, device=self.kv_lens.device)
        bounds = tuple(bound for bound in self.max_kv_lens for _ in range(each))
        return AttentionMetadata(
            self.tables.repeat_interleave(each, 0),
            lens.flatten(),
            (1,) * self.tokens,
            bounds,
            exact=False,
        )

    def part(self, requests: slice) -> AttentionMetadata:
        """Some of the requests, as a segment of their own."""
        bounds = self.max_kv_lens[requests]
        lens = self.kv_lens[requests]
        return AttentionMetadata(
            self.tables[requests], lens, self.query_lens[requests], bounds, self.exact
        )


class Stretch(AttentionMetadata):
    """A piece of one request's cache under all of its queries, as a segment of its own: `size`
    entries from entry `start` on, the first of a page, or as many of them as there are.

    first [1] int64: query i sees the stretch's entries up to first + i, none where that is below 0.
    """

    def __init__(self, whole: AttentionMetadata, request: int, start: int, size: int, page: int):
        here = slice(request, request + 1)
        queries = whole.query_lens[here]
        lens = whole.kv_lens[here] - start
        column = min(start // page, whole.tables.shape[1] - 1)  # a bound may be beyond the table
        tables = whole.tables[here, column:]
        super().__init__(tables, lens.clamp(0, size), queries, (size,), whole.exact)
        self.first = lens - queries[0]


@dataclass
class Share:
    """Requests of a segment that are attended to together; `queries` are theirs among all. One
    whole segment of as many requests as fit, or the stretches of one request that does not."""

    queries: slice
    segments: list[AttentionMetadata]


def shares_of(segment: AttentionMetadata, tokens: int, page: int) -> list[Share]:
    """The segment's requests in order, at most `tokens` cached entries (whole pages) a segment.

    By bounds that the host knows, so that nothing waits for the device. Where all fit, the segment
    is its own only share, and what a backend derived of it stays."""
    if sum(segment.max_kv_lens) <= tokens:
        return [Share(slice(None), [segment])]
    shares = []
    begin = 0
    while begin < len(segment):
        end = begin
        held = 0
        while end < len(segment) and held + segment.max_kv_lens[end] <= tokens:
            held += segment.max_kv_lens[end]
            end += 1
        if end > begin:
            pieces = [segment.part(slice(begin, end))]
        else:
            pieces = _stretches(segment, begin, tokens, page)
            end = begin + 1
        before = sum(segment.query_lens[:begin])
        queries = slice(before, before + sum(segment.query_lens[begin:end]))
        shares.append(Share(queries, pieces))
        begin = end
    return shares


def _stretches(
    segment: AttentionMetadata, request: int, tokens: int, page: int
) -> list[AttentionMetadata]:
    bound = segment.max_kv_lens[request]
    starts = range(0, bound, tokens)
    return [Stretch(segment, request, at, min(tokens, bound - at), page) for at in starts]


@dataclass
class TokenPlaces:
    """Where a step's tokens stand: in their texts, by the angles that rotate them, cos and sin [T,
    rope/2] fp32; and in the cache, by the `slots` [T] int64 that take their entries, page *
    page_size + offset. Made once a step, read by every layer."""

    cos: Tensor
    sin: Tensor
    slots: Tensor
    scratch: Any = None  # whatever a backend derives once a step


@dataclass
class SplitLatent:
    """A layer's latent cache in two planes, for backends that want it so (`splits_latents`):
    latent [pages, page, C] in the cache's dtype and rope [pages, page, rope] in the activations'.

    scale [1] fp32: an int8 latent is its number times this, one scale for the whole layer. Queries
    that meet such a cache are rounded to int8 as well, by token and head, but for their rope part.
    """

    latent: Tensor
    rope: Tensor
    scale: Tensor | None = None

    @property
    def quant_scale(self) -> Tensor:
        """What a latent is multiplied by to become a number of the cache."""
        assert self.scale is not None
        return self.scale.reciprocal()

    def packed(self, latent: Tensor) -> Tensor:
        """Latents [T, C] in the cache's numbers."""
        if self.scale is None:
            return latent
        return (latent.float() * self.quant_scale).round().clamp(-128, 127).to(torch.int8)


# A layer's latent cache: a Tensor, or SplitLatent. A backend is given the kind it asks for.
LatentCache = Any


@dataclass
class PartialAttention:
    """Attention over some of the keys of queries: `out` [Q, H, Dv] fp32 is what those alone give,
    `total` [Q, H] fp32 the log-sum-exp of their scores."""

    out: Tensor
    total: Tensor

    @staticmethod
    def over_nothing(q: Tensor, width: int) -> PartialAttention:
        """For queries q [Q, H, D] and values of `width` columns."""
        return PartialAttention(
            q.new_zeros(*q.shape[:2], width, dtype=torch.float32),
            q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32),
        )


@dataclass
class GQAWeights:
    """The norms of one layer's queries and keys, one weight a column of a head, as gqa_prologue
    takes them."""

    q_norm: Tensor
    k_norm: Tensor
    eps: float


@dataclass
class MLAWeights:
    """One layer's attention weights, as mla_prologue and mla_absorbed take them.

    down [q_lora or H qk, + C + rope; hidden] makes the query (or its latent), the key-value latent
    and the rope key in one product; q_norm and q_b are None without a query latent. kv_b [H (nope +
    v), C] in the activations' dtype once the model is finalized.
    """

    config: MLAConfig
    down: Weight
    down_bias: Tensor | None
    q_norm: Tensor | None
    q_b: Weight | None
    kv_norm: Tensor
    kv_b: Weight
    eps: float
    interleaved: bool
    # the materialized form reads the query input; the others have no use for it
    keep_query_input: bool = False
    quantize_output: bool = False  # an fp8 product takes what attention gives
    layer: int = 0  # which layer of the model
    scratch: Any = None  # whatever a backend derives once a layer

    @property
    def query_rows(self) -> int:
        return (
            self.config.num_heads * self.config.qk_dim
            if self.q_b is None
            else self.config.q_lora_rank or 0
        )

    @property
    def up(self) -> Tensor:
        """kv_b by head: [H, nope + v, C]."""
        return self.kv_b.data.view(self.config.num_heads, -1, self.config.kv_lora_rank)

    @property
    def w_uk(self) -> Tensor:
        """[H, nope, C]"""
        return self.up[:, : self.config.nope_dim]

    @property
    def w_uv(self) -> Tensor:
        """[H, C, v]"""
        return self.up[:, self.config.nope_dim :].transpose(1, 2)


class Ops:
    """The reference backend. Argument shapes are those of rorqual.ops.reference."""

    name = "reference"
    splits_latents = False  # latents and rope keys are cached in planes of their own
    static_cache_scales = False  # an int8 latent has one scale a layer, from the checkpoint

    @property
    def dispatch_combine(self) -> Any:
        """Operators that carry rows to experts and back (ops/npu/dispatch.py), or None."""
        return None

    def side_stream(self) -> AbstractContextManager[Any]:
        """The context in which shared experts are computed while others' rows travel: a stream of
        their own where a backend has one."""
        return nullcontext()

    def prepare_weight(self, weight: Weight, name: str) -> None:
        """Once the weights are there, and before on a model without memory: how this backend
        wants a linear layer's matrix, or a stack of experts', to lie. Raises ConfigError where it
        has no product for it; `name` says whose it is."""

    def prepare_experts(self, w: ExpertWeights, name: str) -> None:
        """The same for the two matrices of a layer's experts."""
        for weight in (w.gate_up, w.down):
            self.prepare_weight(weight, name)

    def prepare_mla(self, w: MLAWeights, hidden: int) -> None:
        """The same for the matrices of one layer's prologue."""

    def compiling(self) -> AbstractContextManager[None]:
        """Inside, kernels that a device compiles at their first launch are compiled and do not
        run; what they would write is zero."""
        return nullcontext()

    def opaque(self, entry: str, *weights: Tensor) -> bool:
        """Whether a kernel of this backend serves `entry` for these weights, into which
        torch.compile must not look (ops/custom_ops.py)."""
        return False

    def draw_normal(self, view: Tensor, key: int, std: float, first: int, width: int) -> None:
        """Random weights for view [rows, columns], a window of a matrix `width` wide: see
        ops/rng.py."""
        rng.draw_normal(view, key, std, first, width)

    @property
    def captures_calls(self) -> bool:
        """Whether there is a `capture_calls`."""
        return False

    def capture_calls(
        self, work: Callable[[], Tensor], memory: Tensor
    ) -> tuple[Tensor, Replay | None]:
        """The result of `work`, and what computes it again where it was from inputs where they
        were, without Python in between; None where that cannot be. memory [bytes] uint8 holds the
        tensors that `work` allocates, so that one `Replay` with this memory is in use at a time."""
        raise AssertionError(f"the {self.name} backend captures no calls")

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows `ids` [T] of table [vocabulary, hidden], on the device of `ids`. A table in host
        memory costs a wait for the ids here."""
        if table.device == ids.device:
            return table.index_select(0, ids)
        return table.index_select(0, ids.to(table.device)).to(ids.device)

    def beside(self, a: Tensor, b: Tensor) -> Tensor:
        """[T, A] and [T, B] as the columns of one tensor."""
        return torch.cat((a, b), -1)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.norm(x, weight, eps)

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        quantize_output: bool = False,
    ) -> tuple[Activation, Tensor]:
        """(norm(x + residual), x + residual). quantize_output: fp8 products follow, for which a
        backend may quantize the norm in the same kernel and return a NormOutput; values may differ
        by the order of a sum."""
        return reference.add_norm(x, residual, weight, eps)

    def add_norm_for_router(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        quantize_output: bool = False,
    ) -> tuple[Activation, Tensor]:
        """`add_norm` before `experts_deferred` or `routed_experts`: a backend may leave the norm to
        the router. The sum may be read once the rows have been asked for."""
        return self.add_norm(x, residual, weight, eps, quantize_output)

    def sum_add_norm(
        self,
        gave: DeferredMoESum,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        quantize_output: bool = False,
    ) -> tuple[Activation, Tensor]:
        """`add_norm` of the sum of what experts gave."""
        return self.add_norm(gave.total(), residual, weight, eps, quantize_output)

    def linear(self, x: Activation, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return reference.linear(hidden_of(x), weight, bias)

    def swiglu(self, x: Tensor) -> Tensor:
        return reference.swiglu(x)

    def mlp(self, x: Activation, gate_up: Weight, down: Weight) -> Tensor:
        return self.linear(self.swiglu(self.linear(x, gate_up)), down)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        return reference.rope(x, cos, sin, interleaved)

    def write_cache(self, plane: Tensor, slots: Tensor, values: Tensor) -> None:
        reference.write_cache(plane, slots, values)

    def write_latent(self, plane: Tensor, slots: Tensor, entries: Tensor, rank: int) -> None:
        """Cache entries [T, C + rope] to a latent plane at `slots`. A plane of bytes is an 8-bit
        cache, its rows those of `pack_latent`."""
        packed = reference.in_8_bits(plane)
        self.write_cache(
            plane, slots, reference.pack_latent(entries, rank, plane.dtype) if packed else entries
        )

    def heads_matmul(self, x: Tensor, matrices: Tensor) -> Tensor:
        """x [T, H, a] times matrices [H, a, b], head by head: [T, H, b]. The absorb products of
        MLA."""
        return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)

    # ---- attention

    def mla_prologue(
        self,
        x: Activation,
        w: MLAWeights,
        places: TokenPlaces,
        plane: LatentCache | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """From hidden states x [T, hidden] to (query input [T, q_lora or hidden], queries [T, H,
        qk] rotated, cache entries).

        Entries [T, C + rope] go to the latent `plane`; without a plane they are returned instead.
        """
        query, entries = self.mla_down(x, w, places.cos, places.sin)
        query_input = hidden_of(x) if w.q_b is None else query
        return query_input, *self.mla_up(query, entries, w, places, plane)

    def mla_down(
        self, x: Activation, w: MLAWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The half of the prologue that knows no heads: from x [T, hidden] to (the query's
        latent, normed [T, q_lora], cache entries [T, C + rope]: latent normed, key rotated).
        Without a query latent the first are the queries as they are, [T, H qk]."""
        mla = w.config
        query, latent, key = self.linear(x, w.down, w.down_bias).split(
            (w.query_rows, mla.kv_lora_rank, mla.rope_dim), -1
        )
        if w.q_norm is not None:
            query = self.norm(query, w.q_norm, w.eps)
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
        """The other half, head by head: from what mla_down returns to (queries [T, H, qk]
        rotated, cache entries as mla_prologue has them). Rows of `query` and of `entries` may
        lie apart."""
        mla = w.config
        if w.q_b is not None:
            query = self.linear(query, w.q_b)
        nope, turned = query.unflatten(-1, (mla.num_heads, mla.qk_dim)).split(
            (mla.nope_dim, mla.rope_dim), -1
        )
        q = torch.cat((nope, self.rope(turned, places.cos, places.sin, w.interleaved)), -1)
        if plane is None:
            return q, entries
        if isinstance(plane, SplitLatent):
            latent, key = entries.split((mla.kv_lora_rank, mla.rope_dim), -1)
            self.write_cache(plane.latent, places.slots, plane.packed(latent))
            self.write_cache(plane.rope, places.slots, key)
        else:
            self.write_latent(plane, places.slots, entries, mla.kv_lora_rank)
        return q, None

    def mla_decode(
        self,
        x: Activation,
        w: MLAWeights,
        places: TokenPlaces,
        plane: LatentCache,
        segment: AttentionMetadata,
        scale: float,
    ) -> Activation:
        """Prologue and absorbed attention of a step whose tokens are all of one segment: hidden
        states [T, hidden] to heads side by side, [T, H v]."""
        _, q, _ = self.mla_prologue(x, w, places, plane)
        return self.mla_absorbed(q, w, plane, segment, scale)

    def mla_absorbed(
        self,
        q: Tensor,
        w: MLAWeights,
        plane: LatentCache,
        segment: AttentionMetadata,
        scale: float,
    ) -> Activation:
        """Absorbed attention over the latent cache: queries [T, H, qk] to heads side by side,
        [T, H v]. W_UK moves to the query, W_UV behind the sum, and neither rope nor latent parts
        are concatenated."""
        nope = w.config.nope_dim
        latent = self.latent_attention(
            self.heads_matmul(q[..., :nope], w.w_uk), q[..., nope:], plane, segment, scale
        )
        return self.joined_heads(latent, w)

    def joined_heads(self, latent: Tensor, w: MLAWeights) -> Activation:
        """From sums of latents [T, H, C] to heads side by side, [T, H v]. A backend may quantize
        them in the same kernel where `quantize_output` of the weights says so."""
        return self.heads_matmul(latent, w.w_uv).flatten(1)

    def gqa_prologue(
        self, qkv: Tensor, w: GQAWeights, places: TokenPlaces, planes: tuple[Tensor, ...]
    ) -> Tensor:
        """qkv [T, H + 2 G, D] to queries [T, H, D]: per-head norms and rope (halves) on queries
        and keys; keys and values go to the `planes` at their slots: (K, V), and of an 8-bit
        cache (`pack_heads`) its scales [pages, page, G, 2] fp32, of a key and of a value."""
        groups = planes[0].shape[2]
        heads = qkv.shape[1] - 2 * groups
        q, k, v = qkv.split((heads, groups, groups), 1)
        qk = torch.cat((self.norm(q, w.q_norm, w.eps), self.norm(k, w.k_norm, w.eps)), 1)
        q, k = self.rope(qk, places.cos, places.sin, interleaved=False).split((heads, groups), 1)
        self.write_heads(planes, places.slots, k, v)
        return q

    def write_heads(self, planes: tuple[Tensor, ...], slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Keys and values [T, G, D] to `planes` at `slots`, as gqa_prologue has them."""
        if len(planes) > 2:
            k, k_scale = reference.pack_heads(k, planes[0].dtype)
            v, v_scale = reference.pack_heads(v, planes[1].dtype)
            self.write_cache(planes[2], slots, torch.stack((k_scale, v_scale), -1))
        self.write_cache(planes[0], slots, k)
        self.write_cache(planes[1], slots, v)

    def attention(
        self,
        q: Tensor,
        k_plane: Tensor,
        v_plane: Tensor,
        segment: AttentionMetadata,
        scale: float,
        scales: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of cached K [pages, page, G, D] and V [pages, page, G, Dv]; q [T, H,
        D] to [T, H, Dv]. `scales`: those of an 8-bit cache, as gqa_prologue writes them."""
        lens = segment.kv_lens.tolist()
        out = []
        for i, part in enumerate(q.split(segment.query_lens)):
            k = reference.read_cache(k_plane, segment.tables[i], lens[i])
            v = reference.read_cache(v_plane, segment.tables[i], lens[i])
            if scales is not None:
                k_scale, v_scale = reference.read_cache(scales, segment.tables[i], lens[i]).unbind(
                    -1
                )
                k = reference.unpack_heads(k, k_scale, q.dtype)
                v = reference.unpack_heads(v, v_scale, q.dtype)
            out.append(reference.causal_attention(part, k, v, scale))
        return torch.cat(out)

    def latent_attention(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        plane: LatentCache,
        segment: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        """MLA in the absorbed form over a latent cache [pages, page, C + rope] or an 8-bit one:
        each head scores q_latent [T, H, C] against the latent and q_rope [T, H, rope] against
        the shared rope key, and sums latents: [T, H, C]. Nothing is concatenated."""
        rank = q_latent.shape[-1]
        if isinstance(plane, SplitLatent) and plane.scale is not None:
            q_latent = reference.rounded(q_latent.flatten(0, 1), "int8_token").view(q_latent.shape)
        queries = torch.cat((q_latent.to(q_rope.dtype), q_rope), -1)
        entries = self.latent_entries(plane, segment, rank, q_rope.dtype)[:, None]
        return self.dense_attention(queries, entries, entries[..., :rank], segment, scale)

    def dense_attention(
        self, q: Tensor, k: Tensor, v: Tensor, segment: AttentionMetadata, scale: float
    ) -> Tensor:
        """Attention over K [sum of KV lengths, G, D] and V packed request after request, as
        `gather` returns them."""
        lens = segment.kv_lens.tolist()
        parts = zip(q.split(segment.query_lens), k.split(lens), v.split(lens), strict=True)
        return torch.cat([reference.causal_attention(*part, scale) for part in parts])

    def shares(self, segment: AttentionMetadata, tokens: int, page: int) -> list[Share]:
        """As `shares_of`: how to attend to a segment, at most `tokens` cached entries at once."""
        return shares_of(segment, tokens, page)

    def stretch_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        stretch: Stretch,
        scale: float,
        found: PartialAttention,
    ) -> None:
        """Attention over one stretch, packed as `gather` returns it, joined with that over others.

        q [Q, H, D], k [L, G, D], v [L, G, Dv]. `found` is what the stretches before gave, and is
        brought up to date.

        Here by blocks of heads and queries: all scores would take more than keys and values do."""
        length = int(stretch.kv_lens)
        if not length:
            return
        first = int(stretch.first)
        share = q.shape[1] // k.shape[1]
        width = q.shape[2] + v.shape[2]
        longer = max(length, width)  # a block of results must not grow where there are few keys
        rows = max(1, min(q.shape[0], SCORES // longer))
        groups = max(1, SCORES // max(longer * rows * share, length * width))
        for group in range(0, k.shape[1], groups):
            some = slice(group, group + groups)
            heads = slice(group * share, (group + groups) * share)
            keys = k[:length, some].float()
            values = v[:length, some].float()
            for row in range(0, q.shape[0], rows):
                at = (slice(row, row + rows), heads)
                more = reference.partial_attention(q[at], keys, values, scale, first + row)
                found.out[at], found.total[at] = reference.join_attention(
                    found.out[at], found.total[at], *more
                )

    def decompressed_attention(
        self,
        q: Tensor,
        keys: tuple[Tensor, Tensor],
        v: Tensor,
        segment: AttentionMetadata,
        scale: float,
        found: PartialAttention | None = None,
    ) -> Tensor:
        """`dense_attention` over keys whose last columns all heads share, as they come from cached
        latents: keys are [N, H, nope] and [N, rope]. With `found` it is `stretch_attention`, and
        returns what was found so far, in fp32."""
        k = reference.whole_keys(*keys)
        if found is None:
            return self.dense_attention(q, k, v, segment, scale)
        assert isinstance(segment, Stretch)
        self.stretch_attention(q, k, v, segment, scale, found)
        return found.out

    def gather(self, plane: Tensor, segment: AttentionMetadata) -> Tensor:
        """All cached entries of the segment's requests, packed: [sum of KV lengths, *shape]."""
        lens = segment.kv_lens.tolist()
        return torch.cat(
            [
                reference.read_cache(plane, table, n)
                for table, n in zip(segment.tables, lens, strict=True)
            ]
        )

    def latent_entries(
        self, plane: LatentCache, segment: AttentionMetadata, rank: int, dtype: torch.dtype
    ) -> Tensor:
        """All cached latents and rope keys of the segment's requests, packed as by `gather`:
        [sum of KV lengths, C + rope] in `dtype`."""
        if isinstance(plane, SplitLatent):
            latent = self.gather(plane.latent, segment)
            if plane.scale is not None:
                latent = latent.float() * plane.scale
            return torch.cat((latent.to(dtype), self.gather(plane.rope, segment).to(dtype)), -1)
        rows = self.gather(plane, segment)
        return (
            reference.unpack_latent(rows, rank, dtype)
            if reference.in_8_bits(plane)
            else rows.to(dtype)
        )

    # ---- experts

    def weights_changed(self, weights: Sequence[Tensor]) -> None:
        """Their contents are others now: forget what was made from them."""

    def prepare_router_weight(self, gate: Tensor, dtype: torch.dtype) -> Tensor:
        """How a router's matrix, as loaded, is kept for hidden states in `dtype`: as it is, or
        in a type that holds all its values."""
        return gate

    def router(self, x: Tensor, w: RouterWeights) -> tuple[Tensor, Tensor]:
        """Gate product and choice: x [T, hidden] to (ids [T, K + fused shared experts] int64,
        weights of that shape, fp32). Logits are fp32, or where the router is not kept in fp32 of
        the gate's type.

        Where the router is not kept in fp32 (Qwen3), the weights are rounded to x's dtype.
        """
        moe = w.config
        dtype = torch.float32 if moe.router_fp32 else w.gate.dtype
        logits = torch.nn.functional.linear(x.to(dtype), w.gate.to(dtype))
        ids, weights = self.route(logits, w.bias, moe)
        weights = weights if moe.router_fp32 else weights.to(x.dtype).float()
        return reference.with_shared(ids, weights, moe.num_experts, w.num_fused_shared_experts)

    def route(self, logits: Tensor, bias: Tensor | None, moe: MoEConfig) -> tuple[Tensor, Tensor]:
        return reference.route(logits, bias, moe)

    @property
    def fuses_shared_experts(self) -> bool:
        """Whether shared experts are to stand among the routed ones where they can
        (layers/moe.py)."""
        return False

    def experts(
        self,
        x: Activation,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
        base: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum of each token's experts (reference.experts), and `base` [T, hidden]
        added to it: what shared experts gave."""
        y = reference.experts(hidden_of(x), ids, weights, w)
        return y if base is None else y + base

    def routed_experts(
        self, x: Activation, router: RouterWeights, w: ExpertWeights, base: Tensor | None = None
    ) -> Tensor:
        """`router` and `experts` in one, where all experts are here, by their logical number,
        and nobody else asks for ids and weights."""
        ids, weights = self.router(hidden_of(x), router)
        return self.experts(x, ids, weights, w, base)

    def experts_deferred(
        self, x: Activation, router: RouterWeights, w: ExpertWeights, base: Tensor | None = None
    ) -> NormInput:
        """`routed_experts` where `sum_add_norm` reads the result: a backend may leave the sum to
        that."""
        return self.routed_experts(x, router, w, base)

    def experts_fp8(
        self,
        x: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
    ) -> Tensor:
        """`experts` of hidden states that travelled as e4m3, scale [T, hidden/128]; returns [T,
        hidden] in `dtype`. Where they meet fp8 weights a backend may take them as they are,
        instead of widening and rounding them again."""
        return self.experts(reference.dequantize_activation(x, scale, dtype), ids, weights, w)

    # ---- requests by slot

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
        return reference.decode_rows(
            length, last_token, drafts, tables, slots, num_speculative_tokens, page_size
        )

    def verify_drafts(
        self,
        tokens: Tensor,
        drafts: Tensor,
        num_drafts: Tensor,
        slots: Tensor,
        taken: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return reference.verify_drafts(tokens, drafts, num_drafts, slots, taken)

    def commit_tokens(
        self,
        last_token: Tensor,
        length: Tensor,
        slots: Tensor,
        lens: Tensor,
        tokens: Tensor,
        num_accepted: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return reference.commit_tokens(last_token, length, slots, lens, tokens, num_accepted)

    # ---- sampling

    def uniform(self, seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
        """Random numbers in [0, 1) that depend on (seed, position, stream) alone: int64 of one
        shape to fp64 of that shape. Exact."""
        return rng.uniform(seeds, positions, stream)

    def argmax(self, logits: Tensor) -> Tensor:
        """[M, V] to [M] int64: the token with the greatest logit, one of them where several are
        equal."""
        return logits.argmax(-1)

    def distribution(self, logits: Tensor, settings: Tensor, filters: bool) -> Distribution:
        return reference.distribution(logits, settings, filters)

    def sample_from(self, given: Distribution, numbers: Tensor) -> Tensor:
        return reference.sample_from(given, numbers)

    def sample_residual(
        self,
        given: Distribution,
        rows: Tensor,
        numbers: Tensor,
        refused: Tensor,
        q: Tensor | None = None,
        q_rows: Tensor | None = None,
    ) -> Tensor:
        return reference.sample_residual(given, rows, numbers, refused, q, q_rows)

    def write_probs(self, given: Distribution, plane: Tensor, rows: Tensor) -> None:
        reference.write_probs(given, plane, rows)
