"""What each instruction does to one block of threads, for ptx_interpreter.py: everything but
jumps and waits."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from tests.emulation.ptx_clocks import BULK_READS, BULK_WRITES
from tests.emulation.ptx_global import GlobalMemory
from tests.emulation.ptx_memory import SharedMemory, TensorMap
from tests.emulation.ptx_products import Products
from tests.emulation.ptx_registers import KINDS, Program, bf16_to_f32, vector

# cp.async copies at once: that a group is waited for too late goes unnoticed
NOTHING = (
    "griddepcontrol.launch",
    "bar.warp.sync",
    "setmaxnreg",
    "cp.async.commit_group",
    "cp.async.wait_group",
    "cp.async.bulk.prefetch",
)
COMPARE: dict[str, Any] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "neu": np.not_equal,  # true of NaN too
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


class Block(Products):
    """arguments: by the kernel's parameters in order: ints, floats, tensors (their address),
    TensorMaps."""

    def __init__(
        self,
        code: Program,
        arguments: list[Any],
        program: tuple[int, ...],
        grid: tuple[int, ...],
        shared: SharedMemory,
        memory: GlobalMemory,
    ):
        special: dict[str, Any] = {"%tid.x": np.arange(code.threads)}
        for i, axis in enumerate("xyz"[: len(grid)]):
            special |= {f"%ctaid.{axis}": program[i], f"%nctaid.{axis}": grid[i]}
        super().__init__(code, special)
        self.arguments = arguments
        self.shared = shared
        self.memory = memory
        self.waited = np.full(
            code.threads, not any(op.startswith("griddepcontrol") for _, op, _ in code.instructions)
        )

    def guarded(self, guard: str) -> np.ndarray:
        return (
            self.get(guard.lstrip("@!"), "pred") ^ guard.startswith("@!")
            if guard
            else np.ones(self.threads, np.bool_)
        )

    def execute(self, op: str, text: list[str], mask: np.ndarray) -> None:
        head, *rest = op.split(".")
        kind = rest[-1] if rest else ""
        self.time += 1
        if head in ("wgmma", "cp", "fence", "griddepcontrol", "setmaxnreg") or op.startswith(
            NOTHING
        ):
            self.asynchronous(op, text, mask)
        elif head == "mbarrier":
            self.barrier(rest[:2], text, mask)
        elif head == "mma":
            self.mma(op, text, mask)
        elif head == "ldmatrix":
            self.ldmatrix(vector(text[0]), self.address(text[1]), "trans" in rest, mask)
        elif head == "stmatrix":
            self.stmatrix(vector(text[1]), self.address(text[0]), "trans" in rest, mask)
        elif head in ("ld", "st"):
            self.move(head, rest, text, mask)
        elif head == "prefetch":
            self.memory.prefetch(self.address(text[0]), mask)
        elif head in ("atom", "red"):
            self.atomic(rest, text if head == "atom" else ["_", *text], mask)
        elif head in ("shfl", "redux", "elect"):
            self.across_lanes(head, rest, text, mask)
        elif head == "cvta" or (head == "mov" and "{" in "".join(text)):
            self.unpack(text, kind, mask)
        elif head == "setp":
            held = "b16" if kind == "bf16" else kind
            values = [self.get(x, held) for x in text[1:3]]
            if kind == "bf16":
                values = [bf16_to_f32(value.view(np.uint16)) for value in values]
            self.put(text[0], COMPARE[rest[0]](*values), mask)
        elif head == "selp":
            a = self.get(text[1], kind)
            b = self.get(text[2], kind)
            p = self.get(text[3], "pred")
            self.put(text[0], np.where(p, a, b), mask)
        elif head == "cvt":
            self.put(text[0], self.convert(rest, text), mask)
        else:
            self.put(text[0], self.compute(head, rest, text[1:]), mask)

    def across_lanes(self, head: str, rest: list[str], text: list[str], mask: np.ndarray) -> None:
        self.whole_warps(self.active)
        lane, warp = self.lanes
        if head == "elect":
            self.put(text[0].partition("|")[2], lane == 0, mask)
        elif head == "redux":
            values = self.get(text[1], rest[-1]).reshape(-1, 32)
            self.put(
                text[0],
                {"min": np.min, "max": np.max, "add": np.sum}[rest[1]](values, 1)
                .repeat(32)
                .astype(values.dtype),
                mask,
            )
        else:
            other = self.get(text[2], "s32")
            name = text[0].partition("|")[0]
            source = {"bfly": lane ^ other, "idx": other, "up": lane - other}[rest[1]]
            self.put(
                name,
                self.get(text[1], "b32")[
                    warp + np.where((source < 0) | (source > 31), lane, source)
                ],
                mask,
            )

    def asynchronous(self, op: str, text: list[str], mask: np.ndarray) -> None:
        if op.startswith("wgmma.mma_async"):
            self.wgmma(op, text, mask)
        elif op.startswith("wgmma.fence"):
            self.wgmma_fence(mask)
        elif op.startswith("wgmma.commit"):
            self.wgmma_commit(mask)
        elif op.startswith("wgmma.wait"):
            self.wgmma_wait(int(text[0]), mask)
        elif op.startswith("fence.proxy.async"):
            self.shared.fence(mask)
        elif op.startswith("griddepcontrol.wait"):
            self.waited |= mask
        elif op.startswith("cp.async.bulk.tensor.2d.shared"):
            self.bulk_load(text, mask)
        elif op.startswith("cp.async.bulk.tensor.2d.global"):
            self.bulk_store(text, mask)
        elif op.startswith("cp.async.bulk.commit"):
            self.shared.commit(BULK_READS, mask)
        elif op.startswith("cp.async.bulk.wait"):
            for kind in (BULK_READS,) if op.endswith("read") else (BULK_READS, BULK_WRITES):
                self.shared.wait(kind, int(text[0]), mask)
        elif op.startswith(("cp.async.cg.shared.global", "cp.async.ca.shared.global")):
            self.copy_words(text, mask, from_l2=".cg." in op)
        elif op.startswith("cp.async.mbarrier.arrive.noinc"):
            address = self.address(text[0])
            for t in np.flatnonzero(mask):
                self.shared.arrive(int(address[t]), 0, int(self.shared.row[t]))
        else:
            assert op.startswith(NOTHING), op

    def copy_words(self, text: list[str], mask: np.ndarray, from_l2: bool) -> None:
        """16 bytes a thread, or 8 or 4, of which the source has the first few and zeros are the
        others."""
        size = int(text[2], 0)
        whole = np.full(self.threads, size, np.uint32)
        known = self.get(text[3], "u32") if len(text) > 3 else whole
        there = mask & (known > 0)
        address = np.where(there, self.address(text[1]), 0)
        data = self.memory.load(address, size, there, self.shared.row, self.waited, from_l2)
        data[np.arange(size) >= known[:, None]] = 0
        self.shared.store(np.where(mask, self.address(text[0]), 0), data, mask, copied=True)

    # ---- bulk copies

    def _maps(self, parts: str, mask: np.ndarray) -> list[tuple[int, TensorMap, int, int]]:
        """(thread, map, row, column) of each that asks for a copy."""
        name, _, place = parts.strip("[]").partition(",")
        x, y = (self.get(i, "s32") for i in vector(place))
        which = self.get(name.strip(), "b64")
        return [
            (int(t), self.arguments[int(which[t])], int(y[t]), int(x[t]))
            for t in np.flatnonzero(mask)
        ]

    def bulk_load(self, text: list[str], mask: np.ndarray) -> None:
        target = self.address(text[0])
        barrier = self.address(text[2])
        for t, source, row, column in self._maps(text[1], mask):
            early = source.rows.untyped_storage().data_ptr() in self.memory.early
            assert early or self.waited[t], "a copy that does not wait for the kernel before"
            self.shared.copy(
                source, row, column, int(target[t]), int(barrier[t]), int(self.shared.row[t])
            )

    def bulk_store(self, text: list[str], mask: np.ndarray) -> None:
        source = self.address(text[1])
        for t, target, row, column in self._maps(text[0], mask):
            assert self.waited[t], "a store that does not wait for the kernel before"
            own = int(self.shared.row[t])
            data = self.shared.send(target, row, column, int(source[t]), own)
            group = int(self.shared.committed[BULK_READS, own % self.shared.clocks.warps]) + 1
            self.memory.receive(target, row, column, data, own, group)

    def barrier(self, what: list[str], text: list[str], mask: np.ndarray) -> None:
        address = self.address(text[0] if what[0] in ("init", "inval") else text[1])
        for t in np.flatnonzero(mask):
            if what[0] == "init":
                self.shared.start(
                    int(address[t]), int(self.get(text[1], "u32")[t]), np.arange(self.threads) == t
                )
            else:
                assert what[0] == "arrive", what
                number = int(self.get(text[2], "u32")[t]) if len(text) > 2 else 1
                size, count = (number, 1) if what[1] == "expect_tx" else (0, number)
                self.shared.arrive(int(address[t]), size, int(self.shared.row[t]), count)

    def tried(self, text: list[str], mask: np.ndarray) -> bool:
        """mbarrier.try_wait of the active threads: whether they may go on."""
        address = self.address(text[1])[mask]
        parity = self.get(text[2], "u32")[mask] & 1
        assert (address == address[0]).all(), "threads wait for different barriers"
        assert (parity == parity[0]).all(), "threads wait for different phases"
        if not self.shared.arrived(int(address[0]), int(parity[0]), mask):
            return False
        self.put(text[0], np.ones(self.threads, np.bool_), mask)
        return True

    # ---- words

    def parameter(self, text: list[str], kind: str, mask: np.ndarray) -> None:
        value = self.arguments[self.code.parameters[text[1].strip("[]")]]
        value = value.data_ptr() if isinstance(value, Tensor) else value
        if isinstance(value, float):
            self.put(text[0], np.full(self.threads, np.float32(value)), mask)
        else:
            # a longer register is filled with the sign
            dtype = f"i{np.dtype(self.code.kind(text[0])).itemsize}"
            self.put(
                text[0], np.full(self.threads, value, KINDS["s" + kind[1:]]).astype(dtype), mask
            )

    def move(self, head: str, rest: list[str], text: list[str], mask: np.ndarray) -> None:
        space = next(
            x.partition("::")[0] for x in rest if x.startswith(("param", "shared", "global"))
        )
        kind = rest[-1]
        if space == "param":
            self.parameter(text, kind, mask)
            return
        assert head == "ld" or space == "shared" or self.waited[mask].all(), (
            "memory is written before the kernel before is complete"
        )
        size = np.dtype(KINDS[kind]).itemsize
        where, names = (text[1], vector(text[0])) if head == "ld" else (text[0], vector(text[1]))
        address = np.where(mask, self.address(where), 0)
        if head == "ld":
            data = self._loaded(space, rest, address, size * len(names), mask)
            for name, value in zip(names, data.view(KINDS[kind]).T, strict=True):
                wide = np.dtype(self.code.kind(name)).itemsize
                self.put(
                    name,
                    value
                    if wide == size
                    else value.astype(f"{'i' if kind[0] == 's' else 'u'}{wide}"),
                    mask,
                )
            return
        values = (
            np.stack([self.get(name, kind) for name in names], 1)
            .view(np.uint8)
            .reshape(self.threads, -1)
        )
        if space == "shared":
            self.shared.store(address, values, mask)
        else:
            self.memory.store(address, values, mask, self.shared.row)

    def _loaded(
        self, space: str, rest: list[str], address: np.ndarray, size: int, mask: np.ndarray
    ) -> np.ndarray:
        """Bytes [threads, size]. rest: the instruction's qualifiers."""
        if space == "shared":
            return self.shared.load(address, size, mask)
        if "acquire" in rest:
            assert self.waited[mask].all(), "memory is used before the kernel before is complete"
            return self.memory.acquire(address, size, mask, self.shared.row)
        return self.memory.load(
            address, size, mask, self.shared.row, self.waited, from_l2="cg" in rest
        )

    def atomic(self, rest: list[str], text: list[str], mask: np.ndarray) -> None:
        assert self.waited[mask].all(), "memory is used before the kernel before is complete"
        assert rest[0] == "global", rest
        assert "gpu" in rest or "sys" in rest, rest
        kind = rest[-1]
        names = {x for x in rest if x in ("add", "exch", "cas", "min", "max", "or")}
        order = next(
            (x for x in rest if x in ("relaxed", "acquire", "release", "acq_rel")), "relaxed"
        )
        values = [self.get(x, kind) for x in text[2:]]
        self.put(
            text[0],
            self.memory.atomic(
                names.pop(), order, self.address(text[1]), values, mask, self.shared.row
            ),
            mask,
        )

    def unpack(self, text: list[str], kind: str, mask: np.ndarray) -> None:
        target, source = text
        if target.startswith("{"):
            halves = (
                self.get(source, kind)
                .copy()
                .view(f"u{np.dtype(KINDS[kind]).itemsize // 2}")
                .reshape(self.threads, 2)
            )
            for i, name in enumerate(vector(target)):
                self.put(name, halves[:, i], mask)
        elif source.startswith("{"):
            half = "b16" if kind == "b32" else "b32"
            parts = np.stack([self.get(name, half) for name in vector(source)], 1)
            self.put(target, parts.view(KINDS[kind]).reshape(-1), mask)
        else:
            self.put(target, self.get(source, kind), mask)
