"""Cases of rorqual.bench.kernels.run: the parts of an MoE layer around the routed experts. Routers,
moe_align_block_size, and shared experts, fused or as a dense layer."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rorqual.bench.kernels import gemm_and_experts as base
from rorqual.bench.kernels.gemm_and_experts import Call, ExpertShape, KernelCase, KernelSetup
from rorqual.config.model import MoEConfig
from rorqual.ops import reference
from rorqual.ops.activation import Activation, hidden_of
from rorqual.ops.deferred_sum import DeferredMoESum
from rorqual.ops.reference import ExpertWeights, RouterWeights, Weight
from rorqual.ops.triton.moe import align, combine, topk
from rorqual.ops.triton.moe import grouped_gemm as ex
from rorqual.ops.triton.moe import router_gemm as gating
from rorqual.ops.triton.rowwise import norm

V2_LITE = ExpertShape("bf16", 66, 2048, 1408, 8, 2)
V3 = ExpertShape("fp8", 257, 7168, 2048, 9, 1)
V3_TP8 = ExpertShape("fp8", 257, 7168, 256, 9, 1)  # a rank's columns of every expert
JOINED = [
    (V2_LITE, "experts bf16 V2-Lite joined"),
    (V3, "experts fp8 V3 joined"),
    (V3_TP8, "experts fp8 V3 tp8 joined"),
]
FUSED_SHARED_TOKENS = (1, 2, 4, 8, 64, 256, 1024, 4096)

# --- routers ---

ROUTERS = {
    "V3": MoEConfig(
        256,
        8,
        2048,
        scoring="sigmoid",
        method="noaux_tc",
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        scaling=2.5,
    ),
    "Qwen3": MoEConfig(128, 8, 768, norm_topk_prob=True, router_fp32=False),
    "V2-Lite": MoEConfig(64, 6, 1408),
}
SHARED = {"V3": 1, "Qwen3": 0, "V2-Lite": 2}
Routing = Callable[[Tensor, RouterWeights], tuple[Tensor, Tensor]]


def route_setup(model: str, tokens: int, device: torch.device) -> KernelSetup:
    moe = ROUTERS[model]
    bias = torch.randn(moe.num_experts, device=device) * 0.05 if moe.has_bias else None
    sets = [torch.randn(tokens, moe.num_experts, device=device) for _ in range(4)]

    def error() -> float:
        zero = torch.zeros_like(sets[0])
        ids, weights = topk.route(sets[0], bias, moe)
        expected_ids, expected = reference.route(sets[0], bias, moe)
        return base.difference(
            zero.scatter(1, ids, weights), zero.scatter(1, expected_ids, expected)
        )

    return KernelSetup(
        [partial(topk.route, x, bias, moe) for x in sets],
        error,
        tokens * (moe.num_experts * 4 + moe.top_k * 12),
    )


def gate_data(
    model: str, tokens: int, device: torch.device, kind: torch.dtype | None = None
) -> tuple[list[Tensor], Tensor]:
    """(gates, x). kind: of the gate; left out, as a layer holds it."""
    moe = ROUTERS[model]
    hidden = 7168 if model == "V3" else 2048
    kind = kind or (torch.float32 if moe.router_fp32 else torch.bfloat16)

    def one() -> Tensor:
        return torch.randn(moe.num_experts, hidden, device=device).mul_(hidden**-0.5).to(kind)

    return base.rotated(moe.num_experts * hidden * 4, one, device), torch.randn(
        tokens, hidden, device=device, dtype=torch.bfloat16
    )


def joint(x: Tensor, w: RouterWeights) -> tuple[Tensor, Tensor]:
    return topk.router(x, w)


def split(x: Tensor, w: RouterWeights) -> tuple[Tensor, Tensor]:
    dtype = torch.float32 if w.config.router_fp32 else w.gate.dtype
    return topk.route(gating.partial_logits(x, w.gate), w.bias, w.config, kind=dtype)


def apart(x: Tensor, w: RouterWeights) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(x.to(w.gate.dtype), w.gate)
    return topk.route(logits, w.bias, w.config)


def router_setup(
    model: str, tokens: int, way: Routing, kind: torch.dtype | None, device: torch.device
) -> KernelSetup:
    """One kernel for few tokens (`joint`), partial products on tensor cores and then the choice
    (`split`), or the library's product and then the choice (`apart`). Rounded logits may tie:
    error by weights."""
    moe = ROUTERS[model]
    bias = torch.randn(moe.num_experts, device=device) * 0.05 if moe.has_bias else None
    gates, x = gate_data(model, tokens, device, kind)
    routers = [RouterWeights(gate, bias, moe) for gate in gates]

    def error() -> float:
        _, weights = way(x, routers[0])
        exact = x.double() @ gates[0].double().t()
        _, expected = reference.route(
            exact.float() if moe.router_fp32 else exact.to(gates[0].dtype), bias, moe
        )
        return base.difference(weights.sort(-1).values, expected.sort(-1).values)

    size = gates[0].numel() * gates[0].element_size() + x.numel() * 2
    return KernelSetup([partial(way, x, w) for w in routers], error, size)


# --- the sort ---


def sort_setup(model: str, tokens: int, buckets: bool, device: torch.device) -> KernelSetup:
    """Sort (token, expert) pairs, including fused shared experts, into blocks of 32 rows. buckets:
    in one pass; else each program scans all pairs."""
    moe = ROUTERS[model]
    shared = SHARED[model]
    slots = moe.num_experts + shared

    def one() -> Tensor:
        ids = torch.rand(tokens, moe.num_experts, device=device).topk(moe.top_k).indices
        return reference.with_shared(
            ids, torch.rand(ids.shape, device=device), moe.num_experts, shared
        )[0]

    def call(ids: Tensor) -> Any:
        with mock.patch.object(align, "BUCKET_PICKS", align.BUCKET_PICKS if buckets else 0):
            return align.moe_align_block_size(ids, slots, 32)

    sets = [one() for _ in range(4)]

    def error() -> float:
        out = call(sets[0])
        flat = sets[0].flatten().tolist()
        for slot, start, stop, shift in out.blocks[:, : int(out.count)].t().tolist():
            members = out.order[start + shift : min(stop, start + 32) + shift].tolist()
            assert members
            assert all(flat[pick] == slot for pick in members), "a pick in another expert's rows"
        return 0.0

    return KernelSetup([partial(call, ids) for ids in sets], error, sets[0].numel() * 12)


# --- shared experts ---


def as_layer(shape: ExpertShape, w: ExpertWeights) -> tuple[Weight, Weight]:
    """The shared experts of a stack as one MLP: a copy."""
    gate_up = w.gate_up
    down = w.down

    def halves(part: Tensor) -> Tensor:
        return torch.cat([half.flatten(0, 1) for half in part[shape.routed :].chunk(2, 1)])

    def side_by_side(part: Tensor) -> Tensor:
        return torch.cat(tuple(part[shape.routed :]), 1)

    up, out = (part(weight.data) for part, weight in ((halves, gate_up), (side_by_side, down)))
    if gate_up.scale is None or down.scale is None:
        return Weight(up), Weight(out)
    return Weight(up, halves(gate_up.scale)), Weight(out, side_by_side(down.scale))


def routed_of(shape: ExpertShape, w: ExpertWeights) -> ExpertWeights:
    """The stack without its shared experts."""

    def part(weight: Weight) -> Weight:
        scale = None if weight.scale is None else weight.scale[: shape.routed]
        return Weight(weight.data[: shape.routed], scale)

    return ExpertWeights(part(w.gate_up), part(w.down))


def beside_setup(shape: ExpertShape, tokens: int, device: torch.device) -> KernelSetup:
    """The same sums with shared experts as a layer of their own: what joining them is to save."""
    from rorqual.ops.triton.backend import TritonOps

    ops = TritonOps()
    whole = base.expert_weights(shape, device)
    shared = as_layer(shape, whole)
    routed = routed_of(shape, whole)
    picked = base.draws(shape, tokens, device)
    own = [tuple(part[:, : -shape.shared].contiguous() for part in draw[1:]) for draw in picked]

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return ex.experts(x, ids, weights, routed, ops.mlp(x, *shared))

    def error() -> float:
        rows = torch.randperm(tokens, device=device)[: base.CHECKED]
        return base.difference(
            call(picked[0][0], *own[0])[rows], base.expert_truth(picked[0], rows, whole)
        )

    calls: list[Call] = [
        partial(call, draw[0], *mine) for draw, mine in zip(picked, own, strict=True)
    ]
    return KernelSetup(calls, error, *base.expert_cost(shape, picked))


# --- the sum over a token's experts, and the norm behind it ---

# V2-Lite and Qwen3-30B; Qwen3-235B; V3
SUMS = {"2048 K8": (2048, 8), "4096 K8": (4096, 8), "7168 K9": (7168, 9)}
SUM_WAYS = ("", "spare ", "apart ")


def sum_norm_setup(
    hidden: int, top_k: int, tokens: int, way: str, device: torch.device
) -> KernelSetup:
    """One fused kernel, as used or with the compiler's number of concurrent loads (`spare`), or two
    kernels (`apart`)."""
    weight = torch.rand(hidden, device=device, dtype=torch.bfloat16) + 0.5

    def one() -> tuple[DeferredMoESum, Tensor]:
        y, residual = (
            torch.randn(rows, hidden, device=device, dtype=torch.bfloat16)
            for rows in (tokens * top_k, tokens)
        )
        return DeferredMoESum(
            y, None, torch.rand(tokens, top_k, device=device), None, combine.combine
        ), residual

    def call(gave: DeferredMoESum, residual: Tensor) -> tuple[Activation, Tensor]:
        if way == "apart ":
            return norm.add_norm(gave.total(), residual, weight, 1e-6)
        with mock.patch.object(combine, "ROW_REGISTERS", 0 if way else combine.ROW_REGISTERS):
            return combine.combine_add_norm(gave, residual, weight, 1e-6)

    row = tokens * hidden * 2
    sets = base.rotated(row * (top_k + 1), one, device)

    def error() -> float:
        (gave, residual) = sets[0]
        found = call(*sets[0])
        for mine, other in zip(
            found, norm.add_norm(gave.total(), residual, weight, 1e-6), strict=True
        ):
            assert torch.equal(hidden_of(mine), hidden_of(other)), "not the bits of the two kernels"
        total = (
            gave.y.double().view(tokens, top_k, hidden) * gave.weights.double()[..., None]
        ).sum(1)
        return base.difference(
            hidden_of(found[0]),
            reference.add_norm(total, residual.double(), weight.double(), 1e-6)[0],
        )

    return KernelSetup([partial(call, *given) for given in sets], error, row * (top_k + 3))


# --- a whole layer ---

LAYERS = {"V3": V3, "Qwen3": base.QWEN3_30B, "V2-Lite": V2_LITE}
WAYS = ("", "sorted apart ", "beside ", "before ")


def constants(way: str) -> list[Any]:
    """Patches that select the layer's variant `way`."""
    patches: list[Any] = []
    if way:
        patches.append(mock.patch.object(ex, "SORTS_WHILE_ROUTING", False))
    if way == "before ":
        patches += [
            mock.patch.object(gating, "TOKENS", {}),
            mock.patch.object(align, "BUCKET_PICKS", 0),
        ]
    return patches


