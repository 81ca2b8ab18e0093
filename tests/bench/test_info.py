"""`rorqual info`: one screen with the published figures on it."""

from __future__ import annotations

import io
import json
import math
import shutil
from pathlib import Path

import pytest
from rich.console import Console

import rorqual
from rorqual.bench.info import count, info, render, size
from rorqual.config.hf import read_config
from rorqual.errors import ConfigError

SHAPES = Path(rorqual.__file__).parent / "shapes"


def screen(name: str, memory_gib: float | None = None, host_gib: float | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=120)
    config = read_config(json.loads((SHAPES / name / "config.json").read_text()))
    console.print(render(config, f"[{name}]", memory_gib, host_gib))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    "path", sorted(SHAPES.glob("*/config.json")), ids=lambda path: path.parent.name
)
def test_one_screen(path: Path) -> None:
    lines = screen(path.parent.name)
    assert len(lines) <= 40
    assert f"[{path.parent.name}]" in lines[0]


def test_deepseek_v3() -> None:
    lines = [line.split() for line in screen("deepseek-v3", memory_gib=1000)]
    assert ["total", "671.03", "B", "37.55", "B", "626.92", "GiB", "628.07", "GiB"] in lines
    assert ["A_CC_ME", "70,272", "15,279", "278.53", "K", "187.11", "M"] in lines
    assert ["AM_CC_ME", "70,272", "15,279", "278.53", "K", "598.15", "M"] in lines
    assert ["80", "GiB", "-", "-", "-", "-", "8.01", "M"] in lines
    assert any(line[:2] == ["1000", "GiB"] and line[2] != "-" for line in lines)


def test_host_memory_for_evicted_prefixes() -> None:
    """Ranks share heads, not latents."""
    tokens = [
        line.split()[1:]
        for name in ("qwen3-30b-a3b", "deepseek-v3")
        for line in screen(name, host_gib=64)
        if line.startswith("tokens ")
    ]
    assert tokens[0] == ["699.05", "K", "1.40", "M", "2.80", "M"]
    assert tokens[1] == ["977.91", "K"] * 5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory_gib": math.nan}, "--memory=nan is out of range; accepted: above 0, up to 16384"),
        ({"memory_gib": -1.0}, "--memory=-1.0 is"),
        ({"memory_gib": 0.0}, "--memory=0.0 is"),
        ({"memory_gib": math.inf}, "--memory=inf is"),
        ({"host_gib": math.nan}, "--kv-host-memory=nan is out of range; accepted: 0 to 16384"),
        ({"host_gib": -1.0}, "--kv-host-memory=-1.0 is"),
        ({"host_gib": 16385.0}, "--kv-host-memory=16385.0 is"),
    ],
)
def test_sizes_of_memory_that_nothing_has(given: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        info(None, console=Console(file=io.StringIO()), **given)  # type: ignore[arg-type]


def test_no_host_memory_is_accepted() -> None:
    console = Console(file=io.StringIO(), width=120)
    info(None, memory_gib=16384.0, console=console, host_gib=0.0)
    assert isinstance(console.file, io.StringIO)
    assert "evicted" not in console.file.getvalue()


def test_from_a_folder(tmp_path: Path) -> None:
    shutil.copy(SHAPES / "qwen3-30b-a3b" / "config.json", tmp_path / "config.json")
    console = Console(file=io.StringIO(), width=120)
    info(str(tmp_path), console=console)
    assert isinstance(console.file, io.StringIO)
    assert "30.53 B" in console.file.getvalue()


def test_units() -> None:
    assert [count(value) for value in (7, 1234, 1_234_567, 671.03e9)] == [
        "7",
        "1.23 K",
        "1.23 M",
        "671.03 B",
    ]
    assert [size(value) for value in (7, 2048, 3 * 2**29)] == ["7 B", "2.00 KiB", "1.50 GiB"]
