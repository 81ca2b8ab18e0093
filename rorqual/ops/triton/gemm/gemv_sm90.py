"""y = x W^T for one token on Hopper, in Gluon: each program's weights are in shared memory before x
is there.

In a step of one token kernels that read little (attention, norms, the router) leave the memory idle
while they wait for one another. A program of this kernel starts when those are still running
(dependent launches chain: a kernel starts once all programs of the one before have started, which
may itself be waiting), copies all its weight rows, and then waits. What is left to do when x is
there reads shared memory only.

The product uses the tensor cores, whose smallest product has 8 columns: a row of weights counts as
8 lines of an eighth of the columns each, x as a matrix of its 8 eighths, and of what each line
gives for all eighths its own one is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from rorqual.ops.triton.runtime.launch import dependent, multiprocessors
from rorqual.ops.triton.runtime.sm90_pipeline import (
    bulk_layout,
    let_next_start,
    wait_for_inputs,
)

WARPS = gl.constexpr(8)
ROWS = gl.constexpr(16)  # weight rows of a tile, two of each warp
LINES = gl.constexpr(128)  # of a tile
# of a program: attention's programs must fit beside it, or it starts after them
MOST_BYTES = 136 * 1024


@gluon.jit
def _tile_sums(tiles, inputs, BOXES: gl.constexpr, TILE: gl.constexpr):
    """[16]: sums of a tile's rows."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    even = gl.full([LINES, 8], 0.0, gl.float32, ACC)
    odd = even  # two chains of products
    for box in gl.static_range(BOXES):
        w = tiles.index(TILE * BOXES + box).load(gl.DotOperandLayout(0, ACC, 2))
        x = inputs.index(box).permute((1, 0)).load(gl.DotOperandLayout(1, ACC, 2))
        if box % 2 == 0:
            even = mma_v2(w, x, even)
        else:
            odd = mma_v2(w, x, odd)
    line = gl.arange(0, LINES, gl.SliceLayout(1, ACC))
    part = gl.arange(0, 8, gl.SliceLayout(0, ACC))
    own = gl.where(line[:, None] % 8 == part[None, :], even + odd, 0.0)
    return gl.sum(own.reshape([ROWS, 64]), 1)


@gluon.jit
def _gemv_kernel(
    x,
    w_tma,
    bias,
    y,
    HEIGHT: gl.constexpr,
    COLUMNS: gl.constexpr,
    TILES: gl.constexpr,
    BIAS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """TILES tiles of y's HEIGHT values per program."""
    BOXES: gl.constexpr = COLUMNS // (8 * 64)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [WARPS, 1], [1, 0])
    kind: gl.constexpr = y.dtype.element_ty
    tiles = gl.allocate_shared_memory(kind, [TILES * BOXES, LINES, 64], w_tma.layout)
    inputs = gl.allocate_shared_memory(kind, [BOXES, 8, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    let_next_start(DEPENDENT)
    first = gl.program_id(0) * (TILES * LINES)
    # weights: no kernel of a step writes them
    mbarrier.expect(full, TILES * LINES * COLUMNS // 8 * 2)
    for tile in gl.static_range(TILES):
        for box in gl.static_range(BOXES):
            tma.async_copy_global_to_shared(
                w_tma, [first + tile * LINES, box * 64], full, tiles.index(tile * BOXES + box)
            )
    part = gl.arange(0, 8, gl.SliceLayout(1, FLAT))
    column = gl.arange(0, 64, gl.SliceLayout(0, FLAT))
    place = x + part[:, None] * (COLUMNS // 8) + column[None, :]
    wait_for_inputs(DEPENDENT)
    for box in gl.static_range(BOXES):
        inputs.index(box).store(gl.load(place + box * 64))
    mbarrier.wait(full, 0)
    for tile in gl.static_range(TILES):
        sums = _tile_sums(tiles, inputs, BOXES, tile)
        row = first // 8 + tile * ROWS + gl.arange(0, ROWS, sums.type.layout)
        if BIAS:
            sums += gl.load(bias + row, mask=row < HEIGHT, other=0.0).to(gl.float32)
        gl.store(y + row, sums.to(kind), mask=row < HEIGHT)


def tiles_for(weight: Tensor) -> int:
    """Tiles of a program, so that no multiprocessor has two programs."""
    return -(-weight.shape[0] // (ROWS.value * multiprocessors(weight.device)))


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether all of a program's weights fit its part of shared memory."""
    columns = weight.shape[1]
    tiles = tiles_for(weight)
    return (
        x.shape[0] == 1
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and columns % 512 == 0
        and (tiles * ROWS.value + 1) * columns * 2 <= MOST_BYTES
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0  # of bulk copies
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [1, columns]; weight [rows, columns] contiguous; bias [rows]; [1, rows] in x's dtype, sums
    in fp32."""
    assert fits(x, weight), (x.shape, weight.shape)
    rows, columns = weight.shape
    tiles = tiles_for(weight)
    y = torch.empty(1, rows, dtype=x.dtype, device=x.device)
    _gemv_kernel[-(-rows // (ROWS.value * tiles)),](
        x,
        TensorDescriptor.from_tensor(
            weight.view(rows * 8, columns // 8), [LINES.value, 64], bulk_layout(16)
        ),
        bias,
        y,
        rows,
        columns,
        tiles,
        bias is not None,
        num_warps=WARPS.value,
        **dependent(x.device),
    )
    return y
