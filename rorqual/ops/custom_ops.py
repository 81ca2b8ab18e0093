"""An op table that torch.compile can trace: plain torch where inductor can fuse, custom operators
where tracing must stop.

Used only with `exe_mode: compile`, so other engines have no dispatch overhead. Calls outside of
compilation (a step with prompt tokens, a prediction module) go straight to the backend. Inside,
entries that are `Ops.opaque` become torch.library operators that call the backend; the others are
traced from the reference. Attention is always an operator.

An operator's arguments are tensors and numbers. Everything else it needs is taken from the step's
current table (`attending`): the backend, the weights of an MLA layer, the router's configuration,
and the step's segment, from which backends derive masks and schedules once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from rorqual.config.model import MoEConfig
from rorqual.ops.activation import Activation, hidden_of
from rorqual.ops.interface import AttentionMetadata, GQAWeights, MLAWeights, Ops, TokenPlaces
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.reference import (
    ACTIVATION_BLOCK,
    FP8,
    ExpertWeights,
    RouterWeights,
    Weight,
    in_8_bits,
)

Method = TypeVar("Method", bound=Callable[..., Any])
# The table that operators use: torch passes them only tensors and numbers.
_at_hand: ContextVar[TracedOps] = ContextVar("table at hand")


def entry(method: Method) -> Method:
    """An entry of the table; outside of compilation it calls the backend's."""

    @wraps(method)
    def call(self: TracedOps, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(self, *args, **options)
        return getattr(self.inner, method.__name__)(*args, **options)

    return call  # type: ignore[return-value]


class TracedMetadata(AttentionMetadata):
    """Stand-in for a step's decode segment while tracing, with only its number of tokens. Operators
    read the real one."""

    def __init__(self, tokens: int):
        self.tokens = tokens

    def __bool__(self) -> bool:
        return True


class TracedOps(Ops):
    """`inner`: the backend. `moe`: the configuration of the model's routers."""

    def __init__(self, inner: Ops, moe: MoEConfig):
        self.inner = inner
        self.moe = moe
        self.name = inner.name
        self.segment: AttentionMetadata | None = None
        self.mla: dict[int, MLAWeights] = {}

    @contextmanager
    def attending(self, segment: AttentionMetadata) -> Iterator[None]:
        """Inside, operators call this table's backend and use this segment."""
        before = _at_hand.set(self)
        self.segment = segment
        try:
            yield
        finally:
            self.segment = None
            _at_hand.reset(before)

    def compiling(self) -> AbstractContextManager[Callable[[], int] | None]:
        return self.inner.compiling()

    def beside_messages(self) -> AbstractContextManager[Any]:
        return self.inner.beside_messages()

    # ---- rows

    delay = entry(Ops.delay)
    kernel_choice = entry(Ops.kernel_choice)
    watch_kernels = entry(Ops.watch_kernels)
    draw_normal = entry(Ops.draw_normal)
    capture_calls = entry(Ops.capture_calls)
    captures_prompts = entry(Ops.captures_prompts)
    concat_columns = entry(Ops.concat_columns)
    norm = entry(Ops.norm)
    add_norm_for_router = entry(Ops.add_norm_for_router)
    sum_add_norm = entry(Ops.sum_add_norm)
    swiglu = entry(Ops.swiglu)
    rope = entry(Ops.rope)
    heads_matmul = entry(Ops.heads_matmul)
    prepare_router_weight = entry(Ops.prepare_router_weight)
    prepare_weight = entry(Ops.prepare_weight)
    prepare_experts = entry(Ops.prepare_experts)
    side_stream = entry(Ops.side_stream)
    computing = entry(Ops.computing)
    prepare_mla = entry(Ops.prepare_mla)
    route = entry(Ops.route)
    quantize_activation = entry(Ops.quantize_activation)
    pack_routing = entry(Ops.pack_routing)
    unpack_routing = entry(Ops.unpack_routing)
    rank_blocks = entry(Ops.rank_blocks)
    add_partial_sums = entry(Ops.add_partial_sums)
    routed_experts = entry(Ops.routed_experts)
    experts_deferred = entry(Ops.experts_deferred)
    dense_attention = entry(Ops.dense_attention)
    shares = entry(Ops.shares)
    stretch_attention = entry(Ops.stretch_attention)
    decompressed_attention = entry(Ops.decompressed_attention)
    gather = entry(Ops.gather)
    latent_entries = entry(Ops.latent_entries)
    decode_rows = entry(Ops.decode_rows)
    verify_drafts = entry(Ops.verify_drafts)
    commit_tokens = entry(Ops.commit_tokens)
    uniform = entry(Ops.uniform)
    argmax = entry(Ops.argmax)
    distribution = entry(Ops.distribution)
    sample_from = entry(Ops.sample_from)
    sample_residual = entry(Ops.sample_residual)
    write_probs = entry(Ops.write_probs)
    weights_changed = entry(Ops.weights_changed)

    @entry
    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        if table.device == ids.device:
            return super().embed(ids, table)
        return torch.ops.rorqual.embed(ids, table)

    @entry
    def add_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        quantize_output: str | None = None,
    ) -> tuple[Activation, Tensor]:
        if residual is None or not self.inner.opaque("add_norm", weight):
            return super().add_norm(x, residual, weight, eps)
        return torch.ops.rorqual.add_norm(x, residual, weight, eps)

    @entry
    def linear(self, x: Activation, weight: Weight, bias: Tensor | None = None) -> Tensor:
        if weight.scale is None and not self.inner.opaque("linear", weight.data):
            return super().linear(x, weight, bias)
        return torch.ops.rorqual.linear(hidden_of(x), *_parts(weight), bias)

    @entry
    def mlp(self, x: Activation, gate_up: Weight, down: Weight) -> Tensor:
        if gate_up.scale is None and not self.inner.opaque("mlp", gate_up.data, down.data):
            return super().mlp(x, gate_up, down)
        return torch.ops.rorqual.mlp(hidden_of(x), *_parts(gate_up), *_parts(down))

    @entry
    def write_cache(self, plane: Tensor, slots: Tensor, values: Tensor) -> None:
        if not self.inner.opaque("write_cache"):
            return super().write_cache(plane, slots, values)
        torch.ops.rorqual.write_cache(plane, slots, values)

    @entry
    def write_latent(self, plane: Tensor, slots: Tensor, entries: Tensor, rank: int) -> None:
        """Quantizes in an operator, so that a compiled step writes the same bytes as others."""
        if not in_8_bits(plane):
            return super().write_latent(plane, slots, entries, rank)
        torch.ops.rorqual.write_latent(plane, slots, entries, rank)

    # ---- attention

    @entry
    def mla_prologue(
        self,
        x: Activation,
        w: MLAWeights,
        places: TokenPlaces,
        plane: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        weights = [weight.data for weight in (w.down, w.kv_b, w.q_b) if weight is not None]
        if plane is None or w.keep_query_input or not self.inner.opaque("mla_prologue", *weights):
            return super().mla_prologue(x, w, places, plane)
        heads = w.config.num_heads
        width = w.config.qk_dim
        rows = hidden_of(x)
        return (
            rows,
            torch.ops.rorqual.mla_prologue(
                w.layer, rows, places.cos, places.sin, plane, places.slots, heads, width
            ),
            None,
        )

    mla_down = entry(Ops.mla_down)
    mla_up = entry(Ops.mla_up)

    @entry
    def mla_absorbed(
        self, q: Tensor, w: MLAWeights, plane: Tensor, segment: AttentionMetadata, scale: float
    ) -> Activation:
        if not self.inner.opaque("mla_absorbed", w.kv_b.data):
            return super().mla_absorbed(q, w, plane, segment, scale)
        return torch.ops.rorqual.mla_absorbed(
            w.layer, q, plane, w.config.num_heads * w.config.v_dim, scale
        )

    mla_decode = entry(Ops.mla_decode)
    joined_heads = entry(Ops.joined_heads)
    write_heads = entry(Ops.write_heads)  # called only by the reference's prologue

    @entry
    def gqa_prologue(
        self, qkv: Tensor, w: GQAWeights, places: TokenPlaces, planes: tuple[Tensor, ...]
    ) -> Tensor:
        """Always an operator with an 8-bit cache: see write_latent."""
        scales = planes[2] if len(planes) > 2 else None
        if scales is None and not self.inner.opaque("gqa_prologue", w.q_norm):
            return super().gqa_prologue(qkv, w, places, planes)
        return torch.ops.rorqual.gqa_prologue(
            qkv,
            w.q_norm,
            w.k_norm,
            w.eps,
            places.cos,
            places.sin,
            *planes[:2],
            places.slots,
            scales,
        )

    @entry
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
        return torch.ops.rorqual.attention(q, k_plane, v_plane, scale, scales)

    @entry
    def latent_attention(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        plane: Tensor,
        segment: AttentionMetadata,
        scale: float,
    ) -> Tensor:
        return torch.ops.rorqual.latent_attention(q_latent, q_rope, plane, scale)

    # ---- experts

    @entry
    def router(
        self, x: Tensor, w: RouterWeights, padded: PaddedRows | None = None
    ) -> tuple[Tensor, Tensor]:
        if padded is not None or not self.inner.opaque("router", w.gate):
            return super().router(x, w, padded)
        assert w.config == self.moe, "one router configuration a model"
        return torch.ops.rorqual.router(
            x, w.gate, w.bias, w.config.top_k, w.num_fused_shared_experts
        )

    @property
    def fuses_shared_experts(self) -> bool:
        return self.inner.fuses_shared_experts

    @entry
    def experts(
        self,
        x: Activation,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
        base: Tensor | None = None,
    ) -> Tensor:
        parts = (*_parts(w.gate_up), *_parts(w.down), w.num_fused_shared_experts)
        y = torch.ops.rorqual.experts(hidden_of(x), ids, weights, *parts)
        return y if base is None else y + base

    @entry
    def experts_fp8(
        self,
        x: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
    ) -> Tensor:
        parts = (*_parts(w.gate_up), *_parts(w.down))
        return torch.ops.rorqual.experts_fp8(x, scale, dtype, ids, weights, *parts)

    @entry
    def experts_in_pieces(
        self,
        rows: Sequence[Tensor],
        dtype: torch.dtype,
        ids: Tensor,
        weights: Tensor,
        w: ExpertWeights,
    ) -> None:
        """A compiled step sends whole results."""

    @entry
    def quantize_for_experts(self, x: Tensor, w: ExpertWeights) -> tuple[Tensor, Tensor]:
        """An operator, so that a compiled step sends the same bytes as others."""
        parts = (*_parts(w.gate_up), *_parts(w.down))
        return torch.ops.rorqual.quantize_for_experts(x, *parts)


def _parts(weight: Weight) -> tuple[Any, ...]:
    """The weight's fields in the order of _WEIGHT."""
    return (
        weight.data,
        weight.scale,
        list(weight.block),
        weight.zero,
        weight.activation,
        weight.group_index,
        weight.turned,
    )


# ---- operators: what each computes, and its result's shape


_WEIGHT = (
    "Tensor {0}, Tensor? {0}_scale, int[] {0}_block, Tensor? {0}_zero, str {0}_activation, "
    "Tensor? {0}_group_index, bool {0}_turned"
)
PARTS = 7  # arguments of a weight
_library = torch.library.Library("rorqual", "DEF")


def _operator(schema: str, like: Callable[..., Any]) -> Callable[[Method], Method]:
    def define(function: Method) -> Method:
        name = function.__name__.lstrip("_")
        _library.define(name + schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"rorqual::{name}", like, lib=_library)
        return function

    return define


def _table() -> TracedOps:
    return _at_hand.get()


def _segment() -> AttentionMetadata:
    segment = _table().segment
    assert segment is not None
    return segment


def _columns(x: Tensor, columns: int) -> Tensor:
    return x.new_empty(x.shape[0], columns)


@_operator(
    "(Tensor ids, Tensor rows) -> Tensor",
    lambda ids, rows: ids.new_empty(ids.shape[0], rows.shape[1], dtype=rows.dtype),
)
def _embed(ids: Tensor, rows: Tensor) -> Tensor:
    return _table().inner.embed(ids, rows)


@_operator(
    "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, residual, weight, eps: (torch.empty_like(x), torch.empty_like(x)),
)
def _add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed, total = _table().inner.add_norm(x, residual, weight, eps)
    return hidden_of(normed), total


@_operator(
    f"(Tensor x, {_WEIGHT.format('w')}, Tensor? bias) -> Tensor",
    lambda x, *parts: _columns(x, parts[0].shape[0]),
)
def _linear(x: Tensor, *parts: Any) -> Tensor:
    return _table().inner.linear(x, _weight(*parts[:PARTS]), parts[PARTS])


@_operator(
    f"(Tensor x, {_WEIGHT.format('gate_up')}, {_WEIGHT.format('down')}) -> Tensor",
    lambda x, *weights: _columns(x, weights[PARTS].shape[0]),
)
def _mlp(x: Tensor, *weights: Any) -> Tensor:
    return _table().inner.mlp(x, _weight(*weights[:PARTS]), _weight(*weights[PARTS:]))


@_operator(
    "(Tensor(a!) plane, Tensor slots, Tensor values) -> ()", lambda plane, slots, values: None
)
def _write_cache(plane: Tensor, slots: Tensor, values: Tensor) -> None:
    _table().inner.write_cache(plane, slots, values)


@_operator(
    "(Tensor(a!) plane, Tensor slots, Tensor entries, int rank) -> ()",
    lambda plane, slots, entries, rank: None,
)
def _write_latent(plane: Tensor, slots: Tensor, entries: Tensor, rank: int) -> None:
    _table().inner.write_latent(plane, slots, entries, rank)


@_operator(
    "(int layer, Tensor x, Tensor cos, Tensor sin, Tensor(a!) plane, Tensor slots, int "
    "heads, int width) -> Tensor",
    lambda layer, x, cos, sin, plane, slots, heads, width: x.new_empty(x.shape[0], heads, width),
)
def _mla_prologue(
    layer: int,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    plane: Tensor,
    slots: Tensor,
    heads: int,
    width: int,
) -> Tensor:
    places = TokenPlaces(cos, sin, slots)
    return _table().inner.mla_prologue(x, _table().mla[layer], places, plane)[1].contiguous()


@_operator(
    "(int layer, Tensor q, Tensor plane, int width, float scale) -> Tensor",
    lambda layer, q, plane, width, scale: q.new_empty(q.shape[0], width),
)
def _mla_absorbed(layer: int, q: Tensor, plane: Tensor, width: int, scale: float) -> Tensor:
    heads = _table().inner.mla_absorbed(q, _table().mla[layer], plane, _segment(), scale)
    return hidden_of(heads).contiguous()


@_operator(
    "(Tensor qkv, Tensor q_norm, Tensor k_norm, float eps, Tensor cos, Tensor sin, "
    "Tensor(a!) k, Tensor(b!) v, Tensor slots, Tensor(c!)? scales) -> Tensor",
    lambda qkv, q_norm, k_norm, eps, cos, sin, k, v, slots, scales: qkv.new_empty(
        qkv.shape[0], qkv.shape[1] - 2 * k.shape[2], qkv.shape[2]
    ),
)
def _gqa_prologue(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    scales: Tensor | None,
) -> Tensor:
    w = GQAWeights(q_norm, k_norm, eps)
    places = TokenPlaces(cos, sin, slots)
    planes = (k, v) if scales is None else (k, v, scales)
    return _table().inner.gqa_prologue(qkv, w, places, planes).contiguous()


@_operator(
    "(Tensor q, Tensor k, Tensor v, float scale, Tensor? scales) -> Tensor",
    lambda q, k, v, scale, scales: q.new_empty(q.shape[0], q.shape[1], v.shape[-1]),
)
def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, scales: Tensor | None) -> Tensor:
    return _table().inner.attention(q, k, v, _segment(), scale, scales).contiguous()


