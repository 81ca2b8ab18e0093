"""Thin a training log to a table that fits the repository, and draw it.

    python demo/plot.py RUN/log.csv demo/loss.csv demo/loss.png

Rows with a held-out measurement are all kept, of the others as many as fit. Needs `matplotlib`.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

ROWS = 300
LOSSES = [
    ("train_loss", "training", "#9ecae1", 0.8),
    ("train_mtp_loss", "training, two tokens ahead (MTP)", "#fdd0a2", 0.8),
    ("heldout_loss", "held out", "#08519c", 1.8),
    ("heldout_mtp_loss", "held out, two tokens ahead (MTP)", "#d94801", 1.8),
]

Row = dict[str, str]


def thin(rows: list[Row]) -> list[Row]:
    """At most ROWS rows: those with held-out losses, the last included, and every so many of the
    rest."""
    measured = [row for row in rows if row["heldout_loss"]]
    rest = [row for row in rows if not row["heldout_loss"]]
    step = -(-len(rest) // max(1, ROWS - len(measured)))
    return sorted(measured + rest[::step], key=lambda row: int(row["step"]))


def draw(rows: list[Row], path: Path) -> None:
    """Losses over the tokens read."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=84, layout="constrained")
    for column, label, colour, width in LOSSES:
        shown = [row for row in rows if row[column]]
        millions = [int(row["tokens"]) / 1e6 for row in shown]
        axes.plot(
            millions,
            [float(row[column]) for row in shown],
            label=label,
            color=colour,
            linewidth=width,
        )
    axes.set(
        xlabel="training tokens (millions)",
        ylabel="loss (nats per token)",
        ylim=(2.3, 5),
        xlim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("log", type=Path, help="log.csv of a training run")
    parser.add_argument("table", type=Path, help="CSV file to write")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    options = parser.parse_args()
    with options.log.open(newline="") as source:
        rows = thin(list(csv.DictReader(source)))
    with options.table.open("w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, options.picture)


if __name__ == "__main__":
    main()
