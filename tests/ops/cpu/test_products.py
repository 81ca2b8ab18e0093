"""The compiled CPU kernels on shapes of every remainder, beside the definitions: with vectors of
this processor, of AVX2, of four floats, and of NEON in an emulator. Memory that a kernel should
write is NaN before, and so are cached entries that nobody may read."""

from __future__ import annotations

import platform

import pytest
import torch
from torch import Tensor

from rorqual.config.model import MLAConfig, MoEConfig
from rorqual.ops import reference
from rorqual.ops.cpu.native import Native, library
from rorqual.ops.interface import AttentionMetadata, MLAWeights, Ops
from rorqual.ops.reference import ExpertWeights, RouterWeights, Weight
from tests.ops.cpu.conftest import one_compiles

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
PAGE = 16


def draw(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    """Other numbers at every call."""
    return (torch.randn(*shape) * scale).to(dtype)


def check(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE[dtype], rtol=2e-2)


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 16, 27, 28, 61, 300])
@pytest.mark.parametrize(
    ("outputs", "columns"), [(1, 1), (5, 31), (64, 64), (37, 770), (300, 1700)]
)
def test_linear(native: Native, dtype: torch.dtype, rows: int, outputs: int, columns: int) -> None:
    x = draw(dtype, rows, columns)
    w = draw(dtype, outputs, columns, scale=columns**-0.5)
    for bias in (None, draw(dtype, outputs)):
        want = x.float() @ w.float().t() + (0 if bias is None else bias.float())
        check(native.linear(x, w, bias), want, dtype)


def rows_alike(native: Native, dtype: torch.dtype, sizes: list[int]) -> None:
    """The first rows have the same bits among any of these numbers of rows."""
    x = draw(dtype, sizes[-1], 1100)
    w = draw(dtype, 77, 1100)
    whole = native.linear(x, w, None)
    for rows in sizes[:-1]:
        assert torch.equal(native.linear(x[:rows], w, None), whole[:rows])


@DTYPES
def test_a_row_does_not_depend_on_those_beside_it(
    native: Native, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """With AMX one row of bf16 is multiplied otherwise than several."""
    name = request.node.callspec.params["native"]
    tiles = name == "native" and torch.cpu._is_amx_tile_supported()
    if dtype == torch.bfloat16 and (tiles or name == "amx, emulated"):
        rows_alike(native, dtype, [2, 5, 16, 17, 27, 28, 40, 128])
    else:
        rows_alike(native, dtype, [1, 2, 5, 16, 27])


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.machine() != "x86_64", reason="a processor of x86")
@DTYPES
def test_nor_where_the_compiler_tunes_for_amd(dtype: torch.dtype) -> None:
    """GCC, tuned for it, would round some products before it adds them."""
    with one_compiles():
        kernels = library("haswell", ("-mtune=znver3",))
    if kernels is None:
        pytest.skip("no compiler")
    rows_alike(Native(kernels), dtype, [1, 2, 5, 16, 27])


@DTYPES
def test_a_number_that_is_none_spoils_its_row_alone(native: Native, dtype: torch.dtype) -> None:
    x = draw(dtype, 7, 50)
    w = draw(dtype, 9, 50)
    want = native.linear(x, w, None)
    x[3, 49] = float("nan")
    got = native.linear(x, w, None)
    assert got[3].isnan().all()
    others = torch.arange(7) != 3
    assert torch.equal(got[others], want[others])


@DTYPES
@pytest.mark.parametrize("rows", [1, 5, 40, 300])
@pytest.mark.parametrize(("hidden", "size"), [(40, 24), (129, 97), (640, 352)])
def test_mlp(native: Native, dtype: torch.dtype, rows: int, hidden: int, size: int) -> None:
    x = draw(dtype, rows, hidden)
    gate_up = draw(dtype, 2 * size, hidden, scale=hidden**-0.5)
    down = draw(dtype, hidden, size, scale=size**-0.5)
    wide = [Weight(w.float()) for w in (gate_up, down)]
    check(native.mlp(x, gate_up, down), reference.mlp(x.float(), *wide), dtype)


@DTYPES
@pytest.mark.parametrize(("rows", "top_k"), [(1, 3), (4, 2), (90, 4)])
@pytest.mark.parametrize(("hidden", "size"), [(72, 40), (300, 97), (512, 320)])
@pytest.mark.parametrize("threads", [1, 2])
def test_experts(
    native: Native, dtype: torch.dtype, rows: int, top_k: int, hidden: int, size: int, threads: int
) -> None:
    slots = 5
    gate_up = draw(dtype, slots, 2 * size, hidden, scale=hidden**-0.5)
    down = draw(dtype, slots, hidden, size, scale=size**-0.5)
    x = draw(dtype, rows, hidden)
    ids = torch.rand(rows, slots).topk(top_k).indices
    weights = torch.rand(rows, top_k)
    native.lib.rq_threads(threads)
    got = native.experts(x, ids, weights, ExpertWeights(Weight(gate_up), Weight(down)))
    native.lib.rq_threads(1)
    wide = ExpertWeights(Weight(gate_up.float()), Weight(down.float()))
    check(got, reference.experts(x.float(), ids, weights, wide), dtype)


