"""The published and own figures of data/published.yaml, and the model each row is of. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rorqual.config.hardware import DATA, load_device
from rorqual.config.model import ModelConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.planner.costs.catalog import published
from rorqual.planner.costs.costs import Format
from rorqual.planner.costs.routing import Routing
from rorqual.planner.timing.profiles import Profile, load_profile, with_kernels
from rorqual.planner.timing.roofline import StepModel


@lru_cache(maxsize=1)
def published_rows() -> Mapping[str, Any]:
    import yaml

    return yaml.safe_load((DATA / "published.yaml").read_text())["groups"]


def model_of_row(group: Mapping[str, Any], row: Mapping[str, Any]) -> StepModel:
    both = {**group, **row}
    overrides = {"num_hidden_layers": both["layers"]} if "layers" in both else None
    config: ModelConfig = published(both["model"], both.get("quant", "auto"), overrides)
    sizes = ParallelConfig(**both.get("sizes", {}))
    fmt = Format(kv_dtype=both.get("kv_dtype"), split_latent=both.get("split_latent", False))
    routing = Routing.parse(both.get("routing", "uniform"))
    return StepModel(config, sizes, load_device(both["device"]), _profile(both), fmt, routing)


def _profile(given: Mapping[str, Any]) -> Profile:
    """`kernels` replaces the shipped times of our own kernels only."""
    profile = load_profile(given["profile"])
    return with_kernels(profile, given.get("kernels")) if profile.name == "rorqual" else profile
