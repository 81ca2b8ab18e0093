"""Incremental parser of {"name": ..., "arguments": ...}, so that the arguments can be streamed
before the object ends."""

from __future__ import annotations

import json
from typing import Any

ARGUMENTS = ("arguments", "parameters")


class CallObject:
    """push(text) consumes what belongs to the object and returns what follows it. `state`: open,
    done, or bad (not such an object).

    take_arguments() returns the text of the arguments that has become known since it was last
    called.
    """

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.chunk = ""
        self.state = "open"
        self.name: str | None = None
        self.depth = 0
        self.quoted = self.escaped = self.value_next = False
        self.key: str | None = None
        # the current string, where it is a key or a value of the object itself
        self.string: list[str] = []
        self.kind = ""  # first character of the arguments, once they have started
        self.inside = False  # within the arguments
        self.cut = 0  # where in the chunk the arguments continue
        self.pending: list[str] = []

    @property
    def raw(self) -> str:
        return "".join(self.parts)

    @property
    def arguments_begun(self) -> bool:
        """Objects are streamed; anything else (a string that contains JSON) is returned once
        complete."""
        return self.kind == "{" or (bool(self.kind) and not self.inside)

    def push(self, text: str) -> str:
        self.chunk = text
        self.cut = 0
        end = len(text)
        for pos, char in enumerate(text):
            self._step(char, pos)
            if self.state != "open":
                end = pos + 1
                break
        if self.inside:
            self._note(end)
        self.parts.append(text[:end])
        if self.state == "done" and not isinstance(_loads(self.raw), dict):
            self.state = "bad"
        return text[end:]

    def _step(self, char: str, pos: int) -> None:
        if self.quoted:
            self._in_string(char)
        elif char == '"':
            self._begin_value(char, pos)
            self.quoted = True
            self.string = [char]
        elif char in "{[":
            self._begin_value(char, pos)
            self.depth += 1
            if self.depth == 1 and char == "[":
                self.state = "bad"
        elif char in "}]":
            self._close(pos)
        elif self.depth == 1:
            self._at_top(char, pos)
        elif self.depth == 0 and not char.isspace():
            self.state = "bad"

    def _in_string(self, char: str) -> None:
        if self.depth == 1 and not self.inside:
            self.string.append(char)
        if self.escaped:
            self.escaped = False
        elif char == "\\":
            self.escaped = True
        elif char == '"':
            self.quoted = False
            if self.depth == 0:
                self.state = "bad"
            elif self.depth == 1 and not self.inside:
                self._string_done()

    def _string_done(self) -> None:
        text = _loads("".join(self.string))
        if self.key is None:
            self.key = text if isinstance(text, str) else ""
        elif self.key == "name" and isinstance(text, str) and not self._name_settled:
            self.name = text

    @property
    def _name_settled(self) -> bool:
        """Whether the name was sent, or could have been: a later name is ignored, however the text
        is split."""
        return self.name is not None and self.arguments_begun

    def _begin_value(self, char: str, pos: int) -> None:
        if self.depth == 1 and self.value_next:
            self.value_next = False
            if self.key in ARGUMENTS and not self.kind:
                self.kind = char
                self.inside = True
                self.cut = pos

    def _at_top(self, char: str, pos: int) -> None:
        if char == ":":
            self.value_next = True
        elif char == ",":
            self._end_value(pos)
        elif not char.isspace():
            self._begin_value(char, pos)

    def _note(self, end: int) -> None:
        self.pending.append(self.chunk[self.cut : end])

    def _end_value(self, end: int) -> None:
        if self.inside:
            self._note(end)
            self.inside = False
        self.key = None
        self.value_next = False

    def _close(self, pos: int) -> None:
        self.depth -= 1
        if self.depth == 1 and self.inside:
            self._note(pos + 1)
            self.inside = False
        if self.depth <= 0:
            self._end_value(pos)
            self.state = "done"

    def take_arguments(self) -> str:
        new = "".join(self.pending)
        self.pending = []
        if self.kind == "{":
            return new
        inner = _loads(new)
        return inner if isinstance(inner, str) else new.strip()


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
