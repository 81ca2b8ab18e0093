"""What a step does beside products, by the compiled kernels of every processor: norms, what
attention writes to the cache, and sampling."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rorqual.config.model import MLAConfig
from rorqual.ops import reference, rng
from rorqual.ops.cpu.native import Native
from rorqual.ops.interface import GQAWeights, MLAWeights, Ops, TokenPlaces
from rorqual.ops.reference import Weight

pytestmark = pytest.mark.usefixtures("poisoned")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
PAGE = 16
TOKENS = 5


def draw(dtype: torch.dtype, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def check(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.float(), want.float(), atol=TOLERANCE[got.dtype], rtol=2e-2)


@DTYPES
@pytest.mark.parametrize("columns", [1, 37, 2048])
def test_norm_and_residual(native: Native, dtype: torch.dtype, columns: int) -> None:
    x = draw(dtype, TOKENS, columns)
    residual = draw(dtype, TOKENS, columns)
    weight = draw(dtype, columns)
    for other in (None, residual):
        got, total = native.add_norm(x, other, weight, 1e-6)
        assert torch.equal(total, x if other is None else x + other)
        wide = total.float()
        want = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.float()
        check(got, want)


@DTYPES
@pytest.mark.parametrize("columns", [1, 37, 2048])
def test_rows_are_fetched_joined_and_added(
    native: Native, dtype: torch.dtype, columns: int
) -> None:
    table = draw(dtype, 9, columns)
    ids = torch.tensor([8, 0, 3, 3])
    rows = native.embed(ids, table)
    assert torch.equal(rows, table[ids])
    other = draw(dtype, 4, 5)
    assert torch.equal(native.concat_columns(rows, other), torch.cat((rows, other), 1))
    more = draw(dtype, 4, columns)
    assert torch.equal(native.add_to(rows.clone(), more), rows + more)
    for wrong in (9, -1):
        with pytest.raises(IndexError, match=f"{wrong} is not below 9"):
            native.embed(torch.tensor([0, wrong]), table)


def places(rope: int) -> TokenPlaces:
    angles = torch.rand(TOKENS, rope // 2) * 6
    return TokenPlaces(angles.cos(), angles.sin(), torch.randperm(3 * PAGE)[:TOKENS])


def check_planes(got: Tensor, want: Tensor, where: TokenPlaces) -> None:
    """Only these tokens' entries are written."""
    rows, others = got.flatten(0, 1), torch.ones(3 * PAGE, dtype=torch.bool)
    check(rows[where.slots], want.flatten(0, 1)[where.slots])
    others[where.slots] = False
    assert rows[others].isnan().all()


@DTYPES
@pytest.mark.parametrize("q_rank", [None, 48])
@pytest.mark.parametrize("interleaved", [False, True])
def test_latent_prologue(
    native: Native, dtype: torch.dtype, q_rank: int | None, interleaved: bool
) -> None:
    mla = MLAConfig(3, q_rank, 64, 20, 6, 18)
    hidden = 100
    queries = mla.num_heads * mla.qk_dim
    first = q_rank or queries

    def layer(wide: bool) -> MLAWeights:
        torch.manual_seed(seed)
        parts = [
            draw(dtype, first + mla.latent_dim, hidden, scale=hidden**-0.5),
            draw(dtype, first + mla.latent_dim),
            draw(dtype, first),
            draw(dtype, queries, first, scale=first**-0.5),
            draw(dtype, mla.kv_lora_rank),
            draw(dtype, mla.num_heads * (mla.nope_dim + mla.v_dim), mla.kv_lora_rank),
        ]
        down, bias, q_norm, q_b, kv_norm, kv_b = (p.float() if wide else p for p in parts)
        rest = (q_norm, Weight(q_b)) if q_rank else (None, None)
        return MLAWeights(mla, Weight(down), bias, *rest, kv_norm, Weight(kv_b), 1e-6, interleaved)

    seed = torch.seed() % 2**32
    x = draw(dtype, TOKENS, hidden)
    where = places(mla.rope_dim)
    plane = torch.full((3, PAGE, mla.latent_dim), float("nan"), dtype=dtype)
    wide = plane.float()
    got = native.mla_prologue(x, layer(False), where, plane)
    want = Ops().mla_prologue(x.float(), layer(True), where, wide)[1]
    check(got, want.view(got.shape))
    check_planes(plane, wide, where)


