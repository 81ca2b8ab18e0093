"""Products with weights of eight and four bits on the CPU, beside the reference's, in the forms of
every processor (conftest.py)."""

from __future__ import annotations

import logging
import platform

import pytest
import torch
from torch import Tensor

from rorqual.config.model import MLAConfig
from rorqual.config.quant import ACTIVATIONS
from rorqual.ops import reference
from rorqual.ops.cpu import backend, quantized
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.cpu.native import Native, library
from rorqual.ops.interface import MLAWeights, Ops, TokenPlaces
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.rounding import FP8, pack_int4
from tests.ops.cpu.conftest import one_compiles

pytestmark = pytest.mark.usefixtures("poisoned")
OLDER = pytest.mark.exhaustive
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# (bits, columns of a group: 0 for all of a row, whether zero points are kept, activation)
FORMATS = [
    (8, 0, False, "int8_token"),
    (8, 64, False, "int8_token"),
    (4, 32, True, "wide"),
    (4, 64, False, "wide"),
    (4, 128, True, "wide"),
    (4, 48, True, "wide"),
    (4, 32, False, "int8_token"),
    (4, 64, True, "int8_token"),
    (4, 128, False, "int8_token"),
    (4, 128, False, "fp8_token"),
]
Kind = tuple[int, int, bool, str]
# of the largest result
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def ops(native: Native) -> CpuOps:
    found = CpuOps(native=False)
    found.native = native
    return found


