"""PTX for ptx_interpreter.py: what a program says, its registers, and arithmetic on them,
[threads] at a time."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.emulation.ptx_memory import BASE

WORDS = {"pred": np.bool_, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64}
KINDS = {
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f16": np.float16,
    "f32": np.float32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "pred": np.bool_,
}
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float16).numpy()
SIMPLE: dict[str, Callable[..., np.ndarray]] = {
    "mov": lambda a: a,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rem": np.fmod,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "shl": np.left_shift,
    "shr": np.right_shift,
}


def bf16_to_f32(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)


def chosen_bits(x: list[np.ndarray], table: int) -> np.ndarray:
    """lop3: bit i of `table` is the result where the bits of the three operands spell i."""
    found = np.zeros_like(x[0])
    for i in range(8):
        if table >> i & 1:
            picked = [part if i >> 2 - place & 1 else ~part for place, part in enumerate(x)]
            found = found | (picked[0] & picked[1] & picked[2])
    return found


def vector(text: str) -> list[str]:
    return [x.strip() for x in text.strip("{} ").split(",")]


def with_own_labels(body: str) -> str:
    """Labels of innermost blocks, which inline assembly repeats, each under a name of its own."""
    numbers = itertools.count()

    def renamed(block: re.Match[str]) -> str:
        number = next(numbers)
        text = block.group()
        for label in re.findall(r"([A-Za-z]\w*):\s", text):
            text = re.sub(rf"\b{label}\b", f"{label}_{number}", text)
        return text

    return re.sub(r"\{[^{}]*\bbra\b[^{}]*\}", renamed, body)


class Program:
    """The one kernel of a PTX file."""

    def __init__(self, ptx: str):
        ptx = re.sub(r"//.*|^\s*\.(loc|file|section).*$", "", ptx, flags=re.MULTILINE)
        head, body = re.split(r"\.reqntid \d+\s*(?:\.maxnreg \d+\s*)?\{", ptx, maxsplit=1)
        self.threads = int(re.search(r"\.reqntid (\d+)", ptx).group(1))  # type: ignore[union-attr]
        limit = re.search(r"\.maxnreg (\d+)", ptx)
        self.registers = int(limit.group(1)) if limit else 0  # of each thread at the start
        self.parameters = {
            name: i for i, name in enumerate(re.findall(r"\.param .*?(\w+_param_\d+)", head))
        }
        self.kinds: dict[str, str] = {}
        self.words: dict[str, Any] = {}
        self.labels: dict[str, int] = {}
        self.tables: dict[str, list[str]] = {}  # where brx.idx may go
        self.instructions: list[tuple[str, str, list[str]]] = []
        body = with_own_labels(body.partition("$L__func_end")[0])
        body = re.sub(r"(?m)^\s*[{}]\s*$", "", body).replace("{\n", "\n")
        for line in re.split(r";|(?<=:)[ \t]*\n", body):
            self.read(" ".join(line.split()).strip())

    def kind(self, name: str) -> Any:
        if name not in self.words:
            self.words[name] = WORDS[self.kinds[re.sub(r"(%[a-z]+)\d+$", r"\1", name)]]
        return self.words[name]

    def read(self, line: str) -> None:
        if re.fullmatch(r"[\w$]+:", line):
            self.labels[line[:-1]] = len(self.instructions)
        elif ".branchtargets" in line:
            name, _, targets = line.partition(": .branchtargets")
            self.tables[name.strip()] = vector(targets)
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


class Registers:
    """One array a register. `active`: the threads that run now; others have their own values."""

    def __init__(self, code: Program, special: dict[str, Any]):
        self.code = code
        self.threads = code.threads
        self.special = special
        self.registers: dict[str, np.ndarray] = {}
        self.constants: dict[tuple[str, str], np.ndarray] = {}
        self.active = np.ones(code.threads, np.bool_)
        # registers that products under way write, and of which threads
        self.sums: dict[str, np.ndarray] = {}
        self.operands: dict[str, np.ndarray] = {}  # and those they read
        self.time = 0
        # when a register that products use was last read or written
        self.touched: dict[str, int] = {}

    def get(self, name: str, kind: str) -> np.ndarray:
        value = self.registers.get(name)
        if value is None:
            value = self.constants.get((name, kind))
            if value is None:
                value = self.constants[name, kind] = self.constant(name, KINDS[kind], kind)
            return value
        if name in self.touched:
            assert not (name in self.sums and (self.sums[name] & self.active).any()), (
                f"{name} is read while a product under way writes it"
            )
            self.touched[name] = self.time
        return value if value.dtype == KINDS[kind] else value.view(KINDS[kind])

    def constant(self, name: str, dtype: Any, kind: str) -> np.ndarray:
        if name in self.special:
            return np.broadcast_to(np.asarray(self.special[name]), self.threads).astype(dtype)
        if name == "global_smem":
            return np.full(self.threads, BASE, np.uint32).view(dtype)
        if name in self.code.parameters:
            return np.full(self.threads, self.code.parameters[name], np.uint64).view(dtype)
        if name.startswith("0f"):
            return np.full(self.threads, int(name[2:], 16), np.uint32).view(dtype)
        assert re.match(r"-?\d", name), f"{name} has no value"
        value = int(name.rstrip("U"), 0)
        size = np.dtype(dtype).itemsize
        if kind == "pred":
            return np.full(self.threads, bool(value))
        return np.full(self.threads, value % 256**size, f"u{size}").view(dtype)

    def put(self, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        if name == "_":
            return
        dtype = self.code.kind(name)
        value = np.ascontiguousarray(value)
        value = value.astype(np.bool_) if dtype is np.bool_ else value.view(dtype)
        if name in self.touched:
            for under_way in (self.sums, self.operands):
                assert not (name in under_way and (under_way[name] & mask).any()), (
                    f"{name} is written while a product under way uses it"
                )
            self.touched[name] = self.time
        old = self.registers.get(name)
        self.registers[name] = value if old is None or mask.all() else np.where(mask, value, old)

    def address(self, text: str) -> np.ndarray:
        base, _, offset = text.strip("[] ").replace(" ", "").partition("+")
        kind = "b64" if base.startswith("%rd") else "b32"
        return self.get(base, kind).astype(np.int64) + int(offset or 0)

    def convert(self, rest: list[str], text: list[str]) -> np.ndarray:
        form = ".".join(x for x in rest if x not in ("rn", "ftz", "rmi", "rzi"))
        x = text[1]
        if form == "f16x2.e4m3x2":
            pair = self.get(x, "b16").copy().view(np.uint8).reshape(-1, 2)
            return E4M3[pair].view(np.uint32).reshape(-1)
        if form in ("f16x2.f32", "bf16x2.f32"):
            parts = np.stack([self.get(text[2], "f32"), self.get(x, "f32")], 1)
            narrow = parts.astype(np.float16) if form[0] == "f" else f32_to_bf16(parts)
            return narrow.view(np.uint32).reshape(-1)
        if form == "satfinite.e4m3x2.f32":
            pair = torch.from_numpy(
                np.stack([self.get(text[2], "f32"), self.get(x, "f32")], 1)
            ).clamp(-448.0, 448.0)
            return (
                pair.to(torch.float8_e4m3fn).view(torch.uint8).numpy().view(np.uint16).reshape(-1)
            )
        if form == "bf16.f32":
            return f32_to_bf16(self.get(x, "f32"))
        if form == "f32.bf16":
            return bf16_to_f32(self.get(x, "b16"))
        if form == "f32.f32":
            return np.floor(self.get(x, "f32"))
        to, source = form.split(".")
        value = self.get(x, source)
        if len(value) > self.threads:  # of a wider register, its low part
            value = value.reshape(self.threads, -1)[:, 0]
        return value.astype(KINDS[to])

    def compute(self, head: str, rest: list[str], text: list[str]) -> np.ndarray:
        kind = rest[-1]
        if kind in ("bf16", "bf16x2"):
            values = [
                bf16_to_f32(self.get(x, "b16" if kind == "bf16" else "b32").view(np.uint16))
                for x in text
            ]
            if head == "fma":
                product = values[0].astype(np.float64) * values[1] + values[2]
                return f32_to_bf16(product.astype(np.float32))
            return f32_to_bf16(SIMPLE[head](*values))
        if head == "lop3":
            return chosen_bits([self.get(name, "b32") for name in text[:3]], int(text[3], 0))
        if head == "prmt":
            # a place that another prmt fills afterwards
            nothing = [x.startswith("%") and x not in self.registers for x in text]
            a, b, how = (
                np.zeros(self.threads, np.uint32) if empty else self.get(x, "u32")
                for x, empty in zip(text, nothing, strict=True)
            )
            data = np.stack([a, b], 1).view(np.uint8).reshape(-1, 8)
            return (
                np.stack([data[np.arange(self.threads), how >> 4 * i & 7] for i in range(4)], 1)
                .view(np.uint32)
                .reshape(-1)
            )
        if head == "mad" or (head == "mul" and "wide" in rest):
            a = self.get(text[0], kind)
            b = self.get(text[1], kind)
            if "wide" in rest:
                kind = f"{kind[0]}{2 * int(kind[1:])}"
                a = a.astype(KINDS[kind])
                b = b.astype(KINDS[kind])
            return a * b + (self.get(text[2], kind) if head == "mad" else 0)
        if head == "mul" and "hi" in rest and kind == "u64":
            a, b = (self.get(name, kind).astype(object) for name in text[:2])
            return (a * b >> 64).astype(np.uint64)
        if head == "mul" and "hi" in rest:
            product = self.get(text[0], kind).astype(np.int64) * self.get(text[1], kind).astype(
                np.int64
            )
            assert kind in ("s32", "u32"), kind
            return (product.view(KINDS[kind[0] + "64"]) >> 32).astype(KINDS[kind])
        assert "hi" not in rest, (head, rest)
        x = [
            self.get(name, "u32" if head in ("bfe", "shl", "shr") and i else kind)
            for i, name in enumerate(text)
        ]
        if head in ("shl", "shr"):
            x[1] = x[1].astype(KINDS[kind])
        if head == "bfe":
            field = x[0].astype(np.int64) >> x[1] & (1 << x[2].astype(np.int64)) - 1
            if kind[0] == "s":
                field -= np.where(field >> x[2] - 1 & 1, 1 << x[2].astype(np.int64), 0)
            return field.astype(KINDS[kind])
        if head == "fma":
            return (x[0].astype(np.float64) * x[1] + x[2]).astype(np.float32)
        if "relu" in rest:
            return np.maximum(SIMPLE[head](*x), 0).astype(KINDS[kind])
        with np.errstate(all="ignore"):  # lanes that are switched off hold anything
            if head == "div" and kind[0] == "s":
                return np.trunc(x[0] / x[1]).astype(KINDS[kind])
            return SIMPLE[head](*x)
