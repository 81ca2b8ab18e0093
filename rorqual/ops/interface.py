"""The op table: the ops that a backend may replace. The base class composes the reference; a
backend overrides what it can.

Entries are as coarse as the largest piece that some backend fuses (a whole attention prologue, a
whole expert layer), so models do not change when a kernel is added. Attention has two kinds of
segments: `decode`, where all requests have the same small number of query tokens, and `prefill`,
where each request has its own chunk.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rorqual.config.model import MLAConfig, MoEConfig
from rorqual.ops import reference, rng
from rorqual.ops.activation import Activation, hidden_of
from rorqual.ops.deferred_sum import DeferredMoESum, NormInput
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.rank_rows import (
    RankBlocks,
    RankParts,
    add_partial_sums,
    pack,
    rank_blocks,
    unpack_local,
)
from rorqual.ops.reference import Distribution, ExpertWeights, RouterWeights, Weight
from rorqual.ops.stretch import SCORES

# Up to so many (token, expert) pairs a backend's `experts` may leave the rows of fp8 experts wide.
DIRECT_FP8_PAIRS = 8
Replay = Callable[[], Tensor]  # computes what was captured once more


class AttentionMetadata:
    """Block tables and lengths of some requests of a step. Built once per step, used by every
    layer.

    tables [R, pages] int64: block tables. kv_lens [R] int64: cached entries, including this step's
    tokens. query_lens, max_kv_lens: host tuples; query lengths are exact, KV lengths equal kv_lens
    if `exact`, else they are upper bounds (while speculative steps are in flight only the device
    knows how many tokens were accepted). Of prompts that are captured both are bounds, and only
    query_starts, key_starts and kv_lens count (`Ops.captures_prompts`).

    What the builder knows already, else None: query_starts, key_starts [R + 1] int64, sums of
    query_lens and of max_kv_lens; key_slots [sum of max_kv_lens] int64, the cache positions of all
    keys in request order.

    may_share: block tables of several requests may begin with the same pages; a backend may then
    read these once. The result does not depend on it.
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
        self.query_starts: Tensor | None = None
        self.key_starts: Tensor | None = None
        self.key_slots: Tensor | None = None
        self.may_share = False
        self.scratch: Any = None  # what a backend derives once per step: masks, tile schedules

    def __len__(self) -> int:
        return len(self.query_lens)

    def by_token(self) -> AttentionMetadata:
        """The same queries with each token as a request of its own, which sees the cache up to
        itself. All requests must have equally many queries."""
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
        """Some of the requests, as a segment."""
        bounds = self.max_kv_lens[requests]
        lens = self.kv_lens[requests]
        return AttentionMetadata(
            self.tables[requests], lens, self.query_lens[requests], bounds, self.exact
        )

    def between(self, start: int, stop: int) -> AttentionMetadata:
        """The queries from `start` to `stop`, as a segment. Of a request that is cut, the queries
        after it are not cached yet."""
        starts = [*accumulate(self.query_lens, initial=0)]
        first = bisect_right(starts, start) - 1
        last = bisect_left(starts, stop)
        found = self.part(slice(first, last))
        before = start - starts[first]
        after = starts[last] - stop
        if before or after:
            assert self.exact, "a request that decodes is cut"
            queries = list(found.query_lens)
            queries[0] -= before
            queries[-1] -= after
            found.query_lens = tuple(queries)
            found.tokens = stop - start
        if after:
            *whole, cut = found.max_kv_lens
            found.max_kv_lens = (*whole, cut - after)
            found.kv_lens = torch.cat((found.kv_lens[:-1], found.kv_lens[-1:] - after))
        return found


