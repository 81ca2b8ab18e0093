"""What each op means, in plain torch: the definition every faster version is tested against.
Written to be read.

Shapes: T tokens packed over requests, R requests, H query heads, G key/value heads, E experts, K
picks a token, V tokens in the vocabulary, M rows of logits. Softmax, norms, router scores and
weights are computed in fp32 whatever the activations' dtype.
"""

from __future__ import annotations

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

# what the planes of an 8-bit cache hold, by their dtype: torch's index operations take no e4m3
EIGHT_BIT_NUMBERS = {torch.uint8: FP8, torch.int8: torch.int8}


@dataclass
class Weight:
    """A matrix [rows, columns] or a stack of them. Data in e4m3, int8 or int4 carries `scale`, one
    factor for each `block` of it.

    int4 data is uint8 [rows, columns / 2], packed as by rounding.pack_int4: numbers 0 to 15, less
    8, or less `zero` [rows, groups] uint8, times the scale. `group_index` [columns] int32 says
    which group each column is of, where they do not follow one another. `activation`: what the
    product's rows are rounded to (config.quant.ACTIVATIONS); it counts where there are scales.
    """

    data: Tensor
    scale: Tensor | None = None
    block: tuple[int, int] = (128, 128)
    zero: Tensor | None = None
    activation: str = "fp8_group"
    group_index: Tensor | None = None
    turned: bool = False  # a backend has laid it out in its own way: nobody else may read it
    # whatever a backend derives once a weight
    scratch: Any = field(default=None, repr=False, compare=False)

    @property
    def quantized(self) -> bool:
        return self.scale is not None

    @property
    def is_int4(self) -> bool:
        return self.data.dtype == torch.uint8

    @property
    def fp8_blocks(self) -> bool:
        """Whether these are e4m3 data and one scale a block of 128 x 128, multiplied with rows
        rounded to fp8 likewise: what the fp8 kernels take."""
        return (
            self.scale is not None
            and self.data.dtype == FP8
            and self.block == (128, 128)
            and self.activation.startswith("fp8_group")
        )

    @property
    def columns(self) -> int:
        return self.data.shape[-1] * (2 if self.is_int4 else 1)

    def tensors(self) -> list[Tensor]:
        """All that it is held in."""
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
        """A view of rows of a matrix; they begin on a block's edge."""
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
    """What one layer chooses experts by: gate [E, hidden], correction bias [E] fp32 or None, and
    the rules in `config`.

    num_fused_shared_experts: so many shared experts stand behind the routed ones; every token
    picks them last, with weight 1."""

    gate: Tensor
    bias: Tensor | None
    config: MoEConfig
    num_fused_shared_experts: int = 0
    scratch: Any = field(default=None, compare=False)  # whatever a backend derives once a layer


@dataclass
class ExpertWeights:
    """One layer's experts that this rank holds: gate_up [slots, 2 I, hidden], down [slots, hidden,
    I].

    num_fused_shared_experts: so many of the last slots, and of the last columns of ids and
    weights, are those that every token picks with weight 1, in this order; a backend may compute
    them apart. local_fraction: about how many of all picks are in these slots; for the choice of a
    kernel."""

    gate_up: Weight
    down: Weight
    num_fused_shared_experts: int = 0
    local_fraction: float = 1.0


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """Data, less its zero point, times its block's scale, in `dtype`; other weights are only
    cast."""
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
    """One number a block, [..., row blocks, column blocks], as one for each element."""
    rows = weight.data.shape[-2]
    if weight.group_index is not None:
        index = weight.group_index.long()[..., None, :].expand(*scale.shape[:-1], -1)
        return scale.gather(-1, index)
    scale = scale.repeat_interleave(weight.block[0], -2)[..., :rows, :]
    return scale.repeat_interleave(weight.block[1], -1)[..., : weight.columns]


