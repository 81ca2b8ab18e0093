"""vLLM's kernels of 4-bit weights on the data of our own cases, for `bench kernels --peer`: Marlin
for 16-bit and int8 rows, Machete for 16-bit rows of linear layers, CUTLASS for e4m3 rows.

Written for vLLM 0.33.0, of which two shared objects suffice, as files of a folder vllm/ on
PYTHONPATH. Each function takes one case's data, with weights as loaded (int4 in groups of 128
columns, scales bf16, no zero points), repacks them with vLLM's own ops and returns a call by the
number of the data set. Options are those that vLLM 0.33.0 chooses on Hopper. The engine uses
nothing from here.

vLLM rounds rows to int8 in a Triton kernel of its own; here an op of its shared objects does. vLLM
keeps scratch memory between calls; here calls allocate it, which costs nothing in a CUDA graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rorqual.bench.kernels.vllm_kernels import Call
from rorqual.ops.reference import FP8, ExpertWeights, Weight
from rorqual.ops.rounding import FP8_MAX

GROUP = 128  # columns of a scale
LIBRARIES = ("_C_stable_libtorch", "_moe_C_stable_libtorch")
UINT4_LESS_8 = 4 << 8 | 8 << 17 | 1 << 50  # the ops' number for 4 unsigned bits, bias 8
FLIP_SIGNS = -0x77777778  # int32 0x88888888: from a number plus 8 to two's complement, and back
BLOCKS = (8, 16, 32, 48, 64)  # Marlin's rows of a block
FULL = 0.9  # share of a block's rows that the mean expert must have for the next larger block
INT8_STEPS = 4096  # steps of a scale that int8 rows take
LOCKS = 4  # Marlin's blocks of a multiprocessor, at most
CUTLASS_COLUMNS = 256  # vLLM's CUTLASS experts have a multiple of it

Draw = tuple[Tensor, Tensor, Tensor]


def dense_ops() -> Any:
    """torch.ops._C with vLLM's ops. Raises ImportError where its shared objects are not."""
    _load()
    return torch.ops._C


def expert_ops() -> Any:
    """torch.ops._moe_C, likewise."""
    _load()
    return torch.ops._moe_C


def _load() -> None:
    for name in LIBRARIES:
        importlib.import_module(f"vllm.{name}")


# ---- data, common to all


def words(weight: Weight) -> Tensor:
    """[..., rows, columns / 8] int32: eight columns a word, the first in the lowest bits."""
    assert weight.is_int4
    assert weight.zero is None
    assert weight.block == (1, GROUP)
    return weight.data.contiguous().view(torch.int32)


def rounded_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, columns] as int8 and scales [T, 1] fp32."""
    data = torch.empty_like(x, dtype=torch.int8)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    dense_ops().dynamic_scaled_int8_quant(data, x, scale, None)
    return data, scale


def rounded_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, columns] as e4m3 and scales [T, 1] fp32."""
    data = torch.empty_like(x, dtype=FP8)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    dense_ops().dynamic_per_token_scaled_fp8_quant(data, x, scale, None)
    return data, scale


# ---- Marlin


@dataclass(frozen=True)
class MarlinWeight:
    """data [..., columns / 16, 2 rows] int32 and scale [..., groups, rows] bf16, both in Marlin's
    order. unit: for int8 rows scale holds int16 multiples of it; fp32."""

    data: Tensor
    scale: Tensor
    unit: Tensor | None
    rows: int
    columns: int


def marlin_weight(weight: Weight) -> MarlinWeight:
    """From a matrix, or experts one by one."""
    assert weight.scale is not None
    int8 = weight.activation != "wide"
    held = words(weight)
    assert weight.columns > GROUP, "one group of columns has another order of scales"
    rows = held.shape[-2]
    columns = weight.columns

    def repacked(one: Tensor) -> Tensor:
        by_column = one.t().contiguous()
        return dense_ops().gptq_marlin_repack(by_column, columns, rows, 4, int8)

    experts = held.dim() == 3
    data = torch.stack([repacked(one) for one in held]) if experts else repacked(held)
    scale = weight.scale.transpose(-1, -2)
    unit = None
    if int8:
        unit = scale.max().float() / INT8_STEPS
        steps = (scale.float() / unit).round().to(torch.int16)
        scale = steps.view(torch.bfloat16)
    return MarlinWeight(data, marlin_scales(scale, int8), unit, rows, columns)


