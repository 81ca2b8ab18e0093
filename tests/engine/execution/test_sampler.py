"""The sampler against brute force and statistics: cuts, penalties, draws that depend on (seed,
position) alone, log probabilities."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rorqual.engine.execution.logits_processor import (
    LogitRow,
    Logprobs,
    apply_bitmask,
    apply_logits_processors,
)
from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.execution.sampling import sample
from rorqual.engine.scheduling.scheduler_output import (
    NewRequest,
    SamplingVariant,
    SchedulerOutput,
    sampling_variant_of,
)
from rorqual.ops.reference import apply_filters
from rorqual.ops.rng import uniform
from rorqual.platforms.cpu import CpuPlatform
from rorqual.request import SamplingParams, StructuredOutput

VOCAB = 50
# The chi-squared statistic that a true hypothesis exceeds once in 10,000 times, by degrees of
# freedom.
CHI_SQUARED = {11: 37.37, 15: 44.26}


def rows_of(
    *params: SamplingParams,
    prompt: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
    stop_ids: tuple[int, ...] = (),
    vocab: int = VOCAB,
) -> RequestState:
    """Device rows, one a setting, each over the same prompt and outputs so far. Unseeded ones
    get their slot as seed."""
    rows = RequestState(len(params), 1, vocab, CpuPlatform(torch.device("cpu")))
    rows.apply(
        SchedulerOutput(
            new_requests=[
                new_row(slot, p, prompt, outputs, stop_ids) for slot, p in enumerate(params)
            ]
        )
    )
    return rows


def new_row(
    slot: int,
    params: SamplingParams,
    prompt: tuple[int, ...],
    outputs: tuple[int, ...] = (),
    stop_ids: tuple[int, ...] = (),
) -> NewRequest:
    tokens = (*prompt, *outputs) if params.edits_logits else ()
    seed = slot if params.seed is None else params.seed
    return NewRequest(slot, params, seed, (), len(prompt), tokens, frozenset(stop_ids))


def draw(logits: Tensor, rows: RequestState, slots: list[int], positions: list[int]) -> Tensor:
    """As the runner samples a step that asks for edits."""
    params = rows.sampling_params(slots)
    where = torch.tensor(positions)
    if any(p.edits_logits for p in params):
        logits = apply_logits_processors(logits, [LogitRow(slot) for slot in slots], where, rows)
    tokens = sample(logits, sampling_variant_of(params), torch.tensor(slots), where, rows)
    rows.count(torch.tensor(slots), tokens)
    return tokens


def ids(drawn: Tensor) -> list[int]:
    return drawn.tolist()


def noise(rows: int, seed: int = 0, vocab: int = VOCAB, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# ---- greedy


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_takes_the_largest_logit_whatever_the_rest_says(temperature: float) -> None:
    logits = noise(4)
    params = SamplingParams(temperature=temperature, top_p=0.3, top_k=5, seed=7)
    assert (
        ids(draw(logits, rows_of(*[params] * 4), [0, 1, 2, 3], [5, 6, 7, 8]))
        == logits.argmax(-1).tolist()
    )


def test_greedy_rows_stay_greedy_beside_sampled_ones() -> None:
    logits = noise(6, scale=0.1)
    params = [
        SamplingParams(temperature=0.0) if i % 2 else SamplingParams(temperature=5.0, top_k=40)
        for i in range(6)
    ]
    found = ids(draw(logits, rows_of(*params), list(range(6)), [3] * 6))
    assert found[1::2] == logits.argmax(-1).tolist()[1::2]
    assert found[0::2] != logits.argmax(-1).tolist()[0::2]


# ---- cuts


def allowed(probs: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """By definition: the k likeliest, of these the fewest that reach top_p, of these those
    within min_p of the best; ties stay."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    if top_k:
        order = [i for i in order if probs[i] >= probs[order[min(top_k, len(order)) - 1]]]
    if top_p < 1:
        goal = top_p * math.fsum(probs[i] for i in order)
        mass = 0.0
        kept = []
        for i in order:
            if mass >= goal:
                break
            kept.append(i)
            mass += probs[i]
        order = [i for i in order if probs[i] >= probs[kept[-1]]]
    return {i for i in order if probs[i] >= min_p * max(probs)}


