"""transformers' generate on the same checkpoint, prompts, dtype and threads: the baseline of `bench
offline --compare`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from rorqual.llm.llm import LLM

Once = Callable[[int], float]


class TransformersBaseline:
    """One batch of prompts. Both methods return (seconds for greedy generation of that many tokens,
    description of the settings)."""

    def __init__(self, llm: LLM, prompts: list[list[int]]):
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = llm.engine.config.model
        dtype = getattr(torch, llm.engine.dtype)
        if llm.engine.config.weights == "random":
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder), dtype=dtype
            )
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = model.eval()
        self.ids = torch.tensor(prompts)
        self.compiled_for: set[int] = set()

    def generate(self, tokens: int, cache: str | None = None) -> float:
        from transformers import GenerationConfig

        settings = GenerationConfig(
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=cache,
        )
        start = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                self.ids, attention_mask=torch.ones_like(self.ids), generation_config=settings
            )
        return time.perf_counter() - start

    def best(self, output: int) -> tuple[Once, str]:
        """Every attention and experts implementation is tried, and the fastest kept."""
        probes = []
        for experts in ("eager", "batched_mm", "grouped_mm"):
            for attention in ("sdpa", "eager"):
                self._set(experts, attention)
                self.generate(2)
                probes.append(
                    (min(self.generate(min(output, 32)) for _ in range(3)), experts, attention)
                )
        _, experts, attention = min(probes)
        self._set(experts, attention)
        return (
            self.generate,
            f"experts {experts}, attention {attention}, threads {torch.get_num_threads()}",
        )

    def compiled(self) -> tuple[Once, str]:
        """torch.compile over a static cache. Compiling takes a minute or two for every batch
        size and is not counted."""
        experts = "batched_mm" if len(self.ids) == 1 else "grouped_mm"
        self._set(experts, "sdpa")
        self.model.forward = torch.compile(self.model.forward)
        return (
            self._warm,
            f"compiled, static cache, experts {experts}, threads {torch.get_num_threads()}",
        )

    def _warm(self, tokens: int) -> float:
        """The cache's size follows the number of tokens: a size seen for the first time is
        compiled for, uncounted."""
        if tokens not in self.compiled_for:
            self.compiled_for.add(tokens)
            self.generate(tokens, "static")
            self.generate(tokens, "static")
        return self.generate(tokens, "static")

    def _set(self, experts: str, attention: str) -> None:
        self.model.set_attn_implementation(attention)
        self.model.set_experts_implementation(experts)
