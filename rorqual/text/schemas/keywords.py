"""The keywords of one place in a schema, apart from references and choices, and how those of two
schemas that must both hold are joined."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rorqual.errors import RequestError, quoted

TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
OF_TYPE = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "object": (
        "properties",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "required",
        "minProperties",
        "maxProperties",
    ),
}
# characters of the texts that xgrammar makes of a format
FORMATS: dict[str, tuple[int, int | None]] = {
    "date": (10, 10),
    "time": (9, None),
    "date-time": (20, None),
    "duration": (3, None),
    "email": (3, None),
    "hostname": (1, None),
    "ipv4": (7, 15),
    "ipv6": (2, 45),
    "uuid": (36, 36),
    "uri": (2, None),
    "uri-reference": (0, None),
    "uri-template": (0, None),
    "json-pointer": (0, None),
    "relative-json-pointer": (1, None),
}
UNCHECKED_FORMATS = frozenset(("idn-email", "idn-hostname", "iri", "iri-reference", "regex"))
# without a way to be enforced, unless their value asks for nothing
REFUSED: dict[str, Callable[[Any], bool]] = {
    "not": lambda value: value is False,
    "contains": lambda value: False,
    "dependentRequired": lambda value: value == {},
    "dependentSchemas": lambda value: value == {},
    "dependencies": lambda value: value == {},
    "$dynamicRef": lambda value: False,
    "$recursiveRef": lambda value: False,
}
COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
)
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
LISTS = ("prefixItems", "required", "enum", "anyOf", "oneOf", "allOf")
MAPS = ("properties", "patternProperties")
LONGEST = 2**31 - 1  # more cannot be counted, nor be generated


class SchemaError(RequestError):
    """A schema that cannot be enforced: `place` is where, as schema.properties.a."""

    def __init__(self, place: str, words: str):
        super().__init__(f"{place}: {words}")
        self.place = place


class UnsatisfiableError(SchemaError):
    """No value fits here; another choice may do."""


def refused(keyword: str, place: str, more: str = "") -> SchemaError:
    return SchemaError(place, f"{keyword!r} cannot be enforced{more}")


class SchemaPart(NamedTuple):
    """A schema within the caller's; several hold together. place: its path."""

    schema: Any
    place: str

    @property
    def key(self) -> object:
        """Places are shortened, and may look alike."""
        return id(self.schema) if isinstance(self.schema, dict) else self.place

    def at(self, *names: str | int) -> str:
        return ".".join((self.place, *(quoted(str(name), "") for name in names)))


Parts = tuple[SchemaPart, ...]