def drawn(kind: Kind, *shape: int, dtype: torch.dtype = torch.float32) -> Weight:
    """Any values, those at the ends of the range among them, and scales of either sign."""
    bits, group, differ, activation = kind
    columns = shape[-1]
    group = group or columns
    places = (*shape[:-1], -(-columns // group))
    scales = (torch.rand(places) + 0.5) * columns**-0.5
    scales = torch.where(torch.rand(places) < 0.2, -scales, scales)
    if bits == 8:
        data = torch.randint(-128, 128, shape, dtype=torch.int8)
        return Weight(data, scales / 64, (1, group), activation=activation)
    zero = torch.randint(0, 16, places, dtype=torch.uint8) if differ else None
    numbers = torch.randint(0, 16, shape, dtype=torch.uint8)
    return Weight(pack_int4(numbers), (scales / 8).to(dtype), (1, group), zero, activation)


def product(x: Tensor, weight: Weight) -> Tensor:
    """By the definition, in fp32."""
    assert weight.scale is not None
    scale = weight.scale.float()
    wide = Weight(weight.data, scale, weight.block, weight.zero, weight.activation)
    return reference.linear(x.float(), wide)


def check_linear(
    ops: CpuOps, weight: Weight, dtype: torch.dtype, counts: tuple[int, ...], bound: float
) -> None:
    assert not quantized.refusal(weight)
    bias = torch.randn(weight.data.shape[0]).to(dtype)
    for rows in counts:
        x = torch.randn(rows, weight.columns).to(dtype)
        want = product(x, weight)
        for added in (None, bias):
            right = want if added is None else want + added.float()
            most = bound * float(right.abs().max())
            got = ops.linear(x, weight, added)
            torch.testing.assert_close(got.float(), right, atol=most, rtol=0.0)
    assert not ops.told


SHAPES = [(37, 256), pytest.param(133, 1152, marks=OLDER), pytest.param(70, 640, marks=OLDER)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("outputs", "columns"), SHAPES)
@DTYPES
def test_linear(ops: CpuOps, kind: Kind, outputs: int, columns: int, dtype: torch.dtype) -> None:
    weight = drawn(kind, outputs, columns, dtype=dtype)
    check_linear(ops, weight, dtype, (1, 2, 3, 7, 16, 40), TOLERANCE[dtype])


@OLDER
@pytest.mark.skipif(platform.machine() != "x86_64", reason="a processor of x86")
@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_row_of_bf16_does_not_depend_on_those_beside_it(group: int) -> None:
    """With AVX2 all of up to 27 rows are whole numbers."""
    with one_compiles():
        kernels = library("haswell")
    if kernels is None:
        pytest.skip("no compiler")
    ops = CpuOps(native=False)
    ops.native = Native(kernels)
    weight = drawn((4, group, True, "wide"), 77, 1152, dtype=torch.bfloat16)
    x = torch.randn(27, 1152).to(torch.bfloat16)
    whole = ops.linear(x, weight)
    for rows in (1, 2, 5, 16):
        assert torch.equal(ops.linear(x[:rows], weight), whole[:rows])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_are_rounded_as_the_definition_has_them(ops: CpuOps, activation: str) -> None:
    """Ties, numbers too small for fp8's exponents, and rows below the least scale."""
    weight = drawn((4, 64, True, activation), 16, 192)
    steps = torch.arange(192.0) - 90.5
    for scale in (1.0, 1e-3, 1e-9):
        x = torch.stack((steps, steps.exp2().clamp(max=1.0), torch.zeros(192))) * scale
        want = product(x, weight)
        got = ops.linear(x, weight)
        torch.testing.assert_close(got, want, atol=3e-5 * float(want.abs().max()), rtol=0.0)


@pytest.mark.parametrize("columns", [2, 48, 200, 1032])
@pytest.mark.parametrize("group", [16, 128, 0])
def test_any_even_number_of_columns(ops: CpuOps, columns: int, group: int) -> None:
    """Also a last group that is cut off, and groups that are no blocks of the fast form."""
    for activation in ("wide", "int8_token"):
        weight = drawn((4, min(group, columns), True, activation), 9, columns)
        check_linear(ops, weight, torch.float32, (1, 5, 33), 3e-5)
    counts = (1, 5, 33)
    check_linear(ops, drawn((8, 0, False, "int8_token"), 9, columns), torch.float32, counts, 3e-5)


@pytest.mark.parametrize("group", [32, 64, 96, 0])
def test_rows_of_bf16_and_a_matrix_that_ends_within_a_register(ops: CpuOps, group: int) -> None:
    """Blocks of four bits fill half a register or more; each row is what it is beside others."""
    for columns in (96, 192, 1248):
        for zeros in (False, True):
            if columns % (group or 32):
                continue
            weight = drawn((4, group, zeros, "wide"), 23, columns, dtype=torch.bfloat16)
            check_linear(ops, weight, torch.bfloat16, (1, 2, 3, 4, 6, 13, 27, 28, 61), 1e-2)
            x = torch.randn(9, columns).bfloat16()
            together = ops.linear(x, weight)
            most = 1e-2 * float(together.abs().max())
            for rows in (1, 2, 4):
                apart = torch.cat([ops.linear(part, weight) for part in x.split(rows)])
                torch.testing.assert_close(apart, together, atol=most, rtol=0.0)


ZEROS = pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])