@_operator(
    "(Tensor q_latent, Tensor q_rope, Tensor plane, float scale) -> Tensor",
    lambda q_latent, q_rope, plane, scale: q_latent.new_empty(q_latent.shape),
)
def _latent_attention(q_latent: Tensor, q_rope: Tensor, plane: Tensor, scale: float) -> Tensor:
    return _table().inner.latent_attention(q_latent, q_rope, plane, _segment(), scale).contiguous()


def _empty_topk(x: Tensor, each: int) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], each)
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32)


@_operator(
    "(Tensor x, Tensor gate, Tensor? bias, int top_k, int shared) -> (Tensor, Tensor)",
    lambda x, gate, bias, top_k, shared: _empty_topk(x, top_k + shared),
)
def _router(
    x: Tensor, gate: Tensor, bias: Tensor | None, top_k: int, shared: int
) -> tuple[Tensor, Tensor]:
    return _table().inner.router(x, RouterWeights(gate, bias, _table().moe, shared))


@_operator(
    f"(Tensor x, Tensor ids, Tensor weights, {_WEIGHT.format('gate_up')}, "
    f"{_WEIGHT.format('down')}, int shared) -> Tensor",
    lambda x, ids, weights, *experts: torch.empty_like(x),
)
def _experts(x: Tensor, ids: Tensor, weights: Tensor, *experts: Any) -> Tensor:
    gate_up = _weight(*experts[:PARTS])
    w = ExpertWeights(gate_up, _weight(*experts[PARTS : 2 * PARTS]), experts[2 * PARTS])
    return _table().inner.experts(x, ids, weights, w)


