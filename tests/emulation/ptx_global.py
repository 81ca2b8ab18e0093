"""Global memory for ptx_interpreter.py: the given tensors and nothing else, atomics, and races
between programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tests.emulation.ptx_clocks import BULK_WRITES, OWN, Clocks, Watch
from tests.emulation.ptx_memory import TensorMap


class Area:
    """A tensor's storage. Watched, every element keeps who wrote and read it; those that only
    this launch reads need not be."""

    def __init__(self, tensor: Tensor, clocks: Clocks, watched: bool):
        storage = tensor.untyped_storage()
        self.begin = storage.data_ptr()
        self.end = storage.data_ptr() + storage.nbytes()
        self.unit = tensor.element_size()
        self.data = torch.tensor([], dtype=torch.uint8).set_(storage).numpy()  # type: ignore[call-overload]
        self.watch = (
            Watch(clocks, storage.nbytes() // self.unit, clocks.agents(OWN)) if watched else None
        )


class GlobalMemory:
    """watched: what programs write and others may touch, but for the words at the addresses
    `counts`: counters that all warps of a program load and its first thread replaces, of which the
    other warps use nothing. early: what no kernel before writes, so it needs no wait.
    ended: what a kernel wrote that had ended when this one started. It may be read without waiting
    too, but not through L1, where what was there before may still be."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        watched: Sequence[Tensor],
        early: Sequence[Tensor],
        clocks: Clocks,
        counts: Sequence[int] = (),
        ended: Sequence[Tensor] = (),
    ):
        self.clocks = clocks
        self.counts = np.array(counts, np.int64)
        self.early = {x.untyped_storage().data_ptr() for x in early}
        self.ended = {x.untyped_storage().data_ptr() for x in ended}
        own = {x.untyped_storage().data_ptr() for x in watched}
        found = {x.untyped_storage().data_ptr(): x for x in tensors if x.numel()}
        self.areas = [Area(x, clocks, begin in own) for begin, x in found.items()]
        # by the address of an atomic: what those know who released it
        self.released: dict[int, np.ndarray] = {}

    def _pieces(
        self, address: np.ndarray, size: int, mask: np.ndarray
    ) -> Iterator[tuple[Area, np.ndarray, np.ndarray]]:
        """(area, threads, bytes [threads, size]) of each tensor that is met."""
        left = mask.copy()
        for area in self.areas:
            inside = left & (address >= area.begin) & (address + size <= area.end)
            if inside.any():
                yield area, inside, (address[inside] - area.begin)[:, None] + np.arange(size)
                left &= ~inside
        assert not left.any(), f"global memory at {address[left][:4]}, {size} bytes"
        assert not (address[mask] % size).any(), "an address that is not aligned"

    def _watch(self, area: Area, address: np.ndarray) -> Watch | None:
        """None also for counters."""
        return None if np.isin(address, self.counts).all() else area.watch

    def _one_by_one(
        self, address: np.ndarray, size: int, mask: np.ndarray, row: np.ndarray
    ) -> Iterator[tuple[int, Area, np.ndarray, np.ndarray]]:
        """(thread, its area, its bytes [1, size], its row) of each thread."""
        for t in np.flatnonzero(mask):
            one = np.arange(len(address)) == t
            ((area, _, cells),) = self._pieces(address, size, one)
            yield int(t), area, cells, row[t : t + 1]

    def load(
        self,
        address: np.ndarray,
        size: int,
        mask: np.ndarray,
        row: np.ndarray,
        waited: np.ndarray,
        from_l2: bool,
    ) -> np.ndarray:
        """row: in the clocks, of each thread. waited: which threads know that the kernel before
        is complete. from_l2: not through L1."""
        out = np.zeros((len(address), size), np.uint8)
        for area, inside, cells in self._pieces(address, size, mask):
            if not waited[inside].all() and area.begin not in self.early:
                assert area.begin in self.ended, (
                    "memory is read before the kernel before is complete"
                )
                assert from_l2, "L1 may have what was there before"
            if watch := self._watch(area, address[inside]):
                units = cells[:, :: area.unit] // area.unit
                rows = row[inside][:, None]
                assert not watch.unseen_writes(units, rows).any(), (
                    "read what another warp or program may not have written yet"
                )
                watch.read(units, self.clocks.agent(rows), self.clocks.now(rows))
            out[inside] = area.data[cells]
        return out

    def prefetch(self, address: np.ndarray, mask: np.ndarray) -> None:
        """Not a read: what another may not have written yet may be fetched, but nothing outside
        the tensors."""
        for _ in self._pieces(address, 1, mask):
            pass

    def store(
        self, address: np.ndarray, value: np.ndarray, mask: np.ndarray, row: np.ndarray
    ) -> None:
        for area, inside, cells in self._pieces(address, value.shape[1], mask):
            if watch := self._watch(area, address[inside]):
                units = cells[:, :: area.unit] // area.unit
                rows = row[inside][:, None]
                agents = self.clocks.agent(rows)
                clocks = self.clocks.now(rows)
                differs = (area.data[cells] != value[inside])[:, :: area.unit]
                self._may_write(watch, units, rows, differs)
                watch.write(units, agents, clocks)
                for place in np.unique(address[inside]) if self.released else ():
                    self.released.pop(int(place), None)  # whoever counts on must know of this store
            area.data[cells] = value[inside]

    def _may_write(
        self, watch: Watch, units: np.ndarray, rows: np.ndarray, differs: np.ndarray | bool
    ) -> None:
        assert not watch.unseen_reads(units, rows), (
            "written what another warp or program may still read"
        )
        assert not (watch.unseen_writes(units, rows) & differs).any(), (
            "written what another warp or program may still write"
        )

    def receive(
        self, target: TensorMap, row: int, column: int, data: np.ndarray, warp: int, clock: int
    ) -> None:
        """A bulk store: what lies past the ends is left out."""
        box = torch.from_numpy(data.copy()).view(target.rows.dtype)
        part = target.rows[row : row + target.box[0], column : column + target.box[1]]
        assert row >= 0
        assert column >= 0
        part.copy_(box[: part.shape[0], : part.shape[1]])
        begin = target.rows.untyped_storage().data_ptr()
        for area in self.areas:
            if area.begin == begin and area.watch and part.numel():
                across, along = (
                    torch.arange(n) * s for n, s in zip(part.shape, part.stride(), strict=True)
                )
                units = (part.storage_offset() + across[:, None] + along).numpy()
                own = np.asarray(warp)
                self._may_write(area.watch, units, own[None, None], True)
                area.watch.write(units, self.clocks.agent(own, BULK_WRITES), clock)

    def acquire(
        self, address: np.ndarray, size: int, mask: np.ndarray, row: np.ndarray
    ) -> np.ndarray:
        """A load that acquires: of what atomics release, or of what nobody changes."""
        out = np.zeros((len(address), size), np.uint8)
        for t, area, cells, own in self._one_by_one(address, size, mask, row):
            released = self.released.get(int(address[t]))
            if area.watch:
                units = cells[:, :: area.unit] // area.unit
                assert released is not None or not area.watch.unseen_writes(units, own).any(), (
                    "a load that acquires what may still be written"
                )
                area.watch.read(units, self.clocks.agent(own), self.clocks.now(own))
            if released is not None:
                self.clocks.acquire(own, released)
            out[t] = area.data[cells][0]
        return out

    def atomic(
        self,
        op: str,
        order: str,
        address: np.ndarray,
        values: list[np.ndarray],
        mask: np.ndarray,
        row: np.ndarray,
    ) -> np.ndarray:
        """What was there before, thread after thread. order: relaxed, acquire, release or
        acq_rel."""
        out = np.zeros(len(address), values[0].dtype)
        for t, area, cells, own in self._one_by_one(address, out.itemsize, mask, row):
            place = int(address[t])
            watch = area.watch
            units = cells[:, :: area.unit] // area.unit
            assert watch is not None, "an atomic on what is not watched"
            known = place in self.released  # atomics do not race with each other
            assert known or not watch.unseen_writes(units, own).any(), (
                "an atomic on what may still be written"
            )
            before = area.data[cells].copy().view(out.dtype)[0, 0]
            out[t] = before
            if order in ("acquire", "acq_rel") and known:
                self.clocks.acquire(own, self.released[place])
            after = self._result(op, before, [v[t] for v in values])
            area.data[cells] = np.asarray([after], out.dtype).view(np.uint8)
            watch.write(units, self.clocks.agent(own), self.clocks.now(own))
            mine = (
                self.clocks.release(own)
                if order in ("release", "acq_rel")
                else np.zeros(1, np.int32)
            )
            self.released[place] = np.maximum(self.released.get(place, np.zeros(1, np.int32)), mine)
        return out

    def _result(self, op: str, before: np.generic, values: list[np.generic]) -> np.generic | int:
        if op == "cas":
            return values[1] if before == values[0] else before
        with np.errstate(over="ignore"):
            return {
                "add": lambda a, b: a + b,
                "exch": lambda a, b: b,
                "max": max,
                "min": min,
                "or": lambda a, b: a | b,
            }[op](before, values[0])
