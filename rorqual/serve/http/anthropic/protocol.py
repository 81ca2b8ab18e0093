"""The requests of Anthropic's Messages API, for text and functions. Nested objects are parsed by
translate.py; their models here define the fields of each `type`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SkipValidation, model_validator

from rorqual.request import MAX_STOP
from rorqual.serve.errors import ApiError
from rorqual.serve.http.blocks.tagged import refuse
from rorqual.serve.http.protocol import (
    FAST,
    TEMPLATE_KWARGS,
    Model,
    Positive,
    Sampling,
    StopText,
)

CHATS = "is not supported on this route; use /v1/chat/completions"
WORDS = "is not a field of a message; use "
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "container": ((), "is not supported: this server runs no tools"),
    "mcp_servers": (([],), "is not supported: this server runs no tools"),
    "stop": ((), f"{WORDS}stop_sequences"),
    "n": ((1,), "is not supported: a message has one answer"),
    "prompt_logprobs": ((), CHATS),
    "return_token_ids": ((False,), CHATS),
    "return_tokens_as_token_ids": ((False,), CHATS),
    "kv_transfer_params": ((), CHATS),
    "max_completion_tokens": ((), f"{WORDS}max_tokens"),
    "response_format": ((), f"{WORDS}output_config.format"),
    "output_format": ((), f"{WORDS}output_config.format"),
    "stream_options": ((), "is not a field of a message: usage always comes"),
}
# by which the official client knows to send the whole conversation instead
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
CacheControl = Annotated[dict[str, Any] | None, Field(description="Without effect.")]

ToolsetName = Annotated[str | None, Field(description="Without effect.")]


class TextBlock(Model):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: list[Any] | None = Field(default=None, description="Without effect.")


class ThinkingBlock(Model):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(default=None, description="Nobody checks it.")


class ToolUseBlock(Model):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: dict[str, Any] | None = None
    toolset_name: ToolsetName = None


class ToolResultBlock(Model):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | list[TextBlock] | None, SkipValidation] = None
    is_error: bool | None = Field(default=None, description="Without effect: the content says so.")
    cache_control: CacheControl = None
    toolset_name: ToolsetName = None


TEXTS: dict[str, type[Model]] = {"text": TextBlock}
BLOCKS_OF: dict[str, dict[str, type[Model]]] = {
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
    "system": TEXTS,
}


class MessageTurn(Model):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        str | list[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock], SkipValidation
    ]


class CustomTool(Model):
    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl = None
    eager_input_streaming: bool | None = Field(
        default=None, description="Without effect: input is always streamed as it is written."
    )
    input_examples: list[dict[str, Any]] | None = Field(
        default=None, description="Without effect: templates have no place for them."
    )
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolMode(Model):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class ToolByName(Model):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


MODES: dict[str, type[Model]] = {
    "auto": ToolMode,
    "any": ToolMode,
    "tool": ToolByName,
    "none": ToolMode,
}


class ThinkingConfig(Model):
    """Switches a template's thinking on or off, where it has such a switch."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Positive | None = Field(default=None, description="Without effect.")
    display: Literal["summarized", "omitted"] | None = None


class JsonOutput(Model):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Model):
    effort: str | None = Field(default=None, description="Without effect.")
    format: JsonOutput | None = None


class PromptBody(Sampling):
    """Fields of both routes, with a chat's sampling fields, including vLLM's."""

    @model_validator(mode="before")
    @classmethod
    def _foreign(cls, data: Any) -> Any:
        refuse(data, REFUSED)
        if isinstance(data, dict) and data.get("thread") is not None:
            words = "thread is not supported: this server keeps no conversations; send all messages"
            raise ApiError(400, words, param="thread", details=NO_THREADS)
        return data

    messages: Annotated[list[MessageTurn], SkipValidation]
    system: Annotated[str | list[TextBlock] | None, SkipValidation] = None
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOP), FAST] | None = None
    tools: Annotated[list[CustomTool] | None, SkipValidation] = None
    tool_choice: Annotated[ToolMode | ToolByName | None, SkipValidation] = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None
    chat_template_kwargs: dict[str, Any] | None = TEMPLATE_KWARGS


class MessagesRequest(PromptBody):
    max_tokens: Positive


class CountRequest(PromptBody):
    """max_tokens and sampling fields have no effect."""
