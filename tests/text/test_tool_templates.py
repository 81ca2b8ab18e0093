"""Tool calling by the form of each family: what the chat template writes of a conversation, and
that the parser reads calls as the template writes them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("msgspec")

from rorqual.models.hub import BUNDLED
from rorqual.request import SamplingParams
from rorqual.serve.config import ServeConfig
from rorqual.serve.http.calls import _joined
from rorqual.serve.http.choice import ChatChoiceBuilder
from rorqual.serve.http.protocol import ChatMessage
from rorqual.serve.http.request_builder import _message
from rorqual.serve.launch import _tool_format
from rorqual.text.chat_template import ChatTemplate
from rorqual.text.reasoning import Reasoning
from rorqual.text.tokenizer import Tokenizer
from rorqual.text.tool_calls import FORMATS, detect
from tests.text.chat_templates import TEMPLATES

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get.weather", "now")
]
ARGUMENTS = ('{"city": "Köln", "days": [1, 2]}', "{}")
# Where a template's assistant turn begins and ends.
TURNS = {
    "hermes": ("<|im_start|>assistant\n", "<|im_end|>"),
    "deepseek_v3": ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
    "deepseek_v31": ("<｜Assistant｜></think>", "<｜end▁of▁sentence｜>"),
    "kimi_k2": ("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
}
RESULTS = {
    "hermes": "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon"
    "\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "deepseek_v3": "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>sunny<｜tool▁output▁end｜>\n"
    "<｜tool▁output▁begin｜>noon<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
    "deepseek_v31": "<｜tool▁output▁begin｜>sunny<｜tool▁output▁end｜><｜tool▁output▁begin｜>noon"
    "<｜tool▁output▁end｜>",
    "kimi_k2": "<|im_system|>tool<|im_middle|>## Return of functions.get.weather:0\nsunny"
    "<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.now:1\nnoon<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>",
}


def template(tmp_path: Path, source: str) -> ChatTemplate:
    (tmp_path / "tokenizer.json").write_text((BUNDLED / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    return ChatTemplate(Tokenizer(tmp_path))


def ids(name: str) -> tuple[str, str]:
    kimi = name == "kimi_k2"
    return ("functions.get.weather:0", "functions.now:1") if kimi else ("call_a", "call_b")


def conversation(name: str, content: str | None) -> list[dict[str, Any]]:
    """A question, two calls and their results, as the server takes them from a client."""
    calls = [
        {"id": call_id, "function": {"name": tool["function"]["name"], "arguments": arguments}}
        for call_id, tool, arguments in zip(ids(name), TOOLS, ARGUMENTS, strict=True)
    ]
    turns = [
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "tool_call_id": ids(name)[0], "content": "sunny"},
        {"role": "tool", "tool_call_id": ids(name)[1], "content": "noon"},
    ]
    return [_message(ChatMessage.model_validate(turn)) for turn in turns]


def answer(name: str, pieces: list[str], finish: str, reasoning: Reasoning | None = None) -> Any:
    """(the message, the choice) of a text that came in such pieces."""
    choice = ChatChoiceBuilder(
        0,
        SamplingParams(),
        None,  # type: ignore[arg-type]
        reasoning,
        FORMATS[name].parser(),
    )
    fields: dict[str, list[Any]] = {"content": [], "reasoning_content": [], "tool_calls": []}
    for i, piece in enumerate(pieces):
        if i == len(pieces) - 1:
            choice.finish = finish
        for field, value in choice.fields(piece):
            fields[field].append(value)
    calls = _joined([delta for deltas in fields["tool_calls"] for delta in deltas])
    return {
        "content": "".join(fields["content"]),
        "reasoning_content": "".join(fields["reasoning_content"]),
        "calls": [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls],
    }, choice


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_tools_and_results_are_written(tmp_path: Path, name: str):
    made = template(tmp_path, TEMPLATES[name])
    text = made.render(conversation(name, None), TOOLS)
    assert text.endswith(RESULTS[name])
    assert made.describes_tools == (name in ("hermes", "kimi_k2"))
    if made.describes_tools:
        assert all(json.dumps(tool) in text for tool in TOOLS)


@pytest.mark.parametrize("content", [None, "Let me see."])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_calls_are_read_as_they_are_written(tmp_path: Path, name: str, content: str | None):
    """Whole, in every two parts and character by character; a template's own calls, and so those
    of a model that has learnt it."""
    made = template(tmp_path, TEMPLATES[name])
    text = made.render(conversation(name, content)[:2], TOOLS, add_generation_prompt=False)
    begin, end = TURNS[name]
    said = text[text.index(begin) + len(begin) : text.rindex(end)]
    cuts = [[said], list(said), *([said[:i], said[i:]] for i in range(1, len(said)))]
    for pieces in cuts:
        found, choice = answer(name, pieces, "stop")
        assert found["content"] == (content or "")
        assert [call[1:] for call in found["calls"]] == [
            (tool["function"]["name"], arguments)
            for tool, arguments in zip(TOOLS, ARGUMENTS, strict=True)
        ]
        assert choice.finish_reason == "tool_calls"
        if name == "kimi_k2":
            assert tuple(call[0] for call in found["calls"]) == ids(name)
        else:
            assert all(call[0].startswith("call_") for call in found["calls"])
    parser = FORMATS[name].parser()
    deltas = [delta for char in said for delta in parser.push(char).calls]
    pieces = [
        "".join(d["function"]["arguments"] for d in deltas if d["index"] == i) for i in (0, 1)
    ]
    assert pieces == list(ARGUMENTS)
    assert len(deltas) > 20, "arguments come as they are written"
    thought, _ = answer(name, [f"<think>\nhm\n</think>\n\n{said}"], "stop", Reasoning(False))
    assert (thought["reasoning_content"], thought["content"]) == ("hm", content or "")
    assert len(thought["calls"]) == 2


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_calls_cut_by_max_tokens_are_no_text(tmp_path: Path, name: str):
    """Nobody asked for a call here: what there is of it is told as a call, and none of the marks,
    as far as they are tokens of their own."""
    made = template(tmp_path, TEMPLATES[name])
    text = made.render(conversation(name, "Well.")[:2], TOOLS, add_generation_prompt=False)
    begin, end = TURNS[name]
    said = text[text.index(begin) + len(begin) : text.rindex(end)]
    first = min(said.index(m) + len(m) for m in FORMATS[name].marks if m in said)
    names = []
    for cut in range(first, len(said) + 1):
        for pieces in ([said[:cut]], list(said[:cut])):
            found, choice = answer(name, pieces, "length")
            assert found["content"] == "Well.", said[:cut]
            assert choice.finish_reason == "length"
            calls = found["calls"]
            assert all(w.startswith(a) for (_, _, a), w in zip(calls, ARGUMENTS, strict=False))
            names.append([call[1] for call in calls])
    assert names[0] == []
    assert ["get.weather"] in names
    assert names[-1] == ["get.weather", "now"]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_form_is_told_by_tokens_and_template(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
):
    vocabulary = {mark: i for i, mark in enumerate(FORMATS[name].marks)}
    assert detect(vocabulary, TEMPLATES[name]) == name
    config = ServeConfig()
    made = template(tmp_path, TEMPLATES[name])
    assert _tool_format(config, vocabulary, made) == name
    assert _tool_format(replace(config, tool_format="hermes"), vocabulary, made) == "hermes"
    assert not caplog.records
    other = template(tmp_path, "{{ tools }} <tool_call><function=f>")
    assert _tool_format(config, {}, other) == "hermes"
    assert "how the model writes tool calls" in caplog.text


def test_markup_that_is_no_call_is_text_where_the_model_was_done():
    found, choice = answer("hermes", ["It writes <tool_call> first"], "stop")
    assert found["content"] == "It writes <tool_call> first"
    assert choice.finish_reason == "stop"
