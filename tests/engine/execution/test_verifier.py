"""The verifier against brute force on synthetic distributions, and the ngram drafter against a
search in plain Python."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rorqual.engine.execution.drafters import Drafting, NgramDrafter
from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.execution.sampling import DRAFT, TOKEN
from rorqual.engine.execution.verifier import Verification, Verifier
from rorqual.engine.scheduling.scheduler_output import (
    NewRequest,
    SamplingVariant,
    SchedulerOutput,
    StepMetadata,
)
from rorqual.ops.interface import Ops
from rorqual.ops.reference import inverse_cdf
from rorqual.ops.rng import uniform
from rorqual.ops.select import ops_for
from rorqual.platforms.cpu import CpuPlatform
from rorqual.request import SamplingParams

pytestmark = pytest.mark.exhaustive(but_first=True)

DRAWS = 100_000
VOCAB = 4
# The chi-squared statistic that a true hypothesis exceeds once in 10,000 times, by degrees of
# freedom.
CHI_SQUARED = {1: 15.14, 2: 18.42, 3: 21.11, 8: 31.83, 11: 37.37, 15: 44.26}


@pytest.fixture(scope="module", params=["cpu", "definition"], autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """The CPU's kernels, and the definitions that a platform without its own ops takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "rorqual.engine.execution.request_state.ops_for", lambda name: ops_for(request.param)
        )
        yield


@dataclass
class Trial:
    """Many requests over one p [places + 1, vocabulary] and one q [places, vocabulary]: what
    they had drafted and what they got."""

    rows: RequestState
    drafts: Tensor
    verdict: Verification


def make_rows(count: int, most: int, vocab: int = VOCAB) -> RequestState:
    return RequestState(count, 1, vocab, CpuPlatform(torch.device("cpu")), most)


def trial(
    p: Tensor,
    q: Tensor | None,
    drafts: Tensor | None = None,
    count: int = DRAWS,
    have: Tensor | None = None,
) -> Trial:
    """Unseeded rows at temperature 1; drafts are drawn from q as a drafter draws them, or given
    and certain."""
    n = p.shape[0] - 1
    rows = make_rows(count, n)
    slots = torch.arange(count)
    rows.settings[:, 0] = rows.settings[:, 1] = 1.0
    rows.seed[:count] = torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(7))
    positions = 5 + torch.arange(n + 1).expand(count, -1)
    if drafts is None:
        assert q is not None
        numbers = uniform(rows.seed[:count, None], positions[:, :n], DRAFT)
        drafts = torch.stack(
            [inverse_cdf(q[j].expand(count, -1), numbers[:, j]) for j in range(n)], 1
        )
        rows.keep_probs()[:count] = q.float()
    rows.drafts[:count] = drafts
    rows.num_drafts[:count] = n if have is None else have
    logits = p.log().float().repeat(count, 1)
    verdict = Verifier(rows, n).verify(logits, SamplingVariant.PLAIN, slots, positions.flatten(), n)
    return Trial(rows, rows.drafts[:count], verdict)


