"""Attention kernels against rorqual.ops.reference, on a GPU if there is one, else in Triton's
interpreter; and compiled for GPUs.

Every cache slot that no request uses holds NaN, padding of block tables is garbage, outputs start
poisoned.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from rorqual.ops.interface import AttentionMetadata, Ops, PartialAttention, shares_of
from tests.child_process import output_of_compiler
from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON, needs_triton

if SKIP_REASON is None:
    from rorqual.ops.triton.attention import gqa_decode as gqa
    from rorqual.ops.triton.attention import latent_fp8, prefill
    from rorqual.ops.triton.attention import mla_decode as mla
    from rorqual.ops.triton.runtime import launch

pytestmark = [needs_triton, pytest.mark.exhaustive(but_first=True)]
GARBAGE = 2147480000


def paged(values: list[Tensor], page: int, unused: float = float("nan")) -> tuple[Tensor, Tensor]:
    """Entries of each request, [L, *shape], scattered over shuffled pages: (plane, tables). Page
    0 stays unused. unused: what the rest of the plane holds."""
    counts = [-(-len(x) // page) for x in values]
    plane = torch.full((sum(counts) + 3, page, *values[0].shape[1:]), unused, dtype=values[0].dtype)
    tables = torch.full((len(values), max(counts) + 2), GARBAGE, dtype=torch.int64)
    pages = iter((1 + torch.randperm(sum(counts) + 2)).tolist())
    for i, (entries, count) in enumerate(zip(values, counts, strict=True)):
        for j in range(count):
            tables[i, j] = number = next(pages)
            part = entries[j * page : (j + 1) * page]
            plane[number, : len(part)] = part
    return plane.to(DEVICE), tables.to(DEVICE)


def segment(tables: Tensor, lens: list[int], query_lens: list[int]) -> AttentionMetadata:
    return AttentionMetadata(
        tables, torch.tensor(lens, device=DEVICE), tuple(query_lens), tuple(lens)
    )


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def check(out: Tensor, expected: Tensor) -> None:
    """Near equality in fp32; in bf16 FlashMLA's tolerances, the absolute one for values of ten
    times the size of its tests'."""
    assert out.isfinite().all()
    absolute, relative = (2e-5, 2e-5) if out.dtype == torch.float32 else (8e-3, 2.01 / 128)
    torch.testing.assert_close(out.double(), expected.double(), atol=absolute, rtol=relative)
    x = out.double()
    y = expected.double()
    assert 1 - 2 * (x * y).sum() / (x * x + y * y).sum().clamp(1e-12) < 5e-6 or not y.any()


def latent_case(
    lens: list[int], queries: int, heads: int, rank: int, rope: int, page: int, dtype: torch.dtype
):
    plane, tables = paged([random(n, rank + rope, dtype=dtype).cpu() for n in lens], page)
    tokens = len(lens) * queries
    q_latent = random(tokens, heads, rank, dtype=dtype)
    q_rope = random(tokens, heads, rope, dtype=dtype)
    return q_latent, q_rope, plane, segment(tables, lens, [queries] * len(lens))


LENS = [37, 0, 64, 5, 130]


@pytest.mark.parametrize(("queries", "heads", "page"), [(1, 16, 64), (2, 20, 16), (4, 3, 32)])
def test_mla_decode_fp32(queries: int, heads: int, page: int) -> None:
    q_latent, q_rope, plane, where = latent_case(LENS, queries, heads, 64, 16, page, torch.float32)
    config = mla.MlaDecodeConfig(16, 32, 4, 1, tma=False)
    out = poisoned(*q_latent.shape, dtype=torch.float32)
    mla.mla_decode(
        q_latent, q_rope, plane, where.tables, where.kv_lens, 0.2, 999, out=out, config=config
    )
    check(out, Ops().latent_attention(q_latent, q_rope, plane, where, 0.2))


@pytest.mark.parametrize("tma", [False, True])
def test_mla_decode_bf16_at_model_width(tma: bool) -> None:
    q_latent, q_rope, plane, where = latent_case([150, 0, 64], 2, 16, 512, 64, 64, torch.bfloat16)
    out = poisoned(*q_latent.shape, dtype=torch.bfloat16)
    config = mla.MlaDecodeConfig(32, 32, 4, 2, tma=tma)
    mla.mla_decode(
        q_latent, q_rope, plane, where.tables, where.kv_lens, 0.05, 150, out=out, config=config
    )
    check(out, Ops().latent_attention(q_latent, q_rope, plane, where, 0.05))


