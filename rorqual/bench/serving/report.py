"""How `bench serve` shows its rows: the table everyone recognizes, one line a row for a sweep,
and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rorqual.bench.serving.metrics import Figures
from rorqual.config.whole_file import write_whole

WIDTH = 50
MISSING = "n/a"
SECTIONS = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
    ("e2el", "E2EL", "End-to-end Latency"),
)
SCHEMA = "rorqual.bench.serve/1"
COLUMNS = (
    ("concurrency", "max_concurrency", 0),
    ("requests/s", "request_throughput", 2),
    ("out tok/s", "output_throughput", 1),
    ("out tok/s/GPU", "output_throughput_per_gpu", 1),
    ("tok/s/user", "tps_user", 1),
    ("TTFT ms", "median_ttft_ms", 1),
    ("p99 TTFT", "p99_ttft_ms", 1),
    ("TPOT ms", "median_tpot_ms", 2),
    ("p99 TPOT", "p99_tpot_ms", 2),
    ("E2EL ms", "median_e2el_ms", 1),
    ("accepted", "accept_length", 2),
    ("failed", "failed", 0),
    ("client CPU", "client_cpu_cores", 2),
)


def value_text(value: float | None, digits: int = 2) -> str:
    """A quantity without data is n/a, never 0."""
    return MISSING if value is None else f"{value:.{digits}f}"


def result_table(row: Figures) -> str:
    """The classic table: label in 40 columns, then the value."""
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    lines += [
        f"{label + ':':<40} {value_text(value, digits):<10}"
        for label, value, digits in _totals(row)
    ]
    for name, short, title in SECTIONS:
        lines.append(title.center(WIDTH, "-"))
        for kind in ("mean", "median", *(f"p{percent:g}" for percent in _percentiles(row, name))):
            lines.append(
                f"{f'{kind.capitalize()} {short} (ms):':<40} "
                f"{value_text(row[f'{kind}_{name}_ms']):<10}"
            )
    lines.append("Client and Stream".center(WIDTH, "-"))
    lines += [
        f"{label + ':':<40} {value_text(value, digits):<10}"
        for label, value, digits in _client(row)
    ]
    return "\n".join([*lines, "=" * WIDTH])


def _totals(row: Figures) -> Iterable[tuple[str, float | None, int]]:
    yield "Successful requests", row["completed"], 0
    yield "Failed requests", row["failed"], 0
    if row["max_concurrency"] is not None:
        yield "Maximum request concurrency", row["max_concurrency"], 0
    if row["request_rate"] != "inf":
        yield "Request rate configured (RPS)", row["request_rate"], 2
    yield "Benchmark duration (s)", row["duration"], 2
    yield "Total input tokens", row["total_input_tokens"], 0
    yield "Total generated tokens", row["total_output_tokens"], 0
    yield "Request throughput (req/s)", row["request_throughput"], 2
    if row["goodput_limits"]:
        yield "Request goodput (req/s)", row["request_goodput"], 2
    yield "Output token throughput (tok/s)", row["output_throughput"], 2
    yield "Peak output token throughput (tok/s)", row["max_output_tokens_per_s"], 2
    yield "Peak concurrent requests", row["max_concurrent_requests"], 2
    yield "Total token throughput (tok/s)", row["total_token_throughput"], 2


def _client(row: Figures) -> Iterable[tuple[str, float | None, int]]:
    yield "Concurrency", row["concurrency"], 2
    yield "Accept length", row["accept_length"], 2
    yield "Output tokens/s/user (1/median TPOT)", row["tps_user"], 2
    yield f"Output tokens/s/GPU ({row['num_gpus']} GPU)", row["output_throughput_per_gpu"], 2
    yield "Tokens per chunk", row["tokens_per_chunk"], 3
    yield "Cached input tokens", row["total_cached_tokens"], 0
    yield "Client CPU (cores)", row["client_cpu_cores"], 3
    yield "Client CPU per chunk (us)", row["client_cpu_us_per_chunk"], 1


def _percentiles(row: Figures, name: str) -> list[float]:
    """The measured percentiles; the table shows only the 99th if it is one of them."""
    found = sorted(
        float(key[1 : -len(f"_{name}_ms")])
        for key in row
        if key.startswith("p") and key.endswith(f"_{name}_ms")
    )
    return [99.0] if 99.0 in found else found


def failures(row: Figures) -> str:
    """Failed requests by cause, one line each."""
    return "\n".join(f"  {count:>6} x {cause}" for cause, count in row["failures"].items())


def sweep_table(rows: Sequence[Figures], title: str, chosen: int | None = None) -> Any:
    """A Rich table, one line a concurrency; the `chosen` one is bold."""
    from rich.table import Table

    table = Table(title=title)
    for label, _, _ in COLUMNS:
        table.add_column(label, justify="right")
    for row in rows:
        style = "bold green" if chosen is not None and row["max_concurrency"] == chosen else None
        table.add_row(
            *(value_text(row.get(key), digits) for _, key, digits in COLUMNS), style=style
        )
    return table


def document(
    rows: Sequence[Figures], provenance: Figures, search: Figures | None = None
) -> Figures:
    """The JSON: a single row is at the top level, with vLLM's and SGLang's keys; several are a list
    under `rows`."""
    head: Figures = {
        "schema": SCHEMA,
        "date": provenance["client"]["date"],
        "label": provenance["label"],
    }
    head["server_info"] = provenance["server"]["info"]
    body: Figures = dict(rows[0]) if len(rows) == 1 and search is None else {"rows": list(rows)}
    return head | body | ({"slo": search} if search else {}) | {"provenance": provenance}


def write_json(path: Path, page: Figures) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(page, indent=1, allow_nan=False) + "\n")


def verdict(found: Figures) -> str:
    """The answer of an SLO search in a sentence or two."""
    ended = "\n--slo-seconds ended the search" if found.get("out_of_time") else ""
    if found["max_concurrency"] is None:
        return (
            f"no concurrency tried keeps {found['objective']}; "
            f"{found['lowest_that_breaks_it']} breaks it: {', '.join(found['broken_by'])}{ended}"
        )
    rates = (
        f"{found['output_throughput']:,.1f} output tok/s "
        f"({found['output_throughput_per_gpu']:,.1f} per GPU)"
    )
    feel = (
        f"median TTFT {value_text(found['median_ttft_ms'])} ms, "
        f"{value_text(found['tps_user'])} tok/s/user"
    )
    first = (
        f"highest concurrency that keeps {found['objective']}: {found['max_concurrency']}, "
        f"{rates}, {feel}"
    )
    broken = found["lowest_that_breaks_it"]
    above = (
        f"\n{broken} breaks it: {', '.join(found['broken_by'])}"
        if broken
        else "\nno higher one was tried"
    )
    return first + above + ended