@settings(max_examples=300, deadline=None)
@given(
    weights=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.0137, 0.2013, 0.3719, 0.5012, 0.7307, 0.9511, 1.0]),
    min_p=st.sampled_from([0.0, 0.0511, 0.2311, 0.7711, 1.0]),
)
def test_cuts_keep_what_the_definition_keeps(
    weights: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    """Integer weights make ties common; the goals are such that no sum of them lands on one
    exactly."""
    probs = torch.tensor([weights], dtype=torch.float64) / sum(weights)
    column = (torch.tensor([value], dtype=torch.float64) for value in (top_k, top_p, min_p))
    kept = apply_filters(probs, *column)[0]
    wanted = allowed(probs[0].tolist(), top_k, top_p, min_p)
    assert {i for i, value in enumerate(kept.tolist()) if value} == wanted
    assert torch.equal(kept[sorted(wanted)], probs[0, sorted(wanted)]), (
        "what is kept keeps its probability"
    )


def test_a_set_that_reaches_top_p_exactly_is_enough() -> None:
    probs = torch.tensor([[0.125, 0.5, 0.25, 0.125]], dtype=torch.float64)
    off = torch.zeros(1, dtype=torch.float64)
    half = torch.tensor([0.5], dtype=torch.float64)
    assert apply_filters(probs, off, half, off).tolist() == [[0, 0.5, 0, 0]]
    assert apply_filters(probs, off, half + 1e-9, off).tolist() == [[0, 0.5, 0.25, 0]]


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_no_random_number_draws_a_token_that_is_cut(
    monkeypatch: pytest.MonkeyPatch, number: float
) -> None:
    """Neither the least nor the largest one, with tokens of probability zero at both ends of the
    vocabulary."""
    rows = rows_of(SamplingParams(top_k=20))
    monkeypatch.setattr(
        rows.ops,
        "uniform",
        lambda seed, position, stream: torch.full(seed.shape, number, dtype=torch.float64),
    )
    logits = noise(300, seed=5)
    logits[:, :10] = logits[:, -10:] = -50.0
    found = ids(draw(logits, rows, [0] * 300, [0] * 300))
    best = logits.topk(20).indices.tolist()
    wanted = [min(tokens) if number == 0 else max(tokens) for tokens in best]
    assert found == wanted


def test_each_row_has_its_own_cut() -> None:
    settings_ = [
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"top_k": 9, "top_p": 0.5, "min_p": 0.1},
        {},
        {"top_k": -1, "top_p": 1.0},
    ]
    logits = noise(len(settings_), seed=2)
    rows = rows_of(*(SamplingParams(temperature=0.9, **s) for s in settings_))
    probs = (logits.double() / 0.9).softmax(-1).tolist()
    seen: list[set[int]] = [set() for _ in settings_]
    for position in range(400):
        for i, token in enumerate(
            ids(draw(logits, rows, list(range(len(settings_))), [position] * len(settings_)))
        ):
            seen[i].add(token)
    for i, s in enumerate(settings_):
        within = allowed(
            probs[i], max(0, s.get("top_k", 0)), s.get("top_p", 1.0), s.get("min_p", 0.0)
        )
        assert seen[i] <= within
        # Tokens with a fair chance must have come up: 400 draws miss a probability of 0.05 once in
        # a billion.
        mass = sum(probs[i][token] for token in within)
        assert {token for token in within if probs[i][token] > 0.05 * mass} <= seen[i]


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    logits = noise(5, seed=3)
    found = draw(
        logits, rows_of(*[SamplingParams(temperature=50.0, top_k=1)] * 5), list(range(5)), [9] * 5
    )
    assert ids(found) == logits.argmax(-1).tolist()


# ---- draws


