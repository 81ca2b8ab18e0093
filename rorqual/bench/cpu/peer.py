"""transformers on a shape: random weights both engines load, and its best settings."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Clock = Callable[[], float]
EXPERTS = ("grouped_mm", "batched_mm", "eager")
PROBED_STEPS = 3
# batched_mm copies the weights of each token's experts: not tried where they come to more bytes
MAX_COPIED_BYTES = 2 << 30


@dataclass(frozen=True)
class Setting:
    """How transformers computes: dtype, its implementations of experts and of attention."""

    dtype: torch.dtype
    experts: str
    attention: str
    compiled: bool = False

    def __str__(self) -> str:
        words = (str(self.dtype).removeprefix("torch."), self.experts, self.attention)
        return " ".join(words) + (" compiled" if self.compiled else "")


class Peer:
    """A transformers model with random weights, which `save` passes to our engine."""

    def __init__(
        self, data: dict[str, Any], folder: Path, seed: int, clock: Clock, static: int | None
    ):
        from transformers import AutoConfig, AutoModelForCausalLM

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(data))
        config = AutoConfig.from_pretrained(folder)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            with torch.no_grad():
                fill(model)
        self.clock = clock
        self.static = static  # tokens of the compiled model's cache; None: nothing is compiled
        self.model = model.eval()
        self.forward = self.model.forward
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(data))  # as it was drawn

    def use(self, setting: Setting) -> None:
        self.model.to(setting.dtype)
        self.model.set_attn_implementation(setting.attention)
        self.model.set_experts_implementation(setting.experts)
        self.model.forward = torch.compile(self.forward) if setting.compiled else self.forward

    def decoding(self, prompts: Tensor, setting: Setting) -> Decoding:
        self.use(setting)
        length = self.static if setting.compiled else None
        return Decoding(self.model, prompts, length, self.clock)

    def prompt_seconds(self, prompts: Tensor, setting: Setting) -> float:
        self.use(setting)
        with torch.inference_mode():
            start = self.clock()
            self.model(prompts, use_cache=True, logits_to_keep=1)
            return self.clock() - start

    def best(self, prompts: Tensor, steps: int, limit: float) -> tuple[Setting, int]:
        """The fastest setting of decode steps, or of prompts where `steps` is 0, and how many
        were tried in `limit` seconds."""
        tried: dict[Setting, float] = {}
        deadline = time.perf_counter() + limit
        for setting in self._candidates(tried, steps):
            if (
                setting.experts == "batched_mm"
                and self._copied(prompts, setting) > MAX_COPIED_BYTES
            ):
                continue
            if tried and time.perf_counter() > deadline:
                break
            tried[setting] = self._probe(prompts, steps, setting)
        return min(tried, key=lambda setting: tried[setting]), len(tried)

    def _copied(self, prompts: Tensor, setting: Setting) -> int:
        """Bytes of the larger matrix, gate and up, of all experts of all prompts' tokens."""
        config = self.model.config
        matrix = 2 * config.moe_intermediate_size * config.hidden_size * setting.dtype.itemsize
        return prompts.numel() * config.num_experts_per_tok * matrix

    def _candidates(self, tried: dict[Setting, float], steps: int) -> Iterator[Setting]:
        """Settings to try: dtype and experts together, then the other attention with the best of
        them, then that compiled, if requested (decode steps only: a prompt is one call)."""
        for experts, dtype in itertools.product(EXPERTS, (torch.bfloat16, torch.float32)):
            yield Setting(dtype, experts, "sdpa")
        best = min(tried, key=lambda setting: tried[setting])
        yield Setting(best.dtype, best.experts, "eager")
        if steps and self.static:
            experts = "grouped_mm" if best.experts == "eager" else best.experts
            yield Setting(best.dtype, experts, "sdpa", compiled=True)

    def _probe(self, prompts: Tensor, steps: int, setting: Setting) -> float:
        if not steps:
            return min(self.prompt_seconds(prompts, setting) for _ in range(2))
        decoding = self.decoding(prompts[:, :8], setting)
        decoding.seconds(2)
        return min(decoding.seconds(1) for _ in range(steps))


class Decoding:
    """A batch in the middle of its answers. `length`: of a static cache, None for one that
    grows."""

    def __init__(self, model: Any, prompts: Tensor, length: int | None, clock: Clock):
        from transformers import DynamicCache, StaticCache

        self.model = model
        self.clock = clock
        self.cache: Any = (
            DynamicCache(config=model.config)
            if length is None
            else StaticCache(config=model.config, max_cache_len=length)
        )
        with torch.inference_mode():
            self.newest = self._step(prompts)

    def _step(self, ids: Tensor) -> Tensor:
        out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def seconds(self, steps: int) -> float:
        """Of so many steps, greedy."""
        start = self.clock()
        with torch.inference_mode():
            for _ in range(steps):
                self.newest = self._step(self.newest)
        return self.clock() - start


def fill(model: torch.nn.Module) -> None:
    """Random weights that keep the scale of activations and spread the routing: matrices of
    variance 1 / inputs, embeddings of variance 1, norms of 1, no correction biases."""
    for name, weight in itertools.chain(model.named_parameters(), model.named_buffers()):
        if weight.dim() < 2:
            if "norm" in name:
                weight.fill_(1)
            elif "bias" in name:
                weight.zero_()
            continue
        std = 1.0 if "embed_tokens" in name else math.sqrt(1 / weight.shape[-1])
        weight.normal_(0, std)
