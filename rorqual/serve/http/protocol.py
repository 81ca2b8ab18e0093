"""The requests of the OpenAI API, with vLLM's extensions.

A field of a completion's body that is not here is set aside (unknown_fields.py), as is one of a
message, its parts or a tool; in other nested objects it is rejected by name. Responses are not
modelled here: `sse` builds them by hand, where every microsecond counts.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rorqual.request import MAX_ALLOWED, MAX_BAD_WORDS, MAX_COUNT, MAX_N, MAX_PRIORITY, MAX_STOP
from rorqual.serve.errors import bad_request
from rorqual.serve.http.unknown_fields import ignored, set_aside, set_aside_within


def _whole(value: Any) -> Any:
    """16.0 becomes 16, as JSON has one kind of number; 16.5 is left for validation to reject."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=0, le=MAX_COUNT)]
Positive = Annotated[Whole, Field(ge=1, le=MAX_COUNT)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[Finite, Field(ge=-100, le=100)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]


def _one_wrong_bias(value: Any) -> Any:
    """Report only the first of many wrong entries."""
    if not isinstance(value, dict):
        return value
    for token, bias in value.items():
        number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not number or not -100 <= bias <= 100:
            return {token: bias}
    return value


# Of a list of a million wrong items only the first is reported.
FAST = Field(fail_fast=True)
SEVERAL = Field(min_length=1, fail_fast=True)
Ids = Annotated[list[TokenId], SEVERAL]
WITHOUT_EFFECT = Field(default=None, exclude=True, description="Without effect.")
TEMPLATE_KWARGS = Field(default=None, description="Variables for the chat template.")
CONTINUE = Field(
    default=None, description="The prompt ends with the last message's text, which goes on."
)


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, data: Any) -> Any:
        """Report only the first of many unknown fields."""
        if not isinstance(data, dict) or len(data) <= len(cls.model_fields):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in data if name not in known)
        kept = {name: data[name] for name in known if name in data}
        return {**kept, unknown: data[unknown]}


class Within(Model):
    """An object within a chat's messages or tools: clients send fields there that are of use to
    other servers alone. place: its path without indices."""

    place: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.keys() <= cls.model_fields.keys():
            return data
        return set_aside_within(data, cls.model_fields.keys(), cls.place)


class StreamOptions(Model):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = Field(
        default=None, description="Without effect: nothing is padded."
    )


SWITCHED_OFF = Field(default=None, description="Refused, unless null or false.")


class StructuredOutputs(Model):
    """vLLM's `structured_outputs`: exactly one of the first five."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = Field(
        default=None, description="True is refused behind a block of reasoning; else none is free."
    )
    disable_additional_properties: Any = SWITCHED_OFF
    whitespace_pattern: Any = SWITCHED_OFF
    structural_tag: Any = SWITCHED_OFF


class Sampling(Model):
    """Fields shared by both kinds of completion."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        """Reject lone surrogates, which JSON escapes can write: later code could not encode
        them."""
        try:
            msgspec.json.encode(data)  # a hundred times as fast as a recursive check
        except (ValueError, OverflowError, RecursionError):
            if isinstance(data, dict):
                _check_text(data)
        if not isinstance(data, dict):
            return data
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return set_aside(data, known)

    model: str | None = Field(
        default=None, description="The served name; the only model if left out."
    )
    n: Annotated[Whole, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Positive | None = None
    min_tokens: Count | None = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(_one_wrong_bias)] | None = Field(
        default=None, description="Token id to bias."
    )
    stop: (
        StopText | Annotated[list[StopText], Field(max_length=MAX_STOP, fail_fast=True)] | None
    ) = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP, fail_fast=True)] | None = (
        None
    )
    prompt_logprobs: Count | None = Field(
        default=None, description="For each token of the prompt; not in a stream."
    )
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: (
        Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)] | None
    ) = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = Field(
        default=None, description="With the ids of the prompt and of the answer."
    )
    return_tokens_as_token_ids: bool | None = Field(
        default=None, description="In log probabilities tokens are named token_id:ID."
    )
    kv_transfer_params: dict[str, Any] | Annotated[list[dict[str, Any] | None], SEVERAL] | None = (
        Field(
            default=None,
            description="For a server with a role, an array with one for each prompt or an object; "
            "otherwise without effect, and the answer has null.",
        )
    )
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1, le=MAX_COUNT)] | None = Field(
        default=None, description="The last so many tokens of the prompt; -1: as many as fit."
    )
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED, fail_fast=True)] | None
    ) = Field(default=None, description="No other tokens are drawn.")
    bad_words: Annotated[list[StopText], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = (
        Field(default=None, description="Words that are not written.")
    )
    cache_salt: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None, description="Requests share prefixes within a salt."
    )
    user: str | None = Field(
        default=None, description="Divides the share of its own API key or address."
    )
    priority: Annotated[Whole, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = Field(
        default=None, description="Lower numbers come first; needs --scheduling-policy priority."
    )
    metadata: dict[str, Any] | None = Field(default=None, description="Without effect.")
    store: bool | None = Field(default=None, description="Without effect: nothing is stored.")
    service_tier: str | None = Field(default=None, description="Without effect.")
    safety_identifier: str | None = Field(default=None, description="Without effect.")
    prompt_cache_key: str | None = Field(
        default=None, description="Without effect: prefixes are found by content."
    )
    prompt_cache_retention: str | None = Field(default=None, description="Without effect.")
    spaces_between_special_tokens: bool | None = Field(default=None, description="Without effect.")


def _check_text(data: dict[str, Any]) -> None:
    """Reject the first string that cannot be encoded, by the name of its field."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), data)]
    while waiting:
        where, value = waiting.pop()
        if isinstance(value, str):
            _check_string(where, value)
            continue
        if isinstance(value, dict):
            for key in value:
                _check_string(where, key)
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        waiting.extend(
            ((*where, str(key)), part) for key, part in parts if isinstance(part, (str, dict, list))
        )