def test_mla_decode_takes_strided_queries_and_any_split() -> None:
    q_latent, q_rope, plane, where = latent_case([300, 1, 40], 1, 8, 64, 16, 16, torch.float32)
    by_head = q_latent.transpose(0, 1).contiguous().transpose(0, 1)
    expected = Ops().latent_attention(q_latent, q_rope, plane, where, 0.2)
    for min_tiles in (1, 3, 100):
        config = mla.MlaDecodeConfig(16, 16, 4, 1, min_tiles=min_tiles, tma=False)
        check(
            mla.mla_decode(
                by_head, q_rope, plane, where.tables, where.kv_lens, 0.2, 300, config=config
            ),
            expected,
        )


def fp8_cache(lens: list[int], rank: int, page: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """An fp8 plane written by the kernel, its tables, and the entries as they read back (fp32)."""
    # Of all sizes up to 2,000 or so: the decode kernel takes latents up to 4,094.
    entries = [
        random(n, rank + 64, dtype=torch.bfloat16).cpu() * (1 + torch.arange(n)[:, None] // 8)
        for n in lens
    ]
    numbers, tables = paged(
        [
            torch.arange(sum(lens[:i]), sum(lens[: i + 1])).float()[:, None]
            for i in range(len(lens))
        ],
        page,
    )
    flat = numbers.flatten()
    slots = flat.isfinite().nonzero().flatten()
    values = torch.cat(entries).to(DEVICE)[flat[slots].long()]
    plane = torch.full(
        (*numbers.shape[:2], rank + rank // 32 + 128), 255, dtype=torch.uint8, device=DEVICE
    )
    latent_fp8.write(plane, slots, values, rank)
    return plane, tables, entries


def dequantized(plane: Tensor, rank: int) -> Tensor:
    rows = plane.flatten(0, 1)
    scales = rows.view(torch.float32)[:, rank // 4 : rank // 4 + rank // 128].repeat_interleave(
        128, 1
    )
    latent = rows[:, :rank].view(torch.float8_e4m3fn).float() * scales
    wide = torch.cat((latent, rows.view(torch.bfloat16)[:, rank // 2 + rank // 64 :].float()), 1)
    return wide.view(*plane.shape[:2], rank + 64)


def test_fp8_rows_read_back_within_e4m3_rounding() -> None:
    plane, tables, entries = fp8_cache([20, 33], 256, 16)
    assert plane.shape[-1] == 256 + 8 + 128
    wide = dequantized(plane, 256)
    for i, values in enumerate(entries):
        back = wide[tables[i, : -(-len(values) // 16)]].flatten(0, 1)[: len(values)].cpu()
        assert torch.equal(back[:, 256:], values[:, 256:].float())
        blocks = values[:, :256].float().view(-1, 2, 128)
        error = (back[:, :256].view(-1, 2, 128) - blocks).abs() / blocks.abs().amax(
            -1, keepdim=True
        )
        # half a step of the top binade, 16 / 448 of the scale
        assert error.max() <= 0.5 / 14 + 1e-3


@pytest.mark.parametrize(
    ("queries", "page", "rank", "tma"), [(1, 16, 256, False), (2, 64, 512, True)]
)
def test_mla_decode_fp8_cache(queries: int, page: int, rank: int, tma: bool) -> None:
    lens = [70, 0, 33]
    heads = 4
    plane, tables, _ = fp8_cache(lens, rank, page)
    q_latent, q_rope = (
        random(len(lens) * queries, heads, n, dtype=torch.bfloat16) / 100 for n in (rank, 64)
    )
    where = segment(tables, lens, [queries] * len(lens))
    out = poisoned(*q_latent.shape, dtype=torch.bfloat16)
    config = mla.MlaDecodeConfig(16, 32, 4, 2, tma=tma)
    mla.mla_decode(q_latent, q_rope, plane, tables, where.kv_lens, 0.1, 70, out=out, config=config)
    assert out.isfinite().all()
    expected = Ops().latent_attention(
        q_latent.float(), q_rope.float(), dequantized(plane, rank).bfloat16().float(), where, 0.1
    )
    assert (out.float() - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.parametrize(
    ("dtype", "queries", "heads", "groups", "page", "tma"),
    [
        (torch.float32, 1, 8, 2, 16, False),
        (torch.float32, 3, 8, 1, 64, False),
        (torch.bfloat16, 2, 16, 2, 32, True),
    ],
)
def test_gqa_decode(
    dtype: torch.dtype, queries: int, heads: int, groups: int, page: int, tma: bool
) -> None:
    k_plane, tables = paged([random(n, groups, 64, dtype=dtype).cpu() for n in LENS], page)
    v_plane = torch.where(k_plane.isnan(), k_plane, torch.randn_like(k_plane))
    q = random(len(LENS) * queries, heads, 64, dtype=dtype)
    where = segment(tables, LENS, [queries] * len(LENS))
    out = poisoned(*q.shape, dtype=dtype)
    gqa.gqa_decode(
        q,
        k_plane,
        v_plane,
        tables,
        where.kv_lens,
        0.1,
        200,
        out=out,
        config=gqa.GqaDecodeConfig(32, 4, 2, tma=tma),
    )
    check(out, Ops().attention(q, k_plane, v_plane, where, 0.1))


@pytest.mark.parametrize("lens", [LENS, [0, 0, 90], [40, 0, 0], [0, 0]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "width", "masked"),
    [(torch.float32, 64, False), (torch.bfloat16, 24, False), (torch.bfloat16, 64, True)],
)
def test_the_last_program_of_a_request_puts_it_together(
    lens: list[int], dtype: torch.dtype, width: int, masked: bool
) -> None:
    """The parts in the order of the cache, whichever program is last: twice the same bits, and
    counters that are zero again. Requests without cache give zeros."""
    heads = 6
    groups = 2
    queries = 2
    k_plane, tables = paged([random(n, groups, width, dtype=dtype).cpu() for n in lens], 16)
    v_plane = torch.where(k_plane.isnan(), k_plane, torch.randn_like(k_plane))
    q = random(len(lens) * queries, heads, width, dtype=dtype)
    where = segment(tables, lens, [queries] * len(lens))
    expected = Ops().attention(q, k_plane, v_plane, where, 0.1)
    found = []
    for min_tiles in (1, 1, 3, 100):
        config = gqa.GqaDecodeConfig(
            16, 4, 1, min_tiles=min_tiles, tma=False, finish=True, masked=masked
        )
        out = poisoned(*q.shape, dtype=dtype)
        gqa.gqa_decode(q, k_plane, v_plane, tables, where.kv_lens, 0.1, 200, out=out, config=config)
        check(out, expected)
        assert not launch.zeroed_counters(out.device, launch.COUNTERS).any()
        found.append(out)
    assert torch.equal(found[0], found[1])


def test_more_requests_than_counters_take_the_second_kernel() -> None:
    k_plane, tables = paged([random(20, 1, 16).cpu()] * 3, 16)
    q = random(3, 2, 16)
    where = segment(tables, [20] * 3, [1] * 3)
    config = gqa.GqaDecodeConfig(16, 4, 1, tma=False, finish=True)
    with mock.patch.object(gqa, "COUNTERS", 2):
        out = gqa.gqa_decode(
            q, k_plane, k_plane.nan_to_num(), tables, where.kv_lens, 0.1, 20, config=config
        )
    check(out, Ops().attention(q, k_plane, k_plane.nan_to_num(), where, 0.1))


def starts_of(lens: list[int]) -> Tensor:
    return torch.tensor([0, *lens], device=DEVICE).cumsum(0)


QUERY_LENS = [33, 1, 16, 20]
KEY_LENS = [33, 50, 40, 52]


@pytest.mark.parametrize(("dtype", "tma"), [(torch.float32, False), (torch.bfloat16, True)])
def test_dense_prefill_of_192_column_heads(dtype: torch.dtype, tma: bool) -> None:
    q = random(sum(QUERY_LENS), 2, 192, dtype=dtype)
    k = random(sum(KEY_LENS), 2, 192, dtype=dtype)
    v = random(sum(KEY_LENS), 2, 128, dtype=dtype)
    where = segment(torch.zeros(4, 1, dtype=torch.int64, device=DEVICE), KEY_LENS, QUERY_LENS)
    out = poisoned(sum(QUERY_LENS), 2, 128, dtype=dtype)
    prefill.dense_prefill(
        q,
        k,
        v,
        starts_of(QUERY_LENS),
        starts_of(KEY_LENS),
        where.kv_lens,
        33,
        0.07,
        out=out,
        config=prefill.PrefillConfig(32, 16, 4, 2, tma=tma),
    )
    check(out, Ops().dense_attention(q, k, v, where, 0.07))


@pytest.mark.parametrize(
    ("dtype", "page", "tma"), [(torch.float32, 16, False), (torch.bfloat16, 32, True)]
)
def test_paged_prefill_behind_a_cached_prefix(dtype: torch.dtype, page: int, tma: bool) -> None:
    k_plane, tables = paged([random(n, 2, 64, dtype=dtype).cpu() for n in KEY_LENS], page)
    v_plane = torch.where(k_plane.isnan(), k_plane, torch.randn_like(k_plane))
    q = random(sum(QUERY_LENS), 4, 64, dtype=dtype)
    where = segment(tables, KEY_LENS, QUERY_LENS)
    out = poisoned(*q.shape, dtype=dtype)
    prefill.paged_prefill(
        q,
        k_plane,
        v_plane,
        tables,
        starts_of(QUERY_LENS),
        where.kv_lens,
        33,
        0.1,
        out=out,
        config=prefill.PrefillConfig(16, 32, 4, 2, tma=tma),
    )
    check(out, Ops().attention(q, k_plane, v_plane, where, 0.1))


@pytest.mark.parametrize(("dtype", "tma"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("size", [16, 24, 48])
def test_prefill_goes_on_from_earlier_stretches(dtype: torch.dtype, tma: bool, size: int) -> None:
    """Queries that see all of a stretch, some of it or none; the last stretch is shorter, and one
    beyond the length that the device knows is empty."""
    queries = 37
    length = 90
    bound = 90 + size
    q = random(queries, 2, 192, dtype=dtype)
    k = random(length, 2, 192, dtype=dtype)
    v = random(length, 2, 128, dtype=dtype)
    where = AttentionMetadata(
        torch.zeros(1, 12), torch.tensor([length], device=DEVICE), (queries,), (bound,)
    )
    (share,) = shares_of(where, size, 8)
    out = torch.zeros(queries, 2, 128, device=DEVICE)
    total = torch.full((queries, 2), float("-inf"), device=DEVICE)
    wanted = PartialAttention(out.clone(), total.clone())
    config = prefill.PrefillConfig(16, 16, 4, 2, tma=tma)
    for number, stretch in enumerate(share.segments):
        own = slice(number * size, (number + 1) * size)
        beyond = poisoned(size, 2, 192, dtype=dtype)
        keys = torch.cat((k[own], beyond))[:size]
        values = torch.cat((v[own], beyond[..., :128]))[:size]
        starts = (starts_of([queries]), starts_of([size]))
        so_far = prefill.SoFar(out, total, stretch.first)
        given = (q, keys, values, *starts, stretch.kv_lens, queries, 0.07)
        assert prefill.dense_prefill(*given, config=config, so_far=so_far) is out
        Ops().stretch_attention(q, keys, values, stretch, 0.07, wanted)
        torch.testing.assert_close(total, wanted.total, atol=2e-5, rtol=2e-5)
        check(out.to(dtype), wanted.out.to(dtype))
    whole = segment(where.tables, [length], [queries])
    check(out.to(dtype), Ops().dense_attention(q, k, v, whole, 0.07))


COMPILE = """
import sys, torch
from dataclasses import replace
from rorqual.ops.interface import GQAWeights, TokenPlaces
from rorqual.ops.triton.attention import gqa_decode as gqa, latent_fp8, mla_decode as mla, prefill
from rorqual.ops.triton.attention import rope_kv_write, prefix_groups
from tests.emulation.cross_compile import SHARED, compiling
m = lambda *s, t=torch.bfloat16: torch.empty(*s, dtype=t)
i = lambda *s: torch.empty(*s, dtype=torch.int64)
def everything(mla_config, gqa_config, prefill_config, fp8):
    for heads in (16, 128):
        mla.mla_decode(m(4, heads, 512), m(4, heads, 64), m(9, 64, 576), i(4, 9), i(4), 0.1, 512,
            config=mla_config)
    if fp8:
        mla.mla_decode(m(4, 16, 512), m(4, 16, 64), m(9, 64, 656, t=torch.uint8), i(4, 9), i(4),
            0.1, 512, config=mla_config)
        latent_fp8.write(m(9, 64, 656, t=torch.uint8), i(4), m(4, 576), 512)
        latent_fp8.read(m(9, 64, 656, t=torch.uint8), i(4), 512, torch.bfloat16)
    for kind in [torch.int8] + [torch.uint8] * fp8:
        cache = m(9, 64, 4, 128, t=kind), m(9, 64, 4, 128, t=kind)
        scales = m(9, 64, 4, 2, t=torch.float32)
        gqa.gqa_decode(m(4, 32, 128), *cache, i(4, 9), i(4), 0.1, 512, config=gqa_config,
            scales=scales)
        prefill.paged_prefill(m(4, 32, 128), *cache, i(1, 9), i(2), i(1), 4096, 0.1,
            config=prefill_config, scales=scales)
        rope_kv_write.heads_epilogue(m(4, 5120), GQAWeights(m(128), m(128), 1e-6),
            TokenPlaces(m(4, 64, t=torch.float32), m(4, 64, t=torch.float32), i(4)),
            (*cache, scales))
    held = m(9, 64, 656, t=torch.int8)
    mla.mla_decode(m(4, 16, 512), m(4, 16, 64), held, i(4, 9), i(4), 0.1, 512, config=mla_config)
    latent_fp8.write(held, i(4), m(4, 576), 512)
    latent_fp8.read(held, i(4), 512, torch.bfloat16)
    gqa.gqa_decode(m(4, 32, 128), m(9, 64, 4, 128), m(9, 64, 4, 128), i(4, 9), i(4), 0.1, 512,
        config=gqa_config)
    joint = replace(gqa_config or gqa.GqaDecodeConfig(64, 4, 3), finish=True)
    gqa.gqa_decode(m(4, 32, 128), m(9, 64, 4, 128), m(9, 64, 4, 128), i(4, 9), i(4), 0.1, 512,
        config=joint)
    workers = gqa.gqa_workers(40, 512, 4, joint, torch.device("cpu"))
    groups = prefix_groups.find(i(40, 9), i(40), 1, 64, (32, 4), 128, torch.bfloat16, workers)
    gqa.gqa_decode(m(40, 32, 128), m(9, 64, 4, 128), m(9, 64, 4, 128), i(40, 9), i(40), 0.1, 512,
        config=joint, shared=groups)
    masked = gqa.GqaDecodeConfig(128, 4, 2, tma=False, finish=True, masked=True)
    for shared in (groups, None):
        gqa.gqa_decode(m(40, 32, 128), m(9, 64, 4, 128), m(9, 64, 4, 128), i(40, 9), i(40), 0.1,
            512, config=masked, shared=shared)
    prefill.dense_prefill(m(4, 8, 192), m(4, 8, 192), m(4, 8, 128), i(2), i(1), i(1), 4096, 0.1,
        config=prefill_config)
    so_far = prefill.SoFar(m(4, 8, 128, t=torch.float32), m(4, 8, t=torch.float32), i(1))
    packed = m(4, 8, 192), m(4, 8, 192), m(4, 8, 128), i(2), i(1), i(1)
    prefill.dense_prefill(*packed, 4096, 0.1, config=prefill_config, so_far=so_far)
    prefill.paged_prefill(m(4, 32, 128), m(9, 64, 4, 128), m(9, 64, 4, 128), i(1, 9), i(2), i(1),
        4096, 0.1, config=prefill_config)
older = mla.MlaDecodeConfig(16, 16, 4, 2, tma=False), gqa.GqaDecodeConfig(32, 4, 2,
    tma=False), prefill.PrefillConfig(64, 32, 4, 2, tma=False)
capability = int(sys.argv[1])
with compiling(capability) as launched:
    everything(*(older if capability < 90 else (None, None, None)), fp8=capability >= 89)
assert all(k.kernel.metadata.shared <= SHARED[capability] for k in launched)
for k in launched:
    if k.name in ("_mla_decode_kernel", "_gqa_decode_kernel", "_combine_kernel"):
        assert ("griddepcontrol.wait" in k.ptx) == (capability >= 90), k.name
print(len(launched), sum("wgmma" in k.ptx for k in launched))
"""


@pytest.mark.longest
@pytest.mark.exhaustive
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_every_kernel_compiles(capability: int, tmp_path: object) -> None:
    if DEVICE == "cuda" and capability != 90:
        pytest.skip("the card itself compiles")
    said = output_of_compiler("-c", COMPILE, str(capability), TRITON_CACHE_DIR=str(tmp_path))
    launched, wgmma = map(int, said.split()[-2:])
    assert launched >= 12
    assert (wgmma >= 4) == (capability == 90)
