"""Shared memory for ptx_interpreter.py: swizzles, matrices and barriers of copies as Hopper has
them, and who may touch what when.

These fail, as ptx_clocks.py finds them: two warps touching a byte, one of them writing, with
nothing between that orders them; tensor cores or bulk stores reading what threads wrote without a
fence, and a barrier after it; writing what products or stores under way still read; reading a bulk
copy's target before its barrier; refilling a stage before all who read it said so; ending before
a copy has landed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tests.emulation.ptx_clocks import BULK_READS, OWN, PRODUCTS, Clocks, Watch

BASE = 1024  # where shared memory begins
LATE = (0, 0, 0, 1, 10, 100)


@dataclass
class TensorMap:
    """What a bulk copy's descriptor says: a matrix, the box, and the bytes of the swizzle."""

    rows: Tensor
    box: tuple[int, int]
    swizzle: int


@dataclass
class CopyBarrier:
    """An mbarrier: arrivals and bytes that are still to come in this phase, and what those who
    came know."""

    count: int
    agent: int
    left: int
    bytes: int = 0
    phase: int = 0
    gathered: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int32))
    released: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int32))


@dataclass
class BulkCopy:
    """One that has not landed. late: how often threads look at barriers before it does."""

    cells: np.ndarray
    data: np.ndarray
    barrier: CopyBarrier
    late: int


def swizzled(address: np.ndarray, width: int) -> np.ndarray:
    """Bulk copies and wgmma exchange 16-byte pieces of 8 rows of `width` bytes by the row's
    number."""
    bits = {0: 0, 32: 1, 64: 3, 128: 7}[width]
    return address ^ (((address >> 7) & bits) << 4)