@pytest.mark.parametrize("group", [32, 64, 96, 128, 0])
@ZEROS
def test_rows_of_bytes_times_four_bits(ops: CpuOps, group: int, zeros: bool) -> None:
    """Every number of rows that tiles and panels begin or end with, and matrices that end within a
    register, a panel or, of groups that are cut there, a piece of columns."""
    columns = [c for c in (96, 128, 192, 1248, 2208, 2304) if c % (group or 32) == 0]
    for wide in columns:
        weight = drawn((4, group, zeros, "int8_token"), 37, wide)
        counts = (1, 6, 7, 12, 13, 16, 17, 28, 32, 33, 48, 61)
        check_linear(ops, weight, torch.float32, counts, 3e-5)
        x = torch.randn(35, wide)
        x[[0, 20, 34], [3, 50, wide - 1]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        got = ops.linear(x, weight)
        spoilt = torch.zeros(35, dtype=torch.bool)
        spoilt[[0, 20, 34]] = True
        assert got[spoilt].isnan().all()
        want = product(x[~spoilt], weight)
        most = 3e-5 * float(want.abs().max())
        torch.testing.assert_close(got[~spoilt], want, atol=most, rtol=0.0)
    # several panels and pieces, more rows than meet a panel at once, and rows of bf16
    assert ops.native is not None
    ops.native.lib.rq_threads(1)
    check_linear(ops, drawn((4, group, zeros, "int8_token"), 300, 2304), torch.float32, (35,), 3e-5)
    check_linear(ops, drawn((4, group, zeros, "int8_token"), 5, 384), torch.float32, (1029,), 3e-5)
    narrow = drawn((4, group, zeros, "int8_token"), 70, 384, dtype=torch.bfloat16)
    check_linear(ops, narrow, torch.bfloat16, (9, 40), 1e-2)


@pytest.mark.parametrize("group", [32, 64, 0])
@ZEROS
def test_experts_of_bytes_with_many_rows_and_with_few(ops: CpuOps, group: int, zeros: bool) -> None:
    """All take the form that suits their mean."""
    gate_up = drawn((4, group, zeros, "int8_token"), 3, 2 * 192, 256)
    down = drawn((4, group, zeros, "int8_token"), 3, 256, 192)
    x = torch.randn(90, 256)
    ids = torch.zeros(90, 1, dtype=torch.int64)
    ids[[4, 7, 8], 0] = torch.tensor([1, 2, 2])
    weights = torch.rand(90, 1)
    got = ops.experts(x, ids, weights, ExpertWeights(gate_up, down))
    want = by_definition(x, ids, weights, gate_up, down)
    # a rounded activation may fall to the other side of a half
    torch.testing.assert_close(got, want, atol=2e-2 * float(want.abs().max()), rtol=0.0)
    assert not ops.told


@pytest.mark.parametrize("kind", [FORMATS[0], FORMATS[4], FORMATS[5], FORMATS[8]])
@DTYPES
def test_mlp(ops: CpuOps, kind: Kind, dtype: torch.dtype) -> None:
    """Two weights in one call, also of groups that make different forms of the kernel."""
    gate_up = drawn(kind, 2 * 192, 256, dtype=dtype)
    down = drawn((kind[0], 0, *kind[2:]), 70, 192, dtype=dtype)
    for rows in (1, 5, 40):
        x = torch.randn(rows, 256).to(dtype)
        made = reference.swiglu(product(x, gate_up)).to(dtype)
        want = product(made, down)
        got = ops.mlp(x, gate_up, down)
        bound = 1e-4 if kind[3] == "wide" and dtype == torch.float32 else 2e-2
        most = bound * float(want.abs().max())
        torch.testing.assert_close(got.float(), want, atol=most, rtol=0.0)
    assert not ops.told


@pytest.mark.parametrize("kind", [FORMATS[0], FORMATS[4]])
@pytest.mark.parametrize("q_rank", [None, 256])
@DTYPES
def test_latent_prologue(ops: CpuOps, kind: Kind, q_rank: int | None, dtype: torch.dtype) -> None:
    """One call, beside the calls that it stands for."""
    mla = MLAConfig(3, q_rank, 64, 32, 16, 18)
    queries = mla.num_heads * mla.qk_dim
    first = q_rank or queries
    down = drawn(kind, first + mla.latent_dim, 256, dtype=dtype)
    q_b = drawn(kind, queries, q_rank, dtype=dtype) if q_rank else None
    norms = [torch.rand(size).to(dtype) + 0.5 for size in (first, mla.kv_lora_rank)]
    bias = torch.randn(first + mla.latent_dim).to(dtype)
    kv_b = Weight(torch.empty(mla.num_heads * (32 + 18), 64, dtype=dtype))
    given = (mla, down, bias, norms[0] if q_rank else None, q_b, norms[1], kv_b, 1e-6, False)
    tokens = 5
    x = torch.randn(tokens, 256).to(dtype)
    angles = torch.randn(tokens, mla.rope_dim // 2)
    where = TokenPlaces(angles.cos(), angles.sin(), torch.tensor([7, 0, 3, 12, 9]))
    plane = torch.zeros(2, 8, mla.latent_dim, dtype=dtype)
    other = plane.clone()
    assert ops._prologue(x, MLAWeights(*given)) is not None
    _, got, _ = ops.mla_prologue(x, MLAWeights(*given), where, plane)
    _, want, _ = Ops.mla_prologue(ops, x, MLAWeights(*given), where, other)
    for made, right in ((got, want), (plane, other)):
        right = right.float().view(made.shape)
        most = (1e-4 if dtype == torch.float32 else 3e-2) * float(right.abs().max())
        torch.testing.assert_close(made.float(), right, atol=most, rtol=0.0)
    assert not ops.told


def test_a_weight_that_lies_elsewhere_is_found(ops: CpuOps) -> None:
    """What is kept of a weight ends with the memory it was kept of."""
    weight = drawn((4, 64, True, "wide"), 16, 128)
    x = torch.randn(2, 128)
    ops.linear(x, weight)
    other = drawn((4, 64, True, "wide"), 16, 128)
    weight.data, weight.scale, weight.zero = other.data, other.scale, other.zero
    want = product(x, other)
    most = 3e-5 * float(want.abs().max())
    torch.testing.assert_close(ops.linear(x, weight), want, atol=most, rtol=0.0)


def by_definition(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight) -> Tensor:
    total = torch.zeros(x.shape)
    for row, pick in (ids >= 0).nonzero().tolist():
        expert = int(ids[row, pick])
        made = reference.swiglu(product(x[row : row + 1], gate_up[expert]))
        total[row] += product(made, down[expert])[0] * weights[row, pick]
    return total


PICKS = [(5, 2), pytest.param(1, 3, marks=OLDER), pytest.param(60, 4, marks=OLDER)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rows", "top_k"), PICKS)
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=OLDER)])
@DTYPES
def test_experts(
    ops: CpuOps, kind: Kind, rows: int, top_k: int, threads: int, dtype: torch.dtype
) -> None:
    slots, hidden, size = 5, 256, 192
    gate_up = drawn(kind, slots, 2 * size, hidden, dtype=dtype)
    down = drawn(kind, slots, hidden, size, dtype=dtype)
    x = torch.randn(rows, hidden).to(dtype)
    ids = torch.rand(rows, slots).topk(top_k).indices
    ids[0, 0] = -1
    weights = torch.rand(rows, top_k)
    weights[0, 0] = float("nan")
    assert ops.native is not None
    ops.native.lib.rq_threads(threads)
    got = ops.experts(x, ids, weights, ExpertWeights(gate_up, down))
    ops.native.lib.rq_threads(1)
    want = by_definition(x.float(), ids, weights, gate_up, down)
    # a rounded activation may fall to the other side of a half
    bound = 1e-4 if kind[3] == "wide" and dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), want, atol=bound * float(want.abs().max()), rtol=0.0)
    assert not ops.told


