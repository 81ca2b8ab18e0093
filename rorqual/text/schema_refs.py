"""References of a JSON schema. xgrammar resolves those within the schema; it ignores any other,
which would leave that part unconstrained."""

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
