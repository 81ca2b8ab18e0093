"""Result files side by side: this command's, those of vLLM's benchmark (--save-result) and of
SGLang's (JSON lines)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rorqual.bench.serving.metrics import Figures
from rorqual.bench.serving.report import value_text
from rorqual.errors import ConfigError

COMPARED = (
    ("out tok/s/GPU", "output_throughput_per_gpu"),
    ("tok/s/user", "tps_user"),
    ("TTFT ms", "median_ttft_ms"),
    ("TPOT ms", "median_tpot_ms"),
    ("E2EL ms", "median_e2el_ms"),
)


def table(series: Mapping[str, Sequence[Figures]]) -> Any:
    """Every file's rows compared with those of the first file at the same concurrency (or, without
    one, at the same rate): value and ratio."""
    from rich.table import Table

    table = Table(title=f"ratios are against {next(iter(series))}")
    for label in ("result", "concurrency", "rate", *(label for label, _ in COMPARED)):
        table.add_column(label, justify="left" if label == "result" else "right")
    first = {_place(row): row for row in next(iter(series.values()))}
    for number, (name, rows) in enumerate(series.items()):
        for row in rows:
            base = first.get(_place(row)) if number else None
            cells = (_ratio(row.get(key), base.get(key) if base else None) for _, key in COMPARED)
            table.add_row(
                name,
                str(row.get("max_concurrency") or "-"),
                str(row.get("request_rate", "-")),
                *cells,
            )
    return table


def _place(row: Figures) -> tuple[Any, Any]:
    return row.get("max_concurrency"), str(row.get("request_rate"))


def _ratio(value: float | None, base: float | None) -> str:
    return value_text(value) + (f" ({value / base:.2f}x)" if value is not None and base else "")


def read(files: Sequence[Path], gpus: int | None = None) -> dict[str, list[Figures]]:
    """Rows of each file, under its label where all labels differ, else its name, else its path.
    `gpus` overrides what the files say; a foreign file says nothing and counts as one."""
    pages = {path: _pages(path) for path in files}
    if len(pages) < len(files):
        raise ConfigError("the same result file is named twice")
    ways = (
        [page[0].get("label") or path.stem for path, page in pages.items()],
        [path.stem for path in files],
        [str(path) for path in files],
    )
    names = next(way for way in ways if len(set(way)) == len(files))
    return {
        name: _rows(path, page, gpus)
        for name, (path, page) in zip(names, pages.items(), strict=True)
    }


def _rows(path: Path, pages: Sequence[Figures], gpus: int | None) -> list[Figures]:
    rows = [row for page in pages for row in page.get("rows", [page])]
    if not rows or not all(isinstance(row, dict) and "output_throughput" in row for row in rows):
        raise ConfigError(f"{path} holds no benchmark results: a row has no output_throughput")
    return [_complete(row, gpus) for row in rows]


def _pages(path: Path) -> list[Figures]:
    """A JSON object, a list of them, or one a line."""
    try:
        text = path.read_text(encoding="utf-8")
        try:
            found = json.loads(text)
        except ValueError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as benchmark results: {error}") from None
    pages = found if isinstance(found, list) else [found]
    if not pages or not all(isinstance(page, dict) for page in pages):
        raise ConfigError(f"{path} holds no benchmark results: no JSON object in it")
    return pages


def _complete(row: Figures, gpus: int | None) -> Figures:
    """What other scripts do not write follows from what they do."""
    gpus_used = gpus or row.get("num_gpus") or 1
    tpot = row.get("median_tpot_ms")
    more = {
        "num_gpus": gpus_used,
        "output_throughput_per_gpu": row["output_throughput"] / gpus_used,
        "tps_user": 1e3 / tpot if tpot else None,
        "median_e2el_ms": row.get("median_e2el_ms", row.get("median_e2e_latency_ms")),
    }
    return row | more