def test_stacks_of_different_groups_are_one_call(ops: CpuOps) -> None:
    """Downs of few columns have groups of their own."""
    gate_up = drawn((4, 64, False, "int8_token"), 3, 96, 128)
    down = drawn((4, 0, False, "int8_token"), 3, 128, 48)
    x = torch.randn(4, 128)
    ids = torch.tensor([[0, 2], [1, 0], [2, 2], [-1, 1]])
    weights = torch.rand(4, 2)
    got = ops.experts(x, ids, weights, ExpertWeights(gate_up, down))
    want = by_definition(x, ids, weights, gate_up, down)
    torch.testing.assert_close(got, want, atol=2e-2 * float(want.abs().max()), rtol=0.0)
    with pytest.raises(IndexError, match="expert id 3 is neither a slot"):
        ops.experts(x, ids + 1, weights, ExpertWeights(gate_up, down))


def test_more_rows_than_the_scratch_is_for(ops: CpuOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MANY_ROWS", 8)
    weight = drawn((4, 32, True, "wide"), 24, 64)
    check_linear(ops, weight, torch.float32, (20,), 3e-5)
    stack = ExpertWeights(drawn(FORMATS[2], 3, 64, 64), drawn(FORMATS[2], 3, 64, 32))
    x = torch.randn(20, 64)
    ids = torch.randint(3, (20, 2))
    weights = torch.rand(20, 2)
    got = ops.experts(x, ids, weights, stack)
    want = by_definition(x, ids, weights, stack.gate_up, stack.down)
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=0.0)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_number_that_is_none_spoils_its_row_alone(ops: CpuOps, kind: Kind) -> None:
    weight = drawn(kind, 20, 256)
    for rows in (2, 9, 40):
        x = torch.randn(rows, 256)
        want = ops.linear(x, weight)
        for bad in (float("nan"), float("inf")):
            x[1, 77] = bad
            got = ops.linear(x, weight)
            assert not got[1].isfinite().any()
            others = torch.arange(rows) != 1
            assert torch.equal(got[others], want[others])