def layer_setup(model: str, tokens: int, way: str, device: torch.device) -> KernelSetup:
    """Router, routed and shared experts. Variants: as used; sorting in a separate kernel; also
    shared experts as a dense layer; also cuBLAS for the router GEMM and a scanning sort. Routing is
    natural: gates are random."""
    from rorqual.ops.triton.backend import TritonOps

    ops = TritonOps()
    moe = ROUTERS[model]
    shape = LAYERS[model]
    whole = base.expert_weights(shape, device)
    joined = way in ("", "sorted apart ") or not shape.shared
    experts = whole if joined else routed_of(shape, whole)
    layer = None if joined else as_layer(shape, whole)
    bias = torch.randn(moe.num_experts, device=device) * 0.05 if moe.has_bias else None
    gates, _ = gate_data(model, 1, device)
    fused = shape.shared if joined else 0
    routers = [RouterWeights(gate, bias, moe, fused) for gate in gates]
    inputs = [
        torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16)
        for _ in range(8 if tokens <= 16 else 2)
    ]

    def call(x: Tensor, router: RouterWeights) -> Tensor:
        with contextlib.ExitStack() as stack:
            for patch in constants(way):
                stack.enter_context(patch)
            beside = ops.mlp(x, *layer) if layer else None
            return ops.routed_experts(x, router, experts, beside)

    def all_picks(x: Tensor, router: RouterWeights) -> base.Draw:
        """The layer's choice, shared experts behind it whether or not they are fused."""
        return (x, *ops.router(x, replace(router, num_fused_shared_experts=shape.shared)))

    def error() -> float:
        rows = torch.randperm(tokens, device=device)[: base.CHECKED]
        truth = base.expert_truth(all_picks(inputs[0], routers[0]), rows, whole)
        return base.difference(call(inputs[0], routers[0])[rows], truth)

    given = list(zip(inputs, routers, strict=False))
    calls: list[Call] = [partial(call, x, router) for x, router in given]
    picked = [all_picks(x, router) for x, router in given]
    return KernelSetup(calls, error, *base.expert_cost(shape, picked))


