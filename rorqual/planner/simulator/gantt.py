"""A Gantt chart of a few simulated steps: what each resource did, as one HTML page of its own, as
PNG, as a trace for Perfetto, or in the terminal. No torch.

Colours are those of Okabe and Ito for colour-blind readers (https://jfly.uni-koeln.de/color/):
one a kind of work, and micro-batches take turns between full and lighter tones."""

from __future__ import annotations

import html
import importlib.util
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from rorqual.config.whole_file import write_whole
from rorqual.errors import ConfigError
from rorqual.planner.simulator.simulator import Simulation
from rorqual.planner.timing.split_schedule import Task

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777")
WIDTH = 1600
LANE = 46
LEFT = 150
TOP = 60
MOST_LANES = 16


@dataclass(frozen=True)
class Bar:
    """Seconds since the chart's start."""

    lane: str
    name: str
    batch: int
    start: float
    end: float


@dataclass(frozen=True)
class GanttChart:
    """begins: when each step began; all in seconds since the first of them."""

    title: str
    bars: tuple[Bar, ...]
    begins: tuple[float, ...]

    @property
    def lanes(self) -> list[str]:
        return list(dict.fromkeys(bar.lane for bar in self.bars))

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(bar.name for bar in self.bars))

    @property
    def end(self) -> float:
        return max(bar.end for bar in self.bars)

    def colour(self, bar: Bar) -> tuple[str, float]:
        return COLOURS[self.names.index(bar.name) % len(COLOURS)], (1.0, 0.55, 0.8, 0.4)[
            bar.batch % 4
        ]


def gantt(simulation: Simulation, title: str) -> GanttChart:
    """Of the steps the simulation watched. Raises ConfigError where there were none."""
    if not simulation.watched:
        raise ConfigError(
            f"no step began after {simulation.watch[0]} s that could be drawn; the run ended "
            f"at {simulation.now:.3f} s"
        )
    pool = simulation.deployment.pools[-1]
    begins = [step.began - simulation.watched[0].began for step in simulation.watched]
    bars: list[Bar] = []
    for start, step in zip(begins, simulation.watched, strict=True):
        tasks = pool.costs.tasks(step.loads, pool.scheduler.num_speculative_tokens)
        bars += [
            Bar(_lane(task, tasks), task.name, task.batch, start + task.start, start + task.end)
            for task in tasks
        ]
    return GanttChart(title, tuple(bars), tuple(begins))


def _lane(task: Task, tasks: Sequence[Task]) -> str:
    """A lane a resource; numbered devices share one where they are many."""
    many = len({other.resource for other in tasks}) > MOST_LANES
    return (
        task.resource.rstrip("0123456789 ") + "s"
        if many and task.resource[-1].isdigit()
        else task.resource
    )


def write(chart: GanttChart, path: Path) -> None:
    """By the ending: .html, .svg, .png, or .json for ui.perfetto.dev."""
    check_ending(path)
    write_whole(path, _png(chart) if path.suffix == ".png" else TEXTS[path.suffix](chart))


def check_ending(path: Path) -> None:
    """Raises ConfigError where such a file cannot be drawn."""
    if path.suffix not in (*TEXTS, ".png"):
        raise ConfigError(f"{path} has no known ending; accepted: .html, .svg, .png, .json, or -")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "PNG charts need matplotlib: install rorqual[plot], or ask for .html or .svg"
        )


def _trace(chart: GanttChart) -> str:
    """Chrome's trace event format, which Perfetto reads: a thread a lane, microseconds."""
    place = {"ph": "M", "pid": 1}
    title = {**place, "name": "process_name", "args": {"name": chart.title}}
    events: list[dict[str, Any]] = [title]
    for number, lane in enumerate(chart.lanes, 1):
        events.append({**place, "name": "thread_name", "tid": number, "args": {"name": lane}})
    for bar in chart.bars:
        event = {
            "name": bar.name,
            "ph": "X",
            "pid": 1,
            "tid": chart.lanes.index(bar.lane) + 1,
            "ts": bar.start * 1e6,
            "dur": (bar.end - bar.start) * 1e6,
            "args": {"micro_batch": bar.batch},
        }
        events.append(event)
    for begin in chart.begins:
        events.append({"name": "step", "ph": "i", "s": "p", "pid": 1, "tid": 1, "ts": begin * 1e6})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=0) + "\n"


