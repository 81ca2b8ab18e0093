"""The 8-bit latent cache: what a row holds, that every backend writes the same bytes and reads
them alike. Interpreted without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON, needs_triton

pytest.importorskip("safetensors")

from rorqual.ops import reference
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.interface import AttentionMetadata, MLAWeights, Ops, TokenPlaces
from tests.gpu.device_driver import random_model
from tests.ops.triton.test_triton_backend import DEEPSEEK

pytestmark = pytest.mark.exhaustive(but_first=True)

if SKIP_REASON is None:
    from rorqual.ops.triton.attention import latent_fp8
    from rorqual.ops.triton.backend import TritonOps

BF16 = torch.bfloat16
FP32 = torch.float32
SIZES = [(512, 64, BF16), (64, 16, BF16), (32, 16, FP32), (256, 64, torch.float16)]
PAGE = 8
KINDS = [torch.uint8, torch.int8]  # e4m3 and int8


def backends() -> list[Ops]:
    """On a GPU the two that run there; else all, the CPU's with its compiled kernels and
    without."""
    found: list[Ops] = [Ops()] if DEVICE == "cuda" else [Ops(), CpuOps(native=False), CpuOps()]
    return found if SKIP_REASON is not None else [*found, TritonOps()]


def named(ops: Ops) -> str:
    return f"{ops.name}{'-native' if getattr(ops, 'native', None) else ''}"


def entries_of(count: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Of magnitudes that differ from row to row by powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-5, 4, count).roll(count // 3)[:, None]
    return (torch.randn(count, width, generator=generator) * sizes).to(dtype).to(DEVICE)


def emptied(pages: int, width: int, kind: torch.dtype = torch.uint8) -> Tensor:
    """Bytes that read as NaN, whichever part of a row they are (of int8 the scales alone); page 0
    is zero, as in a pool."""
    plane = torch.full((pages, PAGE, width), 255, dtype=torch.uint8, device=DEVICE).view(kind)
    plane[0] = 0
    return plane


# ---- what a row is


@pytest.mark.parametrize(("rank", "rope", "dtype"), [*SIZES, (132, 6, BF16)])
def test_a_row_reads_back_within_e4m3_rounding(rank: int, rope: int, dtype: torch.dtype) -> None:
    entries = entries_of(40, rank + rope, FP32).to(dtype)
    rows = reference.pack_latent(entries, rank)
    assert rows.shape == (40, rank + 4 * -(-rank // 128) + rope * dtype.itemsize)
    back = reference.unpack_latent(rows, rank, dtype)
    assert torch.equal(back[:, rank:], entries[:, rank:]), "rope keys are kept as they are"
    assert torch.equal(
        reference.unpack_latent(rows.view(5, 8, -1), rank, dtype).flatten(0, 1), back
    )
    for first in range(0, rank, 128):
        block, read = (x[:, first : min(first + 128, rank)].double() for x in (entries, back))
        largest = block.abs().amax(-1, keepdim=True).clamp(1e-4)
        # half a step; of a subnormal as well
        assert ((read - block).abs() <= block.abs() / 16 * 1.01 + largest / 448 / 512 * 1.01).all()


@pytest.mark.parametrize(("rank", "rope", "dtype"), SIZES)
def test_an_int8_row_reads_back_within_half_a_step(
    rank: int, rope: int, dtype: torch.dtype
) -> None:
    entries = entries_of(40, rank + rope, FP32).to(dtype)
    rows = reference.pack_latent(entries, rank, torch.int8)
    assert rows.dtype == torch.int8
    back = reference.unpack_latent(rows, rank, dtype)
    assert torch.equal(back[:, rank:], entries[:, rank:])
    for first in range(0, rank, 128):
        block, read = (x[:, first : min(first + 128, rank)].double() for x in (entries, back))
        step = block.abs().amax(-1, keepdim=True).clamp(1e-4) / 127
        rounding = read.abs().clamp(torch.finfo(dtype).tiny) * torch.finfo(dtype).eps
        assert ((read - block).abs() <= step * 0.501 + rounding).all()


def test_values_on_the_grid_are_exact_and_zero_stays_zero() -> None:
    grid = torch.tensor([448.0, -448.0, 1.0, 0.0, 0.109375, -30.0, 2.0**-9, 240.0]).repeat(16)[None]
    entries = torch.cat((torch.cat((grid, torch.zeros_like(grid))), torch.ones(2, 4)), 1)
    rows = reference.pack_latent(entries, 128)
    assert torch.equal(reference.unpack_latent(rows, 128, FP32), entries)
    scales = reference.latent_parts(rows, 128, FP32)[1].flatten().tolist()
    assert scales == pytest.approx([1.0, 1e-4 / 448], rel=1e-6)


# ---- writing


@needs_triton
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("rank", "rope", "dtype"), SIZES)
def test_kernels_write_the_references_bytes_and_read_them_back(
    rank: int, rope: int, dtype: torch.dtype, kind: torch.dtype
) -> None:
    entries = entries_of(30, rank + rope, dtype)
    entries[3] = 0
    entries[4, : rank // 2] = 2.5 * entries[4].abs().amax() / 127  # halves, to even
    rows = reference.pack_latent(entries, rank, kind)
    plane = emptied(5, rows.shape[1], kind)
    before = emptied(5, rows.shape[1], kind)
    slots = (torch.randperm(32, generator=torch.Generator().manual_seed(1))[:30] + PAGE).to(DEVICE)
    hidden = slots.clone()
    hidden[7] = -1
    latent_fp8.write(plane, hidden, entries, rank)
    before.flatten(0, 1)[torch.cat((slots[:7], slots[8:]))] = torch.cat((rows[:7], rows[8:]))
    assert torch.equal(plane, before), "a negative slot is not written, and nothing beside the rows"
    kept = torch.cat((slots[:7], slots[8:]))
    assert torch.equal(
        latent_fp8.read(plane, kept, rank, dtype),
        reference.unpack_latent(torch.cat((rows[:7], rows[8:])), rank, dtype),
    )


def layer(dtype: torch.dtype, **changes: Any) -> MLAWeights:
    config = {**DEEPSEEK, "num_hidden_layers": 1, "num_nextn_predict_layers": 0, **changes}
    attention: Any = (
        random_model(config, Ops(), str(dtype)[6:], torch.device(DEVICE)).layers[0].attention
    )
    return attention.weights


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    "changes",
    [{}, {"q_lora_rank": None, "kv_lora_rank": 256}, {"kv_lora_rank": 36}],
    ids=["tiny", "wide", "odd"],
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("ops", backends(), ids=named)
def test_a_prologue_writes_its_own_entries_quantized(
    ops: Ops, kind: torch.dtype, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    """Bit for bit what packing the entries of an unquantised cache gives; the queries do not
    change."""
    w = layer(dtype, **changes)
    rank = w.config.kv_lora_rank
    width = w.config.latent_dim
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)).to(dtype).to(DEVICE)
    angle = torch.randn(5, 8, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    slots = torch.tensor([9, 31, 8, 17, 12], device=DEVICE)
    plain = torch.zeros(4, PAGE, width, dtype=dtype, device=DEVICE)
    _, q, _ = ops.mla_prologue(x, w, TokenPlaces(angle.cos(), angle.sin(), slots), plain)
    plane = emptied(4, rank + 4 * -(-rank // 128) + 16 * dtype.itemsize, kind)
    expected = plane.clone()
    expected.flatten(0, 1)[slots] = reference.pack_latent(plain.flatten(0, 1)[slots], rank, kind)
    _, again, returned = ops.mla_prologue(x, w, TokenPlaces(angle.cos(), angle.sin(), slots), plane)
    assert returned is None
    assert torch.equal(plane, expected)
    assert torch.equal(again, q)


# ---- reading


def cached(
    lens: list[int], rank: int, rope: int, dtype: torch.dtype, kind: torch.dtype = torch.uint8
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(plane, tables, what each request's rows read as)."""
    pages = [-(-n // PAGE) for n in lens]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(4)) + 1
    tables = torch.zeros(len(lens), max(pages) + 1, dtype=torch.int64)
    rows = [
        reference.pack_latent(entries_of(max(n, 1), rank + rope, dtype, i) / 10, rank, kind)[:n]
        for i, n in enumerate(lens)
    ]
    plane = emptied(sum(pages) + 1, rows[0].shape[1], kind)
    for i, (count, own) in enumerate(zip(pages, order.split(pages), strict=True)):
        tables[i, :count] = own
        at = torch.arange(lens[i])
        plane[tables[i, at // PAGE].to(DEVICE), (at % PAGE).to(DEVICE)] = rows[i]
    return plane, tables.to(DEVICE), [reference.unpack_latent(row, rank, dtype) for row in rows]


def exact(q: Tensor, entries: Tensor, rank: int, scale: float) -> Tensor:
    """fp64; q [Q, H, C + rope] are the last positions."""
    scores = torch.einsum("qhd,kd->hqk", q.double(), entries.double()) * scale
    allowed = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(
        scores.shape[2] - scores.shape[1]
    )
    return torch.einsum(
        "hqk,kc->qhc",
        scores.masked_fill(~allowed, float("-inf")).softmax(-1),
        entries[:, :rank].double(),
    )


CASES = [
    ([37, 8, 64, 1, 23], 1, 0),  # decode, lengths mixed
    ([30, 9], 3, 4),  # rows under verification, whose lengths the host knows as bounds alone
    ([12, 40, 7], 7, 0),  # chunks of prompt
]


@pytest.mark.parametrize(("lens", "queries", "slack"), CASES, ids=["decode", "drafts", "prompt"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("ops", backends(), ids=named)
def test_attention_over_an_8bit_cache(
    ops: Ops, kind: torch.dtype, dtype: torch.dtype, lens: list[int], queries: int, slack: int
) -> None:
    rank = 128
    rope = 16
    heads = 3
    scale = 0.05
    plane, tables, entries = cached(lens, rank, rope, dtype, kind)
    bounds = tuple(min(n + slack, tables.shape[1] * PAGE) for n in lens)
    where = AttentionMetadata(
        tables, torch.tensor(lens, device=DEVICE), (queries,) * len(lens), bounds, exact=not slack
    )
    q = (
        torch.randn(
            len(lens) * queries, heads, rank + rope, generator=torch.Generator().manual_seed(5)
        )
        .to(dtype)
        .to(DEVICE)
        / 100
    )
    got = ops.latent_attention(
        q[..., :rank].contiguous(), q[..., rank:].contiguous(), plane, where, scale
    )
    expected = torch.cat(
        [exact(part, own, rank, scale) for part, own in zip(q.split(queries), entries, strict=True)]
    )
    assert got.dtype == dtype
    assert got.isfinite().all(), "nothing past a request's end is read"
    assert (got.double() - expected).norm() < (1e-5 if dtype == FP32 else 8e-3) * expected.norm()
    packed = ops.latent_entries(plane, where, rank, dtype)
    kept = lens if named(ops) != "triton" else bounds
    for found, own in zip(packed.split(list(kept)), entries, strict=True):
        assert torch.equal(found[: len(own)], own)


@pytest.mark.parametrize("ops", backends(), ids=named)
def test_absorbed_attention(ops: Ops) -> None:
    """With the products around it; the CPU's compiled kernel works on pages that are dequantized
    for it."""
    w = layer(FP32)
    lens = [20, 3, 33]
    rank = w.config.kv_lora_rank
    plane, tables, _ = cached(lens, rank, 16, FP32)
    where = AttentionMetadata(tables, torch.tensor(lens, device=DEVICE), (1, 1, 1), tuple(lens))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    angle = torch.zeros(3, 8, device=DEVICE)
    slots = torch.tensor(
        [tables[i, (n - 1) // PAGE] * PAGE + (n - 1) % PAGE for i, n in enumerate(lens)],
        device=DEVICE,
    )
    _, q, _ = ops.mla_prologue(x, w, TokenPlaces(angle.cos(), angle.sin(), slots), plane)
    expected = Ops().mla_absorbed(
        q, w, plane, AttentionMetadata(tables, where.kv_lens, (1, 1, 1), tuple(lens)), 0.1
    )
    assert (ops.mla_absorbed(q, w, plane, where, 0.1) - expected).norm() < 1e-5 * expected.norm()
