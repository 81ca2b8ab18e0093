"""Measured kernel and collective times, with interpolation between sizes and scaling to other
devices. No torch.

A lookup is linear between measured points in logarithms of sizes and times. On another device a
time t becomes start + (t - start) x (its roofline floor) / (the measured device's floor): a kernel
keeps its achieved fraction, and its start-up time stays the same.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rorqual.config.hardware import DATA
from rorqual.errors import ConfigError
from rorqual.planner.costs.messages import CostedMessage
from rorqual.planner.costs.parallel_costs import RankOp
from rorqual.planner.timing import digests

Nest = dict[float, Any]
# Rows of our own kernels: of the current kernels, of kernels that have changed since (or without a
# digest), or borrowed from another engine's tables. THEIRS: rows of another engine's profile.
CURRENT, STALE, BORROWED, THEIRS = ("current", "stale", "borrowed", "theirs")
PRODUCT_START = 2e-6  # seconds of a product that no matrix is too small for
BETWEEN = "between"  # family of digests.py
RENEWAL = "rorqual bench calibrate --full"


def nest(rows: Iterable[Sequence[float]]) -> Nest:
    """Rows (c1, ..., cn, us) as nested tables by logarithm: {ln c1: {... {ln cn: ln us}}}."""
    found: Nest = {}
    for *keys, value in rows:
        level = found
        for key in keys[:-1]:
            level = level.setdefault(math.log(key), {})
        level[math.log(keys[-1])] = math.log(value)
    return found


def interpolate(table: Nest | float, at: Sequence[float], least: float = 0.5) -> float:
    """ln us at the logarithms `at`. Beyond the upper end a coordinate goes on with the slope of
    the two outermost points, held between 0.5 and 1, the last one between `least` and 2; below the
    lower end it stays."""
    if not isinstance(table, dict):
        return table
    keys = sorted(table)
    where = at[0]
    if len(keys) == 1:
        return interpolate(table[keys[0]], at[1:], least)
    index = min(max(bisect_left(keys, where), 1), len(keys) - 1)
    low = keys[index - 1]
    high = keys[index]
    first = interpolate(table[low], at[1:], least)
    second = interpolate(table[high], at[1:], least)
    slope = (second - first) / (high - low)
    if low <= where <= high:
        return first + slope * (where - low)
    if where < low:
        return first
    slope = min(max(slope, least), 2.0) if len(at) == 1 else min(max(slope, 0.5), 1.0)
    return second + slope * (where - high)


def experts_family(held: str) -> str:
    """The family of digests.FAMILIES that computes with experts' weights held so (`held_dtype`)."""
    number = next((name for name in ("int4", "fp8") if held.startswith(name)), None)
    return f"experts_{number}" if number else "experts"


def held_dtype(op: RankOp) -> str:
    """What the weights are held in, by their bytes: int4 where they are multiplied as bf16,
    int4_fp8 or int4_int8 where not. Without weights, the operands' dtype; float16 and float32
    count as bfloat16."""
    dtype = "bfloat16" if op.dtype in ("float16", "float32") else op.dtype
    if op.kind == "gemm":
        values = op.shape[1] * op.shape[2]
    elif op.kind == "experts":
        values = 3 * op.shape[2] * op.shape[3] * op.shape[4]
    else:
        return dtype
    if not 0 < op.weight_bytes < 0.9 * values:
        return dtype
    return "int4" if dtype == "bfloat16" else f"int4_{dtype}"


@dataclass(frozen=True)
class ExpertTime:
    """A measured expert layer: seconds for `pairs` (token, expert) pairs over `distinct` experts of
    hidden x inner. skewed: under the table's own uneven routing."""

    seconds: float
    pairs: float
    distinct: float
    hidden: int
    inner: int
    skewed: bool