def quantize_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, columns] to e4m3 and fp32 scales [T, columns/128]: one scale a token and 128 columns,
    amax clamped at 1e-4 (DeepGEMM)."""
    tokens, columns = x.shape
    blocks = F.pad(x.float(), (0, -columns % ACTIVATION_BLOCK)).view(
        tokens, -(-columns // ACTIVATION_BLOCK), ACTIVATION_BLOCK
    )
    data, scale = to_8_bits(blocks, FP8)
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
    activations are rounded as `weight.activation` says."""
    if weight.scale is None:
        return F.linear(x, weight.data, bias)
    if weight.activation == "wide":
        return F.linear(x, dequantize(weight, x.dtype), bias)
    kind = weight.activation
    rows = rounded_to_fp8(x) if kind == "fp8_group" else rounded(x, kind)
    y = F.linear(rows, dequantize(weight, torch.float32))
    return (y if bias is None else y + bias.float()).to(x.dtype)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis (arXiv 1910.07467), computed in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The residual stream's step: returns (norm(x + residual), x + residual)."""
    total = x if residual is None else x + residual
    return norm(total, weight, eps), total


def swiglu(x: Tensor) -> Tensor:
    """[T, 2 I] holding gate and up side by side to silu(gate) * up, [T, I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def mlp(x: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    return linear(swiglu(linear(x, gate_up)), down)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x [T, heads, D] by cos and sin [T, D/2] (fp32). Pairs are (2i, 2i+1) when interleaved,
    else (i, i + D/2).

    The layout is kept: each rotated pair stays where it was.
    """
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
    """plane [pages, page_size, *shape]; slots [T] flat positions page * page_size + offset;
    values [T, *shape]."""
    plane.flatten(0, 1).index_copy_(0, slots, values.to(plane.dtype))


