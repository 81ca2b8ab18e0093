"""Chat templates: the model's own, in a sandbox; never one from a request.

A base model has none: so that the chat route works, turns are written as plain lines, `role:
content`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rorqual.errors import LoadError, RequestError, quoted
from rorqual.request import check_object
from rorqual.text.tokenizer import Tokenizer

BIGGEST_PROMPT = 16 << 20  # most characters a template may render
# Template variables of a request, over which a template's loops may run.
MAX_VARIABLES = 4096  # characters of all of them, as JSON
DEEPEST_VARIABLES = 8
MAX_NUMBER = 1_000_000
MAX_RANGE_NUMBERS = 1_000_000  # in the template's own ranges
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
FIELDS = ("add_generation_prompt", "continue_final_message")
OWN = frozenset(
    (
        *TOKENS,
        *FIELDS,
        *("messages", "tools", "documents", "chat_template", "tokenize", "functions"),
        *("range", "dict", "lipsum", "cycler", "joiner", "namespace", "loop", "self", "caller"),
        *("raise_exception", "strftime_now", "varargs", "kwargs"),
    )
)
# Whether a template tests if a turn has content, as DeepSeek's do; not for reasoning_content.
ASKS_FOR_NULL = re.compile(r"(?<!\w)content['\"]?\]?\s+is\s+(not\s+)?none", re.IGNORECASE)


class RawJson(str):
    """Arguments of a tool call, already JSON: some templates insert them, others apply tojson; both
    give the same."""


class ChatTemplate:
    """Renders conversations with the model's template, or as plain lines, and encodes them."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.builtin = tokenizer.template is None
        source = tokenizer.template or ""
        self.template = None if self.builtin else _environment(source)
        self.describes_tools = re.search(r"\btools\b", source) is not None
        self.takes_null = ASKS_FOR_NULL.search(source) is not None
        self.special = {name: _content(tokenizer.settings.get(name)) for name in TOKENS}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. continue_final: it ends with the last message's text. `variables` must have
        passed check_variables."""
        if not self.takes_null:
            # a turn with only tool calls has none, and most templates expect text
            messages = [
                {**message, "content": ""} if message.get("content", "") is None else message
                for message in messages
            ]
        if not continue_final:
            return self._render(messages, tools, add_generation_prompt, variables or {})
        mark = f"the-end-{secrets.token_hex(8)}"  # marks the text's end in the rendered prompt
        last = messages[-1]
        marked = [*messages[:-1], {**last, "content": f"{last['content']}{mark}"}]
        text, found, _ = self._render(marked, tools, False, variables or {}).rpartition(mark)
        if not found:
            raise RequestError("the chat template does not show the last message's text")
        return text

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        if self.template is None:
            return plain(messages, add_generation_prompt)
        from jinja2 import TemplateError

        values = {
            "range": _Ranges(),
            **self.special,
            **variables,
            "add_generation_prompt": add_generation_prompt,
            "messages": messages,
            "tools": tools or None,
        }
        try:
            return _joined(self.template.generate(**values))
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

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=self.builtin)


def check_variables(name: str, given: Mapping[str, Any]) -> None:
    """Check a request's template variables: not the template's own names, and not so large that
    rendering takes long."""
    for variable in given:
        if not variable.isidentifier() or variable.startswith("_"):
            raise RequestError(f"{name}={quoted(variable)} is no name of a variable")
        if variable in FIELDS:
            raise RequestError(f"{name}: {variable} is a field of the request itself")
        if variable in OWN:
            raise RequestError(f"{name}: {variable} is the template's own")
    check_object(name, given, MAX_VARIABLES, DEEPEST_VARIABLES, MAX_NUMBER)


class _Ranges:
    """`range` for one rendering, limited to MAX_RANGE_NUMBERS numbers in all."""

    def __init__(self) -> None:
        self.left = MAX_RANGE_NUMBERS

    def __call__(self, *bounds: int) -> range:
        found = range(*bounds)
        self.left -= len(found)
        if self.left < 0:
            raise OverflowError(f"it counts to more than {MAX_RANGE_NUMBERS}")
        return found


def _joined(pieces: Iterable[str]) -> str:
    found = []
    size = 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size > BIGGEST_PROMPT:
            raise RequestError(
                f"the prompt has {size} characters or more; accepted: at most {BIGGEST_PROMPT}"
            )
    return "".join(found)


def plain(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
    """The built-in format for base models, ending where the response begins."""
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
