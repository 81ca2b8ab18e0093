"""The Pareto chart of a plan: tokens/s a GPU over tokens/s a user, as PNG and in the terminal."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from rorqual.config.whole_file import write_whole
from rorqual.errors import ConfigError
from rorqual.planner.search.deployments import Option
from rorqual.planner.search.planner import DeploymentPlan

# colours of Okabe and Ito for colour-blind readers, as in simulator/gantt.py
KINDS = {
    "aggregated": ("o", "#0072B2"),
    "prefill:decode": ("x", "#D55E00"),
    "attention:experts": ("+", "#009E73"),
}
FRONT = "#"
LABELS = 12  # layouts of the front that are named in the picture


def _points(plan: DeploymentPlan, kind: str) -> list[Option]:
    return [option for option in (*plan.options, *plan.missed) if option.kind == kind]


def _named(front: Sequence[Option]) -> list[Option]:
    """The first of each run of the front with one layout."""
    found: list[Option] = []
    for option in front:
        if not found or (option.kind, option.layout) != (found[-1].kind, found[-1].layout):
            found.append(option)
    return found[:LABELS]


def check_png() -> None:
    """Raises ConfigError where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a chart needs matplotlib; install rorqual[plot], or take the CSV")


def write_png(plan: DeploymentPlan, path: Path) -> None:
    """Raises ConfigError where matplotlib is missing."""
    check_png()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, (_, colour) in KINDS.items():
        points = _points(plan, kind)
        if points:
            axes.scatter(
                [option.per_user for option in points],
                [option.per_gpu for option in points],
                s=9,
                alpha=0.4,
                color=colour,
                label=kind,
            )
    front = plan.pareto()
    axes.plot(
        [option.per_user for option in front],
        [option.per_gpu for option in front],
        color="black",
        linewidth=1,
        label="front",
    )
    for option in _named(front):
        axes.annotate(
            f"{option.layout}, {option.batch}",
            (option.per_user, option.per_gpu),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=7,
        )
    question = plan.question
    axes.set(
        xlabel="output tokens/s a user",
        ylabel="output tokens/s a GPU",
        title=f"{question.count} x {question.device.title}: layout, batch a group",
    )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    write_whole(path, drawn.getvalue())


def in_terminal(plan: DeploymentPlan, width: int = 100, height: int = 24) -> Text:
    """Characters in place of points; where several fall together the front goes before the rest,
    and of the rest the rarer kind."""
    options = [*plan.options, *plan.missed]
    if not options:
        return Text("nothing fits, so there is no chart")
    left = 9
    columns = max(20, width - left - 1)
    right = _round_up(max(option.per_user for option in options))
    top = _round_up(max(option.per_gpu for option in options))
    grid: list[list[tuple[str, str]]] = [[(" ", "")] * columns for _ in range(height)]

    def put(option: Option, mark: str, colour: str) -> None:
        x = min(columns - 1, int(option.per_user / right * columns))
        y = min(height - 1, int(option.per_gpu / top * height))
        grid[height - 1 - y][x] = (mark, colour)

    order = sorted(KINDS, key=lambda kind: -len(_points(plan, kind)))
    for kind in order:
        for option in _points(plan, kind):
            put(option, *KINDS[kind])
    front = plan.pareto()
    for option in front:
        put(option, FRONT, "bold")
    found = Text("output tokens/s a GPU\n")
    for row, cells in enumerate(grid):
        value = top * (height - row) / height
        found.append(f"{value:>{left - 2},.0f} |" if row % 6 == 0 else " " * (left - 1) + "|")
        for mark, colour in cells:
            found.append(mark, colour or None)
        found.append("\n")
    found.append(" " * (left - 1) + "+" + "-" * columns + "\n" + " " * left)
    for tick in range(5):
        label = f"{right * tick / 5:g}"
        found.append(label.ljust(columns // 5))
    found.append("\n" + " " * left + "output tokens/s a user; ")
    present = [kind for kind in KINDS if _points(plan, kind)]
    found.append(", ".join(f"{KINDS[kind][0]} {kind}" for kind in present) + f", {FRONT} front\n")
    for option in _named(front):
        figures = f"{option.per_user:7.1f} a user {option.per_gpu:9,.1f} a GPU"
        found.append(f"{figures}  {option.kind} {option.layout}, batch {option.batch}\n")
    return found


def _round_up(value: float) -> float:
    """To one or two leading digits."""
    unit = 10 ** math.floor(math.log10(max(value, 1e-9)))
    return math.ceil(value / unit * 2) / 2 * unit
