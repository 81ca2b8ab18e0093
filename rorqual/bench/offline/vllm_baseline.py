"""vLLM on the same shapes, for `bench offline --compare vllm`: the whole engine's steps and
prompts, and the number of experts hit.

It runs after our engine, in separate processes (vllm_process.py), so that neither occupies the
other's memory: one for the times, with vLLM's defaults, and one that returns the routed experts,
which costs time.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rorqual.bench.offline.run import OfflineRow, row_of
from rorqual.bench.offline.vllm_process import MARK
from rorqual.bench.offline.work import OfflineWork
from rorqual.engine.config import EngineConfig
from rorqual.engine.execution.worker import RESIDUAL_GAIN
from rorqual.errors import ConfigError, EngineError

log = logging.getLogger("rorqual.bench")

PATIENCE = 1800.0  # seconds for one process: compiling may take minutes


def check_installed() -> None:
    """Raises ConfigError where it is not."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("--compare vllm runs vLLM on the same shapes, and vllm is not installed")


def check(config: EngineConfig) -> None:
    """Raises ConfigError where the two would not do alike."""
    if (
        not config.parallel.is_single
        or config.num_speculative_tokens
        or config.kv_cache_dtype != "auto"
    ):
        raise ConfigError(
            "--compare vllm takes one GPU, no speculation, and a cache as the model has it"
        )


def measure(
    config: EngineConfig, dtype: str, num_layers: int, ours: Sequence[OfflineRow], work: OfflineWork
) -> Iterator[OfflineRow]:
    """A row of vLLM's for each of `ours`, whose floors hold for it as well. num_layers: of the
    model, cut or whole. Raises EngineError where vLLM does not run."""
    with tempfile.TemporaryDirectory() as folder:
        model = config.model
        if config.weights == "random":
            shape = json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8")) | {
                "num_hidden_layers": num_layers
            }
            (Path(folder) / "config.json").write_text(json.dumps(shape), encoding="utf-8")
            model = folder
        job = {
            "model": model,
            "random": config.weights == "random",
            "gain": RESIDUAL_GAIN * (2 * num_layers) ** -0.5,
            "dtype": dtype,
            "prompt": work.prompt,
            "output": work.output,
            "repeats": work.repeats,
            "temperature": work.temperature,
            "concurrency": [row.concurrency for row in ours],
            "batched_tokens": config.max_num_batched_tokens,
            "routing": False,
        }
        timed = {answer["concurrency"]: answer for answer in _answers(job) if "whole" in answer}
        try:
            hit = {
                answer["concurrency"]: answer["experts_hit"]
                for answer in _answers(job | {"routing": True})
                if "experts_hit" in answer
            }
        except EngineError as error:  # models without experts, versions that do not return them
            log.warning("experts hit are not known: %s", error)
            hit = {}
        for row in ours:
            answer = timed[row.concurrency]
            count = row.concurrency
            found = row_of(
                "vllm",
                count,
                work.prompt,
                work.output,
                answer["first"],
                answer["whole"],
                row.floor_ms,
            )
            yield replace(found, experts_hit=hit.get(count), settings=_version())


def _answers(job: dict[str, Any]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "rorqual.bench.offline.vllm_process"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"vLLM has not answered within {PATIENCE:.0f} s") from None
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise EngineError(
            f"vLLM ended with status {done.returncode}: {' | '.join(said[-3:])[-600:]}"
        )
    return [
        json.loads(line[len(MARK) :]) for line in done.stdout.splitlines() if line.startswith(MARK)
    ]


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"vLLM {version('vllm')}"
    except PackageNotFoundError:
        return "vLLM"
