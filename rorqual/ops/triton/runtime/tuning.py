"""Which configuration a kernel runs with: rules read from files, found beforehand by `rorqual bench
kernels --tune`.

A rule names the shapes it is for and a configuration. The first rule that fits decides: of the
user's own file for this GPU and these versions of torch and Triton, then of the set that ships for
the GPU, else of the H200's. Nothing is timed here, ever: a shape nobody tuned takes the general
rule of its kernel.

Files are JSON: {"format": 1, "card", "capability", "torch", "triton", "kernels": {kernel:
[{"shape", "config", "us"}, ...]}}. A shape maps names to a value that must be equal, or to [least,
most], in which null is an open end. What a rule does not name, it does not ask for.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import torch
import triton

from rorqual.config.model import cache_folder
from rorqual.config.whole_file import write_whole
from rorqual.errors import ConfigError

FORMAT = 1
SHIPPED = Path(__file__).resolve().parents[1] / "tuned"
DEFAULT_CARD = "NVIDIA H200"
NEAR = 1.4  # a tuned size stands for sizes up to so much larger or smaller
C = TypeVar("C")
Rules = dict[str, list["Rule"]]
log = logging.getLogger("rorqual")


@dataclass(frozen=True)
class TunedDevice:
    """What a tuned configuration depends on besides the kernel and its shape."""

    name: str
    capability: str
    torch: str
    triton: str

    @property
    def file(self) -> Path:
        """The user's own set."""
        words = f"{self.name}-sm{self.capability}-torch{self.torch}-triton{self.triton}"
        return cache_folder() / "tuned" / (re.sub(r"[^a-z0-9.+]+", "-", words.lower()) + ".json")


@dataclass(frozen=True)
class Rule:
    """See the head of this file. us: what the configuration took where it was found."""

    shape: Mapping[str, Any]
    config: Mapping[str, Any]
    us: float | None = None

    def fits(self, shape: Mapping[str, Any]) -> bool:
        return all(
            name in shape and _within(shape[name], wanted) for name, wanted in self.shape.items()
        )


def _within(value: Any, wanted: Any) -> bool:
    if not isinstance(wanted, list):
        return bool(value == wanted)
    least, most = wanted
    return (least is None or value >= least) and (most is None or value <= most)


def near(size: float) -> list[float]:
    """The range of sizes that a configuration found for `size` stands for."""
    return [round(size / NEAR, 3), round(size * NEAR, 3)]


@cache
def card_of(device: torch.device) -> TunedDevice | None:
    """None where kernels are interpreted, or only compiled."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return TunedDevice(
        torch.cuda.get_device_name(device),
        f"{major}.{minor}",
        torch.__version__,
        triton.__version__,
    )


def config_for(kernel: str, config: type[C], device: torch.device, /, **shape: Any) -> C:
    """The configuration, a `config`, for a shape given by name. Found once a shape, then
    remembered."""
    key: Any = config  # to mypy a class is not hashable
    found: C = _chosen(kernel, key, device, tuple(shape.items()))
    return found


@lru_cache(4096)
def _chosen(
    kernel: str, config: Any, device: torch.device, shape: tuple[tuple[str, Any], ...]
) -> Any:
    wanted = dict(shape)
    card = card_of(device)
    for own, rules in ((True, _own(card)), (False, shipped(card.name if card else DEFAULT_CARD))):
        for rule in rules.get(kernel, []):
            if rule.fits(wanted):
                try:
                    return build(config, rule.config)
                except (TypeError, ValueError) as error:
                    if not own:
                        raise
                    log.warning("a tuned configuration of %s is passed by: %s", kernel, error)
    raise AssertionError(f"no configuration of {kernel} fits {wanted}")


class StoredConfig:
    """A configuration that files hold as something else: a row for several kinds of it."""

    @staticmethod
    def from_row(data: Mapping[str, Any]) -> Any:
        """As `build`. ValueError as well where no kernel takes such a configuration."""
        raise NotImplementedError

    def row(self) -> Any:
        """The dataclass that is written."""
        raise NotImplementedError


def build(kind: type[C], data: Mapping[str, Any]) -> C:
    """A dataclass, with dataclasses in it, from what `asdict` made of one. TypeError where
    fields or their types are others. What `kind` lists as its FORMER_FIELDS is passed over: files
    of users still hold it."""
    if issubclass(kind, StoredConfig):
        stored: C = kind.from_row(data)
        return stored
    hints = get_type_hints(kind)
    former: frozenset[str] = getattr(kind, "FORMER_FIELDS", frozenset())
    made = {}
    for name, value in data.items():
        if name in former:
            continue
        if name not in hints:
            raise TypeError(f"{kind.__name__} has no field {name!r}")
        wanted: Any = hints[name]
        if get_origin(wanted) is UnionType:  # a dataclass that may be left out
            wanted = NoneType if value is None else get_args(wanted)[0]
        made[name] = value
        if is_dataclass(wanted):
            made[name] = build(wanted, value)  # type: ignore[arg-type]
        if not isinstance(made[name], wanted):
            raise TypeError(f"{kind.__name__}.{name} is no {wanted.__name__}: {value!r}")
    return kind(**made)


# ---- files


@cache
def _own(card: TunedDevice | None) -> Rules:
    """The user's rules for a GPU; what cannot be read is passed by, with one line in the log."""
    if card is None or not card.file.exists():
        return {}
    try:
        return read(card.file)
    except ConfigError as error:
        log.warning("%s; the configurations that ship are used", error)
        return {}


