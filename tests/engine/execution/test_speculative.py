"""Speculation changes how fast greedy tokens come, never which. fp32, tiny checkpoints and the
bundled one, real engine.

The bundled checkpoint is tried on 12 prompts; RORQUAL_LONG=1 in the environment makes it 200.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.errors import ConfigError
from tests.engine.execution.test_identity import OUTPUT, engine, prompts
from tests.engine.fake_runner import check_idle, check_pages
from tests.models.checkpoints import VOCAB, save, save_with_mtp

pytestmark = pytest.mark.exhaustive(but_first=True)

HELD_OUT = Path(__file__).resolve().parents[3] / "demo" / "heldout-sample.txt"
COUNT = 200 if os.environ.get("RORQUAL_LONG") else 12
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)


@pytest.fixture(scope="module", params=["mtp", "two-modules", "qwen"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen":
        save("qwen", path)
    else:
        save_with_mtp(path, 1 + (request.param == "two-modules"), agreement=2.0)
    return path


@pytest.fixture(scope="module")
def drafter(folder: Path) -> str:
    return "ngram" if "qwen" in folder.name else "mtp"


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Random prompts, and some that repeat themselves, which n-grams need."""
    return [*prompts(9), *(prompt[:9] * 4 for prompt in prompts(5))]


@pytest.fixture(scope="module")
def expected(folder: Path, texts: list[list[int]]) -> list[list[int]]:
    llm = engine(folder, enable_prefix_caching=False)
    return [tokens_of(llm, [text])[0] for text in texts]


def tokens_of(llm: LLM, texts: list[Any], params: Any = GREEDY) -> list[list[int]]:
    found = [out.outputs[0].token_ids for out in llm.generate(texts, params)]
    check_idle_pages(llm)
    return found


def check_idle_pages(llm: LLM) -> None:
    """Nothing runs: let the steps in flight land; every page is free or the prefix cache's."""
    while llm.engine.has_work:
        llm.engine.step()
    scheduler = llm.engine.scheduler.schedulers[0]
    assert not scheduler.sequences
    check_pages(scheduler)
    assert scheduler.prefix.available == scheduler.allocator.capacity


def draft_counts(llm: LLM) -> tuple[int, int]:
    return sum(llm.engine.stats.drafted), sum(llm.engine.stats.accepted)


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 3])
def test_tokens_are_those_without_speculation(
    folder: Path,
    drafter: str,
    texts: list[list[int]],
    expected: list[list[int]],
    num_speculative_tokens: int,
):
    plain = engine(folder)
    assert tokens_of(plain, texts) == expected
    llm = engine(
        folder,
        num_speculative_tokens=num_speculative_tokens,
        drafter=drafter,
        max_num_batched_tokens=512,
    )
    assert tokens_of(llm, texts) == expected
    drafted = llm.engine.stats.drafted
    accepted = llm.engine.stats.accepted
    assert len(drafted) == len(accepted) == num_speculative_tokens
    assert 0.1 * drafted[0] < accepted[0] < drafted[0]
    assert llm.engine.stats.steps < plain.engine.stats.steps
    assert tokens_of(llm, texts) == expected, "from the prefix cache"


SETTINGS: list[dict[str, Any]] = [
    {"enable_prefix_caching": False},
    {"chunked_prefill_size": 1},
    {"chunked_prefill_size": 7},
    {"max_num_batched_tokens": 128},
    {"steps_in_flight": 2},
    {"steps_in_flight": 3},
    {"num_pages": 22},
    {"num_pages": 22, "steps_in_flight": 2, "chunked_prefill_size": 5},
    {"num_pages": 22, "steps_in_flight": 3, "enable_prefix_caching": False},
    {"max_num_seqs": 5, "max_num_batched_tokens": 20, "steps_in_flight": 2},
    {"speculative_policy": "adaptive"},
    {"speculative_policy": "adaptive", "steps_in_flight": 3, "num_pages": 22},
    {"page_size": 1, "num_pages": 400},
]
MODULES: list[dict[str, Any]] = [
    {"draft_window": False},
    {"draft_window": False, "steps_in_flight": 2, "chunked_prefill_size": 7, "num_pages": 22},
    {"drafter": "ngram"},
    {"mla_prefill": "CD", "mla_decode": "CD"},
]
CASES = [("mtp", s) for s in SETTINGS + MODULES] + [("qwen", s) for s in SETTINGS]
CASES += [("two-modules", s) for s in (SETTINGS[2], SETTINGS[7], *MODULES[:2])]


