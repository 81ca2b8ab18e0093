"""Throughput against interactivity: output tokens/s/GPU over output tokens/s/user, one point a
concurrency, as PNG and as one HTML page.

Colours are Okabe and Ito's palette for colour-blind readers (https://jfly.uni-koeln.de/color/);
series differ in marker too."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rorqual.bench.serving.metrics import Figures
from rorqual.bench.serving.report import MISSING, value_text
from rorqual.config.whole_file import write_whole
from rorqual.errors import ConfigError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vP"
X_LABEL = "Output tokens/s per user  (1 / median TPOT)"
Y_LABEL = "Output tokens/s"  # of one GPU, or of a CPU
Y_LABEL_PER_GPU = "Output tokens/s per GPU"
TEMPLATE = Path(__file__).with_name("pareto.html")


@dataclass(frozen=True)
class ParetoPoint:
    """x in tokens/s/user, y in tokens/s/GPU; `label`: the concurrency (or the rate);
    `efficient`: no other of its series has more of both; `chosen`: the answer of an SLO search,
    `probe`: one of its other measurements."""

    x: float
    y: float
    label: str
    efficient: bool
    chosen: bool
    probe: bool
    facts: dict[str, str]


@dataclass(frozen=True)
class ParetoChart:
    """Series by name, each sorted by x. `limit`: tokens/s/user of an objective, drawn as a line."""

    title: str
    subtitle: str
    series: dict[str, list[ParetoPoint]]
    limit: float | None = None
    y_label: str = Y_LABEL


def chart(results: Mapping[str, Sequence[Figures]], limit: float | None = None) -> ParetoChart:
    """Rows without tokens/s/user (not streamed, one token each, all failed) have no place and
    are left out."""
    series = {name: _points(rows) for name, rows in results.items()}
    if not any(series.values()):
        raise ConfigError(
            "nothing to draw: no row has output tokens/s/user, which needs streaming and two "
            "output tokens or more"
        )
    first = next(row for rows in results.values() for row in rows)
    model = first.get("model_id") or "server"
    return ParetoChart(
        f"{Path(str(model)).name}: throughput against interactivity",
        _subtitle(results),
        series,
        limit,
        Y_LABEL if _gpus(results) == {1} else Y_LABEL_PER_GPU,
    )


def _gpus(results: Mapping[str, Sequence[Figures]]) -> set[int]:
    return {row.get("num_gpus", 1) for rows in results.values() for row in rows}


def _subtitle(results: Mapping[str, Sequence[Figures]]) -> str:
    """What all rows share of lengths and GPUs."""
    rows = [row for rows in results.values() for row in rows]
    lengths = {
        (row.get("random_input_len"), row.get("random_output_len"))
        for row in rows
        if row.get("dataset_name") == "random"
    }
    gpus = _gpus(results)
    data = {row.get("dataset_name") for row in rows} - {None}
    parts = (
        ["random tokens, {}/{} in/out".format(*lengths.pop())]
        if data == {"random"} and len(lengths) == 1
        else sorted(map(str, data))
    )
    if gpus != {1}:
        parts.append(f"{gpus.pop()} GPUs" if len(gpus) == 1 else "per GPU of each")
    return ", ".join([*parts, "labels are the maximum concurrency"])


def _points(rows: Sequence[Figures]) -> list[ParetoPoint]:
    found = [
        row
        for row in rows
        if row.get("tps_user") is not None and row.get("output_throughput_per_gpu") is not None
    ]
    places = [(float(row["tps_user"]), float(row["output_throughput_per_gpu"])) for row in found]
    best = frontier(places)
    flags = [(bool(row.get("slo_choice")), bool(row.get("slo_probe"))) for row in found]
    rows_places = zip(places, found, flags, strict=True)
    points = [
        ParetoPoint(*place, _label(row), place in best, *marks, _facts(row))
        for place, row, marks in rows_places
    ]
    return sorted(points, key=lambda point: (point.x, -point.y))


def frontier(places: Sequence[tuple[float, float]]) -> set[tuple[float, float]]:
    """Those that no other place equals or exceeds in both coordinates (and exceeds in one)."""
    return {p for p in places if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in places)}


def _label(row: Figures) -> str:
    if row.get("max_concurrency"):
        return str(row["max_concurrency"])
    rate = row.get("request_rate")
    return f"{rate:g}/s" if isinstance(rate, int | float) else "all"


def _facts(row: Figures) -> dict[str, str]:
    keys = {
        "Tokens/s/user": ("tps_user", 1),
        "Tokens/s/GPU": ("output_throughput_per_gpu", 1),
        "Output tokens/s": ("output_throughput", 1),
        "Median TTFT (ms)": ("median_ttft_ms", 1),
        "P99 TTFT (ms)": ("p99_ttft_ms", 1),
        "Median TPOT (ms)": ("median_tpot_ms", 2),
        "P99 TPOT (ms)": ("p99_tpot_ms", 2),
        "Accept length": ("accept_length", 2),
    }
    return {name: value_text(row.get(key), digits) for name, (key, digits) in keys.items()}


def write_png(found: ParetoChart, path: Path) -> None:
    """8 x 5 inches at 150 dots an inch. Filled markers are on their series' Pareto front, hollow
    ones are not."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "charts need matplotlib: install rorqual[bench], or pass --no-chart"
        ) from None
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (name, points), (colour, marker) in zip(found.series.items(), _styles(), strict=False):
        _draw(axes, name, points, colour, marker)
    axes.set_title(found.title, fontsize=13, fontweight="bold", loc="left", pad=24)
    axes.text(0, 1.025, found.subtitle, fontsize=9, color="#555555", transform=axes.transAxes)
    everything = [point for points in found.series.values() for point in points]
    edges = {
        "xlim": (0, 1.08 * max(point.x for point in everything)),
        "ylim": (0, 1.1 * max(point.y for point in everything)),
    }
    axes.set(xlabel=X_LABEL, ylabel=found.y_label, **edges)
    if found.limit is not None:
        axes.axvline(
            found.limit,
            color="#777777",
            linewidth=1,
            linestyle="--",
            label=f"objective: {found.limit:g} tokens/s/user",
        )
    _annotate(axes, everything)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(found.series) > 1 or found.limit is not None:
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw(axes: Any, name: str, points: Sequence[ParetoPoint], colour: str, marker: str) -> None:
    axes.plot([p.x for p in points], [p.y for p in points], color=colour, linewidth=1.6, alpha=0.8)
    axes.plot([], [], color=colour, marker=marker, label=name)
    for point in points:
        fill = colour if point.efficient else "white"
        size = 4 if point.probe and not point.chosen else 7
        axes.plot(
            point.x,
            point.y,
            marker=marker,
            markersize=size,
            color=colour,
            markerfacecolor=fill,
            clip_on=False,
            zorder=3,
        )
        if point.chosen:
            axes.plot(
                point.x,
                point.y,
                marker="o",
                markersize=14,
                color="#333333",
                markerfacecolor="none",
                zorder=4,
            )


