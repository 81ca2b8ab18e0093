"""The experts op on the CPU for any ids: repeated within a token, elsewhere (-1), unknown, and
chosen for hidden states that are not numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rorqual.config.model import MoEConfig
from rorqual.ops import reference
from rorqual.ops.cpu import backend
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.reference import ExpertWeights, RouterWeights, Weight

SLOTS = 6
HIDDEN = 40
SIZE = 24
# (tokens, picks): one token, few, more than a native step of other ops takes, many
SHAPES = pytest.mark.parametrize(("tokens", "top_k"), [(1, 4), (3, 8), (130, 6), (600, 8)])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=["native", "dense", "gathered", "looped"])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CpuOps:
    """Every form of the sum, whatever the number of tokens."""
    form = request.param
    made = CpuOps(native=form == "native")
    if form == "native":
        if made.native is None:
            pytest.skip("no C++ compiler")
        return made
    monkeypatch.setattr(backend, "DENSE_TOKENS", 10**6 if form == "dense" else 0)
    monkeypatch.setattr(backend, "GATHER_BYTES", 0 if form == "looped" else 2**40)
    return made


def layer(dtype: torch.dtype) -> ExpertWeights:
    generator = torch.Generator().manual_seed(5)
    gate_up = torch.randn(SLOTS, 2 * SIZE, HIDDEN, generator=generator) * HIDDEN**-0.5
    down = torch.randn(SLOTS, HIDDEN, SIZE, generator=generator) * SIZE**-0.5
    return ExpertWeights(Weight(gate_up.to(dtype)), Weight(down.to(dtype)))


def inputs(tokens: int, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    return x, torch.rand(tokens, top_k, generator=generator) / top_k


def picks(kind: str, tokens: int, top_k: int) -> Tensor:
    if kind == "one expert":
        return torch.full((tokens, top_k), SLOTS - 1)
    every = torch.arange(tokens * top_k)
    if kind == "pairs":
        return (every // 2 % SLOTS).view(tokens, top_k)
    if kind == "some elsewhere":
        return (every * 5 // 3 % (SLOTS + 1) - 1).view(tokens, top_k)
    assert kind == "all elsewhere"
    return torch.full((tokens, top_k), -1)


@SHAPES
@DTYPES
@pytest.mark.parametrize("kind", ["one expert", "pairs", "some elsewhere", "all elsewhere"])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
def test_repeated_picks_give_the_reference_sums(
    ops: CpuOps, tokens: int, top_k: int, dtype: torch.dtype, kind: str, ids_dtype: torch.dtype
) -> None:
    x, weights = inputs(tokens, top_k, dtype)
    ids = picks(kind, tokens, top_k)
    w = layer(dtype)
    got = ops.experts(x, ids.to(ids_dtype), weights, w)
    wide = ExpertWeights(*(Weight(weight.data.float()) for weight in (w.gate_up, w.down)))
    want = reference.experts(x.float(), ids, weights, wide).to(dtype)
    torch.testing.assert_close(got, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("unknown", [SLOTS, 2**40, -2, -(2**63)])
def test_unknown_picks_are_refused(ops: CpuOps, dtype: torch.dtype, unknown: int) -> None:
    x, weights = inputs(3, 4, dtype)
    ids = picks("pairs", 3, 4)
    ids[1, 2] = unknown
    with pytest.raises(IndexError, match=f"expert id {unknown} is neither a slot, 0 to 5, nor -1"):
        ops.experts(x, ids, weights, layer(dtype))


@DTYPES
def test_the_weight_of_a_pick_elsewhere_counts_for_nothing(ops: CpuOps, dtype: torch.dtype) -> None:
    x, weights = inputs(3, 4, dtype)
    ids = picks("pairs", 3, 4)
    ids[:, 1] = -1
    want = ops.experts(x, ids, weights, layer(dtype))
    weights[:, 1] = float("nan")
    assert torch.equal(ops.experts(x, ids, weights, layer(dtype)), want)
    assert want.isfinite().all()


@DTYPES
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy", "noaux_tc"])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("tokens", [3, 130])
def test_a_token_that_is_no_number_spoils_itself_alone(
    ops: CpuOps, dtype: torch.dtype, method: str, scoring: str, tokens: int
) -> None:
    moe = MoEConfig(SLOTS, 2, SIZE, 0, scoring, method, 3, 2, True)
    x, _ = inputs(tokens, 2, dtype)
    gate = torch.randn(SLOTS, HIDDEN, generator=torch.Generator().manual_seed(7))
    bias = torch.zeros(SLOTS) if moe.has_bias else None

    def run() -> Tensor:
        ids, weights = ops.router(x, RouterWeights(gate, bias, moe))
        assert ((ids >= 0) & (ids < SLOTS)).all()
        return ops.experts(x, ids, weights, layer(dtype))

    want = run()
    x[1] = float("nan")
    got = run()
    assert got[1].isnan().all()
    others = torch.arange(tokens) != 1
    torch.testing.assert_close(
        got[others], want[others], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