def marlin_scales(scale: Tensor, int8: bool) -> Tensor:
    """[..., groups, rows] with rows in the order in which a thread needs them: of 64 every eighth,
    or for int8 rows of 32 every eighth pair."""
    if int8:
        return scale.unflatten(-1, (-1, 4, 4, 2)).transpose(-3, -2).flatten(-4).contiguous()
    return scale.unflatten(-1, (-1, 8, 8)).transpose(-1, -2).flatten(-3).contiguous()


def marlin_locks(device: torch.device) -> Tensor:
    """Zeros, which every kernel leaves behind again."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return torch.zeros(count * LOCKS, dtype=torch.int32, device=device)


def marlin_linear(x: Tensor, weights: Sequence[Weight], rounds: bool) -> Call:
    """x [T, columns] bf16, weights [rows, columns]; [T, rows]. rounds: int8 rows are rounded in the
    call, else before it."""
    ops = dense_ops()
    held = [marlin_weight(weight) for weight in weights]
    locks = marlin_locks(x.device)
    rounded = None if held[0].unit is None else rounded_int8(x)

    def scaled(scale: Tensor, weight: MarlinWeight) -> Tensor:
        assert weight.unit is not None
        return scale * weight.unit

    known = [scaled(rounded[1], weight) for weight in held] if rounded else []

    def call(i: int) -> Tensor:
        weight = held[i]
        rows, scale = x, None
        if rounded and rounds:
            rows, plain = rounded_int8(x)
            scale = scaled(plain, weight)
        elif rounded:
            rows, scale = rounded[0], known[i]
        return ops.marlin_gemm(
            rows, None, weight.data, None, weight.scale, scale, None, None, locks, UINT4_LESS_8,
            rows.shape[0], weight.rows, weight.columns, False, True, False,
        )  # fmt: skip

    return call


def marlin_rows(picks: int, experts: int, int8: bool) -> int:
    """Rows of a block for so many (token, expert) pairs."""
    fitting = (rows for rows in BLOCKS if picks / experts / rows < FULL)
    return max(next(fitting, BLOCKS[-1]), 16 if int8 else 0)


def marlin_experts(draws: Sequence[Draw], w: ExpertWeights) -> Call:
    """draws: (x [T, hidden] bf16, ids [T, K], weights [T, K] fp32) by number; [T, hidden]."""
    dense = dense_ops()
    ops = expert_ops()
    up = marlin_weight(w.gate_up)
    down = marlin_weight(w.down)
    locks = marlin_locks(draws[0][0].device)
    picked = [(x, ids.int().contiguous(), weights.contiguous()) for x, ids, weights in draws]
    experts = w.down.data.shape[0]
    int8 = up.unit is not None

    def rounded(x: Tensor, weight: MarlinWeight) -> tuple[Tensor, Tensor | None]:
        if weight.unit is None:
            return x, None
        data, scale = rounded_int8(x)
        return data, scale * weight.unit

    def call(i: int) -> Tensor:
        x, ids, weights = picked[i]
        tokens, top_k = ids.shape
        picks = ids.numel()
        block = marlin_rows(picks, experts, int8)
        blocks = _sorted(ops, ids, experts, block)

        def product(rows: Tensor, out: Tensor, weight: MarlinWeight, share: int, last: bool) -> Any:
            """share: rows of `out` for one of `rows`; last: multiply by the routing weights."""
            data, scale = rounded(rows, weight)
            ops.moe_wna16_marlin_gemm(
                data, out, weight.data, None, weight.scale, scale, None, None, locks, *blocks,
                weights, block, share, last, UINT4_LESS_8, data.shape[0], weight.rows,
                weight.columns, False, True, False, -1, -1, -1,
            )  # fmt: skip

        # the second product's rows are where the first one's were
        room = torch.empty(picks * max(up.rows, down.rows), dtype=x.dtype, device=x.device)
        both = room[: picks * up.rows].view(picks, up.rows)
        product(x, both, up, top_k, False)
        hidden = torch.empty(picks, down.columns, dtype=x.dtype, device=x.device)
        dense.silu_and_mul(hidden, both)
        each = room[: picks * down.rows].view(picks, down.rows)
        product(hidden, each, down, 1, True)
        out = torch.empty_like(x)
        ops.moe_sum(each.view(tokens, top_k, down.rows), out, None, None)
        return out

    return call


def _sorted(ops: Any, ids: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs by expert, padded to blocks; each block's expert; how many with padding. int32."""
    picks = ids.numel()
    room = picks + experts * (block - 1)
    if picks < experts:
        room = min(room, picks * block)
    order, owners, count = (
        torch.empty(size, dtype=torch.int32, device=ids.device)
        for size in (room, -(-room // block), 1)
    )
    ops.moe_align_block_size(ids, experts, block, order, owners, count, None, None)
    return order, owners, count


# ---- Machete


def machete_linear(x: Tensor, weights: Sequence[Weight]) -> Call:
    """x [T, columns] bf16, weights [rows, columns]; [T, rows]."""
    ops = dense_ops()
    kind = torch.bfloat16
    held = []
    for weight in weights:
        assert weight.scale is not None
        data = ops.machete_prepack_B(words(weight).t(), kind, UINT4_LESS_8, kind)
        held.append((data, weight.scale.t().contiguous()))

    def call(i: int) -> Tensor:
        data, scale = held[i]
        return ops.machete_mm(x, data, UINT4_LESS_8, None, scale, None, GROUP, None, None, None)

    return call


# ---- CUTLASS


def signed_words(weight: Weight) -> Tensor:
    """`words` with numbers in two's complement."""
    return words(weight) ^ FLIP_SIGNS


def e4m3_scales(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [..., rows, groups] as e4m3 times [..., rows, 1] fp32. The e4m3 numbers are so small
    that eight times them are representable."""
    row = scale.float().amax(-1, keepdim=True) / FP8_MAX
    steps = (scale.float() / row).to(FP8).float()
    return (steps / 8).to(FP8), row * 8


def cutlass_linear(x: Tensor, weights: Sequence[Weight], rounds: bool) -> Call:
    """x [T, columns] bf16, weights [rows, columns]; [T, rows]. rounds: x is rounded in the call,
    else before it."""
    ops = dense_ops()
    rounded = rounded_e4m3(x)
    held = []
    for weight in weights:
        assert weight.scale is not None
        groups, row = e4m3_scales(weight.scale)
        data = ops.cutlass_encode_and_reorder_int4b(signed_words(weight).t())
        held.append((data, ops.cutlass_pack_scale_fp8(groups.t().contiguous()), row))

    def call(i: int) -> Tensor:
        data, groups, row = held[i]
        rows, scale = rounded_e4m3(x) if rounds else rounded
        return ops.cutlass_w4a8_mm(rows, data, groups, GROUP, row, scale, None, None)

    return call


@dataclass(frozen=True)
class CutlassWeight:
    """Experts' data int32, where it is (`places`), its scales of groups and of rows, and the
    strides of the latter's matrices, of the product's input and of its output: int64 an expert."""

    data: Tensor
    places: Tensor
    groups: Tensor
    row: Tensor
    group_strides: Tensor
    in_strides: Tensor
    out_strides: Tensor


def cutlass_weight(weight: Weight) -> CutlassWeight:
    """From [experts, rows, columns]."""
    assert weight.scale is not None
    if weight.columns % CUTLASS_COLUMNS:
        text = f"vLLM's CUTLASS experts have multiples of {CUTLASS_COLUMNS} columns"
        raise ValueError(f"{text}, not {weight.columns}")
    ops = dense_ops()
    experts, rows, _ = weight.data.shape
    data, places = ops.cutlass_encode_and_reorder_int4b_grouped(signed_words(weight))
    groups, row = e4m3_scales(weight.scale)
    packed = ops.cutlass_pack_scale_fp8(groups.transpose(1, 2).contiguous())
    strides = torch.zeros(experts, 2, dtype=torch.int64, device=data.device)
    strides[:, 0] = rows
    inside, outside = (
        torch.full((experts,), size, dtype=torch.int64, device=data.device)
        for size in (weight.columns, rows)
    )
    return CutlassWeight(data, places, packed, row, strides, inside, outside)


def cutlass_experts(draws: Sequence[Draw], w: ExpertWeights) -> Call:
    """draws: (x [T, hidden] bf16, ids [T, K], weights [T, K] fp32) by number; [T, hidden]."""
    dense = dense_ops()
    up = cutlass_weight(w.gate_up)
    down = cutlass_weight(w.down)
    experts, hidden, _ = w.down.data.shape
    inner = w.down.columns
    picked = [(x, ids.int().contiguous(), weights.contiguous()) for x, ids, weights in draws]
    scratch = _Permutation(picked[0][1], experts)

    def product(rows: Tensor, scale: Tensor, w: CutlassWeight, out: Tensor, sizes: Tensor) -> None:
        dense.cutlass_w4a8_moe_mm(
            out, rows, w.data, scale, w.row, w.groups, GROUP, scratch.starts[:-1], sizes,
            w.in_strides, w.places, w.out_strides, w.group_strides, None,
        )  # fmt: skip

    def call(i: int) -> Tensor:
        x, ids, weights = picked[i]
        picks = ids.numel()
        device = x.device
        rows, scale = scratch.permuted(*rounded_e4m3(x), ids)
        first, second = (
            torch.empty(experts, 3, dtype=torch.int32, device=device) for _ in range(2)
        )
        dense.get_cutlass_moe_mm_problem_sizes_from_expert_offsets(
            scratch.starts, first, second, inner, hidden, True
        )
        both = torch.empty(picks, 2 * inner, dtype=x.dtype, device=device)
        product(rows, scale, up, both, first)
        between = torch.empty(picks, inner, dtype=x.dtype, device=device)
        dense.silu_and_mul(between, both)
        each = torch.empty(picks, hidden, dtype=x.dtype, device=device)
        product(*rounded_e4m3(between), down, each, second)
        out = torch.empty_like(x)
        scratch.summed(each, weights, out)
        return out

    return call


class _Permutation:
    """vLLM's sorting of rows by expert, with the scratch memory that it keeps: ids [T, K] int32 of
    this size. starts [experts + 1] int64: each expert's first row."""

    def __init__(self, ids: Tensor, experts: int) -> None:
        self.ops = expert_ops()
        self.experts = experts
        picks = ids.numel()
        numbers = torch.arange(picks, dtype=torch.int32, device=ids.device)
        self.numbers = numbers.view_as(ids)
        self.starts = torch.empty(experts + 1, dtype=torch.int64, device=ids.device)
        self.places = torch.empty_like(ids)
        self.sources = torch.empty_like(numbers)
        size = self.ops.moe_permute_sort_workspace_size(picks, experts)
        self.sorter = torch.empty(size, dtype=torch.int8, device=ids.device)
        self.others = [torch.empty_like(ids) for _ in range(3)]

    def permuted(self, x: Tensor, scale: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and scales of each pair, by expert."""
        top_k = ids.shape[1]
        picks = ids.numel()
        out = torch.empty(picks, x.shape[1], dtype=x.dtype, device=x.device)
        self.sources.fill_(picks)
        self.ops.moe_permute_with_scratch(
            x, ids, self.numbers, None, self.experts, self.experts, top_k, out, self.starts,
            self.places, self.sources, self.sorter, *self.others,
        )  # fmt: skip
        return out, scale[self.sources.clamp(max=picks - 1) // top_k]

    def summed(self, each: Tensor, weights: Tensor, out: Tensor) -> None:
        """each [T K, hidden] by expert; out [T, hidden]."""
        places = self.places.flatten()
        self.ops.moe_unpermute(each, weights, places, self.starts, weights.shape[1], out)