@pytest.mark.parametrize(
    ("folder", "settings"),
    CASES,
    indirect=["folder"],
    ids=lambda s: s if isinstance(s, str) else "-".join(f"{k}={v}" for k, v in s.items()),
)
def test_no_setting_changes_a_token(
    folder: Path,
    drafter: str,
    texts: list[list[int]],
    expected: list[list[int]],
    settings: dict[str, Any],
):
    llm = engine(folder, **{"num_speculative_tokens": 3, "drafter": drafter, **settings})
    assert tokens_of(llm, texts) == expected
    assert draft_counts(llm)[1] > 0
    assert "num_pages" not in settings or llm.engine.scheduler.schedulers[0].num_preemptions > 0


def test_every_step_may_ask_for_another_next_n(
    folder: Path,
    drafter: str,
    texts: list[list[int]],
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
):
    for depth in (1, 3):
        llm = engine(folder, num_speculative_tokens=3, drafter=drafter, steps_in_flight=depth)
        generator = torch.Generator().manual_seed(depth)
        monkeypatch.setattr(
            llm.engine.controller,
            "next_count",
            lambda batch, g=generator: int(torch.randint(4, (1,), generator=g)),
        )
        assert tokens_of(llm, texts) == expected
        assert draft_counts(llm)[1] > 0


def test_requests_may_opt_out(
    folder: Path, drafter: str, texts: list[list[int]], expected: list[list[int]]
):
    llm = engine(folder, num_speculative_tokens=3, drafter=drafter, steps_in_flight=2)
    params = [
        SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, speculate=i % 2 == 0)
        for i in range(len(texts))
    ]
    watched = {}
    add = llm.engine.scheduler.add
    llm.engine.scheduler.add = lambda request, dp_rank: (
        add(request, dp_rank),
        watched.update({request.id: llm.engine.scheduler.sequences[request.id]}),
    )
    assert tokens_of(llm, texts, params) == expected
    for sequence in watched.values():
        assert (
            sum(sequence.drafted) > 0
        ) == sequence.request.params.speculate or drafter == "ngram"
        assert sequence.request.params.speculate or not sequence.drafted
    assert sum(sum(s.drafted) for s in watched.values()) == draft_counts(llm)[0] > 0
    before = draft_counts(llm)
    assert tokens_of(llm, texts[1::2], params[1::2]) == expected[1::2]
    assert draft_counts(llm) == before, "nobody wanted drafts"


def test_max_tokens_in_the_middle_of_an_accepted_run(
    folder: Path, drafter: str, texts: list[list[int]], expected: list[list[int]]
):
    llm = engine(folder, num_speculative_tokens=3, drafter=drafter, steps_in_flight=2)
    for first in range(5):
        limits = [(first + i) % 5 + 1 for i in range(len(texts))]
        outs = llm.generate(
            texts,
            [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True) for most in limits],
        )
        assert [out.outputs[0].token_ids for out in outs] == [
            tokens[:most] for tokens, most in zip(expected, limits, strict=True)
        ]
        assert {out.outputs[0].finish_reason for out in outs} == {"length"}
        check_idle_pages(llm)


def test_the_context_s_end_in_the_middle_of_an_accepted_run(
    folder: Path, drafter: str, texts: list[list[int]], expected: list[list[int]]
):
    """The row runs past the model's last position by what is in flight: nothing is written where
    it could be read."""
    texts = texts[:6]
    expected = expected[:6]
    longest = max(len(text) for text in texts)
    for extra in (2, 3):
        llm = engine(
            folder,
            num_speculative_tokens=3,
            drafter=drafter,
            max_model_len=longest + extra,
            steps_in_flight=2,
        )
        found = tokens_of(
            llm, texts, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        )
        for text, tokens, want in zip(texts, found, expected, strict=True):
            assert tokens[:OUTPUT] == want[: longest + extra - len(text)]
            assert len(text) + len(tokens) == longest + extra


# ---- the bundled checkpoint: real text, real acceptance


def real_text() -> list[str]:
    text = HELD_OUT.read_text()
    step = len(text) // COUNT
    return [text[i * step : i * step + 150 + i % 7 * 40] for i in range(COUNT)]


