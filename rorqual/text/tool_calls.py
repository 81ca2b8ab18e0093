"""Parsers of tool calls in a model's text, incremental, with results as deltas of the OpenAI API.

Every parser reads each character a bounded number of times and evaluates nothing. Text that starts
like a call but is none is returned as plain text, unless a part of it was already sent as a call. A
truncated call is sent as far as it is known; the rest of its text is dropped.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rorqual.text.json_scan import CallObject
from rorqual.text.schemas.enforced import WHERE
from rorqual.text.stop import overlap

PARAMETERS = "tools.{}.function.parameters"  # of a chat
OBJECT = re.compile(r'\\?"arguments\\?"\s*:')  # also inside a string of the template


@dataclass
class ToolParserOutput:
    """The result of a push: plain text, and deltas of calls, {index, id, type, function: {name,
    arguments}}."""

    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def start(self, index: int, name: str, call_id: str | None = None) -> None:
        """call_id: the model's own id, in formats that have one."""
        call = {
            "id": call_id or f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        self.calls.append({"index": index, **call})

    def arguments(self, index: int, text: str) -> None:
        if text:
            self.calls.append({"index": index, "function": {"arguments": text}})


class ToolParser(Protocol):
    count: int  # calls found so far

    def push(self, text: str) -> ToolParserOutput: ...

    def flush(self, cut: bool = False) -> ToolParserOutput:
        """Called at the end of the text. cut: the output was truncated."""


class HermesParser:
    """Qwen3's format: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, once per call."""

    BEGIN = "<tool_call>"
    END = "</tool_call>"

    def __init__(self) -> None:
        self.held = ""
        self.space = ""  # before the opening tag, returned if no call follows
        self.call: CallObject | None = None
        self.ending = False  # the object is complete, its closing tag is pending
        self.name_sent = False
        self.count = 0

    def push(self, text: str) -> ToolParserOutput:
        output = ToolParserOutput()
        self.held += text
        while self._advance(output):
            pass
        return output

    def _advance(self, output: ToolParserOutput) -> bool:
        if self.ending:
            return self._end()
        return self._inside(output) if self.call is not None else self._outside(output)

    def _outside(self, output: ToolParserOutput) -> bool:
        start = self.held.find(self.BEGIN)
        if start >= 0:
            before = self.held[:start]
            output.content += before.rstrip()
            self.space = before[len(before.rstrip()) :]
            self.held = self.held[start + len(self.BEGIN) :]
            self.call = CallObject()
            self.name_sent = False
            return True
        shown = self.held[: len(self.held) - overlap(self.held, self.BEGIN)].rstrip()
        output.content += shown
        self.held = self.held[len(shown) :]
        return False

    def _inside(self, output: ToolParserOutput) -> bool:
        assert self.call is not None
        self.held = self.call.push(self.held)
        if self.call.name is not None and self.call.arguments_begun and not self.name_sent:
            output.start(self.count, self.call.name)
            self.name_sent = True
        if self.name_sent:
            output.arguments(self.count, self.call.take_arguments())
        if self.call.state == "open":
            return False
        self._close(output)
        return True

    def _close(self, output: ToolParserOutput) -> None:
        """The object has ended, validly or not."""
        assert self.call is not None
        if not self.name_sent and self.call.state == "done" and self.call.name is not None:
            output.start(self.count, self.call.name)
            output.arguments(self.count, self.call.take_arguments() or "{}")
            self.name_sent = True
        if self.name_sent:
            self.count += 1
            self.ending = True
        else:
            output.content += self.space + self.BEGIN + self.call.raw
        self.call = None

    def _end(self) -> bool:
        """Skip the closing tag and the whitespace around it."""
        rest = self.held.lstrip()
        if rest.startswith(self.END):
            self.held = rest[len(self.END) :]
            self.ending = False
            return True
        if not self.END.startswith(rest):
            self.held = rest
            self.ending = False
            return True
        return False

    def flush(self, cut: bool = False) -> ToolParserOutput:
        output = ToolParserOutput()
        if self.call is not None:
            if cut and self.call.name is not None and not self.name_sent:
                output.start(self.count, self.call.name)
                self.name_sent = True
            if self.name_sent:
                self.count += 1
            elif not cut:
                output.content = self.space + self.BEGIN + self.call.raw
        elif not self.ending and not self._nothing(self.held.strip(), cut):
            output.content = self.held
        self.held = ""
        self.call = None
        return output

    def _nothing(self, held: str, cut: bool) -> bool:
        """Whether `held` after a call is only whitespace, or the start of the next call's tag."""
        return self.count > 0 and (not held or (cut and self.BEGIN.startswith(held)))


class MarkedParser:
    """Formats whose calls are delimited by special tokens: CALLS, for each call CALL header SEP
    arguments CALL_END, then CALLS_END."""

    CALLS: str
    CALLS_END: str
    CALL: str
    SEP: str
    CALL_END: str

    def __init__(self) -> None:
        self.held = ""
        self.space = ""  # before the first mark, returned if no call follows
        self.state = "text"
        self.fenced = False  # the arguments are in a fenced block
        self.count = 0

    def push(self, text: str) -> ToolParserOutput:
        output = ToolParserOutput()
        self.held += text
        while getattr(self, f"_{self.state}")(output):
            pass
        return output

    def _text(self, output: ToolParserOutput) -> bool:
        hits = [
            (self.held.find(mark), mark) for mark in (self.CALLS, self.CALL) if mark in self.held
        ]
        if hits:
            start, mark = min(hits)
            before = self.held[:start]
            output.content += before.rstrip()
            self.space = before[len(before.rstrip()) :]
            self.held = self.held[start + len(mark) :]
            self.state = "between" if mark == self.CALLS else "header"
            return True
        keep = max(overlap(self.held, self.CALLS), overlap(self.held, self.CALL))
        shown = self.held[: len(self.held) - keep].rstrip()
        output.content += shown
        self.held = self.held[len(shown) :]
        return False

    def _between(self, output: ToolParserOutput) -> bool:
        """Between calls, or after the last: text here is dropped."""
        for mark, state in ((self.CALL, "header"), (self.CALLS_END, "after")):
            start = self.held.find(mark)
            if start >= 0 and not self.held[:start].strip():
                self.held = self.held[start + len(mark) :]
                self.state = state
                return True
        return False

    def _after(self, output: ToolParserOutput) -> bool:
        self.held = ""
        return False

    def _header(self, output: ToolParserOutput) -> bool:
        found = self._name(self.held)
        if found is None:
            return False
        name, call_id, self.held = found
        output.start(self.count, name, call_id)
        self.state = "arguments"
        return True

    def _name(self, held: str) -> tuple[str, str | None, str] | None:
        """Name, id and the text after the header, once it is complete."""
        raise NotImplementedError

    def _cut_name(self) -> tuple[str, str | None] | None:
        """Name and id in a truncated header, if they are known."""
        raise NotImplementedError

    def _arguments(self, output: ToolParserOutput) -> bool:
        end = self.held.find(self.CALL_END)
        if end >= 0:
            output.arguments(self.count, self._without_fence(self.held[:end]))
            self.held = self.held[end + len(self.CALL_END) :]
            self.state = "between"
            self.count += 1
            return True
        safe = self._known_arguments()
        output.arguments(self.count, safe)
        self.held = self.held[len(safe) :]
        return False

    def _known_arguments(self) -> str:
        """The held text, without a tail that may start the closing mark."""
        return self._without_fence(self.held[: len(self.held) - overlap(self.held, self.CALL_END)])

    def _without_fence(self, text: str) -> str:
        return text.rstrip().rstrip("`").rstrip() if self.fenced else text.rstrip()

    def flush(self, cut: bool = False) -> ToolParserOutput:
        output = ToolParserOutput()
        if self.state == "text":
            output.content = self.held
        elif self.state == "header" and cut:
            found = self._cut_name()
            if found is not None:
                output.start(self.count, *found)
                self.count += 1
        elif self.state == "header":
            output.content = (self.space if not self.count else "") + self.CALL + self.held
        elif self.state == "arguments":
            output.arguments(self.count, self._known_arguments())
            self.count += 1
        self.held = ""
        return output


class DeepSeekParser(MarkedParser):
    """DeepSeek's format: V3 and R1 write `function<sep>NAME` and the arguments in a fenced block of
    JSON, V3.1 `NAME<sep>ARGUMENTS`."""

    CALLS = "<｜tool▁calls▁begin｜>"
    CALLS_END = "<｜tool▁calls▁end｜>"
    CALL = "<｜tool▁call▁begin｜>"
    SEP = "<｜tool▁sep｜>"
    CALL_END = "<｜tool▁call▁end｜>"
    FENCE = "```json\n"

    def _name(self, held: str) -> tuple[str, str | None, str] | None:
        head, sep, rest = held.partition(self.SEP)
        begun = rest.lstrip()
        if not sep or not begun:
            return None
        self.fenced = head.strip() == "function" and begun[0] not in "{["
        if not self.fenced:
            return head.strip(), None, rest
        name, fence, rest = rest.partition(self.FENCE)
        return (name.strip(), None, rest) if fence else None

    def _cut_name(self) -> tuple[str, str | None] | None:
        head, sep, rest = self.held.partition(self.SEP)
        if not sep:
            return None
        if head.strip() != "function":
            return head.strip(), None
        name, line_end, _ = rest.lstrip().partition("\n")
        return (name.strip(), None) if line_end else None


class KimiParser(MarkedParser):
    """Kimi-K2's format: `functions.NAME:INDEX<argument begin>ARGUMENTS`. The part before the
    arguments is the call's id, by which the template names its result."""

    CALLS = "<|tool_calls_section_begin|>"
    CALLS_END = "<|tool_calls_section_end|>"
    CALL = "<|tool_call_begin|>"
    SEP = "<|tool_call_argument_begin|>"
    CALL_END = "<|tool_call_end|>"

    def _name(self, held: str) -> tuple[str, str | None, str] | None:
        head, sep, rest = held.partition(self.SEP)
        call_id = head.strip()
        begun = rest.lstrip()
        return (_function_of(call_id), call_id, begun) if sep and begun else None

    def _cut_name(self) -> tuple[str, str | None] | None:
        head, sep, _ = self.held.partition(self.SEP)
        call_id = head.strip()
        # without the mark the name's end is unknown
        return (_function_of(call_id), call_id) if sep else None


def _function_of(call_id: str) -> str:
    """NAME of functions.NAME:INDEX; it may contain dots."""
    name, colon, index = call_id.rpartition(":")
    return (name if colon and index.isdigit() else call_id).removeprefix("functions.")


@dataclass(frozen=True)
class ToolFormat:
    """A model family's format of calls: the parser, and the parts with which a grammar forces
    calls. before, after: around all calls; separator: between two. index: the text between a call's
    number, which the model writes itself, and its arguments."""

    parser: type[HermesParser] | type[DeepSeekParser] | type[KimiParser]
    begin: str
    end: str
    before: str = ""
    after: str = ""
    separator: str = ""
    index: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that a parser looks for."""
        if self.parser is HermesParser:
            return (HermesParser.BEGIN, HermesParser.END)
        found = self.parser
        assert issubclass(found, MarkedParser)
        return (found.CALLS, found.CALLS_END, found.CALL, found.SEP, found.CALL_END)

    def forced(
        self, tools: list[dict[str, Any]], several: bool, numbers: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """xgrammar's format for at least one call of these functions and nothing else. numbers: of
        these among the caller's, for errors to name them."""
        if numbers is None:
            numbers = range(len(tools))
        tags = [self._tag(tool["function"], i) for tool, i in zip(tools, numbers, strict=True)]
        calls = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not several,
        }
        around = [{"type": "const_string", "value": text} for text in (self.before, self.after)]
        return (
            {"type": "sequence", "elements": [around[0], calls, around[1]]}
            if self.before
            else calls
        )

    def _tag(self, function: dict[str, Any], number: int) -> dict[str, Any]:
        # without parameters: an object of nothing, where {"type": "object"} would be of anything
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        where = PARAMETERS.format(number)
        name = json.dumps(function["name"])[1:-1]
        content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 1}
        content[WHERE] = where
        if self.index:
            digits = {"type": "regex", "pattern": "0|[1-9][0-9]{0,3}"}
            mark = {"type": "const_string", "value": self.index}
            content = {"type": "sequence", "elements": [digits, mark, content]}
        return {
            "type": "tag",
            "begin": self.begin.format(name=name),
            "content": content,
            "end": self.end,
        }


