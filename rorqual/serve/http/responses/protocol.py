"""The requests of OpenAI's Responses API, for text and functions.

Nested objects (items, tools, tool choice) are parsed by translate.py, so that errors name their
place; their models here define the fields of each `type`. Nothing is stored, so references to
stored objects are rejected.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SkipValidation, model_validator

from rorqual.serve.http.blocks.tagged import refuse
from rorqual.serve.http.protocol import (
    FAST,
    TEMPLATE_KWARGS,
    Count,
    JsonSchema,
    Model,
    Positive,
    Sampling,
)

Status = Literal["in_progress", "completed", "incomplete"]
KEPT = "is not supported: this server keeps nothing of a response; send the whole input"
CHATS = "is not supported on this route; use /v1/chat/completions"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "store": ((False,), "is not supported: this server keeps no responses; accepted: false"),
    "previous_response_id": ((), KEPT),
    "conversation": ((), KEPT),
    "background": ((False,), "is not supported: a response is computed while its caller waits"),
    "prompt": ((), "is not supported: this server keeps no prompts; use input"),
    "context_management": (([],), "is not supported: nothing is left out of the input"),
    "messages": ((), "is not a field of a response; use input"),
    "max_tokens": ((), "is not a field of a response; use max_output_tokens"),
    "max_completion_tokens": ((), "is not a field of a response; use max_output_tokens"),
    "response_format": ((), "is not a field of a response; use text.format"),
    "reasoning_effort": ((), "is not a field of a response; use reasoning.effort"),
    "logprobs": ((False,), "is not a field of a response; use include"),
    "prompt_logprobs": ((), CHATS),
    "return_token_ids": ((False,), CHATS),
    "return_tokens_as_token_ids": ((False,), CHATS),
    "kv_transfer_params": ((), CHATS),
    "n": ((1,), "is not a field of a response: it has one answer"),
}


class InputText(Model):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = Field(
        default=None, description="Without effect."
    )


class RefusalPart(Model):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class InputMessage(Model):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str | list[InputText | RefusalPart], SkipValidation]
    id: str | None = None
    status: Status | None = None
    phase: str | None = Field(default=None, description="Without effect.")


class CallItem(Model):
    """A function that the model called."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    namespace: None = None
    caller: dict[str, Any] | None = None


class CallOutputItem(Model):
    """A function's output."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[str | list[InputText], SkipValidation]
    id: str | None = None
    name: str | None = None
    status: Status | None = None
    caller: dict[str, Any] | None = None


class ReasoningItem(Model):
    """Reasoning of an earlier response: its text, or else its summary."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[InputText] | None, SkipValidation] = None
    content: Annotated[list[InputText] | None, SkipValidation] = None
    encrypted_content: str | None = Field(
        default=None, description="Cannot be read here; refused where the item has no text."
    )
    status: Status | None = None


ITEMS: dict[str, type[Model]] = {
    "message": InputMessage,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}
PARTS: dict[str, type[Model]] = {
    "input_text": InputText,
    "output_text": InputText,
    "text": InputText,
    "refusal": RefusalPart,
}
THOUGHTS: dict[str, type[Model]] = {"reasoning_text": InputText, "summary_text": InputText}
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionTool(Model):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = Field(default=None, description="Without effect.")
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    async_: Literal[False] | None = Field(default=None, alias="async")


class FunctionChoice(Model):
    type: Literal["function"]
    name: str


class AllowedTools(Model):
    """Only these functions are described to the model."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], SkipValidation]


CHOICES: dict[str, type[Model]] = {"function": FunctionChoice, "allowed_tools": AllowedTools}


class PlainFormat(Model):
    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]


FORMATS: dict[str, type[Model]] = {
    "text": PlainFormat,
    "json_object": PlainFormat,
    "json_schema": SchemaFormat,
}


class TextConfig(Model):
    format: Annotated[PlainFormat | SchemaFormat | None, SkipValidation] = None
    verbosity: str | None = Field(default=None, description="Without effect.")


class ReasoningConfig(Model):
    """Has no effect, like a chat's reasoning_effort."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


Key = Annotated[str, Field(max_length=64)]
Value = Annotated[str, Field(max_length=512)]
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesRequest(Sampling):
    """Includes a chat's sampling fields, vLLM's among them."""

    @model_validator(mode="before")
    @classmethod
    def _stateless(cls, data: Any) -> Any:
        refuse(data, REFUSED)
        return data

    input: Annotated[
        str | list[InputMessage | CallItem | CallOutputItem | ReasoningItem], SkipValidation
    ]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    max_tool_calls: Positive | None = Field(
        default=None, description="Without effect: it counts calls of built-in tools."
    )
    tools: Annotated[list[FunctionTool] | None, SkipValidation] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | FunctionChoice | AllowedTools | None, SkipValidation
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    include: Annotated[list[Include], FAST] | None = Field(
        default=None, description="All but the log probabilities without effect."
    )
    top_logprobs: Count | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="Without effect: an input that does not fit is refused."
    )
    metadata: Annotated[dict[Key, Value], Field(max_length=16)] | None = Field(
        default=None, description="Said back."
    )
    chat_template_kwargs: dict[str, Any] | None = TEMPLATE_KWARGS
