"""Dataclass fields that users may set. A field defines its help, aliases and accepted values once,
for recipes, keyword arguments and flags."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rorqual.errors import ConfigError

# a time limit that nobody reaches, and that every clock and timer can count
MOST_SECONDS = 1_000_000_000


@dataclass(frozen=True)
class FieldOption:
    """aliases: other names in recipes, keyword arguments and, with dashes, as flags. flags: all
    flags, if not derived from the names. group: heading in a command's help. env: variable read if
    the flag is not given. choices: accepted values. at_least_one: an integer above 0 (or None, if
    that is the default). above, least, most: the range of a number, or of each of several, which
    must be finite then. output: a file that the command writes."""

    help: str
    group: str | None = None
    aliases: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    env: str | None = None
    choices: tuple[str, ...] = ()
    at_least_one: bool = False
    above: float | None = None
    least: float | None = None
    most: float | None = None
    output: bool = False

    def flag(self, name: str) -> str:
        """How a user gives the option on a command line. name: the field's."""
        return self.flags[0] if self.flags else f"--{name.replace('_', '-')}"

    @property
    def is_bounded(self) -> bool:
        return self.above is not None or self.least is not None

    @property
    def range(self) -> str:
        """The accepted numbers, in words."""
        ends = "" if self.most is None else f"{self.most:,}"
        if self.above is not None:
            return f"above {self.above:,}" + (f", up to {ends}" if ends else "")
        return f"{self.least:,} to {ends}" if ends else f"at least {self.least:,}"

    def accepts(self, number: Any) -> bool:
        """Whether it is in the range. What is not a number is in none, nor is an infinite one."""
        if isinstance(number, bool) or not isinstance(number, int | float):
            return False
        above = self.above is None or number > self.above
        enough = self.least is None or number >= self.least
        most = self.most is None or number <= self.most
        return above and enough and most and number < math.inf


def option(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that is an option; `more`: other fields of FieldOption."""
    return dataclasses.field(default=default, metadata={"option": FieldOption(help, **more)})


def same_option(cls: type, name: str) -> Any:
    """A field with the default and the help of the same field of another dataclass."""
    (found,) = (item for item in dataclasses.fields(cls) if item.name == name)
    return dataclasses.field(default=found.default, metadata=found.metadata)


def options_of(cls: type) -> dict[str, FieldOption]:
    """The options by field name."""
    return {
        item.name: item.metadata["option"]
        for item in dataclasses.fields(cls)
        if "option" in item.metadata
    }


def by_field(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with aliases replaced by field names. Unknown names are kept. Raises ConfigError if an
    option is given under two names."""
    fields = {alias: name for name, item in options_of(cls).items() for alias in item.aliases}
    found: dict[str, Any] = {}
    given: dict[str, str] = {}
    for key, value in data.items():
        name = fields.get(key, key)
        if name in found:
            raise ConfigError(
                f"{given[name]!r} and {key!r} are two names of one option; accepted: one of them"
            )
        found[name] = value
        given[name] = key
    return found


def check_options(config: Any) -> None:
    """Raises ConfigError for the first value that its option does not accept. An option of several
    strings also takes a list, as recipes have it, or a single string."""
    for item in dataclasses.fields(config):
        accepted = item.metadata.get("option")
        if accepted is None:
            continue
        value = getattr(config, item.name)
        if item.type == "tuple[str, ...]" and isinstance(value, str | list):
            value = (value,) if isinstance(value, str) else tuple(value)
            object.__setattr__(config, item.name, value)
        if accepted.choices and value not in accepted.choices:
            raise ConfigError(
                f"{item.name}={value!r} is not supported; accepted: {', '.join(accepted.choices)}"
            )
        if accepted.at_least_one and not (value is None and item.default is None):
            check_positive(item.name, value)
        if accepted.is_bounded and not (value is None and item.default is None):
            check_range(item.name, value, accepted)


def check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be an integer of at least 1")


def check_range(name: str, value: Any, accepted: FieldOption) -> None:
    """name: the field's."""
    for number in value if isinstance(value, tuple) else (value,):
        if not accepted.accepts(number):
            endless = isinstance(number, float) and not math.isfinite(number)
            what = "not a finite number" if endless else "out of range"
            raise ConfigError(
                f"{accepted.flag(name)}={number} is {what}; accepted: {accepted.range}"
            )
