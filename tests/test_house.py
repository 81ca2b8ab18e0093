"""The order of the house: imports go down, some modules never see torch, and some things are
nowhere to be found."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rorqual"

FLOORS = [
    ("config", "hf_config", "parallel_config", "request", "hardware", "errors"),
    ("platforms",),
    ("ops",),
    ("cache", "parallel"),
    ("layers",),
    ("models",),
    ("engine",),
    ("disagg",),
    ("serve", "perf"),
    ("cli", "__main__", "commands", "bench"),
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
TOP = len(FLOORS) - 1

# Modules of these names, and everything they import, must do without torch.
NO_TORCH = (
    "config",
    "hf_config",
    "parallel_config",
    "request",
    "errors",
    "hardware",
    "cache.spec",
    "cache.pages",
    "cache.prefix",
)
NO_TORCH += (
    "engine.scheduler",
    "engine.plan",
    "engine.config",
    "engine.group",
    "engine.wire",
    "engine.num_speculative_tokens",
    "parallel.eplb",
    "perf",
)
NO_TORCH += (
    "engine.link",
    "engine.handshake",
    "engine.listener",
    "engine.address",
    "engine.member",
)
NO_TORCH += ("engine.launchers.placement", "engine.launchers.starter")
HEAVY = {"torch", "triton", "transformers"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {
    name_of(path): ast.parse(path.read_text(), str(path))
    for path in sorted(PACKAGE.rglob("*.py"))
    if "bundled" not in path.parts
}
PACKAGES = {name_of(path) for path in PACKAGE.rglob("__init__.py")}
MODULES = [name for name in TREES if name != "rorqual"]


def imports_of(name: str) -> Iterator[str]:
    """Absolute names of everything a module imports anywhere in its text; `from p import m`
    counts as p.m where m is a module."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")[: len(name.split(".")) - node.level + (name in PACKAGES)]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in TREES else base


def house_name(module: str) -> str:
    """The folder or file of the house a module belongs to."""
    return module.split(".")[1]


def test_the_test_sees_the_package() -> None:
    assert len(MODULES) > 30
    assert "rorqual.cache.pages" in set(imports_of("rorqual.engine.scheduling.scheduler"))
    assert "rorqual.ops.reference" in set(imports_of("rorqual.ops.interface")), (
        "`from package import module` counts as the module"
    )


@pytest.mark.parametrize("name", MODULES)
def test_a_floor_imports_from_below_or_from_its_own_folder(name: str) -> None:
    house = house_name(name)
    assert house in FLOOR_OF, f"{name} stands on no floor"
    floor = FLOOR_OF[house]
    for other in imports_of(name):
        if not other.startswith("rorqual.") or house_name(other) == house:
            continue
        below = FLOOR_OF[house_name(other)]
        ends = floor in (0, TOP)  # these two floors are one house each
        assert below < floor or (ends and below == floor), (
            f"{name} (floor {floor}) imports {other} (floor {below})"
        )


@pytest.mark.parametrize("name", MODULES)
def test_nobody_imports_the_package_itself(name: str) -> None:
    """`rorqual` re-exports for users; importing it from within would hide the floor."""
    if FLOOR_OF[house_name(name)] < TOP:
        assert "rorqual" not in set(imports_of(name)), f"{name} imports rorqual itself"


def test_the_package_imports_request_and_serves_lazily() -> None:
    """At import time `rorqual` takes plain data alone; LLM is imported when asked for."""
    tree = TREES["rorqual"]
    at_import = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert {name for name in at_import if name and name.startswith("rorqual")} == {
        "rorqual.request"
    }
    assert set(imports_of("rorqual")) - {"rorqual.request", "rorqual.llm.llm"} <= {
        "__future__",
        "typing",
    }


# ---- no torch


def no_torch_modules() -> list[str]:
    wanted = [f"rorqual.{name}" for name in NO_TORCH]
    return [
        "rorqual",
        *(name for name in MODULES if any(name == w or name.startswith(w + ".") for w in wanted)),
    ]


def test_plain_modules_reach_no_torch_by_any_import() -> None:
    """By the text: lazy imports inside functions count too."""
    for start in no_torch_modules()[1:]:
        seen = {start}
        todo = [start]
        while todo:
            name = todo.pop()
            for other in imports_of(name):
                assert other.split(".")[0] not in HEAVY, f"{start} reaches {other} through {name}"
                if other in TREES and other != "rorqual" and other not in seen:
                    seen.add(other)
                    todo.append(other)


def test_plain_modules_load_no_torch() -> None:
    """By running: each is imported in turn, and torch must not have come along."""
    script = f"""
import importlib, sys
for name in {no_torch_modules()!r}:
    importlib.import_module(name)
    heavy = {HEAVY!r} & set(sys.modules)
    assert not heavy, f"import {{name}} loads {{sorted(heavy)}}"
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# ---- what is nowhere


UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "__import__"}
UNSAFE_ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("os", "system"),
    ("os", "popen"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
}


@pytest.mark.parametrize("name", list(TREES))
def test_nothing_unsafe(name: str) -> None:
    """No pickle in any dress, no code from strings, no shell, no server open to the world by
    default."""
    assert not UNSAFE_MODULES & {other.split(".")[0] for other in imports_of(name)}
    for node in ast.walk(TREES[name]):
        line = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                assert node.func.id not in UNSAFE_CALLS, f"{line} calls {node.func.id}"
            for keyword in node.keywords:
                on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                assert not (keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and on), (
                    f"{line} passes {keyword.arg}=True"
                )
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in UNSAFE_ATTRIBUTES, (
                f"{line} uses {node.value.id}.{node.attr}"
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in ("0.0.0.0", "::"), f"{line} names {node.value}"


ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv"}


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in MODULES
        if FLOOR_OF.get(house_name(name), 0) < 8 and name != "rorqual.config.model"
    ],
)
def test_the_environment_is_read_on_floor_eight_or_in_config(name: str) -> None:
    for node in ast.walk(TREES[name]):
        attribute = (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
            and node.attr in ENVIRONMENT
        )
        imported = (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(alias.name in ENVIRONMENT for alias in node.names)
        )
        reads = attribute or imported
        assert not reads, f"{name}:{node.lineno} reads the environment; config.py may"


def test_no_drawer_for_everything() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not [name for name in TREES if drawers & set(name.split("."))]
