"""From a validated body to a Call: prompts to tokens, fields to SamplingParams, tools and
structure to a grammar."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rorqual.errors import RequestError, quoted
from rorqual.request import (
    MAX_COUNT,
    Request,
    SamplingParams,
    StructuredOutput,
    check_transfer,
)
from rorqual.serve.engines.job import parameter_of
from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.errors import ApiError, bad_request, too_long
from rorqual.serve.http.calls import Call, ChatCall, TextCall
from rorqual.serve.http.choice import ChatChoiceBuilder, ChoiceBuilder, ZeroTokenChoiceBuilder
from rorqual.serve.http.clients import user_name
from rorqual.serve.http.protocol import (
    AllowedChatSet,
    AllowedChatTools,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    NamedTool,
    Resumable,
    Sampling,
    TokenizeRequest,
)
from rorqual.serve.http.resume.marked import MarkedCall
from rorqual.serve.http.resume.replay import resume
from rorqual.serve.http.sse import ChunkHead
from rorqual.serve.http.structured_output import (
    after_thinking,
    as_format,
    check_schema,
    structure_of,
    tag,
)
from rorqual.serve.limits import ServerLimits
from rorqual.text.bad_words import with_bad_words
from rorqual.text.chat_template import ChatTemplate, RawJson, check_variables
from rorqual.text.generation_config import GenerationDefaults
from rorqual.text.reasoning import BEGIN, END, Reasoning
from rorqual.text.tokenizer import Tokenizer
from rorqual.text.tool_calls import FORMATS

MAX_DIGITS = 10  # of a token id
LONG_TEXT = 20_000  # characters from which tokenizing is worth a thread
PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
)


@dataclass(frozen=True)
class Served:
    """The served model: its names, tokenizer, template and parsers. reasoning: whether <think> is
    split off."""

    names: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: GenerationDefaults
    vocab_size: int
    reasoning: bool
    tool_format: str
    fingerprint: str


class RequestBuilder:
    """hands_over: see Api."""

    def __init__(
        self, served: Served, pool: EnginePool, limits: ServerLimits, hands_over: bool = False
    ):
        self.served = served
        self.pool = pool
        self.limits = limits
        self.hands_over = hands_over

    # ---- chat

    async def chat(
        self, body: ChatRequest, client: str, make: Callable[..., Call] = ChatCall
    ) -> Call:
        """make: the Call class that writes the response."""
        self._check_model(body)
        tools, forced = self._tools(body)
        text, inside = self._render(body, body.messages, tools)
        cut = body.truncate_prompt_tokens is not None
        given = body.add_special_tokens
        special = self.served.template.builtin if given is None else given
        (prompt,) = await self._encode([text], special, "messages", cut)
        top = self._top(body.top_logprobs or 0) if body.logprobs else None
        if body.top_logprobs and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        name, structure = self._structure(body, forced, inside)
        params = self._params(
            body,
            body.max_completion_tokens or body.max_tokens,
            top,
            structure,
            self._prompt_top(body),
        )
        parser = FORMATS[self.served.tool_format].parser
        parse = bool(tools) and body.tool_choice != "none"
        if parse and self._hides_marks():
            params = replace(params, skip_special_tokens=False)
        count = self._count(body, 1)
        prompt = self._kept(prompt, params)
        call = make(
            self._head("chatcmpl", "chat.completion.chunk", body),
            self._requests([prompt], params, body, count, client, "messages"),
            len(prompt),
            self.served.tokenizer,
            top,
            include_reasoning=body.include_reasoning is not False,
        )
        call.structure = name
        call.prompt_top = params.prompt_logprobs
        self._check_scores(call.requests)
        for i, request in enumerate(call.requests):
            reasoning = Reasoning(inside) if self.served.reasoning else None
            call.replies.append(
                ChatChoiceBuilder(
                    i,
                    request.params,
                    self.served.tokenizer,
                    reasoning,
                    parser() if parse else None,
                    bool(forced),
                )
            )
        return await self._streaming(call, body)

    def _render(
        self,
        body: ChatRequest | TokenizeRequest,
        messages: list[ChatMessage],
        tools: list[dict[str, Any]],
    ) -> tuple[str, bool]:
        """The prompt, and whether it ends within a <think> block."""
        going_on = bool(body.continue_final_message)
        if going_on and body.add_generation_prompt:
            raise bad_request(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        turns = [_message(message) for message in messages]
        last = turns[-1]["content"] or ""
        if going_on and (not last or turns[-1].get("tool_calls")):
            raise bad_request(
                "continue_final_message needs a last message of text, without tool calls",
                "continue_final_message",
            )
        variables = body.chat_template_kwargs or {}
        with _named("chat_template_kwargs"):
            check_variables("chat_template_kwargs", variables)
        opens = not going_on and body.add_generation_prompt is not False
        text = self.served.template.render(turns, tools, opens, going_on, variables)
        inside = text.rstrip().endswith(BEGIN) or (going_on and last.rfind(BEGIN) > last.rfind(END))
        return text, self.served.reasoning and inside

    def _tools(self, body: ChatRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The functions to describe to the model, and those one of which must be called."""
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        self._check_tools(tools)
        choice: Any = body.tool_choice
        if isinstance(choice, AllowedChatTools):
            tools = _allowed(choice.allowed_tools, tools)
            choice = choice.allowed_tools.mode
        if choice is None or choice in ("none", "auto"):
            return ([] if choice == "none" else tools), []
        if not tools:
            raise bad_request("tool_choice needs tools", "tool_choice")
        if isinstance(choice, NamedTool):
            named = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
            if not named:
                raise bad_request(
                    f"tool_choice names {quoted(choice.function.name)}, which is not among "
                    "the tools",
                    "tool_choice",
                )
            return tools, named[:1]
        return tools, tools

    def _hides_marks(self) -> bool:
        """Whether the tokens around calls are special ones, which decoding skips by default."""
        tokenizer = self.served.tokenizer
        marks = FORMATS[self.served.tool_format].marks
        return any(tokenizer.raw.token_to_id(mark) in tokenizer.special_ids for mark in marks)

    def _check_tools(self, tools: list[dict[str, Any]]) -> None:
        if len(tools) > self.limits.tools:
            raise bad_request(
                f"{len(tools)} tools were given; accepted: at most {self.limits.tools}", "tools"
            )

    def _structure(
        self, body: ChatRequest, forced: list[dict[str, Any]], inside: bool
    ) -> tuple[str | None, StructuredOutput | None]:
        """The parameter that gives the structure required of the text, and the structure; where the
        prompt opened a <think> block, only after it."""
        given, structure = structure_of(body, self.limits.grammar)
        if forced and structure is not None:
            raise bad_request(
                "a forced tool call and a response format exclude each other", "tool_choice"
            )
        if forced:
            several = body.parallel_tool_calls is not False and not isinstance(
                body.tool_choice, NamedTool
            )
            names = [tool.function.name for tool in body.tools or ()]
            numbers = [names.index(tool["function"]["name"]) for tool in forced]
            form = FORMATS[self.served.tool_format].forced(forced, several, numbers)
        elif structure is None or not inside:
            return given, structure
        else:
            _check_whitespace(body)
            form = as_format(structure)
        found = tag(after_thinking(form) if inside else form)
        name = "tools" if forced else given
        assert name is not None
        if len(found.value) > self.limits.grammar.size:
            raise bad_request(
                f"{name}: the schemas have {len(found.value)} characters; accepted: at most "
                f"{self.limits.grammar.size}",
                name,
            )
        check_schema(name, found)
        return name, found

    # ---- plain completions

    async def completion(
        self, body: CompletionRequest, client: str, make: type[TextCall] = TextCall
    ) -> TextCall:
        self._check_model(body)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise bad_request(
                f"best_of={body.best_of} is not supported; accepted: the value of n", "best_of"
            )
        given = _prompts(body.prompt)
        count = self._count(body, len(given))
        top = self._top(body.logprobs, "logprobs") if body.logprobs is not None else None
        prompt_top = self._prompt_top(body)
        most = body.max_tokens
        if most is None:
            most = self.served.defaults.sampling.get("max_tokens", 16)
        if not most and body.min_tokens:
            raise bad_request(f"min_tokens={body.min_tokens} is above max_tokens=0", "min_tokens")
        name, structure = structure_of(body, self.limits.grammar)
        params = self._params(
            body,
            most or 1,
            top if most else None,
            structure,
            max(
                (n for n in (prompt_top, top if body.echo else None) if n is not None), default=None
            ),
        )
        special = body.add_special_tokens is not False
        cut = body.truncate_prompt_tokens is not None
        texts = [p for p in given if isinstance(p, str)]
        encoded = iter(await self._encode(texts, special, "prompt", cut))
        prompts = [next(encoded) if isinstance(p, str) else p for p in given]
        prompts = [self._kept(prompt, params) for prompt in prompts]
        requests = self._requests(prompts, params, body, count, client, "prompt")
        self._check_scores(requests)
        echo = None
        if body.echo:
            shown = [
                p if isinstance(p, str) and not cut else self._decode(kept)
                for p, kept in zip(given, prompts, strict=True)
            ]
            echo = [text for text in shown for _ in range(count)]
        head = self._head("cmpl", "text_completion", body)
        tokens = sum(map(len, prompts))
        call = make(head, requests, tokens, self.served.tokenizer, top, echo=echo, count=count)
        call.structure = name
        call.prompt_top = prompt_top
        call.prompts = len(prompts)
        builder = ChoiceBuilder if most else ZeroTokenChoiceBuilder
        call.replies.extend(
            builder(i, request.params, self.served.tokenizer) for i, request in enumerate(requests)
        )
        return await self._streaming(call, body)

    # ---- tokenizing only

    async def tokenize(self, body: TokenizeRequest) -> list[int]:
        """The prompt's ids for a completion of this prompt, or a chat of these messages."""
        self._check_model(body)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("either prompt or messages must be given", "prompt")
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            return (await self._encode([body.prompt], special, "prompt"))[0]
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        self._check_tools(tools)
        text, _ = self._render(body, body.messages or [], tools)
        special = self.served.template.builtin
        given = body.add_special_tokens
        return (await self._encode([text], special if given is None else given, "messages"))[0]

    async def detokenize(self, body: DetokenizeRequest) -> str:
        self._check_model(body)
        _check_tokens(body.tokens, self.served.vocab_size, "tokens")
        return await asyncio.to_thread(self.served.tokenizer.decode, body.tokens, False)

    # ---- both

    def _check_model(self, body: Sampling | TokenizeRequest | DetokenizeRequest) -> None:
        if body.model is not None and body.model not in self.served.names:
            message = (
                f"the model {quoted(body.model)} is not served here; available: "
                f"{', '.join(self.served.names)}"
            )
            raise ApiError(404, message, param="model", code="model_not_found")

    def _count(self, body: Sampling, prompts: int) -> int:
        """Choices of each prompt, checked against the limits and free capacity."""
        n = body.n or 1
        if n > self.limits.n:
            raise bad_request(f"n={n} is out of range; accepted: 1 to {self.limits.n}", "n")
        if n * prompts > self.limits.choices:
            raise bad_request(
                f"{n * prompts} completions were asked for; accepted: at most "
                f"{self.limits.choices} a request",
                "n",
            )
        return n

    def _top(self, count: int, name: str = "top_logprobs") -> int:
        if count > self.limits.logprobs:
            raise bad_request(
                f"{count} log probabilities a token were asked for; accepted: at most "
                f"{self.limits.logprobs}",
                name,
            )
        return count

    def _prompt_top(self, body: Sampling) -> int | None:
        if body.prompt_logprobs is None:
            return None
        if body.stream:
            raise bad_request("prompt_logprobs are not sent in a stream", "prompt_logprobs")
        return self._top(body.prompt_logprobs, "prompt_logprobs")

    def _check_scores(self, requests: list[Request]) -> None:
        """Limit prompt log probabilities: all of a request's are in the API process at once, as
        objects."""
        scored = [r for r in requests if r.params.prompt_logprobs is not None]
        entries = sum(
            len(r.prompt) * (r.params.prompt_logprobs or 0) + len(r.prompt) for r in scored
        )
        most = self.limits.prompt_logprobs
        if entries > most:
            raise bad_request(
                f"{entries} log probabilities of prompts were asked for; accepted: at most {most} "
                "a request",
                "prompt_logprobs",
            )

    def _params(
        self,
        body: Sampling,
        max_tokens: int | None,
        top: int | None,
        structure: StructuredOutput | None,
        prompt_top: int | None,
    ) -> SamplingParams:
        for name in ("stop_token_ids", "allowed_token_ids"):
            _check_tokens(getattr(body, name) or (), self.served.vocab_size, name)
        given = {name: getattr(body, name) for name in PASSED_ON if getattr(body, name) is not None}
        values = {
            **self.served.defaults.sampling,
            **given,
            "max_tokens": max_tokens,
            "logit_bias": _bias(body, self.served.vocab_size),
            "stop": body.stop or (),
        }
        try:
            derived = {"logprobs": top, "prompt_logprobs": prompt_top, "structured": structure}
            params = SamplingParams(**{**values, **derived})
            return with_bad_words(params, self.served.tokenizer)
        except RequestError as error:
            raise bad_request(str(error), parameter_of(str(error))) from None

    def _requests(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        body: Sampling,
        count: int,
        client: str,
        name: str,
    ) -> list[Request]:
        """name: the parameter that the prompts come from."""
        eos = self.served.defaults.eos_token_ids
        salt = body.cache_salt or ""
        now = time.monotonic()
        account = (client, user_name(body.user), body.priority or 0)
        requests = []
        for prompt, transfer in zip(prompts, _transfers(body, len(prompts)), strict=True):
            self._check_ids(prompt, name)
            for sample in range(count):
                child = params
                if params.seed is not None and sample:
                    child = replace(child, seed=_wrapped(params.seed + sample))
                if params.prompt_logprobs is not None and sample and not body.stream:
                    child = replace(child, prompt_logprobs=None)  # only the first's are returned
                # one choice's pages are enough, and another's would be held until its lease ends
                kept = None if sample and (transfer or {}).get("do_remote_decode") else transfer
                given = (tuple(prompt), child, eos, now, salt, *account, kept)
                requests.append(Request(self.pool.new_id(), *given))
        return requests

    def _kept(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """The prompt after truncate_prompt_tokens."""
        context = self._most_tokens() + 1
        if (params.truncate_prompt_tokens or 0) >= context:
            raise bad_request(
                f"truncate_prompt_tokens={params.truncate_prompt_tokens} is out of range; with "
                f"max_model_len={context} accepted: -1, or 1 to {context - 1}",
                "truncate_prompt_tokens",
            )
        return prompt[len(prompt) - params.kept_prompt(len(prompt), context) :]

    def _check_ids(self, prompt: list[int], name: str) -> None:
        if not prompt:
            raise bad_request("the prompt is empty", name)
        most = self._most_tokens()
        if len(prompt) > most:
            raise too_long(name, len(prompt), most)
        if max(prompt) >= self.served.vocab_size:
            raise bad_request(
                f"the prompt holds token id {max(prompt)}; accepted: 0 to "
                f"{self.served.vocab_size - 1}",
                name,
            )

    async def _encode(
        self, texts: list[str], special: bool, name: str, cut: bool = False
    ) -> list[list[int]]:
        """Long texts are tokenized on a thread, so that other streams continue; a text that must
        have too many tokens is not tokenized at all, unless the prompt is truncated. name: the
        parameter that they come from."""
        tokenizer = self.served.tokenizer
        most = self._most_tokens()
        longest = tokenizer.longest
        for text in texts:
            if longest is not None and len(text) > most * longest and not cut:
                words = f"it has {len(text)} characters, and no token has more than {longest}"
                raise too_long(name, -(-len(text) // longest), most, f"at least: {words}; ")
        try:
            if sum(map(len, texts)) > LONG_TEXT:
                return await asyncio.to_thread(tokenizer.encode_all, texts, special)
            return [tokenizer.encode(text, special) for text in texts]
        except (UnicodeError, TypeError) as error:
            raise bad_request(f"the text cannot be encoded: {error}") from None

    def _most_tokens(self) -> int:
        """Most tokens of a prompt, on the engine with the longest context."""
        lengths = [it.info.max_model_len for it in self.pool.clients if it.info is not None]
        return max(lengths, default=MAX_COUNT) - 1

    def _decode(self, prompt: list[int]) -> str:
        self._check_ids(prompt, "prompt")
        return self.served.tokenizer.decode(prompt, skip_special_tokens=False)

    def _head(self, prefix: str, kind: str, body: Resumable) -> ChunkHead:
        name = body.model or self.served.names[0]
        given = body.rorqual_resume
        return ChunkHead(
            given.id if given else f"{prefix}-{secrets.token_hex(14)}",
            kind,
            given.created if given else int(time.time()),
            name,
            self.served.fingerprint,
        )

    async def _streaming(self, call: Any, body: Resumable) -> Any:
        """Set up how the response is streamed, and where it resumes."""
        _set_stream(call, body)
        given = body.rorqual_resume
        if given is not None:
            if not body.stream:
                raise bad_request("rorqual_resume needs stream to be true", "rorqual_resume")
            await resume(call, given, self.served.vocab_size)
        if any(request.hands_over for request in call.requests):
            if not self.hands_over:
                raise _no_hand_over(
                    "a server with --role prefill or both, without --kv-overlap or --kv-by-layer"
                )
            _hand_over(call, given is not None)
        return call


def _check_whitespace(body: ChatRequest) -> None:
    """Behind a block of reasoning a grammar leaves one character of whitespace to the model."""
    given = body.structured_outputs
    if given is not None and given.disable_any_whitespace:
        name = "structured_outputs.disable_any_whitespace"
        raise bad_request(f"{name} is not supported for an answer that begins with reasoning", name)


def _allowed(allowed: AllowedChatSet, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = {tool["function"]["name"] for tool in tools}
    for i, one in enumerate(allowed.tools):
        if one.function.name not in names:
            where = f"tool_choice.allowed_tools.tools.{i}"
            name = quoted(one.function.name)
            raise bad_request(f"{where}: {name} is not among the tools", where)
    kept = {one.function.name for one in allowed.tools}
    return [tool for tool in tools if tool["function"]["name"] in kept]


@contextmanager
def _named(parameter: str) -> Iterator[None]:
    """Attributes errors inside the block to this parameter."""
    try:
        yield
    except RequestError as error:
        raise bad_request(str(error), parameter) from None


def _transfers(body: Sampling, prompts: int) -> list[dict[str, Any] | None]:
    """kv_transfer_params of each prompt: one object is for all of them, but the pages that it
    names are those of one prompt."""
    given = body.kv_transfer_params
    listed = given if isinstance(given, list) else [given] * prompts
    if len(listed) != prompts:
        raise _wrong_transfer(f"{len(listed)} were given for {prompts} prompts")
    if prompts > 1 and isinstance(given, dict) and given.get("do_remote_prefill"):
        raise _wrong_transfer(
            f"an object with do_remote_prefill is of one prompt, but there are {prompts}; "
            "accepted: an array with one for each"
        )
    for one in listed if isinstance(given, list) else [given]:
        if one is not None:
            with _named("kv_transfer_params"):
                check_transfer(one)
    return listed


def _wrong_transfer(problem: str) -> ApiError:
    return bad_request(f"kv_transfer_params: {problem}", "kv_transfer_params")


def _set_stream(call: Call, body: Sampling) -> None:
    options = body.stream_options
    if options is not None and not body.stream:
        raise bad_request("stream_options needs stream to be true", "stream_options")
    call.stream = bool(body.stream)
    call.returns_ids = bool(body.return_token_ids)
    call.as_ids = bool(body.return_tokens_as_token_ids)
    if body.kv_transfer_params is not None:
        call.more["kv_transfer_params"] = None  # there is no remote prefill to report
        call.lists_transfers = isinstance(body.kv_transfer_params, list) or call.prompts > 1
    call.include_usage = bool(options and options.include_usage)
    call.continuous_usage = bool(
        options and options.include_usage and options.continuous_usage_stats
    )


def _hand_over(call: Call, resumed: bool) -> None:
    """End the stream after its first token, so that another server continues it."""
    only = isinstance(call, MarkedCall) and len(call.requests) == 1 and not resumed
    if not (only and call.stream) or isinstance(call.replies[0], ZeroTokenChoiceBuilder):
        raise _no_hand_over("a new stream of one choice with the header X-Rorqual-Resumable: 1")
    assert isinstance(call, MarkedCall)
    call.hand_over()


def _no_hand_over(needed: str) -> ApiError:
    return _wrong_transfer(f"first_token needs {needed}")


def _wrapped(seed: int) -> int:
    """Seeds of further choices, wrapped to 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63


def _bias(body: Sampling, vocab_size: int) -> dict[int, float] | None:
    found = {}
    for token, bias in (body.logit_bias or {}).items():
        # int() would also take "1_0", " 5" and the digits of any script
        if not (token.isascii() and token.isdigit() and len(token) <= MAX_DIGITS):
            raise bad_request(
                f"logit_bias takes token ids as keys, in digits 0 to 9; given: {quoted(token)}",
                "logit_bias",
            )
        found[int(token)] = bias
    _check_tokens(found, vocab_size, "logit_bias")
    return found or None


def _check_tokens(tokens: Iterable[int], vocab_size: int, name: str) -> None:
    wrong = next((token for token in tokens if token >= vocab_size), None)
    if wrong is not None:
        raise bad_request(f"{name}={wrong} is no token id; accepted: 0 to {vocab_size - 1}", name)


def _prompts(given: Any) -> list[str | list[int]]:
    if isinstance(given, str):
        return [given]
    return [given] if isinstance(given[0], int) else given


def _message(message: ChatMessage) -> dict[str, Any]:
    """The form templates expect: text as one string, arguments as JSON text that tojson leaves
    unchanged."""
    content = message.content
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    found["content"] = (
        "\n".join(part.text for part in content) if isinstance(content, list) else content
    )
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            found[name] = getattr(message, name)
    thought = message.reasoning_content or message.reasoning
    if thought is not None:
        found["reasoning_content"] = thought
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": RawJson(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return found
