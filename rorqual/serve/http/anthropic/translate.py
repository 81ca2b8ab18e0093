"""A request of the Messages API as a chat."""

from __future__ import annotations

from typing import Any

from rorqual.serve.errors import bad_request
from rorqual.serve.http.anthropic.call import MessagesCall
from rorqual.serve.http.anthropic.protocol import (
    BLOCKS_OF,
    MODES,
    TEXTS,
    CountRequest,
    CustomTool,
    MessagesRequest,
    MessageTurn,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    ToolByName,
    ToolMode,
    ToolResultBlock,
    ToolUseBlock,
)
from rorqual.serve.http.blocks.tagged import (
    Where,
    items_of,
    json_text,
    read,
    read_tagged,
    read_texts,
    renamed,
)
from rorqual.serve.http.calls import Call
from rorqual.serve.http.protocol import (
    ChatMessage,
    ChatRequest,
    Function,
    FunctionCall,
    JsonSchema,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Sampling,
    TextPart,
    TokenizeRequest,
    Tool,
    ToolCall,
)
from rorqual.serve.http.request_builder import RequestBuilder

NAMES = {
    "response_format": "output_config.format",
    "tools.*.function.parameters": "tools.*.input_schema",
    "stop": "stop_sequences",
}
MODE_OF = {"auto": "auto", "any": "required", "none": "none"}
BLOCKS = "a string or an array of blocks"


async def messages_call(builder: RequestBuilder, body: MessagesRequest, client: str) -> Call:
    with renamed(NAMES):
        call = await builder.chat(as_chat(body), client, MessagesCall)
    call.names = NAMES
    return call


async def count_tokens(builder: RequestBuilder, body: CountRequest) -> int:
    """Tokens of the prompt that messages_call would build."""
    with renamed(NAMES):
        chat = as_chat(body)
        asked = TokenizeRequest.model_construct(
            model=chat.model,
            messages=chat.messages,
            tools=None if chat.tool_choice == "none" else chat.tools,
            chat_template_kwargs=chat.chat_template_kwargs,
            continue_final_message=chat.continue_final_message,
        )
        return len(await builder.tokenize(asked))


def as_chat(body: PromptBody) -> ChatRequest:
    shared = {name: getattr(body, name) for name in Sampling.model_fields}
    messages = _messages(body)
    goes_on = _goes_on(messages)
    choice = _choice(body)
    mode: Any = None
    if isinstance(choice, ToolByName):
        mode = NamedTool(type="function", function=NamedFunction(name=choice.name))
    elif choice is not None:
        mode = MODE_OF[choice.type]
    one = choice is not None and choice.disable_parallel_tool_use
    return ChatRequest.model_construct(
        **{
            **shared,
            "messages": messages,
            "continue_final_message": goes_on,
            "stop": body.stop_sequences,
            "tools": [_as_tool(tool) for tool in _tools(body)] or None,
            "tool_choice": mode,
            "parallel_tool_calls": False if one else None,
            "response_format": _format(body),
            "reasoning_effort": body.output_config.effort if body.output_config else None,
            "chat_template_kwargs": body.chat_template_kwargs or _thinking(body),
            "include_reasoning": not (body.thinking and body.thinking.display == "omitted"),
            "user": _user(body),
        }
    )


def _tools(body: PromptBody) -> list[CustomTool]:
    if body.tools is None:
        return []
    found = []
    for i, tool in enumerate(items_of(body.tools, ("tools",), "an array of tools", least=0)):
        model = read_tagged({"custom": CustomTool}, tool, ("tools", i), "custom")
        assert isinstance(model, CustomTool)
        found.append(model)
    return found


def _as_tool(tool: CustomTool) -> Tool:
    function = Function.model_construct(
        name=tool.name, description=tool.description, parameters=tool.input_schema
    )
    return Tool.model_construct(type="function", function=function)


def _choice(body: PromptBody) -> ToolMode | ToolByName | None:
    if body.tool_choice is None:
        return None
    found = read_tagged(MODES, body.tool_choice, ("tool_choice",))
    assert isinstance(found, (ToolMode, ToolByName))
    return found