def random_probs(rows: int, seed: int, zeros: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(rows, VOCAB, generator=generator, dtype=torch.float64) ** 2 + 0.02
    for row in range(rows):
        probs[row, torch.randperm(VOCAB, generator=generator)[:zeros]] = 0
    return probs / probs.sum(1, keepdim=True)


def assert_follows(tokens: Tensor, wanted: Tensor) -> None:
    """Chi-squared over the outcomes of probability above 0; the others never come up."""
    counts = torch.bincount(tokens, minlength=wanted.numel()).double()
    possible = wanted > 0
    assert counts[~possible].sum() == 0
    shares = wanted[possible] * tokens.numel()
    statistic = float(((counts[possible] - shares) ** 2 / shares).sum())
    assert possible.sum() == 1 or statistic < CHI_SQUARED[int(possible.sum()) - 1], (
        statistic,
        counts,
        shares,
    )


def check(found: Trial, p: Tensor, q: Tensor) -> None:
    """Token by token: the first follows p[0]; the next, where there is one, p[1] whatever the
    first was; and so on."""
    tokens = found.verdict.tokens
    counts = found.verdict.num_accepted + 1
    n = p.shape[0] - 1
    for place in range(n + 1):
        there = counts > place
        assert torch.equal(tokens[:, place] >= 0, there), "-1 after the last token and nowhere else"
        if bool(there.any()):
            assert_follows(tokens[there, place], p[place])
    for place in range(min(n, int(counts.max()))):
        accepted = counts > place + 1
        assert torch.equal(tokens[accepted, place], found.drafts[accepted, place])
        reached = counts > place
        odds = float(torch.minimum(p[place], q[place]).sum())
        rate = float(accepted.sum() / reached.sum())
        assert abs(rate - odds) < 5 * (0.25 / float(reached.sum())) ** 0.5 + 1e-9, (
            "acceptance is the overlap of p and q"
        )


@pytest.mark.parametrize("zeros_p", [0, 2])
@pytest.mark.parametrize("zeros_q", [0, 1, 2])
@pytest.mark.parametrize("n", [1, 2])
def test_the_distribution_is_p_whatever_q(n: int, zeros_q: int, zeros_p: int) -> None:
    p = random_probs(n + 1, 10 * n + zeros_p, zeros_p)
    q = random_probs(n, 50 + zeros_q, zeros_q)
    check(trial(p, q), p, q)


def test_pairs_of_tokens_are_independent_where_p_says_so() -> None:
    """What is accepted at one place says nothing about the next: of runs that reach the second
    token, all pairs come up as p x p."""
    p = random_probs(3, 3)
    q = random_probs(2, 4)
    found = trial(p, q).verdict
    both = found.num_accepted > 0
    pairs = found.tokens[both, 0] * VOCAB + found.tokens[both, 1]
    overlap = torch.minimum(p[0], q[0])
    assert_follows(pairs, (overlap / overlap.sum())[:, None].mul(p[1]).flatten())


def test_p_equal_to_q_accepts_everything() -> None:
    p = random_probs(3, 5)
    found = trial(p, p[:2])
    # q is kept in single precision: a refusal by rounding happens once in some ten million times.
    assert int((found.verdict.num_accepted < 2).sum()) <= 1
    assert_follows(found.verdict.tokens[:, 2][found.verdict.num_accepted == 2], p[2])


def test_where_q_has_nothing_in_common_with_p_every_draft_is_refused() -> None:
    p = torch.tensor([[0.3, 0.7, 0, 0], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    q = torch.tensor([[0, 0, 0.5, 0.5]], dtype=torch.float64)
    found = trial(p, q).verdict
    assert torch.equal(found.num_accepted, torch.zeros(DRAWS, dtype=torch.int64))
    assert_follows(found.tokens[:, 0], p[0])


@pytest.mark.parametrize("draft", range(VOCAB))
def test_a_certain_draft_is_taken_with_its_probability(draft: int) -> None:
    p = random_probs(2, 6)
    certain = torch.zeros(1, VOCAB, dtype=torch.float64)
    certain[0, draft] = 1
    check(trial(p, None, torch.full((DRAWS, 1), draft)), p, certain)


def test_a_certain_draft_of_probability_zero_or_one() -> None:
    p = torch.tensor([[0, 1.0, 0, 0], [0, 1.0, 0, 0]], dtype=torch.float64)
    assert (
        trial(p, None, torch.full((100, 1), 1), count=100).verdict.tokens.tolist() == [[1, 1]] * 100
    )
    assert (
        trial(p, None, torch.full((100, 1), 2), count=100).verdict.tokens.tolist()
        == [[1, -1]] * 100
    )


@pytest.mark.parametrize("certain", [False, True])
def test_missing_drafts_count_as_refused_and_change_no_probability(certain: bool) -> None:
    """Rows with 0, 1 or 2 of 2 drafts; what stands where none was made is left over from another
    text, and so is its q."""
    p = random_probs(3, 8)
    q = random_probs(2, 9)
    have = torch.arange(DRAWS) % 3
    found = (
        trial(p, None, torch.randint(VOCAB, (DRAWS, 2)), have=have)
        if certain
        else trial(p, q, have=have)
    )
    assert torch.equal(found.verdict.drafted, have)
    assert bool((found.verdict.num_accepted <= have).all())
    for drafted in range(3):
        some = have == drafted
        for place in range(drafted + 1):
            there = some & (found.verdict.num_accepted >= place)
            assert_follows(found.verdict.tokens[there, place], p[place])


def test_less_than_what_was_drafted_may_be_verified() -> None:
    p = random_probs(3, 12)
    q = random_probs(2, 13)
    rows = trial(p, q).rows
    slots = torch.arange(DRAWS)
    for width in (2, 1):
        positions = 5 + torch.arange(width).expand(DRAWS, -1)
        logits = p[:width].log().float().repeat(DRAWS, 1)
        found = Verifier(rows, 2).verify(
            logits, SamplingVariant.PLAIN, slots, positions.flatten(), width - 1
        )
        assert torch.equal(found.drafted, torch.full((DRAWS,), width - 1))
        assert_follows(found.tokens[:, 0], p[0])
        if width == 2:
            assert_follows(found.tokens[found.num_accepted == 1, 1], p[1])


# ---- rows of all kinds side by side


KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 5},
    {},
    {"top_k": 2},
    {"top_p": 0.6, "seed": -3},
    {"temperature": 1.7},
]


def mixed(kinds: list[dict[str, Any]], first: int = 0) -> tuple[RequestState, Tensor, Tensor]:
    """One row a kind at its slot's own position; logits [R * 3, vocabulary]."""
    rows = make_rows(len(KINDS), 2, 16)
    output = SchedulerOutput(
        new_requests=[
            NewRequest(s, SamplingParams(**k), k.get("seed", 900 + s), (), 1, (), frozenset())
            for s, k in enumerate(KINDS)
        ]
    )
    rows.apply(output)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(KINDS), 3, 16, generator=generator)
    q = (logits[:, :2] + 0.7 * torch.randn(len(KINDS), 2, 16, generator=generator)).softmax(-1)
    rows.keep_probs()[: len(KINDS)] = q
    for slot in range(len(KINDS)):
        for place in range(2):
            stream = TOKEN if bool(rows.coupled[slot]) else DRAFT
            number = uniform(rows.seed[slot : slot + 1], torch.tensor([20 + slot + place]), stream)
            drawn = inverse_cdf(q[slot, place : place + 1].double(), number)
            rows.drafts[slot, place] = (
                q[slot, place].argmax() if KINDS[slot].get("temperature") == 0 else drawn
            )
    rows.num_drafts[:] = 2
    return rows, logits, 20 + torch.arange(len(KINDS))[:, None] + torch.arange(3)