def test_uniform_numbers() -> None:
    """In [0, 1), evenly spread, unrelated at neighbouring positions and neighbouring seeds."""
    seeds, positions = torch.meshgrid(torch.arange(200) - 100, torch.arange(200), indexing="ij")
    u = uniform(seeds.flatten(), positions.flatten()).view(200, 200)
    assert 0 <= float(u.min()) < 1e-3
    assert 1 - 1e-3 < float(u.max()) < 1
    assert len(set(u.flatten().tolist())) == 40_000
    for a, b in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:])):
        cells = Counter(
            (int(4 * x), int(4 * y))
            for x, y in zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)
        )
        share = a.numel() / 16
        assert (
            sum((cells[i, j] - share) ** 2 / share for i in range(4) for j in range(4))
            < CHI_SQUARED[15]
        )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    """Chi-squared over 200 seeds x 200 positions."""
    logits = noise(1, seed=4, vocab=12, scale=1.0)
    rows = rows_of(
        *[SamplingParams(temperature=temperature, seed=1000 + 17 * i) for i in range(200)], vocab=12
    )
    counts: Counter[int] = Counter()
    slots = list(range(200)) * 200
    positions = [position for position in range(200) for _ in range(200)]
    counts.update(ids(draw(logits.expand(40_000, -1), rows, slots, positions)))
    wanted = (40_000 * (logits[0].double() / temperature).softmax(-1)).tolist()
    assert sum((counts[i] - share) ** 2 / share for i, share in enumerate(wanted)) < CHI_SQUARED[11]


def test_frequencies_under_a_cut_are_renormalised() -> None:
    logits = noise(1, seed=4, vocab=40, scale=1.0)
    rows = rows_of(SamplingParams(top_k=12, seed=3), vocab=40)
    counts = Counter(ids(draw(logits.expand(20_000, -1), rows, [0] * 20_000, list(range(20_000)))))
    best = logits[0].topk(12)
    shares = best.values.double().softmax(0) * 20_000
    pairs = zip(best.indices.tolist(), shares.tolist(), strict=True)
    assert set(counts) <= set(best.indices.tolist())
    assert sum((counts[i] - share) ** 2 / share for i, share in pairs) < CHI_SQUARED[11]


@pytest.mark.parametrize("vocab", [50, 8191])
def test_a_seeded_row_repeats_itself_alone_and_in_any_company(vocab: int) -> None:
    settings_: list[dict[str, Any]] = [
        {},
        {"top_k": 7},
        {"top_p": 0.8, "temperature": 1.3},
        {"min_p": 0.02},
        {"temperature": 0.0},
        {"presence_penalty": 1.0, "logit_bias": {3: 5.0}},
        {"repetition_penalty": 1.2, "top_k": 20},
        {"logprobs": 4},
        {"min_tokens": 9},
    ]
    count = len(settings_)
    params = [SamplingParams(seed=40 + i, **s) for i, s in enumerate(settings_)]
    logits = noise(count, seed=6, vocab=vocab)
    prompt = (1, 2, 3)
    outputs = (3, 4, 4)
    together = rows_of(*params, prompt=prompt, outputs=outputs, stop_ids=(0, 1), vocab=vocab)
    batch = [
        ids(draw(logits, together, list(range(count)), [position] * count))
        for position in (6, 7, 8)
    ]
    for i, p in enumerate(params):
        alone = rows_of(p, prompt=prompt, outputs=outputs, stop_ids=(0, 1), vocab=vocab)
        assert [ids(draw(logits[i : i + 1], alone, [0], [position])) for position in (6, 7, 8)] == [
            [tokens[i]] for tokens in batch
        ]
    shuffled = rows_of(*params, prompt=prompt, outputs=outputs, stop_ids=(0, 1), vocab=vocab)
    backwards = list(reversed(range(count)))
    assert ids(draw(logits.flip(0), shuffled, backwards, [6] * count)) == batch[0][::-1]


def test_seed_and_position_both_matter() -> None:
    logits = torch.zeros(1, VOCAB)
    rows = rows_of(
        SamplingParams(seed=1),
        SamplingParams(seed=2),
        SamplingParams(seed=1),
        SamplingParams(seed=-(2**63)),
    )
    by_slot = [
        [ids(draw(logits, rows, [slot], [position]))[0] for position in range(30)]
        for slot in range(4)
    ]
    assert by_slot[0] == by_slot[2]
    assert by_slot[0] != by_slot[1]
    assert len(set(by_slot[0])) > 10
    assert len(set(by_slot[3])) > 10


# ---- edits


