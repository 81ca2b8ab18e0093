"""Chat templates: the model's own in a sandbox, and plain lines for a base model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")

from rorqual.errors import LoadError, RequestError
from rorqual.models.hub import BUNDLED
from rorqual.text.chat_template import ChatTemplate, RawJson
from rorqual.text.tokenizer import Tokenizer
from tests.text.chat_templates import TEMPLATES

MESSAGES = [{"role": "user", "content": "Hello"}]
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "f", "arguments": RawJson('{"a": "é"}')}}],
}


def template(tmp_path: Path, source: str | None) -> ChatTemplate:
    (tmp_path / "tokenizer.json").write_text((BUNDLED / "tokenizer.json").read_text())
    settings: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    if source is not None:
        settings["chat_template"] = source
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return ChatTemplate(Tokenizer(tmp_path))


def test_same_text_as_transformers(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    source = (
        "{{ bos_token }}{%- if tools %}\n# Tools\n{% for tool in tools %}{{ tool | "
        "tojson }}\n{% endfor %}{%- endif %}"
        "{% for m in messages %}\n<|{{ m.role }}|>{{ m.content }}{% if loop.last %}.{% "
        "endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and "
        "not enable_thinking %}off{% endif %}{% endif %}"
    )
    made = template(tmp_path, source)
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "description": "Größe", "parameters": {"type": "object"}},
        }
    ]
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made.tokenizer.raw, chat_template=source, bos_token="<s>", eos_token="</s>"
    )
    for switches in ({}, {"enable_thinking": False}):
        theirs = fast.apply_chat_template(
            MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True, **switches
        )
        assert made.render(MESSAGES, tools, variables=switches) == theirs


def test_arguments_of_calls_are_json_pasted_or_filtered(tmp_path: Path):
    pasted = template(tmp_path, "{{ messages[0].tool_calls[0].function.arguments + '!' }}").render(
        [CALL], None
    )
    assert pasted == '{"a": "é"}!'
    filtered = template(
        tmp_path, "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    ).render([CALL], None)
    assert filtered == '{"a": "é"}'


def test_a_base_model_gets_plain_lines(tmp_path: Path):
    made = template(tmp_path, None)
    assert made.builtin
    text = made.render([{"role": "system", "content": "Be brief."}, *MESSAGES], None)
    assert text == "system: Be brief.\nuser: Hello\nassistant:"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system turn') }}",
        "{{ messages[0]['x']['y'] }}",
        "{{ 1 / 'a' }}",
        "{{ [].append(1) }}",
    ],
)
def test_what_a_template_refuses_is_the_callers_mistake(tmp_path: Path, source: str):
    with pytest.raises(RequestError, match="chat template does not accept"):
        template(tmp_path, source).render(MESSAGES, None)


def test_the_sandbox_holds(tmp_path: Path):
    with pytest.raises(RequestError):
        template(tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}").render(
            MESSAGES, None
        )


def test_a_broken_template_is_said_at_loading(tmp_path: Path):
    with pytest.raises(LoadError, match="chat template"):
        template(tmp_path, "{% if %}")


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("said", ["a", " So  it is\n\n", "<|im_end|> e"])
def test_the_last_message_may_go_on(tmp_path: Path, name: str, said: str):
    """The prompt ends with its text as it was given, whatever the template writes behind it, and
    also where the text stands elsewhere too."""
    made = template(tmp_path, TEMPLATES[name])
    for turns in ([*MESSAGES, {"role": "assistant", "content": said}], [*MESSAGES]):
        last = turns[-1]["content"]
        whole = made.render(turns, None, add_generation_prompt=False)
        text = made.render(turns, None, continue_final=True)
        assert text.endswith(last)
        assert whole.startswith(text)
        assert len(whole) - len(text) <= len("<｜end▁of▁sentence｜>")


def test_a_message_that_is_not_shown_cannot_go_on(tmp_path: Path):
    with pytest.raises(RequestError, match="does not show the last message"):
        template(tmp_path, "nothing").render(MESSAGES, None, continue_final=True)


def test_variables_reach_the_template_and_its_counting_ends(tmp_path: Path):
    source = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{{ words[0] }}"
    made = template(tmp_path, source)
    assert made.render(MESSAGES, None, variables={"n": 30, "words": ["a"]}) == "a"
    for n in (10**6, 2000):
        with pytest.raises(RequestError, match="it counts to more than 1000000"):
            made.render(MESSAGES, None, variables={"n": n, "words": ["a"]})
    long = template(tmp_path, "{% for i in range(n) %}{{ 'x' * n }}{% endfor %}")
    with pytest.raises(RequestError, match="characters or more; accepted"):
        long.render(MESSAGES, None, variables={"n": 100_000})


def test_null_content_is_kept_for_templates_that_ask_for_it(tmp_path: Path):
    asks = "{% if messages[0]['content'] is none %}null{% endif %}"
    assert template(tmp_path, asks).render([CALL], None) == "null"
    assert template(tmp_path, "{{ 'a' in messages[0].content }}").render([CALL], None) == "False"
    other = "{{ messages[0].reasoning_content is none }} {{ messages[0].content | length }}"
    assert template(tmp_path, other).render([CALL], None) == "False 0"
