"""Messages between the API process and an engine process: msgspec structs in msgpack over ZeroMQ.
No torch.

The engine sends one `StepOutputs` a step, whatever the number of requests. A request whose text is
needed as it grows (streaming, or stop strings) has `every_step`; any other gets a single output,
when it ends. Times are seconds on the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from rorqual.engine.scheduling.scheduler_output import TokenLogprobs
from rorqual.request import Request


class Counting(IntEnum):
    """Which tokens of a request count in metrics and traces.

    SENT: all that the engine sends. READ: it has stop strings, which the API process finds; it
    counts the tokens as it reads them, and sends TextEnded. NONE: none is returned (max_tokens 0,
    or a prompt whose response was sent before it was computed)."""

    SENT = 0
    READ = 1
    NONE = 2


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """traced: send RequestPhase messages for it. shares: its answer waits for other requests, and
    `Answered` follows."""

    request: Request
    every_step: bool
    traced: bool = False
    counting: Counting = Counting.SENT
    shares: bool = False


class Cancel(msgspec.Struct, tag="cancel", array_like=True, frozen=True):
    """End these requests: the caller has disconnected, or they failed. Their pages are free before
    the next step; no output is sent."""

    ids: list[str]


class Answered(msgspec.Struct, tag="answered", array_like=True, frozen=True):
    """The answer that these requests share is sent now; until then nobody can fetch their prompts'
    pages. lost: nobody gets it."""

    ids: list[str]
    lost: bool


class TextEnded(msgspec.Struct, tag="ended", array_like=True, frozen=True):
    """The text of a request with Counting.READ has ended: with its last token, or `stopped` by a
    stop string. Then it ends on the engine too, like a cancelled one, unless it already has. It has
    `tokens` tokens; `last`: when the last of them was sent."""

    id: str
    stopped: bool
    tokens: int
    last: float


class ResetPrefix(msgspec.Struct, tag="reset", array_like=True, frozen=True):
    """Drop every cached page that is not in use."""


class StartTrace(msgspec.Struct, tag="trace", array_like=True, frozen=True):
    """Record the next steps into files that begin with `prefix`, a path in the API process's
    profile folder. One trace at a time."""

    prefix: str
    steps: int


class StopTrace(msgspec.Struct, tag="untrace", array_like=True, frozen=True):
    """Stop recording, and write the steps recorded so far."""


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """Exit after this message; open requests are not finished."""


ToEngine = Add | Cancel | Answered | TextEnded | ResetPrefix | StartTrace | StopTrace | Shutdown


class Output(msgspec.Struct, array_like=True):
    """New tokens of one request; none where its given output already reaches its limit. `finish`
    and `stop_token` on the last; `cached` counts prompt tokens the prefix cache held.
    `prompt_logprobs`: with the first, where requested, one for each token of the prompt but its
    first. `transfer`: kv_transfer_params of a request that is decoded elsewhere, with the last.
    `times`: when each token was sent, with Counting.READ."""

    id: str
    tokens: list[int]
    finish: str | None = None
    stop_token: int | None = None
    cached: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    transfer: dict[str, Any] | None = None
    times: list[float] | None = None


class StepOutputs(msgspec.Struct, tag="step", array_like=True):
    outputs: list[Output]


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """A rejected request, and why: by default the caller's mistake. busy: it may be retried later.
    pages_lost: its prompt was computed elsewhere, and its pages were not received. experts_missing:
    no server holds an expert that it needs. structured: the structure of its answer is at fault."""

    id: str
    message: str
    busy: bool = False
    pages_lost: bool = False
    experts_missing: bool = False
    structured: bool = False


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
    """Times of one finished request, seconds; tpot is None for a single token."""

    at: float
    ttft: float
    tpot: float | None
    e2e: float
    queue: float


class Snapshot(msgspec.Struct, tag="stats", array_like=True):
    """Counts since the engine started, current gauges, histograms as cumulative counts, and the
    requests that ended since the last snapshot. output_tokens and the gaps between tokens: on the
    way without those of requests with Counting.READ, which the API process adds. expert_load:
    tokens by layer and logical expert, where recorded; expert_balancedness: by layer, of the last
    windows. expert_moves: rebalances, moves applied, slots changed by them, moves failed; empty
    without load balancing. prompts and cached_prompts: tokens of the prompts whose first token was
    sampled, and how many of those were cached; prompt_tokens are those computed. transfers,
    traffic: KVTransfers.figures and traffic; empty without KV transfers. host_cache: pages that
    host memory can hold and does, tokens queried and hit there, bytes copied out and in by one rank
    of each data-parallel rank; empty without a host tier. expert_servers: of each its name, whether
    it is connected, seconds of a call, and its share of rows that other servers could take too.
    experts_missing: which experts of a layer no server holds; empty where each has one.
    late_kernels, late_kernel_seconds: of rank 0, which kernels steps waited for, and how long."""

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
    experts_missing: str = ""
    late_kernels: int = 0
    late_kernel_seconds: float = 0.0


class HistogramState(msgspec.Struct, array_like=True):
    """counts[i]: observations up to the i-th bound, not cumulative; the last is everything
    above."""

    counts: list[int]
    total: float


class RequestPhase(msgspec.Struct, tag="phase", array_like=True, frozen=True):
    """A phase of a traced request has ended; sent before the outputs that end it. `arrival`: the
    request's; details: attributes of the phase's span."""

    id: str
    name: str
    arrival: float
    start: float
    end: float
    details: dict[str, str | int | float]


class TraceDone(msgspec.Struct, tag="traced", array_like=True, frozen=True):
    """The result of StartTrace: the files written, and why others were not."""

    files: list[str]
    errors: list[str]


class Dying(msgspec.Struct, tag="dying", array_like=True, frozen=True):
    """The engine cannot continue. `user`: because of its configuration (the message says what to
    change), not of a defect."""

    message: str
    user: bool


FromEngine = StepOutputs | Refused | EngineInfo | Snapshot | RequestPhase | TraceDone | Dying


def encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder()


def engine_decoder() -> msgspec.msgpack.Decoder[ToEngine]:
    """Decodes what an engine receives."""
    return msgspec.msgpack.Decoder(ToEngine)


def client_decoder() -> msgspec.msgpack.Decoder[FromEngine]:
    """Decodes what an engine sends."""
    return msgspec.msgpack.Decoder(FromEngine)