def read_cache(plane: Tensor, table: Tensor, length: int) -> Tensor:
    """The first `length` entries of one request, [length, *shape], by its block table [pages]."""
    pages = -(-length // plane.shape[1])
    return plane[table[:pages]].flatten(0, 1)[:length]


def in_8_bits(plane: Tensor) -> bool:
    """Whether a plane of the cache holds e4m3 (bytes) or int8."""
    return plane.dtype in EIGHT_BIT_NUMBERS


def pack_latent(entries: Tensor, rank: int, kind: torch.dtype = torch.uint8) -> Tensor:
    """Cache entries [T, C + rope] to rows of an 8-bit cache, [T, bytes]: latent | fp32 scales |
    rope key as it is. kind: the plane's dtype; uint8 holds e4m3, int8 itself.

    One scale a token and 128 columns, by the rule of `quantize_activation`; a latent of fewer
    columns has one.
    """
    groups = by_group(entries[:, :rank], ACTIVATION_BLOCK)
    data, scales = to_8_bits(groups, EIGHT_BIT_NUMBERS[kind])
    parts = data.flatten(1)[:, :rank].contiguous(), scales, entries[:, rank:].contiguous()
    return torch.cat([part.view(kind) for part in parts], 1)


def latent_parts(rows: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Views of an 8-bit cache's rows [..., bytes]: latent [..., C] e4m3 or int8, scales [..., C /
    128] fp32, rope key [..., rope] in `dtype`."""
    scales = rank + 4 * -(-rank // ACTIVATION_BLOCK)
    return (
        rows[..., :rank].view(EIGHT_BIT_NUMBERS[rows.dtype]),
        rows[..., rank:scales].view(torch.float32),
        rows[..., scales:].view(dtype),
    )


def unpack_latent(rows: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Rows of an 8-bit cache [..., bytes] to entries [..., C + rope] in `dtype`, in which the rope
    key was written."""
    latent, scales, rope = latent_parts(rows, rank, dtype)
    wide = latent.float() * scales.repeat_interleave(ACTIVATION_BLOCK, -1)[..., :rank]
    return torch.cat((wide.to(dtype), rope), -1)


def pack_heads(heads: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys or values [T, G, D] as an 8-bit cache holds them: [T, G, D] of the plane's dtype
    `kind`, and scales [T, G] fp32, one a token and head."""
    data, scale = to_8_bits(heads.float(), EIGHT_BIT_NUMBERS[kind])
    return data.view(kind), scale


def unpack_heads(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of `pack_heads`, up to its rounding: data [..., G, D], scales [..., G]."""
    wide = data.contiguous().view(EIGHT_BIT_NUMBERS[data.dtype]).float()
    return (wide * scales[..., None]).to(dtype)


def by_query_head(x: Tensor, heads: int) -> Tensor:
    """Keys or values [L, G, D] in fp32, one for each query head: [L, H, D]."""
    return (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)).float()


def seen_scores(q: Tensor, k: Tensor, scale: float, first: int) -> Tensor:
    """[H, Q, L] fp32: the score of each query with each key. Query i sees keys up to `first` + i;
    the others' scores are -inf."""
    scores = torch.einsum("qhd,khd->hqk", q.float(), by_query_head(k, q.shape[1])) * scale
    allowed = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(first)
    return scores.masked_fill_(~allowed, float("-inf"))


def whole_keys(nope: Tensor, rope: Tensor) -> Tensor:
    """Keys [N, H, nope + rope] of [N, H, nope], and of [N, rope], which all heads share."""
    return torch.cat((nope, rope[:, None].expand(-1, nope.shape[1], -1)), -1)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of one request. q [Q, H, D] are the last Q of its L positions; k [L, G, D]; v
    [L, G, Dv]. Returns [Q, H, Dv]."""
    weights = seen_scores(q, k, scale, k.shape[0] - q.shape[0]).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, by_query_head(v, q.shape[1])).to(q.dtype)


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    first: int,
) -> tuple[Tensor, Tensor]:
    """Attention of q [Q, H, D] over some of a request's keys [L, G, D] and values [L, G, Dv]: what
    those alone would give, [Q, H, Dv] fp32, and the log-sum-exp of their scores, [Q, H] fp32.

    Query i sees keys up to `first` + i: from L - 1 on all of them, below 0 none, which gives 0 and
    -inf.
    """
    scores = seen_scores(q, k, scale, first)
    total = scores.logsumexp(-1)
    weights = scores.sub_(_finite(total)[..., None]).exp_()
    out = torch.einsum("hqk,khd->qhd", weights, by_query_head(v, q.shape[1]))
    return out, total.t()


def join_attention(
    out: Tensor,
    total: Tensor,
    more: Tensor,
    more_total: Tensor,
) -> tuple[Tensor, Tensor]:
    """Two results of `partial_attention` over different keys as one over all of them."""
    joined = torch.logaddexp(total, more_total)
    shift = _finite(joined)
    parts = [x * (log - shift).exp()[..., None] for x, log in ((out, total), (more, more_total))]
    return parts[0] + parts[1], joined


def _finite(total: Tensor) -> Tensor:
    """Zero for the sums of nothing: -inf less itself would be NaN."""
    return total.masked_fill(total == float("-inf"), 0)


def router_scores(logits: Tensor, moe: MoEConfig) -> Tensor:
    return logits.float().sigmoid() if moe.scoring == "sigmoid" else logits.float().softmax(-1)


def limit_groups(choice: Tensor, moe: MoEConfig) -> Tensor:
    """Keep the `topk_group` best groups of experts; a group counts by its best expert, or by its
    best two under noaux_tc."""
    groups = choice.view(choice.shape[0], moe.n_group, choice.shape[1] // moe.n_group)
    best = groups.topk(2, -1).values.sum(-1) if moe.method == "noaux_tc" else groups.amax(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(
        1, best.topk(moe.topk_group, -1, sorted=False).indices, True
    )
    return groups.masked_fill(~kept[..., None], float("-inf")).view_as(choice)


def route(logits: Tensor, bias: Tensor | None, moe: MoEConfig) -> tuple[Tensor, Tensor]:
    """Choose experts. logits [T, E]; returns (ids [T, K] int64, weights [T, K] fp32). arXiv
    2412.19437, section 2.1.2.

    The correction bias decides the choice and never enters the weights.
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
    """Behind the picks of each token, [T, K], those that all tokens make: slots `first` and on,
    `shared` of them, weight 1."""
    if not shared:
        return ids, weights
    slots = torch.arange(first, first + shared, dtype=ids.dtype, device=ids.device).expand(
        ids.shape[0], -1
    )
    return torch.cat((ids, slots), 1), torch.cat((weights, weights.new_ones(slots.shape)), 1)


def experts(x: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights) -> Tensor:
    """The weighted sum of each token's experts. x [T, hidden], ids and weights [T, K] by
    physical slot (-1: not here; a token may name a slot several times). Sums in fp32; returns [T,
    hidden] in x's dtype."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for slot in ids.unique().tolist():
        if slot >= 0:
            token, pick = (ids == slot).nonzero(as_tuple=True)
            y = mlp(x[token], w.gate_up[slot], w.down[slot])
            total.index_add_(0, token, y.float() * weights[token, pick, None])
    return total.to(x.dtype)


# ---- sampling


@dataclass
class Distribution:
    """What each of M tokens is drawn from: token t of row m has probability exp((logits[m, t] -
    peak) / temperature) / mass if its logit is at least floor, else zero.

    logits [M, V]; summary [M, 4] fp64: temperature, peak (the best logit), floor (logits below it
    are left out), mass (the sum over what is kept); best [M] int64: the first token with the best
    logit, which rows of temperature below GREEDY_TEMPERATURE take.
    """

    logits: Tensor
    summary: Tensor
    best: Tensor
    scratch: Any = None  # whatever a backend derives

    def probs(self, rows: Tensor | None = None) -> Tensor:
        """[M, V] fp64, or those of some rows."""
        logits, summary = (
            (self.logits, self.summary) if rows is None else (self.logits[rows], self.summary[rows])
        )
        temperature, peak, floor, mass = summary[:, :, None].unbind(1)
        weights = tempered(logits.double(), temperature, peak) / mass
        return weights.masked_fill(logits < floor, 0)

    def probability(self, tokens: Tensor) -> Tensor:
        """Of tokens [R, n], in the first n of every M / R rows: [R, n] fp64."""
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
    """Probabilities but for a factor; 1 where the logit is `peak`."""
    return ((logits - peak) / temperature.clamp(GREEDY_TEMPERATURE)).exp()


def distribution(logits: Tensor, settings: Tensor, filters: bool) -> Distribution:
    """logits [M, V] fp32, settings [M, 4] fp64: temperature, top_p, min_p, top_k (0: off). Without
    `cuts` only the temperature counts.

    Computed in fp64 here. A faster version may move a boundary between two tokens by 1e-6 of the
    whole mass; and where top-p or min-p lies within 1e-6 of a token's limit (of the mass before it;
    of its share of the best one), the token may be on the other side.
    """
    temperature, top_p, min_p, top_k = settings.unbind(1)
    wide = logits.double()
    peak = wide.amax(-1)
    weights = tempered(wide, temperature[:, None], peak[:, None])
    floor = torch.full_like(peak, float("-inf"))
    if filters:
        weights = cut(weights, top_k, top_p, min_p)
        floor = wide.masked_fill(weights == 0, float("inf")).amin(-1)
    return Distribution(
        logits, torch.stack((temperature, peak, floor, weights.sum(-1)), 1), logits.argmax(-1)
    )


def cut(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Zero what top-k, then top-p over what top-k left, then min-p exclude. Tokens tied with the
    last one kept are kept. weights [M, V], probabilities but for a factor; the others [M]."""
    ordered = weights.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k, ordered.shape[1]).clamp(max=ordered.shape[1]).long() - 1
    by_k = ordered.gather(1, last[:, None])
    kept = ordered.masked_fill(ordered < by_k, 0)
    before = kept.cumsum(-1) - kept
    # The smallest set whose mass reaches top_p: a token stays while the mass before it is below the
    # goal.
    inside = (before < top_p[:, None] * kept.sum(-1, keepdim=True)) & (kept > 0)
    by_p = ordered.masked_fill(~inside, float("inf")).amin(-1, keepdim=True)
    by_p = torch.where(top_p[:, None] < 1, by_p, by_k)
    threshold = torch.maximum(torch.maximum(by_k, by_p), min_p[:, None] * ordered[:, :1])
    return weights.masked_fill(weights < threshold, 0)