def in_terminal(chart: GanttChart, width: int = 100) -> Text:
    """A line a lane: in each place the letter of the work that has most of its time; lower case
    for every second micro-batch; a dot where the lane is idle for most of it."""
    left = max(len(lane) for lane in chart.lanes) + 1
    places = max(20, width - left)
    each = chart.end / places
    found = Text(chart.title + "\n", "bold")
    for lane in chart.lanes:
        shares = [dict[tuple[str, int], float]() for _ in range(places)]
        for bar in (bar for bar in chart.bars if bar.lane == lane):
            last = min(places - 1, int(bar.end / each))
            for place in range(int(bar.start / each), last + 1):
                part = min(bar.end, (place + 1) * each) - max(bar.start, place * each)
                key = (bar.name, bar.batch)
                shares[place][key] = shares[place].get(key, 0.0) + max(0.0, part)
        found.append(lane.rjust(left - 1) + " ")
        for share in shares:
            if sum(share.values()) < each / 2:
                found.append(".")
                continue
            name, batch = max(share, key=lambda key: share[key])
            number = chart.names.index(name)
            letter = chr(ord("A") + number % 26)
            colour = COLOURS[number % len(COLOURS)]
            found.append(letter.lower() if batch % 2 else letter, colour)
        found.append("\n")
    end = f"{chart.end * 1e3:.3g} ms"
    found.append(" " * left + "0" + end.rjust(places - 1) + "\n" + " " * left)
    names = (f"{chr(ord('A') + number % 26)} {name}" for number, name in enumerate(chart.names))
    found.append(", ".join(names) + "\n")
    return found


def _svg(chart: GanttChart) -> str:
    height = TOP + LANE * len(chart.lanes) + 70
    scale = (WIDTH - LEFT - 20) / chart.end
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">'
    ]
    parts.append(
        f'<text x="10" y="24" font-size="17" font-weight="bold">{html.escape(chart.title)}</text>'
    )
    bottom = TOP + LANE * len(chart.lanes)
    for begin in chart.begins:
        x = LEFT + begin * scale
        parts.append(
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{TOP - 8}" y2="{bottom}" stroke="#999" '
            'stroke-dasharray="4 3"/>'
        )
    for index, lane in enumerate(chart.lanes):
        parts.append(
            f'<text x="{LEFT - 8}" y="{TOP + LANE * index + 26}" '
            f'text-anchor="end">{html.escape(lane)}</text>'
        )
    for bar in chart.bars:
        colour, shade = chart.colour(bar)
        x = LEFT + bar.start * scale
        y = TOP + LANE * chart.lanes.index(bar.lane) + 4
        about = (
            f"{bar.name}, micro-batch {bar.batch}: {bar.start * 1e3:.3f} to {bar.end * 1e3:.3f} ms"
        )
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" '
            f'width="{max(0.2, (bar.end - bar.start) * scale):.2f}" height="{LANE - 8}" '
            f'fill="{colour}" fill-opacity="{shade}"><title>{html.escape(about)}</title></rect>'
        )
    parts += _axis(chart, scale, bottom)
    return "\n".join([*parts, "</svg>\n"])


def _axis(chart: GanttChart, scale: float, bottom: int) -> list[str]:
    parts = []
    for tick in range(11):
        x = LEFT + chart.end * scale * tick / 10
        at = chart.end * tick / 10
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle" '
            f'fill="#555">{at * 1e3:.3g} ms</text>'
        )
    for index, name in enumerate(chart.names):
        x = LEFT + 190 * index
        parts.append(
            f'<rect x="{x}" y="{bottom + 36}" width="14" height="14" '
            f'fill="{COLOURS[index % len(COLOURS)]}"/>'
        )
        parts.append(f'<text x="{x + 20}" y="{bottom + 48}">{html.escape(name)}</text>')
    return parts


def _page(chart: GanttChart) -> str:
    """The picture with two buttons that widen it; nothing is fetched from anywhere."""
    script = (
        "const s=document.querySelector('svg');let w=100;function "
        "zoom(f){w=Math.max(100,w*f);s.style.width=w+'%'}"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta '
        f'charset="utf-8"><title>{html.escape(chart.title)}</title>\n'
        "<style>body{margin:1em;font-family:sans-serif}div{overflow-x:auto}"
        "svg{width:100%;height:auto}</style></head>\n"
        '<body><button onclick="zoom(2)">Wider</button> <button '
        'onclick="zoom(.5)">Narrower</button>\n'
        f"<div>{_svg(chart)}</div>\n<script>{script}</script></body></html>\n"
    )


def _png(chart: GanttChart) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(14, 1.6 + 0.6 * len(chart.lanes)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for lane, label in enumerate(chart.lanes):
        bars = [bar for bar in chart.bars if bar.lane == label]
        colours = [chart.colour(bar) for bar in bars]
        axes.broken_barh(
            [(bar.start * 1e3, (bar.end - bar.start) * 1e3) for bar in bars],
            (lane - 0.4, 0.8),
            facecolors=colours,
            snap=False,
        )
    for begin in chart.begins:
        axes.axvline(begin * 1e3, color="#999999", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(chart.lanes)), chart.lanes)
    axes.invert_yaxis()
    axes.set(xlabel="ms", xlim=(0, chart.end * 1e3))
    axes.set_title(chart.title, loc="left", fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [
        Patch(color=COLOURS[index % len(COLOURS)], label=name)
        for index, name in enumerate(chart.names)
    ]
    axes.legend(
        handles=handles,
        ncols=len(handles),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.25),
        frameon=False,
    )
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    return drawn.getvalue()


TEXTS = {".html": _page, ".svg": _svg, ".json": _trace}
