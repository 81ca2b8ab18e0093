"""Digests of the kernels' source, to detect tables of times that are older than their kernels. No
torch; no kernel is imported.

A family is a set of modules of `ops/triton` with everything that they import from there, the
functions of the backend that choose between them, and their rules in the shipped tuning files. Only
the syntax tree counts, without docstrings and with local names numbered in order of appearance:
comments, layout and renamed locals change nothing. Parameters keep their names, since kernels are
called by them. The measured time of a tuning rule is not included, and of the module that reads
rules only the functions that choose between them.

Not covered: torch, Triton, the driver and the user's own tuning files; `rorqual bench calibrate
--full` records the first three and whether there is one of the last.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rorqual.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[2]
KERNELS = "rorqual.ops.triton."
BACKEND = "ops/triton/backend.py"
QUANTIZED_BACKEND = "ops/triton/quantized/backend.py"
RULES = "ops/triton/runtime/tuning.py"
CHOOSES_RULES = ("config_for", "_chosen", "fits", "_within", "shipped")


@dataclass(frozen=True)
class Family:
    """modules: where the kernels begin. chosen_by: functions of the backend that launch them or
    another kernel instead; quantized_by: those of the quantized backend. tuned: names in the tuning
    files."""

    modules: tuple[str, ...]
    chosen_by: tuple[str, ...]
    tuned: tuple[str, ...] = ()
    quantized_by: tuple[str, ...] = ()


FAMILIES: Mapping[str, Family] = {
    "gemm_bfloat16": Family(
        ("gemm/gemv.py", "gemm/skinny_gemm.py"), ("linear",), ("linear_small", "linear_skinny")
    ),
    "gemm_fp8": Family(
        ("gemm/fp8_gemm.py", "quantized/linear.py"),  # the latter for one token
        ("linear", "_fits_fp8", "_rounds_itself"),
        ("linear_fp8", "linear_quantized"),
    ),
    "gemm_int4": Family(
        ("quantized/linear.py", "gemm/int4_gemm.py", "gemm/int4.py"),
        ("linear",),
        ("linear_quantized", "linear_int4"),
        ("linear", "prepare_weight"),
    ),
    "bmm": Family(("gemm/per_head_gemm.py",), ("heads_matmul",)),
    "experts": Family(
        ("moe/grouped_gemm.py", "moe/small_batch.py"),
        ("experts", "routed_experts", "experts_deferred", "_fits_experts"),
        ("experts", "experts_direct"),
    ),
    "experts_fp8": Family(
        ("moe/grouped_gemm.py", "moe/small_batch.py", "quantized/experts.py"),
        ("experts", "routed_experts", "experts_deferred", "_fits_experts"),
        ("experts", "experts_direct", "experts_quantized"),
    ),
    "experts_int4": Family(
        ("quantized/experts.py", "moe/grouped_gemm.py", "moe/small_batch.py"),
        ("experts", "routed_experts", "experts_deferred", "_fits_experts"),
        ("experts_quantized", "experts", "experts_direct"),
        ("experts", "experts_deferred", "prepare_experts"),
    ),
    "mla_decode": Family(
        ("attention/mla_decode.py",), ("latent_attention", "_mla_decode"), ("mla_decode",)
    ),
    "gqa_decode": Family(
        ("attention/gqa_decode.py",), ("attention", "_gqa_decode"), ("gqa_decode",)
    ),
    "mla_prefill": Family(("attention/prefill.py",), ("decompressed_attention",), ("prefill",)),
    "gqa_prefill": Family(("attention/prefill.py",), ("attention",), ("prefill",)),
    "between": Family(
        (
            "rowwise/norm.py",
            "rowwise/quantize.py",
            "rowwise/embedding.py",
            "attention/rope_kv_write.py",
            "moe/router_gemm.py",
            "moe/topk.py",
            "sampling/argmax.py",
        ),
        (
            "norm",
            "add_norm",
            "sum_add_norm",
            "swiglu",
            "rope",
            "gqa_prologue",
            "mla_prologue",
            "mla_down",
            "mla_up",
            "router",
            "route",
        ),
    ),
}


def digests(package: Path = PACKAGE) -> dict[str, str]:
    """By family, of the sources under `package` (the folder of rorqual's modules)."""
    return {name: family_digest(name, package) for name in FAMILIES}


@lru_cache(maxsize=1)
def present() -> Mapping[str, str]:
    """Of the kernels that this process would run."""
    return digests()


def family_digest(name: str, package: Path = PACKAGE) -> str:
    family = FAMILIES[name]
    found = hashlib.sha256()
    for path in _closure(package, family.modules):
        module = path.relative_to(package).as_posix()
        found.update(f"{module}\n".encode())
        source = _source(path)
        chosen = module == RULES
        parts = [source.functions[name] for name in CHOOSES_RULES] if chosen else [source.words]
        found.update("\n".join(parts).encode())
    for backend, names in ((BACKEND, family.chosen_by), (QUANTIZED_BACKEND, family.quantized_by)):
        for words in _chosen(package, backend, names):
            found.update(words.encode())
    found.update(json.dumps(_rules(package, family.tuned), sort_keys=True).encode())
    return found.hexdigest()[:16]


# ---- which files


@dataclass(frozen=True)
class Source:
    """Digest input of a file: its serialized tree, the modules it may import, and the serialized
    trees of its functions by name."""

    words: str
    imports: tuple[str, ...]
    functions: Mapping[str, str]


def _source(path: Path) -> Source:
    try:
        return _read(path.read_text())
    except (OSError, SyntaxError) as error:
        raise ConfigError(f"the kernels' source cannot be read: {path}: {error}") from None


@lru_cache(maxsize=256)
def _read(text: str) -> Source:
    """Families share files, and most of a changed tree is as it was."""
    tree = ast.parse(text)
    functions = {
        node.name: "\n".join(_serialized(node, ()))
        for top in tree.body
        for node in (top.body if isinstance(top, ast.ClassDef) else [top])
        if isinstance(node, ast.FunctionDef)
    }
    return Source("\n".join(_serialized(tree, ())), tuple(_imported(tree)), functions)


def _closure(package: Path, modules: Iterable[str]) -> list[Path]:
    """The modules and what they import of the kernels, at any place and depth."""
    root = package / "ops" / "triton"
    todo = [root / module for module in modules]
    found: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            paths = (root / f"{name.replace('.', '/')}.py" for name in _source(path).imports)
            todo += [path for path in paths if path.is_file()]
    return sorted(found)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Names below the kernels' package, whether of modules or of what is in them."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return (name.removeprefix(KERNELS) for name in names if name.startswith(KERNELS))


def _chosen(package: Path, backend: str, names: Iterable[str]) -> Iterator[str]:
    functions = _source(package / backend).functions if names else {}
    for name in names:
        if name not in functions:
            raise ConfigError(
                f"{backend} has no function {name}; planner/timing/digests.py names it as what "
                "chooses kernels"
            )
        yield functions[name]


def _rules(package: Path, kernels: Iterable[str]) -> dict[str, Any]:
    found = {}
    for path in sorted((package / "ops" / "triton" / "tuned").glob("*.json")):
        rules = json.loads(path.read_text())["kernels"]
        for kernel in kernels:
            found[f"{path.name} {kernel}"] = [
                {key: value for key, value in rule.items() if key != "us"}
                for rule in rules.get(kernel, [])
            ]
    return found


# ---- a tree as words


Scope = Mapping[str, str]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
SKIPPED = {"ctx", "kind", "type_comment", "type_ignores"}


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _serialized(node: ast.AST, scopes: tuple[Scope, ...]) -> Iterator[str]:
    """The tree in words, the same for every Python that parses it alike."""
    if isinstance(node, ast.Expr) and _is_text(node.value):
        return  # a docstring
    yield type(node).__name__
    inner = (*scopes, _locals(node)) if isinstance(node, FUNCTIONS) else scopes
    for field, value in ast.iter_fields(node):
        if field in SKIPPED or value is None or value == []:
            continue
        yield f"{field}:"
        if field in ("id", "name") and isinstance(node, ast.Name | ast.ExceptHandler):
            yield _named(str(value), inner)
            continue
        if field == "name" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield _named(str(value), scopes)
            continue
        # decorators, defaults and annotations are read outside
        seen = inner if field == "body" else scopes
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.AST):
                yield from _serialized(item, seen)
            else:
                yield repr(item)
    yield "."