@cache
def shipped(name: str) -> Rules:
    """The rules that ship for a GPU, else those of DEFAULT_CARD."""
    sets = {json.loads(path.read_text())["card"]: path for path in sorted(SHIPPED.glob("*.json"))}
    return read(sets.get(name, sets[DEFAULT_CARD]))


def read(path: Path) -> Rules:
    return {
        kernel: [Rule(rule["shape"], rule["config"], rule.get("us")) for rule in rules]
        for kernel, rules in _load(path).items()
    }


def _load(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The `kernels` of a file. ConfigError where it is none of ours."""
    try:
        data = json.loads(path.read_text())
        kernels: dict[str, list[dict[str, Any]]] = data["kernels"]
        good = data["format"] == FORMAT and all(
            {"shape", "config"} <= rule.keys() for rules in kernels.values() for rule in rules
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no tuned configurations: {type(error).__name__} {error}"
        ) from None
    if not good:
        raise ConfigError(
            f"{path} holds tuned configurations of another form; delete it, or tune again "
            "into another RORQUAL_CACHE"
        )
    return kernels


def store(card: TunedDevice, kernel: str, shape: Mapping[str, Any], config: Any, us: float) -> Path:
    """Put a rule at the head of the user's file for the GPU, in place of one for the same
    shape. The file is replaced as a whole, so a reader sees the old or the new one."""
    kernels = _load(card.file) if card.file.exists() else {}
    row = config.row() if isinstance(config, StoredConfig) else config
    rule = {"shape": dict(shape), "config": asdict(row), "us": round(us, 2)}
    kernels[kernel] = [
        rule,
        *(old for old in kernels.get(kernel, []) if old["shape"] != rule["shape"]),
    ]
    data = {
        "format": FORMAT,
        **{field.name: getattr(card, field.name) for field in fields(card)},
        "kernels": kernels,
    }
    write_whole(card.file, as_text(data))
    _own.cache_clear()
    _chosen.cache_clear()
    return card.file


def as_text(data: Mapping[str, Any]) -> str:
    """JSON with a line a rule."""
    kernels = ",\n".join(
        f"  {json.dumps(kernel)}: [\n"
        + ",\n".join(f"   {json.dumps(rule)}" for rule in rules)
        + "\n  ]"
        for kernel, rules in data["kernels"].items()
    )
    head = "".join(
        f" {json.dumps(name)}: {json.dumps(value)},\n"
        for name, value in data.items()
        if name != "kernels"
    )
    return f'{{\n{head} "kernels": {{\n{kernels}\n }}\n}}\n'
