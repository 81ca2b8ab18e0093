"""A request of the Responses API as a chat, and the request fields its response repeats."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from rorqual.errors import quoted
from rorqual.serve.errors import bad_request
from rorqual.serve.http.blocks.tagged import (
    items_of,
    name_of,
    read_tagged,
    read_texts,
    renamed,
)
from rorqual.serve.http.calls import Call
from rorqual.serve.http.protocol import (
    AllowedChatSet,
    AllowedChatTools,
    ChatMessage,
    ChatRequest,
    Function,
    FunctionCall,
    JsonSchema,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Sampling,
    Tool,
    ToolCall,
)
from rorqual.serve.http.request_builder import RequestBuilder
from rorqual.serve.http.responses.call import ResponsesCall
from rorqual.serve.http.responses.protocol import (
    CHOICES,
    FORMATS,
    ITEMS,
    PARTS,
    THOUGHTS,
    AllowedTools,
    CallItem,
    CallOutputItem,
    FunctionChoice,
    FunctionTool,
    InputMessage,
    ReasoningItem,
    ResponsesRequest,
    SchemaFormat,
    TextConfig,
)

NAMES = {
    "response_format": "text.format",
    "tools.*.function.parameters": "tools.*.parameters",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
LOGPROBS = "message.output_text.logprobs"
TEXTS = "a string or an array of text parts"
Choice = str | FunctionChoice | AllowedTools | None


async def responses_call(builder: RequestBuilder, body: ResponsesRequest, client: str) -> Call:
    with renamed(NAMES):
        chat = as_chat(body)
        make = partial(ResponsesCall, echoed=echoed(body))
        call = await builder.chat(chat, client, make)
    call.names = NAMES
    return call


def as_chat(body: ResponsesRequest) -> ChatRequest:
    tools = _tools(body)
    choice = _choice(body)
    shared = {name: getattr(body, name) for name in Sampling.model_fields}
    wants = LOGPROBS in (body.include or ())
    if body.top_logprobs and not wants:
        raise bad_request(f"top_logprobs needs include to hold {LOGPROBS!r}", "top_logprobs")
    mode: Any = choice
    if isinstance(choice, AllowedTools):
        mode = _allowed(choice, tools)
    elif isinstance(choice, FunctionChoice):
        mode = _named(choice.name)
    return ChatRequest.model_construct(
        **{
            **shared,
            "messages": _messages(body),
            "max_tokens": body.max_output_tokens,
            "logprobs": wants,
            "top_logprobs": (body.top_logprobs or 0) if wants else None,
            "tools": [_as_tool(tool) for tool in tools] or None,
            "tool_choice": mode,
            "parallel_tool_calls": body.parallel_tool_calls,
            "response_format": _format(body),
            "reasoning_effort": body.reasoning.effort if body.reasoning else None,
            "chat_template_kwargs": body.chat_template_kwargs,
        }
    )


# ---- tools and format


def _tools(body: ResponsesRequest) -> list[FunctionTool]:
    if body.tools is None:
        return []
    given = items_of(body.tools, ("tools",), "an array of functions", least=0)
    found = []
    for i, tool in enumerate(given):
        model = read_tagged({"function": FunctionTool}, tool, ("tools", i))
        assert isinstance(model, FunctionTool)
        found.append(model)
    return found


def _as_tool(tool: FunctionTool) -> Tool:
    function = Function.model_construct(
        name=tool.name,
        description=tool.description,
        parameters=tool.parameters,
        strict=tool.strict,
    )
    return Tool.model_construct(type="function", function=function)


def _choice(body: ResponsesRequest) -> Choice:
    given: Any = body.tool_choice
    if given is None or given in ("none", "auto", "required"):
        return given
    if not isinstance(given, dict):
        takes = "'none', 'auto', 'required', a function or a set of allowed ones"
        raise bad_request(f"tool_choice: should be {takes}", "tool_choice")
    model = read_tagged(CHOICES, given, ("tool_choice",))
    assert isinstance(model, (FunctionChoice, AllowedTools))
    return model


def _named(name: str) -> NamedTool:
    return NamedTool(type="function", function=NamedFunction(name=name))


def _allowed(choice: AllowedTools, tools: list[FunctionTool]) -> AllowedChatTools:
    where = ("tool_choice", "tools")
    names = []
    for i, item in enumerate(items_of(choice.tools, where, "an array of functions")):
        model = read_tagged({"function": FunctionChoice}, item, (*where, i))
        assert isinstance(model, FunctionChoice)
        if not any(tool.name == model.name for tool in tools):
            name = name_of((*where, i))
            raise bad_request(f"{name}: {quoted(model.name)} is not among the tools", name)
        names.append(_named(model.name))
    allowed = AllowedChatSet.model_construct(mode=choice.mode, tools=names)
    return AllowedChatTools.model_construct(type=choice.type, allowed_tools=allowed)


def _format(body: ResponsesRequest) -> ResponseFormat | None:
    given: Any = body.text.format if body.text else None
    if given is None:
        return None
    model = read_tagged(FORMATS, given, ("text", "format"))
    if not isinstance(model, SchemaFormat):
        return ResponseFormat(type=model.type)
    if model.schema_ is None:
        raise bad_request("text.format.schema: is required", "text.format.schema")
    schema = JsonSchema.model_construct(name=model.name, schema_=model.schema_)
    return ResponseFormat.model_construct(type="json_schema", json_schema=schema)


# ---- items to messages


class Turns:
    """Builds a chat's messages from items. An assistant's reasoning, text and calls are separate
    items here, and one message there."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.turn: dict[str, Any] | None = None

    def add(self, role: str, content: Any, **more: Any) -> None:
        self.close()
        self.messages.append(ChatMessage.model_construct(role=role, content=content, **more))

    def assistant(self, field: str, value: Any) -> None:
        """field: reasoning_content, content or tool_calls, which is their order in a turn."""
        order = ("reasoning_content", "content", "tool_calls")
        turn = self.turn
        if turn is not None and field != "tool_calls":
            later = order[order.index(field) :]
            if any(name in turn for name in later):
                self.close()
                turn = None
        if turn is None:
            turn = self.turn = {}
        if field == "tool_calls":
            turn.setdefault(field, []).append(value)
        else:
            turn[field] = value

    def close(self) -> None:
        turn = self.turn
        self.turn = None
        if turn is not None:
            content = turn.pop("content", None if "tool_calls" in turn else "")
            self.add("assistant", content, **turn)