def _named(name: str, scopes: tuple[Scope, ...]) -> str:
    for depth in range(len(scopes) - 1, -1, -1):
        if name in scopes[depth]:
            return scopes[depth][name].format(depth=depth)
    return name


def _locals(function: ast.AST) -> Scope:
    """Replacement of each name that the function binds: parameters and imports are unchanged,
    `global` and `nonlocal` names are not local."""
    assert isinstance(function, FUNCTIONS)
    given = function.args
    kept = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    kept += [one for one in (given.vararg, given.kwarg) if one]
    scope = {one.arg: one.arg for one in kept}
    outer: set[str] = set()
    bound: list[str] = []
    for node in _own_nodes(function):
        if isinstance(node, ast.Global | ast.Nonlocal):
            outer.update(node.names)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                scope[name] = name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.append(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.ExceptHandler) and node.name
        ):
            bound.append(str(node.name))
    for name in dict.fromkeys(bound):
        if name not in scope and name not in outer:
            scope[name] = f"local {{depth}}.{len(scope)}"
    return scope


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """In the order of the source, without the insides of functions and classes within."""
    body = function.body if isinstance(function, FUNCTIONS) else []
    todo = list(reversed(body if isinstance(body, list) else [body]))
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            todo += reversed(list(ast.iter_child_nodes(node)))
