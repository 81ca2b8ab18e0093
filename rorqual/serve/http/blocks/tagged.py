"""Tagged objects (by `type`) in bodies that are translated to a chat: parsed one by one, so that
errors name the place in the caller's own body."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import ValidationError

from rorqual.errors import RequestError, quoted
from rorqual.serve.engines.job import parameter_of
from rorqual.serve.errors import ApiError, bad_request
from rorqual.serve.http.protocol import Model, TextPart
from rorqual.serve.http.validation import wrong_value

MAX_ITEMS = 4096
Where = tuple[str | int, ...]
AnyModel = TypeVar("AnyModel", bound=Model)


def name_of(where: Where) -> str:
    return ".".join(map(str, where))


def read(model: type[AnyModel], value: Any, where: Where) -> AnyModel:
    """Raises ApiError that names the field within the body. Unknown fields may be null: clients
    send back objects with all fields dumped."""
    if isinstance(value, dict):
        known = {field.alias or name for name, field in model.model_fields.items()}
        value = {name: it for name, it in value.items() if it is not None or name in known}
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found: Any = error.errors(include_url=False, include_input=False)[0]
        raise wrong_value(found, name_of((*where, *found["loc"]))) from None


def read_tagged(
    models: Mapping[str, type[Model]], value: Any, where: Where, default: str | None = None
) -> Any:
    """A model chosen by the value's `type`; default: its type where it has none."""
    if not isinstance(value, dict):
        raise bad_request(f"{name_of(where)}: should be an object", name_of(where))
    kind = value.get("type")
    if kind is None:
        kind = default
    name = name_of((*where, "type"))
    if kind is None:
        raise bad_request(f"{name}: is required", name)
    if not isinstance(kind, str):
        raise bad_request(f"{name}: should be a string", name)
    if kind not in models:
        raise bad_request(
            f"{name}: {quoted(kind)} is not supported here; accepted: {', '.join(models)}", name
        )
    return read(models[kind], {**value, "type": kind}, where)


def items_of(value: Any, where: Where, form: str, least: int = 1) -> list[Any]:
    """A list within its limits; form: what the field accepts, for the error."""
    name = name_of(where)
    if not isinstance(value, list):
        raise bad_request(f"{name}: should be {form}", name)
    if not least <= len(value) <= MAX_ITEMS:
        raise bad_request(f"{name} has {len(value)} items; accepted: {least} to {MAX_ITEMS}", name)
    return value


def read_texts(
    models: Mapping[str, type[Model]], value: Any, where: Where, form: str
) -> str | list[TextPart]:
    """A string, or parts that each have a `text`, as the content of a chat's message."""
    if isinstance(value, str):
        return value
    found = [
        read_tagged(models, part, (*where, i))
        for i, part in enumerate(items_of(value, where, form, least=0))
    ]
    return [TextPart.model_construct(type="text", text=part.text) for part in found]


def refuse(data: Any, refused: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """refused: by field, the values without effect, and the error for any other."""
    if not isinstance(data, dict):
        return
    for name, (nothing, words) in refused.items():
        value = data.get(name)
        if value is not None and not any(value is one or value == one for one in nothing):
            raise bad_request(f"{name} {words}", name)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Inside the block, errors that name a chat's parameters are renamed to the body's. names: chat
    parameter to body parameter, with * for a number."""
    try:
        yield
    except RequestError as error:
        raise with_names(bad_request(str(error), parameter_of(str(error))), names) from None
    except ApiError as error:
        raise with_names(error, names) from None


def with_names(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error, with the body's parameter in place of a chat's."""
    for old, new in names.items():
        pattern = old.replace(".", r"\.").replace("*", r"(\d+)")
        found = re.match(rf"{pattern}(?=\.|$)", error.param or "")
        if found:
            start = new.replace("*", found[1]) if found.groups() else new
            error.param = start + (error.param or "")[found.end() :]
            if error.message.startswith(found[0]):
                error.message = start + error.message[found.end() :]
            break
    return error


def json_text(value: Any, where: Where) -> str:
    """The value as JSON; a caller's error where it nests too deeply."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        name = name_of(where)
        raise bad_request(f"{name}: cannot be written as JSON: {error}", name) from None
