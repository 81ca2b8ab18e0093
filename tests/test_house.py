"""The order of the house: imports go down and never in a circle, no folder is crowded, a name means
one thing, some modules never see torch, and some things are nowhere to be found.

Each rule is a function over a package's sources, so that a planted fault can show that it fails.
`pytest tests/test_house.py -s -k figures` prints what it measures.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FLOORS = [
    ("config", "request", "errors"),
    ("platforms", "registry", "telemetry"),
    ("ops",),
    ("cache", "parallel"),
    ("layers",),
    ("models",),
    ("engine",),
    ("disagg", "text"),
    ("llm", "serve", "planner", "route"),
    ("cli", "bench", "__main__"),
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
TOP = len(FLOORS) - 1
MAX_FILES = 19  # __init__.py counted

# Modules of these names, and everything they import, must do without torch.
NO_TORCH = [
    "config",
    "request",
    "errors",
    "registry",
    "telemetry",
    "planner",
    "cache.spec",
    "cache.pages",
    "cache.page_parts",
    "cache.prefix",
    "cache.host_tier",
    "cache.events",
    "parallel.eplb",
    "route",
    "disagg.transports.library_process",
    "disagg.transports.bound_listeners",
    "disagg.transports.installed",
    "disagg.leases",
    "disagg.page_sources",
    "disagg.rank_messages",
    "engine.balance.initial",
    "engine.balance.moves",
    "engine.balance.policy",
    "engine.micro_batches.policy",
    "engine.micro_batches.report",
    "engine.micro_batches.step_times",
    "engine.config",
    "engine.scheduling",
    "engine.distributed.codec",
    "engine.distributed.channel",
    "engine.distributed.handshake",
    "engine.distributed.listener",
    "engine.distributed.network",
    "engine.distributed.worker_handle",
    "engine.distributed.launchers.placement",
    "engine.distributed.launchers.ray_actor",
    "engine.execution.draft_controller",
]
HEAVY = {"torch", "triton", "transformers"}


@functools.cache
def parsed(source: str) -> ast.Module:
    """Once, however many houses the source stands in."""
    return ast.parse(source)


@functools.cache
def statements(source: str) -> list[ast.Import | ast.ImportFrom | ast.ClassDef]:
    """Imports and classes anywhere in the text."""
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef)
    return [node for node in ast.walk(parsed(source)) if isinstance(node, kinds)]


@dataclass
class House:
    """The sources of a package by module name; `packages` are the names that are folders."""

    sources: Mapping[str, str]
    packages: frozenset[str]
    found: dict[str, list[str]] = field(default_factory=dict)  # imports, by module

    @staticmethod
    def read(root: Path) -> House:
        files = [path for path in sorted(root.rglob("*.py")) if "bundled" not in path.parts]
        packages = {House._name(path, root) for path in files if path.stem == "__init__"}
        sources = {House._name(path, root): path.read_text() for path in files}
        return House(sources, frozenset(packages))

    @staticmethod
    def _name(path: Path, root: Path) -> str:
        parts = path.relative_to(root.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {name: parsed(source) for name, source in self.sources.items()}

    @property
    def modules(self) -> list[str]:
        return [name for name in self.sources if "." in name]

    def imports(self, name: str) -> list[str]:
        """Absolute names of all that a module imports anywhere in its text, for type checkers
        too; `from p import m` counts as p.m where m is a module."""
        if name not in self.found:
            self.found[name] = list(self._imports(name))
        return self.found[name]

    def _imports(self, name: str) -> Iterator[str]:
        for node in statements(self.sources[name]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(name, node)
                for alias in node.names:
                    module = f"{base}.{alias.name}"
                    yield module if module in self.sources else base

    def _base(self, name: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = name.split(".")
        parts = parts[: len(parts) - node.level + (name in self.packages)]
        return ".".join([*parts, *([node.module] if node.module else [])])


def folder_of(module: str) -> str:
    """The folder or file of the package that a module belongs to."""
    return module.split(".")[1]


# ---- the rules: each yields its violations


def wrong_floors(house: House) -> Iterator[str]:
    """A floor imports from floors below it, or from its own folder. The lowest and the highest
    floor are one folder each in this respect, and `text` serves the rest of its neighbours."""
    for name in house.modules:
        here = folder_of(name)
        if here not in FLOOR_OF:
            yield f"{name} stands on no floor"
            continue
        floor = FLOOR_OF[here]
        for other in house.imports(name):
            if not other.startswith("rorqual.") or folder_of(other) == here:
                continue
            below = FLOOR_OF.get(folder_of(other), TOP)
            same = below == floor and floor in (0, TOP)
            if below > floor or (below == floor and not same):
                yield f"{name} (floor {floor}) imports {other} (floor {below})"


def circles(house: House) -> Iterator[str]:
    """Strongly connected modules (Tarjan), each circle once."""
    graph = {
        name: [other for other in house.imports(name) if other in house.sources and other != name]
        for name in house.sources
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[str] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                found.append(" <-> ".join(sorted(members)))

    for name in graph:
        if name not in index:
            visit(name)
    yield from found


def folder_sizes(house: House) -> dict[str, int]:
    sizes: dict[str, int] = defaultdict(int)
    for name in house.sources:
        sizes[name if name in house.packages else name.rpartition(".")[0]] += 1
    return dict(sizes)


def crowded_folders(house: House) -> Iterator[str]:
    for folder, size in folder_sizes(house).items():
        if size > MAX_FILES:
            yield f"{folder} holds {size} files; accepted: up to {MAX_FILES}"


def names_used_twice(house: House) -> Iterator[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for name, source in house.sources.items():
        for node in statements(source):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    yield from (
        f"class {name} is in {', '.join(modules)}"
        for name, modules in places.items()
        if len(modules) > 1
    )


def catch_all_files(house: House) -> Iterator[str]:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    yield from (name for name in house.sources if drawers & set(name.split(".")))


RULES: dict[str, Callable[[House], Iterator[str]]] = {
    "floors": wrong_floors,
    "circles": circles,
    "folders": crowded_folders,
    "class names": names_used_twice,
    "catch-all files": catch_all_files,
}
HOUSE = House.read(ROOT / "rorqual")

# Sources that break one rule each, added to those of the package.
PLANTED = {
    "floors": {"rorqual.ops.planted": "from rorqual.engine.engine import Engine\n"},
    "circles": {
        "rorqual.cache.planted": "from rorqual.cache import planted_too\n",
        "rorqual.cache.planted_too": "def f():\n    from rorqual.cache import planted\n",
    },
    "folders": {f"rorqual.layers.planted{i}": "" for i in range(MAX_FILES)},
    "class names": {"rorqual.layers.planted": "class Scheduler: ...\n"},
    "catch-all files": {"rorqual.layers.utils": ""},
}


@pytest.mark.parametrize("rule", RULES)
def test_the_house_is_in_order(rule: str) -> None:
    assert list(RULES[rule](HOUSE)) == []


@pytest.mark.parametrize("rule", RULES)
def test_a_planted_fault_is_found(rule: str) -> None:
    planted = House({**HOUSE.sources, **PLANTED[rule]}, HOUSE.packages)
    assert list(RULES[rule](planted))


def test_figures() -> None:
    """Prints what the rules measure."""
    sizes = folder_sizes(HOUSE)
    largest = max(sizes, key=lambda folder: sizes[folder])
    lines = [line for source in HOUSE.sources.values() for line in source.splitlines()]
    over = sum(len(line) > 100 for line in lines)
    print(f"\n{len(HOUSE.sources)} files, {len(lines)} lines, {over} of over 100 columns")
    print(f"{len(sizes)} folders, the fullest {largest} with {sizes[largest]} files")
    for rule, check in RULES.items():
        print(f"{rule}: {len(list(check(HOUSE)))} violations")
    assert len(HOUSE.modules) > 200
    assert over == 0


def test_the_test_sees_the_package() -> None:
    scheduler = set(HOUSE.imports("rorqual.engine.scheduling.scheduler"))
    assert "rorqual.cache.pages" in scheduler
    assert "rorqual.ops.reference" in set(HOUSE.imports("rorqual.ops.interface")), (
        "`from package import module` counts as the module"
    )


@pytest.mark.parametrize("name", HOUSE.modules)
def test_nobody_imports_the_package_itself(name: str) -> None:
    """`rorqual` re-exports for users; importing it from within would hide the floor."""
    if FLOOR_OF[folder_of(name)] < TOP:
        assert "rorqual" not in set(HOUSE.imports(name)), f"{name} imports rorqual itself"


def test_the_package_imports_request_and_serves_lazily() -> None:
    """At import time `rorqual` takes plain data alone; LLM is imported when asked for."""
    body = HOUSE.trees["rorqual"].body
    at_import = {node.module for node in body if isinstance(node, ast.ImportFrom)}
    named = {name for name in at_import if name and name.startswith("rorqual")}
    assert named == {"rorqual.request"}
    known = {"rorqual.request", "rorqual.llm.llm"}
    assert set(HOUSE.imports("rorqual")) - known <= {"__future__", "typing"}


# ---- no torch


def no_torch_modules() -> list[str]:
    wanted = [f"rorqual.{name}" for name in NO_TORCH]

    def is_wanted(name: str) -> bool:
        return any(name == item or name.startswith(f"{item}.") for item in wanted)

    return ["rorqual", *filter(is_wanted, HOUSE.modules)]


def test_plain_modules_reach_no_torch_by_any_import() -> None:
    """By the text: lazy imports inside functions count too."""
    for start in no_torch_modules()[1:]:
        seen = {start}
        todo = [start]
        while todo:
            name = todo.pop()
            for other in HOUSE.imports(name):
                assert other.split(".")[0] not in HEAVY, f"{start} reaches {other} through {name}"
                if other in HOUSE.sources and other != "rorqual" and other not in seen:
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
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
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


@pytest.mark.parametrize("name", list(HOUSE.sources))
def test_nothing_unsafe(name: str) -> None:
    """No pickle in any dress, no code from strings, no shell, no server open to the world by
    default."""
    assert not UNSAFE_MODULES & {other.split(".")[0] for other in HOUSE.imports(name)}
    for node in ast.walk(HOUSE.trees[name]):
        line = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                assert node.func.id not in UNSAFE_CALLS, f"{line} calls {node.func.id}"
            for keyword in node.keywords:
                on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                unsafe = keyword.arg in ("shell", "allow_pickle", "trust_remote_code")
                assert not (unsafe and on), f"{line} passes {keyword.arg}=True"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            named = (node.value.id, node.attr)
            assert named not in UNSAFE_ATTRIBUTES, f"{line} uses {'.'.join(named)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in ("0.0.0.0", "::"), f"{line} names {node.value}"


READERS = {"rorqual.config.model", "rorqual.config.otlp"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv"}


def below_eight() -> Iterable[str]:
    for name in HOUSE.modules:
        if FLOOR_OF.get(folder_of(name), 0) < 8 and name not in READERS:
            yield name


@pytest.mark.parametrize("name", below_eight())
def test_the_environment_is_read_on_floor_eight_or_in_config(name: str) -> None:
    for node in ast.walk(HOUSE.trees[name]):
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
        message = f"{name}:{getattr(node, 'lineno', 0)} reads the environment; config/ may"
        assert not attribute, message
        assert not imported, message
