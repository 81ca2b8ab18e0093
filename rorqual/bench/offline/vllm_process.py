"""vLLM in a process of its own, for vllm_baseline.py: a job as JSON on standard input, answers as
lines of standard output behind MARK.

Written for vLLM 0.25.1. Random weights are rewritten after vLLM has made its own: those send nearly
every token to the same few experts, whose cost is not that of the layer.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from rorqual.bench.peers.natural_weights import natural

MARK = "rorqual-peer "
ROUTED_STEPS = 8  # decode steps whose experts are counted


def tell(**answer: Any) -> None:
    print(MARK + json.dumps(answer), flush=True)


def experts_hit(routed: Sequence[Any]) -> float:
    """routed: for each request [tokens, layers, top_k], the experts of its last tokens. Returns the
    distinct experts of all requests per step and layer, averaged; layers without routing (all rows
    equal) do not count."""
    picks = torch.stack([torch.as_tensor(request[-ROUTED_STEPS:]).long() for request in routed])
    hit = []
    for layer in range(picks.shape[2]):
        if len(picks[:, :, layer].unique()) > picks.shape[3]:
            hit += [len(picks[:, step, layer].unique()) for step in range(picks.shape[1])]
    return sum(hit) / max(1, len(hit))


def _options(job: dict[str, Any], output: int) -> dict[str, Any]:
    """Of the engine, for answers of so many tokens."""
    # of vLLM's own sizes those that are used
    recorded = {"cudagraph_capture_sizes": sorted(job["concurrency"])}
    only: dict[str, Any] = (
        {"enforce_eager": True, "enable_return_routed_experts": True}
        if job["routing"]
        else recorded
    )
    return {
        "model": job["model"],
        "dtype": job["dtype"],
        "load_format": "dummy" if job["random"] else "auto",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": job["prompt"] + output + 8,
        "max_num_seqs": max(job["concurrency"]),
        "max_num_batched_tokens": job["batched_tokens"],
        "disable_log_stats": True,
        **only,
    }


def run(job: dict[str, Any]) -> None:
    """job: model, random, gain, dtype, prompt, output, repeats, temperature, concurrency,
    batched_tokens, routing."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    # minutes; capturing and the warm-up runs compile what the timed runs need
    os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")
    from vllm import LLM, SamplingParams

    began = time.perf_counter()
    output = ROUTED_STEPS + 2 if job["routing"] else job["output"]
    llm = LLM(**_options(job, output))
    if job["random"]:
        llm.apply_model(lambda model: natural(model, job["gain"]))
    tell(start=time.perf_counter() - began)
    vocab = llm.llm_engine.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(0)

    def generate(count: int, tokens: int) -> tuple[float, Any]:
        ids = torch.randint(vocab, (count, job["prompt"]), generator=generator).tolist()
        params = SamplingParams(
            temperature=job["temperature"], max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        outs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in ids], params, use_tqdm=False
        )
        return time.perf_counter() - start, outs

    for count in job["concurrency"]:
        if job["routing"]:
            tell(
                concurrency=count,
                experts_hit=experts_hit(
                    [out.outputs[0].routed_experts for out in generate(count, output)[1]]
                ),
            )
            continue
        generate(count, min(4, output))  # warm up
        first, whole = (
            statistics.median(generate(count, tokens)[0] for _ in range(job["repeats"]))
            for tokens in (1, output)
        )
        tell(concurrency=count, first=first, whole=whole)


if __name__ == "__main__":
    run(json.load(sys.stdin))
