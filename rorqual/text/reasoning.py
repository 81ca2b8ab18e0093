"""Splits reasoning, <think> ... </think>, from content in a stream of text pieces."""

from __future__ import annotations

from rorqual.text.stop import overlap

BEGIN = "<think>"
END = "</think>"


class Reasoning:
    """push(text) returns (reasoning, content). `inside`: the prompt ended with <think>, so the text
    begins with reasoning; else it does only if it begins with <think> itself. Newlines next to the
    tags belong to neither part."""

    def __init__(self, inside: bool):
        self.state = "inside" if inside else "start"
        self.held = ""
        self.strip = inside

    def push(self, text: str) -> tuple[str, str]:
        self.held += text
        if self.state == "start":
            self._start()
        if self.state == "inside":
            return self._inside()
        return "", self._content() if self.state == "outside" else ""

    def _start(self) -> None:
        """Hold text until it is clear whether it begins with the tag."""
        begun = self.held.lstrip()
        if begun.startswith(BEGIN):
            self.state = "inside"
            self.held = begun[len(BEGIN) :]
            self.strip = True
        elif not BEGIN.startswith(begun):
            self.state = "outside"
            self.strip = False

    def _inside(self) -> tuple[str, str]:
        self._strip_start()
        end = self.held.find(END)
        if end >= 0:
            reasoning = self.held[:end].rstrip("\n")
            self.held = self.held[end + len(END) :]
            self.state = "outside"
            self.strip = True
            return reasoning, self._content()
        keep = overlap(self.held, END)
        # newlines may precede the tag
        shown = self.held[: len(self.held) - keep].rstrip("\n")
        self.held = self.held[len(shown) :]
        return shown, ""

    def _content(self) -> str:
        self._strip_start()
        content = self.held
        self.held = ""
        return content

    def _strip_start(self) -> None:
        if self.strip:
            self.held = self.held.lstrip("\n")
            self.strip = not self.held

    def flush(self) -> tuple[str, str]:
        rest = self.held
        self.held = ""
        return (rest, "") if self.state == "inside" else ("", rest)
