"""What the API process and an engine process say to each other: msgspec structs in msgpack over
ZeroMQ. No torch.

The engine sends one `StepOutputs` a step, whatever the number of requests. A request whose caller
needs its text as it grows (streaming, or stop strings to be found) has `every_step`; any other is
heard of once, when it ends. Times are seconds on the machine's monotonic clock, which all processes
share.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rorqual.engine.scheduling.scheduler_output import TokenLogprobs
from rorqual.request import Request


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """traced: somebody wants to know of its phases."""

    request: Request
    every_step: bool
    traced: bool = False


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    """End these requests: the caller has gone, or has all it wants. Their pages are free before
    the next step; no answer is sent."""

    ids: list[str]


class ResetPrefix(msgspec.Struct, tag="reset", array_like=True, frozen=True):
    """Drop every cached page that nobody uses."""


class StartTrace(msgspec.Struct, tag="trace", array_like=True, frozen=True):
    """Record the next steps into files that begin with `prefix`, which the API process made of
    the folder it was given. One at a time."""

    prefix: str
    steps: int


class StopTrace(msgspec.Struct, tag="untrace", array_like=True, frozen=True):
    """Record no further step, and write those that were."""


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """Leave after this message; nothing under way is finished."""


ToEngine = Add | Cancel | ResetPrefix | StartTrace | StopTrace | Shutdown


class Output(msgspec.Struct, array_like=True):
    """New tokens of one request; none where those that it came with are all that it may have.
    `finish` and `stop_token` on the last; `cached` counts prompt
    tokens the prefix cache held. `prompt_logprobs`: with the first, where asked for, one for each
    token of the prompt but its first. `transfer`: kv_transfer_params of an answer whose tokens go
    on elsewhere, with the last."""

    id: str
    tokens: list[int]
    finish: str | None = None
    stop_token: int | None = None
    cached: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    transfer: dict[str, Any] | None = None


class StepOutputs(msgspec.Struct, tag="step", array_like=True):
    outputs: list[Output]


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """A request that can never be served, and why: the caller's mistake. busy: it could be,
    later. pages_lost: its prompt was computed elsewhere, and did not come. experts_missing: no
    server holds an expert that it needs."""

    id: str
    message: str
    busy: bool = False
    pages_lost: bool = False
    experts_missing: bool = False


class EngineInfo(msgspec.Struct, tag="info", array_like=True, frozen=True):
    """Sent once, when the engine can serve. `startup`: seconds by phase, from the start of its
    process to this message."""

    pid: int
    model: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_pages: int
    page_size: int
    eos_token_ids: tuple[int, ...]
    startup: dict[str, float]


class RequestTimes(msgspec.Struct, array_like=True, frozen=True):
    """Times of one request that came to its end, seconds; tpot is None for a single token."""

    at: float
    ttft: float
    tpot: float | None
    e2e: float
    queue: float


class Snapshot(msgspec.Struct, tag="stats", array_like=True):
    """Counts since the engine started, gauges of this moment, histograms as cumulative counts,
    and the requests that ended since the last snapshot. expert_load: tokens by layer and logical
    expert, where recorded; expert_balancedness: by layer, of the last windows. expert_moves:
    rebalances, moves in force, slots changed by them, moves given up; empty where experts are not
    moved. prompts and cached_prompts: tokens of the prompts whose first token has
    come, and how many of those the prefix cache held; prompt_tokens are those computed. transfers,
    traffic: KVTransfers.figures and traffic; empty where pages do not travel. host_cache: pages
    that host memory can hold and does, tokens looked for there and found, bytes copied out and in
    by one rank of each data-parallel one; empty where there is none. expert_servers: of each its
    name, whether it is linked, seconds of a call, and its share of rows that others could take
    too."""

    at: float
    running: int = 0
    waiting: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    pages_total: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    drafted: list[int] = []
    accepted: list[int] = []
    finished: dict[str, int] = {}
    histograms: dict[str, HistogramState] = {}
    ended: list[RequestTimes] = []
    expert_load: list[list[int]] = []
    prompts: int = 0
    cached_prompts: int = 0
    expert_balancedness: list[float] = []
    expert_moves: list[int] = []
    transfers: list[int] = []
    traffic: dict[str, list[float]] = {}
    host_cache: list[int] = []
    expert_servers: list[tuple[str, bool, float, float]] = []


class HistogramState(msgspec.Struct, array_like=True):
    """counts[i]: observations up to the i-th bound, not cumulative; the last is everything
    above."""

    counts: list[int]
    total: float


class RequestPhase(msgspec.Struct, tag="phase", array_like=True, frozen=True):
    """A phase of a traced request is over; sent before the outputs that it ends with. `arrival`:
    the request's; details: attributes of the phase's span."""

    id: str
    name: str
    arrival: float
    start: float
    end: float
    details: dict[str, str | int | float]


class TraceDone(msgspec.Struct, tag="traced", array_like=True, frozen=True):
    """What came of StartTrace: the files that were written, and why others were not."""

    files: list[str]
    errors: list[str]


class Dying(msgspec.Struct, tag="dying", array_like=True, frozen=True):
    """The engine cannot go on. `user`: because of how it was started (the message says what to
    change), not of a defect."""

    message: str
    user: bool


FromEngine = StepOutputs | Refused | EngineInfo | Snapshot | RequestPhase | TraceDone | Dying


def encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder()


def engine_decoder() -> msgspec.msgpack.Decoder[ToEngine]:
    """Reads what an engine receives."""
    return msgspec.msgpack.Decoder(ToEngine)


def client_decoder() -> msgspec.msgpack.Decoder[FromEngine]:
    """Reads what an engine sends."""
    return msgspec.msgpack.Decoder(FromEngine)
