"""Shared memory for ptx_interpreter.py: swizzles and matrices as Hopper reads them, and who may touch what when.

Threads run in lockstep here, so data would be right where a card would race. Each byte therefore knows who wrote and read it since the
last barrier of all threads, and these fail: two warps touching a byte, one of them writing, with no barrier between; tensor cores reading
what threads wrote without a fence and a barrier; writing what products under way read; reading a bulk copy's target before its barrier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BASE = 1024  # where shared memory begins
MANY = -2  # several warps


@dataclass
class TensorMap:
    """What a bulk copy's descriptor says: a matrix, the box, and the bytes of the swizzle."""

    rows: Tensor
    box: tuple[int, int]
    swizzle: int


def swizzled(address: np.ndarray, width: int) -> np.ndarray:
    """Bulk copies and wgmma exchange 16-byte pieces of 8 rows of `width` bytes by the row's number."""
    bits = {0: 0, 32: 1, 64: 3, 128: 7}[width]
    return address ^ (((address >> 7) & bits) << 4)


class SharedMemory:
    """Addresses are as on the card; `cells` are bytes from BASE on."""

    def __init__(self, size: int):
        self.data = np.full(size, 255, np.uint8)
        self.written, self.writer = np.zeros(size, np.int32), np.full(size, -1, np.int16)  # when (by barriers) and by which warp
        self.read, self.reader = np.zeros(size, np.int32), np.full(size, -1, np.int16)
        self.unfenced = np.zeros(size, np.bool_)
        self.copied, self.multiplied = np.zeros(size, np.bool_), np.zeros(size, np.int16)  # under way
        self.now = 1
        self.phases: dict[int, list[int]] = {}  # of a barrier of copies: fills that are complete, bytes still to come
        self.copies: dict[int, list[np.ndarray]] = {}
        self.products: list[list[np.ndarray]] = [[]]  # what groups of products under way read; the last is not committed

    def barrier(self) -> None:
        self.now += 1

    def fence(self) -> None:
        self.unfenced[:] = False

    # ---- threads

    def _by_warp(self, address: np.ndarray, size: int, mask: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        cells = address[:, None] - BASE + np.arange(size)
        assert (cells[mask] >= 0).all(), "shared memory before its beginning"
        assert (cells[mask] < len(self.data)).all(), "shared memory past its end"
        assert not (address[mask] % min(size, 16)).any(), "an address that is not aligned"
        warps = np.arange(len(address)) // 32
        return [(int(w), own, cells[own]) for w in np.unique(warps[mask]) for own in [mask & (warps == w)]]

    def load(self, address: np.ndarray, size: int, mask: np.ndarray) -> np.ndarray:
        out = np.zeros((len(address), size), np.uint8)
        for warp, own, cells in self._by_warp(address, size, mask):
            assert not self.copied[cells].any(), "a copy's target is read before its barrier"
            assert not ((self.written[cells] == self.now) & (self.writer[cells] != warp)).any(), "read what another warp has just written"
            self.reader[cells] = np.where((self.read[cells] == self.now) & (self.reader[cells] != warp), MANY, warp)
            self.read[cells] = self.now
            out[own] = self.data[cells]
        return out

    def store(self, address: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        for warp, own, cells in self._by_warp(address, value.shape[1], mask):
            self._may_write(cells, warp, value[own])
            self.data[cells], self.written[cells], self.writer[cells], self.unfenced[cells] = value[own], self.now, warp, True

    def _may_write(self, cells: np.ndarray, warp: int, value: np.ndarray | None) -> None:
        assert not self.copied[cells].any(), "a copy's target is written before its barrier"
        assert not self.multiplied[cells].any(), "written what a product under way reads"
        assert not ((self.read[cells] == self.now) & (self.reader[cells] != warp)).any(), "written what another warp has just read"
        other = (self.written[cells] == self.now) & (self.writer[cells] != warp)
        assert not (other if value is None else other & (self.data[cells] != value)).any(), "written what another warp has just written"

    # ---- tensor cores

    def matrix(self, descriptor: int, rows: int, transposed: bool) -> np.ndarray:
        """wgmma's operand as 16-bit words [rows, 16], by the manual's canonical layouts. transposed: rows lie side by side."""
        begin, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        width = {1: 128, 2: 64, 3: 32}[descriptor >> 62]
        row, k = np.arange(rows)[:, None], np.arange(16)[None, :]
        if transposed:
            across = width // 2
            address = begin + row % across * 2 + row // across * leading + k % 8 * width + k // 8 * stride
        else:
            address = begin + row // 8 * stride + row % 8 * width + k * 2
        cells = swizzled(address, width) - BASE
        for own in (cells, cells + 1):
            assert not self.copied[own].any(), "a copy's target is multiplied before its barrier"
            assert not self.unfenced[own].any(), "multiplied what was written without a fence"
            assert not ((self.written[own] == self.now) & (self.writer[own] >= 0)).any(), "multiplied what was written without a barrier"
            self.multiplied[own] += 1
            self.products[-1].append(own)
        return self.data[cells].astype(np.uint16) | self.data[cells + 1].astype(np.uint16) << 8

    def commit(self) -> None:
        self.products.append([])

    def wait(self, left: int) -> None:
        """Until only `left` groups of products are under way."""
        for group in self.products[: max(len(self.products) - 1 - left, 0)]:
            for cells in group:
                self.multiplied[cells] -= 1
                self.read[cells], self.reader[cells] = self.now, MANY  # another warp's part may last longer
        self.products = self.products[max(len(self.products) - 1 - left, 0) :]

    # ---- bulk copies

    def copy(self, source: TensorMap, row: int, column: int, target: int, barrier: int, warp: int) -> None:
        rows, columns = source.box
        part = source.rows[row : row + rows, column : column + columns].contiguous().view(torch.uint8).numpy()
        assert row >= 0
        width = columns * source.rows.element_size()
        cells = swizzled(target + np.arange(rows)[:, None] * width + np.arange(width), source.swizzle) - BASE
        self._may_write(cells, warp, None)
        assert not self.unfenced[cells].any(), "copied over what was written without a fence"
        self.data[cells[: len(part)]] = part
        self.copied[cells], self.writer[cells] = True, -1
        self.copies.setdefault(barrier, []).append(cells)
        self.arrive(barrier, -rows * width)

    def arrive(self, barrier: int, size: int) -> None:
        phase = self.phases[barrier]
        phase[1] += size
        if phase[1] == 0:
            phase[0] += 1

    def arrived(self, barrier: int) -> int:
        """How often the barrier's copies have been completed; those are visible from now on."""
        done, left = self.phases[barrier]
        assert left == 0, "a wait for what nobody copies"
        for cells in self.copies.pop(barrier, []):
            self.copied[cells] = False
        return done
