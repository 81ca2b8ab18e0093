"""What a request may ask for beside tokens, under speculation: edited logits, log probabilities,
ends of all kinds, grammars."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual import LLM, SamplingParams
from rorqual.engine.execution.logits_processor import HostSampling
from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.scheduling.scheduler_output import SchedulerOutput
from rorqual.engine.scheduling.sequence import TokenOut
from rorqual.platforms.cpu import CpuPlatform
from rorqual.request import Request, StructuredOutput
from tests.engine.execution.test_identity import engine, prompts
from tests.engine.fake_runner import check_idle
from tests.models.checkpoints import save, save_with_mtp

pytestmark = pytest.mark.exhaustive(but_first=True)

TEXT = [
    "The old gentleman looked at her and said",
    "It is a truth",
    "To create a new table,",
    "She had been the mistress of his house",
]


@pytest.fixture(scope="module", params=["mtp", "ngram"])
def drafter(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(dtype="float32", max_num_seqs=16, max_model_len=256)


@pytest.fixture(scope="module")
def fast(drafter: str) -> LLM:
    return LLM(
        dtype="float32",
        max_num_seqs=16,
        max_model_len=256,
        num_speculative_tokens=3,
        drafter=drafter,
        steps_in_flight=2,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, drafter: str) -> Path:
    path = tmp_path_factory.mktemp(drafter)
    if drafter == "mtp":
        save_with_mtp(path, agreement=3.0)
    else:
        save("qwen", path)
    return path


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its next token depends on little but the last one."""
    path = tmp_path_factory.mktemp("repeating")
    save_with_mtp(path, agreement=20.0)
    return path


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, "ignore_eos": True, **changes})


EDITS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": -0.3, "presence_penalty": -0.5},
    {"logit_bias": {11: 4.0, 12: -50.0, 200: 3.0}},
    {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "logit_bias": {13: 2.0},
        "seed": 5,
        "temperature": 0.8,
    },
    {},
    {"speculate": False, "presence_penalty": 1.0},
]


@pytest.mark.exhaustive
def test_penalties_and_bias_count_along_the_drafts(plain: LLM, fast: LLM):
    texts = [TEXT[i % 4] for i in range(8)]
    params = [greedy(**edit) for edit in EDITS]
    wanted = [out.outputs[0].token_ids for out in plain.generate(texts, params)]
    assert len({tuple(tokens) for tokens in wanted}) >= 7, "the edits make a difference"
    before = sum(fast.engine.stats.accepted)
    assert [out.outputs[0].token_ids for out in fast.generate(texts, params)] == wanted
    for text, p, want in zip(texts, params, wanted, strict=True):
        assert fast.generate(text, p)[0].outputs[0].token_ids == want
    assert sum(fast.engine.stats.accepted) > before


def test_counts_survive_preemption(drafter: str, plain: LLM):
    params = [greedy(max_tokens=40, **EDITS[i % 6]) for i in range(8)]
    texts = [TEXT[i % 4] for i in range(8)]
    wanted = [out.outputs[0].token_ids for out in plain.generate(texts, params)]
    llm = LLM(
        dtype="float32",
        max_num_seqs=8,
        max_model_len=128,
        num_speculative_tokens=3,
        drafter=drafter,
        num_pages=14,
        page_size=8,
        steps_in_flight=2,
    )
    assert [out.outputs[0].token_ids for out in llm.generate(texts, params)] == wanted
    assert llm.engine.scheduler.schedulers[0].num_preemptions > 0


def test_a_token_said_twice_in_one_run_counts_twice(repeating: Path, drafter: str):
    """Where the text goes round in circles, drafts repeat one another, and each weighs on what
    follows it."""
    texts = [prompt[:3] * 5 for prompt in prompts(12) if len(prompt) > 3]
    params = [
        greedy(max_tokens=40, frequency_penalty=0.02 * (i % 5), presence_penalty=0.1 * (i % 3))
        for i in range(len(texts))
    ]
    wanted = [out.outputs[0].token_ids for out in engine(repeating).generate(texts, params)]
    llm = engine(repeating, num_speculative_tokens=8, drafter=drafter, max_num_batched_tokens=512)
    assert [out.outputs[0].token_ids for out in llm.generate(texts, params)] == wanted
    assert sum(llm.engine.stats.accepted[2:]) > 20


