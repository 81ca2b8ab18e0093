"""Products and experts of int4 weights against the reference, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from dataclasses import replace

from rorqual.ops import reference
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.triton.backend import TritonOps
from rorqual.ops.triton.gemm import int4, int4_gemm
from rorqual.ops.triton.moe import grouped_gemm, small_batch
from tests.emulation.poison import poison

pytestmark = pytest.mark.exhaustive(but_first=True)

# weights of the reference are rounded to bf16 once more; fp32 differs in the order of its sums
LIMITS = {torch.bfloat16: 1e-4, torch.float16: 1e-5, torch.float32: 1e-10}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh storage holds NaN: what a kernel fails to write shows."""
    poison(monkeypatch)


def weight(
    *shape: int, group: int = 32, zero: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Weight:
    *stack, rows, columns = shape
    groups = columns // group
    data = torch.randint(0, 256, (*stack, rows, columns // 2), dtype=torch.uint8)
    scale = (torch.rand(*stack, rows, groups) - 0.5) * columns**-0.5
    zeros = torch.randint(0, 16, scale.shape, dtype=torch.uint8).to(DEVICE) if zero else None
    return Weight(data.to(DEVICE), scale.to(DEVICE, dtype), (1, group), zeros, "wide")


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def difference(got: Tensor, expected: Tensor) -> float:
    """1 - 2 sum(xy) / sum(x^2 + y^2), in fp64. NaN fails every comparison."""
    x = got.double()
    y = expected.double()
    return (1 - 2 * (x * y).sum() / (x * x + y * y).sum()).item()


@pytest.mark.parametrize(
    ("tokens", "shape", "group", "zero", "dtype"),
    [
        (1, (70, 512), 128, False, torch.bfloat16),
        (3, (70, 256), 32, True, torch.bfloat16),
        (20, (40, 192), 64, True, torch.float32),
        (70, (33, 96), 96, False, torch.float16),
    ],
)
def test_linear(
    tokens: int, shape: tuple[int, int], group: int, zero: bool, dtype: torch.dtype
) -> None:
    """Rows that fill no tile, scales of either sign, a bias."""
    matrix = weight(*shape, group=group, zero=zero, dtype=dtype)
    x = rows(tokens, shape[1], dtype=dtype)
    bias = rows(shape[0], dtype=dtype)
    expected = reference.linear(x, matrix, bias)
    assert difference(TritonOps().linear(x, matrix, bias), expected) < LIMITS[dtype]


@pytest.mark.parametrize("swap", [True, False])
@pytest.mark.parametrize("split", [1, 3])
def test_plans_of_a_product(swap: bool, split: int) -> None:
    """Both sides of the tensor cores, columns in unequal shares, counters left zero, a view of
    wider rows as x."""
    matrix = weight(50, 1280, group=64)
    x = rows(19, 1290)[:, :1280]
    plan = int4_gemm.Int4Plan(16, 32, 128, 4, 2, swap, split)
    expected = reference.linear(x, matrix)
    for _ in range(2):
        got = int4_gemm.linear(x, matrix, plan=plan)
        assert difference(got, expected) < LIMITS[torch.bfloat16]


def test_no_tokens() -> None:
    assert int4_gemm.linear(rows(0, 64), weight(8, 64)).shape == (0, 8)


def test_mlp_of_parts() -> None:
    """Slices of a stack's matrices, as shared experts among the routed ones are."""
    up = weight(2, 128, 64)[1]
    down = weight(2, 60, 64)[1].part(0, 40)
    x = rows(5, 64)
    assert difference(TritonOps().mlp(x, up, down), reference.mlp(x, up, down)) < 1e-4


def draw(tokens: int, top_k: int, slots: int, absent: float = 0.2) -> tuple[Tensor, Tensor]:
    """No token is routed to slot 1."""
    scores = torch.rand(tokens, slots)
    scores[:, 1] = -1
    ids = scores.topk(top_k).indices
    ids[torch.rand(tokens, top_k) < absent] = -1
    return ids.to(DEVICE), torch.rand(tokens, top_k).to(DEVICE)


def expert_weights(
    slots: int, hidden: int, inner: int, group: int, zero: bool, dtype: torch.dtype
) -> ExpertWeights:
    return ExpertWeights(
        weight(slots, 2 * inner, hidden, group=group, zero=zero, dtype=dtype),
        weight(slots, hidden, inner, group=min(group, inner), zero=zero, dtype=dtype),
    )


@pytest.mark.parametrize(
    ("tokens", "top_k", "sizes", "group", "zero", "dtype"),
    [
        (1, 2, (256, 128), 128, False, torch.bfloat16),
        (1, 3, (96, 32), 32, True, torch.bfloat16),
        (37, 3, (96, 32), 32, True, torch.bfloat16),
        (37, 3, (256, 128), 128, False, torch.bfloat16),
        (1, 2, (64, 64), 64, True, torch.float32),
        (40, 3, (64, 96), 32, False, torch.float32),
    ],
)
def test_experts(
    tokens: int, top_k: int, sizes: tuple[int, int], group: int, zero: bool, dtype: torch.dtype
) -> None:
    """Both forms, with experts on other ranks, an unused expert, and a base."""
    hidden, inner = sizes
    w = expert_weights(6, hidden, inner, group, zero, dtype)
    x = rows(tokens, hidden, dtype=dtype)
    ids, weights = draw(tokens, top_k, 6)
    ids[0, 0] = 2
    base = rows(tokens, hidden, dtype=dtype)
    expected = reference.experts(x, ids, weights, w).float() + base.float()
    got = TritonOps().experts(x, ids, weights, w, base)
    assert difference(got, expected) < LIMITS[dtype]


@pytest.mark.parametrize("swap", [True, False])
def test_tiles_of_experts(swap: bool) -> None:
    w = expert_weights(5, 160, 96, 32, True, torch.bfloat16)
    x = rows(19, 160)
    ids, weights = draw(19, 2, 5)
    plan = grouped_gemm.plan_for(w.down, 1)
    sides = {name: replace(getattr(plan, name), swap=swap) for name in ("up", "down")}
    got = grouped_gemm.grouped_experts(x, ids, weights, w, replace(plan, **sides))
    assert difference(got, reference.experts(x, ids, weights, w)) < 1e-4


@pytest.mark.parametrize("top_k", [3, 9])
def test_few_pairs_of_more_tokens(top_k: int) -> None:
    """The direct form with any number of pairs, also in two powers of 2."""
    w = expert_weights(12, 64, 32, 32, True, torch.bfloat16)
    x = rows(4, 64)
    ids, weights = draw(4, top_k, 12)
    got = small_batch.direct_experts(x, ids, weights, w)
    assert difference(got, reference.experts(x, ids, weights, w)) < 1e-4


def test_rows_that_travelled_in_fp8() -> None:
    """They are widened for weights that want them as they were."""
    w = expert_weights(6, 128, 32, 32, False, torch.bfloat16)
    x = rows(30, 128)
    ids, weights = draw(30, 3, 6)
    data, scale = reference.quantize_activation(x)
    got = TritonOps().experts_fp8(data, scale, torch.bfloat16, ids, weights, w)
    wide = reference.dequantize_activation(data, scale, torch.bfloat16)
    assert difference(got, reference.experts(wide, ids, weights, w)) < 1e-4


def test_what_no_kernel_takes() -> None:
    good = weight(8, 64)
    assert int4.supported(good)
    order = torch.zeros(64, dtype=torch.int32, device=DEVICE)
    for other in (
        replace(good, activation="int8_token"),
        replace(good, group_index=order),
        weight(8, 64, group=16),
        Weight(good.data.view(torch.int8), good.scale, (1, 32), activation="wide"),
    ):
        assert not int4.supported(other)