def invert(weights: Tensor, numbers: Tensor) -> Tensor:
    """The token at which the cumulative sum of weights [M, V] passes numbers [M] of its total."""
    cumulative = weights.cumsum(-1)
    goal = numbers[:, None] * cumulative[:, -1:]
    return (
        torch.searchsorted(cumulative, goal, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)
    )


def sample_from(given: Distribution, numbers: Tensor) -> Tensor:
    """One token a row, [M] int64: the inverse of the cumulative distribution, in vocabulary
    order, at numbers [M] in [0, 1) fp64."""
    greedy = given.summary[:, 0] < GREEDY_TEMPERATURE
    return torch.where(greedy, given.best, invert(given.probs(), numbers))


def sample_residual(
    given: Distribution,
    rows: Tensor,
    numbers: Tensor,
    refused: Tensor,
    q: Tensor | None = None,
    q_rows: Tensor | None = None,
) -> Tensor:
    """Tokens [R] from what a refused draft left over: max(p - q, 0), p being rows [R] of the
    distribution (-1: nothing is wanted) and q the rows q_rows [R] of q [N, V] fp32, which the
    drafts were drawn from. Without q the drafts, refused [R], were certain. -1 where nothing is
    left over or wanted."""
    p = given.probs(rows.clamp(min=0))
    rest = (
        p.scatter(1, refused[:, None], 0)
        if q is None or q_rows is None
        else (p - q[q_rows]).clamp_(min=0)
    )
    return torch.where((rest.sum(-1) > 0) & (rows >= 0), invert(rest, numbers), -1)


