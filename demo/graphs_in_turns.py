"""An engine whose decode steps are those of several sets of graphs in turns: for scripts that
compare two ways of capturing a step."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rorqual import LLM
from rorqual.engine.execution.cuda_graphs import DecodeGraphs
from rorqual.models.hub import BUNDLED, model_folder

PROMPT = 16
WARM = 4  # steps before those that are timed
DEPTH = 2  # most steps in flight


def options(description: str, requests: str) -> argparse.ArgumentParser:
    """requests: the default of --requests."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", nargs="?", default=BUNDLED, help="a shape, or a folder")
    parser.add_argument("--requests", type=numbers, default=numbers(requests), help="1,2,3")
    parser.add_argument("--layers", type=int, help="of the model's; all by default")
    parser.add_argument("--quantization", default="auto")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path)
    return parser


def numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError
    return found


def keep(asked: argparse.Namespace, rows: Sequence[Any]) -> None:
    """Write the rows, dataclasses, to the file that was asked for, if any."""
    if asked.json:
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


class GraphsInTurns:
    """With random weights. `asked`: see `options`. Every request may generate `tokens` after a
    prompt of `prompt`."""

    def __init__(
        self,
        asked: argparse.Namespace,
        max_num_seqs: int,
        tokens: int,
        prompt: int = PROMPT,
        prefix_caching: bool = False,
    ):
        self.asked = asked
        self.tokens = tokens
        self.llm = LLM(
            str(model_folder(asked.model, weights=False)),
            weights="random",
            skip_tokenizer_init=True,
            enable_prefix_caching=prefix_caching,
            max_num_seqs=max_num_seqs,
            max_model_len=prompt + tokens,
            quantization=asked.quantization,
            num_layers=asked.layers,
            device=asked.device,
            # on a CPU not the captured calls, which have no padding
            exe_mode="eager" if asked.device == "cpu" else "auto",
        )
        self.engine = self.llm.engine
        self.runner = self.engine.worker.runner

    def prompts(self, count: int) -> list[list[int]]:
        random = np.random.default_rng(count)
        vocab = self.engine.model.config.vocab_size
        return [random.integers(0, vocab, PROMPT).tolist() for _ in range(count)]

    def use(self, graphs: DecodeGraphs | None) -> None:
        """For the steps after those in flight."""
        self.drain()
        self.runner.graphs = graphs

    def drain(self) -> None:
        while self.engine.in_flight:
            self.engine.collect()
        self.engine.platform.synchronize()

    def seconds(self) -> float:
        """Of a step, the mean of a turn."""
        for _ in range(WARM):
            self.engine.step()
        begin = time.perf_counter()
        for _ in range(self.asked.steps):
            self.engine.step()
        return (time.perf_counter() - begin) / self.asked.steps
