"""Executes PTX that Triton made for Hopper, without a card: what layouts, swizzles, descriptors and assembler really do to data.

One block of threads in lockstep on numpy arrays, [threads] a register. What is asynchronous is done at once, and ptx_memory.py says whether
it was awaited. Branches must be the same for all threads; addresses outside the given tensors and the shared memory fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.ops.ptx_memory import BASE, SharedMemory, TensorMap

WORDS = {"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
KINDS = {
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "pred": np.bool_,
}  # fmt: skip
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float16).numpy()


def bf16_to_f32(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)


class Block:
    """One block of a grid. arguments: by the kernel's parameters in order: ints, floats, tensors (their address), TensorMaps."""

    def __init__(self, code: Program, arguments: list[Any], program: tuple[int, int], grid: tuple[int, int], shared: int):
        self.code, self.arguments, self.threads = code, arguments, code.threads
        self.shared = SharedMemory(shared)
        self.special = {"%tid.x": np.arange(self.threads), "%ctaid.x": program[0], "%ctaid.y": program[1]}
        self.special |= {"%nctaid.x": grid[0], "%nctaid.y": grid[1]}
        self.memory = [x for x in arguments if isinstance(x, Tensor)]
        self.registers: dict[str, np.ndarray] = {}
        self.products = 0

    # ---- operands

    def get(self, name: str, kind: str) -> np.ndarray:
        dtype: Any = KINDS[kind]
        if name in self.special:
            return np.broadcast_to(np.asarray(self.special[name]), self.threads).astype(dtype)
        if name == "global_smem":
            return np.full(self.threads, BASE, np.uint32).view(dtype)
        if name in self.code.parameters:
            return np.full(self.threads, self.code.parameters[name], np.uint64).view(dtype)
        if name.startswith("0f"):
            return np.full(self.threads, int(name[2:], 16), np.uint32).view(dtype)
        if re.match(r"-?\d", name):
            value = int(name, 0)
            return np.full(self.threads, bool(value)) if kind == "pred" else np.full(self.threads, value % 2 ** (8 * np.dtype(dtype).itemsize)
                                                                                     ).astype(f"u{np.dtype(dtype).itemsize}").view(dtype)  # fmt: skip
        value = self.registers[name]
        return value if value.dtype == dtype else value.view(dtype)

    def put(self, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        if name == "_":
            return
        dtype = WORDS[self.code.kinds[re.sub(r"(%[a-z]+)\d+$", r"\1", name)]]
        value = np.ascontiguousarray(value)
        value = value.astype(np.bool_) if dtype is np.bool_ else value.view(dtype)
        old = self.registers.get(name)
        self.registers[name] = value if old is None or mask.all() else np.where(mask, value, old)

    def address(self, text: str) -> np.ndarray:
        base, _, offset = text.strip("[] ").replace(" ", "").partition("+")
        kind = "b64" if base.startswith("%rd") else "b32"
        return self.get(base, kind).astype(np.int64) + int(offset or 0)

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
            word = np.full(self.threads, np.float32(value)) if isinstance(value, float) else np.full(self.threads, value, KINDS["s" + kind[1:]])
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

    def convert(self, rest: list[str], text: list[str]) -> np.ndarray:
        form = ".".join(x for x in rest if x not in ("rn", "ftz", "rmi", "rzi"))
        x = text[1]
        if form == "f16x2.e4m3x2":
            pair = self.get(x, "b16").copy().view(np.uint8).reshape(-1, 2)
            return E4M3[pair].view(np.uint32).reshape(-1)
        if form == "f16x2.f32":
            parts = np.stack([self.get(text[2], "f32"), self.get(x, "f32")], 1).astype(np.float16)
            return parts.view(np.uint32).reshape(-1)
        if form == "bf16.f32":
            return f32_to_bf16(self.get(x, "f32"))
        if form == "f32.bf16":
            return bf16_to_f32(self.get(x, "b16"))
        if form == "f32.f32":
            return np.floor(self.get(x, "f32"))
        to, source = form.split(".")
        return self.get(x, source).astype(KINDS[to])

    def compute(self, head: str, rest: list[str], text: list[str]) -> np.ndarray:
        kind = rest[-1]
        if kind == "bf16":
            values = [bf16_to_f32(self.get(x, "b16")) for x in text]
            return f32_to_bf16(np.abs(values[0]) if head == "abs" else np.maximum(*values))
        if head == "prmt":
            a, b, how = (self.get(x, "u32") for x in text)
            data = np.stack([a, b], 1).view(np.uint8).reshape(-1, 8)
            return np.stack([data[np.arange(self.threads), how >> 4 * i & 7] for i in range(4)], 1).view(np.uint32).reshape(-1)
        if head == "mad" or (head == "mul" and "wide" in rest):
            wide = "wide" in rest
            a, b = self.get(text[0], kind), self.get(text[1], kind)
            if wide:
                a, b = a.astype(f"{kind[0].replace('s', 'i')}8"), b.astype(f"{kind[0].replace('s', 'i')}8")
            return a * b + (self.get(text[2], kind[0] + "64" if wide else kind) if head == "mad" else 0)
        if head == "mul" and "hi" in rest:
            product = self.get(text[0], kind).astype(np.int64) * self.get(text[1], kind).astype(np.int64)
            assert kind in ("s32", "u32"), kind
            return (product.view(KINDS[kind[0] + "64"]) >> 32).astype(KINDS[kind])
        if head in ("shl", "shr"):
            return getattr(np, {"shl": "left_shift", "shr": "right_shift"}[head])(self.get(text[0], kind),
                                                                                   self.get(text[1], "u32").astype(KINDS[kind]))  # fmt: skip
        assert "hi" not in rest, (head, rest)
        x = [self.get(name, "u32" if head == "bfe" and i else kind) for i, name in enumerate(text)]
        if head == "bfe":
            field = x[0].astype(np.int64) >> x[1] & (1 << x[2].astype(np.int64)) - 1
            if kind[0] == "s":
                field -= np.where(field >> x[2] - 1 & 1, 1 << x[2].astype(np.int64), 0)
            return field.astype(KINDS[kind])
        if head == "fma":
            return (x[0].astype(np.float64) * x[1] + x[2]).astype(np.float32)
        if head == "div" and kind[0] == "s":
            return np.trunc(x[0] / x[1]).astype(KINDS[kind])
        simple: dict[str, Callable[..., np.ndarray]] = {
            "mov": lambda a: a, "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "rem": np.fmod, "neg": np.negative,
            "abs": np.abs, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
            "not": np.invert, "ex2": np.exp2, "lg2": np.log2,
        }  # fmt: skip
        with np.errstate(all="ignore"):
            return simple[head](*x)


def vector(text: str) -> list[str]:
    return [x.strip() for x in text.strip("{} ").split(",")]


class Program:
    """The one kernel of a PTX file."""

    def __init__(self, ptx: str):
        ptx = re.sub(r"//.*|^\s*\.(loc|file|section).*$", "", ptx, flags=re.MULTILINE)
        head, body = re.split(r"\.reqntid \d+\s*(?:\.maxnreg \d+\s*)?\{", ptx, maxsplit=1)
        self.threads = int(re.search(r"\.reqntid (\d+)", ptx).group(1))  # type: ignore[union-attr]
        self.parameters = {name: i for i, name in enumerate(re.findall(r"\.param .*?(\w+_param_\d+)", head))}
        self.kinds: dict[str, str] = {}
        self.labels: dict[str, int] = {}
        self.instructions: list[tuple[str, str, list[str]]] = []
        body = re.sub(r"(?m)^\s*[{}]\s*$", "", body[: body.rindex("ret;") + 4]).replace("{\n", "\n")
        for line in re.split(r";|(?<=:)[ \t]*\n", body):
            self.read(" ".join(line.split()).strip())

    def read(self, line: str) -> None:
        if re.fullmatch(r"[\w$]+:", line):
            self.labels[line[:-1]] = len(self.instructions)
        elif line.lstrip("} ").startswith(".reg"):
            _, kind, names = line.lstrip("} ").split(" ", 2)
            for name in names.split(","):
                self.kinds[re.sub(r"<\d+>$", "", name.strip())] = kind[1:]
        elif match := re.fullmatch(r"}?\s*(@!?[%\w]+)?\s*([a-z][\w.:]*)\s*(.*)", line):
            guard, op, rest = match.groups()
            operands = [x.strip() for x in re.findall(r"(?:\[[^\]]*\]|{[^}]*}|[^,])+", rest)]
            self.instructions.append((guard or "", op, operands))
        else:
            assert not line.strip("{} ") or line.startswith("."), line