def _check_string(where: tuple[str, ...], text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        name = ".".join(where) or None
        half = f"U+{ord(text[error.start]):04X}, half of a surrogate pair"
        raise bad_request(
            f"{name or 'the body'}: the text cannot be encoded: it holds {half}", name
        ) from None


class TextPart(Within):
    place = "messages.content"
    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = WITHOUT_EFFECT
    prompt_cache_breakpoint: dict[str, Any] | None = WITHOUT_EFFECT


class FunctionCall(Within):
    place = "messages.tool_calls.function"
    name: str
    arguments: str


class ToolCall(Within):
    place = "messages.tool_calls"
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


class ChatMessage(Within):
    """One turn. All fields of this server's responses may be sent back."""

    place = "messages"

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], FAST] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FAST] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    cache_control: dict[str, Any] | None = WITHOUT_EFFECT
    audio: None = None
    function_call: None = None


class Function(Within):
    place = "tools.function"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = WITHOUT_EFFECT


class Tool(Within):
    place = "tools"
    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = WITHOUT_EFFECT


class NamedFunction(Model):
    name: str


class NamedTool(Model):
    type: Literal["function"]
    function: NamedFunction


class AllowedChatSet(Model):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], SEVERAL]


class AllowedChatTools(Model):
    """Only these functions are described to the model."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedChatSet


class JsonSchema(Model):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ResumedChoice(Model):
    """token_ids: those the stream's events cover. ended: whether its end was sent too."""

    index: Count
    token_ids: Annotated[list[TokenId], FAST]
    ended: bool = False


class Resume(Model):
    """The state of another server's stream, to be continued. Choices not listed have not
    started."""

    id: Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]
    created: Annotated[int, Field(ge=0, lt=2**53)]
    choices: Annotated[list[ResumedChoice], FAST]


class Resumable(Sampling):
    rorqual_resume: Resume | None = Field(
        default=None, description="The stream goes on where another server's ended."
    )


class ChatRequest(Resumable):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Annotated[list[Tool], FAST] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedChatTools | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    include_reasoning: bool | None = Field(
        default=None, description="False leaves reasoning_content out of the answer."
    )
    chat_template_kwargs: dict[str, Any] | None = TEMPLATE_KWARGS
    add_generation_prompt: bool | None = Field(
        default=None, description="If left out: unless the final message is continued."
    )
    continue_final_message: bool | None = CONTINUE
    add_special_tokens: bool | None = Field(
        default=None, description="If left out: nothing beside what the template printed."
    )
    reasoning_effort: str | None = Field(default=None, description="Without effect.")
    verbosity: str | None = Field(default=None, description="Without effect.")
    modalities: Annotated[list[Literal["text"]], FAST] | None = Field(
        default=None, description="Without effect: answers are text."
    )


class CompletionRequest(Resumable):
    prompt: str | Ids | Annotated[list[str], SEVERAL] | Annotated[list[Ids], SEVERAL] = Field(
        union_mode="left_to_right"
    )
    max_tokens: Count | None = Field(
        default=None, description="0 draws nothing: the prompt alone, with echo."
    )
    echo: bool | None = Field(
        default=None, description="The prompt before the answer; with logprobs, scored."
    )
    logprobs: Count | None = None
    best_of: Positive | None = Field(default=None, description="Accepted where it equals n.")
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None
    suffix: Literal[""] | None = Field(
        default=None, description="Others are refused: these models do not fill in."
    )


class TextRequest(Model):
    """Unknown fields may be null: clients send objects with all fields dumped."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        ignored.set({})
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None or k in cls.model_fields}


class TokenizeRequest(TextRequest):
    """vLLM's two forms in one: a prompt, or messages with what their template takes."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="If left out: as the completion routes do."
    )
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = CONTINUE
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = TEMPLATE_KWARGS
    return_token_strs: bool | None = None


class DetokenizeRequest(TextRequest):
    model: str | None = None
    tokens: list[TokenId]
