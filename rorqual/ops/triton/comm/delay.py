"""Kernels that end after a given time, for benchmarks of slow links."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import globaltimer

from rorqual.config.model import nccl_channels
from rorqual.ops.triton.comm.all_reduce_norm import meet_ranks
from rorqual.ops.triton.runtime.launch import NCCL_CHANNELS, is_hopper, next_power

# of shared memory, which leave hardly any for another program of the same multiprocessor
HOPPER_KILOBYTES = 224
KILOBYTES = 96
ROOM = gl.SwizzledSharedLayout(1, 1, 1, [0])
ROW = gl.BlockedLayout([1], [32], [1], [0])


@triton.jit(do_not_specialize=["nanoseconds"])
def _delay_kernel(nanoseconds):
    start = globaltimer()
    now = start
    while now - start < nanoseconds.to(tl.int64):
        now = globaltimer()


def delay(seconds: float) -> None:
    """On the current stream; whatever the GPU's clocks are."""
    _delay_kernel[(1,)](round(seconds * 1e9), num_warps=1)


@triton.jit
def _stamp_kernel(at):
    tl.store(at, globaltimer())


def stamp(at: Tensor) -> None:
    """On the current stream: write the GPU's time in ns to at [1] int64."""
    _stamp_kernel[(1,)](at, num_warps=1)


@triton.jit
def _book(free, ready, nanoseconds):
    end = tl.maximum(tl.load(ready), tl.load(free)) + nanoseconds.to(tl.int64)
    tl.store(free, end)


@triton.jit(do_not_specialize=["nanoseconds"])
def _book_kernel(free, ready, nanoseconds):
    _book(free, ready, nanoseconds)


def book(free: Tensor, ready: Tensor, seconds: float) -> None:
    """On the current stream: a link carries a message of so many seconds. Both [1] int64, the GPU's
    time in ns. free: from when on the link is free, which is moved on; ready: since when the
    message is ready."""
    _book_kernel[(1,)](free, ready, round(seconds * 1e9), num_warps=1)


@gluon.jit(do_not_specialize=["nanoseconds"])
def _hold_kernel(
    free, ready, nanoseconds, ROWS: gl.constexpr, ROOM: gl.constexpr, ROW: gl.constexpr
):
    room = gl.allocate_shared_memory(gl.int32, [ROWS, 32], ROOM)
    end = gl.maximum(gl.load(ready), gl.load(free)) + nanoseconds.to(gl.int64)
    while globaltimer() < end:
        pass
    room.index(0).store(gl.zeros([32], gl.int32, ROW))  # or there would be no room


def hold(free: Tensor, ready: Tensor, seconds: float) -> None:
    """On the current stream: wait until a link has carried a message, which is booked afterwards.
    Meanwhile keep as many multiprocessors from other kernels as NCCL has channels: the programs of
    a message over a slow link stay there until its last bytes have come. Arguments: see `book`."""
    kilobytes = HOPPER_KILOBYTES if is_hopper(free.device) else KILOBYTES
    _hold_kernel[(nccl_channels(NCCL_CHANNELS),)](
        free, ready, round(seconds * 1e9), kilobytes * 8, ROOM, ROW, num_warps=1
    )


@triton.jit(do_not_specialize=["nanoseconds"])
def _meet_kernel(
    table, epoch, rank, free, ready, nanoseconds, WORLD: tl.constexpr, PEERS: tl.constexpr
):
    reached = tl.load(epoch) + 1
    tl.store(epoch, reached)
    _book(free, ready, nanoseconds)
    meet_ranks(table, 0, reached, rank, WORLD, PEERS)


def meet(
    table: Tensor, epoch: Tensor, rank: int, free: Tensor, ready: Tensor, seconds: float
) -> None:
    """On the current stream: `book`, and wait until all ranks have come here as often as this one.
    table: see p2p_flags.py, of buffers of int32 [world]; epoch [1] int32: how often this rank
    has."""
    world = table.numel() - 1
    given = (free, ready, round(seconds * 1e9))
    _meet_kernel[(1,)](table, epoch, rank, *given, world, next_power(world), num_warps=1)