def test_a_row_s_verdict_does_not_depend_on_its_company() -> None:
    rows, logits, positions = mixed(KINDS)
    verifier = Verifier(rows, 2)
    together = verifier.verify(
        logits.flatten(0, 1),
        SamplingVariant.FILTERED,
        torch.arange(len(KINDS)),
        positions.flatten(),
        2,
    )
    for slot in range(len(KINDS)):
        alone = verifier.verify(
            logits[slot], SamplingVariant.FILTERED, torch.tensor([slot]), positions[slot], 2
        )
        assert alone.tokens[0].tolist() == together.tokens[slot].tolist()
    back = torch.arange(len(KINDS)).flip(0)
    reverse = verifier.verify(
        logits.flip(0).flatten(0, 1), SamplingVariant.FILTERED, back, positions.flip(0).flatten(), 2
    )
    assert torch.equal(reverse.tokens, together.tokens.flip(0))
    greedy = verifier.verify(logits[0], SamplingVariant.GREEDY, torch.tensor([0]), positions[0], 2)
    assert greedy.tokens[0].tolist() == together.tokens[0].tolist()


@pytest.mark.parametrize("slot", [0, 1, 4])
def test_coupled_rows_draw_what_they_would_have_drawn(slot: int) -> None:
    """Greedy and seeded rows: every token is the model's own draw at its place, and a draft
    stands as long as it is that token."""
    rows, logits, positions = mixed(KINDS)
    verifier = Verifier(rows, 2)
    row = torch.tensor([slot])
    one = [
        verifier.verify(
            logits[slot, j : j + 1], SamplingVariant.FILTERED, row, positions[slot, j : j + 1], 0
        ).tokens[0, 0]
        for j in range(3)
    ]
    seen = set()
    for right in range(3):
        rows.drafts[slot] = torch.stack(one[:2])
        if right < 2:
            rows.drafts[slot, right] = (rows.drafts[slot, right] + 1) % 16
        found = verifier.verify(logits[slot], SamplingVariant.FILTERED, row, positions[slot], 2)
        assert found.tokens[0].tolist() == [int(token) for token in one[: right + 1]] + [-1] * (
            2 - right
        )
        seen.add(int(found.num_accepted[0]))
    assert seen == {0, 1, 2}


