"""Log probabilities of prompts are those the model gives when it is asked for each token alone,
however the prompt was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.engine.execution import prompt_scorer
from rorqual.request import Logprob, RequestOutput
from tests.models.checkpoints import VOCAB, save, save_with_mtp

Entries = list[dict[int, Logprob] | None]

PAGE = 8
LENGTHS = (1, 2, 9, 40, 61)


@pytest.fixture(scope="module", params=["v3", "qwen"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "v3":
        save_with_mtp(path)
    else:
        save(request.param, path)
    return path


def engine(folder: Path, **options: Any) -> LLM:
    settings = {
        "dtype": "float32",
        "page_size": PAGE,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "skip_tokenizer_init": True,
        "seed": 3,
    }
    return LLM(folder, **{**settings, **options})


def prompts() -> list[list[int]]:
    """Some begin alike, so that a cache would have pages of them."""
    generator = torch.Generator().manual_seed(5)
    text = torch.randint(VOCAB, (70,), generator=generator).tolist()
    found = [text[:length] for length in LENGTHS]
    return [*found, text[:24] + text[50:66]]


def ask(most: int = 3, **changes: Any) -> SamplingParams:
    settings = {"temperature": 0, "max_tokens": most, "ignore_eos": True, "prompt_logprobs": 2}
    return SamplingParams(**{**settings, **changes})


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Entries]:
    """Token by token: the next one is forced, and told with what the model thought of it."""
    llm = engine(folder, enable_prefix_caching=False)
    found: list[Entries] = []
    for prompt in prompts():
        starts = [prompt[:i] for i in range(1, len(prompt))]
        params = [
            SamplingParams(temperature=0, max_tokens=1, logprobs=2, logit_bias={token: 100.0})
            for token in prompt[1:]
        ]
        outs = llm.generate(starts, params) if starts else []
        found.append([None, *(out.outputs[0].logprobs[0] for out in outs)])
    return found


def check(outs: list[RequestOutput], expected: list[Entries]) -> None:
    for out, wanted in zip(outs, expected, strict=True):
        assert out.prompt_logprobs is not None
        assert len(out.prompt_logprobs) == len(out.prompt_token_ids) == len(wanted)
        assert out.prompt_logprobs[0] is None
        for token, ours, theirs in zip(
            out.prompt_token_ids[1:], out.prompt_logprobs[1:], wanted[1:], strict=True
        ):
            assert ours is not None
            assert theirs is not None
            assert ours.keys() == theirs.keys()
            assert token in ours
            for name, entry in ours.items():
                assert entry.rank == theirs[name].rank
                assert entry.logprob == pytest.approx(theirs[name].logprob, abs=2e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 7, "steps_in_flight": 2},
        {"num_pages": 24, "steps_in_flight": 2, "max_num_batched_tokens": 48},
        {"num_speculative_tokens": 1, "drafter": "ngram"},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()) or "default",
)
def test_scores_of_prompts(folder: Path, expected: list[Entries], options: dict[str, Any]) -> None:
    llm = engine(folder, **options)
    check(llm.generate(prompts(), ask(40)), expected)
    check(llm.generate(prompts(), ask()), expected)  # pages of them are cached now
    preempted = llm.engine.scheduler.usage().preemptions
    assert (preempted > 0) == ("num_pages" in options)


def test_prediction_modules_beside_scores(
    expected: list[Entries], folder: Path, tmp_path: Path
) -> None:
    if "v3" not in folder.name:
        pytest.skip("no prediction modules")
    llm = engine(folder, num_speculative_tokens=2, chunked_prefill_size=9)
    check(llm.generate(prompts(), ask(12)), expected)
    assert llm.engine.stats.drafted[0] > 0


def test_a_large_vocabulary_is_scored_some_rows_at_a_time(
    folder: Path, expected: list[Entries], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_scorer, "SCORED_BYTES", 4 * VOCAB * 5 + 1)
    llm = engine(folder)
    assert llm.engine.worker.runner.sampler.scorer.most_rows == 5
    check(llm.generate(prompts(), ask()), expected)


def test_others_still_share_pages_and_their_answers_are_as_ever(folder: Path) -> None:
    llm = engine(folder)
    prompt = prompts()[4]
    plain = llm.generate([prompt], ask(5, prompt_logprobs=None))[0]
    scored = llm.generate([prompt], ask(5))[0]
    after = llm.generate([prompt], ask(5, prompt_logprobs=None))[0]
    assert plain.prompt_logprobs is None
    assert scored.num_cached_tokens == 0
    assert after.num_cached_tokens == (len(prompt) - 1) // PAGE * PAGE
    answers = [out.outputs[0].token_ids for out in (plain, scored, after)]
    assert answers[0] == answers[1] == answers[2]


def test_samples_of_one_prompt_score_it_once(folder: Path) -> None:
    llm = engine(folder)
    before = llm.engine.stats.prompt_tokens
    params = ask(2, temperature=1.0, n=3, seed=1)
    (out,) = llm.generate([prompts()[4]], params)
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == LENGTHS[4]
    assert len(out.outputs) == 3
    assert llm.engine.stats.prompt_tokens - before <= 3 * LENGTHS[4]
