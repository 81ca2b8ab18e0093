"""Attention kernels on a GPU, at the widths of DeepSeek-V3 and Qwen3-MoE, against fp64, with
FlashMLA's tolerances.

Values are a tenth of unit size, as in FlashMLA's tests, but the softmax is made to choose by a
scale that undoes it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from rorqual.bench.kernels.attention import attend, exact_entries
from rorqual.ops import reference
from rorqual.ops.interface import AttentionMetadata, PartialAttention, shares_of
from rorqual.ops.triton.attention import gqa_decode as gqa
from rorqual.ops.triton.attention import mla_decode as mla
from rorqual.ops.triton.attention import prefill
from rorqual.ops.triton.backend import TritonOps
from rorqual.ops.triton.runtime.precompile import compiling
from tests.gpu.choice import rarely
from tests.ops.triton.attention.test_triton_attention import (
    dequantized,
    fp8_cache,
    paged,
    poisoned,
    starts_of,
)

BF16 = torch.bfloat16


def random(*shape: int) -> Tensor:
    return (torch.randn(shape) / 10).clamp(-1, 1).to(BF16)


def check(out: Tensor, expected: Tensor) -> None:
    x = out.double()
    y = expected
    assert x.isfinite().all()
    torch.testing.assert_close(x, y, atol=8e-4, rtol=2.01 / 128)
    assert 1 - 2 * (x * y).sum() / (x * x + y * y).sum() < 5e-6


def lens_of(requests: int, longest: int) -> list[int]:
    """FlashMLA's "varlen": normal around half, and every fourth request empty."""
    spread = torch.normal(longest / 2, longest / 4, (requests,)).clamp(4, longest).int().tolist()
    return [0 if i % 4 == 3 else n for i, n in enumerate(spread)]