def test_min_tokens_holds_place_by_place(plain: LLM, fast: LLM):
    """The token that greedy decoding likes best is a stop id: forbidden for so many tokens,
    whichever step they come in."""
    free = plain.generate(TEXT[0], greedy())[0].outputs[0].token_ids
    for least in (1, 2, 3, 5, 6, 7):
        params = greedy(stop_token_ids=sorted(set(free)), min_tokens=least)
        want = plain.generate(TEXT[0], params)[0].outputs[0]
        found = fast.generate(TEXT[0], params)[0].outputs[0]
        assert found.token_ids == want.token_ids
        assert not set(found.token_ids[:least]) & set(free)
        assert found.finish_reason == want.finish_reason


def test_log_probabilities_and_ranks(plain: LLM, fast: LLM):
    params = [
        greedy(logprobs=5),
        greedy(),
        greedy(logprobs=0, presence_penalty=1.0),
        greedy(logprobs=2, temperature=0.9, seed=4),
    ]
    for wanted, found in zip(
        plain.generate(TEXT, params), fast.generate(TEXT, params), strict=True
    ):
        one = wanted.outputs[0]
        other = found.outputs[0]
        assert one.token_ids == other.token_ids
        assert (one.logprobs is None) == (other.logprobs is None)
        for ours, theirs in zip(other.logprobs or [], one.logprobs or [], strict=True):
            assert [(t, e.rank) for t, e in ours.items()] == [
                (t, e.rank) for t, e in theirs.items()
            ]
            assert [e.logprob for e in ours.values()] == pytest.approx(
                [e.logprob for e in theirs.values()], abs=2e-4
            )
    assert other.cumulative_logprob == pytest.approx(one.cumulative_logprob, abs=1e-2)


# ---- ends


def test_stop_ids_anywhere_in_an_accepted_run(plain: LLM, fast: LLM):
    free = plain.generate(TEXT[0], greedy())[0].outputs[0].token_ids
    for stop in free[:8]:
        for params in (
            greedy(stop_token_ids=[stop]),
            greedy(stop_token_ids=[stop], max_tokens=free.index(stop) + 1),
        ):
            found = fast.generate(TEXT[0], params)[0].outputs[0]
            assert found.token_ids == free[: free.index(stop) + 1]
            assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    check_done(fast)


def test_stop_strings_anywhere_in_an_accepted_run(plain: LLM, fast: LLM):
    whole = plain.generate(TEXT[3], greedy())[0].outputs[0].text
    for start in range(1, len(whole) - 4, 9):
        stop = whole[start : start + 3]
        want = plain.generate(TEXT[3], greedy(stop=stop))[0].outputs[0]
        found = fast.generate([TEXT[3], TEXT[1]], [greedy(stop=stop), greedy()])[0].outputs[0]
        assert (found.text, found.token_ids) == (want.text, want.token_ids)
        assert (found.finish_reason, found.stop_reason) == ("stop", stop)
        assert found.text == whole[: whole.index(stop)]
    check_done(fast)


def test_a_request_cancelled_while_steps_are_in_flight(plain: LLM, fast: LLM):
    """After every possible number of tokens; the others do not notice, and the name and the
    pages are free at once."""
    wanted = [out.outputs[0].token_ids for out in plain.generate(TEXT, greedy())]
    ids = [fast.get_tokenizer().encode(text) for text in TEXT]
    scheduler = fast.engine.scheduler
    for after in range(0, 20, 5):
        for name, prompt in zip("abcd", ids, strict=True):
            fast.engine.add(Request(name, tuple(prompt), greedy()))
        said: dict[str, list[int]] = {name: [] for name in "abcd"}
        while fast.engine.has_work:
            for out in fast.engine.step():
                said[out.sequence.request.id].append(out.token)
            if len(said["b"]) >= after and "b" in scheduler.sequences:
                fast.engine.abort("b")
                assert "b" not in scheduler.sequences
        assert [said[name] for name in "acd"] == [wanted[0], wanted[2], wanted[3]]
        assert said["b"] == wanted[1][: len(said["b"])]
        assert len(said["b"]) < 24
    check_done(fast)


