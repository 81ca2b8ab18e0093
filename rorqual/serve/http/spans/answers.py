"""Attributes of a completion's span: OpenTelemetry's names for generative models, and vLLM's and
SGLang's where they have older names for the same."""

from __future__ import annotations

from rorqual.serve.http.calls import Call
from rorqual.telemetry.spans import RequestSpan, Value


def note_request(span: RequestSpan, call: Call) -> None:
    if not span.recording:
        return
    params = call.requests[0].params
    count = len(call.requests)
    found: dict[str, Value] = {
        "gen_ai.request.stream": call.stream,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": count,
        "gen_ai.request.n": count,
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.prompt_tokens": call.prompt_tokens,
    }
    if params.top_k > 0:
        found["gen_ai.request.top_k"] = params.top_k
    if params.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = params.max_tokens
    if params.seed is not None:
        found["gen_ai.request.seed"] = params.seed
    head = call.head.fields
    for name, key in (
        ("gen_ai.response.id", "id"),
        ("gen_ai.request.model", "model"),
        ("gen_ai.response.model", "model"),
    ):
        found[name] = str(head[key])
    begun = sum(len(request.outputs) for request in call.requests)
    if begun:
        found["rorqual.resumed_tokens"] = begun
    span.set(found)


def note_answer(span: RequestSpan, call: Call) -> None:
    """Called once it has ended, in any way."""
    if not span.recording:
        return
    tokens = sum(reply.tokens for reply in call.replies)
    found: dict[str, Value] = {
        "gen_ai.usage.output_tokens": tokens,
        "gen_ai.usage.completion_tokens": tokens,
        "gen_ai.usage.cache_read.input_tokens": call.cached_tokens,
    }
    reasons = [str(reply.finish) for reply in call.replies if reply.finish is not None]
    if reasons:
        found["gen_ai.response.finish_reasons"] = reasons
    offered = call.more.get("kv_transfer_params")
    if offered is not None:
        each = offered if isinstance(offered, list) else [offered]
        found["rorqual.kv.pages_offered"] = sum(
            int(one.get("remote_num_pages") or 0) for one in each if one is not None
        )
    span.set(found)