def _format(body: PromptBody) -> ResponseFormat | None:
    form = body.output_config.format if body.output_config else None
    if form is None:
        return None
    schema = JsonSchema.model_construct(schema_=form.schema_)
    return ResponseFormat.model_construct(type="json_schema", json_schema=schema)


def _thinking(body: PromptBody) -> dict[str, bool] | None:
    """Templates use one of two names for this switch."""
    if body.thinking is None:
        return None
    on = body.thinking.type != "disabled"
    return {"enable_thinking": on, "thinking": on}


def _user(body: PromptBody) -> str | None:
    """The user, from Anthropic's field or OpenAI's."""
    found = (body.metadata or {}).get("user_id")
    if found is not None and not isinstance(found, str):
        raise bad_request("metadata.user_id: should be a string", "metadata.user_id")
    return found or body.user


def _goes_on(messages: list[ChatMessage]) -> bool:
    """Whether the answer continues a last turn of the assistant's. An empty one, of which there is
    nothing to be continued, is dropped."""
    last = messages[-1]
    if last.role != "assistant":
        return False
    content = last.content
    texts = [content] if isinstance(content, str) else [part.text for part in content or ()]
    if any(texts) and not last.tool_calls:
        return True
    if last.tool_calls or last.reasoning_content or len(messages) == 1:
        words = "a last turn of the assistant's is continued; accepted: one of text without calls"
        raise bad_request(f"messages: {words}", "messages")
    messages.pop()
    return False


# ---- blocks to messages


def _messages(body: PromptBody) -> list[ChatMessage]:
    found: list[ChatMessage] = []
    if body.system is not None:
        content = read_texts(TEXTS, body.system, ("system",), BLOCKS)
        found.append(ChatMessage.model_construct(role="system", content=content))
    given: Any = body.messages
    for i, message in enumerate(items_of(given, ("messages",), "an array of messages")):
        where = ("messages", i)
        turn = read(MessageTurn, message, where)
        if isinstance(turn.content, str):
            found.append(ChatMessage.model_construct(role=turn.role, content=turn.content))
            continue
        models = BLOCKS_OF[turn.role]
        inner: Where = (*where, "content")
        blocks = [
            read_tagged(models, block, (*inner, j))
            for j, block in enumerate(items_of(turn.content, inner, BLOCKS, least=0))
        ]
        found.extend(
            [_assistant(blocks, inner)]
            if turn.role == "assistant"
            else _asked(turn.role, blocks, inner)
        )
    return found


def _asked(role: str, blocks: list[Any], where: Where) -> list[ChatMessage]:
    """A user turn: each tool result is a separate message in a chat."""
    found: list[ChatMessage] = []
    texts: list[TextPart] = []
    for i, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(TextPart.model_construct(type="text", text=block.text))
            continue
        assert isinstance(block, ToolResultBlock)
        if texts:
            found.append(ChatMessage.model_construct(role=role, content=texts))
            texts = []
        content: Any = block.content
        given = "" if content is None else content
        result = read_texts(TEXTS, given, (*where, i, "content"), BLOCKS)
        found.append(
            ChatMessage.model_construct(role="tool", content=result, tool_call_id=block.tool_use_id)
        )
    if texts or not found:
        found.append(ChatMessage.model_construct(role=role, content=texts))
    return found


def _assistant(blocks: list[Any], where: Where) -> ChatMessage:
    texts: list[TextPart] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(blocks):
        if isinstance(block, TextBlock):
            texts.append(TextPart.model_construct(type="text", text=block.text))
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            arguments = json_text(block.input, (*where, i, "input"))
            function = FunctionCall.model_construct(name=block.name, arguments=arguments)
            calls.append(ToolCall.model_construct(id=block.id, type="function", function=function))
    return ChatMessage.model_construct(
        role="assistant",
        content=None if calls and not texts else texts,
        reasoning_content="\n".join(thoughts) if thoughts else None,
        tool_calls=calls or None,
    )
