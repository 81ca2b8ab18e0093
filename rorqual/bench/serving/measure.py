"""`rorqual bench serve`: measure an OpenAI-compatible server. One measurement is warm-up, cache
flush, run, repeated; its figures are the medians of the repeats. A sweep is one measurement a
concurrency; a search (slo.py) chooses its concurrencies by an SLO."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rorqual.bench.serving import metrics
from rorqual.bench.serving import server_info as server
from rorqual.bench.serving.client import CHAT, Client
from rorqual.bench.serving.datasets import Trace, sharegpt_prompts, trace_prompts
from rorqual.bench.serving.load import ArrivalLoad, Run, drive
from rorqual.bench.serving.metrics import Figures, GoodputLimits
from rorqual.bench.serving.progress import Progress
from rorqual.bench.serving.prompts import (
    PrefixGroups,
    Prompt,
    PromptLengths,
    Vocabulary,
    random_prompts,
    shared_prefix_prompts,
    warm_up_prompts,
)
from rorqual.errors import ConfigError, TargetError

DATASETS = ("random", "shared-prefix", "sharegpt", "trace")
FALLBACK_PROMPTS = 1000
FALLBACK_WARM_UPS = 8
WARM_UP_STREAM = 2**31  # a seed no repeat has
BUSY_CLIENT = 0.8  # of a core


@dataclass(frozen=True)
class Data:
    """Which prompts. `num_prompts` None: `per_concurrency` times the concurrency, or all a trace
    or the prefix groups have."""

    name: str = "random"
    lengths: PromptLengths = field(default_factory=PromptLengths)
    num_prompts: int | None = None
    per_concurrency: int = 10
    groups: PrefixGroups = field(default_factory=PrefixGroups)
    path: Path | None = None
    sharegpt_output_len: int | None = None
    trace_block: int = 512
    trace_speed: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            raise ConfigError(f"dataset {self.name!r}; accepted: {', '.join(DATASETS)}")
        if self.name in ("sharegpt", "trace") and self.path is None:
            raise ConfigError(f"the dataset {self.name} needs --dataset-path")
        if self.per_concurrency < 1 or (self.num_prompts is not None and self.num_prompts < 1):
            raise ConfigError(
                f"num_prompts={self.num_prompts}, per_concurrency={self.per_concurrency}; "
                "both must be at least 1"
            )

    def count(self, load: ArrivalLoad) -> int | None:
        if self.num_prompts is not None or self.name in ("shared-prefix", "trace"):
            return self.num_prompts
        return self.per_concurrency * load.concurrency if load.concurrency else FALLBACK_PROMPTS

    def prompts(
        self, vocabulary: Vocabulary, seed: int, stream: int, load: ArrivalLoad
    ) -> list[Prompt]:
        """Prompts from files are the same for every stream of a seed; random ones differ by stream,
        so that they are in no prefix cache."""
        count = self.count(load)
        drawn = np.random.default_rng([seed, stream])
        if self.name == "random":
            return random_prompts(vocabulary, drawn, count or FALLBACK_PROMPTS, self.lengths)
        if self.name == "shared-prefix":
            return shared_prefix_prompts(vocabulary, drawn, self.groups, self.lengths, count)
        assert self.path is not None
        fixed = np.random.default_rng([seed, 0])
        if self.name == "sharegpt":
            return sharegpt_prompts(vocabulary, fixed, self.path, count, self.sharegpt_output_len)
        return trace_prompts(
            vocabulary, fixed, Trace(self.path, self.trace_block, self.trace_speed), seed, count
        )


@dataclass(frozen=True)
class Method:
    """How to measure. `warm_ups` None: as many as the concurrency; `flush` auto, none or a path;
    `gpus` divides tokens/s."""

    repeats: int = 1
    warm_ups: int | None = None
    flush: str = "auto"
    metrics_path: str = "/metrics"
    limits: GoodputLimits = field(default_factory=GoodputLimits)
    percentiles: tuple[float, ...] = metrics.PERCENTILES
    gpus: int = 1
    seed: int = 0
    details: bool = False

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.gpus < 1 or self.seed < 0 or (self.warm_ups or 0) < 0:
            raise ConfigError(
                f"repeats={self.repeats}, gpus={self.gpus}: at least 1; "
                f"seed={self.seed}, warm_ups={self.warm_ups}: at least 0"
            )
        if not all(0 < percent < 100 for percent in self.percentiles):
            raise ConfigError(f"percentiles {self.percentiles}; each must lie between 0 and 100")


class ServingBench:
    """Measures one server with one kind of data; keeps its connections open between
    measurements."""

    def __init__(
        self,
        client: Client,
        vocabulary: Vocabulary,
        data: Data,
        method: Method,
        progress: Progress | None = None,
    ):
        self.client = client
        self.vocabulary = vocabulary
        self.data = data
        self.method = method
        self.progress = progress or Progress()
        if client.target.chat and not vocabulary.as_text:
            raise ConfigError(f"{CHAT} takes text; token ids go to /v1/completions only")

    async def measure(self, load: ArrivalLoad) -> Figures:
        """One row: the medians of `repeats` runs, with what was asked for."""
        if self.data.name == "trace" and not math.isinf(load.rate):
            raise ConfigError(
                f"a trace has its own arrivals; leave out request_rate={load.rate:g} (trace "
                "speed scales them)"
            )
        runs = [await self._once(load, repeat) for repeat in range(self.method.repeats)]
        row = (
            self._asked(load, len(runs[0][0].records))
            | _merged([figures for _, figures in runs])
            | self._details(runs[-1][0])
        )
        return row | {"output_throughput_per_gpu": row["output_throughput"] / self.method.gpus}

    async def _once(self, load: ArrivalLoad, repeat: int) -> tuple[Run, Figures]:
        method = self.method
        title = self._title(load, repeat)
        stream = repeat + 1000 * (load.concurrency or 0)
        self.progress.stage(f"{title}: preparing prompts")
        prompts = self.data.prompts(self.vocabulary, method.seed, stream, load)
        await self._warm_up(load, prompts, stream, title)
        flushed = await server.flush(self.client, method.flush)
        before = await server.counters(self.client, method.metrics_path)
        self.progress.stage(title, len(prompts))
        async with self.progress.refreshing():
            arrivals = self._arrivals(load, prompts, stream)
            run = await drive(self.client, prompts, load, arrivals, self.progress.seen)
        found = (await server.counters(self.client, method.metrics_path)).accept_length(before)
        spec = {"accept_length": found[0], "accept_length_source": found[1]} if found else None
        figures = metrics.figures(run, method.limits, method.percentiles, spec)
        return run, figures | {
            "cache_flush": flushed,
            "failures": dict(metrics.causes(run.records)),
        }

    def _arrivals(self, load: ArrivalLoad, prompts: Sequence[Prompt], stream: int) -> list[float]:
        if all(prompt.at is not None for prompt in prompts):
            return [prompt.at or 0.0 for prompt in prompts]
        return load.arrivals(np.random.default_rng([self.method.seed, stream, 1]), len(prompts))

    async def _warm_up(
        self, load: ArrivalLoad, like: Sequence[Prompt], stream: int, title: str
    ) -> None:
        """Warm up the server's batch sizes and the connections of the next run. A server that fails
        every warm-up request is not measured."""
        count = (
            self.method.warm_ups
            if self.method.warm_ups is not None
            else load.concurrency or FALLBACK_WARM_UPS
        )
        if not count:
            return
        prompts = warm_up_prompts(
            self.vocabulary,
            np.random.default_rng([self.method.seed, WARM_UP_STREAM + stream]),
            like,
            count,
        )
        self.progress.stage(f"{title}: warming up", count)
        async with self.progress.refreshing():
            run = await drive(
                self.client,
                prompts,
                ArrivalLoad(load.concurrency, run_seconds=load.run_seconds),
                [0.0] * count,
                self.progress.seen,
            )
        failed = metrics.causes(run.records)
        if sum(failed.values()) == count:
            raise TargetError(
                "every warm-up request failed at "
                f"{self.client.target.url(self.client.target.endpoint)}: "
                f"{next(iter(failed))}"
            )

    def _title(self, load: ArrivalLoad, repeat: int) -> str:
        parts = [f"concurrency {load.concurrency}"] if load.concurrency else []
        parts += [f"{load.rate:g} requests/s"] if not math.isinf(load.rate) else []
        parts += (
            [f"repeat {repeat + 1} of {self.method.repeats}"] if self.method.repeats > 1 else []
        )
        return ", ".join(parts) or self.data.name

    def _asked(self, load: ArrivalLoad, count: int) -> Figures:
        """Arguments, under both scripts' names."""
        target = self.client.target
        lengths = self.data.lengths
        backend = "openai-chat" if target.chat else "openai"
        return {
            "backend": backend,
            "endpoint_type": backend,
            "endpoint": target.endpoint,
            "streaming": target.stream,
            "model_id": target.model,
            "tokenizer_id": self.vocabulary.name,
            "dataset_name": self.data.name,
            "dataset": _plain(asdict(self.data)),
            "prompt_format": "text"
            if self.vocabulary.as_text or self.data.name == "sharegpt"
            else "ids",
            "num_prompts": count,
            "request_rate": "inf" if math.isinf(load.rate) else load.rate,
            "burstiness": load.burstiness if math.isfinite(load.burstiness) else "inf",
            "max_concurrency": load.concurrency,
            "random_input_len": lengths.input_len,
            "random_output_len": lengths.output_len,
            "random_range_ratio": lengths.range_ratio,
            "sharegpt_output_len": self.data.sharegpt_output_len,
            "ignore_eos": target.ignore_eos,
            "temperature": target.temperature,
            "goodput_limits": {
                name: limit
                for name, limit in asdict(self.method.limits).items()
                if limit is not None
            },
            "seed": self.method.seed,
            "num_repeats": self.method.repeats,
            "num_gpus": self.method.gpus,
        }

    def _details(self, run: Run) -> Figures:
        """Per-request lists (of the last repeat), and the answers' tokens counted again where
        texts were kept."""
        if not self.method.details:
            return {"total_output_tokens_retokenized": None}
        found = metrics.details(run)
        again = self.vocabulary.tokenizer.raw.encode_batch(
            found["generated_texts"], add_special_tokens=False
        )
        return {"total_output_tokens_retokenized": sum(len(text.ids) for text in again)} | found


