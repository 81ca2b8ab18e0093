"""Predictions beside published and measured figures: the table behind `rorqual plan --validate`.
Data: data/published.yaml. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any

from rorqual.config.hardware import DATA, load_device
from rorqual.config.model import ModelConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.planner.costs.catalog import published
from rorqual.planner.costs.costs import BatchShape, Format, GroupWork
from rorqual.planner.costs.routing import Routing
from rorqual.planner.timing.profiles import load_profile
from rorqual.planner.timing.roofline import StepModel, StepTime
from rorqual.planner.validation.closed_loop import Loop, play


@dataclass(frozen=True)
class ValidationPoint:
    """One figure. `high`: the other end of a predicted range, where overlap is not modelled."""

    label: str
    metric: str
    unit: str
    measured: float
    predicted: float
    high: float | None = None

    @property
    def error(self) -> float:
        """Of the prediction; 0 within a range, else from its nearer end."""
        if self.high is None:
            return self.predicted / self.measured - 1
        low, high = sorted((self.predicted, self.high))
        return (
            0.0
            if low <= self.measured <= high
            else (low if self.measured < low else high) / self.measured - 1
        )


@dataclass(frozen=True)
class ValidationGroup:
    name: str
    title: str
    source: str
    note: str
    target: str
    kind: str  # prediction | range | bound
    points: tuple[ValidationPoint, ...]

    def mean_error(self, metric: str) -> float:
        return fmean(abs(point.error) for point in self.points if point.metric == metric)

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(point.metric for point in self.points))


def _model(group: Mapping[str, Any], row: Mapping[str, Any]) -> StepModel:
    both = {**group, **row}
    overrides = {"num_hidden_layers": both["layers"]} if "layers" in both else None
    config: ModelConfig = published(both["model"], overrides=overrides)
    sizes = ParallelConfig(**both.get("sizes", {}))
    fmt = Format(kv_dtype=both.get("kv_dtype"))
    routing = Routing.parse(both.get("routing", "uniform"))
    return StepModel(
        config, sizes, load_device(both["device"]), load_profile(both["profile"]), fmt, routing
    )


def _closed_loop(group: Mapping[str, Any], row: Mapping[str, Any]) -> list[ValidationPoint]:
    loop = Loop(row["clients"], group["prompt"], group["output"], ratio=group["ratio"])
    result = play(_model(group, row), loop)
    label = f"{row['clients']} clients"
    return [
        ValidationPoint(label, "TPOT", "ms", row["tpot_ms"], result.tpot * 1e3),
        ValidationPoint(label, "TTFT", "ms", row["ttft_ms"], result.ttft * 1e3),
    ]


def _decode(group: Mapping[str, Any], row: Mapping[str, Any]) -> StepTime:
    drafts = group.get("num_speculative_tokens", 0)
    return _model(group, row).step(
        GroupWork(BatchShape.verify(row["clients"], group["context"], drafts), drafts=drafts)
    )


def hidden(time: StepTime) -> float:
    """Seconds where all of the network's time passes behind other work, or the network's where
    that is longer."""
    network = time.by("limiter").get("network", 0.0)
    return max(time.seconds - network, network)


def _step(group: Mapping[str, Any], row: Mapping[str, Any]) -> list[ValidationPoint]:
    return [
        ValidationPoint(
            f"{row['clients']} requests",
            "step",
            "ms",
            row["step_ms"],
            _decode(group, row).seconds * 1e3,
        )
    ]


def _prefill_time(
    group: Mapping[str, Any], row: Mapping[str, Any]
) -> tuple[StepModel, StepTime, int]:
    both = {**group, **row}
    model = _model(group, row)
    work = GroupWork(None, (BatchShape(both["batch"], both["prompt"]),))
    return model, model.step(work), work.tokens


def _prefill(group: Mapping[str, Any], row: Mapping[str, Any]) -> list[ValidationPoint]:
    model, time, tokens = _prefill_time(group, row)
    label = row.get("model", f"{group['prompt']} tokens")
    return [
        ValidationPoint(
            label, "prefill", "tok/s", row["tokens_per_s"], tokens * model.sizes.dp / time.seconds
        )
    ]


def _prefill_rate(group: Mapping[str, Any], row: Mapping[str, Any]) -> list[ValidationPoint]:
    model, time, tokens = _prefill_time(group, row)
    node = tokens * model.device.link.span / model.sizes.tp
    return [
        ValidationPoint(
            f"{row['prompt']} tokens",
            "prefill",
            "tok/s a node",
            row["tokens_per_s"],
            node / time.seconds,
            node / hidden(time),
        )
    ]


def _decode_rate(group: Mapping[str, Any], row: Mapping[str, Any]) -> list[ValidationPoint]:
    time = _decode(group, row)
    node = row["clients"] * 8 * (1 + group.get("accepted", 0.0))
    return [
        ValidationPoint(
            f"{row['clients']} a GPU",
            "decode",
            "tok/s a node",
            row["tokens_per_s"],
            node / time.seconds,
            node / hidden(time),
        )
    ]


KINDS = {
    "closed_loop": _closed_loop,
    "step": _step,
    "prefill": _prefill,
    "prefill_rate": _prefill_rate,
    "decode_rate": _decode_rate,
}


@lru_cache(maxsize=1)
def published_rows() -> Mapping[str, Any]:
    import yaml

    return yaml.safe_load((DATA / "published.yaml").read_text())["groups"]


def validate(names: list[str] | None = None) -> list[ValidationGroup]:
    """Every group, or those whose name begins with one of `names`."""
    found = []
    for name, group in published_rows().items():
        if names and not any(name.startswith(wanted) for wanted in names):
            continue
        points = [point for row in group["rows"] for point in KINDS[group["kind"]](group, row)]
        kind = "bound" if group.get("bound") else "range" if group.get("range") else "prediction"
        found.append(
            ValidationGroup(
                name,
                group["title"],
                group["source"],
                group.get("note", ""),
                group.get("target", ""),
                kind,
                tuple(points),
            )
        )
    return found
