"""Commands made from dataclasses: their flags, and what the function behind them gets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from rorqual.cli import options
from rorqual.cli.app import app
from rorqual.cli.options import Flags, Given, with_options
from rorqual.config.option import FieldOption, option, options_of
from rorqual.engine.config import EngineConfig


@dataclass
class Example:
    hidden: int = 0
    size: int = option(3, "How large.", aliases=("large",))
    switch: bool = option(True, "On or off.")
    rates: tuple[float, ...] = option((), "Shares.")
    counts: tuple[int, ...] | None = option(None, "Numbers.")
    names: tuple[str, ...] = option((), "Texts.", flags=("--name", "-x"))
    place: Path | None = option(None, "Where.", env="EXAMPLE_PLACE")


def made(*words: str, flags: type | Flags = Example) -> tuple[dict[str, Any], str]:
    """(what the function gets, what is printed)."""
    got: dict[str, Any] = {}
    example = typer.Typer(rich_markup_mode=None)

    @example.command()
    @with_options(given=flags)
    def command(given: Given, own: str = "mine") -> None:
        """Does nothing."""
        got.update(given, own=own)

    done = CliRunner().invoke(example, list(words), env={"COLUMNS": "200"})
    assert done.exit_code == (0 if got or "--help" in words else 2), done.output
    return got, done.output


def test_a_flag_that_is_not_given_is_not_passed() -> None:
    assert made()[0] == {"own": "mine"}
    assert made("--size", "3")[0] == {"size": 3, "own": "mine"}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("--large 4", {"size": 4}),
        ("--no-switch", {"switch": False}),
        ("--switch", {"switch": True}),
        ("--rates 0.5,1", {"rates": (0.5, 1.0)}),
        ("--counts 1,2", {"counts": (1, 2)}),
        ("--name a -x b", {"names": ("a", "b")}),
        ("--place here", {"place": Path("here")}),
    ],
)
def test_a_flag_becomes_a_field(words: str, found: dict[str, Any]) -> None:
    assert made(*words.split())[0] == {**found, "own": "mine"}


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_PLACE", "there")
    assert made()[0]["place"] == Path("there")
    assert made("--place", "here")[0]["place"] == Path("here")


@pytest.mark.parametrize("words", ["--hidden 1", "--rates a,b", "--counts -1", "--size x"])
def test_mistakes_end_with_two(words: str) -> None:
    assert made(*words.split())[0] == {}


def test_the_help_shows_the_default_of_the_command() -> None:
    assert "How large.  [default: (3)]" in made("--help")[1]
    less = Flags(Example, without=("rates",), defaults={"size": "what it needs"})
    _, shown = made("--help", flags=less)
    assert "How large.  [default: (what it needs)]" in shown
    assert "--counts" in shown
    assert "--rates" not in shown
    assert "--size" not in made("--help", flags=Flags(Example, only=("rates",)))[1]


def spellings(name: str, item: FieldOption) -> tuple[str, ...]:
    return item.flags or tuple(f"--{it.replace('_', '-')}" for it in (name, *item.aliases))


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench offline"])
def test_every_option_of_an_engine_is_a_flag(command: str) -> None:
    found: Any = get_command(app)
    for word in command.split():
        found = found.commands[word]
    flags = [flag for item in found.params for flag in (*item.opts, *item.secondary_opts)]
    assert len(flags) == len(set(flags))
    for name, item in options_of(EngineConfig).items():
        assert set(spellings(name, item)) <= set(flags)


def test_functions_of_commands_are_short() -> None:
    for path in Path(options.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name}"


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, part in getattr(command, "commands", {}).items():
        yield from commands(part, f"{name} {word}".strip())


def plain(text: str) -> str:
    """Without the lines of boxes, backslashes and spaces, which depend on the width."""
    return re.sub(r"[\s\\\u2500-\u257f]", "", text)


@pytest.mark.parametrize("name", [name for name, _ in commands(get_command(app))])
def test_a_command_s_help_is_shown_whole(name: str) -> None:
    """Also what stands in brackets, which rich takes for markup."""
    done = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.exception
    shown = plain(done.output)
    command = dict(commands(get_command(app)))[name]
    texts = [parameter.help or "" for parameter in command.params]
    for text in texts:
        for found in re.findall(r"\[[^\]]*\]", text):
            assert plain(found) in shown, text


@pytest.mark.parametrize("words", ["tp=[1", "tp={", "tp=2001-99-99", "tp=" + 2000 * "[", "tp"])
def test_a_setting_that_is_no_yaml_is_named(words: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        options._settings(["dp=1", words])
    message = str(caught.value)
    assert words[:20] in message
    assert len(message) < 300
    assert message.isprintable()


def test_settings_are_yaml() -> None:
    found = options._settings(["tp=2", "experts=[a, b]", "case_name=a=b", "num_pages="])
    assert found == {"tp": 2, "experts": ("a", "b"), "case_name": "a=b", "num_pages": None}