def naive(
    logits: list[float],
    prompt: tuple[int, ...],
    outputs: list[int],
    p: SamplingParams,
    stop_ids: tuple[int, ...],
) -> list[float]:
    """Repetition over prompt and output, then frequency and presence over the output, then bias,
    then the minimum length."""
    values = list(logits)
    for token in set(prompt) | set(outputs):
        values[token] = (
            values[token] / p.repetition_penalty
            if values[token] > 0
            else values[token] * p.repetition_penalty
        )
    for token, count in Counter(outputs).items():
        values[token] -= p.frequency_penalty * count + p.presence_penalty
    for token, bias in (p.logit_bias or {}).items():
        values[token] += bias
    if len(outputs) < p.min_tokens:
        for token in stop_ids:
            values[token] = -math.inf
    return values


EDITS: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"presence_penalty": -1.0},
    {"frequency_penalty": 0.4},
    {"frequency_penalty": -0.1, "presence_penalty": 0.3},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"logit_bias": {4: 6.0, 5: -100.0, 49: 2.5}},
    {"min_tokens": 5},
    {
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.7,
        "logit_bias": {7: 3.0},
        "min_tokens": 3,
    },
    {},
]


def test_edits_step_by_step_against_the_naive_way() -> None:
    """Twenty greedy tokens from slowly changing logits: each depends on all counts before it.
    One row edits nothing."""
    prompt = (3, 7, 7, 11)
    stop_ids = (2, 7, 20)
    count = len(EDITS)
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, **apply_logits_processors)
        for apply_logits_processors in EDITS
    ]
    rows = rows_of(*params, prompt=prompt, stop_ids=stop_ids)
    base = noise(count, seed=8, scale=1.0)
    outputs = [[] for _ in params]
    base[:, list(stop_ids)] += 1.0
    for step in range(20):
        logits = base + 0.3 * noise(count, seed=100 + step, scale=1.0)
        before = logits.clone()
        found = ids(draw(logits, rows, list(range(count)), [len(prompt) + step] * count))
        assert torch.equal(logits, before), "the caller's logits are not changed"
        for i, p in enumerate(params):
            values = naive(logits[i].tolist(), prompt, outputs[i], p, stop_ids)
            assert found[i] == max(range(VOCAB), key=values.__getitem__), (
                f"{EDITS[i]} at step {step}"
            )
            outputs[i].append(found[i])
    assert len({tuple(tokens) for tokens in outputs}) > 5, "the settings make a difference"


def test_counts_survive_a_new_row_with_outputs() -> None:
    """A preempted request is set up again with what it has said: its next token is that of the
    row that went on."""
    params = SamplingParams(temperature=0.0, frequency_penalty=0.5, repetition_penalty=1.2)
    prompt = (1, 2)
    logits = noise(1, seed=9, scale=0.5)
    rows = rows_of(params, prompt=prompt)
    said: list[int] = []
    for step in range(12):
        again = rows_of(params, prompt=prompt, outputs=tuple(said))
        token = ids(draw(logits, rows, [0], [2 + step]))
        assert token == ids(draw(logits, again, [0], [2 + step]))
        said += token
    assert len(set(said)) > 3


def test_a_slot_forgets_its_last_request() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    rows = rows_of(params, prompt=(1,))
    logits = noise(1, seed=10, scale=0.2)
    first = [ids(draw(logits, rows, [0], [1 + step]))[0] for step in range(5)]
    assert len(set(first)) == 5
    rows.apply(SchedulerOutput(new_requests=[new_row(0, params, (1,))]))
    assert [ids(draw(logits, rows, [0], [1 + step]))[0] for step in range(5)] == first


def test_a_slot_forgets_the_prompt_it_had() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=5.0)
    rows = rows_of(params, prompt=(7,))
    logits = torch.full((1, VOCAB), -1.0)
    logits[0, 7] = 2.0
    logits[0, 8] = 1.0
    assert ids(draw(logits, rows, [0], [1])) == [8]
    rows.apply(SchedulerOutput(new_requests=[new_row(0, params, (3,))]))
    assert ids(draw(logits, rows, [0], [1])) == [7]


def test_min_tokens_bans_stop_ids_for_exactly_that_many_tokens() -> None:
    logits = noise(1, seed=11, scale=0.1)
    logits[0, 6] = logits[0, 9] = 30.0
    for params in (
        SamplingParams(temperature=0.0, min_tokens=3),
        SamplingParams(temperature=1.0, min_tokens=3, seed=5),
    ):
        rows = rows_of(params, prompt=(1,) * 10, stop_ids=(6, 9))
        found = [ids(draw(logits, rows, [0], [10 + step]))[0] for step in range(6)]
        assert not {6, 9} & set(found[:3])
        assert set(found[3:]) <= {6, 9}


