"""A batch of many kinds of requests to the bundled model, and what an engine made of it."""

from __future__ import annotations

from typing import Any

from rorqual import LLM, SamplingParams
from rorqual.request import RequestOutput, StructuredOutput

TEXTS = [
    "The captain of the ship",
    "In the beginning",
    "It was a dark night and the",
    "What do you mean?",
    "She had",
    "There is",
    "Words:",
]
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 6,
    "page_size": 8,
    "threads": 1,
    "num_pages": 160,
}


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True, **changes})


MIXED = [
    params(),
    params(temperature=0.9, seed=3),
    params(logprobs=2, prompt_logprobs=1),
    params(presence_penalty=0.7, repetition_penalty=1.2),
    params(temperature=1.1, top_k=9, seed=8, max_tokens=33),
    params(speculate=False, max_tokens=7),
    params(
        temperature=1.0,
        seed=4,
        structured=StructuredOutput("regex", "[a-m]{3,9}(, [n-z]{2,7}){2}"),
        ignore_eos=False,
        max_tokens=60,
    ),
]


def comparable(out: RequestOutput) -> Any:
    completion = out.outputs[0]
    entries = [*(completion.logprobs or ()), *(out.prompt_logprobs or ())[1:]]
    logprobs = [{t: round(entry.logprob, 3) for t, entry in step.items()} for step in entries]
    return completion.token_ids, completion.finish_reason, logprobs


def everything(llm: LLM, prompts: list[Any]) -> list[Any]:
    """A mixed batch, the same again over a filled prefix cache, then one request alone: other
    data-parallel ranks idle."""
    try:
        found = [
            comparable(out)
            for _ in range(2)
            for out in llm.generate(prompts, MIXED[: len(prompts)])
        ]
        found += [comparable(out) for out in llm.generate(prompts[:1], params(max_tokens=12))]
        usage = llm.engine.scheduler.usage()
        assert usage.running == usage.waiting == 0
        assert usage.pages_used == 0
        return found
    finally:
        llm.engine.close()