def _merged(repeats: list[Figures]) -> Figures:
    """Median of every number, and the repeats themselves; failures are added up, since one is
    one too many."""
    first = repeats[0]
    merged = {key: _median([one[key] for one in repeats]) for key in first}
    merged["failures"] = {
        cause: sum(one["failures"].get(cause, 0) for one in repeats)
        for one in repeats
        for cause in one["failures"]
    }
    merged["failed"] = sum(one["failed"] for one in repeats)
    return merged | ({"repeats": repeats} if len(repeats) > 1 else {})


def _median(values: list[Any]) -> Any:
    """Of numbers; the first of anything else. None as soon as one repeat has no data."""
    if any(value is None for value in values):
        return None
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        middle = statistics.median(values)
        return int(middle) if isinstance(values[0], int) and middle == int(middle) else middle
    return values[0]


def _plain(value: Any) -> Any:
    return (
        {key: _plain(item) for key, item in value.items()}
        if isinstance(value, dict)
        else str(value)
        if isinstance(value, Path)
        else value
    )


Warned = tuple[bool, Callable[[], str]]  # whether it holds, and the words


def warnings(row: Figures, repeats_of_a_file: bool = False) -> list[str]:
    """What a reader of the row must know, in sentences."""
    chunks: Warned = (
        (row["tokens_per_chunk"] or 0) > 1.05,
        lambda: (
            f"a chunk carries {row['tokens_per_chunk']:.2f} tokens: ITL is a chunk's time, TPOT a "
            "token's; compare TPOT"
        ),
    )
    cache = _about_the_cache(row, repeats_of_a_file)
    asks = (*_about_the_client(row), *_about_tokens(row), *cache, chunks)
    return [words() for holds, words in asks if holds]


