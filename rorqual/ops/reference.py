"""Definition of each op in plain torch, against which every faster version is tested.

Shapes: T tokens packed over requests, R requests, H query heads, G key/value heads, E experts, K
experts per token (top-k), V tokens in the vocabulary, M rows of logits. Softmax, norms, router
scores and weights are computed in fp32 for any dtype of activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rorqual.config.model import MoEConfig
from rorqual.ops.rounding import (
    ACTIVATION_BLOCK,
    FP8,
    by_group,
    rounded,
    to_8_bits,
    unpack_int4,
)
from rorqual.request import GREEDY_TEMPERATURE

# number format of an 8-bit cache by its planes' dtype: torch's index operations do not support e4m3
EIGHT_BIT_NUMBERS = {torch.uint8: FP8, torch.int8: torch.int8}


@dataclass
class Weight:
    """A matrix [rows, columns] or a stack of them. e4m3, int8 and int4 data have a `scale` for each
    `block`.

    int4 data is uint8 [rows, columns / 2], packed as by rounding.pack_int4: numbers 0 to 15, minus
    8 or minus `zero` [rows, groups] uint8, times the scale. `group_index` [columns] int32: the
    group of each column, if groups are not consecutive columns. `activation`: what the product's
    input is rounded to (config.quant.ACTIVATIONS), if there are scales.
    """

    data: Tensor
    scale: Tensor | None = None
    block: tuple[int, int] = (128, 128)
    zero: Tensor | None = None
    activation: str = "fp8_group"
    group_index: Tensor | None = None
    turned: bool = False  # repacked to a backend's own layout, which only that backend reads
    # what a backend derives once per weight
    scratch: Any = field(default=None, repr=False, compare=False)

    @property
    def quantized(self) -> bool:
        return self.scale is not None

    @property
    def is_int4(self) -> bool:
        return self.data.dtype == torch.uint8

    @property
    def fp8_blocks(self) -> bool:
        """Whether this is e4m3 data with one scale per 128 x 128 block and fp8 activations: what
        the fp8 kernels support."""
        return (
            self.scale is not None
            and self.data.dtype == FP8
            and self.block == (128, 128)
            and self.activation.startswith("fp8_group")
        )

    @property
    def ue8m0(self) -> bool:
        """Whether scales of the product's input are powers of two."""
        return self.activation.endswith("ue8m0")

    @property
    def columns(self) -> int:
        return self.data.shape[-1] * (2 if self.is_int4 else 1)

    def tensors(self) -> list[Tensor]:
        """All tensors of the weight."""
        parts = (self.data, self.scale, self.zero, self.group_index)
        return [part for part in parts if part is not None]

    def __getitem__(self, index: int) -> Weight:
        data, scale, zero, group_index = (
            None if part is None else part[index]
            for part in (self.data, self.scale, self.zero, self.group_index)
        )
        assert data is not None
        return Weight(data, scale, self.block, zero, self.activation, group_index, self.turned)

    def part(self, start: int, stop: int) -> Weight:
        """A view of rows of a matrix; `start` must be a block's first row."""
        if self.scale is None:
            return Weight(self.data[start:stop])
        rows = self.block[0]
        places = slice(start // rows, -(-stop // rows))
        zero = None if self.zero is None else self.zero[places]
        data = self.data[start:stop]
        scale = self.scale[places]
        index = self.group_index
        return Weight(data, scale, self.block, zero, self.activation, index, self.turned)


@dataclass
class RouterWeights:
    """One layer's router: gate [E, hidden], correction bias [E] fp32 or None, and the rules in
    `config`.

    num_fused_shared_experts: shared experts stored after the routed ones; every token is routed to
    them, with weight 1, in the last columns of ids."""

    gate: Tensor
    bias: Tensor | None
    config: MoEConfig
    num_fused_shared_experts: int = 0
    scratch: Any = field(default=None, compare=False)  # whatever a backend derives once a layer


@dataclass
class ExpertWeights:
    """One layer's local experts: gate_up [slots, 2 I, hidden], down [slots, hidden, I].

    num_fused_shared_experts: that many of the last slots are shared experts; every token is routed
    to them in the last columns of ids, in this order, with weight 1. A backend may compute them
    separately. local_fraction: estimated fraction of all (token, expert) pairs that are routed to
    these slots, for the choice of a kernel."""

    gate_up: Weight
    down: Weight
    num_fused_shared_experts: int = 0
    local_fraction: float = 1.0


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """(data - zero point) * scale in `dtype`; unquantized weights are only cast."""
    assert not weight.turned, "a backend has laid this weight out in its own way"
    if weight.scale is None:
        return weight.data.to(dtype)
    if weight.is_int4:
        values = unpack_int4(weight.data).float()
        values = values - (8.0 if weight.zero is None else by_column(weight.zero.float(), weight))
    else:
        values = weight.data.float()
    return (values * by_column(weight.scale.float(), weight)).to(dtype)


def by_column(scale: Tensor, weight: Weight) -> Tensor:
    """Expand numbers of blocks, [..., row blocks, column blocks], to elements."""
    rows = weight.data.shape[-2]
    if weight.group_index is not None:
        index = weight.group_index.long()[..., None, :].expand(*scale.shape[:-1], -1)
        return scale.gather(-1, index)
    scale = scale.repeat_interleave(weight.block[0], -2)[..., :rows, :]
    return scale.repeat_interleave(weight.block[1], -1)[..., : weight.columns]


def quantize_activation(x: Tensor, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """[T, columns] to e4m3 and fp32 scales [T, columns/128]: one scale per token and 128 columns,
    with amax clamped to at least 1e-4 (DeepGEMM). ue8m0: scales are rounded up to powers of two."""
    columns = x.shape[1]
    data, scale = to_8_bits(by_group(x, ACTIVATION_BLOCK), FP8, ue8m0)
    return data.flatten(1)[:, :columns], scale


def dequantize_activation(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantize_activation`, up to its rounding."""
    return (data.float() * scale.repeat_interleave(ACTIVATION_BLOCK, -1)[:, : data.shape[1]]).to(
        dtype
    )


def rounded_to_fp8(x: Tensor) -> Tensor:
    """x after a round trip through `quantize_activation`, in fp32."""
    return dequantize_activation(*quantize_activation(x), torch.float32)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x [T, columns] times weight [rows, columns] transposed. With quantized weights the
    activations are rounded to `weight.activation`."""
    if weight.scale is None:
        return F.linear(x, weight.data, bias)
    if weight.activation == "wide":
        return F.linear(x, dequantize(weight, x.dtype), bias)
    kind = weight.activation
    rows = rounded_to_fp8(x) if kind == "fp8_group" else rounded(x, kind)
    return product(rows, weight, x.dtype, bias)


def product(rows: Tensor, weight: Weight, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """`linear` of rows that are rounded already, fp32, with a result in `dtype`."""
    y = F.linear(rows, dequantize(weight, torch.float32))
    return (y if bias is None else y + bias.float()).to(dtype)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis (arXiv 1910.07467), computed in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual)"""
    total = x if residual is None else x + residual
    return norm(total, weight, eps), total


def swiglu(x: Tensor) -> Tensor:
    """[T, 2 I], gate and up concatenated, to silu(gate) * up, [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def mlp(x: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    return linear(swiglu(linear(x, gate_up)), down)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [T, heads, D] by cos and sin [T, D/2] (fp32). Pairs are (2i, 2i+1) if interleaved,
    else (i, i + D/2). Rotated pairs keep their columns."""
    cos = cos[:, None]
    sin = sin[:, None]
    wide = x.float()
    if interleaved:
        first = wide[..., 0::2]
        second = wide[..., 1::2]
        return (
            torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
            .flatten(-2)
            .to(x.dtype)
        )
    first, second = wide.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def write_cache(plane: Tensor, slots: Tensor, values: Tensor) -> None:
    """plane [pages, page_size, *shape]; slots [T]: flat positions page * page_size + offset; values
    [T, *shape]."""
    plane.flatten(0, 1).index_copy_(0, slots, values.to(plane.dtype))


def read_cache(plane: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` entries of one request, [length, *shape], by its block table [pages]."""
    pages = -(-length // plane.shape[1])
    return plane[table[:pages]].flatten(0, 1)[:length]


def in_8_bits(plane: Tensor) -> bool:
    """Whether a plane of the cache is e4m3 (as uint8) or int8."""
    return plane.dtype in EIGHT_BIT_NUMBERS


def pack_latent(entries: Tensor, rank: int, kind: torch.dtype = torch.uint8) -> Tensor:
    """Cache entries [T, C + rope] to rows of an 8-bit cache, [T, bytes]: latent | fp32 scales |
    unquantized rope key. kind: the plane's dtype, int8, or uint8 for e4m3.

    One scale per token and 128 columns, computed as in `quantize_activation`; a latent of fewer
    columns has one scale.
    """
    groups = by_group(entries[:, :rank], ACTIVATION_BLOCK)
    data, scales = to_8_bits(groups, EIGHT_BIT_NUMBERS[kind])
    parts = data.flatten(1)[:, :rank].contiguous(), scales, entries[:, rank:].contiguous()
    return torch.cat([part.view(kind) for part in parts], 1)


def latent_parts(rows: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Views of rows [..., bytes] of an 8-bit cache: latent [..., C] e4m3 or int8, scales [..., C /
    128] fp32, rope key [..., rope] in `dtype`."""
    scales = rank + 4 * -(-rank // ACTIVATION_BLOCK)
    return (
        rows[..., :rank].view(EIGHT_BIT_NUMBERS[rows.dtype]),
        rows[..., rank:scales].view(torch.float32),
        rows[..., scales:].view(dtype),
    )


def unpack_latent(rows: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Rows of an 8-bit cache [..., bytes] to entries [..., C + rope] in `dtype`, which must be the
    dtype of the rope key."""
    latent, scales, rope = latent_parts(rows, rank, dtype)
    wide = latent.float() * scales.repeat_interleave(ACTIVATION_BLOCK, -1)[..., :rank]
    return torch.cat((wide.to(dtype), rope), -1)


def pack_heads(heads: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys or values [T, G, D] to those of an 8-bit cache: [T, G, D] in the plane's dtype `kind`,
    and scales [T, G] fp32, one per token and head."""
    data, scale = to_8_bits(heads.float(), EIGHT_BIT_NUMBERS[kind])
    return data.view(kind), scale


def unpack_heads(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `pack_heads`, up to its rounding: data [..., G, D], scales [..., G]."""
    wide = data.contiguous().view(EIGHT_BIT_NUMBERS[data.dtype]).float()
    return (wide * scales[..., None]).to(dtype)


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Keys or values [L, G, D] repeated for each query head, fp32: [L, H, D]."""
    return (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)).float()


def masked_scores(q: Tensor, k: Tensor, scale: float, first: int) -> Tensor:
    """Attention scores [H, Q, L] fp32. Query i sees keys up to `first` + i; other scores are
    -inf."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), repeat_kv(k, q.shape[1])) * scale
    allowed = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(first)
    return scores.masked_fill_(~allowed, float("-inf"))


def whole_keys(nope: Tensor, rope: Tensor) -> Tensor:
    """Keys [N, H, nope + rope] from [N, H, nope] and the shared [N, rope]."""
    return torch.cat((nope, rope[:, None].expand(-1, nope.shape[1], -1)), -1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of one request. q [Q, H, D]: the last Q of its L positions; k [L, G, D]; v [L, G,
    Dv]. Returns [Q, H, Dv]."""
    weights = masked_scores(q, k, scale, k.shape[0] - q.shape[0]).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, repeat_kv(v, q.shape[1])).to(q.dtype)


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    first: int,
) -> tuple[Tensor, Tensor]:
    """Attention of q [Q, H, D] over some of a request's keys [L, G, D] and values [L, G, Dv].
    Returns the result over those alone, [Q, H, Dv] fp32, and the log-sum-exp of their scores, [Q,
    H] fp32.

    Query i sees keys up to `first` + i: all if that is at least L - 1, none if it is negative,
    which gives 0 and -inf.
    """
    scores = masked_scores(q, k, scale, first)
    total = scores.logsumexp(-1)
    weights = scores.sub_(_finite(total)[..., None]).exp_()
    out = torch.einsum("hqk,khd->qhd", weights, repeat_kv(v, q.shape[1]))
    return out, total.t()


def join_attention(
    out: Tensor,
    total: Tensor,
    more: Tensor,
    more_total: Tensor,
) -> tuple[Tensor, Tensor]:
    """Merge two results of `partial_attention` over different keys."""
    joined = torch.logaddexp(total, more_total)
    shift = _finite(joined)
    parts = [x * (log - shift).exp()[..., None] for x, log in ((out, total), (more, more_total))]
    return parts[0] + parts[1], joined


def _finite(total: Tensor) -> Tensor:
    """Replace -inf, the log-sum-exp over no keys, by 0: -inf minus -inf would be NaN."""
    return total.masked_fill(total == float("-inf"), 0)


def router_scores(logits: Tensor, moe: MoEConfig) -> Tensor:
    return logits.float().sigmoid() if moe.scoring == "sigmoid" else logits.float().softmax(-1)


def limit_groups(choice: Tensor, moe: MoEConfig) -> Tensor:
    """Mask all but the `topk_group` best expert groups. A group's score is that of its best expert,
    or the sum of its best two with noaux_tc."""
    groups = choice.view(choice.shape[0], moe.n_group, choice.shape[1] // moe.n_group)
    best = groups.topk(2, -1).values.sum(-1) if moe.method == "noaux_tc" else groups.amax(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(
        1, best.topk(moe.topk_group, -1, sorted=False).indices, True
    )
    return groups.masked_fill(~kept[..., None], float("-inf")).view_as(choice)


def route(logits: Tensor, bias: Tensor | None, moe: MoEConfig) -> tuple[Tensor, Tensor]:
    """Choose experts. logits [T, E]; returns (ids [T, K] int64, weights [T, K] fp32). arXiv
    2412.19437, section 2.1.2.

    The correction bias affects the choice but not the weights.
    """
    scores = router_scores(logits, moe)
    choice = scores if bias is None else scores + bias
    if moe.method != "greedy" and moe.n_group > 1:
        choice = limit_groups(choice, moe)
    ids = choice.topk(moe.top_k, -1, sorted=False).indices
    weights = scores.gather(1, ids)
    if moe.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * moe.scaling


def with_shared(ids: Tensor, weights: Tensor, first: int, shared: int) -> tuple[Tensor, Tensor]:
    """Append `shared` fused shared experts, slots `first` and on with weight 1, to each token's ids
    and weights [T, K]."""
    if not shared:
        return ids, weights
    slots = torch.arange(first, first + shared, dtype=ids.dtype, device=ids.device).expand(
        ids.shape[0], -1
    )
    return torch.cat((ids, slots), 1), torch.cat((weights, weights.new_ones(slots.shape)), 1)


def experts(x: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights) -> Tensor:
    """The weighted sum over each token's experts. x [T, hidden]; ids [T, K]: physical slots (-1: on
    another rank; a slot may occur several times); weights [T, K]. Sums in fp32; returns [T, hidden]
    in x's dtype."""
    return _sum_of_experts(
        x, ids, weights, x.dtype, lambda rows, slot: mlp(rows, w.gate_up[slot], w.down[slot])
    )


def experts_fp8(
    data: Tensor, scale: Tensor, dtype: torch.dtype, ids: Tensor, weights: Tensor, w: ExpertWeights
) -> Tensor:
    """`experts` of e4m3 rows with scales [T, hidden/128], for weights that take such rows
    (`Weight.fp8_blocks`): what `experts` computes of the rows that these were quantized from, bit
    for bit. Returns [T, hidden] in `dtype`."""

    def expert(rows: Tensor, slot: int) -> Tensor:
        return linear(swiglu(product(rows, w.gate_up[slot], dtype)), w.down[slot])

    rows = dequantize_activation(data, scale, torch.float32)
    return _sum_of_experts(rows, ids, weights, dtype, expert)


def _sum_of_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    dtype: torch.dtype,
    expert: Callable[[Tensor, int], Tensor],
) -> Tensor:
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for slot in ids.unique().tolist():
        if slot >= 0:
            token, k = (ids == slot).nonzero(as_tuple=True)
            y = expert(x[token], slot)
            total.index_add_(0, token, y.float() * weights[token, k, None])
    return total.to(dtype)


# ---- sampling


@dataclass
class Distribution:
    """The sampling distributions of M rows: token t of row m has probability exp((logits[m, t] -
    peak) / temperature) / mass if its logit is at least floor, else zero.

    logits [M, V]; summary [M, 4] fp64: temperature, peak (largest logit), floor (tokens with
    smaller logits are excluded), mass (normalization over the others); best [M] int64: argmax, the
    first token with the largest logit, used if temperature is below GREEDY_TEMPERATURE.
    """

    logits: Tensor
    summary: Tensor
    best: Tensor
    scratch: Any = None  # what a backend derives

    def probs(self, rows: Tensor | None = None) -> Tensor:
        """Probabilities [M, V] fp64, or those of some rows."""
        logits, summary = (
            (self.logits, self.summary) if rows is None else (self.logits[rows], self.summary[rows])
        )
        temperature, peak, floor, mass = summary[:, :, None].unbind(1)
        weights = tempered(logits.double(), temperature, peak) / mass
        return weights.masked_fill(logits < floor, 0)

    def probability(self, tokens: Tensor) -> Tensor:
        """Probabilities [R, n] fp64 of tokens [R, n]; request r has M / R rows, of which the first
        n are used."""
        count, n = tokens.shape
        logits = (
            self.logits.view(count, -1, self.logits.shape[1])[:, :n]
            .gather(2, tokens[..., None])
            .squeeze(2)
            .double()
        )
        temperature, peak, floor, mass = self.summary.view(count, -1, 4)[:, :n].unbind(2)
        return (tempered(logits, temperature, peak) / mass).masked_fill(logits < floor, 0)


def tempered(logits: Tensor, temperature: Tensor, peak: Tensor) -> Tensor:
    """Unnormalized probabilities; 1 where the logit is `peak`."""
    return ((logits - peak) / temperature.clamp(GREEDY_TEMPERATURE)).exp()


def distribution(logits: Tensor, settings: Tensor, filters: bool) -> Distribution:
    """logits [M, V] fp32; settings [M, 4] fp64: temperature, top_p, min_p, top_k (0: off). Without
    `filters` only the temperature is used.

    Computed in fp64 here. A faster version may move a boundary between two tokens by 1e-6 of the
    total mass, and may decide differently on a token whose limit (for top-p the mass before it, for
    min-p its ratio to the best one) is within 1e-6 of the setting.
    """
    temperature, top_p, min_p, top_k = settings.unbind(1)
    wide = logits.double()
    peak = wide.amax(-1)
    weights = tempered(wide, temperature[:, None], peak[:, None])
    floor = torch.full_like(peak, float("-inf"))
    if filters:
        weights = apply_filters(weights, top_k, top_p, min_p)
        floor = wide.masked_fill(weights == 0, float("inf")).amin(-1)
    return Distribution(
        logits, torch.stack((temperature, peak, floor, weights.sum(-1)), 1), logits.argmax(-1)
    )


def apply_filters(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Zero the tokens that top-k, then top-p over the rest, then min-p exclude. Tokens tied with
    the last one kept are kept. weights [M, V]: unnormalized probabilities; the others [M]."""
    ordered = weights.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k, ordered.shape[1]).clamp(max=ordered.shape[1]).long() - 1
    by_k = ordered.gather(1, last[:, None])
    kept = ordered.masked_fill(ordered < by_k, 0)
    before = kept.cumsum(-1) - kept
    # the smallest set whose mass reaches top_p: a token is kept if the mass before it is below
    inside = (before < top_p[:, None] * kept.sum(-1, keepdim=True)) & (kept > 0)
    by_p = ordered.masked_fill(~inside, float("inf")).amin(-1, keepdim=True)
    by_p = torch.where(top_p[:, None] < 1, by_p, by_k)
    threshold = torch.maximum(torch.maximum(by_k, by_p), min_p[:, None] * ordered[:, :1])
    return weights.masked_fill(weights < threshold, 0)


def inverse_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """[M] int64: the token at which the cumulative sum of weights [M, V] exceeds the fraction
    numbers [M] of its total."""
    cumulative = weights.cumsum(-1)
    goal = numbers[:, None] * cumulative[:, -1:]
    return (
        torch.searchsorted(cumulative, goal, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)
    )


def sample_from(given: Distribution, numbers: Tensor) -> Tensor:
    """One token per row, [M] int64, by inverting the cumulative distribution, in vocabulary order,
    at numbers [M] in [0, 1) fp64."""
    greedy = given.summary[:, 0] < GREEDY_TEMPERATURE
    return torch.where(greedy, given.best, inverse_cdf(given.probs(), numbers))


def sample_residual(
    given: Distribution,
    rows: Tensor,
    numbers: Tensor,
    refused: Tensor,
    q: Tensor | None = None,
    q_rows: Tensor | None = None,
) -> Tensor:
    """Sample the replacement of a rejected draft from max(p - q, 0): tokens [R], -1 if nothing is
    requested or the residual is empty. p: rows [R] of the distribution (-1: not requested). q: rows
    q_rows [R] of q [N, V] fp32, from which the drafts were sampled; None: the drafts, refused [R],
    had probability 1."""
    p = given.probs(rows.clamp(min=0))
    rest = (
        p.scatter(1, refused[:, None], 0)
        if q is None or q_rows is None
        else (p - q[q_rows]).clamp_(min=0)
    )
    return torch.where((rest.sum(-1) > 0) & (rows >= 0), inverse_cdf(rest, numbers), -1)


def write_probs(given: Distribution, plane: Tensor, rows: Tensor) -> None:
    """Write probabilities to the rows [M] of plane [N, V] fp32."""
    plane.index_copy_(0, rows, given.probs().to(plane.dtype))


# ---- request state in decode steps


def decode_rows(
    length: Tensor,
    last_token: Tensor,
    drafts: Tensor,
    tables: Tensor,
    slots: Tensor,
    num_speculative_tokens: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows of a decode step of requests in `slots` [R]: the newest token of each, whose cache
    entry is not written yet, followed by num_speculative_tokens drafts.

    length, last_token [S] and drafts [S, at least num_speculative_tokens] by slot; tables [R,
    pages]: block tables of these requests. All int64. Returns ids, positions and slot mapping, [R
    (num_speculative_tokens + 1)] each, and the cache lengths [R] after the step: 0 for a padding
    row, whose first page is the null page, so that attention does not read for it."""
    first = length.index_select(0, slots)
    ids = last_token.index_select(0, slots)
    spread = first[:, None]
    if num_speculative_tokens:
        ids = torch.cat(
            (ids[:, None], drafts.index_select(0, slots)[:, :num_speculative_tokens]), 1
        ).flatten()
        spread = spread + torch.arange(num_speculative_tokens + 1, device=slots.device)
    positions = spread.flatten()
    held = tables.gather(1, spread // page_size).flatten()
    return (
        ids,
        positions,
        held * page_size + positions % page_size,
        torch.where(tables[:, 0] == 0, 0, first + (num_speculative_tokens + 1)),
    )


def verify_drafts(
    tokens: Tensor, drafts: Tensor, num_drafts: Tensor, slots: Tensor, accepted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify the drafts of requests in `slots` [R]. tokens [R, n + 1]: the model's token after each
    row; drafts [S, at least n] and num_drafts [S] by slot; accepted [R, n] bool: whether to accept
    each draft; None: accept those equal to the model's token. A draft is accepted only if all
    before it are.

    Returns (accepted drafts, then one token of the model, then -1: [R, n + 1]; number of accepted
    drafts [R]; number of drafts [R])."""
    n = tokens.shape[1] - 1
    drafted = drafts.index_select(0, slots)[:, :n]
    num_drafted = num_drafts.index_select(0, slots).clamp(max=n)
    places = torch.arange(n + 1, device=tokens.device)
    matches = tokens[:, :n] == drafted if accepted is None else accepted
    matches = matches & (places[:n] < num_drafted[:, None])
    num_accepted = matches.long().cumprod(1).sum(1)
    kept = torch.where(places[:n] < num_accepted[:, None], drafted, tokens[:, :n])
    kept = torch.cat((kept, tokens[:, n:]), 1)
    return torch.where(places <= num_accepted[:, None], kept, -1), num_accepted, num_drafted


def commit_tokens(
    last_token: Tensor,
    length: Tensor,
    slots: Tensor,
    lens: Tensor,
    tokens: Tensor,
    num_accepted: Tensor,
) -> tuple[Tensor, Tensor]:
    """Update last_token and length, by slot, of requests in `slots` [R] after a step that wrote
    cache entries up to lens [R], 0 for padding rows, whose length stays 0. Of tokens [R, n + 1]
    each request keeps num_accepted [R] drafts and one token more.

    Returns (the token after each row of the step, 0 after rejected rows, [R (n + 1)]; the row of
    each request's last kept token, [R])."""
    width = tokens.shape[1]
    last_token.index_copy_(0, slots, tokens.gather(1, num_accepted[:, None]).squeeze(1))
    length.index_copy_(0, slots, (lens - width + 1 + num_accepted).clamp(min=0))
    first = torch.arange(0, tokens.numel(), width, device=tokens.device)
    return tokens.clamp(min=0).flatten(), first + num_accepted