class SharedMemory:
    """Of one block. Addresses are as on the GPU; `cells` are bytes from BASE on. rows: of the
    block's warps in `clocks`."""

    def __init__(self, size: int, clocks: Clocks, block: int, threads: int):
        self.data = np.full(size, 255, np.uint8)
        self.clocks = clocks
        self.block = block
        self.row = block * clocks.warps + np.arange(threads) // 32  # of each thread
        own = block * clocks.warps + np.arange(clocks.warps)
        self.watch = Watch(
            clocks,
            size,
            np.concatenate([clocks.agent(own, kind) for kind in (OWN, PRODUCTS, BULK_READS)]),
        )
        self.unfenced = np.zeros(size, np.bool_)
        # which warp fenced the last write, and when
        self.fencer = np.zeros(size, np.int32)
        self.fenced = np.zeros(size, np.int32)
        self.barriers: dict[int, CopyBarrier] = {}
        # lot: bulk copies land in any order, some late; None: at once
        self.flying: list[BulkCopy] = []
        self.lot: random.Random | None = None
        # groups of products and of bulk stores
        self.committed = np.zeros((3, clocks.warps), np.int32)

    # ---- threads

    def _cells(self, address: np.ndarray, size: int) -> np.ndarray:
        cells = address[:, None] - BASE + np.arange(size)
        assert (cells >= 0).all(), "shared memory before its beginning"
        assert (cells < len(self.data)).all(), "shared memory past its end"
        assert not (address % min(size, 16)).any(), "an address that is not aligned"
        return cells

    def load(self, address: np.ndarray, size: int, mask: np.ndarray) -> np.ndarray:
        out = np.zeros((len(address), size), np.uint8)
        cells = self._cells(address[mask], size)
        rows = self.row[mask][:, None]
        assert not self.watch.unseen_writes(cells, rows).any(), (
            "read what may not be there yet: no barrier, or a copy not awaited"
        )
        self.watch.read(cells, self.clocks.agent(rows), self.clocks.now(rows))
        out[mask] = self.data[cells]
        return out

    def store(
        self, address: np.ndarray, value: np.ndarray, mask: np.ndarray, copied: bool = False
    ) -> None:
        """copied: by cp.async, behind which the compiler takes no fence to be needed."""
        cells = self._cells(address[mask], value.shape[1])
        rows = self.row[mask][:, None]
        value = value[mask]
        assert not self.watch.unseen_reads(cells, rows), (
            "written what may still be read: no barrier, or a product or store under way"
        )
        # several warps may write the same
        unseen = self.watch.unseen_writes(cells, rows) & (self.data[cells] != value)
        assert not unseen.any(), "written what another warp or a copy may still write"
        self.data[cells] = value
        assert (self.data[cells] == value).all(), "two threads write different values"
        self.watch.write(cells, self.clocks.agent(rows), self.clocks.now(rows))
        self.unfenced[cells] = not copied
        self.fenced[cells] = 0

    def fence(self, mask: np.ndarray) -> None:
        """What the warps wrote, or know to be written, may be read by tensor cores and bulk
        copies of those who know of this fence."""
        waiting = np.flatnonzero(self.unfenced)
        for row in np.unique(self.row[mask]):
            seen = waiting[~self.watch.unseen_writes(waiting, row)]
            self.unfenced[seen], self.fencer[seen] = False, self.clocks.agent(row)
            self.fenced[seen] = self.clocks.now(row)

    def _may_read_async(self, cells: np.ndarray | slice, rows: np.ndarray) -> None:
        """rows: warps, all of which must know what is read."""
        known = self.clocks.known[rows].min(0)
        assert not (self.watch.written[cells] > known[self.watch.writer[cells]]).any(), (
            "used what may not be there yet: not awaited"
        )
        self._fenced(cells, known)

    def _fenced(self, cells: np.ndarray | slice, known: np.ndarray) -> None:
        assert not self.unfenced[cells].any(), "used what threads wrote, without a fence"
        assert not (self.fenced[cells] > known[self.fencer[cells]]).any(), (
            "used what threads wrote, with no barrier after the fence"
        )

    # ---- tensor cores

    def matrix(self, descriptor: int, rows: int, transposed: bool, warps: np.ndarray) -> np.ndarray:
        """wgmma's operand as bytes [rows, 32], by the manual's canonical layouts. transposed:
        rows lie side by side (16-bit elements only). warps: rows of the clocks whose tensor
        cores read it."""
        begin, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        width = {1: 128, 2: 64, 3: 32}[descriptor >> 62]
        row = np.arange(rows)[:, None]
        byte = np.arange(32)[None, :]
        if transposed:
            across = width // 2
            k = byte // 2
            address = (
                begin
                + row % across * 2
                + row // across * leading
                + k % 8 * width
                + k // 8 * stride
                + byte % 2
            )
        else:
            address = begin + row // 8 * stride + row % 8 * width + byte
        cells = swizzled(address, width) - BASE
        self._may_read_async(cells, warps)
        for warp in warps:
            clock = self.committed[PRODUCTS, warp % self.clocks.warps] + 1
            self.watch.read(cells, self.clocks.agent(warp, PRODUCTS), clock)
        return self.data[cells]

    def commit(self, kind: int, mask: np.ndarray) -> None:
        """A group of products, or of bulk stores."""
        self.committed[kind, np.unique(self.row[mask]) % self.clocks.warps] += 1

    def wait(self, kind: int, left: int, mask: np.ndarray) -> None:
        """Until only `left` groups are under way."""
        rows = np.unique(self.row[mask])
        done = self.committed[min(kind, BULK_READS), rows % self.clocks.warps] - left
        agents = self.clocks.agent(rows, kind)
        self.clocks.known[rows, agents] = np.maximum(self.clocks.known[rows, agents], done)

    def nothing_under_way(self, mask: np.ndarray) -> None:
        """At the end of these threads: shared memory goes to another block."""
        rows = np.unique(self.row[mask])
        for kind in (PRODUCTS, BULK_READS):
            agents = self.clocks.agent(rows, kind)
            last = self.watch.read_at[:, self.watch.columns[agents]].max(0, initial=0)
            assert (last <= self.clocks.known[rows, agents]).all(), (
                "ends while a product or store under way reads shared memory"
            )

    # ---- bulk copies

    def _place(self, source: TensorMap, target: int) -> tuple[slice, np.ndarray]:
        """All bytes of a copy, and where each of its rows' are."""
        (rows, columns) = source.box
        begin = target - BASE
        width = columns * source.rows.element_size()
        assert begin >= 0
        assert begin + rows * width <= len(self.data), "a copy past the end of shared memory"
        assert target % (1024 if source.swizzle == 128 else 128) == 0, (
            "a copy's place that is not aligned"
        )
        return slice(begin, begin + rows * width), swizzled(
            target + np.arange(rows)[:, None] * width + np.arange(width), source.swizzle
        ) - BASE

    def copy(
        self, source: TensorMap, row: int, column: int, target: int, barrier: int, warp: int
    ) -> None:
        """Rows and columns past the ends become zeros. warp: the row in `clocks` of the one that
        asks for it."""
        (rows, columns) = source.box
        own = np.asarray(warp)
        whole, cells = self._place(source, target)
        box = torch.zeros(rows, columns, dtype=source.rows.dtype)
        part = source.rows[row : row + rows, column : column + columns]
        box[: part.shape[0], : part.shape[1]] = part
        assert row >= 0
        assert column >= 0
        assert not self.watch.unseen_reads(whole, own[None]), "copied over what may still be read"
        assert not self.watch.unseen_writes(np.arange(whole.start, whole.stop), own).any(), (
            "copied over what may still be written"
        )
        self._fenced(whole, self.clocks.known[warp])
        self._fenced(slice(barrier - BASE, barrier - BASE + 8), self.clocks.known[warp])
        found = self.barriers[barrier]
        self.watch.write(whole, found.agent, found.phase + 1)
        late = 0 if self.lot is None else self.lot.choice(LATE)
        self.flying.append(BulkCopy(cells, box.view(torch.uint8).numpy(), found, late))
        if self.lot is None:
            self._time_passes()

    def _time_passes(self) -> None:
        for copy in self.flying:
            copy.late = copy.late - 1
            if copy.late < 0:
                self.data[copy.cells] = copy.data
                self._count(copy.barrier, 0, -copy.cells.size)
        self.flying = [copy for copy in self.flying if copy.late >= 0]

    def send(self, target: TensorMap, row: int, column: int, source: int, warp: int) -> np.ndarray:
        """Bytes [rows, width] of a bulk store, which are read until its group is complete."""
        _, cells = self._place(target, source)
        own = np.asarray([warp])
        self._may_read_async(cells, own)
        self.watch.read(
            cells,
            self.clocks.agent(own, BULK_READS),
            self.committed[BULK_READS, own % self.clocks.warps] + 1,
        )
        return self.data[cells]

    # ---- barriers of copies

    def start(self, address: int, count: int, thread: np.ndarray) -> None:
        """thread: a mask of one."""
        words = np.zeros((len(thread), 8), np.uint8)
        self.store(np.where(thread, address, 0), words, thread)
        agent = (
            self.barriers[address].agent
            if address in self.barriers
            else self.clocks.barrier_agent(self.block, len(self.barriers))
        )
        self.barriers[address] = CopyBarrier(count, agent, count)

    def _found(self, address: int, row: np.ndarray) -> CopyBarrier:
        assert address in self.barriers, "no barrier of copies"
        cells = np.arange(address - BASE, address - BASE + 8)
        assert not self.watch.unseen_writes(cells, row[..., None]).any(), (
            "a barrier of copies that may not be there yet"
        )
        return self.barriers[address]

    def arrive(self, address: int, size: int, row: int, count: int = 1) -> None:
        """An arrival that counts `count` times, of the warp of that row, and announces `size`
        bytes."""
        found = self._found(address, np.asarray([row]))
        own = np.asarray([row])
        assert found.left >= count, "more arrivals than a barrier counts"
        found.gathered = np.maximum(found.gathered, self.clocks.release(own))
        self._count(found, count, size)

    def _count(self, found: CopyBarrier, arrivals: int, size: int) -> None:
        found.left = found.left - arrivals
        found.bytes = found.bytes + size
        if found.left == found.bytes == 0:
            found.phase = found.phase + 1
            found.left = found.count
            found.released = np.broadcast_to(
                np.maximum(found.released, found.gathered), self.clocks.known.shape[1:]
            ).copy()
            found.released[found.agent] = found.phase

    def arrived(self, address: int, parity: int, mask: np.ndarray) -> bool:
        """Whether the phase of that parity is over; then what was done for it is visible."""
        rows = np.unique(self.row[mask])
        found = self._found(address, rows)
        self._time_passes()
        if found.phase % 2 == parity:
            return False
        self.clocks.acquire(rows, found.released)
        return True
