"""Cases of rorqual.bench.kernels.run: linear layers and experts with weights in int8, int4 and e4m3
with a scale a row (ops/triton/quantized), laid out as the backend lays them out.

int8's rate is taken to be fp8's measured one. error: against fp64, with rows rounded as the format
rounds them. Peers of 4-bit weights (vllm_int4.py) get them as loaded, and rows rounded where ours
are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rorqual.bench.kernels import gemm_and_experts as base
from rorqual.bench.kernels import vllm_int4 as peers
from rorqual.bench.kernels.gemm_and_experts import (
    QWEN3_30B,
    V2_LITE,
    V3_SHARE,
    Call,
    Draw,
    ExpertShape,
    KernelCase,
    KernelSetup,
)
from rorqual.ops import reference
from rorqual.ops.reference import FP8, ExpertWeights, Weight
from rorqual.ops.triton.quantized import experts, int4_order, rounded_direct
from rorqual.ops.triton.quantized.backend import QuantizedTritonOps
from rorqual.ops.triton.quantized.linear import linear
from rorqual.ops.triton.quantized.rows import RoundedRows, rounded_rows


@dataclass(frozen=True)
class QuantizedFormat:
    """kind: of the tensor cores' operands, whose rate is the floor's. numbers: int8, int4 or fp8;
    blocks: a scale for 128x128 of them."""

    name: str
    kind: str
    numbers: str
    activation: str
    blocks: bool = False

    @property
    def width(self) -> float:
        """Bytes of a weight."""
        return base.WIDTHS["int4"] if self.numbers == "int4" else 1


W4A16 = QuantizedFormat("int4-turned", "int4", "int4", "wide")
W4A8_INT8 = QuantizedFormat("int4-int-rows", "int8", "int4", "int8_token")
W4A8_FP8 = QuantizedFormat("int4-fp-rows", "fp8", "int4", "fp8_token")
W8A8 = QuantizedFormat("int8", "int8", "int8", "int8_token")
W8A8_BLOCKS = QuantizedFormat("int8-blocks", "int8", "int8", "int8_group", blocks=True)
FP8_CHANNEL = QuantizedFormat("fp8-channel", "fp8", "fp8", "fp8_token")
FP8_BLOCKS = QuantizedFormat("fp8-blocks", "fp8", "fp8", "fp8_group", blocks=True)
FORMATS = (W4A16, W8A8, W4A8_FP8, W4A8_INT8, FP8_CHANNEL, W8A8_BLOCKS)
LINEARS = ((5120, 2048), (2048, 4096))  # Qwen3-30B: qkv, out
TOKENS = (1, 4, 8, 16, 64, 256, 1024, 4096)
EXPERT_TOKENS = (1, 8, 64, 256, 1024, 4096)
EXPERTS: tuple[tuple[QuantizedFormat, ExpertShape, str, tuple[int, ...]], ...] = (
    *((form, QWEN3_30B, "", EXPERT_TOKENS) for form in FORMATS),
    *((form, V2_LITE, " V2-Lite", EXPERT_TOKENS) for form in (W4A16, W4A8_FP8, W4A8_INT8)),
    (W8A8, V2_LITE, " V2-Lite", (1, 64)),
    (W4A8_FP8, V3_SHARE, " V3 share", (8, 128, 512)),
    # of one token; for more the kernels of gemm_and_experts.py
    (FP8_BLOCKS, QWEN3_30B, "", (1,)),
    (FP8_BLOCKS, V2_LITE, " V2-Lite", (1,)),
)
Makers = Mapping[str, Callable[[], Callable[[int], Tensor]]]
_held: dict[tuple[Any, ...], ExpertWeights] = {}


def random_weight(form: QuantizedFormat, device: torch.device, *shape: int) -> Weight:
    """Rows of about unit norm, as loaded."""
    if form.numbers == "int4":
        return replace(base.random_weight("int4", device, *shape), activation=form.activation)
    *stack, rows, columns = shape
    places = (-(-rows // 128), -(-columns // 128)) if form.blocks else (rows, 1)
    scale = (torch.rand(*stack, *places, device=device) + 0.5) / 73 * columns**-0.5
    if form.numbers == "int8":
        data = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
    else:
        data = torch.empty(shape, dtype=FP8, device=device)
        for part in data.view(-1, rows, columns):
            part.copy_(torch.randn(rows, columns, device=device) * 73)
    return Weight(data, scale, (128, 128) if form.blocks else (1, columns),
                  activation=form.activation)  # fmt: skip


def exact(weight: Weight) -> Tensor:
    return reference.dequantize(int4_order.plain(weight), torch.float64)


def as_rounded(x: Tensor, weight: Weight) -> Tensor:
    kind = weight.activation
    return (x if kind == "wide" else reference.rounded(x, kind)).double()


def linear_data(
    form: QuantizedFormat, rows: int, columns: int, tokens: int, device: torch.device
) -> tuple[list[Weight], Tensor, Tensor | RoundedRows]:
    """Weights as stored, x, and x as the GEMM takes it: quantization of x is not timed, unless the
    kernel for one token does it."""
    copies = min(64, max(2, int(-(-base.ROTATE // (rows * columns * form.width)))))
    held = [random_weight(form, device, rows, columns) for _ in range(copies)]
    for weight in held:
        QuantizedTritonOps().prepare_weight(weight, form.name)
    x = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
    rounds = tokens == 1 and rounded_direct.takes(held[0])
    wide = form.activation == "wide" or rounds
    return held, x, x if wide else rounded_rows(x, form.activation)


def linear_setup(
    form: QuantizedFormat, rows: int, columns: int, tokens: int, device: torch.device
) -> KernelSetup:
    held, x, given = linear_data(form, rows, columns, tokens, device)

    def judge(out: Tensor) -> float:
        some = torch.randperm(tokens, device=device)[:64]
        truth = as_rounded(x[some], held[0]) @ exact(held[0]).t()
        return base.difference(out[some], truth)

    size = rows * columns * form.width + tokens * columns * (2 if form is W4A16 else 1)
    size += 2 * tokens * rows
    calls: list[Call] = [partial(linear, given, weight) for weight in held]
    others = linear_peers(form, held, x, not isinstance(given, RoundedRows))
    return KernelSetup(
        calls, lambda: judge(calls[0]()), size, 2 * tokens * rows * columns, others, judge
    )


def linear_peers(form: QuantizedFormat, held: list[Weight], x: Tensor, rounds: bool) -> Makers:
    """rounds: rows are rounded in the call."""

    def loaded() -> list[Weight]:
        return [int4_order.plain(weight) for weight in held]

    if form is W4A16:
        return {
            "vLLM Marlin": lambda: peers.marlin_linear(x, loaded(), rounds),
            "vLLM Machete": lambda: peers.machete_linear(x, loaded()),
        }
    if form is W4A8_INT8:
        return {"vLLM Marlin": lambda: peers.marlin_linear(x, loaded(), rounds)}
    if form is W4A8_FP8:
        return {"vLLM CUTLASS": lambda: peers.cutlass_linear(x, loaded(), rounds)}
    return {}


def expert_weights(
    form: QuantizedFormat, shape: ExpertShape, device: torch.device
) -> ExpertWeights:
    key = (form, shape.slots, shape.hidden, shape.inner)
    if key not in _held:
        _held.clear()  # one set at a time
        _held[key] = ExpertWeights(
            random_weight(form, device, shape.slots, 2 * shape.inner, shape.hidden),
            random_weight(form, device, shape.slots, shape.hidden, shape.inner),
        )
        QuantizedTritonOps().prepare_experts(_held[key], form.name)
    return _held[key]


def expert_truth(draw: Draw, rows: Tensor, w: ExpertWeights) -> Tensor:
    """fp64 but for what is rounded: rows before each product, and between them to bf16."""
    x, ids, weights = draw
    total = torch.zeros(len(rows), x.shape[1], dtype=torch.float64, device=x.device)
    for slot in ids[rows].unique().tolist():
        at, pick = (ids[rows] == slot).nonzero(as_tuple=True)
        up = exact(w.gate_up[slot])
        gate, value = (as_rounded(x[rows][at], w.gate_up) @ up.t()).chunk(2, -1)
        h = (torch.nn.functional.silu(gate) * value).to(x.dtype)
        out = as_rounded(h, w.down) @ exact(w.down[slot]).t()
        total.index_add_(0, at, out * weights[rows][at, pick, None])
    return total


def expert_setup(
    form: QuantizedFormat, shape: ExpertShape, tokens: int, device: torch.device
) -> KernelSetup:
    w = expert_weights(form, shape, device)
    picked = base.draws(shape, tokens, device)

    def judge(out: Tensor) -> float:
        rows = torch.randperm(tokens, device=device)[: base.CHECKED]
        assert not out.isnan().any(), "output left unwritten"
        return base.difference(out[rows], expert_truth(picked[0], rows, w))

    _, flops = base.expert_cost(shape, picked)
    active = sum(ids.unique().numel() for _, ids, _ in picked) / len(picked)
    matrices = 3 * shape.hidden * shape.inner * form.width
    size = active * matrices + picked[0][0].numel() * 4
    calls: list[Call] = [partial(experts.experts, *draw, w) for draw in picked]
    others = expert_peers(form, picked, w)
    return KernelSetup(calls, lambda: judge(calls[0]()), size, flops, others, judge)


def expert_peers(form: QuantizedFormat, picked: list[Draw], w: ExpertWeights) -> Makers:
    def loaded() -> ExpertWeights:
        return replace(w, gate_up=int4_order.plain(w.gate_up), down=int4_order.plain(w.down))

    if form in (W4A16, W4A8_INT8):
        return {"vLLM Marlin": lambda: peers.marlin_experts(picked, loaded())}
    if form is W4A8_FP8:
        return {"vLLM CUTLASS": lambda: peers.cutlass_experts(picked, loaded())}
    return {}


def cases() -> Iterator[KernelCase]:
    for form, shape, model, sizes in EXPERTS:
        for t in sizes:
            name = f"experts {form.name}{model} T{t}"
            yield KernelCase(name, form.kind, partial(expert_setup, form, shape, t))
    for form, n, k, m in linears():
        name = f"linear {form.name} {n}x{k} M{m}"
        yield KernelCase(name, form.kind, partial(linear_setup, form, n, k, m))


def linears() -> Iterator[tuple[QuantizedFormat, int, int, int]]:
    """(format, rows, columns, tokens)"""
    for form, (n, k), m in itertools.product(FORMATS, LINEARS, TOKENS):
        yield form, n, k, m
    for n, k in LINEARS:
        yield FP8_BLOCKS, n, k, 1