@pytest.fixture(scope="module")
def plain_text() -> list[list[int]]:
    return bundled_tokens(LLM(dtype="float32", max_num_seqs=16, max_model_len=512))


def bundled_tokens(llm: LLM) -> list[list[int]]:
    return tokens_of(
        llm, real_text(), SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 1},
        {"num_speculative_tokens": 2},
        {"num_speculative_tokens": 3},
        {"num_speculative_tokens": 3, "steps_in_flight": 2, "draft_window": False},
        {"num_speculative_tokens": 3, "drafter": "ngram"},
        {
            "num_speculative_tokens": 3,
            "num_pages": 60,
            "chunked_prefill_size": 16,
            "steps_in_flight": 2,
        },
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
def test_the_bundled_checkpoint_over_real_text(
    plain_text: list[list[int]], options: dict[str, Any]
):
    llm = LLM(dtype="float32", max_num_seqs=16, max_model_len=512, **options)
    assert bundled_tokens(llm) == plain_text
    drafted, accepted = draft_counts(llm)
    rates = [
        a / d for d, a in zip(llm.engine.stats.drafted, llm.engine.stats.accepted, strict=True)
    ]
    print(f"{options}: accepted by place {[round(rate, 3) for rate in rates]}")
    assert accepted > (0.3 if options.get("drafter") != "ngram" else 0.1) * drafted > 0


# ---- simulated acceptance: what is taken is drawn by lot; what that does to pages and lengths is
# real


@pytest.mark.parametrize(
    "rates", [(1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (0.85, 0.85, 0.85), (0.9, 0.0, 1.0)]
)
@pytest.mark.parametrize("depth", [1, 3])
def test_simulated_acceptance(
    tmp_path: Path, texts: list[list[int]], rates: tuple[float, ...], depth: int
):
    save_with_mtp(tmp_path)
    llm = engine(
        tmp_path,
        num_speculative_tokens=3,
        simulated_acceptance=rates,
        num_pages=30,
        steps_in_flight=depth,
    )
    params = [
        SamplingParams(temperature=i % 2, max_tokens=40 - i, ignore_eos=True)
        for i in range(len(texts))
    ]
    found = tokens_of(llm, [text[:10] for text in texts], params)
    assert [len(tokens) for tokens in found] == [p.max_tokens for p in params]
    assert all(0 <= token < VOCAB for tokens in found for token in tokens)
    drafted = llm.engine.stats.drafted
    accepted = llm.engine.stats.accepted
    reached = 1.0
    for place, rate in enumerate(rates):
        reached *= rate
        assert abs(accepted[place] / drafted[place] - reached) <= 0.12 * (0 < reached < 1), (
            drafted,
            accepted,
        )
    assert llm.engine.scheduler.schedulers[0].num_preemptions > 0
    check_idle(llm.engine.scheduler.schedulers[0])


# ---- refusals


def test_a_model_without_modules_names_the_other_drafter(tmp_path: Path):
    save("qwen", tmp_path)
    for drafter in ("auto", "mtp"):
        with pytest.raises(ConfigError, match="ngram"):
            engine(tmp_path, num_speculative_tokens=1, drafter=drafter)
    assert engine(tmp_path, num_speculative_tokens=0, drafter="mtp").engine.speculation is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_speculative_tokens": 9}, "num_speculative_tokens=9 .*0 to 8"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1 .*0 to 8"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens=True"),
        ({"num_speculative_tokens": 1.0}, "num_speculative_tokens=1.0"),
        ({"num_speculative_tokens": 2, "simulated_acceptance": (0.5,)}, "num_speculative_tokens=2"),
        ({"num_speculative_tokens": 0, "simulated_acceptance": (0.5,)}, "num_speculative_tokens=0"),
        ({"num_speculative_tokens": 1, "simulated_acceptance": (1.5,)}, r"\(1.5,\)"),
        ({"num_speculative_tokens": 1, "drafter": "eagle"}, "'eagle'.*auto, mtp, ngram"),
        ({"num_speculative_tokens": 1, "speculative_policy": "best"}, "'best'.*fixed, adaptive"),
        (
            {"num_speculative_tokens": 3, "max_num_seqs": 8, "max_num_batched_tokens": 31},
            "max_num_batched_tokens=31 .*max_num_seqs=8 times num_speculative_tokens . 1 = 4",
        ),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        LLM(dtype="float32", max_model_len=64, **options)