@DTYPES
def test_grouped_prologue(native: Native, dtype: torch.dtype) -> None:
    heads, groups, dim = 6, 2, 40
    qkv = draw(dtype, TOKENS, heads + 2 * groups, dim)
    norms = [draw(dtype, dim) for _ in range(2)]
    where = places(dim)
    planes = [torch.full((3, PAGE, groups, dim), float("nan"), dtype=dtype) for _ in range(2)]
    wide = [plane.float() for plane in planes]
    got = native.gqa_prologue(qkv, GQAWeights(*norms, 1e-6), where, (planes[0], planes[1]))
    weights = GQAWeights(norms[0].float(), norms[1].float(), 1e-6)
    check(got, Ops().gqa_prologue(qkv.float(), weights, where, (wide[0], wide[1])))
    for plane, other in zip(planes, wide, strict=True):
        check_planes(plane, other, where)


SETTINGS = [  # temperature, top_p, min_p, top_k
    (1.0, 1.0, 0.0, 0),
    (0.7, 0.9, 0.0, 0),
    (0.8, 0.95, 0.02, 20),
    (1.3, 1.0, 0.1, 0),
    (0.0, 0.5, 0.0, 7),
    (1.0, 1.0, 0.0, 300),
]


@pytest.mark.parametrize("vocab", [300, 4099])
def test_sampling(native: Native, vocab: int) -> None:
    rows = len(SETTINGS)
    logits = torch.randn(rows, vocab) * 3
    settings = torch.tensor(SETTINGS, dtype=torch.float64)
    got = native.distribution(logits, settings, True)
    want = reference.distribution(logits, settings, True)
    torch.testing.assert_close(got.probs(), want.probs(), atol=1e-12, rtol=1e-9)
    plane = torch.full((rows + 2, vocab), float("nan"))
    order = torch.randperm(rows + 2)[:rows]
    native.write_probs(got, plane, order)
    torch.testing.assert_close(plane[order].double(), want.probs(), atol=1e-6, rtol=1e-6)
    seeds = torch.arange(rows)
    for position in range(8):
        at = torch.full((rows,), position)
        numbers = native.uniform(seeds, at, 3)
        assert torch.equal(numbers, rng.uniform(seeds, at, 3))
        drawn = native.sample_from(got, numbers)
        assert torch.equal(drawn, reference.sample_from(want, numbers))
        q = torch.rand(rows, vocab).softmax(-1)
        for drafts in (None, q):
            given = (torch.arange(rows), numbers, drawn, drafts, None if drafts is None else seeds)
            left = native.sample_residual(got, *given)
            assert torch.equal(left, reference.sample_residual(want, *given))


@DTYPES
@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 1, 1), (3, 700, 700), (5, 290, 1000)])
def test_random_weights(
    native: Native, dtype: torch.dtype, rows: int, columns: int, width: int
) -> None:
    """The bits of the definition, in a window of a tensor and of a matrix."""
    whole = torch.zeros(rows, columns + 7, dtype=dtype)
    want = torch.empty(rows, columns, dtype=dtype)
    for key, first in ((-(2**63), 0), (12345, 2**40), (7, -3)):
        native.draw_normal(whole[:, 3 : 3 + columns], key, 0.02, first, width)
        rng.draw_normal(want, key, 0.02, first, width)
        assert torch.equal(whole[:, 3 : 3 + columns], want)
        assert not whole[:, :3].any()
        assert not whole[:, 3 + columns :].any()