def write_probs(given: Distribution, plane: Tensor, rows: Tensor) -> None:
    """Probabilities to the rows [M] of plane [N, V] fp32."""
    plane.index_copy_(0, rows, given.probs().to(plane.dtype))


# ---- how requests move on through a decode step


def decode_rows(
    length: Tensor,
    last_token: Tensor,
    drafts: Tensor,
    tables: Tensor,
    slots: Tensor,
    num_speculative_tokens: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What requests in `slots` [R] compute: the newest token of each, whose entry is still to be
    written, and num_speculative_tokens drafts behind it.

    length, last_token [S] and drafts [S, at least num_speculative_tokens] by slot; tables [R,
    pages] block tables of these requests. All int64. Returns ids, positions and slot mapping, [R
    (num_speculative_tokens + 1)] each, and the lengths [R] of the cache once all are written."""
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
        first + (num_speculative_tokens + 1),
    )


def verify_drafts(
    tokens: Tensor, drafts: Tensor, num_drafts: Tensor, slots: Tensor, taken: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Which drafts stand. tokens [R, n + 1]: the model's own behind each row; drafts [S, at
    least n] and num_drafts [S] by slot; taken [R, n] bool: whether each is right, None: where it
    is the model's own. A draft counts only behind others that do.

    Returns (drafts that stand, then the model's own token, then -1: [R, n + 1]; how many drafts
    stand [R]; drafts there were [R])."""
    n = tokens.shape[1] - 1
    ahead = drafts.index_select(0, slots)[:, :n]
    drafted = num_drafts.index_select(0, slots).clamp(max=n)
    places = torch.arange(n + 1, device=tokens.device)
    good = (tokens[:, :n] == ahead if taken is None else taken) & (places[:n] < drafted[:, None])
    right = good.long().cumprod(1).sum(1)
    stands = torch.cat(
        (torch.where(places[:n] < right[:, None], ahead, tokens[:, :n]), tokens[:, n:]), 1
    )
    return torch.where(places <= right[:, None], stands, -1), right, drafted


def commit_tokens(
    last_token: Tensor, length: Tensor, slots: Tensor, lens: Tensor, tokens: Tensor, right: Tensor
) -> tuple[Tensor, Tensor]:
    """Requests in `slots` [R] have got right [R] drafts and a token more, of tokens [R, n + 1],
    after a step that wrote entries up to lens [R]: their newest token and their length, by slot
    in last_token and length, move on.

    Returns (the token after each row of the step, 0 where none stands, [R (n + 1)]; the row of
    each request's last such, [R])."""
    width = tokens.shape[1]
    last_token.index_copy_(0, slots, tokens.gather(1, right[:, None]).squeeze(1))
    length.index_copy_(0, slots, lens - width + 1 + right)
    return tokens.clamp(min=0).flatten(), torch.arange(
        0, tokens.numel(), width, device=tokens.device
    ) + right