HERMES = ToolFormat(
    HermesParser,
    '<tool_call>\n{{"name": "{name}", "arguments": ',
    "}\n</tool_call>",
    separator="\n",
)
DEEPSEEK_V3 = ToolFormat(
    DeepSeekParser,
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
    "\n```<｜tool▁call▁end｜>",
    DeepSeekParser.CALLS,
    DeepSeekParser.CALLS_END,
    separator="\n",
)
DEEPSEEK_V31 = ToolFormat(
    DeepSeekParser,
    "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    DeepSeekParser.CALLS,
    DeepSeekParser.CALLS_END,
)
KIMI_K2 = ToolFormat(
    KimiParser,
    "<|tool_call_begin|>functions.{name}:",
    "<|tool_call_end|>",
    KimiParser.CALLS,
    KimiParser.CALLS_END,
    index=KimiParser.SEP,
)
FORMATS = {
    "hermes": HERMES,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "kimi_k2": KIMI_K2,
}


def detect(vocabulary: dict[str, int], template: str | None) -> str | None:
    """The format a model was trained on, by its vocabulary and template; None if unknown. The
    tokens of DeepSeek and Kimi are unique to them; which of DeepSeek's two formats it is shows in
    how the template writes earlier calls. Hermes's tag is also used by others, around text other
    than an object with arguments."""
    if KimiParser.CALLS in vocabulary:
        return "kimi_k2"
    if DeepSeekParser.CALLS in vocabulary:
        return "deepseek_v3" if template is None or "```json" in template else "deepseek_v31"
    tagged = HermesParser.BEGIN in vocabulary or HermesParser.BEGIN in (template or "")
    return "hermes" if tagged and (template is None or OBJECT.search(template)) else None
