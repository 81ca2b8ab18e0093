"""Tool-call parsers: whole texts, every way of cutting them in two, character by character, and
texts that only look like calls."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("msgspec")

from rorqual.request import SamplingParams
from rorqual.serve.http.calls import _joined
from rorqual.serve.http.choice import ChatChoiceBuilder
from rorqual.text.json_scan import CallObject
from rorqual.text.reasoning import Reasoning
from rorqual.text.tool_calls import (
    FORMATS,
    DeepSeekParser,
    HermesParser,
    KimiParser,
    ToolParser,
    ToolParserOutput,
    detect,
)

B = "<｜tool▁calls▁begin｜>"
E = "<｜tool▁calls▁end｜>"
CB = "<｜tool▁call▁begin｜>"
SEP = "<｜tool▁sep｜>"
CE = "<｜tool▁call▁end｜>"
KB, KEND, KC, KA, KE = FORMATS["kimi_k2"].marks


def parse(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls, as a client would put them together."""
    pushed = [parser.push(piece) for piece in pieces]
    pushed.append(parser.flush())
    calls = _joined([delta for one in pushed for delta in one.calls])
    return "".join(one.content for one in pushed), [
        (call["function"]["name"], call["function"]["arguments"]) for call in calls
    ]


HERMES = [
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    ('Well.\n<tool_call>{"name":"f","arguments":{}}</tool_call>', "Well.", [("f", "{}")]),
    (
        '<tool_call>{"name": "f", "arguments": {"s": "a}\\"]{<tool_call>"}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"x": [{}]}}</tool_call>',
        "",
        [("f", '{"s": "a}\\"]{<tool_call>"}'), ("g", '{"x": [{}]}')],
    ),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "parameters": {"a": null}}</tool_call>', "", [("f", '{"a": null}')]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ('<tool_call>{"name": "f", "arguments": {}}</tool_call> done', "", [("f", "{}")]),
    ("plain text < and <tool and [1, 2]", "plain text < and <tool and [1, 2]", []),
    ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
    ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    ("<tool_call>", "<tool_call>", []),
    ("trailing spaces  \n", "trailing spaces  \n", []),
]
DEEPSEEK = [
    (f'{B}{CB}function{SEP}f\n```json\n{{"a": 1}}\n```{CE}{E}', "", [("f", '{"a": 1}')]),
    (
        f'Sure.\n{B}{CB}function{SEP}f\n```json\n{{"s": "``` '
        f'{{"}}\n```{CE}\n{CB}function{SEP}g\n```json\n{{}}\n```{CE}{E}',
        "Sure.",
        [("f", '{"s": "``` {"}'), ("g", "{}")],
    ),
    (
        f'{B}{CB}f{SEP}{{"a": [1, 2]}}{CE}{CB}g{SEP}{{}}{CE}{E}',
        "",
        [("f", '{"a": [1, 2]}'), ("g", "{}")],
    ),
    (f"{B}{CB}function{SEP}{{}}{CE}{E}", "", [("function", "{}")]),
    (f"{CB}f{SEP}{{}}{CE}", "", [("f", "{}")]),
    (f'{B}{CB}f{SEP}{{"a": 1', "", [("f", '{"a": 1')]),
    (f'{B}{CB}function{SEP}f\n```json\n{{"a": 1}}\n```', "", [("f", '{"a": 1}')]),
    ("plain text < and <｜tool", "plain text < and <｜tool", []),
]
KIMI = [
    (f'{KB}{KC}functions.f:0{KA}{{"a": 1}}{KE}{KEND}', "", [("f", '{"a": 1}')]),
    (
        f'Sure. {KB}\n{KC}functions.a.b:3{KA} {{"s": "<|tool"}}{KE}{KC}f:4{KA}{{}}{KE}{KEND}',
        "Sure.",
        [("a.b", '{"s": "<|tool"}'), ("f", "{}")],
    ),
    (f"{KB}{KC}f{KA}{{}}", "", [("f", "{}")]),
    (f'{KB}{KC}functions.f:x{KA}{{"a": 1', "", [("f:x", '{"a": 1')]),
    ("plain text < and <|tool_calls", "plain text < and <|tool_calls", []),
]
CASES = [(HermesParser, *case) for case in HERMES] + [(DeepSeekParser, *case) for case in DEEPSEEK]
CASES += [(KimiParser, *case) for case in KIMI]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_every_cut_gives_the_same(
    parser: type[HermesParser], text: str, content: str, calls: list[tuple[str, str]]
):
    whole = parse(parser(), [text])
    if text.endswith("done"):
        content = "done"
    assert (whole[0].strip() if calls else whole[0], whole[1]) == (content, calls)
    for cut in range(1, len(text)):
        assert parse(parser(), [text[:cut], text[cut:]]) == whole, cut
    assert parse(parser(), list(text)) == whole


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet='<tool_call>/{}":,name argument\\[]1', max_size=80), st.randoms())
def test_any_text_cut_anywhere(text: str, chance: random.Random):
    """Text that is no call comes out as it went in, or calls are found the same way however it
    was cut."""
    whole = parse(HermesParser(), [text])
    pieces = []
    rest = text
    while rest:
        size = chance.randint(1, 5)
        pieces.append(rest[:size])
        rest = rest[size:]
    assert parse(HermesParser(), pieces) == whole
    if "<tool_call>" not in text:
        assert whole == (text, [])


