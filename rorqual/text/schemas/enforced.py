"""Schemas as xgrammar enforces them: it ignores much of what stands beside something else. So a
caller's schema is written anew, in forms that are enforced, or refused with the keyword and its
place.

References become definitions of their own. Keywords beside a reference, allOf, anyOf or oneOf are
joined with each choice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from rorqual.errors import RequestError, quoted
from rorqual.request import StructuredOutput
from rorqual.text.schemas.forms import Forms, lookaround_error
from rorqual.text.schemas.keywords import (
    OF_TYPE,
    REFUSED,
    TYPES,
    Keywords,
    Parts,
    SchemaError,
    SchemaPart,
    UnsatisfiableError,
    fits,
    joined,
    key_of,
    own_keywords,
    refused,
    unique,
)
from rorqual.text.schemas.patterns import lookaround

CHOICES = ("anyOf", "oneOf", "allOf")
# what says something of values; all else is an annotation
TELLING = frozenset(
    (
        *("type", "enum", "const", "$ref", "if", "additionalItems"),
        *("unevaluatedProperties", "unevaluatedItems"),
        *CHOICES,
        *REFUSED,
        *(keyword for keywords in OF_TYPE.values() for keyword in keywords),
    )
)
UNEVALUATED = {"unevaluatedProperties": "additionalProperties", "unevaluatedItems": "items"}
MOST_STEPS = 20_000
MOST_OPTIONS = 128  # of a oneOf: each is compared with each
WHERE = "where"  # of a schema within a structural tag: the parameter that errors name


def enforced(structure: StructuredOutput) -> StructuredOutput:
    """The same in forms that xgrammar enforces; raises RequestError where there are none."""
    if structure.kind == "regex":
        found = lookaround(structure.value)
        if found:
            # its place is the parameter, which is known elsewhere
            words = str(lookaround_error(structure.value, found, "regex"))
            raise RequestError(words.removeprefix("regex: "))
    if structure.kind not in ("json_schema", "structural_tag"):
        return structure
    try:
        root = json.loads(structure.value)
        if structure.kind == "json_schema":
            root = enforced_schema(root)
        else:
            for form in schemas_within(root):
                form["json_schema"] = enforced_schema(
                    form["json_schema"], form.get(WHERE, "schema")
                )
        return replace(structure, value=json.dumps(root, ensure_ascii=False))
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"the {structure.kind} cannot be compiled: it is not valid JSON: {error}"
        ) from None


def schemas_within(root: Any) -> Iterator[dict[str, Any]]:
    """The parts of a structural tag that have a schema."""
    left = [root]
    while left:
        form = left.pop()
        if isinstance(form, list):
            left.extend(reversed(form))
        elif isinstance(form, dict) and form.get("type") == "json_schema" and "json_schema" in form:
            yield form
        elif isinstance(form, dict):
            left.extend(reversed(form.values()))


def enforced_schema(schema: Any, where: str = "schema") -> Any:
    """where: the parameter, from which errors tell the way."""
    try:
        return _Writer(schema, where).write()
    except RecursionError:
        raise SchemaError(where, "nests too deeply to be enforced") from None


def _endless(name: str, definitions: dict[str, Any]) -> bool:
    """Whether a definition is nothing but references that come back to it, or to each other."""
    seen: set[str] = set()
    while name not in seen:
        seen.add(name)
        body = definitions[name]
        if body.keys() != {"$ref"}:
            return False
        name = body["$ref"].removeprefix("#/$defs/")
    return True


class _Writer:
    """Of one schema. open: the places whose forms are being made, which may refer to
    themselves."""

    def __init__(self, root: Any, where: str):
        self.root = SchemaPart(root, where)
        self.forms = Forms(self.form, lambda parts: self._choices(parts, ()))
        self.open: set[frozenset[object]] = set()
        self.names: dict[frozenset[object], str] = {}
        self.waiting: list[tuple[str, Parts]] = []  # definitions to be written
        self.targets: dict[str, SchemaPart] = {}  # by reference
        self.added: dict[str, Any] = {}  # schemas of our own, by what they ask for
        self.steps = 0

    def write(self) -> Any:
        found = self.form((self.root,))
        definitions: dict[str, Any] = {}
        places: dict[str, str] = {}
        while self.waiting:
            name, parts = self.waiting.pop()
            self.open.clear()
            definitions[name] = self._body(_known(parts))
            places[name] = parts[0].place
        for name, place in places.items():
            if _endless(name, definitions):
                raise SchemaError(place, "refers to itself alone: no text matches it")
        return {**found, "$defs": definitions} if definitions else found

    def form(self, parts: Parts) -> Any:
        parts = self._flat(parts)
        if not parts:
            return {}
        if len(parts) == 1 and _only(parts[0], "$ref"):
            return self._refer(_known((self._target(parts[0]),)))
        if _key(parts) in self.open:
            return self._refer(parts)
        return self._body(parts)

    def _flat(self, parts: Parts) -> Parts:
        """Without those that ask for nothing, and with the parts of an allOf that stands alone."""
        while any(_only(part, "allOf") for part in parts):
            parts = tuple(
                one
                for part in parts
                for one in (_listed(part, "allOf") if _only(part, "allOf") else (part,))
            )
            self._step(parts[0].place if parts else self.root.place)
        return _known(parts)

    def _body(self, parts: Parts) -> Any:
        key = _key(parts)
        self.open.add(key)
        try:
            if len(parts) == 1 and _only(parts[0], "$ref"):
                return self._refer(_known((self._target(parts[0]),)))
            if len(parts) == 1 and _only(parts[0], "anyOf"):
                return self._one_of([(one,) for one in _listed(parts[0], "anyOf")], parts[0])
            if len(parts) == 1 and _only(parts[0], "oneOf"):
                return self._one_of(self._apart(parts[0]), parts[0])
            choices = self._choices(parts, ())
            return _any_of([lambda it=it: self.forms.of(it) for it in choices], parts[0])
        finally:
            self.open.discard(key)

    def _one_of(self, options: list[Parts], part: SchemaPart) -> Any:
        return _any_of([lambda it=it: self.form(it) for it in options], part)

    # ---- references

    def _refer(self, parts: Parts) -> Any:
        if not parts:
            return {}
        key = _key(parts)
        if key not in self.names:
            self.names[key] = f"d{len(self.names)}"
            self.waiting.append((self.names[key], parts))
        return {"$ref": f"#/$defs/{self.names[key]}"}

    def _target(self, part: SchemaPart) -> SchemaPart:
        ref = part.schema["$ref"]
        if not isinstance(ref, str) or (ref != "#" and not ref.startswith("#/")):
            raise SchemaError(
                part.place,
                f"the schema refers to {quoted(str(ref))}; accepted as $ref: '#', and paths within "
                "the schema that begin with '#/'",
            )
        if ref not in self.targets:
            self.targets[ref] = self._found(ref, part)
        return self.targets[ref]

    def _found(self, ref: str, part: SchemaPart) -> SchemaPart:
        target = self.root
        for step in unquote(ref).split("/")[1:]:
            name: str | int = step.replace("~1", "/").replace("~0", "~")
            inside = target.schema
            if isinstance(inside, list) and str(name).isdecimal() and int(name) < len(inside):
                name = int(name)
            elif not isinstance(inside, dict) or name not in inside:
                raise SchemaError(part.place, f"the schema has nothing at {quoted(ref)}")
            target = SchemaPart(inside[name], target.at(name))
        return target

    # ---- choices

    def _step(self, place: str, cost: int = 1) -> None:
        self.steps += cost
        if self.steps > MOST_STEPS:
            raise SchemaError(place, "the schema has too many combinations to be enforced")

    def _choices(self, parts: Parts, through: tuple[object, ...]) -> list[Keywords]:
        """The keywords of every choice, all parts joined. through: the references followed."""
        found = [Keywords()]
        for part in parts:
            found = self._products(found, self._of(part, through))
        return found

    def _products(self, ours: list[Keywords], theirs: list[Keywords]) -> list[Keywords]:
        found = []
        problem: UnsatisfiableError | None = None
        for one in ours:
            for other in theirs:
                self._step(other.place, _cost(one) + _cost(other))
                try:
                    found.append(joined(one, other))
                except UnsatisfiableError as error:
                    problem = error
        if problem is not None and not found:
            raise problem
        return found

    def _of(self, part: SchemaPart, through: tuple[object, ...]) -> list[Keywords]:
        schema = part.schema
        if schema is False:
            raise UnsatisfiableError(part.place, "no value fits 'false'")
        if not isinstance(schema, dict):
            if schema is True:
                return [Keywords()]
            raise SchemaError(part.place, "a schema should be an object or a boolean")
        found = [own_keywords(part)]
        if "$ref" in schema:
            target = self._target(part)
            if target.key in through:
                raise refused("$ref", part.place, ": it refers to itself")
            found = self._products(found, self._choices((target,), (*through, target.key)))
        for one in _listed(part, "allOf"):
            found = self._products(found, self._choices((one,), through))
        if "anyOf" in schema:
            found = self._products(found, self._any(_listed(part, "anyOf"), part, through))
        if "oneOf" in schema:
            found = self._exactly_one(found, part, through)
        return [_closed_off(one, part) for one in found]

    def _any(self, options: Parts, part: SchemaPart, through: tuple[object, ...]) -> list[Keywords]:
        found: list[Keywords] = []
        problem = UnsatisfiableError(part.place, "no value fits an empty 'anyOf'")
        for one in options:
            try:
                found += self._choices((one,), through)
            except UnsatisfiableError as error:
                problem = error
        if not found:
            raise problem
        return found

    # ---- oneOf

    def _exactly_one(
        self, base: list[Keywords], part: SchemaPart, through: tuple[object, ...]
    ) -> list[Keywords]:
        alone = self._options(part, through)
        arms = []
        for option in alone:
            try:
                arms.append(self._products(base, option))
            except UnsatisfiableError:
                arms.append([])
        if not any(arms):
            raise UnsatisfiableError(part.place, "no value fits an option of 'oneOf'")
        if _disjoint(arms, alone):
            return [one for arm in arms for one in arm]
        told = own_keywords(self._asking(_tag(alone, part), part))
        return self._products([one for arm in arms for one in arm], [told])

    def _options(self, part: SchemaPart, through: tuple[object, ...]) -> list[list[Keywords]]:
        found = []
        options = _listed(part, "oneOf")
        if len(options) > MOST_OPTIONS:
            raise refused("oneOf", part.place, f" with more than {MOST_OPTIONS} options")
        for one in options:
            try:
                found.append(self._choices((one,), through))
            except UnsatisfiableError:
                found.append([])
        return found

    def _apart(self, part: SchemaPart) -> list[Parts]:
        """The options of a oneOf that stands alone; with a property required that tells them
        apart, where they are not apart without."""
        options = _listed(part, "oneOf")
        alone = self._options(part, ())
        if _disjoint(alone, alone):
            return [(one,) for one in options]
        asking = self._asking(_tag(alone, part), part)
        return [(one, asking) for one in options]

    def _asking(self, tag: str, part: SchemaPart) -> SchemaPart:
        asked = self.added.setdefault(tag, {"type": "object", "required": [tag]})
        return SchemaPart(asked, part.place)


def _any_of(makers: list[Any], part: SchemaPart) -> Any:
    found = []
    problem = UnsatisfiableError(part.place, "no value fits")
    for make in makers:
        try:
            found.append(make())
        except UnsatisfiableError as error:
            problem = error
    if not found:
        raise problem
    return found[0] if len(found) == 1 else {"anyOf": found}


def _cost(one: Keywords) -> int:
    return 1 + sum(len(one.get(name) or ()) for name in ("properties", "enum")) // 16


def _key(parts: Parts) -> frozenset[object]:
    return frozenset(part.key for part in parts)


def _known(parts: Parts) -> Parts:
    return unique(tuple(part for part in parts if part.schema is not True and part.schema != {}))


def _only(part: SchemaPart, keyword: str) -> bool:
    """Whether nothing else in it says something of values."""
    schema = part.schema
    return isinstance(schema, dict) and TELLING & schema.keys() == {keyword}


def _listed(part: SchemaPart, keyword: str) -> Parts:
    given = part.schema.get(keyword, [])
    if not isinstance(given, list):
        raise SchemaError(part.place, f"{keyword!r} should be an array")
    return tuple(SchemaPart(one, part.at(keyword, i)) for i, one in enumerate(given))


def _closed_off(one: Keywords, part: SchemaPart) -> Keywords:
    """With what the schema says of properties or items that nothing beside it speaks of."""
    for keyword, plain in UNEVALUATED.items():
        if keyword in part.schema and plain not in one.values:
            if keyword == "unevaluatedProperties" and "patternProperties" in one.values:
                continue  # others are never written
            one = Keywords(dict(one.values), dict(one.places))
            one.set(plain, (SchemaPart(part.schema[keyword], part.at(keyword)),), part.place)
    return one


# ---- disjoint options


def _disjoint(written: list[list[Keywords]], asked: list[list[Keywords]]) -> bool:
    """Whether no value written for an option fits another one."""
    return all(
        _apart_from(one, other)
        for i, arm in enumerate(written)
        for j, others in enumerate(asked)
        if i != j
        for one in arm
        for other in others
    )


def _apart_from(one: Keywords, other: Keywords) -> bool:
    if "enum" in one.values:
        return _none_fits(one.values["enum"], other)
    if not _types_meet(one.types, other.get("type")):
        return True
    if one.types != ("object",):
        return False
    ours = one.get("properties") or {}
    theirs = other.get("properties") or {}
    needed = one.get("required") or []
    if one.closed and any(name not in (*ours, *needed) for name in other.get("required") or ()):
        return True
    shut = other.get("additionalProperties") is not None and other.closed
    if shut and "patternProperties" not in other.values and set(needed) - theirs.keys():
        return True
    return any(_parts_apart(ours.get(name, ()), theirs.get(name, ())) for name in needed)


def _none_fits(values: list[Any], other: Keywords) -> bool:
    keys = {key_of(value) for value in other.values["enum"]} if "enum" in other.values else None
    try:
        return not any(fits(it, other) and (keys is None or key_of(it) in keys) for it in values)
    except SchemaError:
        return False


def _types_meet(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> bool:
    mine = {"number" if it == "integer" else it for it in one or TYPES}
    yours = {"number" if it == "integer" else it for it in other or TYPES}
    return not mine.isdisjoint(yours)


def _parts_apart(ours: Parts, theirs: Parts) -> bool:
    mine = _values_of(ours)
    yours = _values_of(theirs)
    if mine is not None and yours is not None:
        return mine.isdisjoint(yours)
    return not _types_meet(_types_of(ours), _types_of(theirs))


def _values_of(parts: Parts) -> set[str] | None:
    for part in parts:
        schema = part.schema
        if isinstance(schema, dict) and "const" in schema:
            return {key_of(schema["const"])}
        if isinstance(schema, dict) and isinstance(schema.get("enum"), list):
            return {key_of(value) for value in schema["enum"]}
    return None


def _types_of(parts: Parts) -> tuple[str, ...] | None:
    for part in parts:
        given = part.schema.get("type") if isinstance(part.schema, dict) else None
        if given:
            return tuple(given) if isinstance(given, list) else (given,)
    return None


def _tag(options: list[list[Keywords]], part: SchemaPart) -> str:
    """A property whose values differ between all options. Once it is required no value fits
    two."""
    first = next((it for option in options for it in option), Keywords())
    for name in first.get("properties") or {}:
        found = [
            [_values_of((it.get("properties") or {}).get(name, ())) for it in option]
            for option in options
        ]
        if any(values is None for option in found for values in option):
            continue
        sets = [set().union(*(values for values in option if values)) for option in found]
        if sum(map(len, sets)) == len(set().union(*sets)):
            return name
    raise refused("oneOf", part.place, ": a value could fit two of its options")