def attend_all(q: Tensor, entries: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    parts = zip(q.chunk(len(entries)), entries, values, strict=True)
    return torch.cat([attend(a, k.cuda(), v.cuda(), scale) for a, k, v in parts])


@pytest.mark.parametrize("queries", [1, 4, *rarely(2)])
@pytest.mark.parametrize("heads", [16, 128, *rarely(64, 126)])
@pytest.mark.parametrize(
    ("requests", "longest"), [(1, 20), (6, 4096), *rarely((2, 140), (64, 1000))]
)
def test_mla_decode(requests: int, longest: int, heads: int, queries: int) -> None:
    lens = [longest] if requests == 1 else lens_of(requests, longest)
    entries = [random(n, 576) for n in lens]
    plane, tables = paged(entries, 64)
    q = random(requests * queries, heads, 576).cuda()
    out = poisoned(requests * queries, heads, 512, dtype=BF16)
    mla.mla_decode(
        q[..., :512],
        q[..., 512:],
        plane,
        tables,
        torch.tensor(lens, device="cuda"),
        4.0,
        longest,
        out=out,
    )
    check(
        out, attend_all(q, [e[:, None] for e in entries], [e[:, None, :512] for e in entries], 4.0)
    )


@pytest.mark.parametrize(
    ("page", "index"),
    [
        *((64, index) for index in range(6)),
        (16, 0),
        *rarely(*((page, i) for page in (16, 32, 128) for i in range(6) if (page, i) != (16, 0))),
    ],
)
def test_mla_decode_configs_and_pages(page: int, index: int) -> None:
    lens = lens_of(9, 2000)
    entries = [random(n, 576) for n in lens]
    plane, tables = paged(entries, page)
    for heads in (16, 128):
        configs = mla.configs_for(heads, BF16)
        q = random(9, heads, 576).cuda()
        out = poisoned(9, heads, 512, dtype=BF16)
        config = configs[index % len(configs)]
        mla.mla_decode(
            q[..., :512],
            q[..., 512:],
            plane,
            tables,
            torch.tensor(lens, device="cuda"),
            4.0,
            2000,
            out=out,
            config=config,
        )
        check(
            out,
            attend_all(q, [e[:, None] for e in entries], [e[:, None, :512] for e in entries], 4.0),
        )


@pytest.mark.parametrize("page", [64, *rarely(128)])
@pytest.mark.parametrize(("heads", "queries"), [(16, 4), (64, 1), (126, 2), (128, 1), (128, 4)])
def test_mla_decode_of_many_heads(heads: int, queries: int, page: int) -> None:
    """Requests of one tile, of an odd number, split over programs or not."""
    lens = [queries, 64, 65, 129, 4000, *lens_of(40, 1000)]
    entries = [random(n, 576) for n in lens]
    plane, tables = paged(entries, page)
    q = random(len(lens) * queries, heads, 576).cuda()
    out = poisoned(len(q), heads, 512, dtype=BF16)
    config = mla.MlaDecodeConfig(64, 64, 8, 2, gluon=True)
    expected = attend_all(
        q, [e[:, None] for e in entries], [e[:, None, :512] for e in entries], 4.0
    )
    for _ in range(3):
        mla.mla_decode(
            q[..., :512],
            q[..., 512:],
            plane,
            tables,
            torch.tensor(lens, device="cuda"),
            4.0,
            4000,
            out=out,
            config=config,
        )
        check(out, expected)
        out.fill_(float("nan"))


@pytest.mark.parametrize("page", [64, *rarely(128)])
@pytest.mark.parametrize("kind", [torch.uint8, torch.int8])
@pytest.mark.parametrize(
    ("heads", "queries"), [(128, 1), (128, 2), *rarely((16, 4), (64, 1), (126, 2), (20, 1))]
)
def test_mla_decode_of_many_heads_over_8_bits(
    heads: int, queries: int, kind: torch.dtype, page: int
) -> None:
    """Requests of one tile, of an odd number, split over programs or not; what is behind their
    ends is NaN as a scale and a rope key."""
    lens = [queries, 64, 65, 129, 4000, *lens_of(40, 1000)]
    rows = [reference.pack_latent(random(n, 576), 512, kind) for n in lens]
    plane, tables = paged([own.view(torch.uint8) for own in rows], page, unused=255)
    plane = plane.view(kind)
    entries = [reference.unpack_latent(own, 512, BF16)[:, None] for own in rows]
    q = random(len(lens) * queries, heads, 576).cuda()
    expected = attend_all(q, entries, [e[..., :512] for e in entries], 0.05)
    for config in (None, mla.MlaDecodeConfig(64, 64, 8, 2, min_tiles=1, gluon=True)):
        out = poisoned(len(q), heads, 512, dtype=BF16)
        mla.mla_decode(
            q[..., :512],
            q[..., 512:],
            plane,
            tables,
            torch.tensor(lens, device="cuda"),
            0.05,
            4000,
            out=out,
            config=config,
        )
        assert (out.double() - expected).norm() < 4e-3 * expected.norm()


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("queries", [1, 2])
def test_mla_decode_fp8_cache(heads: int, queries: int) -> None:
    lens = [300, 0, 64, 1999]
    plane, tables, _ = fp8_cache(lens, 512, 64)
    q = random(4 * queries, heads, 576).cuda()
    out = poisoned(4 * queries, heads, 512, dtype=BF16)
    mla.mla_decode(
        q[..., :512],
        q[..., 512:],
        plane,
        tables,
        torch.tensor(lens, device="cuda"),
        1e-3,
        1999,
        out=out,
    )
    wide = dequantized(plane, 512)
    entries = [
        wide[table[: -(-n // 64)]].flatten(0, 1)[:n].to(BF16)[:, None]
        for table, n in zip(tables, lens, strict=True)
    ]
    expected = attend_all(q, entries, [e[..., :512] for e in entries], 1e-3)
    assert (out.double() - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.parametrize("page", [64, *rarely(128)])
@pytest.mark.parametrize(
    ("heads", "queries"),
    [(12, 3), (128, 2), *rarely((16, 1), (16, 2), (16, 4), (64, 1), (128, 1))],
)
def test_mla_decode_fp8_configs(heads: int, queries: int, page: int) -> None:
    """Every kernel and form, in the same process: a form that disagrees with another is named."""
    lens = [300, 0, 64, 1999, 1, 4096, 700]
    plane, tables, _ = fp8_cache(lens, 512, page)
    q = random(7 * queries, heads, 576).cuda()
    kv_lens = torch.tensor(lens, device="cuda")
    rows = [
        plane[table[: -(-n // page)]].flatten(0, 1)[:n]
        for table, n in zip(tables, lens, strict=True)
    ]
    entries = [exact_entries(own)[:, None] for own in rows]
    expected = attend_all(q, entries, [e[..., :512] for e in entries], 1e-3)
    # tokens that do not exist are not read
    seen = torch.tensor([n >= queries for n in lens for _ in range(queries)], device="cuda")
    configs = mla.configs_for(heads * queries, BF16, fp8_cache=True)

    def run(config: mla.MlaDecodeConfig, out: Tensor) -> None:
        mla.mla_decode(
            q[..., :512],
            q[..., 512:],
            plane,
            tables,
            kv_lens,
            1e-3,
            max(lens),
            out=out,
            config=config,
        )

    with compiling():  # side by side
        for config in configs:
            run(config, torch.empty(7 * queries, heads, 512, dtype=BF16, device="cuda"))
    for config in configs:
        out = poisoned(7 * queries, heads, 512, dtype=BF16)
        run(config, out)
        error = (out.double() - expected)[seen].norm() / expected[seen].norm()
        # blocks of 64 rows are of entries rounded to bf16, the other Gluon kernels of exact ones
        bound = 5e-3 if not config.gluon else 2.5e-3 if config.block_h < 64 else 3.5e-3
        assert error < bound, (config, error)


@pytest.mark.parametrize("queries", [1, 4, *rarely(2)])
@pytest.mark.parametrize("page", [64, *rarely(16)])
@pytest.mark.parametrize(("requests", "longest"), [(1, 33), (5, 4096), *rarely((64, 1000))])
def test_gqa_decode(requests: int, longest: int, page: int, queries: int) -> None:
    lens = [longest] if requests == 1 else lens_of(requests, longest)
    keys, values = ([random(n, 4, 128) for n in lens] for _ in range(2))
    state = torch.get_rng_state()
    k_plane, tables = paged(keys, page)
    torch.set_rng_state(state)  # the same shuffle of pages for both planes
    v_plane, _ = paged(values, page)
    q = random(requests * queries, 32, 128).cuda()
    out = poisoned(requests * queries, 32, 128, dtype=BF16)
    gqa.gqa_decode(
        q, k_plane, v_plane, tables, torch.tensor(lens, device="cuda"), 8.0, longest, out=out
    )
    check(out, attend_all(q, keys, values, 8.0))


@pytest.mark.parametrize("size", [64, 320, *rarely(128)])
@pytest.mark.parametrize(
    ("queries", "length"), [(700, 700), (65, 1000), *rarely((1, 900), (300, 333))]
)
def test_prefill_by_stretches(queries: int, length: int, size: int) -> None:
    """The same result as all keys at once, but for the rounding of fp32 sums; behind the last key
    the rows of another request."""
    q = random(queries, 16, 192).cuda()
    k = random(length + size, 16, 192).cuda()
    v = random(length + size, 16, 128).cuda()
    tables = torch.zeros(1, 40, dtype=torch.int64, device="cuda")
    lens = torch.tensor([length], device="cuda")
    (share,) = shares_of(AttentionMetadata(tables, lens, (queries,), (length + 30,)), size, 64)
    found = PartialAttention.over_no_keys(q, 128)
    begin = 0
    for stretch in share.segments:
        own = slice(begin, begin + stretch.max_kv_lens[0])
        TritonOps().stretch_attention(q, k[own], v[own], stretch, 8.0, found)
        begin = own.stop
    check(found.out.to(BF16), attend(q, k[:length], v[:length], 8.0))


@pytest.mark.parametrize(
    ("heads", "groups", "widths"),
    [(16, 16, (192, 128)), (8, 2, (128, 128)), (32, 4, (128, 128)), (16, 1, (128, 128))],
)
def test_prefill(heads: int, groups: int, widths: tuple[int, int]) -> None:
    query_lens = [700, 1, 128, 65, 300]
    key_lens = [700, 900, 128, 1000, 333]
    keys, values = ([random(n, groups, w) for n in key_lens] for w in widths)
    q = random(sum(query_lens), heads, widths[0]).cuda()
    expected = torch.cat(
        [
            attend(a, k.cuda(), v.cuda(), 8.0)
            for a, k, v in zip(q.split(query_lens), keys, values, strict=True)
        ]
    )
    kv_lens = torch.tensor(key_lens, device="cuda")
    out = poisoned(sum(query_lens), heads, widths[1], dtype=BF16)
    packed = torch.cat(keys).cuda(), torch.cat(values).cuda()
    prefill.dense_prefill(
        q, *packed, starts_of(query_lens), starts_of(key_lens), kv_lens, 700, 8.0, out=out
    )
    check(out, expected)
    state = torch.get_rng_state()
    k_plane, tables = paged(keys, 64)
    torch.set_rng_state(state)
    v_plane, _ = paged(values, 64)
    out.fill_(float("nan"))
    prefill.paged_prefill(
        q, k_plane, v_plane, tables, starts_of(query_lens), kv_lens, 700, 8.0, out=out
    )
    check(out, expected)


@pytest.mark.parametrize(("heads", "groups", "width"), [(32, 4, 128), (16, 1, 128), (5, 5, 192)])
@pytest.mark.parametrize(("whole", "splits"), [(0, 1), (0, 4), (20, 5), (20, 2)])
def test_prefill_however_divided(
    heads: int, groups: int, width: int, whole: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of eight heads where that many share keys, some of them split: a short request, one
    without queries, one of one tile."""
    prefill_sm90 = pytest.importorskip("rorqual.ops.triton.attention.prefill_sm90")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("a kernel for Hopper")
    pack = prefill_sm90.PACK if heads // groups >= prefill_sm90.PACK else 1
    division = prefill_sm90.Division(pack, whole, splits)
    monkeypatch.setattr(prefill_sm90, "division", lambda *sizes: division)
    query_lens = [130, 3, 0, 64]
    key_lens = [1300, 700, 90, 64]
    keys, values = ([random(n, groups, w) for n in key_lens] for w in (width, 128))
    q = random(sum(query_lens), heads, width).cuda()
    expected = torch.cat(
        [
            attend(a, k.cuda(), v.cuda(), 8.0)
            for a, k, v in zip(q.split(query_lens), keys, values, strict=True)
            if len(a)
        ]
    )
    out = poisoned(sum(query_lens), heads, 128, dtype=BF16)
    packed = torch.cat(keys).cuda(), torch.cat(values).cuda()
    starts = starts_of(query_lens), starts_of(key_lens)
    kv_lens = torch.tensor(key_lens, device="cuda")
    config = prefill.PrefillConfig(64, 64, 4, 3, gluon=True)
    prefill.dense_prefill(q, *packed, *starts, kv_lens, 130, 8.0, out=out, config=config)
    check(out, expected)


def test_decode_in_a_cuda_graph_follows_lengths() -> None:
    """One captured graph, schedule included, serves steps of other lengths under the same bound."""
    entries = [random(512, 576) for _ in range(3)]
    plane, tables = paged(entries, 64)
    q = random(3, 128, 576).cuda()
    lens = torch.tensor([512, 100, 7], device="cuda")
    run = lambda: mla.mla_decode(q[..., :512], q[..., 512:], plane, tables, lens, 4.0, 512)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for now in ([512, 100, 7], [0, 512, 511], [65, 64, 63]):
        lens.copy_(torch.tensor(now))
        graph.replay()
        cut = [e[:n, None] for e, n in zip(entries, now, strict=True)]
        check(out, attend_all(q, cut, [e[..., :512] for e in cut], 4.0))