# --- the list ---


def cases() -> Iterator[KernelCase]:
    for model in ROUTERS:
        for t in (1, 8):
            yield KernelCase(
                f"router {model} T{t}", "bf16", partial(router_setup, model, t, joint, None)
            )
        if ROUTERS[model].router_fp32:
            yield KernelCase(
                f"router bf16 gate {model} T1",
                "bf16",
                partial(router_setup, model, 1, joint, torch.bfloat16),
            )
        for t in (1, 8, 16, 64, 256, 512, 4096):
            yield KernelCase(
                f"router split {model} T{t}", "bf16", partial(router_setup, model, t, split, None)
            )
            yield KernelCase(
                f"router apart {model} T{t}", "bf16", partial(router_setup, model, t, apart, None)
            )
            if ROUTERS[model].router_fp32:
                yield KernelCase(
                    f"router split bf16 gate {model} T{t}",
                    "bf16",
                    partial(router_setup, model, t, split, torch.bfloat16),
                )
        for t in (1, 64, 128, 256, 8192):
            yield KernelCase(f"route {model} T{t}", "bf16", partial(route_setup, model, t))
        for t in (8, 64, 256):
            yield KernelCase(f"sort {model} T{t}", "bf16", partial(sort_setup, model, t, True))
            yield KernelCase(
                f"sort by scans {model} T{t}", "bf16", partial(sort_setup, model, t, False)
            )
    for (name, sizes), t, way in itertools.product(SUMS.items(), (2, 8, 64, 256, 512), SUM_WAYS):
        yield KernelCase(
            f"sum_norm {way}{name} T{t}", "bf16", partial(sum_norm_setup, *sizes, t, way)
        )
    for model, shape in LAYERS.items():
        for t, way in itertools.product((1, 8, 64, 256), WAYS):
            if shape.shared or way != "beside ":
                yield KernelCase(
                    f"moe {way}{model} T{t}", shape.kind, partial(layer_setup, model, t, way)
                )
    for shape, name in JOINED:
        for t in FUSED_SHARED_TOKENS:
            yield KernelCase(f"{name} T{t}", shape.kind, partial(base.expert_setup, shape, t))
            yield KernelCase(
                f"{name.replace('joined', 'beside')} T{t}",
                shape.kind,
                partial(beside_setup, shape, t),
            )
