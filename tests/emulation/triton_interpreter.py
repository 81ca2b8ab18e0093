"""Run Triton kernels without a GPU: import this BEFORE any module that defines kernels.

With a CUDA device the kernels run there and nothing is patched. Without one, Triton's interpreter
executes them on CPU tensors, after a repair of its arithmetic (seen wrong in 3.6 and 3.9): `tl.dot`
multiplied the raw bit patterns of bf16 operands, fp32 to bf16 truncated, and fp32 to fp8 lost the
carry of its rounding. Conversions go through torch here, which rounds as the GPU does.

    from tests.emulation.triton_interpreter import DEVICE, needs_triton
    pytestmark = needs_triton
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _why_not() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if DEVICE == "cpu" and "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        return "triton was imported before its interpreter was asked for"
    return None


def _convert(
    data: np.ndarray, source: Any, target: Any, kinds: dict[Any, torch.dtype]
) -> np.ndarray:
    """Float array stored as Triton's interpreter stores it (bf16 and fp8 as unsigned words) from
    one type to another."""
    bits = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
    words = {8: np.uint8, 16: np.int16, 32: np.int32, 64: np.int64}
    width = source.primitive_bitwidth
    to_width = target.primitive_bitwidth
    values = (
        torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(words[width]).copy())
        .view(kinds[source])
        .float()
    )
    if to_width == 8:  # the GPU saturates where torch makes NaN
        limit = torch.finfo(kinds[target]).max
        values = torch.where(values.isnan(), values, values.clamp(-limit, limit))
    return values.to(kinds[target]).view(bits[to_width]).numpy().reshape(data.shape)


def _repair_arithmetic() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    kinds = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}
    kinds |= {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    stored = interpreter._get_np_dtype
    plain_cast = builder.cast_impl
    plain_convert = builder.create_fp_to_fp
    plain_dot = builder.create_dot

    def known(src: Any, dst_type: Any) -> bool:
        return src.dtype.scalar in kinds and dst_type.scalar in kinds

    def converted(src: Any, dst_type: Any) -> Any:
        return handle(
            _convert(src.data, src.dtype.scalar, dst_type.scalar, kinds).view(stored(dst_type)),
            dst_type.scalar,
        )

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        return converted(src, dst_type) if known(src, dst_type) else plain_cast(self, src, dst_type)

    def convert(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return (
            converted(src, dst_type)
            if known(src, dst_type)
            else plain_convert(self, src, dst_type, rounding_mode)
        )

    def dot(
        self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        if a.dtype.scalar in kinds and b.dtype.scalar in kinds and d.dtype.scalar == tl.float32:
            a = converted(a, tl.float32)
            b = converted(b, tl.float32)
        return plain_dot(self, a, b, d, input_precision, max_num_imprecise_acc)

    builder.cast_impl = cast
    builder.create_fp_to_fp = convert
    builder.create_dot = dot


def _wait_politely() -> None:
    """Kernels that wait for another process ask again and again, by atomics that acquire: leave
    the processor to that process."""
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_atomic_rmw

    def rmw(
        self: Any, operation: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        if "ACQUIRE" in str(sem) and "RELEASE" not in str(sem):
            time.sleep(1e-3)
        return plain(self, operation, pointer, value, mask, sem, scope)

    interpreter.InterpreterBuilder.create_atomic_rmw = rmw


SKIP_REASON = _why_not()
needs_triton = pytest.mark.skipif(SKIP_REASON is not None, reason=SKIP_REASON or "")

if SKIP_REASON is None and DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    _repair_arithmetic()
    _wait_politely()
