"""From the records of a run to figures, under the key names of vLLM's and SGLang's benchmark
scripts. None is a quantity without data.

TTFT   first chunk that carries a token - sending                       per request, streaming only
TPOT   (end - first chunk) / (output tokens - 1)                        per request with two tokens
or more, streaming only ITL    time between two chunks that carry tokens, however many
pooled over all requests, as vLLM does E2EL   end - sending
per request
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rorqual.bench.serving.client import RequestRecord
from rorqual.bench.serving.load import Run
from rorqual.errors import ConfigError

Figures = dict[str, Any]
PERCENTILES = (90.0, 95.0, 99.0)
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
TIMES = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True)
class GoodputLimits:
    """What a request must keep to count as good: seconds, each None where it does not matter."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, items: Iterable[str]) -> GoodputLimits:
        """`ttft:2000` (milliseconds, as vLLM's --goodput), `ttft=2s`, `tpot=50ms`."""
        found: dict[str, float] = {}
        for item in items:
            name, _, value = item.replace("=", ":", 1).partition(":")
            if name not in ("ttft", "tpot", "e2el"):
                raise ConfigError(
                    f"goodput limit {item!r}; accepted: ttft, tpot or e2el with a time, such "
                    "as ttft:2000 or tpot=50ms"
                )
            found[name] = seconds(value, item)
        return cls(**found)

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.ttft, self.tpot, self.e2el))

    def kept(self, record: RequestRecord) -> bool:
        """A request of one token has no TPOT and keeps any; one that was not streamed has no
        TTFT and keeps none."""
        tpot = record.tpot if record.output_tokens > 1 else 0.0
        pairs = ((self.ttft, record.ttft), (self.tpot, tpot), (self.e2el, record.latency))
        return all(
            value is not None and value <= limit for limit, value in pairs if limit is not None
        )


def seconds(text: str, item: str) -> float:
    """A time: 2s, 500ms, or a bare number of milliseconds."""
    for unit in ("us", "ms", "s", ""):
        if text.endswith(unit):
            try:
                value = float(text.removesuffix(unit)) * UNITS[unit or "ms"]
            except ValueError:
                break
            if value > 0:
                return value
            break
    raise ConfigError(
        f"{item!r}: {text!r} is no time; accepted: a number above 0 with s, ms or us "
        "(milliseconds without a unit)"
    )


def figures(
    run: Run,
    limits: GoodputLimits,
    percentiles: Sequence[float] = PERCENTILES,
    server_spec: Figures | None = None,
) -> Figures:
    """All figures of one run. `server_spec`: accept_length from the server's counters, if it has
    them (see server_info.py)."""
    good = [record for record in run.records if record.error is None]
    wall = run.wall
    out = sum(record.output_tokens for record in good)
    read = sum(_input(record) for record in good)
    rates = {
        "duration": wall,
        "completed": len(good),
        "failed": len(run.records) - len(good),
        "total_input_tokens": read,
        "total_output_tokens": out,
        "request_throughput": len(good) / wall,
        "request_goodput": sum(map(limits.kept, good)) / wall if limits else None,
        "input_throughput": read / wall,
        "output_throughput": out / wall,
        "total_token_throughput": (read + out) / wall,
        "total_throughput": (read + out) / wall,
        "concurrency": sum(record.latency for record in good) / wall if good else None,
        "max_output_tokens_per_s": peak_tokens(good),
        "max_concurrent_requests": peak_open(run.records),
    }
    samples = times(good)
    spread = {
        key: value
        for name in TIMES
        for key, value in summary(name, samples[name], percentiles).items()
    }
    user = {"tps_user": 1e3 / spread["median_tpot_ms"] if spread["median_tpot_ms"] else None}
    spec = server_spec or accepted(good)
    return rates | user | spread | sglang_names(spread) | chunks(good) | client(run, good) | spec


