"""Executes PTX that Triton made for Hopper, without a card: what layouts, swizzles, descriptors and assembler really do to data.

One block of threads in lockstep on numpy arrays. What is asynchronous is done at once, and ptx_memory.py says whether it was awaited.
Branches must be the same for all threads; addresses outside the given tensors and the shared memory fail.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.ops.ptx_memory import SharedMemory, TensorMap
from tests.ops.ptx_registers import KINDS, Program, Registers, bf16_to_f32, vector


class Block(Registers):
    """One block of a grid. arguments: by the kernel's parameters in order: ints, floats, tensors (their address), TensorMaps."""

    def __init__(self, code: Program, arguments: list[Any], program: tuple[int, int], grid: tuple[int, int], shared: int):
        special = {"%tid.x": np.arange(code.threads), "%ctaid.x": program[0], "%ctaid.y": program[1]}
        super().__init__(code, special | {"%nctaid.x": grid[0], "%nctaid.y": grid[1]})
        self.arguments, self.shared = arguments, SharedMemory(shared)
        self.memory = [x for x in arguments if isinstance(x, Tensor)]
        self.products = 0

    # ---- memory

    def _pieces(self, address: np.ndarray, size: int, mask: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(bytes, threads, indices [threads, size]) of each tensor that is met."""
        found, left = [], mask.copy()
        for tensor in self.memory:
            storage = tensor.untyped_storage()
            inside = left & (address >= storage.data_ptr()) & (address + size <= storage.data_ptr() + storage.nbytes())
            if inside.any():
                data = torch.tensor([], dtype=torch.uint8).set_(storage).numpy()  # type: ignore[call-overload]
                found.append((data, inside, (address[inside] - storage.data_ptr())[:, None] + np.arange(size)))
                left &= ~inside
        assert not left.any(), f"global memory at {address[left][:4]}, {size} bytes"
        assert not (address[mask] % size).any(), "an address that is not aligned"
        return found

    def load(self, space: str, address: np.ndarray, size: int, mask: np.ndarray) -> np.ndarray:
        if space == "shared":
            return self.shared.load(address, size, mask)
        out = np.zeros((self.threads, size), np.uint8)
        for data, inside, cells in self._pieces(address, size, mask):
            out[inside] = data[cells]
        return out

    def store(self, space: str, address: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        if space == "shared":
            self.shared.store(address, value, mask)
            return
        for data, inside, cells in self._pieces(address, value.shape[1], mask):
            data[cells] = value[inside]

    # ---- matrices

    def wgmma(self, op: str, text: list[str]) -> None:
        columns = int(re.search(r"m64n(\d+)k16", op).group(1))  # type: ignore[union-attr]
        sums, left, right, add = vector(text[0]), text[1], text[2], text[3]
        flags = text[6:]
        widen: Callable[[np.ndarray], np.ndarray]
        widen = bf16_to_f32 if op.endswith("bf16") else lambda x: x.view(np.float16).astype(np.float32)
        for group in range(self.threads // 128):
            own = slice(128 * group, 128 * group + 128)
            lane = np.arange(128)
            row, pair = lane // 32 * 16 + lane % 32 // 4, lane % 4 * 2
            a = np.zeros((64, 16), np.uint16)
            if left.startswith("{"):
                for i, name in enumerate(vector(left)):
                    words = self.get(name, "b32")[own].copy().view(np.uint16).reshape(128, 2)
                    for e in range(2):
                        a[row + i % 2 * 8, pair + i // 2 * 8 + e] = words[:, e]
            else:
                a = self.shared.matrix(self.one(left, own), 64, flags[0] == "1")
            b = self.shared.matrix(self.one(right, own), columns, flags[-1] == "1")
            product = widen(a) @ widen(b).T
            keep = self.get(add, "pred")[own][0] if add.startswith("%") else int(add)
            for i, name in enumerate(sums):
                value = product[row + i // 2 % 2 * 8, i // 4 * 8 + pair + i % 2]
                if name not in self.registers:
                    self.registers[name] = np.zeros(self.threads, np.uint32)
                before = self.registers[name].view(np.float32)
                after = before.copy()
                after[own] = value + before[own] if keep else value
                self.registers[name] = after.view(np.uint32)
        self.products += 1

    def one(self, name: str, own: slice) -> int:
        value = self.get(name, "b64")[own]
        assert (value == value[0]).all(), "threads disagree on a descriptor"
        return int(value[0])

    def ldmatrix(self, names: list[str], address: np.ndarray, transposed: bool, mask: np.ndarray) -> None:
        assert mask.all()
        lane, warp = np.arange(self.threads) % 32, np.arange(self.threads) // 32 * 32
        rows = self.load("shared", address, 16, mask).view(np.uint16)
        for i, name in enumerate(names):
            words = [rows[warp + 8 * i + lane % 4 * 2 + e, lane // 4] if transposed else rows[warp + 8 * i + lane // 4, lane % 4 * 2 + e]
                     for e in range(2)]  # fmt: skip
            self.put(name, np.stack(words, 1).view(np.uint32).reshape(-1), mask)

    def stmatrix(self, names: list[str], address: np.ndarray, mask: np.ndarray) -> None:
        lane, warp = np.arange(self.threads) % 32, np.arange(self.threads) // 32 * 32
        for i, name in enumerate(names):
            words = self.get(name, "b32").copy().view(np.uint16).reshape(-1, 2)
            rows = np.stack([words[warp + lane % 8 * 4 + c // 2, c % 2] for c in range(8)], 1)  # row `lane % 8` of matrix i
            self.store("shared", address, rows.view(np.uint8).reshape(self.threads, 16), mask & (lane // 8 == i))

    def bulk_copy(self, text: list[str], mask: np.ndarray) -> None:
        target, barrier = self.address(text[0]), self.address(text[2])
        name, _, place = text[1].strip("[]").partition(",")
        x, y = (self.get(i, "s32") for i in vector(place))
        for t in np.flatnonzero(mask):
            source: TensorMap = self.arguments[int(self.get(name.strip(), "b64")[t])]
            self.shared.copy(source, int(y[t]), int(x[t]), int(target[t]), int(barrier[t]), t // 32)

    # ---- instructions

    def run(self, limit: int = 2_000_000) -> None:
        at = 0
        for _ in range(limit):
            guard, op, text = self.code.instructions[at]
            mask = np.ones(self.threads, np.bool_)
            if guard:
                mask = self.get(guard.lstrip("@!"), "pred") ^ guard.startswith("@!")
            at += 1
            if op.startswith("bra"):
                assert mask.all() or not mask.any(), "threads part"
                at = self.code.labels[text[0]] if mask.any() else at
            elif op.startswith("ret"):
                return
            elif mask.any():
                self.execute(op, text, mask)
        raise AssertionError("the program does not end")

    def execute(self, op: str, text: list[str], mask: np.ndarray) -> None:
        head, *rest = op.split(".")
        kind = rest[-1] if rest else ""
        if op.startswith("wgmma.mma_async"):
            self.wgmma(op, text)
        elif op.startswith(("wgmma.commit", "fence.proxy.async", "bar.sync")):
            {"wgmma": self.shared.commit, "fence": self.shared.fence, "bar": self.shared.barrier}[head]()
        elif op.startswith("wgmma.wait"):
            self.shared.wait(int(text[0]))
        elif op.startswith(("wgmma.fence", "griddepcontrol")):
            pass
        elif op.startswith("cp.async.bulk.tensor.2d"):
            self.bulk_copy(text, mask)
        elif head == "mbarrier":
            self.barrier(rest[0], text, mask)
        elif head == "ldmatrix":
            self.ldmatrix(vector(text[0]), self.address(text[1]), "trans" in rest, mask)
        elif head == "stmatrix":
            self.stmatrix(vector(text[1]), self.address(text[0]), mask)
        elif head in ("ld", "st"):
            self.move(head, rest, text, mask)
        elif head == "shfl":
            lane, name = np.arange(self.threads), text[0].partition("|")[0]
            other = self.get(text[2], "s32")
            source = lane ^ other if rest[1] == "bfly" else lane // 32 * 32 + other
            self.put(name, self.get(text[1], "b32")[source], mask)
        elif head == "elect":
            self.put(text[0].partition("|")[2], np.arange(self.threads) % 32 == 0, mask)
        elif head == "cvta" or (head == "mov" and "{" in "".join(text)):
            self.unpack(text, kind, mask)
        elif head == "setp":
            compare: dict[str, Any] = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                                       "ge": np.greater_equal}  # fmt: skip
            self.put(text[0], compare[rest[0]](*(self.get(x, kind) for x in text[1:3])), mask)
        elif head == "selp":
            a, b, p = self.get(text[1], kind), self.get(text[2], kind), self.get(text[3], "pred")
            self.put(text[0], np.where(p, a, b), mask)
        elif head == "cvt":
            self.put(text[0], self.convert(rest, text), mask)
        else:
            self.put(text[0], self.compute(head, rest, text[1:]), mask)

    def barrier(self, what: str, text: list[str], mask: np.ndarray) -> None:
        if what == "init":
            self.shared.phases[int(self.address(text[0])[mask][0])] = [0, 0]
        elif what == "arrive":
            self.shared.arrive(int(self.address(text[1])[mask][0]), int(text[2]))
        else:
            done = self.shared.arrived(int(self.address(text[1])[0]))
            self.put(text[0], (self.get(text[2], "u32") & 1) != done % 2, mask)
            assert self.registers[text[0]].all(), "a wait for a fill that nobody started"

    def move(self, head: str, rest: list[str], text: list[str], mask: np.ndarray) -> None:
        space, kind = rest[0].partition("::")[0], rest[-1]
        if space == "param":
            value = self.arguments[self.code.parameters[text[1].strip("[]")]]
            value = value.data_ptr() if isinstance(value, Tensor) else value
            word = (
                np.full(self.threads, np.float32(value))
                if isinstance(value, float)
                else np.full(self.threads, value, KINDS["s" + kind[1:]])
            )
            self.put(text[0], word, mask)
            return
        size = np.dtype(KINDS[kind]).itemsize
        where, names = (text[1], vector(text[0])) if head == "ld" else (text[0], vector(text[1]))
        if head == "ld":
            data = self.load(space, self.address(where), size * len(names), mask)
            for name, value in zip(names, data.view(KINDS[kind]).T, strict=True):
                self.put(name, value, mask)
        else:
            values = np.stack([self.get(name, kind) for name in names], 1)
            self.store(space, self.address(where), values.view(np.uint8).reshape(self.threads, -1), mask)

    def unpack(self, text: list[str], kind: str, mask: np.ndarray) -> None:
        target, source = text
        if target.startswith("{"):
            halves = self.get(source, kind).copy().view(f"u{np.dtype(KINDS[kind]).itemsize // 2}").reshape(self.threads, 2)
            for i, name in enumerate(vector(target)):
                self.put(name, halves[:, i], mask)
        elif source.startswith("{"):
            half = "b16" if kind == "b32" else "b32"
            parts = np.stack([self.get(name, half) for name in vector(source)], 1)
            self.put(target, parts.view(KINDS[kind]).reshape(-1), mask)
        else:
            self.put(target, self.get(source, kind), mask)


def run(ptx: str, shared: int, grid: tuple[int, int], arguments: list[Any]) -> int:
    """Every program of `grid`, one after the other. arguments: what the kernel takes at run time; a TensorMap stands for a descriptor with
    its shape and strides. Returns how many products (of one warpgroup's instructions) there were."""
    code, given = Program(ptx), [part for x in arguments for part in ([x, 0, 0, 0, 0] if isinstance(x, TensorMap) else [x])]
    given += [0, 0]  # scratch memory and a profile's, which are not used
    assert len(given) == len(code.parameters), (len(given), code.parameters)
    products = 0
    for x, y in itertools.product(range(grid[0]), range(grid[1])):
        block = Block(code, given, (x, y), grid, shared)
        block.run()
        products += block.products
    return products
