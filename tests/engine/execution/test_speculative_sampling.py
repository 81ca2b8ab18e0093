"""Sampled tokens under speculation: seeded ones are the same tokens, unseeded ones have the same
distribution. Real engine, fp32."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rorqual import LLM, SamplingParams
from tests.engine.execution.test_identity import engine, prompts
from tests.models.checkpoints import save_with_mtp

pytestmark = pytest.mark.exhaustive(but_first=True)

VOCAB = 8
# repeats itself: the ngram drafter always has a draft for the second token
PROMPT = [3, 5, 2, 7, 3, 5, 2, 7, 3, 5]
COUNT = 2500
# The chi-squared statistic that a true hypothesis exceeds once in 10,000 times, by degrees of
# freedom.
CHI_SQUARED = {15: 44.26, 26: 61.66}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    save_with_mtp(path, vocab=VOCAB, agreement=1.0, seed=4)
    return path


def chances(llm: LLM, text: list[int], top_k: int) -> dict[int, float]:
    """What may follow a text, with its probability under temperature 1 and top_k."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB, ignore_eos=True)
    found = llm.generate(text, params)[0].outputs[0].logprobs[0]
    best = sorted(((math.exp(item.logprob), token) for token, item in found.items()), reverse=True)
    assert best[top_k - 1][0] > best[top_k][0], "no ties"
    total = sum(p for p, _ in best[:top_k])
    return {token: p / total for p, token in best[:top_k]}


def joint(llm: LLM, length: int, top_k: int) -> dict[tuple[int, ...], float]:
    """The exact probability of every beginning of `length` tokens."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        found = {
            (*said, token): p * q
            for said, p in found.items()
            for token, q in chances(llm, [*PROMPT, *said], top_k).items()
        }
    return found


@pytest.fixture(scope="module")
def exact(folder: Path) -> dict[tuple[int, int], dict[tuple[int, ...], float]]:
    llm = engine(folder)
    return {(length, top_k): joint(llm, length, top_k) for length, top_k in ((3, 3), (4, 2))}


@pytest.mark.parametrize(
    ("options", "length", "top_k"),
    [
        ({"num_speculative_tokens": 2}, 3, 3),
        ({"num_speculative_tokens": 3, "steps_in_flight": 2}, 4, 2),
        ({"num_speculative_tokens": 2, "drafter": "ngram"}, 3, 3),
        ({"num_speculative_tokens": 3, "drafter": "ngram", "steps_in_flight": 2}, 4, 2),
    ],
    ids=str,
)
def test_the_joint_distribution_of_the_first_tokens_is_unchanged(
    folder: Path,
    exact: dict[tuple[int, int], dict[tuple[int, ...], float]],
    options: dict[str, Any],
    length: int,
    top_k: int,
):
    """Thousands of unseeded requests, some with more to say than others, so that the batch is
    never the same twice."""
    llm = engine(folder, max_num_seqs=256, max_num_batched_tokens=2048, **options)
    llm.engine.scheduler.schedulers[0]._seeds = random.Random(0)
    params = [
        SamplingParams(temperature=1.0, top_k=top_k, max_tokens=length + i % 3, ignore_eos=True)
        for i in range(COUNT)
    ]
    outs = llm.generate([PROMPT] * COUNT, params)
    counts = Counter(tuple(out.outputs[0].token_ids[:length]) for out in outs)
    wanted = {said: COUNT * p for said, p in exact[length, top_k].items()}
    assert set(counts) <= set(wanted)
    assert min(wanted.values()) > 2, "the test needs a few of each"
    statistic = sum((counts[said] - share) ** 2 / share for said, share in wanted.items())
    print(
        f"{options}: {statistic:.1f}, accepted {llm.engine.stats.accepted} of "
        f"{llm.engine.stats.drafted}"
    )
    assert statistic < CHI_SQUARED[len(wanted) - 1]
    drafted = llm.engine.stats.drafted
    accepted = llm.engine.stats.accepted
    assert all(0.02 * d < a < 0.98 * d for d, a in zip(drafted[:2], accepted[:2], strict=True))


KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 4},
    {"temperature": 1.4, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.8, "presence_penalty": 0.5, "logprobs": 2},
    {"temperature": 0.9, "logit_bias": {2: 1.0}, "min_tokens": 3},
]


def seeded(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(seed=100 + i, max_tokens=14, ignore_eos=True, **KINDS[i % len(KINDS)])
        for i in range(count)
    ]


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_seeded_requests_give_the_same_tokens(folder: Path, drafter: str):
    """With any num_speculative_tokens, alone, together, and beside greedy and unseeded ones,
    some of which opt out."""
    texts = [[token % VOCAB for token in prompt] for prompt in prompts(12)]
    params = seeded(12)
    plain = engine(folder)
    expected = [
        plain.generate(text, p)[0].outputs[0].token_ids
        for text, p in zip(texts, params, strict=True)
    ]
    company = [
        SamplingParams(
            temperature=i % 2,
            max_tokens=5 + 2 * i,
            ignore_eos=True,
            speculate=i % 3 > 0,
            top_k=i % 4,
        )
        for i in range(12)
    ]
    together = list(itertools.chain.from_iterable(zip(params, company, strict=True)))
    for num_speculative_tokens, depth in ((1, 1), (2, 2), (3, 3)):
        llm = engine(
            folder,
            num_speculative_tokens=num_speculative_tokens,
            drafter=drafter,
            steps_in_flight=depth,
            num_pages=60,
        )
        alone = [
            llm.generate(text, p)[0].outputs[0].token_ids
            for text, p in zip(texts[:3], params, strict=False)
        ]
        assert alone == expected[:3]
        outs = llm.generate([text for text in texts for _ in range(2)], together)
        assert [out.outputs[0].token_ids for out in outs[::2]] == expected
        assert sum(llm.engine.stats.accepted) > 0


@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_n_samples_of_a_seeded_request_are_those_without_speculation(folder: Path, drafter: str):
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=10, ignore_eos=True)
    wanted = [out.token_ids for out in engine(folder).generate(PROMPT, params)[0].outputs]
    assert len({tuple(tokens) for tokens in wanted}) > 1
    assert [
        out.token_ids
        for out in engine(folder, num_speculative_tokens=3, drafter=drafter)
        .generate(PROMPT, params)[0]
        .outputs
    ] == wanted