PAIRS_OF_BF16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="a processor without AVX512-BF16"
)


def of_this_processor() -> Native:
    kernels = library()
    if kernels is None:
        pytest.skip("no compiler")
    return Native(kernels)


@PAIRS_OF_BF16
@pytest.mark.parametrize("rows", [28, 32, 33, 43, 48, 64, 80, 111, 112, 113])
@pytest.mark.parametrize(("hidden", "size"), [(64, 32), (129, 97), (1500, 160), (2100, 1300)])
def test_an_expert_is_a_dense_layer(rows: int, hidden: int, size: int) -> None:
    """Whatever its rows are, lanes or rows of tiles, bf16's sums are the same to the last bit."""
    native = of_this_processor()
    gate_up = draw(torch.bfloat16, 1, 2 * size, hidden, scale=hidden**-0.5)
    down = draw(torch.bfloat16, 1, hidden, size, scale=size**-0.5)
    x = draw(torch.bfloat16, rows, hidden)
    once = torch.ones(rows, 1)
    w = ExpertWeights(Weight(gate_up), Weight(down))
    got = native.experts(x, torch.zeros(rows, 1, dtype=torch.int64), once, w)
    assert torch.equal(got, native.mlp(x, gate_up[0], down[0]))


@DTYPES
@pytest.mark.parametrize(("experts", "top_k"), [(23, 4), (128, 2)])
def test_router_of_equal_scores(
    native: Native, dtype: torch.dtype, experts: int, top_k: int
) -> None:
    """The same experts as torch.topk takes, zeros of both signs among the scores."""
    moe = MoEConfig(experts, top_k, 24, 0, "sigmoid", "noaux_tc", 1, 1, True, 2.5)
    bias = torch.where(torch.rand(experts) < 0.5, -0.5, 0.5) * torch.randint(2, (experts,))
    router = RouterWeights(torch.zeros(experts, 330), bias - 0.5, moe)
    x = draw(dtype, 9, 330)
    assert torch.equal(native.router(x, router)[0], Ops().router(x, router)[0])


@DTYPES
@pytest.mark.parametrize("rows", [1, 9, 50])
def test_router(native: Native, dtype: torch.dtype, rows: int) -> None:
    moe = MoEConfig(23, 4, 24, 0, "sigmoid", "noaux_tc", 1, 1, True, 2.5)
    x = draw(dtype, rows, 330)
    router = RouterWeights(torch.randn(23, 330), torch.randn(23) / 10, moe)
    ids, weights = native.router(x, router)
    want_ids, want = Ops().router(x, router)
    order = ids.argsort(-1)
    want_order = want_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), want_ids.gather(1, want_order))
    torch.testing.assert_close(weights.gather(1, order), want.gather(1, want_order))


