"""Forms of a schema that xgrammar enforces, made of the keywords at one place. They may allow less
than the keywords do, never more."""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from fractions import Fraction
from typing import Any

from rorqual.errors import quoted
from rorqual.text.schemas.keywords import (
    FORMATS,
    Keywords,
    Parts,
    SchemaError,
    SchemaPart,
    UnsatisfiableError,
    fits,
    refused,
)
from rorqual.text.schemas.patterns import PatternError, any_text, as_ascii, lookaround, width_of

# Formats of names, such as the keys of a dict in Python: xgrammar knows those of values alone.
DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
TIME = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
NAMES = {
    "uuid": r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$",
    "date": f"^{DATE}$",
    "time": f"^{TIME}$",
    "date-time": f"^{DATE}T{TIME}$",
}
Inner = Callable[[Parts], Any]  # a schema's form; raises SchemaError
Form = dict[str, Any]

# A schema of these alone is known by all of them to xgrammar; names of properties as well, whose
# schemas it then takes for those of another object with other properties of such names.
UNSEEN = frozenset(
    (
        "title",
        "default",
        "description",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
    )
)
MOST_VALUES = 1000
LARGEST_MULTIPLE = 1024  # more takes xgrammar a rule each
EXACT = 2**53  # larger integers are rounded, as bounds of a number
LARGEST = 2**63  # or in an enum, or as limits of an integer
SCHEME_AND_HOST = 10 + 3 + 253 + 6 + 1
# letters, digits and what else may be anywhere in a path or query. What is left out rather than
# what may be, with the delete character, so that repetitions are not unrolled (see any_text).
IN_PATH = r"[^\x00-%\'-*:-<>@\[-^`{-}" + "\x7f" + r"-\u{10ffff}]"


