"""The structure a request asks for, by any of the parameters clients use, as one
StructuredOutput."""

from __future__ import annotations

import json
import re
from typing import Any

from rorqual.errors import RequestError
from rorqual.request import StructuredOutput
from rorqual.serve.errors import bad_request
from rorqual.serve.http.protocol import (
    ChatRequest,
    CompletionRequest,
    ResponseFormat,
    Sampling,
    StructuredOutputs,
)
from rorqual.text.grammar import check_size
from rorqual.text.grammar_limits import GrammarLimits
from rorqual.text.schemas.enforced import enforced

SCHEMA_DEPTH = 64
OF_TOOL = re.compile(r"tools\.\d+\.function\.parameters")  # as an error begins; see PARAMETERS


def structure_of(
    body: ChatRequest | CompletionRequest, limits: GrammarLimits
) -> tuple[str | None, StructuredOutput | None]:
    """And its parameter. At most one may be given; sizes are checked here, the rest when it is
    compiled."""
    found = [
        *_from_format(body.response_format),
        *_from_guided(body),
        *_from_structured(body.structured_outputs),
    ]
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise bad_request(
            f"only one structure can be enforced, these were given: {names}", found[1][0]
        )
    if not found:
        return None, None
    name, structure = found[0]
    if structure.kind == "choice" and not all(json.loads(structure.value)):
        raise bad_request("a choice must not be empty", name)
    _check_depth(name, structure)
    try:
        check_size(structure, limits)
    except RequestError as error:
        raise bad_request(str(error), name) from None
    check_schema(name, structure)
    return name, structure


def check_schema(name: str, structure: StructuredOutput) -> None:
    """Check that it can be enforced; `name` is its parameter, unless the error begins with a
    tool's."""
    try:
        enforced(structure)
    except RequestError as error:
        tool = OF_TOOL.match(str(error))
        raise bad_request(str(error), tool[0] if tool else name) from None


def _from_format(given: ResponseFormat | None) -> list[tuple[str, StructuredOutput]]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [("response_format", StructuredOutput("json_object"))]
    if given.json_schema is None or given.json_schema.schema_ is None:
        raise bad_request(
            "response_format of type json_schema needs json_schema.schema", "response_format"
        )
    return [("response_format", StructuredOutput("json_schema", _dump(given.json_schema.schema_)))]


def _from_guided(body: Sampling) -> list[tuple[str, StructuredOutput]]:
    found = []
    if body.guided_json is not None:
        found.append(("guided_json", StructuredOutput("json_schema", _dump(body.guided_json))))
    if body.guided_regex is not None:
        found.append(("guided_regex", StructuredOutput("regex", body.guided_regex)))
    if body.guided_choice is not None:
        found.append(("guided_choice", StructuredOutput("choice", _dump(body.guided_choice))))
    if body.guided_grammar is not None:
        found.append(("guided_grammar", StructuredOutput("grammar", body.guided_grammar)))
    return found


def _from_structured(given: StructuredOutputs | None) -> list[tuple[str, StructuredOutput]]:
    if given is None:
        return []
    where = "structured_outputs"
    for name in ("disable_additional_properties", "whitespace_pattern", "structural_tag"):
        value = getattr(given, name)
        if value is not None and value is not False:
            raise bad_request(f"{where}.{name} is not supported here", f"{where}.{name}")
    found = []
    if given.json_ is not None:
        found.append((f"{where}.json", StructuredOutput("json_schema", _dump(given.json_))))
    if given.regex is not None:
        found.append((f"{where}.regex", StructuredOutput("regex", given.regex)))
    if given.choice is not None:
        found.append((f"{where}.choice", StructuredOutput("choice", _dump(given.choice))))
    if given.grammar is not None:
        found.append((f"{where}.grammar", StructuredOutput("grammar", given.grammar)))
    if given.json_object:
        found.append((f"{where}.json_object", StructuredOutput("json_object")))
    return found


def _dump(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _check_depth(name: str, structure: StructuredOutput) -> None:
    """Limit the nesting of a schema's brackets, counted without parsing it."""
    if structure.kind != "json_schema":
        return
    depth = deepest = 0
    for char in structure.value:
        depth += (char in "{[") - (char in "}]")
        deepest = max(deepest, depth)
    if deepest > 2 * SCHEMA_DEPTH:
        raise bad_request(
            f"the schema nests {deepest} deep; accepted: at most {2 * SCHEMA_DEPTH}", name
        )


def as_format(structure: StructuredOutput) -> dict[str, Any]:
    """The structure as a part of a structural tag."""
    if structure.kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}, "max_whitespace_cnt": 1}
    if structure.kind == "json_schema":
        try:
            schema = json.loads(structure.value)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"the schema is not valid JSON: {error}") from None
        return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
    if structure.kind == "regex":
        return {"type": "regex", "pattern": structure.value}
    if structure.kind == "choice":
        return {
            "type": "or",
            "elements": [
                {"type": "const_string", "value": choice} for choice in json.loads(structure.value)
            ],
        }
    return {"type": "grammar", "grammar": structure.value}


def after_thinking(form: dict[str, Any]) -> dict[str, Any]:
    """Free text up to the end of the reasoning, then `form`."""
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
    return {"type": "sequence", "elements": [thought, form]}


def tag(form: dict[str, Any]) -> StructuredOutput:
    return StructuredOutput(
        "structural_tag", json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False)
    )