def test_a_row_of_zeros_gives_zeros(ops: CpuOps) -> None:
    for kind in FORMATS:
        assert not ops.linear(torch.zeros(3, 256), drawn(kind, 9, 256)).any()


def test_a_weight_written_anew_is_read_anew(ops: CpuOps) -> None:
    """Experts move between slots while the engine runs."""
    x = torch.randn(3, 128)
    ids = torch.tensor([[0], [1], [0]])
    weights = torch.ones(3, 1)
    for kind in FORMATS[:3]:
        w = ExpertWeights(drawn(kind, 2, 128, 128), drawn(kind, 2, 128, 64))
        first = ops.experts(x, ids, weights, w)
        parts = [*w.gate_up.tensors(), *w.down.tensors()]
        for part in parts:
            part[1].copy_(part[0])
        ops.weights_changed(parts)
        moved = ops.experts(x, ids, weights, w)
        want = ops.experts(x, torch.zeros_like(ids), weights, w)
        most = 1e-3 * float(want.abs().max())
        torch.testing.assert_close(moved, want, atol=most, rtol=0.0)
        assert not torch.allclose(moved[1], first[1], atol=most)


ORDER = torch.arange(128, dtype=torch.int32) // 32
REFUSED = {
    "groups in an order of their own (desc_act)": Weight(
        torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 4), (1, 32), None, "wide", ORDER
    ),
    "torch.int8 in blocks of 128x128": Weight(
        torch.zeros(8, 128, dtype=torch.int8), torch.ones(1, 1), activation="int8_group"
    ),
    "weights of torch.float8_e4m3fn": Weight(
        torch.zeros(8, 128).to(FP8), torch.ones(8, 1), (1, 128), activation="fp8_token"
    ),
    "scales of torch.float16": Weight(
        torch.zeros(8, 64, dtype=torch.uint8), torch.ones(8, 4).half(), (1, 32), None, "wide"
    ),
    "a view whose rows lie apart": Weight(
        torch.zeros(8, 96, dtype=torch.uint8)[:, :64], torch.ones(8, 4), (1, 32), None, "wide"
    ),
    "int8 in groups of 16 columns": Weight(
        torch.zeros(8, 128, dtype=torch.int8), torch.ones(8, 8), (1, 16), None, "int8_token"
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_kernel_takes_is_the_references_and_told_once(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    ops = CpuOps()
    if ops.native is None:
        pytest.skip("no compiler")
    weight = REFUSED[reason]
    x = torch.randn(3, 128)
    with caplog.at_level(logging.WARNING, "rorqual"):
        for _ in range(2):
            assert torch.equal(ops.linear(x, weight), reference.linear(x, weight))
    assert [reason in record.getMessage() for record in caplog.records] == [True]
