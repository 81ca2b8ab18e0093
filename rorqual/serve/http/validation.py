"""Validation errors of a body in the API's terms: the parameter at fault and its accepted values,
without pydantic's details."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rorqual.errors import quoted
from rorqual.serve.errors import ApiError, bad_request

# Fields that accept several types. pydantic adds the name of the type it tried after the field's
# own; that name is not part of the request.
FORMS = {
    "prompt": "a string, an array of strings, an array of token ids or an array of such arrays",
    "stop": "a string or an array of strings",
    "guided_json": "an object or a string",
    "structured_outputs.json": "an object or a string",
    "kv_transfer_params": "an object or an array of objects, one for each prompt",
    "messages.content": "a string or an array of text parts",
    "tool_choice": "'none', 'auto', 'required', a function or a set of allowed ones",
}
WORDS = {
    "missing": "is required",
    "string_type": "should be a string",
    "int_type": "should be an integer",
    "float_type": "should be a number",
    "bool_type": "should be true or false",
    "list_type": "should be an array",
    "dict_type": "should be an object",
    "model_type": "should be an object",
    "model_attributes_type": "should be an object",
    "none_required": "should be null",
}
BOUNDS = {
    "less_than": "lt",
    "less_than_equal": "le",
    "greater_than": "gt",
    "greater_than_equal": "ge",
}
MISMATCHES = frozenset((*WORDS, "literal_error")) - {"missing"}
Error = dict[str, Any]


def invalid_body(errors: Sequence[Error]) -> ApiError:
    """The first error. For a field that accepts several types: the error of the type most likely
    meant."""
    first = errors[0]
    loc = tuple(first["loc"][1:])  # after "body"
    if first["type"] == "json_invalid":
        where = loc[0] if loc else 0
        return bad_request(f"the body is not valid JSON: {first['ctx']['error']} at byte {where}")
    field, form = _field(loc)
    if form is None:
        return wrong_value(first, field)
    union = loc[: form + 1]
    meant = _meant([error for error in errors if tuple(error["loc"][1:])[:form] == union[:form]])
    takes = FORMS[_name(loc[:form])]
    whole, _ = _field(loc[:form])
    if meant is None:
        return bad_request(f"{whole}: should be {takes}", whole)
    found = wrong_value(meant, _field(tuple(meant["loc"][1:]))[0])
    return bad_request(f"{found.message} ({whole} takes {takes})", found.param)


def wrong_value(error: Error, field: str | None) -> ApiError:
    """One of pydantic's errors, as an ApiError about this field."""
    field = quoted(field, "") if field else None
    if error["type"] == "extra_forbidden":
        return bad_request(f"the field '{field}' is not known here", field)
    if field == "suffix":
        return bad_request("suffix is not supported: these models do not fill in", field)
    words = WORDS.get(error["type"]) or _message(error).replace("Input should", "should").replace(
        " after validation", ""
    )
    return bad_request(f"{field or 'the body'}: {words}", field)


def _message(error: Error) -> str:
    """pydantic's, but for whole numbers as bounds, which it rounds to the precision of a float."""
    message = str(error["msg"])
    bound = error["ctx"][BOUNDS[error["type"]]] if error["type"] in BOUNDS else None
    return f"{message.rpartition(' ')[0]} {bound}" if isinstance(bound, int) else message


def _meant(errors: list[Error]) -> Error | None:
    """Among the errors of a field's types: the first of the type that matches the given value's
    kind; of several such types, one of the value's own `type`, and the one whose error is
    deepest."""
    forms: dict[Any, list[Error]] = {}
    for error in errors:
        loc = tuple(error["loc"][1:])
        position = _field(loc)[1]
        assert position is not None
        forms.setdefault(loc[position], []).append(error)
    meant = None
    furthest = -2
    for found in forms.values():
        first = found[0]
        loc = tuple(first["loc"][1:])
        inner = loc[(_field(loc)[1] or 0) + 1 :]
        if not inner and first["type"] in MISMATCHES:
            continue
        depth = inner[0] if inner and isinstance(inner[0], int) else 0
        if inner == ("type",) and first["type"] == "literal_error":
            depth = -1
        if depth > furthest:
            meant = first
            furthest = depth
    return meant


def _field(loc: tuple[Any, ...]) -> tuple[str | None, int | None]:
    """The parameter's name with item indices, and the position in `loc` of a type's name, if
    any."""
    for i in range(1, len(loc)):
        if _name(loc[:i]) in FORMS and not isinstance(loc[i - 1], int):
            return ".".join(map(str, (*loc[:i], *loc[i + 1 :]))), i
    return ".".join(map(str, loc)) or None, None


def _name(loc: tuple[Any, ...]) -> str:
    return ".".join(part for part in loc if isinstance(part, str))


def unreadable(error: BaseException | None) -> ApiError:
    """A body that Python's parser of JSON gave up for another reason than its grammar."""
    if isinstance(error, UnicodeDecodeError):
        return bad_request(f"the body is not valid {error.encoding}: {error.reason}")
    if isinstance(error, RecursionError):
        return bad_request("the body nests too deeply to be read")
    if isinstance(error, ValueError) and "digits" in str(error):
        return bad_request("the body has an integer of too many digits to be read")
    return bad_request("the body cannot be read")


def is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def not_json(content_type: str) -> ApiError:
    given = f"given: {quoted(content_type)}" if content_type else "none was given"
    return ApiError(415, f"the header Content-Type should be application/json; {given}")