@_operator(
    f"(Tensor x, Tensor scale, ScalarType dtype, Tensor ids, Tensor weights, "
    f"{_WEIGHT.format('gate_up')}, {_WEIGHT.format('down')}) -> Tensor",
    lambda x, scale, dtype, ids, weights, *experts: x.new_empty(x.shape, dtype=dtype),
)
def _experts_fp8(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    ids: Tensor,
    weights: Tensor,
    *experts: Any,
) -> Tensor:
    w = ExpertWeights(_weight(*experts[:PARTS]), _weight(*experts[PARTS:]))
    return _table().inner.experts_fp8(x, scale, dtype, ids, weights, w)


@_operator(
    f"(Tensor x, {_WEIGHT.format('gate_up')}, {_WEIGHT.format('down')}) -> (Tensor, Tensor)",
    lambda x, *experts: (
        x.new_empty(x.shape, dtype=FP8),
        x.new_empty(x.shape[0], -(-x.shape[1] // ACTIVATION_BLOCK), dtype=torch.float32),
    ),
)
def _quantize_for_experts(x: Tensor, *experts: Any) -> tuple[Tensor, Tensor]:
    w = ExpertWeights(_weight(*experts[:PARTS]), _weight(*experts[PARTS:]))
    data, scale = _table().inner.quantize_for_experts(x, w)
    return data.contiguous(), scale.contiguous()


def _weight(data: Tensor, scale: Tensor | None, block: list[int], *more: Any) -> Weight:
    return Weight(data, scale, (block[0], block[1]), *more)