class Forms:
    """inner: makes the forms of schemas within. choices: the keywords of each choice of a schema,
    its references followed."""

    def __init__(self, inner: Inner, choices: Callable[[Parts], list[Keywords]]):
        self.inner = inner
        self.choices = choices
        self.count = 0

    def of(self, keywords: Keywords) -> Form:
        if "enum" in keywords.values:
            return self._enum(keywords)
        types = keywords.types
        if types is None:
            return {}
        if "number" in types:
            types = tuple(name for name in types if name != "integer")
        found = []
        problem: UnsatisfiableError | None = None
        for name in types:
            try:
                found.append(self._of_type(name, keywords))
            except UnsatisfiableError as error:
                problem = error
        if problem is not None and not found:
            raise problem
        return found[0] if len(found) == 1 else {"anyOf": found}

    def _enum(self, keywords: Keywords) -> Form:
        place = keywords.places["enum"]
        values = [value for value in keywords.values["enum"] if fits(value, keywords)]
        if not values:
            raise UnsatisfiableError(place, "no value of 'enum' or 'const' fits the other keywords")
        for value in values:
            large = isinstance(value, int | float) and abs(value) >= LARGEST
            if large and isinstance(value, int):
                raise refused("enum", place, f" with an integer of {LARGEST} or more")
        if any(isinstance(value, dict | list) for value in values):
            return self._told_apart({"enum": values})
        return {"enum": values}

    def _told_apart(self, form: Form) -> Form:
        """xgrammar takes it for no other one: see UNSEEN."""
        self.count += 1
        return {**form, "x-number": self.count}

    def _of_type(self, name: str, keywords: Keywords) -> Form:
        if name == "string":
            return _string(keywords)
        if name == "number":
            return _number(keywords)
        if name == "integer":
            return _integer(keywords)
        if name == "array":
            return self._array(keywords)
        return self._object(keywords) if name == "object" else {"type": name}

    # ---- arrays

    def _array(self, keywords: Keywords) -> Form:
        place = keywords.place
        prefix = keywords.get("prefixItems") or []
        least = keywords.get("minItems") or 0
        most = keywords.get("maxItems")
        rest = self._rest_of_items(keywords, least > len(prefix) or not prefix)
        if rest is None and (most is None or most > len(prefix)):
            most = len(prefix)
        if most is not None and least > most:
            raise UnsatisfiableError(place, f"no array has {least} items, and at most {most}")
        if keywords.get("uniqueItems") and (most is None or most > 1):
            raise refused("uniqueItems", keywords.places["uniqueItems"])
        first = [self.inner(parts) for parts in prefix[:most]]
        if most == 0:
            return {"type": "array", "items": {}, "maxItems": 0}
        form: Form = {"type": "array"}
        if first:
            form["prefixItems"] = first
        form["items"] = False if rest is None or most == len(first) else rest
        form |= {"minItems": least} if least else {}
        if most is not None and form["items"] is not False:
            form["maxItems"] = most
        return form

    def _rest_of_items(self, keywords: Keywords, wanted: bool) -> Any:
        """The form of items after those of prefixItems, or None where there are none."""
        if "items" not in keywords.values:
            return {} if wanted else None
        try:
            return self.inner(keywords.values["items"])
        except UnsatisfiableError:
            return None

    # ---- objects

    def _object(self, keywords: Keywords) -> Form:
        keywords = self._with_names(keywords)
        if "patternProperties" in keywords.values:
            return self._pattern_object(keywords)
        closed = keywords.closed
        needed = keywords.get("required") or []
        properties = self._properties(keywords, closed, needed)
        form: Form = {"type": "object"}
        if properties:
            form["properties"] = properties
        if needed:
            form["required"] = needed
        form["additionalProperties"] = False if closed else self._additional(keywords)
        _check_counts(keywords, form, len(needed) + 1)
        if not UNSEEN.isdisjoint(properties):
            return self._told_apart(form)
        return (
            {"type": "object"} if form == {"type": "object", "additionalProperties": {}} else form
        )

    def _properties(self, keywords: Keywords, closed: bool, needed: list[str]) -> dict[str, Any]:
        given: dict[str, Parts] = dict(keywords.get("properties") or {})
        for name in needed:
            if name not in given and "additionalProperties" in keywords.values and closed:
                raise UnsatisfiableError(
                    keywords.places["required"],
                    f"'required' names {quoted(name)}, which 'additionalProperties' excludes",
                )
            given.setdefault(name, keywords.get("additionalProperties") or ())
        found = {}
        for name, parts in given.items():
            try:
                found[name] = self.inner(parts)
            except UnsatisfiableError:
                # may be left out, and is not let in again as an additional one
                if name in needed or not closed:
                    raise
        return found

    def _additional(self, keywords: Keywords) -> Any:
        try:
            return self.inner(keywords.get("additionalProperties") or ())
        except UnsatisfiableError:
            return False

    def _with_names(self, keywords: Keywords) -> Keywords:
        """propertyNames as properties or patternProperties: beside these xgrammar ignores it."""
        parts = keywords.get("propertyNames") or ()
        place = keywords.places.get("propertyNames", "")
        rules = self.choices(parts)
        rule = rules[0]
        asked = rule.values.keys() - {"type"}
        typed = "string" in (rule.get("type") or ("string",))
        if len(rules) == 1 and typed and not asked:
            return keywords
        if len(rules) > 1 or not typed or "patternProperties" in keywords.values:
            raise refused("propertyNames", place)
        values = dict(keywords.values)
        given: dict[str, Parts] = values.get("properties") or {}
        rest: Parts = values.get("additionalProperties") or ()
        if "enum" in asked:
            names = [it for it in rule.values["enum"] if isinstance(it, str) and fits(it, rule)]
            kept = {name: parts for name, parts in given.items() if name in names}
            more = {} if given and keywords.closed else dict.fromkeys(names, rest)
            values["properties"] = {**more, **kept}
        elif not given and (pattern := _pattern_of_names(rule, asked)) is not None:
            values["patternProperties"] = {pattern: rest}
            values.pop("properties", None)
        else:
            raise refused("propertyNames", place)
        values["additionalProperties"] = (SchemaPart(False, place),)
        del values["propertyNames"]
        places = {**keywords.places, "properties": place, "patternProperties": place}
        return Keywords(values, places)

    def _pattern_object(self, keywords: Keywords) -> Form:
        """Names of one pattern, and no others."""
        place = keywords.places["patternProperties"]
        patterns = keywords.values["patternProperties"]
        if keywords.get("properties"):
            raise refused("patternProperties", place, " beside 'properties'")
        if len(patterns) > 1:
            raise refused("patternProperties", place, " with several patterns")
        if keywords.get("required"):
            raise refused("patternProperties", place, " beside 'required'")
        ((pattern, parts),) = patterns.items()
        inner = self.inner(parts)
        named = {_checked(pattern, place): inner}
        form = {"type": "object", "patternProperties": named, "additionalProperties": False}
        _check_counts(keywords, form, 1)
        return form


def _pattern_of_names(rule: Keywords, asked: Set[str]) -> str | None:
    """For what is `asked` of an object's names; None where no pattern says it."""
    if asked <= {"pattern", "minLength", "maxLength"}:
        return str(_string(rule)["pattern"])
    return NAMES.get(rule.values["format"]) if asked == {"format"} else None


def _check_counts(keywords: Keywords, form: Form, distinct: int) -> None:
    """distinct: how many different properties there are in an object of as many: beyond, one may be
    written twice."""
    least = keywords.get("minProperties") or 0
    most = keywords.get("maxProperties")
    if form["additionalProperties"] is False and "patternProperties" not in form:
        if least > len(form.get("properties", ())):
            raise UnsatisfiableError(
                keywords.places["minProperties"], f"there are no {least} properties"
            )
    elif least > distinct:
        raise refused("minProperties", keywords.places["minProperties"], " with open names")
    if most is not None and max(least, len(form.get("required", ()))) > most:
        raise UnsatisfiableError(
            keywords.places["maxProperties"], f"no object has at most {most} properties here"
        )
    if least > len(form.get("required", ())):
        form["minProperties"] = least
    if most is not None:
        form["maxProperties"] = most


# ---- strings