def check_done(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()
    check_idle(llm.engine.scheduler.schedulers[0])


# ---- grammars


@dataclass
class Automaton:
    """A matcher: `moves[state]` maps allowed tokens to the next state; the last state of a
    finished text allows `end` alone."""

    moves: list[dict[int, int]]
    path: list[int] = field(default_factory=lambda: [0])
    end: int = 1
    ended: bool = False

    def fill(self, mask: Tensor, row: int) -> None:
        assert not self.ended, "nothing may follow, so nobody should ask"
        words = [0] * mask.shape[1]
        for token in self.moves[self.path[-1]] or {self.end: -1}:
            words[token // 32] |= 1 << token % 32
        mask[row] = torch.tensor(
            [word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32
        )

    def accept(self, token: int) -> bool:
        moves = self.moves[self.path[-1]]
        if self.ended or (token not in moves if moves else token != self.end):
            return False
        self.ended = not moves
        self.path.append(moves.get(token, self.path[-1]))
        return True

    def rollback(self, count: int) -> None:
        if count:
            del self.path[-count:]
            self.ended = False

    @property
    def done(self) -> bool:
        return self.ended


class Automata:
    """`kinds` by name: what StructuredOutput.value asks for."""

    def __init__(self, kinds: dict[str, list[dict[int, int]]]):
        self.kinds = kinds
        self.made = 0

    def matcher(self, structure: StructuredOutput) -> Automaton:
        self.made += 1
        return Automaton(self.kinds[structure.value])


def cycle(sets: list[set[int]]) -> list[dict[int, int]]:
    return [{token: (i + 1) % len(sets) for token in tokens} for i, tokens in enumerate(sets)]


# `cycle`: four sets in turn; `branch`: the first token decides which half of the vocabulary the
# rest comes from; `ends`: five tokens, then the end of the sequence.
GRAMMARS = {
    "cycle": cycle([set(range(40)), set(range(40, 80)), set(range(80, 128)), {3, 64, 65, 127}]),
    "branch": [
        dict.fromkeys(range(64), 1) | dict.fromkeys(range(64, 128), 2),
        dict.fromkeys(range(64), 1),
        dict.fromkeys(range(64, 128), 2),
    ],
    "ends": [dict.fromkeys(range(2, 128, i + 1), i + 1) for i in range(5)] + [{}],
}


def obeys(tokens: list[int], kind: str) -> bool:
    matcher = Automaton(GRAMMARS[kind])
    return all(matcher.accept(token) for token in tokens)


def structured(count: int, **changes: Any) -> list[SamplingParams]:
    """Every fourth request is free, and each kind of grammar comes up."""
    kinds = [*GRAMMARS, None]
    return [
        SamplingParams(
            **{
                "temperature": 0,
                "max_tokens": 20,
                "stop_token_ids": [1],
                "ignore_eos": True,
                **changes,
            }
        )
        if kinds[i % 4] is None
        else SamplingParams(
            **{
                "temperature": 0,
                "max_tokens": 20,
                "stop_token_ids": [1],
                "structured": StructuredOutput("grammar", str(kinds[i % 4])),
                **changes,
            }
        )
        for i in range(count)
    ]


def test_grammars_hold_place_by_place(tiny: Path, drafter: str):
    texts = [*prompts(8), *(prompt[:6] * 4 for prompt in prompts(8))]
    params = structured(16)
    plain = engine(tiny)
    plain.engine.grammars = Automata(GRAMMARS)
    wanted = [out.outputs[0].token_ids for out in plain.generate(texts, params)]
    for options in (
        {"num_speculative_tokens": 1},
        {"num_speculative_tokens": 3},
        {"num_speculative_tokens": 3, "steps_in_flight": 2},
        {"num_speculative_tokens": 2, "steps_in_flight": 3, "num_pages": 22},
    ):
        llm = engine(tiny, drafter=drafter, **options)
        llm.engine.grammars = Automata(GRAMMARS)
        outs = llm.generate(texts, params)
        assert [out.outputs[0].token_ids for out in outs] == wanted
        for out, p in zip(outs, params, strict=True):
            assert p.structured is None or obeys(out.outputs[0].token_ids, p.structured.value)
            assert (
                p.structured is None
                or p.structured.value != "ends"
                or out.outputs[0].token_ids[-1] == 1
            )
        assert sum(llm.engine.stats.accepted) > 0
        assert "num_pages" not in options or llm.engine.scheduler.schedulers[0].num_preemptions > 0
        check_done(llm)


@pytest.mark.parametrize("seed", [None, 7])
def test_sampled_tokens_obey_the_grammar(tiny: Path, drafter: str, seed: int | None):
    texts = prompts(16)
    params = structured(16, temperature=1.0, seed=seed, logprobs=1)
    llm = engine(tiny, drafter=drafter, num_speculative_tokens=3, steps_in_flight=2)
    llm.engine.grammars = Automata(GRAMMARS)
    outs = llm.generate(texts, params)
    for out, p in zip(outs, params, strict=True):
        assert p.structured is None or obeys(out.outputs[0].token_ids, p.structured.value)
        assert len(out.outputs[0].logprobs) == len(out.outputs[0].token_ids)
    if seed is not None:
        plain = engine(tiny)
        plain.engine.grammars = Automata(GRAMMARS)
        assert [o.outputs[0].token_ids for o in plain.generate(texts, params)] == [
            o.outputs[0].token_ids for o in outs
        ]


def test_tokens_of_a_step_come_out_one_by_one(fast: LLM, plain: LLM):
    """`step` lists every token of a run, in order, the last of a request marked."""
    ids = tuple(fast.get_tokenizer().encode(TEXT[0]))
    fast.engine.add(Request("x", ids, greedy()))
    outs: list[TokenOut] = []
    most = 0
    while fast.engine.has_work:
        new = fast.engine.step()
        outs += new
        most = max(most, len(new))
    assert [out.token for out in outs] == plain.generate(TEXT[0], greedy())[0].outputs[0].token_ids
    assert [out.finish is not None for out in outs] == [False] * 23 + [True]
    assert most > 1
    sequence = outs[0].sequence
    assert sum(sequence.accepted) > 0
    assert all(a <= d for a, d in zip(sequence.accepted, sequence.drafted, strict=True))


@dataclass
class Watched(Automaton):
    """It keeps what it was asked to accept and did not allow."""

    refused: list[int] = field(default_factory=list)

    def accept(self, token: int) -> bool:
        moved = super().accept(token)
        if not moved:
            self.refused.append(token)
        return moved


def test_a_grammar_is_asked_to_accept_what_it_allows_alone(tiny: Path, drafter: str):
    """xgrammar prints a line for a special token, and drafts may be any tokens of a prompt."""
    matchers: list[Watched] = []

    class Kept(Automata):
        def matcher(self, structure: StructuredOutput) -> Watched:
            matchers.append(Watched(self.kinds[structure.value]))
            return matchers[-1]

    llm = engine(tiny, drafter=drafter, num_speculative_tokens=3)
    llm.engine.grammars = Kept(GRAMMARS)
    texts = [*prompts(4), *(prompt[:6] * 4 for prompt in prompts(4))]
    params = [
        SamplingParams(
            temperature=0, max_tokens=20, structured=StructuredOutput("grammar", "cycle")
        )
        for _ in texts
    ]
    llm.generate(texts, params)
    assert len(matchers) >= len(texts)
    assert not any(matcher.refused for matcher in matchers)


def masks(drafts: list[int], count: int, most: int) -> list[set[int]]:
    """What `cycle` allows in each row of a request with `count` drafts, in a step that verifies
    `most`."""
    rows = RequestState(1, 1, 128, CpuPlatform(torch.device("cpu")), len(drafts))
    rows.drafts[0] = torch.tensor(drafts)
    rows.num_drafts[0] = count
    rows.matchers[0] = matcher = Automaton(GRAMMARS["cycle"])
    step = SchedulerOutput(decode_slots=[0], decode_bounds=[8], num_speculative_tokens=most)
    mask = HostSampling(step, rows)._bitmask()
    assert matcher.path == [0], "drafts are taken back"
    return [
        {32 * i + bit for i, word in enumerate(row) for bit in range(32) if word >> bit & 1}
        for row in mask.tolist()
    ]


def test_places_without_a_draft_are_not_looked_at():
    sets = [set(range(40)), set(range(40, 80)), set(range(80, 128))]
    everything = set(range(128))
    drafts = [5, 50, 90]
    assert masks(drafts, 3, 3) == [*sets, {3, 64, 65, 127}]
    assert masks(drafts, 3, 2) == sets
    assert masks(drafts, 1, 3) == [*sets[:2], everything, everything]
    assert masks(drafts, 0, 3) == [sets[0], everything, everything, everything]
    assert masks([5, 31, 90], 3, 3) == [*sets[:2], everything, everything], "31 is not allowed"
    assert masks([5, 63, 127], 3, 3) == [*sets, {3, 64, 65, 127}], "the last bits of words"


def test_special_tokens_of_a_prompt_as_drafts_print_nothing(capfd: pytest.CaptureFixture[str]):
    pytest.importorskip("xgrammar")
    llm = LLM(num_speculative_tokens=3, drafter="ngram", max_num_seqs=2, max_model_len=128)
    words = llm.get_tokenizer().encode(" one two", add_special_tokens=False)
    special = min(llm.get_tokenizer().special_ids)
    capfd.readouterr()
    # the first token of the answer completes the two before a special one
    prompt = [*words, special, *words, special, words[0]]
    structure = StructuredOutput("regex", " two( one two){4}")
    params = SamplingParams(
        temperature=0, max_tokens=12, structured=structure, allowed_token_ids=[*words, 1]
    )
    (out,) = llm.generate([prompt], params)
    assert out.outputs[0].text == " two one two one two one two one two"
    assert sum(llm.engine.stats.drafted) > 0
    assert capfd.readouterr().err == ""