def _annotate(axes: Any, points: Sequence[ParetoPoint]) -> None:
    """Labels where there is room: the chosen point's first, a probe's last."""
    taken: list[Any] = []
    for point in sorted(points, key=lambda point: (not point.chosen, point.probe)):
        x, y = axes.transData.transform((point.x, point.y))
        if any(abs(x - other[0]) < 45 and abs(y - other[1]) < 26 for other in taken):
            continue
        taken.append((x, y))
        weight = "bold" if point.chosen else "normal"
        place = {"xytext": (8, 6), "textcoords": "offset points"}
        axes.annotate(
            point.label,
            (point.x, point.y),
            **place,
            fontsize=9,
            color="#333333",
            fontweight=weight,
            zorder=5,
        )


def _styles() -> Iterator[tuple[str, str]]:
    index = 0
    while True:
        yield COLOURS[index % len(COLOURS)], MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
        index += 1


def write_html(found: ParetoChart, path: Path, notes: Sequence[str] = ()) -> None:
    """One file that needs nothing else: data, drawing code and a table for readers without
    either."""
    series = [
        {"name": name, "points": [asdict(point) for point in points]}
        for name, points in found.series.items()
    ]
    data = json.dumps(
        {"series": series, "x": X_LABEL, "y": found.y_label, "limit": found.limit}
    ).replace("<", "\\u003c")
    parts = {
        "@TITLE@": html.escape(found.title),
        "@SUBTITLE@": html.escape(found.subtitle),
        "@NOTES@": "".join(f"<li>{html.escape(note)}</li>" for note in notes),
        "@TABLE@": _table(found),
        "@DATA@": data,  # last: nothing is looked for inside it
    }
    page = TEMPLATE.read_text(encoding="utf-8")
    for name, value in parts.items():
        page = page.replace(name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page)


def _table(found: ParetoChart) -> str:
    names = next(list(point.facts) for points in found.series.values() for point in points)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("Result", "Concurrency", *names))
    lines = [(name, point) for name, points in found.series.items() for point in points]
    body = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(point.label)}</td>{_cells(point)}</tr>"
        for name, point in lines
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(point: ParetoPoint) -> str:
    return "".join(
        f"<td{' class=none' if value == MISSING else ''}>{html.escape(value)}</td>"
        for value in point.facts.values()
    )