def test_arguments_come_before_the_call_ends():
    parser = HermesParser()
    pushed = [
        parser.push(piece)
        for piece in (
            '<tool_call>{"name": "f", "argu',
            'ments": {"text": "one',
            " two",
            ' three"}}</tool_call>',
        )
    ]
    assert [
        delta.get("function", {}).get("arguments") for one in pushed for delta in one.calls
    ] == [
        "",
        '{"text": "one',
        " two",
        ' three"}',
    ]
    deep = DeepSeekParser()
    pushed = [deep.push(piece) for piece in (f"{B}{CB}f{SEP}{{", '"a": 1, ', f'"b": 2}}{CE}{E}')]
    assert [len(one.calls) > 0 for one in pushed] == [True, True, True]


def test_long_arguments_take_linear_time():
    import time

    def seconds(size: int) -> float:
        text = '<tool_call>{"name": "f", "arguments": {"t": "' + "x" * size + '"}}</tool_call>'
        start = time.thread_time()
        parse(HermesParser(), [text[i : i + 4] for i in range(0, len(text), 4)])
        return time.thread_time() - start

    seconds(1000)
    # a collection of garbage may fall into any one
    short, long = (min(seconds(size) for _ in range(3)) for size in (4_000, 40_000))
    assert long < 40 * max(short, 0.005)


def test_call_object_gives_back_what_follows():
    call = CallObject()
    assert call.push('{"name": "f", "arguments": {}} and more') == " and more"
    assert (call.state, call.name, call.take_arguments()) == ("done", "f", "{}")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_forced_format_is_what_the_parser_reads(name: str):
    """The text of the tags, with arguments put in, parses back to the call."""
    found = FORMATS[name]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    form = found.forced(tools, several=False)
    text = ""
    for element in form.get("elements", [form]):
        if element["type"] == "const_string":
            text += element["value"]
        else:
            tag = element["tags"][0]
            number = "0" + found.index if found.index else ""
            text += tag["begin"] + number + '{"a": 1}' + tag["end"]
    assert parse(found.parser(), [text]) == ("", [("f", '{"a": 1}')])
    json.dumps(form)


def test_detect():
    assert detect({B: 1}, "... ```json ...") == "deepseek_v3"
    assert detect({B: 1}, "... no fence ...") == "deepseek_v31"
    assert detect({"<tool_call>": 1}, None) == "hermes"
    assert detect({"<tool_call>": 1}, 'a \\"arguments\\": b') == "hermes"
    assert detect({}, '<tool_call> "arguments": ') == "hermes"
    assert detect({"<tool_call>": 1}, "<function=f> <parameter=a>") is None
    assert detect({}, None) is None


def test_told_is_empty_by_default():
    assert ToolParserOutput() == ToolParserOutput("", [])


def forced_text(name: str) -> str:
    """Two calls in the form that a forced choice has."""
    found = FORMATS[name]
    begin = found.begin.format(name="f") + ("0" + found.index if found.index else "")
    calls = found.separator.join([begin + '{"a": 1}' + found.end] * 2)
    return found.before + calls + found.after


@pytest.mark.parametrize("inside", [None, False, True])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_forced_call_cut_anywhere_shows_none_of_its_marks(name: str, inside: bool | None):
    text = forced_text(name)
    for cut in range(len(text) + 1):
        params = SamplingParams(max_tokens=1)
        reasoning = None if inside is None else Reasoning(inside)
        builder = ChatChoiceBuilder(
            0,
            params,
            None,
            reasoning,
            FORMATS[name].parser(),
            forced=True,  # type: ignore[arg-type]
        )
        fields = list(builder.fields(("</think>" if inside else "") + text[: cut // 2]))
        builder.finish = "length"
        fields += builder.fields(text[cut // 2 : cut])
        assert {kind for kind, _ in fields} <= {"tool_calls"}, text[:cut]
        arguments = "".join(
            delta["function"]["arguments"] for _, deltas in fields for delta in deltas
        )
        assert ('{"a": 1}' * 2).startswith(arguments), text[:cut]
        assert (arguments == '{"a": 1}' * 2) >= (cut == len(text))
        assert builder.finish_reason == "length"