class Stretch(AttentionMetadata):
    """A chunk of one request's cached context, with all of its queries: up to `size` entries from
    entry `start` on, which is the first of a page.

    first [1] int64: query i sees the stretch's entries up to first + i; none if that is negative.
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
    """Requests of a segment whose attention is computed together; `queries`: their rows among all
    of the segment's. `segments`: one, with as many requests as fit, or the stretches of a single
    request that does not fit."""

    queries: slice
    segments: list[AttentionMetadata]


def shares_of(segment: AttentionMetadata, tokens: int, page: int) -> list[Share]:
    """Split a segment, in order, into segments of at most `tokens` cached entries (whole pages).

    Uses the host's bounds, so it does not wait for the device. If everything fits, the only share
    is the segment itself, with the data that a backend has derived."""
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
    """Positions of a step's tokens: rotation angles cos and sin [T, rope/2] fp32, and the slot
    mapping `slots` [T] int64, page * page_size + offset. Built once per step, read by every
    layer."""

    cos: Tensor
    sin: Tensor
    slots: Tensor
    scratch: Any = None  # what a backend derives once per step


@dataclass
class SplitLatent:
    """A layer's latent cache in two planes, for backends with `splits_latents`: latent [pages,
    page, C] in the cache's dtype and rope [pages, page, rope] in the activations'.

    scale [1] fp32: one scale for the layer's int8 latents. Queries are then rounded to int8 as
    well, per token and head, except for their rope part.
    """

    latent: Tensor
    rope: Tensor
    scale: Tensor | None = None

    @property
    def quant_scale(self) -> Tensor:
        """The factor from latents to cached numbers: 1 / scale."""
        assert self.scale is not None
        return self.scale.reciprocal()

    def packed(self, latent: Tensor) -> Tensor:
        """Latents [T, C] quantized as the cache holds them."""
        if self.scale is None:
            return latent
        return (latent.float() * self.quant_scale).round().clamp(-128, 127).to(torch.int8)


# A layer's latent cache: a Tensor, or a SplitLatent for backends with `splits_latents`.
LatentCache = Any


@dataclass
class PartialAttention:
    """Attention over some of the keys: `out` [Q, H, Dv] fp32 over those alone, and `total` [Q, H]
    fp32, the log-sum-exp of their scores."""

    out: Tensor
    total: Tensor

    @staticmethod
    def over_no_keys(q: Tensor, width: int) -> PartialAttention:
        """Over no keys, for queries q [Q, H, D] and values of `width` columns."""
        return PartialAttention(
            q.new_zeros(*q.shape[:2], width, dtype=torch.float32),
            q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32),
        )


@dataclass
class GQAWeights:
    """Weights [D] of one layer's query and key norms, for gqa_prologue."""

    q_norm: Tensor
    k_norm: Tensor
    eps: float


