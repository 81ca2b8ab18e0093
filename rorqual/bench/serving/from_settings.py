"""A target, data and a method from what a user says of them; see ServingSettings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rorqual.bench.serving.client import ServerTarget
from rorqual.bench.serving.measure import Data, Method
from rorqual.bench.serving.metrics import GoodputLimits
from rorqual.bench.serving.prompts import PrefixGroups, PromptLengths
from rorqual.bench.serving.settings import ServingSettings
from rorqual.errors import ConfigError


def target_of(asked: ServingSettings) -> ServerTarget:
    greedy_or_more = asked.temperature is not None and asked.temperature >= 0
    return ServerTarget(
        base_url=asked.base_url,
        endpoint=asked.endpoint,
        model=asked.model,
        api_key=asked.api_key,
        stream=asked.stream,
        ignore_eos=asked.ignore_eos,
        temperature=asked.temperature if greedy_or_more else None,
        extra_body=_json_object(asked.extra_body),
        headers=dict(_pair(item) for item in asked.header),
        timeout=asked.timeout,
        connect_timeout=asked.connect_timeout,
        keep_text=asked.save_detailed,
    )


def data_of(asked: ServingSettings) -> Data:
    return Data(
        name=asked.dataset,
        lengths=PromptLengths(
            asked.input_len, asked.output_len, asked.range_ratio, asked.range_convention
        ),
        num_prompts=asked.num_prompts,
        per_concurrency=asked.prompts_per_concurrency,
        groups=PrefixGroups(asked.prefix_groups, asked.prompts_per_group, asked.prefix_len),
        path=asked.dataset_path,
        sharegpt_output_len=asked.sharegpt_output_len,
        trace_block=asked.trace_block,
        trace_speed=asked.trace_speed,
    )


def method_of(asked: ServingSettings) -> Method:
    return Method(
        repeats=asked.repeats,
        warm_ups=asked.num_warmups,
        flush=asked.flush_cache,
        metrics_path=asked.metrics_path,
        limits=GoodputLimits.parse(list(asked.goodput)),
        percentiles=_percentiles(asked.percentiles),
        gpus=asked.gpus or 1,
        seed=asked.seed,
        details=asked.save_detailed,
    )


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body {text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"--extra-body {text!r}; accepted: a JSON object")
    return found


def _pair(item: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if not (name and equals):
        raise ConfigError("--header takes NAME=VALUE")
    return name, value


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigError(
            f"--metric-percentiles {text!r}; accepted: comma-separated numbers between 0 and 100"
        ) from None


def as_text(form: str, chat: bool) -> bool:
    choices: Sequence[str] = ("ids", "text", "auto")
    if form not in choices:
        raise ConfigError(f"--prompt-format {form!r}; accepted: {', '.join(choices)}")
    return form == "text" or (form == "auto" and chat)
