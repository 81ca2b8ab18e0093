"""What xgrammar ignores in a schema or a regular expression, which would leave that part
unconstrained: references out of the schema, and lookarounds in patterns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rorqual.errors import RequestError, quoted
from rorqual.request import StructuredOutput

MAPS = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
VALUES = frozenset(("const", "enum", "default", "examples"))  # data, not schemas


LOOKAROUNDS = ("(?=", "(?!", "(?<=", "(?<!")


def check_enforced(structure: StructuredOutput) -> None:
    """Raises RequestError for a schema with an unsupported `$ref`, and for a pattern with a
    lookaround."""
    if structure.kind == "regex":
        _check_pattern(structure.value)
    if structure.kind not in ("json_schema", "structural_tag"):
        return
    try:
        root = json.loads(structure.value)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"the {structure.kind} cannot be compiled: it is not valid JSON: {error}"
        ) from None
    schemas = list(_schemas(root))
    for schema in schemas:
        _check_ref(schema.get("$ref"))
    for schema in schemas:
        _check_pattern(schema.get("pattern"))
        named = schema.get("patternProperties")
        for pattern in named if isinstance(named, dict) else ():
            _check_pattern(pattern)


def _schemas(root: Any) -> Iterator[dict[str, Any]]:
    """A schema and those in it, at any depth."""
    left = [root]
    while left:
        schema = left.pop()
        if isinstance(schema, list):
            left.extend(schema)
        if not isinstance(schema, dict):
            continue
        yield schema
        for key, value in schema.items():
            if key in MAPS and isinstance(value, dict):
                left.extend(value.values())
            elif key not in VALUES:
                left.append(value)


def _check_ref(ref: Any) -> None:
    if isinstance(ref, str) and ref != "#" and not ref.startswith("#/"):
        raise RequestError(
            f"the schema refers to {quoted(ref)}; accepted as $ref: '#', and paths within the "
            "schema that begin with '#/'"
        )


def _check_pattern(pattern: Any) -> None:
    found = _lookaround(pattern) if isinstance(pattern, str) else None
    if found:
        raise RequestError(
            f"the pattern {quoted(pattern)} contains {found!r}; accepted: patterns without "
            "lookahead and lookbehind"
        )


def _lookaround(pattern: str) -> str | None:
    """The first one outside character classes and escapes."""
    place = 0
    inside = False
    while place < len(pattern):
        one = pattern[place]
        if one == "\\":
            place += 2
            continue
        if inside:
            inside = one != "]"
        elif one == "[":
            inside = True
            # a bracket that comes first in a class is part of it
            place += pattern[place + 1 : place + 2] == "^"
            place += pattern[place + 1 : place + 2] == "]"
        else:
            found = next((it for it in LOOKAROUNDS if pattern.startswith(it, place)), None)
            if found:
                return found
        place += 1
    return None
