"""Names and labels of the engines' figures in /metrics: our own, or vLLM's.

Our names are vLLM's with another prefix, except where the meaning differs: under vLLM's name a
figure has vLLM's meaning, and figures we do not measure are absent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rorqual.serve.messages import Snapshot

Figures = dict[str, tuple[str, Callable[[Snapshot], float]]]

GAUGES: Figures = {
    "num_requests_running": ("Sequences that run.", lambda s: s.running),
    "num_requests_waiting": ("Sequences that wait in the engine.", lambda s: s.waiting),
    "kv_cache_usage_perc": (
        "Share of cache pages that running sequences hold, 0 to 1.",
        lambda s: s.pages_used / max(1, s.pages_total),
    ),
}
_COUNTERS: Figures = {
    "generation_tokens": ("Tokens generated.", lambda s: s.output_tokens),
    "prompt_tokens_cached": (
        "Prompt tokens that the prefix cache held, of requests whose first token has come.",
        lambda s: s.cached_prompts,
    ),
    "prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_queries,
    ),
    "prefix_cache_hits": ("Prompt tokens found there.", lambda s: s.prefix_hits),
    "num_preemptions": (
        "Sequences that gave up their pages to be computed again.",
        lambda s: s.preemptions,
    ),
}
SPECULATION: Figures = {
    "spec_decode_num_drafts": ("Drafts verified.", lambda s: s.drafted[0] if s.drafted else 0),
    "spec_decode_num_draft_tokens": ("Tokens drafted.", lambda s: sum(s.drafted)),
    "spec_decode_num_accepted_tokens": ("Drafted tokens accepted.", lambda s: sum(s.accepted)),
}
# In the order of Snapshot.host_cache; the last field: whether it is a counter.
HOST_CACHE = (
    ("host_cache_pages", "Cache pages that host memory can hold.", False),
    ("host_cache_pages_held", "Cache pages that host memory holds.", False),
    (
        "host_cache_queries",
        "Prompt tokens looked for in host memory: those that the device's cache had not.",
        True,
    ),
    ("host_cache_hits", "Prompt tokens copied from there.", True),
    ("host_cache_bytes_out", "Bytes that a rank copied to host memory.", True),
    ("host_cache_bytes_in", "Bytes that a rank copied back.", True),
)
HISTOGRAMS = {
    "time_to_first_token_seconds": "Arrival to first token.",
    "request_time_per_output_token_seconds": "Mean time of a request's tokens after the first.",
    "inter_token_latency_seconds": "Time between tokens; tokens that came together share it.",
    "e2e_request_latency_seconds": "Arrival to last token.",
    "request_queue_time_seconds": "Arrival to admission.",
    "request_prefill_time_seconds": "Admission to first token.",
    "request_decode_time_seconds": "First to last token.",
    "request_inference_time_seconds": "Admission to last token.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a request.",
}


@dataclass(frozen=True)
class MetricNames:
    """finished: reasons exported from the start, even at zero. by_position: figures exported for
    each position in a draft. host_cache: of Snapshot.host_cache."""

    prefix: str
    counters: Figures
    finished: tuple[str, ...] = ()
    by_position: tuple[str, ...] = ("accepted",)
    host_cache: tuple[tuple[str, str, bool] | None, ...] = ()


RORQUAL = MetricNames(
    "rorqual",
    {
        "prompt_tokens": ("Prompt tokens computed.", lambda s: s.prompt_tokens),
        **_COUNTERS,
        "engine_steps": ("Steps launched.", lambda s: s.steps),
        "late_kernels": (
            "Kernels that the start did not meet: steps waited for them, on rank 0.",
            lambda s: s.late_kernels,
        ),
        "late_kernel_seconds": (
            "Seconds of these waits.",
            lambda s: s.late_kernel_seconds,
        ),
    },
    by_position=("draft", "accepted"),
    host_cache=HOST_CACHE,
)
VLLM = MetricNames(
    "vllm",
    {
        "prompt_tokens": (
            "Tokens of the prompts whose first token has come, cached or computed.",
            lambda s: s.prompts,
        ),
        **_COUNTERS,
    },
    finished=("stop", "length", "abort"),
    # vLLM calls such a tier external, and does not export its size and bytes
    host_cache=(
        None,
        None,
        ("external_prefix_cache_queries", *HOST_CACHE[2][1:]),
        ("external_prefix_cache_hits", *HOST_CACHE[3][1:]),
        None,
        None,
    ),
)
