"""What `bench kernels --peer` hands to vLLM's kernels of 4-bit weights: stand-ins with their
signatures compute, from just that, what our cases expect.

A stand-in that repacks only reshapes, so the order of Marlin's and CUTLASS's weights is not tested;
the order of Marlin's scales is.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.bench.kernels import gemm_and_experts as base
from rorqual.bench.kernels import quantized, vllm_int4, vllm_kernels
from rorqual.bench.kernels.gemm_and_experts import ExpertShape
from rorqual.bench.kernels.quantized import W4A8_FP8, W4A8_INT8, W4A16, QuantizedFormat
from rorqual.ops.reference import FP8

pytestmark = pytest.mark.exhaustive

LIMITS = {W4A16: 1e-4, W4A8_INT8: 1e-4, W4A8_FP8: 2e-3}  # CUTLASS has scales in e4m3
NUMBER = 1125899907892224  # of 4 unsigned bits less 8
SHAPE = ExpertShape("bf16", 4, 512, 256, 2)


def numbers(packed: Tensor) -> Tensor:
    """[columns / 8, rows] int32 to [columns, rows], 0 to 15."""
    parts = torch.stack([packed >> 4 * i & 15 for i in range(8)], 1)
    return parts.flatten(0, 1).double()


def by_group(scale: Tensor, columns: int) -> Tensor:
    return scale.double().repeat_interleave(columns // scale.shape[0], 0)


def loaded_scales(scale: Tensor, int8: bool) -> Tensor:
    """Marlin's scales [groups, rows] in the rows' order."""
    order = [i + 8 * j for i in range(8) for j in range(8)]
    if int8:
        order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
        scale = scale.view(torch.int16)
    out = torch.empty_like(scale)
    out.view(-1, len(order))[:, order] = scale.view(-1, len(order))
    return out


def marlin_product(a: Tensor, data: Tensor, scale: Tensor, a_scale: Tensor | None) -> Tensor:
    columns = a.shape[1]
    assert data.shape[0] * 16 == columns
    packed = data.reshape(columns // 8, -1)
    scales = by_group(loaded_scales(scale, a.dtype == torch.int8), columns)
    out = a.double() @ ((numbers(packed) - 8) * scales)
    return out if a_scale is None else out * a_scale.double()


def gptq_marlin_repack(packed: Tensor, columns: int, rows: int, bits: int, int8: bool) -> Tensor:
    assert packed.is_contiguous()
    assert packed.dtype == torch.int32
    assert packed.shape == (columns // 8, rows)
    assert bits == 4
    return packed.reshape(columns // 16, 2 * rows)


def marlin_gemm(
    a, c, data, bias, scale, a_scale, global_scale, zeros, locks, kind, m, n, k, atomic, fp32, zero
) -> Tensor:
    assert (c, bias, global_scale, zeros, kind) == (None, None, None, None, NUMBER)
    assert (atomic, fp32, zero) == (False, True, False)
    assert (m, k) == a.shape
    assert (a_scale is None) == (a.dtype == torch.bfloat16)
    assert data.shape[1] == 2 * n
    return marlin_product(a, data, scale, a_scale).bfloat16()


def moe_align_block_size(
    ids: Tensor, experts: int, block: int, order: Tensor, owners: Tensor, count: Tensor, *rest: Any
) -> None:
    assert rest == (None, None)
    assert ids.dtype == torch.int32
    flat = ids.flatten().tolist()
    places: list[int] = []
    for expert in range(experts):
        own = [pick for pick, at in enumerate(flat) if at == expert]
        own += [len(flat)] * (-len(own) % block)
        owners[len(places) // block : (len(places) + len(own)) // block] = expert
        places += own
    order[: len(places)] = torch.tensor(places)
    count.fill_(len(places))


def moe_wna16_marlin_gemm(
    a, c, data, bias, scale, a_scale, global_scale, zeros, locks, order, owners, count, weights,
    block, top_k, multiply, kind, m, n, k, atomic, fp32, zero, thread_k, thread_n, blocks,
) -> Tensor:  # fmt: skip
    assert (bias, global_scale, zeros, kind) == (None, None, None, NUMBER)
    assert (atomic, fp32, zero, thread_k, thread_n, blocks) == (False, True, False, -1, -1, -1)
    assert (m, k) == a.shape
    assert c.shape == (m * top_k, n)
    assert block in (8, 16, 32, 48, 64)
    c.fill_(float("nan"))
    for place, pick in enumerate(order[: int(count)].tolist()):
        if pick < m * top_k:
            expert = int(owners[place // block])
            rows = slice(pick // top_k, pick // top_k + 1)
            given = None if a_scale is None else a_scale[rows]
            out = marlin_product(a[rows], data[expert], scale[expert], given)
            c[pick] = out[0] * (weights.flatten()[pick] if multiply else 1)
    return c


def moe_sum(each: Tensor, out: Tensor, *rest: None) -> None:
    assert rest == (None, None)
    out.copy_(each.double().sum(1))


def machete_prepack(packed: Tensor, kind: torch.dtype, number: int, scales: torch.dtype) -> Tensor:
    assert packed.stride(0) == 1
    assert (kind, number, scales) == (torch.bfloat16, NUMBER, torch.bfloat16)
    return packed


def machete_mm(a, data, kind, out_kind, scale, zeros, group, row, token, schedule) -> Tensor:
    assert (out_kind, zeros, row, token, schedule) == (None,) * 5
    assert (kind, group) == (NUMBER, 128)
    return (a.double() @ ((numbers(data) - 8) * by_group(scale, a.shape[1]))).bfloat16()


def signed_product(a: Tensor, packed: Tensor, groups: Tensor, row: Tensor, token: Tensor) -> Tensor:
    assert a.dtype == groups.dtype == FP8
    assert (groups.float().abs() * 8 <= 448).all()
    plain = numbers(packed)
    weight = torch.where(plain > 7, plain - 16, plain) * by_group(groups, a.shape[1])
    return (a.double() @ weight) * row.double().t() * token.double()


def cutlass_w4a8_mm(a, data, groups, group, row, token, out_kind, schedule) -> Tensor:
    assert (group, out_kind, schedule) == (128, None, None)
    assert data.stride(0) == 1
    return signed_product(a, data, groups, row, token).bfloat16()


def reorder_experts(data: Tensor) -> tuple[Tensor, Tensor]:
    assert data.is_contiguous()
    return data, torch.zeros(data.shape[0], 3, dtype=torch.int32)


def problem_sizes(starts, first, second, n: int, k: int, swapped: bool) -> None:
    assert swapped
    for expert, rows in enumerate((starts[1:] - starts[:-1]).tolist()):
        first[expert] = torch.tensor((2 * n, rows, k))
        second[expert] = torch.tensor((k, rows, n))


def cutlass_w4a8_moe_mm(
    out, a, data, token, row, groups, group, starts, sizes, a_strides, places, c_strides, s_strides,
    schedule,
) -> None:  # fmt: skip
    assert (group, schedule) == (128, None)
    assert (starts.dtype, sizes.dtype) == (torch.int64, torch.int32)
    for expert, (rows, count, columns) in enumerate(sizes.tolist()):
        assert (int(a_strides[expert]), int(c_strides[expert])) == (columns, rows)
        assert s_strides[expert].tolist() == [rows, 0]
        part = slice(int(starts[expert]), int(starts[expert]) + count)
        product = (a[part], data[expert].t(), groups[expert], row[expert], token[part])
        out[part] = signed_product(*product).to(out.dtype)


def permute(
    x, ids, numbers_, expert_map, experts, local, top_k, out, starts, places, sources, sorter, *rest
) -> None:
    assert (expert_map, experts, len(rest)) == (None, local, 3)
    assert numbers_.flatten().tolist() == list(range(ids.numel()))
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().long().bincount(minlength=experts)
    starts.copy_(torch.cat((counts.new_zeros(1), counts.cumsum(0))))
    sources.copy_(order)
    places.view(-1)[order] = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
    out.copy_(x.float()[order // top_k])


def unpermute(each, weights, places, starts, top_k, out) -> None:
    rows = each[places.long()].view(*weights.shape, -1)
    out.copy_((rows.double() * weights[..., None]).sum(1))


def round_rows(most: float) -> Any:
    def rounded(data: Tensor, x: Tensor, scale: Tensor, bound: None) -> None:
        assert bound is None
        scale.copy_(x.float().abs().amax(-1, keepdim=True) / most)
        steps = x.float() / scale
        data.copy_(steps.round() if data.dtype == torch.int8 else steps)

    return rounded


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.double().chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = SimpleNamespace(
        gptq_marlin_repack=gptq_marlin_repack,
        marlin_gemm=marlin_gemm,
        machete_prepack_B=machete_prepack,
        machete_mm=machete_mm,
        cutlass_encode_and_reorder_int4b=lambda data: data,
        cutlass_encode_and_reorder_int4b_grouped=reorder_experts,
        cutlass_pack_scale_fp8=lambda scale: scale,
        cutlass_w4a8_mm=cutlass_w4a8_mm,
        cutlass_w4a8_moe_mm=cutlass_w4a8_moe_mm,
        get_cutlass_moe_mm_problem_sizes_from_expert_offsets=problem_sizes,
        dynamic_scaled_int8_quant=round_rows(127),
        dynamic_per_token_scaled_fp8_quant=round_rows(448),
        silu_and_mul=silu_and_mul,
    )
    experts = SimpleNamespace(
        moe_align_block_size=moe_align_block_size,
        moe_wna16_marlin_gemm=moe_wna16_marlin_gemm,
        moe_sum=moe_sum,
        moe_permute_sort_workspace_size=lambda picks, experts: 64,
        moe_permute_with_scratch=permute,
        moe_unpermute=unpermute,
    )
    monkeypatch.setattr(vllm_int4, "dense_ops", lambda: dense)
    monkeypatch.setattr(vllm_int4, "expert_ops", lambda: experts)
    monkeypatch.setattr(vllm_int4, "marlin_locks", lambda device: None)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("form", LIMITS, ids=lambda form: form.name)
def test_linear_peers_compute_our_case(
    form: QuantizedFormat, tokens: int, vllm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "ROTATE", 1)
    torch.manual_seed(0)
    setup = quantized.linear_setup(form, 64, 512, tokens, torch.device(DEVICE))
    assert setup.judge is not None
    assert setup.peers
    for make in setup.peers.values():
        call = make()
        assert setup.judge(call(0)) < LIMITS[form]
        assert setup.judge(call(1)) > 0.1, "another data set"


@pytest.mark.parametrize("form", LIMITS, ids=lambda form: form.name)
def test_expert_peers_compute_our_case(form: QuantizedFormat, vllm: None) -> None:
    torch.manual_seed(0)
    setup = quantized.expert_setup(form, SHAPE, 9, torch.device(DEVICE))
    assert setup.judge is not None
    assert setup.peers
    for make in setup.peers.values():
        call = make()
        assert setup.judge(call(0)) < LIMITS[form]
        assert setup.judge(call(1)) > 0.1, "another data set"


def test_what_a_peer_does_not_take_is_told(vllm: None) -> None:
    shape = ExpertShape("bf16", 2, 256, 384, 1)
    setup = quantized.expert_setup(W4A8_FP8, shape, 2, torch.device(DEVICE))
    with pytest.raises(ValueError, match="multiples of 256 columns, not 384"):
        setup.peers["vLLM CUTLASS"]()


def test_without_vllm_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_int4, "LIBRARIES", ("no_such_file",))
    setup = quantized.expert_setup(W4A16, SHAPE, 2, torch.device(DEVICE))
    row = vllm_kernels.best(setup.peers, lambda make: (float(make()(0).sum()), None))
    assert row["peers"]["vLLM Marlin"].startswith("ModuleNotFoundError: No module named 'vllm")


def test_a_lost_gpu_ends_the_peers_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> vllm_kernels.Call:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    makers = {"first": broken, "second": broken}
    monkeypatch.setattr(vllm_kernels, "gpu_answers", lambda: True)
    row = vllm_kernels.best(makers, lambda make: (float(make()(0).sum()), None))
    assert [*row["peers"]] == ["first", "second"]
    assert "gpu_lost" not in row
    monkeypatch.setattr(vllm_kernels, "gpu_answers", lambda: False)
    row = vllm_kernels.best(makers, lambda make: (float(make()(0).sum()), None))
    assert [*row["peers"]] == ["first"]
    assert row["gpu_lost"]


def test_rows_of_a_block_follow_the_mean_expert() -> None:
    picks = [8 * tokens for tokens in (1, 64, 256, 1024, 4096)]
    assert [vllm_int4.marlin_rows(n, 128, False) for n in picks] == [8, 8, 32, 64, 64]
    assert vllm_int4.marlin_rows(8, 128, True) == 16


def test_the_cases_with_peers_are_listed() -> None:
    names = {case.name for case in quantized.cases()}
    for form in LIMITS:
        for tokens in (1, 8, 64, 256, 1024, 4096):
            assert f"experts {form.name} T{tokens}" in names
            assert f"experts {form.name} V2-Lite T{tokens}" in names
        for tokens in (1, 8, 64, 256):
            assert f"linear {form.name} 5120x2048 M{tokens}" in names
            assert f"linear {form.name} 2048x4096 M{tokens}" in names
