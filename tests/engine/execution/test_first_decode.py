"""A request of which all but the last token is cached begins as one that decodes, with the tokens
and log probabilities that it has behind a chunk of its prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual.engine.config import EngineConfig
from rorqual.engine.engine import Engine
from rorqual.request import Request, SamplingParams
from tests.models.checkpoints import VOCAB, save, save_with_mtp

pytestmark = pytest.mark.exhaustive(but_first=True)

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 7, "top_k": 20},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "bans": {"temperature": 0, "bad_word_ids": ((3,), (5, 6)), "min_tokens": 4},
}
CASES = [("v3", 0), ("v3", 2), ("v2-grouped", 0), ("qwen", 0)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    kind, drafts = request.param
    folder: Path = tmp_path_factory.mktemp(kind)
    save_with_mtp(folder, 1) if drafts else save(kind, folder)
    options = {"num_speculative_tokens": drafts} if drafts else {}
    made = Engine(
        EngineConfig(
            str(folder), dtype="float32", page_size=8, max_num_seqs=4, max_model_len=128, **options
        )
    )
    yield made
    made.close()


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCAB, (length,), generator=generator).tolist())


@pytest.fixture(scope="module")
def names() -> Iterator[str]:
    return (str(number) for number in range(10_000))


def answer(engine: Engine, request: Request) -> tuple[list[int], list[float]]:
    engine.add(request)
    tokens = []
    logprobs = []
    while engine.has_work:
        for out in engine.step():
            tokens.append(out.token)
            if out.logprobs is not None:
                logprobs += [out.logprobs.sampled, *out.logprobs.top]
    return tokens, logprobs


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("length", [25, 29, 33])
def test_the_answer_is_that_behind_a_chunk(
    engine: Engine, names: Iterator[str], length: int, sampling: str
) -> None:
    ids = prompt(length, length)
    params = SamplingParams(max_tokens=20, ignore_eos=True, **SAMPLING[sampling])
    want = answer(engine, Request(next(names), ids, params, cache_salt=f"alone {sampling}"))

    elsewhere = {"do_remote_decode": True}
    first = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    answer(engine, Request(next(names), ids, first, kv_transfer_params=elsewhere))
    before = engine.stats.prompt_tokens
    found = answer(engine, Request(next(names), ids, params))
    assert engine.stats.prompt_tokens == before, "a chunk of the prompt was computed"
    assert found[0] == want[0]
    assert found[1] == pytest.approx(want[1], abs=2e-4)