def paged(dtype: torch.dtype, lens: list[int], *shape: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(plane, tables, entries of each request): pages in any order, NaN where no entry is."""
    pages = [-(-length // PAGE) for length in lens]
    order = torch.randperm(sum(pages) + 2).tolist()
    plane = torch.full((len(order), PAGE, *shape), float("nan"), dtype=dtype)
    tables = torch.full((len(lens), max(pages)), order.pop(), dtype=torch.int64)
    entries = []
    for row, (length, count) in enumerate(zip(lens, pages, strict=True)):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        entries.append(draw(dtype, length, *shape))
        flat = torch.full((count * PAGE, *shape), float("nan"), dtype=dtype)
        flat[:length] = entries[-1]
        plane[tables[row, :count]] = flat.view(count, PAGE, *shape)
    return plane, tables, entries


LENS = [1, 15, 16, 64, 65, 511, 513, 1300]


@DTYPES
@pytest.mark.parametrize(("heads", "groups", "dim"), [(4, 4, 40), (6, 2, 64), (7, 1, 128)])
@pytest.mark.parametrize("threads", [1, 2])
def test_decode_attention(
    native: Native, dtype: torch.dtype, heads: int, groups: int, dim: int, threads: int
) -> None:
    keys, tables, key_entries = paged(dtype, LENS, groups, dim)
    values = torch.full_like(keys, float("nan"))
    q = draw(dtype, len(LENS), heads, dim)
    wants = []
    for row, length in enumerate(LENS):
        v = draw(dtype, length, groups, dim)
        slots = torch.arange(length)
        flat = tables[row][slots // PAGE] * PAGE + slots % PAGE
        values.flatten(0, 1)[flat] = v
        query = q[row : row + 1].float()
        wants.append(reference.causal_attention(query, key_entries[row], v, 0.2))
    native.lib.rq_threads(threads)
    got = native.gqa_decode(q, (keys, values), tables, torch.tensor(LENS), 0.2)
    native.lib.rq_threads(1)
    check(got, torch.cat(wants), dtype)


@DTYPES
@pytest.mark.parametrize("heads", [3, 8, 27, 28, 61])
def test_attention_does_not_depend_on_threads(
    native: Native, dtype: torch.dtype, heads: int
) -> None:
    """One short request, whose heads are divided among threads."""
    plane, tables, _ = paged(dtype, [500], 1, 64)
    q = draw(dtype, 1, heads, 64)
    found = []
    for threads in (1, 2, 5):
        native.lib.rq_threads(threads)
        found.append(native.gqa_decode(q, (plane, plane), tables, torch.tensor([500]), 0.2))
    native.lib.rq_threads(1)
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@DTYPES
@pytest.mark.parametrize(
    "mla", [MLAConfig(3, None, 64, 20, 6, 18), MLAConfig(8, None, 72, 48, 32, 64)]
)
def test_absorbed_attention(native: Native, dtype: torch.dtype, mla: MLAConfig) -> None:
    plane, tables, entries = paged(dtype, LENS, mla.latent_dim)
    rows = mla.num_heads * (mla.nope_dim + mla.v_dim)
    kv_b = draw(dtype, rows, mla.kv_lora_rank, scale=mla.kv_lora_rank**-0.5)
    none = torch.empty(0, dtype=dtype)

    def layer(data: Tensor) -> MLAWeights:
        return MLAWeights(
            mla, Weight(none), None, None, None, none, Weight(data), 1e-6, interleaved=True
        )

    q = draw(dtype, len(LENS), mla.num_heads, mla.qk_dim)
    w = layer(kv_b)
    w.scratch = native.mla_layer(w, 32)
    got = native.mla_absorbed(q, w, plane, tables, torch.tensor(LENS), 0.2).flatten(1)
    kept = torch.zeros(plane.shape)
    for row, entry in enumerate(entries):
        slots = torch.arange(len(entry))
        kept.flatten(0, 1)[tables[row][slots // PAGE] * PAGE + slots % PAGE] = entry.float()
    segment = AttentionMetadata(tables, torch.tensor(LENS), (1,) * len(LENS), tuple(LENS))
    want = Ops().mla_absorbed(q.float(), layer(kv_b.float()), kept, segment, 0.2)
    check(got, want, dtype)


@DTYPES
@pytest.mark.parametrize(
    ("queries", "length"), [(1, 1), (3, 70), (48, 48), (130, 130), (77, 300), (300, 517)]
)
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "width"), [(4, 2, 40, 40), (3, 3, 96, 50), (10, 1, 33, 161)]
)
def test_prompt_attention(
    native: Native,
    dtype: torch.dtype,
    queries: int,
    length: int,
    heads: int,
    groups: int,
    dim: int,
    width: int,
) -> None:
    q = draw(dtype, queries, heads, dim)
    k, v = draw(dtype, length, groups, dim + width).split((dim, width), -1)  # entries lie apart
    out = q.new_empty(queries, heads, width)
    native.causal(q, k, v, out, 0.2)
    check(out, reference.causal_attention(q.float(), k, v, 0.2), dtype)


@PAIRS_OF_BF16
@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (8, 1)])
def test_prompt_attention_does_not_depend_on_chunks(heads: int, groups: int) -> None:
    native = of_this_processor()
    q = draw(torch.bfloat16, 400, heads, 72)
    k = draw(torch.bfloat16, 400, groups, 72)
    v = draw(torch.bfloat16, 400, groups, 40)
    whole = q.new_empty(400, heads, 40)
    native.causal(q, k, v, whole, 0.2)
    for first, last in ((0, 1), (0, 130), (127, 129), (200, 400), (399, 400)):
        part = q.new_empty(last - first, heads, 40)
        native.causal(q[first:last], k[:last], v[:last], part, 0.2)
        assert torch.equal(part, whole[first:last])


# (hidden, columns of an expert): DeepSeek-V2-Lite and Qwen3-30B-A3B
WIDTHS = pytest.mark.parametrize(("hidden", "size"), [(2048, 1408), (2048, 768)])


@pytest.mark.exhaustive
@WIDTHS
@DTYPES
def test_experts_of_published_models(
    native: Native, dtype: torch.dtype, hidden: int, size: int
) -> None:
    """One expert with so many rows as units take, one with few."""
    gate_up = draw(dtype, 2, 2 * size, hidden, scale=hidden**-0.5)
    down = draw(dtype, 2, hidden, size, scale=size**-0.5)
    x = draw(dtype, 31, hidden)
    ids = torch.tensor([[0, -1]] * 30 + [[0, 1]])
    weights = torch.rand(31, 2)
    got = native.experts(x, ids, weights, ExpertWeights(Weight(gate_up), Weight(down)))
    wide = ExpertWeights(Weight(gate_up.float()), Weight(down.float()))
    check(got, reference.experts(x.float(), ids, weights, wide), dtype)


@pytest.mark.exhaustive
@DTYPES
def test_attention_of_published_models(native: Native, dtype: torch.dtype) -> None:
    """DeepSeek-V2-Lite's latent over 700 entries, and Qwen3-30B-A3B's heads."""
    test_absorbed_attention(native, dtype, MLAConfig(16, None, 512, 128, 64, 128))
    test_decode_attention(native, dtype, 32, 4, 128, 1)
    test_prompt_attention(native, dtype, 50, 90, 16, 16, 192, 128)
