"""Quantization of a checkpoint's matrices. No torch.

A WeightScheme describes one matrix; a QuantConfig maps modules to schemes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from rorqual.errors import ConfigError

BITS = {"fp8": 8, "int8": 8, "int4": 4}
GROUPS = (128, 64, 32)  # group sizes (columns that share a scale) of published checkpoints


@dataclass(frozen=True)
class WeightScheme:
    """The format of one matrix [rows, columns].

    kind: wide (unquantized, the model's dtype), fp8 (e4m3), int8 or int4. block: rows x columns
    that share a scale; 0 columns: a whole row. symmetric: no zero points. activation: what the
    product's input is rounded to, one of ACTIVATIONS. layout: how the file names and packs its
    tensors (layers/weight_format); "wide" with another kind: quantized while loading.
    """

    kind: str = "wide"
    block: tuple[int, int] = (1, 0)
    symmetric: bool = True
    activation: str = "wide"
    layout: str = "wide"
    ordered: bool = False  # each column has a group index (GPTQ's desc_act)

    @property
    def is_wide(self) -> bool:
        return self.kind == "wide"

    @property
    def rounds_while_reading(self) -> bool:
        return not self.is_wide and self.layout == "wide"

    @property
    def bits(self) -> int:
        """Bits of a quantized element."""
        return BITS[self.kind]

    @property
    def column_unit(self) -> int:
        """Columns can be split between ranks at multiples of this."""
        return self.block[1] or (2 if self.kind == "int4" else 1)

    def fitted(self, columns: int) -> WeightScheme:
        """The scheme for a matrix with `columns` columns: one scale per row if they are fewer than
        a group; if they are no multiple of it, the next smaller group size that divides them."""
        rows, group = self.block
        if rows > 1 or not group or columns % group == 0:
            return self
        smaller = [size for size in (64, 32, 16, 8) if size < group and columns % size == 0]
        whole = columns < group or not smaller
        return replace(self, block=(1, 0 if whole else smaller[0]))

    def groups(self, columns: int) -> int:
        """Scales along a row."""
        return -(-columns // self.block[1]) if self.block[1] else 1

    def describe(self) -> str:
        """For `rorqual info`: int4 weights in groups of 128."""
        if self.is_wide:
            return "wide"
        rows, columns = self.block
        places = (
            f"blocks of {rows}x{columns}"
            if rows > 1
            else f"groups of {columns}"
            if columns
            else "a scale a row"
        )
        zero = "" if self.symmetric else ", zero points"
        return f"{self.kind} in {places}{zero}" if columns else f"{self.kind}, {places}{zero}"


# Quantization of a product's input. A scale covers a token or 128 columns of it. ue8m0: scales
# are powers of two.
ACTIVATIONS = ("wide", "fp8_group", "fp8_group_ue8m0", "fp8_token", "int8_group", "int8_token")
WIDE = WeightScheme()
FP8_BLOCK = WeightScheme("fp8", (128, 128), activation="fp8_group", layout="scale_inv")


def is_named(names: frozenset[str], module: str) -> bool:
    """Whether one of the names is the module, a parent of it, or a first, middle or last part of
    its path."""
    parts = module.split(".") if names else []
    return any(
        ".".join(parts[start:stop]) in names
        for start in range(len(parts))
        for stop in range(start + 1, len(parts) + 1)
    )


@dataclass(frozen=True)
class ModuleList:
    """Modules by name, or by `re:` and a regular expression that matches the start of the name."""

    names: tuple[str, ...] = ()

    @cached_property
    def _plain(self) -> frozenset[str]:
        return frozenset(name for name in self.names if not name.startswith("re:"))

    @cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        return [re.compile(name[3:]) for name in self.names if name.startswith("re:")]

    def __contains__(self, module: str) -> bool:
        return is_named(self._plain, module) or any(
            pattern.match(module) for pattern in self._patterns
        )


@dataclass(frozen=True)
class QuantConfig:
    """`scheme` applies to every linear layer not in `ignored`, unless one of `rules` names it:
    (modules, scheme), the first match. scheme None: only modules in rules are quantized. head: the
    scheme of the output head, which is unquantized without it, regardless of the others."""

    scheme: WeightScheme | None = FP8_BLOCK
    ignored: tuple[str, ...] = ()
    rules: tuple[tuple[tuple[str, ...], WeightScheme], ...] = ()
    head: WeightScheme | None = None

    @cached_property
    def _ignored(self) -> ModuleList:
        return ModuleList(self.ignored)

    @cached_property
    def _rules(self) -> list[tuple[ModuleList, WeightScheme]]:
        return [(ModuleList(names), scheme) for names, scheme in self.rules]

    def covers(self, module: str) -> bool:
        return not self.of(module).is_wide

    def of(self, module: str, columns: int = 0) -> WeightScheme:
        """The scheme of a module's matrix with `columns` columns."""
        if module in self._ignored:
            return WIDE
        found = next((scheme for names, scheme in self._rules if module in names), self.scheme)
        if found is None:
            return WIDE
        return found.fitted(columns) if columns and found.rounds_while_reading else found

    @property
    def schemes(self) -> tuple[WeightScheme, ...]:
        """All schemes that a matrix may have."""
        own = [scheme for scheme in (self.scheme, self.head) if scheme is not None]
        return tuple(dict.fromkeys([*own[:1], *(scheme for _, scheme in self.rules), *own[1:]]))

    @property
    def of_head(self) -> QuantConfig | None:
        """The configuration of the output head alone; None if it is unquantized."""
        return None if self.head is None else QuantConfig(self.head)

    @property
    def fp8_rows(self) -> str | None:
        """The activation of the first scheme whose products take e4m3 input with a scale for each
        128 columns; None without one."""
        names = (scheme.activation for scheme in self.schemes)
        return next((name for name in names if name.startswith("fp8_group")), None)

    @property
    def ue8m0_rows(self) -> bool:
        """Whether the scales of `fp8_rows` are powers of two."""
        return self.fp8_rows == "fp8_group_ue8m0"

    def describe(self) -> str:
        return " and ".join(dict.fromkeys(scheme.describe() for scheme in self.schemes))


def scheme_of(
    quant: QuantConfig | None, modules: Iterable[str], columns: int = 0
) -> WeightScheme | None:
    """The scheme of modules merged into one matrix; None if their schemes differ."""
    found = {quant.of(module, columns) if quant else WIDE for module in modules}
    return found.pop() if len(found) == 1 else None


# ---- quantized here: unquantized checkpoints while loading, and by `rorqual quantize`


# not quantized: absorbed products read kv_b head by head; the head decides between close tokens
LEFT_WIDE = ("kv_b_proj", "lm_head")


def _rounded(kind: str, block: tuple[int, int], activation: str) -> QuantConfig:
    return QuantConfig(WeightScheme(kind, block, True, activation), LEFT_WIDE)


QUANTIZATIONS: dict[str, QuantConfig] = {
    "w8a8": _rounded("int8", (1, 0), "int8_token"),
    "fp8": _rounded("fp8", (128, 128), "fp8_group"),
    **{
        name + ("" if group == 128 else f"-g{group}"): _rounded("int4", (1, group), activation)
        for name, activation in (
            ("w4a16", "wide"),
            ("w4a8", "int8_token"),
            ("w4afp8", "fp8_token"),
        )
        for group in GROUPS
    },
}


def quantization_named(name: str) -> QuantConfig:
    """Raises ConfigError."""
    if name not in QUANTIZATIONS:
        raise ConfigError(
            f"quantization={name!r} is not known; accepted: {', '.join(QUANTIZATIONS)}"
        )
    return QUANTIZATIONS[name]
