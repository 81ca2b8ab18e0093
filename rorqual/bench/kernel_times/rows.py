"""Which times of our kernels the planner reads: every product, expert layer and attention of the
models and layouts below, in every format, at sizes between which it interpolates; and the tables it
reads them from. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rorqual.config.parallel import ParallelConfig
from rorqual.planner.costs.catalog import published
from rorqual.planner.costs.costs import BatchShape, GroupWork
from rorqual.planner.costs.parallel_costs import RankOp, rank_step
from rorqual.planner.costs.routing import UNIFORM, distinct_experts
from rorqual.planner.timing.tables import experts_family, held_dtype

# model, weights, sizes: what one rank multiplies
MODELS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("qwen3-30b-a3b", "auto", {}),
    ("deepseek-v2-lite", "auto", {}),
    ("deepseek-v3", "auto", {}),
    ("qwen3-30b-a3b", "fp8", {}),
    ("qwen3-30b-a3b", "w4a16", {}),
    ("deepseek-v2-lite", "w4a16", {}),
    ("deepseek-v3", "auto", {"tp": 8}),
    ("deepseek-v3", "auto", {"dp": 8, "ep": 8}),
    ("qwen3-235b-a22b", "auto", {"tp": 8}),
)
SMALL = (1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 64, 96, 112, 128, 160, 208, 256)
TOKENS = (*SMALL, 1024, 4096, 8192)
MAX_HEAD_ROWS = 256  # rows of a vocabulary's product: one a request
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
CONTEXTS = (1024, 4096, 16384, 32768)
MAX_CACHED_TOKENS = 2**20  # tokens of a decode row
PROMPTS = ((1, 256), (1, 1024), (1, 4096), (1, 8192), (8, 256), (8, 1024), (8, 4096))
# (new tokens, cached ones before them) of one request; half and seven eighths of all keys cached
CACHED_PROMPTS = ((1024, 1024), (1024, 7168), (4096, 4096), (4096, 28672))
WORK = (GroupWork(BatchShape.decode(8, 1000)), GroupWork(None, (BatchShape(1, 1000),)))


@dataclass(frozen=True)
class TimedRow:
    """One time. family: as planner/timing/digests.py calls the kernels. key: gemm (n, k, m); bmm
    (heads, m); experts (hidden, inner, experts, local, top_k, tokens); decode (heads, groups,
    requests, context) and prefill (heads, groups, requests, tokens), of MLA without groups; with
    cached tokens these come last."""

    family: str
    dtype: str
    key: tuple[int, ...]

    @property
    def with_cached(self) -> bool:
        """Whether it is a prompt with cached tokens."""
        plain = {"mla_prefill": 3, "gqa_prefill": 4}.get(self.family)
        return plain is not None and len(self.key) > plain

    @property
    def name(self) -> str:
        return f"{self.family} {self.dtype} {'x'.join(map(str, self.key))}"


def rows() -> list[TimedRow]:
    """All of them, in the order of the models, each once."""
    found: dict[TimedRow, None] = {}
    for name, quant, sizes in MODELS:
        config = published(name, quant)
        layout = replace(ParallelConfig(), **sizes)
        experts = config.moe.num_experts
        for work in WORK:
            for op in rank_step(config, layout, work).ops:
                shape = (experts, config.moe.top_k)
                found.update(dict.fromkeys(_rows_of(op, config.is_mla, shape)))
    return list(found)


def _rows_of(op: RankOp, mla: bool, routed: tuple[int, int]) -> Iterator[TimedRow]:
    dtype = held_dtype(op)
    kind = "mla" if mla else "gqa"
    if op.kind == "gemm":
        _, n, k = map(int, op.shape)
        for m in TOKENS:
            if n < 16000 or m <= MAX_HEAD_ROWS or op.name != "lm_head":
                yield TimedRow(f"gemm_{dtype}", dtype, (n, k, m))
    elif op.kind == "bmm":
        yield from (TimedRow("bmm", dtype, (int(op.shape[0]), m)) for m in TOKENS if m <= 512)
    elif op.kind == "experts":
        _, _, _, hidden, inner, local = map(int, op.shape)
        family = experts_family(dtype)
        for tokens in TOKENS:
            yield TimedRow(family, dtype, (hidden, inner, routed[0], local, routed[1], tokens))
    elif op.kind == "attention":
        heads, groups = (int(size) for size in op.shape[:2])
        given = (heads,) if mla else (heads, groups)
        if op.prefill:
            cached = ((1, *each) for each in CACHED_PROMPTS)
            for each in (*PROMPTS, *cached):
                yield TimedRow(f"{kind}_prefill", dtype, (*given, *each))
            return
        for requests in REQUESTS:
            for context in CONTEXTS:
                if requests * context <= MAX_CACHED_TOKENS:
                    yield TimedRow(f"{kind}_decode", dtype, (*given, requests, context))


# ---- the planner's tables


def tables(measured: Mapping[TimedRow, float]) -> dict[str, Any]:
    """Sections as planner/timing/tables.py reads them, of the rows there are."""
    found: dict[str, Any] = {"gemm_shapes": {}, "experts": _experts(measured)}
    for row, us in measured.items():
        if row.family.startswith("gemm"):
            shapes = found["gemm_shapes"].setdefault(row.dtype, {})
            shapes.setdefault(row.key[:2], []).append([row.key[2], us])
        elif row.family == "bmm":
            found.setdefault("mla_bmm", {}).setdefault(row.dtype, []).append([*row.key, us])
        elif row.with_cached:
            *sizes, _, new, cached = row.key
            found.setdefault(f"{row.family}_cached", []).append([*sizes, new, cached, us])
        elif row.family == "mla_prefill":
            heads, requests, tokens = row.key
            found.setdefault(row.family, []).append([requests * heads / 16, tokens, us])
        elif not row.family.startswith("experts"):
            found.setdefault(row.family, []).append([*row.key, us])
    found["gemm_shapes"] = {
        dtype: [[*shape, sorted(times)] for shape, times in shapes.items()]
        for dtype, shapes in found["gemm_shapes"].items()
    }
    return found


def _experts(measured: Mapping[TimedRow, float]) -> list[dict[str, Any]]:
    entries: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row, us in measured.items():
        if row.family.startswith("experts"):
            hidden, inner, experts, local, top_k, tokens = row.key
            names = ("dtype", "hidden", "inter", "experts", "local", "top_k")
            shape = (row.dtype, hidden, inner, experts, local, top_k)
            entry = entries.setdefault(shape, {**dict(zip(names, shape, strict=True)), "rows": []})
            share = local / experts
            used = distinct_experts(UNIFORM, experts, top_k, tokens) * share
            entry["rows"].append([tokens * top_k * share, round(used, 3), us])
    for entry in entries.values():
        entry["rows"].sort()
    return list(entries.values())


def complete(measured: Iterable[TimedRow]) -> set[str]:
    """Families with every row they should have."""
    wanted = rows()
    have = set(measured)
    missing = {row.family for row in wanted if row not in have}
    return {row.family for row in wanted} - missing
