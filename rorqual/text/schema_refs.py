"""What xgrammar ignores in a schema or a regular expression, which would leave that part
unconstrained: references out of the schema, and lookarounds in patterns."""

from __future__ import annotations

import json
from typing import Any

from rorqual.errors import RequestError, quoted
from rorqual.request import StructuredOutput

MAPS = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
VALUES = frozenset(("const", "enum", "default", "examples"))  # data, not schemas


def check_refs(structure: StructuredOutput) -> None:
    """Raises RequestError for a schema with an unsupported `$ref`."""
    if structure.kind not in ("json_schema", "structural_tag"):
        return
    try:
        root = json.loads(structure.value)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"the {structure.kind} cannot be compiled: it is not valid JSON: {error}"
        ) from None
    for ref in _refs(root):
        if ref != "#" and not ref.startswith("#/"):
            raise RequestError(
                f"the schema refers to {quoted(ref)}; accepted as $ref: '#', and paths within the "
                "schema that begin with '#/'"
            )


LOOKAROUNDS = ("(?=", "(?!", "(?<=", "(?<!")


def check_patterns(structure: StructuredOutput) -> None:
    """Raises RequestError for a pattern with a lookaround. The text is valid JSON where it has to
    be (check_refs)."""
    patterns = [structure.value] if structure.kind == "regex" else []
    if structure.kind in ("json_schema", "structural_tag"):
        patterns = _patterns(json.loads(structure.value))
    for pattern in patterns:
        found = _lookaround(pattern)
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


def _patterns(root: Any) -> list[str]:
    """Of a schema, at any depth: values of `pattern`, and names in `patternProperties`."""
    found = []
    schemas = [root]
    while schemas:
        schema = schemas.pop()
        if isinstance(schema, list):
            schemas.extend(schema)
        if not isinstance(schema, dict):
            continue
        for key, value in schema.items():
            if key == "pattern" and isinstance(value, str):
                found.append(value)
            if key == "patternProperties" and isinstance(value, dict):
                found.extend(value)
            if key in MAPS and isinstance(value, dict):
                schemas.extend(value.values())
            elif key not in VALUES:
                schemas.append(value)
    return found


def _refs(root: Any) -> list[str]:
    found = []
    schemas = [root]
    while schemas:
        schema = schemas.pop()
        if isinstance(schema, list):
            schemas.extend(schema)
        if not isinstance(schema, dict):
            continue
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):
                found.append(value)
            elif key in MAPS and isinstance(value, dict):
                schemas.extend(value.values())
            elif key not in VALUES:
                schemas.append(value)
    return found
