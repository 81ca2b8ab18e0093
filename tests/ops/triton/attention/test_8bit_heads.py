"""Keys and values of heads in 8 bits, a scale for each token and head: what a row holds, that
every backend writes the same numbers and attends to them alike. Interpreted without a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rorqual.ops import reference
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.interface import AttentionMetadata, GQAWeights, Ops, TokenPlaces
from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON, needs_triton

pytestmark = pytest.mark.exhaustive(but_first=True)

if SKIP_REASON is None:
    from rorqual.ops.triton.backend import TritonOps

BF16 = torch.bfloat16
FP32 = torch.float32
KINDS = [torch.uint8, torch.int8]  # e4m3 and int8
PAGE = 8
GROUPS = 2


def backends() -> list[Ops]:
    """On a GPU the two that run there; else all, the CPU's with its compiled kernels and
    without."""
    found: list[Ops] = [Ops()] if DEVICE == "cuda" else [Ops(), CpuOps(native=False), CpuOps()]
    return found if SKIP_REASON is not None else [*found, TritonOps()]


def named(ops: Ops) -> str:
    return f"{ops.name}{'-native' if getattr(ops, 'native', None) else ''}"


def drawn(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    """Of magnitudes that differ from row to row by powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-5, 3, shape[0]).roll(shape[0] // 3)
    values = torch.randn(*shape, generator=generator) * sizes.view(-1, *(1,) * (len(shape) - 1))
    return values.to(dtype).to(DEVICE)


def poisoned(pages: int, width: int, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(K, V, scales) whose scales are NaN, and e4m3 numbers too; page 0 is zero, as in a pool."""
    k, v = (
        torch.full((pages, PAGE, GROUPS, width), 255, dtype=torch.uint8, device=DEVICE).view(kind)
        for _ in range(2)
    )
    scales = torch.full((pages, PAGE, GROUPS, 2), float("nan"), device=DEVICE)
    for plane in (k, v, scales):
        plane[0] = 0
    return k, v, scales


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("width", "dtype"), [(128, BF16), (64, FP32), (24, torch.float16)])
def test_a_head_reads_back_within_its_rounding(
    kind: torch.dtype, width: int, dtype: torch.dtype
) -> None:
    heads = drawn(40, GROUPS, width).to(dtype)
    heads[5] = 0
    data, scales = reference.pack_heads(heads, kind)
    assert (data.dtype, data.shape, scales.shape) == (kind, heads.shape, heads.shape[:2])
    back = reference.unpack_heads(data, scales, FP32)
    most = heads.double().abs().amax(-1, keepdim=True).clamp(1e-4)
    away = (back.double() - heads.double()).abs()
    half_a_step = {
        torch.int8: most / 127 / 2,
        torch.uint8: heads.double().abs() / 16 + most / 448 / 512,
    }
    assert (away <= half_a_step[kind] * 1.01).all()
    assert not back[5].any()
    assert away.max() > 0


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("width", "dtype"), [(32, FP32), (128, BF16), (24, FP32)])
@pytest.mark.parametrize("ops", backends(), ids=named)
def test_a_prologue_writes_its_own_heads_quantized(
    ops: Ops, width: int, dtype: torch.dtype, kind: torch.dtype
) -> None:
    """Number for number what packing the heads of an unquantized cache gives; the queries do not
    change, and nothing beside the slots is written."""
    heads = 6
    w = GQAWeights(*(drawn(width, dtype=dtype, seed=i).clamp(-2, 2) for i in (1, 2)), 1e-6)
    qkv = drawn(5, heads + 2 * GROUPS, width, dtype=dtype, seed=3)
    angle = drawn(5, width // 2, seed=4).clamp(-3, 3)
    slots = torch.tensor([9, 31, 8, 17, 12], device=DEVICE)
    places = TokenPlaces(angle.cos(), angle.sin(), slots)
    plain = torch.zeros(2, 4, PAGE, GROUPS, width, dtype=dtype, device=DEVICE)
    q = ops.gqa_prologue(qkv.clone(), w, places, (plain[0], plain[1]))
    planes = poisoned(4, width, kind)
    expected = [plane.clone() for plane in planes]
    for i in range(2):
        data, scale = reference.pack_heads(plain[i].flatten(0, 1)[slots], kind)
        expected[i].flatten(0, 1)[slots] = data
        expected[2].flatten(0, 1)[slots, :, i] = scale
    assert torch.equal(ops.gqa_prologue(qkv.clone(), w, places, planes), q)
    for plane, wanted in zip(planes, expected, strict=True):
        assert torch.equal(plane.nan_to_num(7), wanted.nan_to_num(7))


def cached(
    lens: list[int], width: int, dtype: torch.dtype, kind: torch.dtype
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, list[tuple[Tensor, Tensor]]]:
    """(planes, tables, what each request's keys and values read as, in fp64)."""
    pages = [-(-n // PAGE) for n in lens]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(4)) + 1
    tables = torch.zeros(len(lens), max(pages) + 1, dtype=torch.int64)
    planes = poisoned(sum(pages) + 1, width, kind)
    found = []
    for i, (count, own) in enumerate(zip(pages, order.split(pages), strict=True)):
        tables[i, :count] = own
        at = torch.arange(lens[i])
        place = tables[i, at // PAGE].to(DEVICE), (at % PAGE).to(DEVICE)
        read = []
        for j in range(2):
            data, scale = reference.pack_heads(
                drawn(max(lens[i], 1), GROUPS, width, dtype=dtype, seed=2 * i + j)[: lens[i]] / 9,
                kind,
            )
            planes[j][place] = data
            planes[2][(*place, slice(None), j)] = scale
            read.append(reference.unpack_heads(data, scale, torch.float64))
        found.append((read[0], read[1]))
    return planes, tables.to(DEVICE), found


CASES = [
    ([37, 8, 64, 1, 23], 1, 0),  # decode, lengths mixed
    ([30, 9], 3, 4),  # rows under verification, whose lengths the host knows as bounds alone
    ([12, 40, 7], 7, 0),  # chunks of prompt
]


@pytest.mark.parametrize(("lens", "queries", "slack"), CASES, ids=["decode", "drafts", "prompt"])
@pytest.mark.parametrize(("width", "dtype"), [(64, FP32), (128, BF16), (24, FP32)])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("ops", backends(), ids=named)
def test_attention_over_8bit_heads(
    ops: Ops,
    kind: torch.dtype,
    width: int,
    dtype: torch.dtype,
    lens: list[int],
    queries: int,
    slack: int,
) -> None:
    heads = 6
    planes, tables, entries = cached(lens, width, dtype, kind)
    bounds = tuple(min(n + slack, tables.shape[1] * PAGE) for n in lens)
    where = AttentionMetadata(
        tables, torch.tensor(lens, device=DEVICE), (queries,) * len(lens), bounds, exact=not slack
    )
    # scores of about one: keys are as large as 100
    q = drawn(1, len(lens) * queries, heads, width, seed=5)[0].to(dtype) / 1000
    got = ops.attention(q, *planes[:2], where, 0.5, planes[2])
    expected = torch.cat(
        [
            reference.causal_attention(part.double(), *own, 0.5)
            for part, own in zip(q.split(queries), entries, strict=True)
        ]
    )
    assert got.dtype == dtype
    assert got.isfinite().all(), "nothing past a request's end is read"
    away = (got.double() - expected).norm() / expected.norm()
    assert away < (1e-5 if dtype == FP32 else 8e-3)


@needs_triton
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_benchmarks_case_judges_the_kernel(
    kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rorqual.bench.kernels import attention
    from rorqual.ops.triton.attention.gqa_decode import GqaDecodeConfig

    case = attention.gqa_case(2, 130, held=kind)
    assert case.kernel in attention.KERNELS
    plain = attention.gqa_case(2, 130)
    assert 0.5 < case.bytes / plain.bytes < 0.6
    monkeypatch.setattr(attention, "ROTATE", case.bytes)
    setup = case.setup(torch.device(DEVICE))
    out = setup.calls[0](GqaDecodeConfig(64, 4, 2, tma=False))
    assert setup.error(out) < 5e-3
    assert setup.error(out * 1.1) > 0.05
