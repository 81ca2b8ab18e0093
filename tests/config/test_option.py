"""Options of dataclasses: aliases, and what a field accepts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any

import pytest

from rorqual.config.option import by_field, check_options, option, options_of, same_option
from rorqual.config.parallel import ParallelConfig
from rorqual.engine.config import EngineConfig
from rorqual.errors import ConfigError
from rorqual.llm.llm import _engine_options


@dataclass
class Example:
    plain: int = 0
    kind: str = option("a", "Which.", choices=("a", "b"), aliases=("sort",))
    size: int | None = option(None, "How large.", at_least_one=True)
    count: int = option(1, "How many.", at_least_one=True)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class Several:
    names: tuple[str, ...] = option((), "Some names.")

    def __post_init__(self) -> None:
        check_options(self)


def test_aliases_become_fields() -> None:
    assert by_field(Example, {"sort": "b", "size": 1, "else": 2}) == {
        "kind": "b",
        "size": 1,
        "else": 2,
    }
    with pytest.raises(ConfigError, match="'kind' and 'sort' are two names"):
        by_field(Example, {"kind": "a", "sort": "a"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kind": "c"}, "kind='c' is not supported; accepted: a, b"),
        ({"size": 0}, "size=0 must be an integer of at least 1"),
        ({"size": True}, "size=True"),
        ({"count": None}, "count=None"),
        ({"count": 1.0}, r"count=1\.0"),
    ],
)
def test_what_an_option_does_not_accept(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Example(**given)  # type: ignore[arg-type]


@dataclass
class Ranges:
    seconds: float = option(1.0, "How long.", flags=("--how-long",), above=0, most=10)
    share: float | None = option(None, "What part.", least=0, most=1)
    tokens: int = option(1, "How many.", least=1)
    speed_of_each: tuple[float, ...] = option((), "How fast.", above=0)

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seconds": 0.0}, "--how-long=0.0 is out of range; accepted: above 0, up to 10"),
        ({"seconds": 11}, "--how-long=11 is out of range; accepted: above 0, up to 10"),
        ({"seconds": math.nan}, "--how-long=nan is not a finite number; accepted: above 0, up to"),
        ({"seconds": True}, "--how-long=True is out of range"),
        ({"seconds": None}, "--how-long=None is out of range"),
        ({"share": -0.5}, "--share=-0.5 is out of range; accepted: 0 to 1"),
        ({"tokens": 0}, "--tokens=0 is out of range; accepted: at least 1"),
        ({"tokens": math.inf}, "--tokens=inf is not a finite number; accepted: at least 1"),
        ({"speed_of_each": (1.0, math.nan)}, "--speed-of-each=nan is not a finite number"),
    ],
)
def test_a_number_out_of_range_is_named_by_its_flag(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        Ranges(**given)


def test_numbers_in_range_are_accepted() -> None:
    found = Ranges(10, 0, 1 << 40, (0.5, 2.0))
    assert (found.seconds, found.share, found.tokens) == (10, 0, 1 << 40)
    assert Ranges().share is None


def test_every_field_of_an_engine_is_an_option_but_its_model() -> None:
    names = {item.name for item in fields(EngineConfig)}
    assert names - set(options_of(EngineConfig)) == {"model"}
    aliases = [alias for item in options_of(EngineConfig).values() for alias in item.aliases]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & names


def test_sizes_mean_the_same_in_both() -> None:
    ours = options_of(EngineConfig)
    assert {name: ours[name] for name in options_of(ParallelConfig)} == options_of(ParallelConfig)
    assert same_option(ParallelConfig, "tp").default == 1


def test_aliases_are_keywords_of_an_llm() -> None:
    given = {"next_n": 1, "tensor_parallel_size": 2, "block_size": 16}
    assert _engine_options(given) == {"num_speculative_tokens": 1, "tp": 2, "page_size": 16}
    with pytest.raises(ConfigError, match="two names"):
        _engine_options({"next_n": 1, "num_speculative_tokens": 1})
    with pytest.raises(ConfigError, match="does not know the option 'next_m'"):
        _engine_options({"next_m": 1})


def test_aliases_reach_a_configuration() -> None:
    assert EngineConfig.from_dict({"model": "", "next_n": 2}).num_speculative_tokens == 2
    with pytest.raises(ConfigError, match="two names"):
        EngineConfig.from_dict({"model": "", "next_n": 2, "num_speculative_tokens": 2})


@pytest.mark.parametrize("given", [("a", "b"), ["a", "b"]])
def test_several_strings_come_as_a_list_too(given: Any) -> None:
    assert Several(names=given).names == ("a", "b")


def test_one_string_is_a_list_of_one() -> None:
    assert Several(names="a,b").names == ("a,b",)  # type: ignore[arg-type, comparison-overlap]
    servers = "127.0.0.1:1,127.0.0.1:2"
    config = EngineConfig("a model", experts=servers, expert_secret_file="a file")  # type: ignore[arg-type]
    assert config.experts == (servers,)
    assert config.expert_servers == (("127.0.0.1", 1), ("127.0.0.1", 2))