@dataclass
class MLAWeights:
    """One layer's attention weights, for mla_prologue and mla_absorbed.

    down [(q_lora or H qk) + C + rope, hidden] projects to the query (or its latent), the key-value
    latent and the rope key in one product. q_norm and q_b are None without a query latent. kv_b [H
    (nope + v), C] is in the activations' dtype after the model is finalized.
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
    # return the input of the query projection, which only the materialized form reads
    keep_query_input: bool = False
    # how (config.quant.ACTIVATIONS), if an fp8 product reads attention's output
    quantize_output: str | None = None
    layer: int = 0  # index in the model
    scratch: Any = None  # what a backend derives once per layer

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
    splits_latents = False  # latents and rope keys are cached in separate planes
    static_cache_scales = False  # an int8 latent has one scale a layer, from the checkpoint

    @property
    def dispatch_combine(self) -> Any:
        """The device's dispatch and combine operators (ops/npu/dispatch.py), or None."""
        return None

    def captures_prompts(self, width: int) -> bool:
        """Whether `attention` and `decompressed_attention`, for prompts and heads of up to `width`
        columns, read lengths and the starts that the segment knows from the device alone, and take
        the host's lengths for bounds. Captured once, they then compute any prompts within these."""
        return False

    def side_stream(self) -> AbstractContextManager[Any]:
        """Context in which shared experts are computed while rows are in flight: a second stream,
        if the backend has one."""
        return nullcontext()

    def computing(self, decodes: bool) -> AbstractContextManager[Any]:
        """Context of a step, in the thread that launches it. decodes: it has no prompts."""
        return nullcontext()

    def delay(self, seconds: float) -> None:
        """What is launched next starts that much later, where it does not run at once."""

    def beside_messages(self) -> AbstractContextManager[Any]:
        """Context in which micro-batches are computed while messages of a process group are in
        flight, whose kernels need a part of the device."""
        return nullcontext()

    def prepare_weight(self, weight: Weight, name: str) -> None:
        """Convert a linear layer's matrix, or a stack of experts' matrices, to this backend's
        layout. Called after loading, and before on a model on the meta device. Raises ConfigError
        if the backend has no product for it; `name`: of the module, for the message."""

    def prepare_experts(self, w: ExpertWeights, name: str) -> None:
        """`prepare_weight` for the two matrices of a layer's experts."""
        for weight in (w.gate_up, w.down):
            self.prepare_weight(weight, name)

    def prepare_mla(self, w: MLAWeights, hidden: int) -> None:
        """`prepare_weight` for the matrices of one layer's prologue."""

    def compiling(self) -> AbstractContextManager[Callable[[], int] | None]:
        """Inside, kernels that are compiled at their first launch are compiled but not run; their
        outputs are zero. Yields how many different ones were launched so far, None where nothing
        is compiled."""
        return nullcontext()

    def watch_kernels(self, noted: Callable[[str, float], None] | None) -> None:
        """From now on call `noted` with the name of each kernel that this process compiles or loads
        at a launch, and the seconds this took; None: no longer."""

    def kernel_choice(self, device: torch.device) -> str:
        """What decides, besides the package's own files, which kernels are launched there:
        versions, a user's settings."""
        return ""

    def opaque(self, entry: str, *weights: Tensor) -> bool:
        """Whether this backend's `entry` for these weights is a kernel that torch.compile must not
        trace (ops/custom_ops.py)."""
        return False

    def draw_normal(self, view: Tensor, key: int, std: float, first: int, width: int) -> None:
        """Fill view [rows, columns], a window of a matrix with `width` columns, with random
        weights: see ops/rng.py."""
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
        """Rows `ids` [T] of table [vocabulary, hidden], on the device of `ids`. With a table in
        host memory this default waits for the ids."""
        if table.device == ids.device:
            return table.index_select(0, ids)
        return table.index_select(0, ids.to(table.device)).to(ids.device)

    def concat_columns(self, a: Tensor, b: Tensor) -> Tensor:
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
        quantize_output: str | None = None,
    ) -> tuple[Activation, Tensor]:
        """(norm(x + residual), x + residual). quantize_output: fp8 products follow, which
        round their input so (config.quant.ACTIVATIONS), and a backend
        may quantize in the same kernel and return a NormOutput; values may differ by the order of a
        sum."""
        return reference.add_norm(x, residual, weight, eps)

    def add_norm_for_router(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        quantize_output: str | None = None,
    ) -> tuple[Activation, Tensor]:
        """`add_norm` before `experts_deferred` or `routed_experts`: a backend may return a
        PendingNorm and fuse it with the router. Read the returned sum only after the rows."""
        return self.add_norm(x, residual, weight, eps, quantize_output)

    def sum_add_norm(
        self,
        gave: DeferredMoESum,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        quantize_output: str | None = None,
    ) -> tuple[Activation, Tensor]:
        """`add_norm` of a deferred sum over each token's experts."""
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
        """Write cache entries [T, C + rope] to a latent plane at `slots`. An 8-bit plane has rows
        of `pack_latent`."""
        packed = reference.in_8_bits(plane)
        self.write_cache(
            plane, slots, reference.pack_latent(entries, rank, plane.dtype) if packed else entries
        )

    def heads_matmul(self, x: Tensor, matrices: Tensor) -> Tensor:
        """x [T, H, a] times matrices [H, a, b], head by head: [T, H, b]. MLA's absorbed
        products."""
        return torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)

    # ---- attention

    def mla_prologue(
        self,
        x: Activation,
        w: MLAWeights,
        places: TokenPlaces,
        plane: LatentCache | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states x [T, hidden] to (query input [T, q_lora or hidden], rotated queries [T, H,
        qk], cache entries).

        Entries [T, C + rope] are written to the latent `plane`; without a plane they are returned.
        """
        query, entries = self.mla_down(x, w, places.cos, places.sin)
        query_input = hidden_of(x) if w.q_b is None else query
        return query_input, *self.mla_up(query, entries, w, places, plane)

    def mla_down(
        self, x: Activation, w: MLAWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The first half of the prologue, which is independent of heads: x [T, hidden] to (normed
        query latent [T, q_lora], cache entries [T, C + rope] with normed latent and rotated key).
        Without a query latent the first are the unrotated queries, [T, H qk]."""
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
        """The second half, per head: mla_down's result to (rotated queries [T, H, qk], cache
        entries as mla_prologue returns them). Rows of `query` and `entries` may be strided."""
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
        """Prologue and absorbed attention of a step with one segment: hidden states [T, hidden] to
        concatenated heads [T, H v]."""
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
        """Absorbed attention over the latent cache: queries [T, H, qk] to concatenated heads [T, H
        v]. W_UK is applied to the query, W_UV to the result; latent and rope parts are not
        concatenated."""
        nope = w.config.nope_dim
        latent = self.latent_attention(
            self.heads_matmul(q[..., :nope], w.w_uk), q[..., nope:], plane, segment, scale
        )
        return self.joined_heads(latent, w)

    def joined_heads(self, latent: Tensor, w: MLAWeights) -> Activation:
        """Attention over latents [T, H, C] to concatenated heads [T, H v]. A backend may quantize
        them in the same kernel if `w.quantize_output`."""
        return self.heads_matmul(latent, w.w_uv).flatten(1)

    def gqa_prologue(
        self, qkv: Tensor, w: GQAWeights, places: TokenPlaces, planes: tuple[Tensor, ...]
    ) -> Tensor:
        """qkv [T, H + 2 G, D] to queries [T, H, D]. Applies per-head norms and rope (not
        interleaved) to queries and keys and writes keys and values to `planes` at their slots: (K,
        V), and for an 8-bit cache (`pack_heads`) the scales [pages, page, G, 2] fp32 of keys and
        values."""
        groups = planes[0].shape[2]
        heads = qkv.shape[1] - 2 * groups
        q, k, v = qkv.split((heads, groups, groups), 1)
        qk = torch.cat((self.norm(q, w.q_norm, w.eps), self.norm(k, w.k_norm, w.eps)), 1)
        q, k = self.rope(qk, places.cos, places.sin, interleaved=False).split((heads, groups), 1)
        self.write_heads(planes, places.slots, k, v)
        return q

    def write_heads(self, planes: tuple[Tensor, ...], slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write keys and values [T, G, D] to `planes` at `slots`, as gqa_prologue does."""
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
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention over cached K [pages, page, G, D] and V [pages, page, G, Dv]; q [T, H,
        D] to [T, H, Dv]. `scales`: of an 8-bit cache, as gqa_prologue writes them. out: where the
        result may be, if it is the one returned; rows of no request are then left as they are."""
        lens = segment.kv_lens.tolist()
        found = []
        for i, part in enumerate(q.split(segment.query_lens)):
            k = reference.read_cache(k_plane, segment.tables[i], lens[i])
            v = reference.read_cache(v_plane, segment.tables[i], lens[i])
            if scales is not None:
                k_scale, v_scale = reference.read_cache(scales, segment.tables[i], lens[i]).unbind(
                    -1
                )
                k = reference.unpack_heads(k, k_scale, q.dtype)
                v = reference.unpack_heads(v, v_scale, q.dtype)
            found.append(reference.causal_attention(part, k, v, scale))
        return torch.cat(found)

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
        """Attention over one stretch, packed as by `gather`, merged into the result so far.

        q [Q, H, D], k [L, G, D], v [L, G, Dv]. `found`: the result over previous stretches, updated
        in place.

        This default computes blocks of heads and queries: all scores together would need more
        memory than keys and values."""
        length = int(stretch.kv_lens)
        if not length:
            return
        first = int(stretch.first)
        share = q.shape[1] // k.shape[1]
        width = q.shape[2] + v.shape[2]
        longer = max(length, width)  # with few keys the block of results is the larger one
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
        out: Tensor | None = None,
    ) -> Tensor:
        """`dense_attention` with keys decompressed from latents: [N, H, nope], and [N, rope] shared
        by all heads. With `found` it is `stretch_attention` and returns the updated `found.out`,
        fp32. out: as in `attention`."""
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
        """All cached latents and rope keys of the segment's requests, packed as by `gather`: [sum
        of KV lengths, C + rope] in `dtype`."""
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
        """The weights' contents have changed: discard what was derived from them."""

    def prepare_router_weight(self, gate: Tensor, dtype: torch.dtype) -> Tensor:
        """A router's matrix as stored for hidden states in `dtype`: as loaded, or losslessly
        converted."""
        return gate

    def router(
        self, x: Tensor, w: RouterWeights, padded: PaddedRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Router GEMM and top-k: x [T, hidden] to (ids [T, K + fused shared experts] int64, weights
        of that shape, fp32).

        If the router is not in fp32 (Qwen3), logits have the gate's dtype and weights are rounded
        to x's dtype. padded: rows whose ids are -1 and whose weights 0, so that no expert is read
        for them; a backend may also choose experts for them as for the others.
        """
        moe = w.config
        dtype = torch.float32 if moe.router_fp32 else w.gate.dtype
        logits = torch.nn.functional.linear(x.to(dtype), w.gate.to(dtype))
        ids, weights = self.route(logits, w.bias, moe)
        weights = weights if moe.router_fp32 else weights.to(x.dtype).float()
        return self._finish_choice(ids, weights, w, padded)

    def _finish_choice(
        self, ids: Tensor, weights: Tensor, w: RouterWeights, padded: PaddedRows | None
    ) -> tuple[Tensor, Tensor]:
        """The routed experts' ids and weights [T, K] with fused shared experts, none for
        padding."""
        shared = w.num_fused_shared_experts
        found = reference.with_shared(ids, weights, w.config.num_experts, shared)
        return found if padded is None else padded.without_experts(*found)

    def route(self, logits: Tensor, bias: Tensor | None, moe: MoEConfig) -> tuple[Tensor, Tensor]:
        return reference.route(logits, bias, moe)

    @property
    def fuses_shared_experts(self) -> bool:
        """Whether shared experts should be fused with the routed ones if possible
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
        """The weighted sum over each token's experts (reference.experts), plus `base` [T, hidden],
        the shared experts' result."""
        y = reference.experts(hidden_of(x), ids, weights, w)
        return y if base is None else y + base

    def routed_experts(
        self,
        x: Activation,
        router: RouterWeights,
        w: ExpertWeights,
        base: Tensor | None = None,
        padded: PaddedRows | None = None,
    ) -> Tensor:
        """`router` and `experts` fused, if all experts are local, in logical order, and nothing
        else needs ids and weights."""
        ids, weights = self.router(hidden_of(x), router, padded)
        return self.experts(x, ids, weights, w, base)

    def experts_deferred(
        self,
        x: Activation,
        router: RouterWeights,
        w: ExpertWeights,
        base: Tensor | None = None,
        padded: PaddedRows | None = None,
    ) -> NormInput:
        """`routed_experts` whose result is read by `sum_add_norm`: a backend may return a
        DeferredMoESum."""
        return self.routed_experts(x, router, w, base, padded)

    def experts_fp8(
        self,
        x: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
    ) -> Tensor:
        """`experts` of hidden states received as e4m3 with scale [T, hidden/128]; returns [T,
        hidden] in `dtype`. fp8 weights take them as they are; for others they are dequantized."""
        if w.gate_up.fp8_blocks:
            return reference.experts_fp8(x, scale, dtype, ids, weights, w)
        return self.experts(reference.dequantize_activation(x, scale, dtype), ids, weights, w)

    def experts_in_pieces(
        self,
        rows: Sequence[Tensor],
        dtype: torch.dtype,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
    ) -> Iterator[Tensor] | None:
        """The result of `experts` of (x,), or of `experts_fp8` of (e4m3, scale), in pieces of
        columns, [T, hidden / pieces] each, from the first: each is computed when it is asked for,
        so that it can be sent meanwhile. None where that does not pay; ranks that are given as many
        rows agree."""
        return None

    def quantize_for_experts(self, x: Tensor, w: ExpertWeights) -> tuple[Tensor, Tensor]:
        """x [T, hidden] as `experts` with fp8 weights (`Weight.fp8_blocks`) quantizes it: e4m3 and
        scales [T, hidden/128] fp32. For more than DIRECT_FP8_PAIRS pairs `experts_fp8` of these
        returns the bits of `experts` of x. A row does not depend on others, so rows may be gathered
        in between."""
        assert w.gate_up.fp8_blocks
        return reference.quantize_activation(x, w.gate_up.ue8m0)

    # ---- exchanges. The same bits on every backend: what is sent must not depend on it.

    def quantize_activation(self, x: Tensor, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
        return reference.quantize_activation(x, ue8m0)

    def pack_routing(self, slots: Tensor, weights: Tensor) -> Tensor:
        """As rank_rows.pack."""
        return pack(slots, weights)

    def unpack_routing(
        self, message: Tensor, dtype: torch.dtype, first: int, count: int
    ) -> tuple[Tensor, Tensor]:
        """As rank_rows.unpack_local. message: rows of any stride."""
        return unpack_local(message, dtype, first, count)

    def rank_blocks(
        self, slots: Tensor, weights: Tensor, parts: RankParts, capacity: int
    ) -> RankBlocks:
        return rank_blocks(slots, weights, parts, capacity)

    def add_partial_sums(self, parts: Tensor, rows: Tensor, base: Tensor | None = None) -> Tensor:
        return add_partial_sums(parts, rows, base)

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
        return reference.decode_rows(
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
        return reference.verify_drafts(tokens, drafts, num_drafts, slots, accepted)

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
        """Random numbers in [0, 1) that depend only on (seed, position, stream): int64 tensors of
        one shape to fp64 of that shape. Bit-exact on every backend."""
        return rng.uniform(seeds, positions, stream)

    def argmax(self, logits: Tensor) -> Tensor:
        """[M, V] to [M] int64: the token with the largest logit, any of them if several are
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