class KernelTables:
    """Times in seconds on the device they were measured on. `has` says which kinds of operation
    there is data for.

    With a `base`, what is not here is the base's time multiplied by the `relative` curve of its
    kind (our kernel over the base's at the shapes where both were measured).

    `engine` rorqual: our own kernels, with `kernels` the digests of each family (digests.py) as it
    was when its rows were measured.
    """

    def __init__(self, data: Mapping[str, Any], base: KernelTables | None = None):
        self.device: str = data["meta"]["device"]
        self.source: str = data["meta"]["source"]
        self.own = data["meta"].get("engine") == "rorqual"
        self.digests: Mapping[str, str] = data["meta"].get("kernels", {})
        self.base = base
        self._relative = {kind: nest(rows) for kind, rows in data.get("relative", {}).items()}
        self._gemm = {
            dtype: nest(self._gemm_rows(data["gemm"]["m"], rows))
            for dtype, rows in data.get("gemm", {}).get("tables", {}).items()
        }
        self._shapes = {
            dtype: {(n, k): dict(_logged(times)) for n, k, times in rows}
            for dtype, rows in data.get("gemm_shapes", {}).items()
        }
        self._attention = {
            name: nest(data[name]) for name in ("mla_decode", "mla_prefill") if name in data
        }
        for name in ("gqa_decode", "gqa_prefill"):
            if name in data:
                self._attention[name] = nest(
                    (heads / groups, heads, *rest) for heads, groups, *rest in data[name]
                )
        self._cached = {
            name: self._cached_factors(name, data[f"{name}_cached"])
            for name in ("mla_prefill", "gqa_prefill")
            if f"{name}_cached" in data
        }
        self._bmm = {dtype: nest(rows) for dtype, rows in data.get("mla_bmm", {}).items()}
        self._experts = data.get("experts", [])
        self._between = data.get("between", {})
        kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        self._collectives = {
            (kind, int(ranks)): nest(rows)
            for kind in kinds
            for ranks, rows in data.get(kind, {}).items()
        }
        self._deepep = {
            kind: self._deepep_tables(data[f"deepep_{kind}"])
            for kind in ("low_latency", "normal")
            if f"deepep_{kind}" in data
        }

    @staticmethod
    def _gemm_rows(
        sizes: Sequence[int], rows: Iterable[Sequence[float]]
    ) -> Iterable[Sequence[float]]:
        for n, k, *times in rows:
            yield from ((n, k, m, time) for m, time in zip(sizes, times, strict=True))

    @staticmethod
    def _deepep_tables(rows: Iterable[Sequence[float]]) -> tuple[Nest, Nest]:
        listed = list(rows)
        there = nest((ranks, tokens, out) for ranks, tokens, out, _ in listed)
        return there, nest((ranks, tokens, back) for ranks, tokens, _, back in listed)

    # ---- operations

    def has(self, op: RankOp, mla: bool) -> bool:
        return self._holds(op, mla) or (self.base is not None and self.base.has(op, mla))

    def _holds(self, op: RankOp, mla: bool) -> bool:
        if op.kind == "gemm":
            return self._dtype(op) in self._gemm or self._dtype(op) in self._shapes
        if op.kind == "bmm":
            return "bfloat16" in self._bmm or "fp8" in self._bmm
        if op.kind == "attention":
            return self._attention_name(op, mla) in self._attention
        return op.kind == "experts" and any(
            entry["dtype"] == self._dtype(op) for entry in self._experts
        )

    @staticmethod
    def _dtype(op: RankOp) -> str:
        return held_dtype(op)

    @staticmethod
    def _attention_name(op: RankOp, mla: bool) -> str:
        return f"{'mla' if mla else 'gqa'}_{'prefill' if op.prefill else 'decode'}"

    def basis(self, op: RankOp, mla: bool) -> tuple[str, str]:
        """(family of kernels, basis of its time: see CURRENT)."""
        family = self.family(op, mla)
        if not self.own:
            return family, THEIRS
        if not self._holds(op, mla) and self._curve(op, mla, 1.0) is None:
            return family, BORROWED
        return family, self._freshness(family)

    def _freshness(self, family: str) -> str:
        kept = self.digests.get(family)
        return CURRENT if kept and kept == digests.present()[family] else STALE

    def basis_between(self, known: bool) -> tuple[str, str]:
        """As `basis`, of what is between kernels; known: `between` found something."""
        return BETWEEN, self._freshness(BETWEEN) if known else STALE

    def family(self, op: RankOp, mla: bool) -> str:
        """As digests.FAMILIES calls it."""
        if op.kind == "attention":
            return self._attention_name(op, mla)
        if op.kind == "experts":
            return experts_family(held_dtype(op))
        return f"gemm_{self._dtype(op)}" if op.kind == "gemm" else op.kind

    def seconds(self, op: RankOp, mla: bool) -> float:
        """On the measured device; not for experts."""
        if self.base is not None and not self._holds(op, mla):
            seconds = self.base.seconds(op, mla)
            return seconds * self._ratio(op, mla, seconds)
        if op.kind == "gemm":
            m, n, k = op.shape
            if self._dtype(op) in self._shapes:
                return self._shape_seconds(self._shapes[self._dtype(op)], m, n, k)
            return _exp(interpolate(self._gemm[self._dtype(op)], _logs(n, k, m)))
        if op.kind == "bmm":
            heads, m, *_ = op.shape
            return _exp(
                interpolate(
                    self._bmm.get("fp8" if "fp8" in self._bmm else "bfloat16", {}), _logs(heads, m)
                )
            )
        if op.kind == "attention":
            return self._attention_seconds(op, mla)
        raise AssertionError(f"{op.kind} has no table of its own")

    @staticmethod
    def _shape_seconds(
        shapes: Mapping[tuple[float, float], Nest], m: float, n: float, k: float
    ) -> float:
        """Of the measured matrix, or of the nearest one in proportion to its size, less a start."""

        def distance(shape: tuple[float, float]) -> float:
            return abs(math.log(shape[0] / n)) + abs(math.log(shape[1] / k))

        near = min(shapes, key=distance)
        seconds = _exp(interpolate(shapes[near], _logs(m)))
        start = min(PRODUCT_START, seconds)
        return start + (seconds - start) * (n * k) / (near[0] * near[1])

    def _ratio(self, op: RankOp, mla: bool, seconds: float) -> float:
        found = self._curve(op, mla, seconds)
        return _clamped(*found) if found else 1.0

    def _curve(self, op: RankOp, mla: bool, seconds: float) -> tuple[Nest, float] | None:
        """What relates our kernel to the base's, and where on it."""
        kind = f"gemm_{self._dtype(op)}"
        at = op.shape[0]
        if op.kind == "attention":
            kind = self._attention_name(op, mla)
            at = seconds * 1e6
            if kind == "mla_decode":
                kind = "mla_decode_128" if op.shape[0] * op.shape[3] > 32 else "mla_decode_16"
        curve = self._relative.get(kind) if op.kind in ("gemm", "attention") else None
        return (curve, at) if curve else None

    def _attention_seconds(self, op: RankOp, mla: bool) -> float:
        heads, groups, requests, new, cached = op.shape
        table = self._attention[self._attention_name(op, mla)]
        if op.prefill:
            name = self._attention_name(op, mla)
            plain = self._prompt_seconds(name, heads, groups, requests, new, cached)
            return plain * self._cached_factor(name, heads, new, cached)
        rows = heads * new
        context = cached + new
        whole = min(rows, 128) if mla else heads
        at = (
            _logs(whole, requests, context)
            if mla
            else _logs(heads / groups, heads, requests, context)
        )
        return _exp(interpolate(table, at)) * (rows / whole if mla else 1.0)

    def _prompt_seconds(
        self, name: str, heads: float, groups: float, requests: float, new: float, cached: float
    ) -> float:
        """Of the prompt without a prefix that has as many query-key pairs."""
        length = math.sqrt(2 * (new * cached + new * (new + 1) / 2))
        at = (
            _logs(requests * heads / 16, length)
            if name == "mla_prefill"
            else _logs(heads / groups, heads, requests, length)
        )
        return _exp(interpolate(self._attention[name], at, least=2.0))  # quadratic beyond the table

    def _cached_factors(self, name: str, rows: Iterable[Sequence[float]]) -> dict[float, Nest]:
        """By heads {ln new: {cached share of the keys: ln factor}} of `_prompt_seconds`; rows
        (heads, groups, new, cached, us), of MLA without groups."""
        found: dict[float, Nest] = {}
        for heads, *groups, new, cached, us in rows:
            plain = self._prompt_seconds(
                name, heads, groups[0] if groups else heads, 1, new, cached
            )
            shares = found.setdefault(heads, {}).setdefault(math.log(new), {0.0: 0.0})
            shares[cached / (new + cached)] = math.log(us * 1e-6 / plain)
        return found

    def _cached_factor(self, name: str, heads: float, new: float, cached: float) -> float:
        """What a cached prefix makes of `_prompt_seconds`, of the nearest number of heads; within
        the measured sizes."""
        by_heads = self._cached.get(name)
        if not by_heads or not cached:
            return 1.0
        curves = by_heads[min(by_heads, key=lambda held: abs(math.log(held / heads)))]
        size = min(max(math.log(new), min(curves)), max(curves))
        share = min(cached / (new + cached), min(max(shares) for shares in curves.values()))
        return math.exp(interpolate(curves, (size, share)))

    def expert_rows(self, op: RankOp) -> ExpertTime:
        """The measured shape nearest to `op`, at as many pairs where it is the same shape, else
        at as many for each expert held; within the table's ends (beyond them, floors are in
        proportion)."""
        if self.base is not None and not self._holds(op, False):
            return self.base.expert_rows(op)
        _tokens, pairs, _distinct, hidden, inner, local = op.shape
        far = {"hidden": hidden, "inter": inner, "local": local}
        phase = "prefill" if op.prefill else "decode"

        def distance(entry: Mapping[str, Any]) -> float:
            other = 10.0 * (entry.get("phase", phase) != phase)
            return other + sum(abs(math.log(entry[key] / value)) for key, value in far.items())

        entry = min(
            (entry for entry in self._experts if entry["dtype"] == self._dtype(op)), key=distance
        )
        rows = entry["rows"]
        keys = [math.log(row[0]) for row in rows]
        at = math.log(max(pairs * entry["local"] / local, 1e-3))
        at = min(max(at, keys[0]), keys[-1])
        time = interpolate(dict(zip(keys, (math.log(row[2]) for row in rows), strict=True)), [at])
        used = interpolate(dict(zip(keys, (math.log(row[1]) for row in rows), strict=True)), [at])
        return ExpertTime(
            _exp(time),
            math.exp(at),
            min(math.exp(used), entry["local"]),
            entry["hidden"],
            entry["inter"],
            "phase" not in entry,
        )

    # ---- between the kernels that have times

    def between(self, attention: str, dtype: str, phase: str, tokens: float) -> float | None:
        """Seconds per layer of an engine's step besides the individually timed kernels: norms,
        rope, routing, sampling, gaps and overlap (negative if overlap is larger). Linear in the
        logarithm of tokens, proportional to tokens beyond the largest. dtype: of the experts'
        weights; bf16's if it was not measured. None: nothing was measured."""
        found_for = (between_key(attention, kind, phase) for kind in (dtype, "bfloat16"))
        rows = next((self._between[key] for key in found_for if key in self._between), None)
        if not rows:
            return None
        table = {math.log(at): us for at, us in rows}
        largest = math.exp(max(table))
        found = interpolate(table, _logs(min(tokens, largest)))
        return found * 1e-6 * max(1.0, tokens / largest)

    # ---- collectives

    def collective(self, message: CostedMessage, low_latency: bool) -> float | None:
        """Seconds, or None where there is no table for that kind and number of ranks."""
        if self.base is not None:
            return self.base.collective(message, low_latency)
        if message.kind == "all_to_all" and self._deepep:
            tables = self._deepep.get("low_latency" if low_latency else "normal")
            if tables is None or message.ranks < 8 or message.span > 64:
                return None
            return _exp(
                interpolate(
                    tables[message.name == "combine"], _logs(message.span, max(message.tokens, 1))
                )
            )
        table = self._collectives.get((message.kind, message.ranks))
        return None if table is None else _exp(interpolate(table, _logs(max(message.bytes, 128.0))))