def _about_the_client(row: Figures) -> list[Warned]:
    """Whether it, or the number of its requests, is what was measured."""
    return [
        (
            row["client_cpu_cores"] >= BUSY_CLIENT,
            lambda: (
                f"the client used {row['client_cpu_cores']:.2f} cores: it may be what was measured"
            ),
        ),
        (
            row["num_prompts"] < (row["max_concurrency"] or 0),
            lambda: (
                f"{row['num_prompts']} requests never fill a concurrency of "
                f"{row['max_concurrency']}"
            ),
        ),
    ]


def _about_tokens(row: Figures) -> list[Warned]:
    """How they were counted, and whether they are those that were asked for."""
    return [
        (
            row["token_source"] == "chunks",
            lambda: "the server gives no usage: tokens are counted as one a chunk",
        ),
        (
            bool(row["requests_with_more_chunks_than_tokens"]),
            lambda: (
                f"{row['requests_with_more_chunks_than_tokens']} answers came in more chunks "
                "than the tokens their usage states"
            ),
        ),
        (
            bool(row["ignore_eos"] and row["short_outputs"]),
            lambda: (
                f"{row['short_outputs']} answers are shorter than asked although ignore_eos "
                "was sent"
            ),
        ),
        (
            bool(row["input_length_mismatches"])
            and not row["endpoint"].endswith("chat/completions"),
            lambda: (
                f"{row['input_length_mismatches']} prompts have another length by the "
                "server's count: is --tokenizer the model's?"
            ),
        ),
    ]


def _about_the_cache(row: Figures, repeats_of_a_file: bool) -> list[Warned]:
    """Whether prompts came from the server's prefix cache."""
    return [
        (
            bool(row["total_cached_tokens"]) and row["dataset_name"] in ("random", "sharegpt"),
            lambda: (
                f"{row['total_cached_tokens']:,} prompt tokens came from the server's prefix "
                "cache: flush it, or change --seed"
            ),
        ),
        (
            repeats_of_a_file and row["cache_flush"] is None,
            lambda: (
                "the repeats send the same file's prompts, and no page flushed the prefix cache"
            ),
        ),
    ]
