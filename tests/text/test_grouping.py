"""What the parsers have told of a text's beginning follows from it alone, however its characters
came: at every place, not only at the end."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rorqual.text.reasoning import Reasoning
from rorqual.text.stop import StopStrings
from rorqual.text.tool_calls import FORMATS

HERMES = ["<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": {"a": ', '"parameters": ']
HERMES += ['"name": "g"', "}", "[", "{", '"{\\"b\\": 1}"', "12", ",", '"', "\\"]
COMMON = ["a", "b c", " ", "\n", "\n\n", "`", "```", "<", "<tool", "1"]
DEEPSEEK = [*FORMATS["deepseek_v3"].marks, "function", "f\n", "```json\n", '{"a": 1}', "\n```"]
DEEPSEEK += ["<｜tool", "<｜tool▁call▁end"]
KIMI = [*FORMATS["kimi_k2"].marks, "functions.f:0", '{"a": 1}', "<|tool_call"]
THOUGHT = ["<think>", "</think>", "<thi", "</", "nk>"]
STOPS = ("stop", "to pay", "op\n\n", "a<")

Total = tuple[Any, ...]
Machine = Callable[[str], Total]


def tools(form: str) -> Machine:
    parser = FORMATS[form].parser()
    content: list[str] = []
    calls: list[list[str]] = []

    def push(piece: str) -> Total:
        pushed = parser.push(piece)
        content.append(pushed.content)
        for delta in pushed.calls:
            if "id" in delta:
                calls.append([delta["function"]["name"], ""])
            calls[delta["index"]][1] += delta["function"]["arguments"]
        return "".join(content), [list(call) for call in calls], parser.count

    return push


def reasoning(inside: bool) -> Machine:
    reader = Reasoning(inside)
    found = ["", ""]

    def push(piece: str) -> Total:
        for i, part in enumerate(reader.push(piece)):
            found[i] += part
        return tuple(found)

    return push


def stops() -> Machine:
    reader = StopStrings(STOPS)
    found = [""]

    def push(piece: str) -> Total:
        found[0] += reader.push(piece)
        return found[0], reader.found

    return push


def check(make: Callable[[], Machine], fragments: list[str], cuts: list[int]) -> None:
    text = "".join(fragments)
    single = make()
    want = [single(char) for char in text]
    grouped = make()
    ends = sorted({cut % (len(text) + 1) for cut in cuts} | {len(text)})
    place = 0
    for end in ends:
        if end > place:
            assert grouped(text[place:end]) == want[end - 1], (text[:place], text[place:end])
        place = end


def of(*parts: list[str]) -> Any:
    return st.lists(st.sampled_from([*COMMON, *(piece for part in parts for piece in part)]))


anywhere = st.lists(st.integers(0, 1000), max_size=8)
twice = '<tool_call>{"name": "f", "arguments": {}, "name": "g"}</tool_call>'
late = '<tool_call>{"arguments": 12, "name": "f", "name": "g"}</tool_call>'


@settings(max_examples=150, deadline=None)
@given(of(HERMES), anywhere)
@example([twice], [])
@example([late], [])
def test_hermes(fragments: list[str], cuts: list[int]) -> None:
    check(lambda: tools("hermes"), fragments, cuts)


@settings(max_examples=150, deadline=None)
@given(of(HERMES), anywhere)
def test_calls_of_hermes(fragments: list[str], cuts: list[int]) -> None:
    check(lambda: tools("hermes"), ["<tool_call>{", *fragments], cuts)


@pytest.mark.parametrize(("form", "parts"), [("deepseek_v3", DEEPSEEK), ("kimi_k2", KIMI)])
def test_marked_forms(form: str, parts: list[str]) -> None:
    marks = FORMATS[form].marks

    @settings(max_examples=150, deadline=None)
    @given(of(parts), anywhere, st.sampled_from(["", marks[2], "".join((marks[2], "f", marks[3]))]))
    def run(fragments: list[str], cuts: list[int], start: str) -> None:
        check(lambda: tools(form), [start, *fragments], cuts)

    run()


@settings(max_examples=150, deadline=None)
@given(st.booleans(), of(THOUGHT), anywhere)
def test_reasoning(inside: bool, fragments: list[str], cuts: list[int]) -> None:
    check(lambda: reasoning(inside), fragments, cuts)


@settings(max_examples=150, deadline=None)
@given(of(["s", "t", "o", "p", *STOPS, *accumulate("to pa")]), anywhere)
def test_stop_strings(fragments: list[str], cuts: list[int]) -> None:
    check(stops, fragments, cuts)