def between_key(attention: str, dtype: str, phase: str) -> str:
    """attention: mla or gqa; dtype: of the experts' weights; phase: decode or prompts."""
    return f"{attention} {dtype} {phase}"


def _logged(times: Iterable[Sequence[float]]) -> Iterable[tuple[float, float]]:
    return ((math.log(size), math.log(us)) for size, us in times)


def curve_seconds(rows: Sequence[Sequence[float]], size: float) -> float:
    """Between measured [bytes, us]."""
    return _exp(interpolate(nest(rows), _logs(max(size, 1.0))))


def _logs(*sizes: float) -> list[float]:
    return [math.log(max(size, 1e-9)) for size in sizes]


def _exp(value: float) -> float:
    return math.exp(value) * 1e-6


def _clamped(curve: Nest, at: float) -> float:
    keys = sorted(curve)
    return math.exp(interpolate(curve, [min(max(math.log(at), keys[0]), keys[-1])]))


@lru_cache(maxsize=16)
def load_tables(name: str) -> KernelTables:
    """The shipped tables of that name, or those of a file.json, with their base."""
    path = Path(name) if name.endswith(".json") else DATA / f"kernels_{name}.json"
    if not path.is_file():
        raise ConfigError(f"there are no kernel tables {path.name} in {path.parent}")
    try:
        data = json.loads(path.read_text())
        base = data["meta"].get("base")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} holds no kernel tables: {error!r}") from None
    return KernelTables(data, load_tables(base) if base else None)
