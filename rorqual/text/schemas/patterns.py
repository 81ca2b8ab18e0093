"""Regular expressions of a schema, read far enough to know what xgrammar makes of them: how long
their texts are, and that none of these needs escapes in JSON, which it would leave out."""

from __future__ import annotations

import re
from typing import NamedTuple

LOOKAROUNDS = ("(?=", "(?!", "(?<=", "(?<!")
CLASSES = "dDwWsS"
CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "v": "\v", "f": "\f", "0": "\0"}
HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
NAMED = re.compile(r"\?(?::|P?<[A-Za-z_]\w*>)")
REPEATED = re.compile(r"\{(\d{1,9})(,(\d{1,9})?)?\}")
DEEPEST = 50


class PatternError(ValueError):
    """Why a pattern cannot be enforced."""


class Width(NamedTuple):
    """Characters of a matching text; most is None where there is no limit."""

    least: int
    most: int | None

    def within(self, least: int, most: int | None) -> bool:
        return self.least >= least and (
            most is None or (self.most is not None and self.most <= most)
        )


class _Part(NamedTuple):
    width: Width
    begins: bool = False  # with ^
    ends: bool = False  # with $


def lookaround(pattern: str) -> str | None:
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


def width_of(pattern: str) -> Width:
    """Raises PatternError for what xgrammar would not enforce, or write as invalid JSON."""
    reader = _PatternReader(pattern)
    width = reader.choices(0).width
    if reader.place < len(pattern):
        raise PatternError("has a ')' that closes nothing")
    return width


def as_ascii(pattern: str) -> str:
    """The same with escapes: xgrammar writes raw quotes where a pattern has other characters."""
    return "".join(one if " " <= one <= "~" else f"\\u{{{ord(one):x}}}" for one in pattern)


def any_text(least: int, most: int | None) -> str:
    """A pattern of texts of such a length, because xgrammar's minLength and maxLength let control
    characters through. The delete character in it keeps the compiled form small: with it
    repetitions are not unrolled."""
    most_text = "" if most is None else str(most)
    return f'^[^"\\\\\\x00-\\x1f\x7f]{{{least},{most_text}}}$'


def _plain(one: str) -> bool:
    """Whether JSON has this character unescaped."""
    return one >= " " and one not in '"\\' and not "\ud800" <= one <= "\udfff"


def _times(one: int | None, count: int | None) -> int | None:
    if one == 0 or count == 0:
        return 0
    return None if one is None or count is None else one * count


class _PatternReader:
    def __init__(self, pattern: str):
        self.pattern = pattern
        self.place = 0

    def peek(self) -> str:
        return self.pattern[self.place : self.place + 1]

    def next(self) -> str:
        one = self.peek()
        if not one:
            raise PatternError("ends too early")
        self.place += 1
        return one

    def choices(self, depth: int) -> _Part:
        if depth > DEEPEST:
            raise PatternError(f"has more than {DEEPEST} groups in one another")
        found = [self._sequence(depth)]
        while self.peek() == "|":
            self.place += 1
            found.append(self._sequence(depth))
        mosts = [part.width.most for part in found]
        limited = [most for most in mosts if most is not None]
        most = max(limited) if len(limited) == len(mosts) else None
        width = Width(min(part.width.least for part in found), most)
        return _Part(width, any(it.begins for it in found), any(it.ends for it in found))

    def _sequence(self, depth: int) -> _Part:
        least = 0
        most: int | None = 0
        begins = ends = False
        while self.peek() not in ("", "|", ")"):
            part = self._term(depth)
            # xgrammar skips such anchors, and the text would not match
            if (part.begins and most != 0) or (ends and part.width.most != 0):
                raise PatternError("has an anchor within the text")
            begins = begins or part.begins
            ends = ends or part.ends
            least += part.width.least
            most = None if most is None or part.width.most is None else most + part.width.most
        return _Part(Width(least, most), begins, ends)

    def _term(self, depth: int) -> _Part:
        one = self.next()
        if one in "^$":
            return _Part(Width(0, 0), one == "^", one == "$")
        if one in "*+?{":
            raise PatternError(f"has {one!r} after nothing to be repeated")
        part = _Part(Width(1, 1))
        if one == "(":
            part = self._group(depth)
        elif one == "[":
            self._class()
        elif one == "\\":
            self._need(self._escape())
        else:
            self._need(one)
        return self._repeated(part)

    def _need(self, one: str | None) -> None:
        if one is not None and not _plain(one):
            raise PatternError(f"matches {one!r}, which JSON escapes")

    def _group(self, depth: int) -> _Part:
        if self.peek() == "?":
            kind = NAMED.match(self.pattern, self.place)
            if kind is None:
                raise PatternError("has a group that is not supported")
            self.place = kind.end()
        part = self.choices(depth + 1)
        if self.next() != ")":
            raise PatternError("has a group that is not closed")
        return part

    def _escape(self) -> str | None:
        """The character; None for a class."""
        found = HEX.match(self.pattern, self.place)
        if found:
            self.place = found.end()
            code = int(next(it for it in found.groups() if it), 16)
            if code > 0x10FFFF:
                raise PatternError("has an escape that is not supported")
            return chr(code)
        one = self.next()
        if one in CLASSES:
            return None
        if one in CONTROLS and not (one == "0" and self.peek().isdigit()):
            return CONTROLS[one]
        if one.isalnum() or not one.isascii():
            raise PatternError(f"has the escape '\\{one}', which is not supported")
        return one

    def _class(self) -> None:
        negated = self.peek() == "^"
        self.place += negated
        if self.peek() == "]":
            raise PatternError("has an empty class")
        usable = negated
        while self.peek() != "]":
            low = self._member(negated)
            if low is None:
                usable = True
                continue
            high: str | None = low
            if self.peek() == "-" and self.pattern[self.place + 1 : self.place + 2] != "]":
                self.place += 1
                high = self._member(negated)
            if high is None or high < low:
                raise PatternError("has a class whose range is not one")
            # a few characters are escaped, so a longer range has others
            usable = usable or any(
                map(_plain, map(chr, range(ord(low), min(ord(high), ord(low) + 40) + 1)))
            )
        self.place += 1
        if not usable:
            raise PatternError("has a class of characters which JSON escapes")

    def _member(self, negated: bool) -> str | None:
        one = self.next()
        if one != "\\":
            return one
        if self.peek() == "b":
            self.place += 1
            return "\b"
        if negated and self.peek() in ("D", "W", "S"):
            raise PatternError("has a class without some that is not supported")
        return self._escape()

    def _repeated(self, part: _Part) -> _Part:
        least, most = 1, 1  # type: int, int | None
        one = self.peek()
        if one and one in "*+?":
            self.place += 1
            least = int(one == "+")
            most = 1 if one == "?" else None
        elif one == "{":
            found = REPEATED.match(self.pattern, self.place)
            if found is None:
                raise PatternError("has a '{' that is no repetition")
            self.place = found.end()
            least = int(found[1])
            most = least if not found[2] else int(found[3]) if found[3] else None
        else:
            return part
        self.place += self.peek() == "?"
        if self.peek() and self.peek() in "*+?{":
            raise PatternError("has two repetitions in a row")
        if part.begins or part.ends:
            raise PatternError("repeats an anchor")
        return _Part(Width(part.width.least * least, _times(part.width.most, most)))