def times(good: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Samples in seconds of each of TIMES."""
    return {
        "ttft": [record.ttft for record in good if record.ttft is not None],
        "tpot": [record.tpot for record in good if record.tpot is not None],
        "itl": [gap for record in good for gap in record.itls],
        "e2el": [record.latency for record in good],
    }


def summary(name: str, samples: Sequence[float], percentiles: Sequence[float]) -> Figures:
    """mean_, median_, std_, max_ and p.._NAME_ms."""
    found: Figures = dict.fromkeys(
        [f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "max")]
    )
    found |= {f"p{percent:g}_{name}_ms": None for percent in percentiles}
    if samples:
        data = np.asarray(samples) * 1e3
        values = (
            data.mean(),
            np.median(data),
            data.std(),
            data.max(),
            *np.percentile(data, percentiles),
        )
        found = {key: float(value) for key, value in zip(found, values, strict=True)}
    return found


def sglang_names(spread: Figures) -> Figures:
    """SGLang's script calls E2EL e2e_latency."""
    return {
        key.replace("e2el", "e2e_latency"): value for key, value in spread.items() if "e2el" in key
    }


def chunks(good: Sequence[RequestRecord]) -> Figures:
    """Token counts from the stream's chunks compared with the server's. Ratios are over requests
    with both."""
    both = [record for record in good if record.completion_tokens is not None and record.chunks]
    carried = sum(len(record.chunks) for record in both)
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]
    return {
        "total_chunks": sum(len(record.chunks) for record in good) or None,
        "tokens_per_chunk": sum(record.output_tokens for record in both) / carried
        if carried
        else None,
        "token_source": "usage"
        if all(record.completion_tokens is not None for record in good)
        else "chunks",
        "requests_with_more_chunks_than_tokens": sum(
            len(record.chunks) > record.output_tokens for record in both
        ),
        "short_outputs": sum(record.output_tokens < record.output_len for record in good),
        "total_cached_tokens": sum(cached) if cached else None,
        "input_length_mismatches": sum(_input(record) != record.input_len for record in good),
    }


def client(run: Run, good: Sequence[RequestRecord]) -> Figures:
    """The client's own CPU time, in cores and by chunk (`wall` and `cpu` are of the same span)."""
    carried = sum(len(record.chunks) for record in good)
    waits = [record.start - record.due for record in run.records if record.start]
    return {
        "client_cpu_cores": run.cpu / run.wall,
        "client_cpu_us_per_chunk": 1e6 * run.cpu / carried if carried else None,
        "mean_client_queue_ms": 1e3 * float(np.mean(waits)) if waits else None,
    }


def accepted(good: Sequence[RequestRecord]) -> Figures:
    """Mean tokens a verification step (drafts accepted + 1), from answers that carry vLLM's
    per-request counts."""
    steps = sum(record.spec_steps or 0 for record in good)
    taken = sum(record.spec_accepted or 0 for record in good)
    return (
        {"accept_length": 1 + taken / steps, "accept_length_source": "answers"}
        if steps
        else {"accept_length": None, "accept_length_source": None}
    )


def peak_tokens(good: Sequence[RequestRecord]) -> float | None:
    """Most output tokens in one of the seconds counted from the first request; a chunk counts
    for its share of its request's tokens. None where nothing was streamed, or for less than a
    second."""
    streamed = [record for record in good if record.chunks]
    start = min((record.start for record in streamed), default=0.0)
    if max((record.end for record in streamed), default=0.0) - start < 1:
        return None
    second = np.concatenate([np.asarray(record.chunks) - start for record in streamed]).astype(int)
    weight = np.concatenate(
        [
            np.full(len(record.chunks), record.output_tokens / len(record.chunks))
            for record in streamed
        ]
    )
    return float(np.bincount(second, weights=weight).max())


def peak_open(records: Sequence[RequestRecord]) -> int | None:
    """Most requests open at one moment (vLLM's script counts those that touch one second, which
    is more)."""
    edges = sorted(
        [(record.start, 1) for record in records] + [(record.end, -1) for record in records]
    )
    return int(np.cumsum([step for _, step in edges]).max()) if edges else None


def causes(records: Sequence[RequestRecord]) -> Mapping[str, int]:
    """Failed requests by cause, the most frequent first."""
    return dict(
        Counter(record.error for record in records if record.error is not None).most_common()
    )


def details(run: Run) -> Figures:
    """vLLM's per-request lists, in the order of sending. Seconds; start_times count from the
    start of the run."""
    return {
        "input_lens": [_input(record) for record in run.records],
        "output_lens": [0 if record.error else record.output_tokens for record in run.records],
        "ttfts": [record.ttft for record in run.records],
        "itls": [record.itls for record in run.records],
        "start_times": [record.start - run.start for record in run.records],
        "latencies": [record.latency for record in run.records],
        "generated_texts": ["".join(record.text) for record in run.records],
        "errors": [record.error or "" for record in run.records],
    }


def _input(record: RequestRecord) -> int:
    return record.input_len if record.prompt_tokens is None else record.prompt_tokens