def _messages(body: ResponsesRequest) -> list[ChatMessage]:
    turns = Turns()
    if body.instructions is not None:
        turns.add("system", body.instructions)
    given: Any = body.input
    if isinstance(given, str):
        turns.add("user", given)
        return turns.messages
    for i, item in enumerate(items_of(given, ("input",), "a string or an array of items")):
        where = ("input", i)
        plain = isinstance(item, dict) and "role" in item
        _add(turns, read_tagged(ITEMS, item, where, "message" if plain else None), where)
    turns.close()
    return turns.messages


def _add(turns: Turns, item: Any, where: tuple[str | int, ...]) -> None:
    if isinstance(item, InputMessage):
        content = read_texts(PARTS, item.content, (*where, "content"), TEXTS)
        if item.role == "assistant":
            turns.assistant("content", content)
        else:
            turns.add(item.role, content)
    elif isinstance(item, CallItem):
        function = FunctionCall.model_construct(name=item.name, arguments=item.arguments)
        call = ToolCall.model_construct(id=item.call_id, type="function", function=function)
        turns.assistant("tool_calls", call)
    elif isinstance(item, CallOutputItem):
        output = read_texts(PARTS, item.output, (*where, "output"), TEXTS)
        turns.add("tool", output, tool_call_id=item.call_id)
    elif isinstance(item, ReasoningItem):
        turns.assistant("reasoning_content", _thought(item, where))


def _thought(item: ReasoningItem, where: tuple[str | int, ...]) -> str:
    found = ""
    for name in ("content", "summary"):
        value: Any = getattr(item, name)
        parts = [] if value is None else items_of(value, (*where, name), "an array of parts", 0)
        texts = [read_tagged(THOUGHTS, part, (*where, name, i)) for i, part in enumerate(parts)]
        found = found or "\n".join(part.text for part in texts)
    if not found and item.encrypted_content:
        name = name_of((*where, "encrypted_content"))
        raise bad_request(f"{name}: cannot be read here, and the item has no text", name)
    return found


# ---- request fields in the response


def echoed(body: ResponsesRequest) -> dict[str, msgspec.Raw]:
    """Each as JSON; values that cannot be encoded again (numbers beyond 64 bits) are rejected."""
    text = body.text or TextConfig()
    reasoning = body.reasoning
    fields = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "safety_identifier": body.safety_identifier,
        "text": {"format": text.format or {"type": "text"}, "verbosity": text.verbosity},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
    return {name: _raw(name, value) for name, value in fields.items()}


def _raw(name: str, value: Any) -> msgspec.Raw:
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except (ValueError, OverflowError, RecursionError) as error:
        raise bad_request(f"{name}: cannot be said back: {error}", name) from None