@dataclass
class Keywords:
    """values: by keyword; schemas in them are Parts. places: where each keyword was."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def get(self, keyword: str) -> Any:
        return self.values.get(keyword)

    def set(self, keyword: str, value: Any, place: str) -> None:
        self.values[keyword] = value
        self.places.setdefault(keyword, place)

    @property
    def place(self) -> str:
        return next(iter(self.places.values()), "schema")

    @property
    def types(self) -> tuple[str, ...] | None:
        """Where it names none: those that its keywords are for, which is less than it allows."""
        if "type" in self.values:
            return tuple(self.values["type"])
        found = tuple(of for of, names in OF_TYPE.items() if any(it in self.values for it in names))
        return found or None

    @property
    def closed(self) -> bool:
        """Whether no properties beside the named ones may be written: where nothing is said of
        others, none are."""
        if "additionalProperties" in self.values:
            return any(part.schema is False for part in self.values["additionalProperties"])
        return "properties" in self.values or "patternProperties" in self.values


def own_keywords(part: SchemaPart) -> Keywords:
    """Checks the kinds of values, as far as they matter here."""
    schema, place = part
    for keyword, harmless in REFUSED.items():
        if keyword in schema and not harmless(schema[keyword]):
            raise refused(keyword, place)
    if "if" in schema and ("then" in schema or "else" in schema):
        raise refused("if", place)
    found = Keywords()
    _read_type(schema, place, found)
    for keyword in LISTS:
        _check_kind(schema, keyword, list, "an array", place)
    for keyword in MAPS:
        _check_kind(schema, keyword, dict, "an object", place)
    for keyword in COUNTS:
        if keyword in schema:
            _read_count(keyword, schema[keyword], place, found)
    _read_bounds(schema, place, found)
    if "multipleOf" in schema:
        found.set("multipleOf", _number(schema, "multipleOf", place), place)
        if found.get("multipleOf") <= 0:
            raise SchemaError(place, "'multipleOf' should be above 0")
    _check_kind(schema, "pattern", str, "a string", place)
    _check_kind(schema, "format", str, "a string", place)
    if "pattern" in schema:
        found.set("pattern", schema["pattern"], place)
    if schema.get("format") in UNCHECKED_FORMATS:
        raise refused("format", place, f" where it is {schema['format']!r}")
    if schema.get("format") in FORMATS:  # others are annotations
        found.set("format", schema["format"], place)
    if schema.get("uniqueItems") is True:
        found.set("uniqueItems", True, place)
    _read_items(part, found)
    _read_properties(part, found)
    if "const" in schema:
        found.set("enum", [schema["const"]], place)
    if "enum" in schema:
        both = Keywords({"enum": schema["enum"]}, {"enum": place})
        found = joined(found, both)
    return found


def _check_kind(schema: Any, keyword: str, kind: type, words: str, place: str) -> None:
    if keyword in schema and not isinstance(schema[keyword], kind):
        raise SchemaError(place, f"{keyword!r} should be {words}")


def _read_type(schema: Any, place: str, found: Keywords) -> None:
    if "type" not in schema:
        return
    given = schema["type"]
    names = given if isinstance(given, list) and given else [given]
    for name in names:
        if name not in TYPES:
            kinds = ", ".join(TYPES)
            raise SchemaError(place, f"'type' should be one of {kinds}, or an array of them")
    found.set("type", tuple(dict.fromkeys(names)), place)


def _number(schema: Any, keyword: str, place: str) -> Any:
    value = schema[keyword]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (isinstance(value, float) and not math.isfinite(value)):
        raise SchemaError(place, f"{keyword!r} should be a number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read_count(keyword: str, value: Any, place: str, found: Keywords) -> None:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or value < 0:
        raise SchemaError(place, f"{keyword!r} should be a whole number of at least 0")
    count = int(value)
    if keyword.startswith("min") and count > LONGEST:
        raise refused(keyword, place, f" above {LONGEST}")
    if count <= LONGEST and (count or keyword.startswith("max")):
        found.set(keyword, count, place)


def _read_bounds(schema: Any, place: str, found: Keywords) -> None:
    for keyword in BOUNDS:
        value = schema.get(keyword)
        if isinstance(value, bool) and keyword.startswith("exclusive"):
            # draft 4: it tells how minimum or maximum is meant
            plain = keyword[len("exclusive") :].lower()
            if value and plain in schema:
                found.set(keyword, _number(schema, plain, place), place)
        elif keyword in schema:
            found.set(keyword, _number(schema, keyword, place), place)


def _read_items(part: SchemaPart, found: Keywords) -> None:
    schema, place = part
    items = schema.get("items")
    prefix = schema.get("prefixItems")
    rest = "items"
    first = "prefixItems"
    if isinstance(items, list):  # until draft 2019
        prefix = items
        first = "items"
        rest = "additionalItems"
    if prefix is not None:
        listed = [(SchemaPart(one, part.at(first, i)),) for i, one in enumerate(prefix)]
        found.set("prefixItems", listed, place)
    if rest in schema:
        found.set("items", (SchemaPart(schema[rest], part.at(rest)),), place)


def _read_properties(part: SchemaPart, found: Keywords) -> None:
    schema, place = part
    for keyword in MAPS:
        if keyword in schema:
            named = schema[keyword]
            inner = {
                name: (SchemaPart(one, part.at(keyword, name)),) for name, one in named.items()
            }
            if keyword == "patternProperties":
                # what asks for nothing allows nothing that is not allowed without it
                inner = {k: v for k, v in inner.items() if v[0].schema not in (True, {})}
                if not inner:
                    continue
            found.set(keyword, inner, place)
    for keyword in ("additionalProperties", "propertyNames"):
        if keyword in schema:
            found.set(keyword, (SchemaPart(schema[keyword], part.at(keyword)),), place)
    if "required" in schema:
        names = schema["required"]
        if not all(isinstance(name, str) for name in names):
            raise SchemaError(place, "'required' should be an array of strings")
        if names:
            found.set("required", list(dict.fromkeys(names)), place)


# ---- both of two


def joined(one: Keywords, other: Keywords) -> Keywords:
    """Raises UnsatisfiableError where no value fits both."""
    found = Keywords(dict(one.values), {**other.places, **one.places})
    _join_objects(one, other, found)
    _join_items(one, other, found)
    for keyword, value in other.values.items():
        if keyword not in one.values:
            found.values.setdefault(keyword, value)
        elif keyword not in (*OF_TYPE["object"], "items", "prefixItems"):
            found.values[keyword] = _both(keyword, one.values[keyword], value, other)
    return found


def _both(keyword: str, one: Any, other: Any, second: Keywords) -> Any:
    place = second.places.get(keyword, second.place)
    if keyword == "type":
        found = [name for name in _with_integer(one) if name in _with_integer(other)]
        found = [name for name in found if name != "integer" or "number" not in found]
        if not found:
            raise UnsatisfiableError(place, f"no value is of type {one[0]!r} and {other[0]!r}")
        return tuple(found)
    if keyword == "enum":
        keys = {key_of(value) for value in other}
        values = [value for value in one if key_of(value) in keys]
        if not values:
            raise UnsatisfiableError(place, "no value is in both of 'enum'")
        return values
    if keyword.startswith("min") or keyword == "exclusiveMinimum":
        return max(one, other)
    if keyword.startswith("max") or keyword == "exclusiveMaximum":
        return min(one, other)
    if one != other:
        raise refused(keyword, place, " twice")
    return one


def _with_integer(types: tuple[str, ...]) -> tuple[str, ...]:
    return (*types, "integer") if "number" in types and "integer" not in types else types


def _join_objects(one: Keywords, other: Keywords, found: Keywords) -> None:
    """Properties of one may be additional ones of the other."""
    shapes = ("properties", "patternProperties", "additionalProperties")
    ours = [name for name in shapes if name in one.values]
    theirs = [name for name in shapes if name in other.values]
    if ours and theirs and "patternProperties" in (*ours, *theirs):
        place = (one if "patternProperties" in ours else other).places["patternProperties"]
        raise refused("patternProperties", place, " beside other properties")
    if "properties" in (*ours, *theirs):
        properties: dict[str, Parts] = {}
        for mine, yours in ((one, other), (other, one)):
            for name, parts in (mine.get("properties") or {}).items():
                rest = yours.get("additionalProperties") or ()
                more = () if name in (yours.get("properties") or {}) else rest
                properties[name] = unique(properties.get(name, ()) + parts + more)
        found.values["properties"] = properties
    if "additionalProperties" in ours and "additionalProperties" in theirs:
        rest = one.values["additionalProperties"] + other.values["additionalProperties"]
        found.values["additionalProperties"] = unique(rest)
    for keyword, join in (("minProperties", max), ("maxProperties", min)):
        counts = [it.values[keyword] for it in (one, other) if keyword in it.values]
        if counts:
            found.values[keyword] = join(counts)
    needed = [*(one.get("required") or ()), *(other.get("required") or ())]
    if needed:
        found.values["required"] = list(dict.fromkeys(needed))
    names = (one.get("propertyNames") or ()) + (other.get("propertyNames") or ())
    if names:
        found.values["propertyNames"] = unique(names)


def _join_items(one: Keywords, other: Keywords, found: Keywords) -> None:
    """First items of one may be among the others of the other."""
    firsts = [it.get("prefixItems") or [] for it in (one, other)]
    rests = [it.get("items") or () for it in (one, other)]
    listed = []
    for i in range(max(map(len, firsts))):
        both = zip(firsts, rests, strict=True)
        mine, yours = (first[i] if i < len(first) else rest for first, rest in both)
        listed.append(unique(mine + yours))
    if listed:
        found.values["prefixItems"] = listed
    if "items" in one.values or "items" in other.values:
        found.values["items"] = unique(rests[0] + rests[1])


def unique(parts: Parts) -> Parts:
    return tuple({part.key: part for part in parts}.values())


# ---- values


def key_of(value: Any) -> str:
    """Equal for values that JSON Schema takes as equal: 1 and 1.0, but not 1 and true."""
    return json.dumps(_with_integers(value), sort_keys=True)


def _with_integers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_with_integers(one) for one in value]
    if isinstance(value, dict):
        return {name: _with_integers(one) for name, one in value.items()}
    return value


def type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def fits(value: Any, keywords: Keywords) -> bool:
    """Whether a value of an enum is within the keywords beside it. Patterns are not tried: one of a
    caller may take forever."""
    kind = type_of(value)
    types = keywords.get("type")
    if types is not None and kind not in _with_integer(types):
        return False
    names = OF_TYPE.get("number" if kind == "integer" else kind, ())
    for name in names:
        if name in keywords.values and not _holds(name, keywords, value, kind):
            return False
    return True


def _holds(name: str, keywords: Keywords, value: Any, kind: str) -> bool:
    limit = keywords.values[name]
    if name == "format":
        return True  # what it tells of a value that the caller wrote is no more than a remark
    if name in ("minLength", "minItems", "minProperties"):
        return len(value) >= limit
    if name in ("maxLength", "maxItems", "maxProperties"):
        return len(value) <= limit
    if name == "minimum":
        return bool(value >= limit)
    if name == "maximum":
        return bool(value <= limit)
    if name == "exclusiveMinimum":
        return bool(value > limit)
    if name == "exclusiveMaximum":
        return bool(value < limit)
    if name == "multipleOf" and kind == "integer" and isinstance(limit, int):
        return int(value) % limit == 0
    if name == "required":
        return all(one in value for one in limit)
    raise refused(name, keywords.places.get(name, keywords.place), " beside 'enum' or 'const'")
