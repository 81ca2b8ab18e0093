"""What of a JSON Schema is enforced, by texts that the compiled grammar accepts and rejects, and
what is refused with its place."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import date, datetime, time
from enum import Enum
from typing import Any
from uuid import UUID

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel, Field, HttpUrl, TypeAdapter

pytest.importorskip("xgrammar")

import xgrammar

from rorqual.errors import RequestError
from rorqual.request import StructuredOutput
from rorqual.text.schemas.enforced import MOST_OPTIONS, enforced, enforced_schema
from rorqual.text.schemas.patterns import PatternError, width_of

EOS = 256
BYTES = [bytes([i]) for i in range(EOS)] + [b"</s>"]
INFO = xgrammar.TokenizerInfo(
    BYTES, vocab_type=xgrammar.VocabType.RAW, vocab_size=len(BYTES), stop_token_ids=[EOS]
)
COMPILER = xgrammar.GrammarCompiler(INFO, max_threads=1, cache_enabled=False)


def compiled(schema: Any) -> Any:
    structure = enforced(StructuredOutput("json_schema", json.dumps(schema)))
    return COMPILER.compile_json_schema(structure.value, any_whitespace=False)


def accepts(grammar: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    return bool(matcher.accept_string(text)) and bool(matcher.is_terminated())


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


A = {"type": "integer"}
B = {"type": "string"}
LIST = {"type": "array", "items": A}

# a schema, texts that fit, and texts that do not
ENFORCED: dict[str, tuple[Any, list[str], list[str]]] = {
    "anyOf beside properties": (
        {**closed(a={"type": "boolean"}), "anyOf": [{"required": ["a"]}]},
        ['{"a": true}'],
        ["1", "{}"],
    ),
    "anyOf with an option that cannot be": (
        {**closed(a=A), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a": 1}'],
        ["{}", '{"b": 1}'],
    ),
    "oneOf beside properties": (
        {
            "type": "object",
            "properties": {"k": B},
            "oneOf": [
                {"properties": {"k": {"const": "a"}}, "required": ["k"]},
                {"properties": {"k": {"const": "b"}, "n": A}, "required": ["k", "n"]},
            ],
        },
        ['{"k": "a"}', '{"k": "b", "n": 1}'],
        ['{"k": "b"}', '{"k": "c"}', "1"],
    ),
    "oneOf told apart by a tag that may be left out": (
        {"oneOf": [closed(k={"const": "a"}), closed(k={"const": "b"})]},
        ['{"k": "a"}', '{"k": "b"}'],
        ["{}"],
    ),
    "oneOf told apart by required names": (
        {"oneOf": [{**closed(a=A), "required": ["a"]}, {**closed(b=A), "required": ["b"]}]},
        ['{"a": 1}', '{"b": 1}'],
        ["{}", '{"a": 1, "b": 1}'],
    ),
    "allOf of several": (
        {"allOf": [{**closed(a=A), "required": ["a"]}, {"properties": {"a": {"minimum": 3}}}]},
        ['{"a": 3}'],
        ['{"a": 2}', "{}", "1"],
    ),
    "allOf with other properties": (
        {"type": "object", "properties": {"a": A}, "allOf": [{"properties": {"b": B}}]},
        ['{"a": 1, "b": "x"}', "{}"],
        ['{"a": "x"}', '{"b": 1}'],
    ),
    "allOf of items": (
        {"type": "array", "prefixItems": [A], "allOf": [{"items": {"minimum": 2, "maximum": 8}}]},
        ["[2]"],
        ["[1]", '["a"]'],
    ),
    "a reference beside keywords": (
        {"$defs": {"x": {"type": "integer", "maximum": 9}}, "$ref": "#/$defs/x", "minimum": 3},
        ["3", "9"],
        ["2", "10"],
    ),
    "a reference to where it is, beside keywords": (
        {"type": "object", "properties": {"a": A, "c": {"$ref": "#", "required": ["a"]}}},
        ['{"c": {"a": 1, "c": {"a": 2}}}'],
        ['{"c": {}}', '{"c": {"a": 1, "c": {}}}'],
    ),
    "enum beside limits": ({"type": "integer", "enum": [1, 2, 3], "minimum": 2}, ["2"], ["1"]),
    "enum beside a type": ({"type": "string", "enum": ["a", 1, None]}, ['"a"'], ["1", "null"]),
    "enum beside const": ({"enum": [1, 2], "const": 2}, ["2"], ["1"]),
    "enum beside anyOf": (
        {"enum": ["a", 1, "bcd"], "anyOf": [{"type": "integer"}, {"maxLength": 2}]},
        ["1", '"a"'],
        ['"bcd"'],
    ),
    "required that is not among the properties": (
        {"type": "object", "properties": {"a": A}, "required": ["b"]},
        ['{"a": 1, "b": [2]}', '{"b": 1}'],
        ['{"a": 1}', "{}"],
    ),
    "required of additional properties": (
        {"type": "object", "required": ["b"], "additionalProperties": A},
        ['{"b": 1, "c": 2}'],
        ['{"b": "x"}', '{"c": 1}'],
    ),
    "no properties": ({"type": "object", "properties": {}}, ["{}"], ['{"a": 1}']),
    "any properties": ({"type": "object", "x-order": 1}, ["{}", '{"a": 1}'], ["[]"]),
    "minProperties": ({**closed(a=A, b=A), "minProperties": 1}, ['{"b": 1}'], ["{}"]),
    "maxProperties": ({**closed(a=A, b=A), "maxProperties": 1}, ["{}"], ['{"a": 1, "b": 1}']),
    "propertyNames of an enum": (
        {"type": "object", "propertyNames": {"enum": ["q", "r"]}, "additionalProperties": A},
        ['{"q": 1}', "{}"],
        ['{"q": "x"}', '{"s": 1}', '{"q": 1, "q": 2}'],
    ),
    "propertyNames by a reference": (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/names"},
            "additionalProperties": A,
            "$defs": {"names": {"$ref": "#/$defs/n"}, "n": {"enum": ["q", "r"], "type": "string"}},
        },
        ["{}", '{"q": 1}', '{"q": 1, "r": 2}'],
        ['{"s": 1}', '{"q": "x"}'],
    ),
    "propertyNames of any string": (
        {"type": "object", "propertyNames": {"type": "string", "title": "t", "minLength": 0}},
        ["{}", '{"a": 1}'],
        ["1"],
    ),
    "propertyNames that are no strings": (
        {"type": "object", "propertyNames": {"enum": [1, "q"]}, "additionalProperties": A},
        ['{"q": 1}'],
        ['{"1": 1}'],
    ),
    "propertyNames of a length": (
        {"type": "object", "propertyNames": {"minLength": 2}, "additionalProperties": A},
        ['{"qq": 1}'],
        ['{"q": 1}', '{"qq": "x"}'],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^a[0-9]$": A}, "additionalProperties": False},
        ['{"a1": 1}'],
        ['{"a1": "x"}', '{"b": 1}'],
    ),
    "unevaluatedProperties": (
        {"type": "object", "properties": {"a": A}, "unevaluatedProperties": False},
        ['{"a": 1}'],
        ['{"b": 1}'],
    ),
    "unevaluatedProperties beside allOf": (
        {
            "type": "object",
            "required": ["a", "b"],
            "allOf": [{"properties": {"a": A}}, {"properties": {"b": A}}],
            "unevaluatedProperties": {"type": "null"},
        },
        ['{"a": 1, "b": 2}', '{"a": 1, "b": 2, "c": null}'],
        ['{"a": 1, "b": 2, "c": 1}'],
    ),
    "a property that is false": (closed(a=False, b=A), ["{}", '{"b": 1}'], ['{"a": 1}']),
    "properties whose names are keywords": (
        closed(x=closed(title={"type": "string"}), y=closed(title={"type": "integer"})),
        ['{"x": {"title": "a"}, "y": {"title": 1}}'],
        ['{"x": {"title": "a"}, "y": {"title": "b"}}'],
    ),
    "values whose names are keywords": (
        closed(x={"const": {"title": 1}}, y={"const": {"title": 2}}),
        ['{"x": {"title":1}, "y": {"title":2}}'],
        ['{"x": {"title":1}, "y": {"title":1}}'],
    ),
    "minItems of anything": ({"type": "array", "minItems": 1}, ["[1]", '["a", 2]'], ["[]"]),
    "prefixItems": (
        {"type": "array", "prefixItems": [A, True], "minItems": 1, "maxItems": 2},
        ["[1]", '[1, "a"]'],
        ["[]", '["a"]', "[1, 2, 3]"],
    ),
    "items of draft 7": (
        {"type": "array", "items": [A], "additionalItems": B},
        ['[1, "a"]'],
        ["[1, 2]", '["a"]'],
    ),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [A], "unevaluatedItems": False},
        ["[1]"],
        ["[1, 2]"],
    ),
    "minContains without contains": ({**LIST, "minContains": 2}, ["[]"], ['["a"]']),
    "uniqueItems of one": ({**LIST, "maxItems": 1, "uniqueItems": True}, ["[1]"], ["[1, 1]"]),
    "multipleOf": ({"type": "integer", "multipleOf": 5}, ["10", "0"], ["3", "11"]),
    "multipleOf within limits": (
        {"type": "integer", "multipleOf": 50, "minimum": 1, "maximum": 20_000},
        ["50", "20000"],
        ["0", "51", "20050"],
    ),
    "multipleOf a fraction": ({"type": "integer", "multipleOf": 2.5}, ["5"], ["2", "3"]),
    "multipleOf of a number": ({"type": "number", "multipleOf": 2}, ["4"], ["3", "2.5"]),
    "limits of an integer": (
        {"type": "integer", "minimum": 0.5, "exclusiveMaximum": 3},
        ["1", "2"],
        ["0", "3"],
    ),
    "limits beyond 64 bits": (
        {"type": "integer", "minimum": -(10**30), "maximum": 2**64 - 1},
        ["0", str(2**63 - 1), str(-(2**63))],
        [str(2**64), str(-(10**31)), "0.5"],
    ),
    "limits of draft 4": (
        {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
        ["4"],
        ["3"],
    ),
    "limits without a type": ({"exclusiveMinimum": 5}, ["5.5"], ["5", "4"]),
    "length": ({"type": "string", "minLength": 1, "maxLength": 3}, ['"é😀x"'], ['""', '"abcd"']),
    "length and control characters": ({"type": "string", "maxLength": 3}, ['"ab"'], ['"a\tb"']),
    "pattern with quotes": ({"type": "string", "pattern": "é[^x]*"}, ['"éb"'], ['"é"b"']),
    "pattern within a length": (
        {"type": "string", "pattern": "^[A-Z]{2,3}$", "minLength": 1, "maxLength": 3},
        ['"AB"'],
        ['"A"'],
    ),
    "format within a length": (
        {"type": "string", "format": "uuid", "maxLength": 36},
        ['"0b0c2c0e-9a1b-4c3d-8e4f-000000000000"'],
        ['"0b0c2c0e"'],
    ),
    "format unknown": ({"type": "string", "format": "password", "maxLength": 1}, ['"a"'], ['"aa"']),
    "several types": (
        {"type": ["string", "null", "integer"], "maxLength": 1, "minimum": 3},
        ['"a"', "null", "3"],
        ['"ab"', "2", "true"],
    ),
    "escapes in a reference": (
        {
            "type": "array",
            "items": {"$ref": "#/$defs/a~1b~0%20c"},
            "$defs": {"a/b~ c": {"$ref": "#/$defs/s%C3%B6"}, "sö": A},
        },
        ["[1]"],
        ['["a"]'],
    ),
    "what is nowhere referred to": (
        {"type": "integer", "$defs": {"x": {"not": {}}}},
        ["1"],
        ['"a"'],
    ),
    "annotations": (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": "urn:a",
            "$comment": "c",
            "title": "t",
            "description": "d",
            "default": 1,
            "examples": [{"not": 1}],
            "deprecated": True,
            "readOnly": True,
            "x-vendor": {"contains": 1},
            "type": "integer",
        },
        ["1"],
        ['"a"'],
    ),
}


@pytest.mark.parametrize("name", ENFORCED)
def test_enforced(name: str):
    schema, good, bad = ENFORCED[name]
    grammar = compiled(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for text in good:
        assert accepts(grammar, text), text
        if "draft" not in name:
            validator.validate(json.loads(text))
    for text in bad:
        assert not accepts(grammar, text), text


# a schema, the place of the keyword, and the keyword
REFUSED: list[tuple[Any, str, str]] = [
    (closed(a={"not": B}), "schema.properties.a", "'not'"),
    ({"if": {}, "then": {"required": ["a"]}}, "schema", "'if'"),
    ({**LIST, "contains": A}, "schema", "'contains'"),
    (closed(a={**LIST, "uniqueItems": True}), "schema.properties.a", "'uniqueItems'"),
    ({"type": "array", "items": {"type": "number", "multipleOf": 0.1}}, "schema.items", "'multip"),
    ({"type": "integer", "multipleOf": 7, "minimum": 1}, "schema", "'multipleOf'"),
    ({"type": "integer", "multipleOf": 5000}, "schema", "'multipleOf'"),
    ({"type": "string", "pattern": "a*", "maxLength": 3}, "schema", "'pattern'"),
    ({"type": "string", "pattern": "a", "format": "date"}, "schema", "'pattern'"),
    ({"type": "string", "format": "email", "maxLength": 9}, "schema", "'format'"),
    ({"type": "string", "format": "iri"}, "schema", "'format'"),
    ({"enum": ["a"], "pattern": "b"}, "schema", "'pattern'"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "schema.allOf.1", "'pattern'"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "schema", "'dependentRequired'"),
    ({"type": "object", "dependentSchemas": {"a": {}}}, "schema", "'dependentSchemas'"),
    ({"type": "object", "dependencies": {"a": ["b"]}}, "schema", "'dependencies'"),
    ({"properties": {"a": A}, "patternProperties": {"b": A}}, "schema", "'patternProperties'"),
    ({"patternProperties": {"a": A, "b": B}}, "schema", "'patternProperties'"),
    ({"patternProperties": {"a": A}, "required": ["a"]}, "schema", "'patternProperties'"),
    ({"type": "object", "propertyNames": {"format": "email"}}, "schema", "'propertyNames'"),
    ({"type": "object", "propertyNames": {"type": "integer"}}, "schema", "'propertyNames'"),
    ({"type": "object", "propertyNames": {"$ref": "#"}}, "schema", "'propertyNames'"),
    ({"type": "object", "minProperties": 2}, "schema", "'minProperties'"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "schema", "'oneOf'"),
    ({"oneOf": [closed(a=A), closed(b=B)]}, "schema", "'oneOf'"),
    ({"oneOf": [{"const": i} for i in range(MOST_OPTIONS + 1)]}, "schema", "'oneOf'"),
    ({**closed(a=A), "required": ["b"]}, "schema", "'required' names 'b'"),
    ({"anyOf": [{"$dynamicRef": "#a"}]}, "schema.anyOf.0", "'$dynamicRef'"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [A, {"not": A}]}}}, "schema.$defs.x.", "'not'"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#", "type": "null"}}}, "schema.", "to itself"),
    ({"$ref": "#/$defs/b", "$defs": {"a": A}}, "schema", "nothing at '#/$defs/b'"),
    ({"type": "string", "enum": [1]}, "schema", "no value of 'enum'"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "schema", "no integer"),
    (closed(a={"type": "text"}), "schema.properties.a", "'type' should be one of"),
    ({"type": "string", "minLength": "1"}, "schema", "'minLength' should be"),
    ({"type": "string", "pattern": 'a"b'}, "schema", "JSON escapes"),
    ({"type": "string", "pattern": r"\p{L}"}, "schema", "not supported"),
    (closed(a=[]), "schema.properties.a", "should be an object or a boolean"),
    (False, "schema", "no value"),
    (json.loads('{"items":' * 900 + "{}" + "}" * 900), "schema", "nests too deeply"),
    ({"type": "number", "minimum": 10**400}, "schema", "'minimum' cannot be enforced"),
    ({"multipleOf": 3, "minimum": -1e300, "maximum": 1e300}, "schema", "'multipleOf'"),
]


@pytest.mark.parametrize(("schema", "place", "words"), REFUSED, ids=[it[2] for it in REFUSED])
def test_refused(schema: Any, place: str, words: str):
    with pytest.raises(RequestError) as found:
        compiled(schema)
    message = str(found.value)
    assert message.startswith(place if place.endswith(".") else f"{place}: ")
    assert words in message
    assert message.isprintable()


def test_what_asks_for_nothing_is_not_refused():
    schema = {
        "type": "object",
        "properties": {"a": {**LIST, "uniqueItems": False, "not": False}, "b": {"if": A}},
        "dependentRequired": {},
        "patternProperties": {"^x-": {}},
    }
    assert accepts(compiled(schema), '{"a": [1, 1], "b": 2}')


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Colour, "red", "green"),
        (UUID, "0b0c2c0e-9a1b-4c3d-8e4f-000000000000", "0b0c2c0e"),
        (date, "2026-02-28", "2026-13-01"),
        (time, "23:59:59.5+01:00", "24:00:00Z"),
        (datetime, "2026-02-28T12:30:00Z", "2026-02-28"),
        (int, "1", None),
    ],
)
def test_the_keys_of_a_dict_in_python(kind: Any, good: str, bad: str | None):
    """pydantic says what they are by propertyNames, of an enum by a reference."""
    of = TypeAdapter(dict[kind, int])
    grammar = compiled(of.json_schema())
    text = json.dumps({good: 1})
    assert accepts(grammar, text)
    assert of.validate_json(text)
    if bad is not None:
        assert not accepts(grammar, json.dumps({bad: 1}))
        assert not accepts(grammar, json.dumps({good: 1, bad: 1}))


class Leaf(BaseModel):
    kind: str = Field("leaf", json_schema_extra={"const": "leaf"})
    at: HttpUrl | None = None


class Tree(BaseModel):
    """As applications describe their answers."""

    title: str = Field(description="What it is of.", examples=["a"])
    size: int | None = Field(None, ge=0, le=10)
    pair: tuple[int, str] = (1, "a")
    more: dict[str, int] = {}
    children: list[Tree | Leaf] = Field(default_factory=list, max_length=3)


def test_what_pydantic_writes():
    grammar = compiled(Tree.model_json_schema())
    leaf = '{"kind": "leaf", "at": "https://example.org:80/a?b=c&d"}'
    inner = f'{{"title": "b", "size": null, "children": [{leaf}]}}'
    good = f'{{"title": "a", "pair": [1, "a"], "more": {{"x": 1}}, "children": [{inner}]}}'
    assert accepts(grammar, good)
    assert Tree.model_validate_json(good)
    for old, new in (("null", "11"), (":80/", ":x/"), ('[1, "a"]', "[1]"), ('"leaf"', '"x"')):
        assert not accepts(grammar, good.replace(old, new)), new


def test_combinations_are_limited():
    """2 to the power of 40 of them."""
    many = [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(40)]
    with pytest.raises(RequestError, match="too many combinations"):
        compiled({"type": "integer", "allOf": many})


def test_definitions_in_a_row():
    """References to references are followed without going deeper each time."""
    names = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    form = enforced_schema({"$ref": "#/$defs/d0", "$defs": {**names, "d3000": A}})
    assert len(form["$defs"]) == 3001


PATTERNS = [
    ("^[A-Z]{3}$", 3, 3),
    ("a|bcd", 1, 3),
    (r"(?:ab?){2,}|\d", 1, None),
    (r"^(\+1)?[\w.-]{2}$", 2, 4),
    ("(^a$)|(^b$)", 1, 1),
    (r"\u00e9\x41[^a]?", 2, 3),
    ("", 0, 0),
]


@pytest.mark.parametrize(("pattern", "least", "most"), PATTERNS)
def test_widths(pattern: str, least: int, most: int | None):
    assert width_of(pattern) == (least, most)


@pytest.mark.parametrize(
    "pattern",
    ["a^b", "a$b", "(a", "a)", "[a", "[]", r"\bab", r"(a)\1", "(?i)a", "a++", "a{2}{3}", "a{,2}",
     r"[\n\t]", r"a\\", 'x"', r"\n", "*", r"[z-a]", "(^a)*", "(" * 60 + ")" * 60],
)  # fmt: skip
def test_patterns_that_are_not_enforced(pattern: str):
    with pytest.raises(PatternError):
        width_of(pattern)


# ---- random schemas


class Schemas:
    """Random ones of all keywords."""

    def __init__(self, chance: random.Random):
        self.chance = chance

    def schema(self, depth: int = 0) -> Any:
        if depth >= 3 or self.chance.random() < 0.15:
            return self.chance.choice(
                [B, A, {"type": "null"}, {"const": 1}, {}, True, {"$ref": "#/$defs/x"}]
            )
        keywords = self.keywords(depth + 1)
        kind, names = self.chance.choice(
            [
                ("object", (*OBJECT, *ANY)),
                ("array", (*ARRAY, *ANY)),
                ("string", ("minLength", "maxLength", "pattern", "format", *ANY)),
                ("number", ("minimum", "maximum", "exclusiveMinimum", "multipleOf", *ANY)),
                (None, tuple(keywords)),
            ]
        )
        count = self.chance.randint(1, 4)
        found = {name: keywords[name]() for name in self.chance.sample(names, count)}
        return {**found, "type": kind} if kind and self.chance.random() < 0.7 else found

    def keywords(self, depth: int) -> dict[str, Callable[[], Any]]:
        chance = self.chance

        def inner() -> Any:
            return self.schema(depth)

        def some() -> list[Any]:
            return [inner() for _ in range(chance.randint(1, 2))]

        def one_of(*values: Any) -> Callable[[], Any]:
            return lambda: chance.choice(values)

        def names() -> list[str]:
            return chance.sample(["a", "b", "title"], chance.randint(0, 2))

        few = one_of(0, 1, 2, 3)
        return {
            "properties": lambda: {name: inner() for name in names()},
            "required": names,
            "additionalProperties": lambda: chance.choice([False, True, inner()]),
            "minProperties": few,
            "maxProperties": few,
            "propertyNames": one_of({"enum": ["a", "c"]}, {"pattern": "^[ab]+$"}, {"minLength": 1}),
            "patternProperties": lambda: {chance.choice(["^a", "b$", "^x[0-9]"]): inner()},
            "unevaluatedProperties": lambda: chance.choice([False, inner()]),
            "items": inner,
            "prefixItems": some,
            "minItems": few,
            "maxItems": few,
            "uniqueItems": one_of(True, False),
            "unevaluatedItems": lambda: chance.choice([False, inner()]),
            "contains": inner,
            "minLength": few,
            "maxLength": few,
            "pattern": one_of("^a", "[ab]{2}", "^.{1,2}$", "b$"),
            "format": one_of("date", "ipv4", "other"),
            "minimum": one_of(-3, 0, 1.5, 2),
            "maximum": one_of(0, 3, 4.25, 10),
            "exclusiveMinimum": one_of(-1, 0.5),
            "multipleOf": one_of(2, 3, 0.5),
            "enum": lambda: chance.sample(["a", "b", 1, 2.0, None, True, {"a": 1}, [1]], 4),
            "const": one_of("a", 1),
            "anyOf": some,
            "oneOf": some,
            "allOf": some,
            "not": inner,
            "$ref": one_of("#/$defs/x", "#"),
        }


ANY = ("enum", "anyOf", "oneOf", "allOf", "$ref")
OBJECT = (
    "properties",
    "required",
    "additionalProperties",
    "minProperties",
    "maxProperties",
    "propertyNames",
    "patternProperties",
    "unevaluatedProperties",
)
ARRAY = ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "unevaluatedItems")


def written(grammar: Any, chance: random.Random, most: int = 200) -> str | None:
    """A random text of the grammar; None where it does not end soon."""
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = np.zeros((1, len(BYTES) // 32 + 1), dtype=np.int32)
    text = ""
    while len(text) < most:
        mask[:] = -1
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = [i for i in np.flatnonzero(bits[: len(BYTES)]) if i < 127 or i == EOS]
        if EOS in allowed and (len(allowed) == 1 or chance.random() < 0.5):
            return text
        if not allowed:
            return None
        usual = [i for i in allowed if chr(i) in 'ab1{["\\,:}]-.']
        ends = [i for i in allowed if chr(i) in '"}]']
        if ends and len(text) > 20 and chance.random() < 0.6:
            usual = ends
        token = int(chance.choice(usual or [i for i in allowed if i != EOS]))
        assert matcher.accept_token(token)
        text += chr(token)
    return None


def test_random_schemas_are_kept_to():
    """Whatever is not refused validates."""
    chance = random.Random(5)
    schemas = Schemas(chance)
    tried = refused = 0
    for _ in range(600):
        schema = schemas.schema()
        if not isinstance(schema, dict):
            continue
        recursive = {"type": "object", "properties": {"a": A, "x": {"$ref": "#/$defs/x"}}}
        schema = {**schema, "$defs": {"x": recursive}}
        try:
            grammar = compiled(schema)
        except RequestError:
            refused += 1
            continue
        for _ in range(4):
            text = written(grammar, chance)
            if text is not None:
                found = json.loads(text)
                try:
                    jsonschema.Draft202012Validator(schema).validate(found)
                except RecursionError:
                    continue  # a schema that refers to itself is too much for the validator
                tried += 1
    assert tried > 500
    assert refused > 100
