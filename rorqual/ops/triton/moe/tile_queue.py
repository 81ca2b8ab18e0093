"""Tiles of grouped GEMMs on Hopper, taken by programs as they become free.

An expert's last block may have one row or as many as the others, so tiles differ in work, and only
the GPU knows them: with equal numbers of tiles programs end apart. So the copying warps of a
program take its next tile from a counter, and announce it to the multiplying warps together with
the tile's first unit. What these need to know of the block of rows comes through shared memory as
well: loaded by them, it would be late by the latency of memory at every tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from rorqual.ops.triton.runtime.sm90_pipeline import thread_barrier

FIELDS = gl.constexpr(5)  # of AnnouncedTile


class TileQueue(NamedTuple):
    """taken: a counter in memory, zero between kernels: tiles taken after every program's first.
    announced: [stages * FIELDS, 1] int32 in shared memory."""

    taken: Any
    announced: Any


class AnnouncedTile(NamedTuple):
    """A block of rows of an expert times some of its weight rows. n_tile: which; -1: no tile is
    left. first, end: the block's first row, and the end of the expert's; shift: of a row to its
    pair in align.ExpertBlocks.order."""

    n_tile: Any
    first: Any
    end: Any
    expert: Any
    shift: Any


@gluon.constexpr_function
def announced_layout():
    return gl.SwizzledSharedLayout(1, 1, 1, [0])


@gluon.jit
def next_tile(queue, tiles):
    """The number of a tile that no program has, `tiles` or more if none is left. Every program's
    first tile is that of its own number. The last program to find nothing resets the counter."""
    before = gl.atomic_add(queue.taken, 1, sem="relaxed")
    if before == tiles - 1:
        gl.store(queue.taken, 0)
    return gl.num_programs(0) + before


@gluon.jit
def block_at(rows, m_tile):
    """(first row, end of the expert's rows, expert, shift) of a block of RowBlocks."""
    block = rows.blocks + m_tile
    first = gl.load(block + rows.limit)
    end = gl.load(block + 2 * rows.limit)
    return first, end, gl.load(block), gl.load(block + 3 * rows.limit)


@gluon.jit
def announce(queue, stage, n_tile, first, end, expert, shift, WARPS: gl.constexpr):
    """Tell the multiplying warps of a tile, by the copying ones, between waiting for the stage of
    its first unit and arriving there."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    place = stage * FIELDS
    queue.announced.index(place).store(gl.full([1], n_tile, gl.int32, ONE))
    queue.announced.index(place + 1).store(gl.full([1], first, gl.int32, ONE))
    queue.announced.index(place + 2).store(gl.full([1], end, gl.int32, ONE))
    queue.announced.index(place + 3).store(gl.full([1], expert, gl.int32, ONE))
    queue.announced.index(place + 4).store(gl.full([1], shift, gl.int32, ONE))
    thread_barrier()  # one thread arrives for those that have stored


@gluon.jit
def announce_end(queue, stage, WARPS: gl.constexpr):
    announce(queue, stage, -1, 0, 0, 0, 0, WARPS)


@gluon.jit
def _field(queue, place):
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(queue.announced.index(place).load(ONE), 0)


@gluon.jit
def announced_tile(queue, full, stage, phase):
    """The tile whose first unit comes to this stage, by four multiplying warps."""
    mbarrier.wait(full.index(stage), phase)
    place = stage * FIELDS
    tile = AnnouncedTile(
        _field(queue, place),
        _field(queue, place + 1),
        _field(queue, place + 2),
        _field(queue, place + 3),
        _field(queue, place + 4),
    )
    thread_barrier()  # one thread gives the stage back for those that have read
    return tile
