"""What all operators of the emulation share: checks, dtypes, NZ marks, norms, rotation, rounding.

Sources, named in the operators' docstrings:
[doc]     the operator's own page in torch_npu 2.13 (its Python docstring);
[hia]     the page of the same operator on hiascend.com;
[meta]    the shapes and dtypes of torch_npu's Meta kernel;
[reading] pages are silent or contradict each other: the reading taken here, to be checked on
          an Atlas before anything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

BF16 = torch.bfloat16
F16 = torch.float16
F32 = torch.float32
I8 = torch.int8
I32 = torch.int32
I64 = torch.int64

NZ = 29
# What a kernel leaves in rows that its page calls undefined: finite, and seen at once in a sum.
UNDEFINED = 7777.0
DTYPE_OF_CODE = {1: I8, 3: I32, 5: F16, 6: F32, 15: BF16, 16: torch.quint4x2}


class NpuOpError(ValueError):
    """A call that the operator's documentation does not allow."""


class _Switches:
    float32 = False
    widths = False


def _switched(name: str) -> contextlib.AbstractContextManager[None]:
    @contextlib.contextmanager
    def switched() -> Iterator[None]:
        before = getattr(_Switches, name)
        setattr(_Switches, name, True)
        try:
            yield
        finally:
            setattr(_Switches, name, before)

    return switched()


def float32_stands_for_bfloat16() -> contextlib.AbstractContextManager[None]:
    """Inside, float32 is accepted wherever bfloat16 is, and nothing is rounded to bfloat16."""
    return _switched("float32")


def any_width() -> contextlib.AbstractContextManager[None]:
    """Inside, tables of supported widths (7168, 1536, 512, ...) are not enforced, all else is.

    Small models stand for large ones in tests of whole models.
    """
    return _switched("widths")


class Checks:
    """The checks of one operator; every failure names the operator and the parameter."""

    def __init__(self, op: str) -> None:
        self.op = op

    def fail(self, parameter: str, message: str) -> NpuOpError:
        return NpuOpError(f"{self.op}: {parameter}: {message}")

    def need(self, right: object, parameter: str, message: str) -> None:
        if not right:
            raise self.fail(parameter, message)

    def missing(self, parameter: str, why: str) -> NpuOpError:
        return NpuOpError(f"{self.op}: {parameter}: {why} is not emulated")

    def absent(self, **values: Any) -> None:
        for name, value in values.items():
            if value is not None:
                raise self.missing(name, "a value")

    def dtype(self, name: str, x: torch.Tensor, *allowed: torch.dtype) -> None:
        if _Switches.float32 and x.dtype is F32 and BF16 in allowed:
            return
        self.need(x.dtype in allowed, name, f"dtype {x.dtype}, expected one of {allowed}")

    def rank(self, name: str, x: torch.Tensor, *allowed: int) -> None:
        self.need(x.dim() in allowed, name, f"rank {x.dim()}, expected one of {allowed}")

    def shape(self, name: str, x: torch.Tensor, *expected: int) -> None:
        self.need(tuple(x.shape) == expected, name, f"shape {tuple(x.shape)}, expected {expected}")

    def same_dtype(self, name: str, x: torch.Tensor, other: torch.Tensor) -> None:
        self.need(x.dtype == other.dtype, name, f"dtype {x.dtype} beside {other.dtype}")

    def contiguous(self, name: str, x: torch.Tensor) -> None:
        self.need(x.is_contiguous(), name, "is not contiguous")

    def width(self, name: str, value: int, *allowed: int) -> None:
        if not _Switches.widths:
            self.need(value in allowed, name, f"width {value}, supported are {allowed}")

    def bound(self, name: str, value: int, low: int, high: int) -> None:
        if not _Switches.widths:
            self.need(low <= value <= high, name, f"{value} is outside [{low}, {high}]")

    def choice(self, name: str, value: Any, *allowed: Any) -> None:
        self.need(value in allowed, name, f"{value!r}, expected one of {allowed}")

    def ids(self, name: str, x: torch.Tensor, low: int, high: int) -> None:
        """Every id in [low, high)."""
        if x.numel():
            inside = int(x.min()) >= low and int(x.max()) < high
            self.need(inside, name, f"ids outside [{low}, {high})")

    def unique(self, name: str, x: torch.Tensor) -> None:
        self.need(x.unique().numel() == x.numel(), name, "the same slot is named twice")

    def nz(self, name: str, x: torch.Tensor) -> None:
        self.need(is_nz(x), name, "must be FRACTAL_NZ: npu_format_cast(weight, 29) is missing")


def mark_nz(x: torch.Tensor) -> None:
    """The mark lies on the storage object: views share it, and it ends with the memory."""
    x.untyped_storage().npu_format = NZ  # type: ignore[attr-defined]


def is_nz(x: torch.Tensor) -> bool:
    return getattr(x.untyped_storage(), "npu_format", None) == NZ


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, ...]:
    """The norm in float32: (normed, 1/rms)."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return wide * rstd * gamma.float(), rstd


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return wide * cos.float() + torch.cat((-second, first), -1) * sin.float()


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    turned = torch.stack((-wide[..., 1::2], wide[..., ::2]), -1).flatten(-2)
    return wide * cos.float() + turned * sin.float()


def rotate_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs (2i, 2i+1) are first brought to halves (i, i+D/2), then turned as halves."""
    return rotate_half(torch.cat((x[..., ::2], x[..., 1::2]), -1), cos, sin)


def quantize_rows(x: torch.Tensor, largest: int = 127) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: scale = max|x| / largest, rounded half to even."""
    wide = x.float()
    scale = wide.abs().amax(-1) / largest
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(-1)
    return (wide / divisor).round().clamp(-largest - 1, largest).to(I8), scale


def quantize_static(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() * scale.float()).round().clamp(-128, 127).to(I8)


def exact_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int8 by int8 with an exact sum, as float64 (products stay far below 2**53)."""
    return x.double() @ weight.double()


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """int32 holding eight int4 (lowest bits first) or int8 holding two, along the last axis."""
    count = 8 if packed.dtype is I32 else 2
    shifts = torch.arange(0, 4 * count, 4, dtype=I32)
    bits = (packed.to(I32).unsqueeze(-1) >> shifts) & 15
    return torch.where(bits > 7, bits - 16, bits).to(I8).flatten(-2)


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, 32, 4, dtype=I64)
    bits = (values.to(I64) & 15).unflatten(-1, (-1, 8)) << shifts
    total = bits.sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(I32)


def undefined_rows(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    fill = 111 if dtype is I8 else UNDEFINED if dtype.is_floating_point else 77777
    return torch.full(shape, fill, dtype=dtype)