class Blank(Ops):
    """What kernels that are only compiled leave behind: zeros. Indices among them must be ones
    that may be used."""

    def argmax(self, logits: Tensor) -> Tensor:
        return torch.zeros_like(super().argmax(logits))

    def sample_from(self, given: Any, numbers: Tensor) -> Tensor:
        return torch.zeros_like(super().sample_from(given, numbers))

    def sample_residual(self, *arguments: Any) -> Tensor:
        return torch.zeros_like(super().sample_residual(*arguments))

    def verify_drafts(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        stand, right, drafted = map(torch.zeros_like, super().verify_drafts(*arguments))
        return stand, right, drafted


@pytest.mark.parametrize("variant", list(SamplingVariant)[:3])
def test_a_rehearsal_without_kernels_stays_in_range(variant: SamplingVariant) -> None:
    rows, logits, positions = mixed(KINDS)
    rows.ops = Blank()
    found = Verifier(rows, 2).verify(
        logits.flatten(0, 1), variant, torch.arange(len(KINDS)), positions.flatten(), 2
    )
    moved = rows.ops.commit_tokens(
        rows.last_token,
        rows.length,
        torch.arange(len(KINDS)),
        positions[:, 0],
        found.tokens,
        found.num_accepted,
    )
    assert found.num_accepted.tolist() == [0] * len(KINDS)
    assert all(
        int(x.min()) >= 0 and int(x.max()) < logits.shape[0] * logits.shape[1] for x in moved
    )


@pytest.mark.parametrize("variant", list(SamplingVariant)[:3])
def test_nothing_drafted_is_plain_sampling(variant: SamplingVariant) -> None:
    rows, logits, positions = mixed(KINDS)
    found = Verifier(rows, 2).verify(
        logits[:, 0], variant, torch.arange(len(KINDS)), positions[:, 0], 0
    )
    assert found.tokens.shape == (len(KINDS), 1)
    assert found.num_accepted.tolist() == [0] * len(KINDS)
    assert found.drafted.tolist() == [0] * len(KINDS)


# ---- ngram drafts


def looked_up(
    text: list[int], num_speculative_tokens: int, shortest: int = 2, longest: int = 4
) -> list[int]:
    """Of all earlier ends at which the most of the last `longest` tokens agree, the latest; what
    followed there."""
    best = (0, -1)
    for end in range(len(text) - 1):
        agree = 0
        while agree < longest and agree <= end and text[end - agree] == text[-1 - agree]:
            agree += 1
        best = max(best, (agree, end))
    return text[best[1] + 1 :][:num_speculative_tokens] if best[0] >= shortest else []


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=5),
    num_speculative_tokens=st.integers(0, 4),
)
def test_look_up_finds_what_a_search_finds(
    texts: list[list[int]], num_speculative_tokens: int
) -> None:
    rows = make_rows(len(texts), 4)
    rng = random.Random(0)
    rows.keep_history(40)
    rows.limit[: len(texts)] = 4
    rows.num_drafts[:] = 3  # left over
    for slot, text in enumerate(texts):
        # what an earlier request left
        rows.history[slot] = torch.tensor(text + [rng.randrange(3) for _ in range(40 - len(text))])
        rows.length[slot] = len(text) - 1
    slots = torch.arange(len(texts)).flip(0)
    bounds = tuple(len(texts[slot]) + 5 for slot in slots.tolist())
    none = torch.zeros(0)
    common = StepMetadata.padded(len(texts), 1, SamplingVariant.GREEDY, num_speculative_tokens)
    work: Any = (slots, none, bounds, None, none, none, common)
    NgramDrafter(rows).draft(Drafting(*work))
    for slot, text in enumerate(texts):
        wanted = looked_up(text, num_speculative_tokens)
        assert rows.drafts[slot, : int(rows.num_drafts[slot])].tolist() == wanted


def test_look_up_leaves_out_who_opted_out() -> None:
    rows = make_rows(2, 3)
    rows.keep_history(12)
    rows.history[:2] = torch.tensor([1, 2, 3, 1, 2, 0, 0, 0, 0, 0, 0, 0])
    rows.length[:2] = 4
    rows.limit[1] = 3
    none = torch.zeros(0)
    slots = torch.tensor([0, 1])
    common = StepMetadata.padded(2, 1, SamplingVariant.GREEDY, 3)
    work: Any = (slots, none, (8, 8), None, none, none, common)
    NgramDrafter(rows).draft(Drafting(*work))
    assert rows.num_drafts[:2].tolist() == [0, 3]
    assert rows.drafts[1].tolist() == [3, 1, 2]
