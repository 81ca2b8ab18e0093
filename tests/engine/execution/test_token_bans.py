"""allowed_token_ids and bad words: the masks against their definition, and whole requests against a
plain reference, with and without drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.engine.execution.token_bans import REMEMBERED, RecentTokens, TokenBans
from rorqual.errors import RequestError
from rorqual.platforms.cpu import CpuPlatform
from rorqual.request import StructuredOutput
from tests.engine.execution.test_identity import engine
from tests.engine.execution.test_speculative_requests import Automata
from tests.models.checkpoints import save_with_mtp

pytestmark = pytest.mark.exhaustive(but_first=True)

CPU = CpuPlatform(torch.device("cpu"))
VOCAB = 32
MOST = 16
Word = tuple[int, ...]


def banned(token: int, said: list[int], words: list[Word], allowed: list[int] | None) -> bool:
    """By definition."""
    if allowed is not None and token not in allowed:
        return True
    return any((*said, token)[-len(word) :] == word for word in words if len(word) <= len(said) + 1)


def test_masks_are_what_the_definition_says() -> None:
    chance = random.Random(3)
    for _ in range(200):
        words = [
            tuple(chance.choices(range(4), k=chance.randint(1, 4)))
            for _ in range(chance.randint(0, 5))
        ]
        allowed = chance.choice([None, chance.sample(range(6), 3)])
        params = SamplingParams(bad_word_ids=words, allowed_token_ids=allowed)
        bans = TokenBans.of(params, 6, CPU)
        said = chance.choices(range(4), k=chance.randint(0, 6))
        recent = torch.tensor([-1] * (REMEMBERED - len(said)) + said)
        logits = torch.randn(6)
        found = logits.clone()
        bans.apply(found, recent)
        for token in range(6):
            never = found[token] == float("-inf")
            assert never == banned(token, said, words, allowed), (token, said, words, allowed)
            assert never or found[token] == logits[token]


def test_recent_tokens_are_the_last_of_each_row() -> None:
    chance = random.Random(4)
    recent = RecentTokens(3, CPU)
    said: list[list[int]] = [[], [], []]
    for _ in range(80):
        slots = chance.sample(range(3), chance.randint(1, 3))
        new = [chance.choices(range(9), k=chance.randint(0, 4)) for _ in slots]
        padded = torch.tensor([tokens + [-1] * (4 - len(tokens)) for tokens in new])
        recent.add(torch.tensor(slots), padded)
        for slot, tokens in zip(slots, new, strict=True):
            said[slot] += tokens
    assert all(len(tokens) > REMEMBERED for tokens in said)
    assert recent.tokens.tolist() == [tokens[-REMEMBERED:] for tokens in said]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bans")
    save_with_mtp(path, vocab=VOCAB, agreement=3.0, seed=4)
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return engine(folder)


@pytest.fixture(scope="module", params=["mtp", "ngram"])
def fast(folder: Path, request: pytest.FixtureRequest) -> LLM:
    options = {"num_speculative_tokens": 3, "drafter": request.param, "steps_in_flight": 2}
    return engine(folder, num_pages=12, **options)  # fewer than all requests need


# some repeat themselves, so that the ngram drafter has drafts
PROMPTS = [[3, 5, 2, 7] * 3, [8, 9] * 4, [1, 30, 4, 4, 19], [6, 6, 6], [20, 21, 22] * 3, [31]]


def asked(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": MOST, "ignore_eos": True, **given})


@pytest.fixture(scope="module")
def bans(plain: LLM) -> list[dict[str, Any]]:
    """For each prompt words that its free answer would say, and some tokens."""
    free = [out.outputs[0].token_ids for out in plain.generate(PROMPTS, asked())]
    even = list(range(0, VOCAB, 2))
    return [
        {"bad_word_ids": [tuple(free[0][:2]), tuple(free[0][4:7]), (free[0][8],)]},
        {"allowed_token_ids": even},
        {"allowed_token_ids": sorted({*even, *free[2][:3]}), "bad_word_ids": [tuple(free[2][1:3])]},
        {"bad_word_ids": [(t,) for t in free[3][:4]], "min_tokens": 5, "stop_token_ids": [0]},
        {"allowed_token_ids": [7]},
        {"bad_word_ids": [(a, b) for a in free[5] for b in range(0, VOCAB, 3)]},
    ]


def reference(plain: LLM, prompt: list[int], given: dict[str, Any]) -> list[int]:
    """Greedy, one request a token, the choice made here."""
    said: list[int] = []
    words = list(given.get("bad_word_ids", ()))
    for _ in range(MOST):
        least = given.get("min_tokens", 0)
        out = plain.generate([*prompt, *said], asked(max_tokens=1, logprobs=VOCAB))[0].outputs[0]
        assert out.logprobs is not None
        left = {
            token: entry.logprob
            for token, entry in out.logprobs[0].items()
            if not banned(token, said, words, given.get("allowed_token_ids"))
            and not (len(said) < least and token in given.get("stop_token_ids", ()))
        }
        said.append(max(left, key=lambda token: left[token]))
        if said[-1] in given.get("stop_token_ids", ()):
            break
    return said


def check(tokens: list[int], given: dict[str, Any]) -> None:
    words = list(given.get("bad_word_ids", ()))
    for i, token in enumerate(tokens):
        assert not banned(token, tokens[:i], words, given.get("allowed_token_ids"))


def test_greedy_answers_are_the_references(
    plain: LLM, fast: LLM, bans: list[dict[str, Any]]
) -> None:
    wanted = [reference(plain, prompt, given) for prompt, given in zip(PROMPTS, bans, strict=True)]
    assert wanted[4] == [7] * MOST
    params = [asked(**given) for given in bans]
    before = sum(fast.engine.stats.accepted)
    for llm in (plain, fast):
        outs = llm.generate(PROMPTS, params)
        assert [out.outputs[0].token_ids for out in outs] == wanted
    assert sum(fast.engine.stats.accepted) > before, "with drafts that stood"
    assert fast.engine.scheduler.schedulers[0].num_preemptions > 0
    alone = fast.generate(PROMPTS[0], params[0])[0].outputs[0].token_ids
    assert alone == wanted[0]


@pytest.mark.parametrize("seed", [None, 11])
def test_sampled_answers_keep_to_the_bans(
    plain: LLM, fast: LLM, bans: list[dict[str, Any]], seed: int | None
) -> None:
    kinds = [{"temperature": 1.0}, {"temperature": 1.5, "top_k": 5}, {"top_p": 0.7}]
    params = [
        asked(**{"temperature": 1.0, "seed": seed, **kind, **given})
        for given in bans
        for kind in kinds
    ]
    texts = [prompt for prompt in PROMPTS for _ in kinds]
    outs = [out.outputs[0].token_ids for out in fast.generate(texts, params)]
    for tokens, (given, _) in zip(outs, ((g, k) for g in bans for k in kinds), strict=True):
        check(tokens, given)
    assert len({tuple(tokens) for tokens in outs}) > len(outs) // 2
    if seed is not None:
        assert [out.outputs[0].token_ids for out in plain.generate(texts, params)] == outs


def test_bans_within_a_structure(plain: LLM, fast: LLM) -> None:
    """Both hold; where they leave nothing, the answer ends."""
    pairs = [{4: 1, 5: 1}, {6: 2, 7: 0}, {8: 0}]
    form = {"temperature": 0, "max_tokens": MOST, "stop_token_ids": [1]}
    given: list[dict[str, Any]] = [
        {"allowed_token_ids": [5, 7]},
        {"bad_word_ids": [(5, 7), (4,)]},
        {"bad_word_ids": [(4, 6), (4, 7)]},
        {"allowed_token_ids": [4, 5, 7], "bad_word_ids": [(7, 4), (7, 5)]},
        {"allowed_token_ids": [20]},
    ]
    params = [
        SamplingParams(**form, structured=StructuredOutput("grammar", "pairs"), **bans)
        for bans in given
    ]
    for llm in (plain, fast):
        llm.engine.grammars = Automata({"pairs": pairs})
        found = [out.outputs[0].token_ids for out in llm.generate([PROMPTS[0]] * 5, params)]
        assert found[0] == [5, 7] * (MOST // 2)
        assert found[1] == [5, 6, 8] * 5 + [5]
        assert found[2][0] in (4, 5)
        assert found[3][1:] == [7, 1], "neither 4 nor 5 may follow 7, so it ends"
        assert found[4] == [1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids=32 is no token id"),
        ({"bad_word_ids": [(3, VOCAB)]}, "bad_word_ids=32 is no token id"),
        ({"bad_words": ["a"]}, "bad_words need a tokenizer"),
        ({"bad_word_ids": [(i, i) for i in range(VOCAB)]}, "no token is left"),
        ({"allowed_token_ids": [4, 5], "bad_word_ids": [(4,), (9, 5)]}, "no token is left"),
        (
            {"allowed_token_ids": [4], "min_tokens": 2, "stop_token_ids": [4]},
            "no token is left to draw beside bad_words and min_tokens",
        ),
    ],
)
def test_requests_that_might_leave_no_token_are_refused(
    plain: LLM, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        plain.generate([3], asked(**given))
