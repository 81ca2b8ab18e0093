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
        assert made.render(MESSAGES, tools, **switches) == theirs


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
