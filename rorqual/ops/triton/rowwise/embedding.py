"""Rows of a table, which may be in pinned host memory: it has the same address on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs

COLUMNS = 2048  # columns per program: many small reads in flight hide the bus's latency


@triton.jit
def _rows_kernel(ids, table, out, columns, SIZE: tl.constexpr, DEPENDENT: tl.constexpr):
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = offsets < columns
    row = tl.load(ids + token)
    tl.store(
        out + token * columns + offsets,
        tl.load(table + row * columns + offsets, mask=inside),
        mask=inside,
    )


def rows(ids: Tensor, table: Tensor) -> Tensor:
    """Rows `ids` [T] int64 of table [rows, columns], contiguous; [T, columns] on the device of
    `ids`."""
    tokens = ids.shape[0]
    columns = table.shape[1]
    assert table.is_contiguous()
    assert table.device == ids.device or table.is_pinned(), (
        "a GPU reads host memory only where it is pinned"
    )
    out = torch.empty(tokens, columns, dtype=table.dtype, device=ids.device)
    if tokens:
        size = min(COLUMNS, next_power(columns))
        _rows_kernel[tokens, triton.cdiv(columns, size)](
            ids, table, out, columns, size, num_warps=4, **dependent(ids.device)
        )
    return out
