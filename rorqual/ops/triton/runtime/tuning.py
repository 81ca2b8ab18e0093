"""Kernel configurations: rules from files, which `rorqual bench kernels --tune` finds.

A rule has a range of shapes and a configuration. The first matching rule is used: from the user's
file for this GPU and these versions of torch and Triton, then from the shipped set for the GPU,
else from the H200's. Nothing is timed here: a shape without tuning uses its kernel's general rule.

Files are JSON: {"format": 1, "card", "capability", "torch", "triton", "kernels": {kernel:
[{"shape", "config", "us"}, ...]}}. A shape maps names to a value that must be equal, or to [least,
most], where null means no limit. Names that a rule omits are not checked.
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
NEAR = 1.4  # a tuned size covers sizes larger or smaller by up to this factor
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
        """The user's tuning file."""
        words = f"{self.name}-sm{self.capability}-torch{self.torch}-triton{self.triton}"
        return cache_folder() / "tuned" / (re.sub(r"[^a-z0-9.+]+", "-", words.lower()) + ".json")


@dataclass(frozen=True)
class Rule:
    """See the top of this file. us: measured time of the configuration when it was tuned."""

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
    """The range of sizes that a configuration tuned for `size` covers."""
    return [round(size / NEAR, 3), round(size * NEAR, 3)]


@cache
def card_of(device: torch.device) -> TunedDevice | None:
    """None if kernels are interpreted, or only compiled."""
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
    """The configuration, of class `config`, for a shape given by name. Cached by shape."""
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


def all_choices(device: torch.device) -> str:
    """What configurations depend on besides those that ship: the GPU, the versions of torch and
    Triton, the user's own rules."""
    card = card_of(device)
    return f"{card} {_own(card)}"


class StoredConfig:
    """A configuration whose format in files differs: one row for several classes."""

    @staticmethod
    def from_row(data: Mapping[str, Any]) -> Any:
        """As `build`; also raises ValueError if no kernel supports the configuration."""
        raise NotImplementedError

    def row(self) -> Any:
        """The dataclass to write."""
        raise NotImplementedError


def build(kind: type[C], data: Mapping[str, Any]) -> C:
    """The inverse of `asdict`, for nested dataclasses. Raises TypeError for other fields or types.
    Ignores the FORMER_FIELDS of `kind`, which users' files may still contain."""
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
        if get_origin(wanted) is UnionType:  # an optional dataclass
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
    """The user's rules for a GPU; unreadable files are skipped, with a line in the log."""
    if card is None or not card.file.exists():
        return {}
    try:
        return read(card.file)
    except ConfigError as error:
        log.warning("%s; the configurations that ship are used", error)
        return {}


@cache
def shipped(name: str) -> Rules:
    """The shipped rules for a GPU, else those of DEFAULT_CARD."""
    sets = {json.loads(path.read_text())["card"]: path for path in sorted(SHIPPED.glob("*.json"))}
    return read(sets.get(name, sets[DEFAULT_CARD]))


def read(path: Path) -> Rules:
    return {
        kernel: [Rule(rule["shape"], rule["config"], rule.get("us")) for rule in rules]
        for kernel, rules in _load(path).items()
    }


def _load(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The `kernels` of a file. Raises ConfigError if it is not a tuning file."""
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
    """Insert a rule at the top of the user's file for the GPU, replacing one for the same shape.
    The file is replaced atomically."""
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
    """JSON with one line per rule."""
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
