"""Products with weights of eight and four bits on the CPU, beside dequantised weights multiplied by
torch: with vectors of this processor, of AVX2, of four floats as NEON has them, and in the form
for AVX512-VNNI."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rorqual.errors import ConfigError
from rorqual.ops.cpu import quantized
from rorqual.ops.cpu.native import Native, library
from rorqual.ops.cpu.quantized import CpuPackedWeight

OLDER = pytest.mark.exhaustive
PROCESSORS = [
    "native",
    *(pytest.param(name, marks=OLDER) for name in ("haswell", "x86-64", "vnni, emulated")),
]
VNNI = Path(__file__).with_name("vnni.h")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# (format, columns of a group: 0 for all of a row, whether zero points differ)
FORMATS = [
    ("w8a8", 0, False),
    ("w8a8", 32, False),
    ("w4a16", 32, True),
    ("w4a16", 64, False),
    ("w4a16", 128, True),
    ("w4a8", 32, False),
    ("w4a8", 64, True),
    ("w4a8", 128, False),
]
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module", params=PROCESSORS)
def native(request: pytest.FixtureRequest) -> Native:
    name = request.param
    emulated = name == "vnni, emulated"
    if emulated and not torch.cpu._is_avx512_supported():
        pytest.skip("VNNI is emulated in AVX-512")
    kernels = library("native", ("-include", str(VNNI))) if emulated else library(name)
    if kernels is None:
        pytest.skip(f"no compiler for {name}")
    return Native(kernels)


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def drawn(kind: tuple[str, int, bool], *shape: int) -> CpuPackedWeight:
    """Any values, those at the ends of the range among them."""
    name, group, differ = kind
    columns = shape[-1]
    groups = columns // (group or columns)
    scales = (torch.rand(*shape[:-1], groups) + 0.5) * columns**-0.5
    if name == "w8a8":
        data = torch.randint(-128, 128, shape, dtype=torch.int8)
        return quantized.pack_int8(data, scales / 64)
    zeros = torch.randint(0, 16, scales.shape) if differ else None
    values = torch.randint(0, 16, shape, dtype=torch.uint8)
    return quantized.pack_int4(values, scales / 8, zeros, int(name.removeprefix("w4a")))


def product(x: Tensor, weight: CpuPackedWeight) -> Tensor:
    """In double, of activations as the format has them."""
    rows = x.float() if weight.format == "w4a16" else quantized.rounded_to_int8(x)
    return (rows.double() @ quantized.unpacked(weight).double().t()).float()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("outputs", "columns"), [(1, 128), (37, 256), (70, 640), (133, 1152)])
@DTYPES
def test_linear(
    native: Native, kind: tuple[str, int, bool], outputs: int, columns: int, dtype: torch.dtype
) -> None:
    weight = drawn(kind, outputs, columns)
    bias = torch.randn(outputs).to(dtype)
    for rows in (1, 2, 3, 4, 7, 16, 40):
        x = torch.randn(rows, columns).to(dtype)
        want = product(x, weight)
        for added in (None, bias):
            got = quantized.linear(native, x, weight, added)
            right = want if added is None else want + added.float()
            bound = TOLERANCE[dtype] * float(right.abs().max())
            torch.testing.assert_close(got.float(), right, atol=bound, rtol=1e-2)


@pytest.mark.parametrize("kind", FORMATS)
def test_torch_alone_gives_the_same(native: Native, kind: tuple[str, int, bool]) -> None:
    weight = drawn(kind, 50, 256)
    x = torch.randn(5, 256)
    torch.testing.assert_close(
        quantized.linear(None, x, weight), quantized.linear(native, x, weight), atol=1e-3, rtol=1e-3
    )


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("rows", "top_k"), [(1, 3), (5, 2), (60, 4)])
@pytest.mark.parametrize("threads", [1, 2])
def test_experts(
    native: Native, kind: tuple[str, int, bool], rows: int, top_k: int, threads: int
) -> None:
    slots, hidden, size = 5, 256, 384
    gate_up = drawn(kind, slots, 2 * size, hidden)
    down = drawn(kind, slots, hidden, size)
    x = torch.randn(rows, hidden)
    ids = torch.rand(rows, slots).topk(top_k).indices
    ids[0, 0] = -1
    weights = torch.rand(rows, top_k)
    weights[0, 0] = float("nan")
    native.lib.rq_threads(threads)
    got = quantized.experts(native, x, ids, weights, gate_up, down)
    native.lib.rq_threads(1)
    want = torch.zeros(rows, hidden)
    for row, pick in (ids >= 0).nonzero().tolist():
        expert = int(ids[row, pick])
        gate, up = product(x[row : row + 1], gate_up[expert]).chunk(2, -1)
        made = product(F.silu(gate) * up, down[expert])[0]
        want[row] += made * weights[row, pick]
    # a rounded activation may fall to the other side of a half
    bound = 2e-2 if kind[0].endswith("a8") else 1e-4
    torch.testing.assert_close(got, want, atol=bound * float(want.abs().max()), rtol=0.0)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_number_that_is_none_spoils_its_row_alone(
    native: Native, kind: tuple[str, int, bool]
) -> None:
    weight = drawn(kind, 20, 256)
    for rows in (2, 9, 40):
        x = torch.randn(rows, 256)
        want = quantized.linear(native, x, weight)
        for bad in (float("nan"), float("inf")):
            x[1, 77] = bad
            got = quantized.linear(native, x, weight)
            assert not got[1].isfinite().any()
            others = torch.arange(rows) != 1
            assert torch.equal(got[others], want[others])


def test_a_row_of_zeros_gives_zeros(native: Native) -> None:
    for kind in FORMATS:
        assert not quantized.linear(native, torch.zeros(3, 256), drawn(kind, 9, 256)).any()


def test_bad_weights_are_refused() -> None:
    values = torch.zeros(4, 96, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="groups of 48 columns; accepted: multiples of 32"):
        quantized.pack_int4(values, torch.ones(4, 2))
    with pytest.raises(ConfigError, match=r"scales of shape \(4, 5\) do not divide"):
        quantized.pack_int4(values, torch.ones(4, 5))
    with pytest.raises(ConfigError, match="scales hold a number that is not finite"):
        quantized.pack_int4(values, torch.full((4, 3), float("nan")))
    with pytest.raises(ConfigError, match="a value of 16 has more than four bits"):
        quantized.pack_int4(values + 16, torch.ones(4, 3))
    with pytest.raises(ConfigError, match=r"values of torch.uint8; accepted: torch.int8"):
        quantized.pack_int8(values, torch.ones(4))
    with pytest.raises(ConfigError, match="activation_bits=4; accepted: 8, 16"):
        quantized.pack_int4(values, torch.ones(4, 3), None, 4)
