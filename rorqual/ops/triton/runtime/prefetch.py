"""Prefetching to the second-level cache, before a kernel waits for the one before.

Between two uses of a layer's small tensors the weights of a whole layer or step go through the
cache, so each is read from memory, once a kernel, while nothing else is. A prefetch has no result:
what is not written yet may be fetched as well, since the cache is the only copy that all
multiprocessors have.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fetch(addresses):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch_rows_ahead(addresses, SIZE: tl.constexpr, DEPENDENT: tl.constexpr):
    """SIZE bytes from each of a tile of addresses on, in lines of 128."""
    if DEPENDENT:
        for line in tl.static_range(0, SIZE, 128):
            _fetch(addresses.to(tl.int64) + line)


@triton.jit
def fetch_row_ahead(row, columns, SIZE: tl.constexpr, DEPENDENT: tl.constexpr):
    """`columns` elements of a row, at most SIZE, in lines of 128 bytes."""
    if DEPENDENT:
        each: tl.constexpr = row.dtype.element_ty.primitive_bitwidth // 8
        LINES: tl.constexpr = triton.next_power_of_2((SIZE * each + 127) // 128)
        _fetch(row.to(tl.int64) + tl.minimum(tl.arange(0, LINES) * 128, columns * each - 1))
