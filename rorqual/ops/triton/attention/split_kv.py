"""Split-KV scheduling: distributes the cached tokens of a decode batch over programs, and merges
the partial results.

The KV of all requests, in tiles of `block_n` tokens, is concatenated; worker w processes tiles [w *
chunk, (w + 1) * chunk). So mixed lengths load the GPU evenly, and the host needs no lengths. A
worker writes the results of whole requests directly, and shares at most two requests with its
neighbors: the one it continues (partial 2w) and the one it does not finish (partial 2w + 1). The
same idea as FlashMLA's tile scheduler and "stream-K" (arXiv 2301.03598).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.triton.runtime.launch import dependent, is_hopper, wait_for_inputs


@dataclass(frozen=True)
class SplitPlan:
    """One step's schedule, made on the device from `kv_lens`; used by every layer of the step.

    starts [R + 1] int32: first tile of each request, then the total. first [workers] int32: the
    request a worker begins with. partial [2 workers, rows, width] and lse [2 workers, rows] fp32:
    unfinished outputs (normalized) and their log2-sum-exp2.
    """

    starts: Tensor
    first: Tensor
    partial: Tensor
    lse: Tensor
    block_n: int
    min_tiles: int

    @property
    def workers(self) -> int:
        return self.first.shape[0]


@dataclass(frozen=True)
class LatentDecode:
    """What each form of mla_decode.mla_decode launches its kernel with. factor: the scale of scores
    whose exponential is one of 2; grid: (blocks of rows, workers)."""

    q_latent: Tensor
    q_rope: Tensor
    cache: Tensor
    tables: Tensor
    kv_lens: Tensor
    factor: float
    plan: SplitPlan
    out: Tensor
    grid: tuple[int, int]

    @property
    def schedule(self) -> tuple[Tensor, ...]:
        """Arguments of every kernel, from the block tables to the log-sum-exps."""
        plan = self.plan
        return (
            *(self.tables, self.kv_lens, plan.starts, plan.first),
            *(self.out, plan.partial, plan.lse),
        )

    @property
    def query_strides(self) -> tuple[int, ...]:
        """Token and head of both parts of the queries."""
        return (*self.q_latent.stride()[:2], *self.q_rope.stride()[:2])

    @property
    def requests(self) -> int:
        return self.kv_lens.shape[0]

    @property
    def heads(self) -> int:
        return self.q_latent.shape[1]

    @property
    def queries(self) -> int:
        """Query tokens a request."""
        return self.q_latent.shape[0] // self.requests


@triton.jit
def stored(value, DEPENDENT: tl.constexpr):
    """Wait until this thread's stores are in L2: at the end of a kernel whose results the next one
    reads before it waits. A dependent launch starts once the programs before have ended, but only
    its wait promises that what they stored is there. value: any int32 of the kernel."""
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, $1;",
            "=r,r",
            [value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _chunk(total, workers, min_tiles):
    return tl.maximum(tl.cdiv(total, workers), min_tiles)


# block_n no constant: a step of short requests may have other tiles than any step of the start
@triton.jit(
    do_not_specialize=["requests", "min_tiles", "block_n"],
    do_not_specialize_on_alignment=["kv_lens", "starts", "first"],
)
def _plan_kernel(
    kv_lens,
    starts,
    first,
    busy,
    requests,
    min_tiles,
    block_n,
    REQUESTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """busy [1]: how many workers have tiles, all if left out. DEPENDENT: attention behind it reads
    the schedule before it waits."""
    worker = tl.program_id(0)
    workers = tl.num_programs(0) if busy is None else tl.load(busy)
    index = tl.arange(0, REQUESTS)
    lens = tl.load(kv_lens + index, mask=index < requests, other=0)
    tiles = tl.cdiv(lens, block_n).to(tl.int32)
    ends = tl.cumsum(tiles, 0)
    position = worker * _chunk(tl.sum(tiles), workers, min_tiles)
    before = tl.sum(((ends <= position) & (index < requests)).to(tl.int32))
    tl.store(first + worker, before)
    if worker == 0:
        tl.store(starts, 0)
        tl.store(starts + 1 + index, ends, mask=index < requests)
    stored(before, DEPENDENT)


def split_plan(
    kv_lens: Tensor,
    workers: int,
    block_n: int,
    min_tiles: int,
    rows: int,
    width: int,
    busy: Tensor | None = None,
) -> SplitPlan:
    """kv_lens [R] int on the device. rows: query tokens a request times heads; width: columns of
    the output. busy [1] int32 on the device: only the first so many workers get tiles."""
    requests = kv_lens.shape[0]
    device = kv_lens.device
    starts = torch.empty(requests + 1, dtype=torch.int32, device=device)
    first = torch.empty(workers, dtype=torch.int32, device=device)
    partial = torch.empty(2 * workers, rows, width, dtype=torch.float32, device=device)
    lse = torch.empty(2 * workers, rows, dtype=torch.float32, device=device)
    size = triton.next_power_of_2(max(requests, 2))
    # not a dependent launch, so all that kernels before have stored is there, for attention as well
    _plan_kernel[(workers,)](
        kv_lens, starts, first, busy, requests, min_tiles, block_n, size, is_hopper(device)
    )
    return SplitPlan(starts, first, partial, lse, block_n, min_tiles)


@triton.jit
def _together(
    partial,
    lse,
    rows,
    row_ok,
    head_worker,
    count,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STEP: tl.constexpr,
):
    """Rows [BLOCK_R] of a request that `count` workers from head_worker on share: the weighted
    sum of their partials, [BLOCK_R, WIDTH]."""
    columns = tl.arange(0, WIDTH)
    acc = tl.zeros((BLOCK_R, WIDTH), tl.float32)
    peak = tl.full((BLOCK_R,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    for i in range(0, count, STEP):
        split = i + tl.arange(0, STEP)
        slot = 2 * (head_worker + split) + (split == 0).to(tl.int32)
        where = slot.to(tl.int64)[None, :] * ROWS + rows[:, None]
        ok = row_ok[:, None] & (split < count)[None, :]
        score = tl.load(lse + where, mask=ok, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            partial + where[:, :, None] * WIDTH + columns[None, None, :],
            mask=ok[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(score, 1))
        weight = tl.exp2(score - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        acc = acc * shrink[:, None] + tl.sum(values * weight[:, :, None], 1)
        total = total * shrink + tl.sum(weight, 1)
        peak = new_peak
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["requests", "workers", "min_tiles"])
def _combine_kernel(
    partial,
    lse,
    starts,
    out,
    out_token,
    out_head,
    requests,
    workers,
    min_tiles,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STEP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rows of one request: the weighted sum of its partials; zeros for a request of length 0;
    nothing if one worker did it all. The output has SIZE columns, the partials WIDTH."""
    request = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    # before the wait, as in decode attention: the schedule is there (`stored`)
    begin = tl.load(starts + request, cache_modifier=".cg")
    end = tl.load(starts + request + 1, cache_modifier=".cg")
    all_tiles = tl.load(starts + requests, cache_modifier=".cg")
    # even without work: kernels that wait for this one rely on earlier ones having ended
    wait_for_inputs(DEPENDENT)
    chunk = _chunk(all_tiles, workers, min_tiles)
    head_worker = begin // chunk
    count = tl.where(end > begin, (end - 1) // chunk - head_worker + 1, 0)
    if count == 1:
        return
    columns = tl.arange(0, WIDTH)
    row_ok = rows < ROWS
    acc = _together(partial, lse, rows, row_ok, head_worker, count, ROWS, WIDTH, BLOCK_R, STEP)
    token = request.to(tl.int64) * (ROWS // HEADS) + rows // HEADS
    place = out + token[:, None] * out_token + (rows % HEADS)[:, None] * out_head + columns[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=row_ok[:, None] & (columns < SIZE)[None, :])


def rows_at_once(rows: int) -> tuple[int, int]:
    """(rows of a program that merges, partial results that it reads at once). Few rows have many
    results each, so they are spread, and their results read in parallel; of many the programs take
    most of the time."""
    if rows < 512:
        return 1, 16
    if rows < 1024:
        return 2, 8
    return (4, 4) if rows < 4096 else (8, 2)


def combine(plan: SplitPlan, out: Tensor, requests: int) -> None:
    """Finish `out` [T, H, width] in place: the requests that several workers shared, and those
    of length 0."""
    rows = plan.partial.shape[1]
    width = plan.partial.shape[2]
    heads = out.shape[1]
    block_r, step = rows_at_once(requests * rows)
    grid = (requests, triton.cdiv(rows, block_r))
    _combine_kernel[grid](
        plan.partial,
        plan.lse,
        plan.starts,
        out,
        out.stride(0),
        out.stride(1),
        requests,
        plan.workers,
        plan.min_tiles,
        heads,
        rows,
        out.shape[2],
        width,
        block_r,
        step,
        num_warps=4,
        **dependent(out.device),
    )