def _checked(pattern: str, place: str) -> str:
    found = lookaround(pattern)
    if found:
        raise lookaround_error(pattern, found, place)
    try:
        width_of(pattern)
    except PatternError as error:
        raise refused("pattern", place, f": {quoted(pattern)} {error}") from None
    return as_ascii(pattern)


def lookaround_error(pattern: str, found: str, place: str) -> SchemaError:
    return SchemaError(
        place,
        f"the pattern {quoted(pattern)} contains {found!r}; accepted: patterns without lookahead "
        "and lookbehind",
    )


def _string(keywords: Keywords) -> Form:
    """xgrammar heeds one of format, pattern and length."""
    least = keywords.get("minLength") or 0
    most = keywords.get("maxLength")
    pattern = keywords.get("pattern")
    form = keywords.get("format")
    if most is not None and least > most:
        raise UnsatisfiableError(
            keywords.place, f"no string has {least} characters, and at most {most}"
        )
    limited = "minLength" if least else "maxLength"
    if pattern is not None:
        place = keywords.places["pattern"]
        checked = _checked(pattern, place)
        if form is not None:
            raise refused("pattern", place, " beside 'format'")
        if not width_of(pattern).within(least, most):
            raise refused("pattern", place, f" beside {limited!r}")
        return {"type": "string", "pattern": checked}
    if form is not None:
        shortest, longest = FORMATS[form]
        fitting = shortest >= least and (most is None or (longest is not None and longest <= most))
        if fitting:
            return {"type": "string", "format": form}
        if form == "uri" and most is not None and most > SCHEME_AND_HOST and least <= 5:
            return {"type": "string", "pattern": _short_uri(most)}
        raise refused("format", keywords.places["format"], f" beside {limited!r}")
    if not least and most is None:
        return {"type": "string"}
    return {"type": "string", "pattern": any_text(least, most)}


def _short_uri(most: int) -> str:
    """URIs of hosts, of a limited length."""
    return (
        r"^[A-Za-z][A-Za-z+.-]{0,9}://[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?"
        rf"(/{IN_PATH}{{0,{most - SCHEME_AND_HOST}}})?$"
    )


# ---- numbers


def _number(keywords: Keywords) -> Form:
    multiple = keywords.get("multipleOf")
    if isinstance(multiple, int):
        return _integer(keywords)
    if multiple is not None:
        raise refused("multipleOf", keywords.places["multipleOf"], " for numbers with a fraction")
    form: Form = {"type": "number"}
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if name in keywords.values:
            value = keywords.values[name]
            if abs(value) > EXACT and isinstance(value, int) and _rounded(value) != value:
                raise refused(name, keywords.places[name], f" where it is {quoted(str(value), '')}")
            form[name] = value
    low = max(form.get("minimum", -math.inf), form.get("exclusiveMinimum", -math.inf))
    high = min(form.get("maximum", math.inf), form.get("exclusiveMaximum", math.inf))
    shut = low in (form.get("exclusiveMinimum"), form.get("exclusiveMaximum"))
    if low > high or (low == high and shut):
        raise UnsatisfiableError(keywords.place, "no number is within the limits")
    return form


def _rounded(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _integer(keywords: Keywords) -> Form:
    lows = [math.ceil(keywords.values["minimum"])] if "minimum" in keywords.values else []
    highs = [math.floor(keywords.values["maximum"])] if "maximum" in keywords.values else []
    if "exclusiveMinimum" in keywords.values:
        lows.append(math.floor(keywords.values["exclusiveMinimum"]) + 1)
    if "exclusiveMaximum" in keywords.values:
        highs.append(math.ceil(keywords.values["exclusiveMaximum"]) - 1)
    low = max(lows, default=None)
    high = min(highs, default=None)
    if low is not None and high is not None and low > high:
        raise UnsatisfiableError(keywords.place, f"no integer is from {low} to {high}")
    # the integers among the multiples of p/q are those of p
    step = Fraction(str(keywords.get("multipleOf") or 1)).numerator
    if step > 1:
        return _multiples(step, low, high, keywords.places["multipleOf"])
    # xgrammar has no larger ones as limits; those that are meant are smaller
    low = None if low is None else max(low, -LARGEST)
    high = None if high is None else min(high, LARGEST - 1)
    form: Form = {"type": "integer"}
    form |= {} if low is None else {"minimum": low}
    form |= {} if high is None else {"maximum": high}
    return form


def _multiples(step: int, low: int | None, high: int | None, place: str) -> Form:
    if low is None and high is None:
        if step > LARGEST_MULTIPLE:
            raise refused("multipleOf", place, f" above {LARGEST_MULTIPLE}")
        return {"type": "integer", "multipleOf": step}
    if low is None or high is None:
        raise refused("multipleOf", place, " with one of 'minimum' and 'maximum' alone")
    first = -(-low // step)
    last = high // step
    if first > last:
        raise UnsatisfiableError(place, f"no multiple of {step} is from {low} to {high}")
    if last - first >= MOST_VALUES:
        raise refused("multipleOf", place, f" with more than {MOST_VALUES} values")
    return {"enum": [step * i for i in range(first, last + 1)]}
