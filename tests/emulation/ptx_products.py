"""Products of tensor cores for ptx_interpreter.py, and the loads and stores of matrices in
registers.

Beside shared memory (ptx_memory.py), these fail: a register read or written while a product under
way writes it, or written while one reads it; a product of registers used since the last
wgmma.fence.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property

import numpy as np

from tests.emulation.ptx_clocks import PRODUCTS
from tests.emulation.ptx_memory import SharedMemory
from tests.emulation.ptx_registers import E4M3, Program, Registers, bf16_to_f32, vector

LANE = np.arange(128)
# of a thread's first sums in a product's 64 rows
ROW = LANE // 32 * 16 + LANE % 32 // 4
PAIR = LANE % 4 * 2
WIDEN: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # bytes [rows, 32] of an operand
    "bf16": lambda x: bf16_to_f32(x.view(np.uint16)),
    "f16": lambda x: x.view(np.float16).astype(np.float32),
    "e4m3": lambda x: E4M3[x].astype(np.float32),
    "s8": lambda x: x.view(np.int8).astype(np.int32),
}


class Products(Registers):
    shared: SharedMemory

    def __init__(self, code: Program, special: dict):  # type: ignore[type-arg]
        super().__init__(code, special)
        self.products = 0
        for _, op, text in code.instructions:
            if op.startswith("wgmma.mma_async"):
                self.touched |= dict.fromkeys(
                    vector(text[0]) + (vector(text[1]) if text[1].startswith("{") else []), 0
                )
        # when each warp's registers were made known to products
        self.fenced = np.full(self.threads // 32, -1)
        # the last is open
        self.groups: list[list[tuple[set[str], set[str]]]] = [
            [(set(), set())] for _ in range(-(-self.threads // 128))
        ]

    @cached_property
    def lanes(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each thread: its lane, and the first of its warp."""
        return np.arange(self.threads) % 32, np.arange(self.threads) // 32 * 32

    def whole_warps(self, mask: np.ndarray) -> None:
        warps = mask.reshape(-1, 32)
        assert (warps.all(1) == warps.any(1)).all(), "lanes of a warp are missing"

    def warpgroups(self, mask: np.ndarray) -> np.ndarray:
        groups = mask.reshape(-1, 128)
        assert (groups.all(1) == groups.any(1)).all(), "warps of a group are missing"
        return np.flatnonzero(groups.any(1))

    def wgmma(self, op: str, text: list[str], mask: np.ndarray) -> None:
        # type: ignore[union-attr]
        columns = int(re.search(r"m64n(\d+)k", op).group(1))
        kind = op.rsplit(".", 1)[1]
        sums = vector(text[0])
        left = text[1]
        right = text[2]
        add = text[3]
        assert kind == "s8" or text[4:6] == ["1", "1"], "factors of operands"
        flags = text[6:] or ["0"]
        operands = vector(left) if left.startswith("{") else []
        for group in self.warpgroups(mask):
            own = slice(128 * group, 128 * group + 128)
            warps = self.shared.row[128 * group] + np.arange(4)
            known = self.fenced[4 * group : 4 * group + 4].min()
            assert all(self.touched[x] <= known for x in sums + operands), (
                "no wgmma.fence after registers were used"
            )
            if operands:
                each = 2 if kind in ("bf16", "f16") else 4  # columns in a register
                words = (
                    np.stack([self.operand(x)[own] for x in operands], 1)
                    .view(np.uint16 if each == 2 else np.uint8)
                    .reshape(128, -1, each)
                )
                a = np.zeros((64, 8 * each), words.dtype)
                for i in range(len(operands)):
                    for e in range(each):
                        column = LANE % 4 * each + i // 2 * 4 * each + e
                        a[ROW + i % 2 * 8, column] = words[:, i, e]
                bytes_of_a = a.view(np.uint8)
            else:
                bytes_of_a = self.shared.matrix(self.one(left, own), 64, flags[0] == "1", warps)
            b = self.shared.matrix(self.one(right, own), columns, flags[-1] == "1", warps)
            product = WIDEN[kind](bytes_of_a) @ WIDEN[kind](b).T
            keep = self.get(add, "pred")[own][0] if add.startswith("%") else int(add)
            self._accumulate(sums, product, own, bool(keep))
            open_group = self.groups[group][-1]
            open_group[0].update(sums)
            open_group[1].update(operands)
            self._mark(group)
        self.products += 1

    def _accumulate(self, sums: list[str], product: np.ndarray, own: slice, keep: bool) -> None:
        i = np.arange(len(sums))[:, None]
        values = product[ROW + i // 2 % 2 * 8, i // 4 * 8 + PAIR + i % 2]
        for name, value in zip(sums, values, strict=True):
            before = self.registers.setdefault(
                name, np.full(self.threads, 0x7FC00000, np.uint32)
            ).view(product.dtype)
            after = before.copy()
            after[own] = value + before[own] if keep else value
            self.registers[name] = after.view(np.uint32)

    def _mark(self, group: int) -> None:
        """Which registers products under way use, of the threads of one group."""
        own = np.arange(self.threads) // 128 == group
        for i, marks in enumerate((self.sums, self.operands)):
            used = set().union(*(g[i] for g in self.groups[group]))
            for name in [n for n, threads in marks.items() if n not in used and threads[own].any()]:
                marks[name] = marks[name] & ~own
                if not marks[name].any():
                    del marks[name]
            for name in used:
                marks[name] = marks.get(name, False) | own

    def operand(self, name: str) -> np.ndarray:
        assert not (name in self.sums and (self.sums[name] & self.active).any()), (
            f"{name} is multiplied while a product under way writes it"
        )
        return self.registers[name].view(np.uint32)

    def one(self, name: str, own: slice) -> int:
        value = self.get(name, "b64")[own]
        assert (value == value[0]).all(), "threads disagree on a descriptor"
        return int(value[0])

    def wgmma_fence(self, mask: np.ndarray) -> None:
        self.fenced[mask.reshape(-1, 32).any(1)] = self.time

    def wgmma_commit(self, mask: np.ndarray) -> None:
        self.shared.commit(PRODUCTS, mask)
        for group in self.warpgroups(mask):
            self.groups[group].append((set(), set()))

    def wgmma_wait(self, left: int, mask: np.ndarray) -> None:
        self.shared.wait(PRODUCTS, left, mask)
        for group in self.warpgroups(mask):
            self.groups[group] = self.groups[group][max(len(self.groups[group]) - 1 - left, 0) :]
            self._mark(group)

    def mma(self, op: str, text: list[str], mask: np.ndarray) -> None:
        """mma.sync.m16n8k16 of 16-bit operands or .m16n8k32 of 8-bit ones, with sums of fp32 or
        int32, of one warp and at once."""
        kind = op.split(".")[-2]
        each = 2 if kind in ("bf16", "f16") else 4  # columns in a register
        total = "s32" if kind == "s8" else "f32"
        shape = f"m16n8k{8 * each}.row.col."
        assert shape + total in op.replace("satfinite.", ""), op
        self.whole_warps(mask)
        lane, _ = self.lanes
        group, pair = lane % 32 // 4, lane % 4 * 2
        warp = np.arange(self.threads) // 32

        def matrix(names: list[str], rows: int, places: list[tuple[int, int]]):  # type: ignore[no-untyped-def]
            number = np.uint16 if each == 2 else np.uint8
            made = np.zeros((self.threads // 32, rows, 8 * each), number)
            for name, (down, right) in zip(names, places, strict=True):
                words = self.operand(name).view(number).reshape(-1, each)
                for e in range(each):
                    made[warp, group + down, lane % 4 * each + right * each + e] = words[:, e]
            return WIDEN[kind](made.view(np.uint8)).reshape(made.shape)

        a = matrix(vector(text[1]), 16, [(0, 0), (8, 0), (0, 4), (8, 4)])
        b = matrix(vector(text[2]), 8, [(0, 0), (0, 4)])
        product = a @ b.transpose(0, 2, 1)
        for i, (name, before) in enumerate(zip(vector(text[0]), vector(text[3]), strict=True)):
            value = product[warp, group + i // 2 * 8, pair + i % 2] + self.get(before, total)
            self.put(name, value.astype(product.dtype), mask)
        self.products += 1

    # ---- matrices in registers

    def ldmatrix(
        self, names: list[str], address: np.ndarray, transposed: bool, mask: np.ndarray
    ) -> None:
        self.whole_warps(mask)
        lane, warp = self.lanes
        rows = self.shared.load(address, 16, mask).view(np.uint16)
        for i, name in enumerate(names):
            words = [
                rows[warp + 8 * i + lane % 4 * 2 + e, lane // 4]
                if transposed
                else rows[warp + 8 * i + lane // 4, lane % 4 * 2 + e]
                for e in range(2)
            ]
            self.put(name, np.stack(words, 1).view(np.uint32).reshape(-1), mask)

    def stmatrix(
        self, names: list[str], address: np.ndarray, transposed: bool, mask: np.ndarray
    ) -> None:
        self.whole_warps(mask)
        lane, warp = self.lanes
        for i, name in enumerate(names):
            words = self.get(name, "b32").copy().view(np.uint16).reshape(-1, 2)
            own = lane % 8  # the row of matrix i, or its column
            places = [(c, own) if transposed else (own, c) for c in range(8)]
            rows = np.stack(
                [words[warp + row * 4 + column // 2, column % 2] for row, column in places], 1
            )
            here = mask & (lane // 8 == i)
            self.shared.store(
                np.where(here, address, 0), rows.view(np.uint8).reshape(self.threads, 16), here
            )