def test_min_tokens_outweighs_a_bias() -> None:
    rows = rows_of(
        SamplingParams(temperature=0.0, min_tokens=1, logit_bias={6: 100.0}),
        prompt=(1,),
        stop_ids=(6,),
    )
    logits = noise(1, seed=12)
    assert ids(draw(logits, rows, [0], [1])) != [6]
    assert ids(draw(logits, rows, [0], [2])) == [6]


def test_bias_shifts_frequencies_by_its_exponential() -> None:
    logits = torch.zeros(1, 12)
    rows = rows_of(SamplingParams(seed=1, logit_bias={5: math.log(12), 7: -100.0}), vocab=12)
    counts = Counter(ids(draw(logits.expand(4000, -1), rows, [0] * 4000, list(range(4000)))))
    assert counts[7] == 0
    assert abs(counts[5] / 4000 - 12 / 22) < 0.04


# ---- log probabilities


def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    params = [
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=2.0, top_k=20, logprobs=5),
        SamplingParams(temperature=0.0, logit_bias={30: 100.0}, logprobs=2),
        SamplingParams(),
    ]
    logits = noise(4, seed=13)
    tokens = draw(logits, rows_of(*params, prompt=(1,)), [0, 1, 2, 3], [1] * 4)
    wanted = logits.double().log_softmax(-1)
    logprobs = Logprobs.of(logits, tokens, 5)
    for i, count in ((0, 0), (1, 5), (2, 2)):
        found = logprobs.row(i, count)
        token = ids(tokens)[i]
        assert found.sampled == pytest.approx(float(wanted[i, token]), abs=1e-5)
        assert found.rank == 1 + sum(
            value > float(logits[i, token]) for value in logits[i].tolist()
        )
        best = sorted(range(VOCAB), key=lambda t: -float(logits[i, t]))[:count]
        assert list(found.top_ids) == best
        assert found.top == pytest.approx([float(wanted[i, t]) for t in best], abs=1e-5)
    assert ids(tokens)[2] == 30
    assert logprobs.row(0, 0).rank == 1


def test_the_widest_way_of_drawing_that_any_row_needs() -> None:
    greedy = SamplingParams(temperature=0)
    plain = SamplingParams()
    filtered = SamplingParams(top_p=0.5)
    cut_greedy = SamplingParams(temperature=0, top_k=3)
    assert (
        sampling_variant_of([])
        is sampling_variant_of([greedy, cut_greedy])
        is SamplingVariant.GREEDY
    )
    assert sampling_variant_of([cut_greedy, plain]) is SamplingVariant.PLAIN
    assert sampling_variant_of([greedy, filtered, plain]) is SamplingVariant.FILTERED
    for asks in ({"logprobs": 0}, {"logit_bias": {1: 1.0}}, {"min_tokens": 1}):
        params = SamplingParams(**asks)
        assert params.needs_host
        assert sampling_variant_of([greedy, params]) is SamplingVariant.PLAIN, (
            "whatever else it wants"
        )
    assert SamplingParams(structured=StructuredOutput("json_object")).needs_host
    assert not filtered.needs_host


def test_a_mask_forbids_what_its_bits_leave_out() -> None:
    logits = noise(2)
    allowed = [{0, 31, 32, 49}, {5}]
    words = [[sum(1 << (t % 32) for t in row if t // 32 == w) for w in range(2)] for row in allowed]
    mask = torch.tensor(
        [[w - 2**32 if w >= 2**31 else w for w in row] for row in words], dtype=torch.int32
    )
    found = apply_bitmask(logits, mask)
    for row, kept in enumerate(allowed):
        assert {i for i, value in enumerate(found[row].tolist()) if value > float("-inf")} == kept
        assert torch.equal(found[row, sorted(kept)], logits[row, sorted(kept)])


def test_more_logprobs_than_tokens() -> None:
    logits = noise(1, vocab=12)
    found = Logprobs.of(
        logits, draw(logits, rows_of(SamplingParams(logprobs=64), vocab=12), [0], [0]), 64
    ).row(0, 64)
    assert sorted(found.top_ids) == list(range(12))
    assert math.fsum(math.exp(value) for value in found.top) == pytest.approx(1, abs=1e-5)
