"""Chat templates: the model's own, in a sandbox; never one that a request brings.

A base model has none. So that its chat route can be tried, its turns are written as plain lines,
`role: content`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rorqual.errors import LoadError, RequestError
from rorqual.text.tokenizer import Tokenizer

BIGGEST_PROMPT = 16 << 20  # characters a template may make of a request


class RawJson(str):
    """Arguments of a tool call, JSON already: some templates paste them, others put them through
    tojson. Both give the same here."""


class ChatTemplate:
    """`encode` turns a conversation into token ids and says whether the prompt ends inside a
    <think> block."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.builtin = tokenizer.template is None
        self.template = None if self.builtin else _environment(tokenizer.template or "")
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        self.special = {name: _content(tokenizer.settings.get(name)) for name in names}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        **switches: bool,
    ) -> str:
        if self.template is None:
            return plain(messages, switches.get("add_generation_prompt", True))
        from jinja2 import TemplateError

        values = {
            **self.special,
            "add_generation_prompt": True,
            **switches,
            "messages": messages,
            "tools": tools or None,
        }
        try:
            text = self.template.render(**values)
        except (
            TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            RecursionError,
            OverflowError,
        ) as error:
            raise RequestError(
                f"the chat template does not accept these messages: {error}"
            ) from None
        if len(text) > BIGGEST_PROMPT:
            raise RequestError(
                f"the prompt has {len(text)} characters; accepted: at most {BIGGEST_PROMPT}"
            )
        return text

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=self.builtin)


def plain(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
    """The built-in form for base models, ending where the answer begins."""
    lines = [f"{message['role']}: {message.get('content') or ''}" for message in messages]
    return "\n".join([*lines, "assistant:"] if add_generation_prompt else lines)


def _environment(source: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise LoadError(f"the model's chat template cannot be read: {error}") from None


def _to_json(
    value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any
) -> str:
    if isinstance(value, RawJson):
        return str(value)
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _content(value: Any) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    return text or ""
