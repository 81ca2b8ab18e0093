"""Prompts and new rows on the device: what the host knows arrives there whole."""

from __future__ import annotations

import random
from array import array
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual.engine.execution.forward_batch_builder import ForwardBatchBuilder
from rorqual.engine.execution.request_state import RequestState
from rorqual.engine.scheduling.scheduler_output import NewRequest, PrefillChunk, SchedulerOutput
from rorqual.ops.interface import AttentionMetadata
from rorqual.platforms import make_platform
from rorqual.request import SamplingParams

PAGE = 4
SLOTS = 7
PAGES = 16  # a row


class Spec:
    page_size = PAGE


class Pool:
    spec = Spec()


def make(modules: int, most_drafts: int = 0) -> tuple[ForwardBatchBuilder, RequestState]:
    rows = RequestState(SLOTS, PAGES, 99, make_platform("cpu"), most_drafts)
    rows.tables.copy_(torch.randperm(1000)[: rows.tables.numel()].view_as(rows.tables))
    nothing: Any = None
    pool: Any = Pool()
    return ForwardBatchBuilder(rows, pool, nothing, True, modules), rows


def chunks_of(seed: int, modules: int) -> list[PrefillChunk]:
    """Some sampled, some with tokens behind them, some scored; tokens as ranks have them, and as
    a caller may give them."""
    draw = random.Random(seed)
    made = []
    for slot in draw.sample(range(SLOTS), draw.randint(1, SLOTS)):
        start, length = draw.randint(0, 30) * (seed % 2), draw.randint(1, 30)
        ids = [draw.randrange(99) for _ in range(length)]
        behind = draw.randint(0, max(1, modules))
        first = draw.randint(start, start + length)
        scores = (first, draw.randint(first, start + length))
        tokens = array("q", ids) if draw.random() < 0.5 else ids
        following = tuple(draw.randrange(99) for _ in range(behind))
        made.append(PrefillChunk(slot, start, tokens, not behind, following, *scores))
    return made


def starts_of(segment: AttentionMetadata) -> tuple[Tensor, Tensor]:
    given = segment.query_starts, segment.key_starts
    assert given[0] is not None
    assert given[1] is not None
    return given


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_what_the_builder_knows_is_what_a_backend_derives_without_it(seed: int) -> None:
    pytest.importorskip("triton")
    from rorqual.ops.triton.attention.metadata import Derived

    build, _ = make(0)
    segment = build.prefill(SchedulerOutput(chunks=chunks_of(seed, 0))).segment
    given = starts_of(segment)
    slots = segment.key_slots
    assert (slots is None) == bool(seed % 2)
    segment.query_starts = segment.key_starts = segment.key_slots = None
    plain = Derived(segment)
    assert given[0].equal(plain.query_starts())
    assert given[1].equal(plain.key_starts())
    assert slots is None or slots.equal(plain.gather_slots(PAGE))
    segment.query_starts, segment.key_starts = given
    segment.key_slots = slots
    known = Derived(segment)
    assert known.query_starts() is given[0]
    assert known.key_starts() is given[1]
    assert known.gather_slots(PAGE).equal(plain.gather_slots(PAGE))


@pytest.mark.parametrize("modules", [0, 1, 2, 3])
def test_chunks_are_on_the_device_as_they_were_planned(modules: int) -> None:
    build, rows = make(modules)
    ends_seen = scored_seen = whole_seen = 0
    for seed in range(40):
        chunks = chunks_of(seed, modules)
        part = build.prefill(SchedulerOutput(chunks=chunks))
        ids, positions, places, following, logit_rows, slots = [], [], [], [], [], []
        ends, after, scored = [], [], []
        for chunk in chunks:
            for place, token in enumerate(chunk.tokens):
                position = chunk.start + place
                if chunk.score_start <= position < chunk.score_stop:
                    scored.append(len(ids))
                ids.append(token)
                positions.append(position)
                page = int(rows.tables[chunk.slot, position // PAGE])
                places.append(page * PAGE + position % PAGE)
            following += [*list(chunk.tokens)[1:], chunk.following[0] if chunk.following else 0]
            if chunk.sample:
                logit_rows.append(len(ids) - 1)
                slots.append(chunk.slot)
            if chunk.following:
                ends.append(len(ids) - 1)
                after.append([chunk.following[min(i, len(chunk.following) - 1)]
                              for i in range(modules)])  # fmt: skip
        assert part.ids.tolist() == ids
        assert part.positions.tolist() == positions
        assert part.slot_mapping.tolist() == places
        assert part.following is not None
        assert part.following.tolist() == following
        assert part.logit_rows.tolist() == logit_rows
        assert part.slots.tolist() == slots
        assert part.bounds == tuple(chunk.stop for chunk in chunks if chunk.sample)
        assert part.segment.query_lens == tuple(len(chunk.tokens) for chunk in chunks)
        assert part.segment.max_kv_lens == tuple(chunk.stop for chunk in chunks)
        for chunk in chunks:
            assert rows.length[chunk.slot] == chunk.stop
        assert (part.scored is None) == (not scored)
        if part.scored is not None:
            assert part.scored.tolist() == scored
            scored_seen += 1
        assert (part.ends is None) == (modules < 2 or not ends)
        if part.ends is not None:
            assert [found.tolist() for found in part.ends] == [ends, after]
            ends_seen += 1
        whole = all(chunk.start == 0 for chunk in chunks)
        assert (part.segment.key_slots is not None) == whole
        whole_seen += whole
        starts = starts_of(part.segment)
        lengths = [len(chunk.tokens) for chunk in chunks]
        assert starts[0].tolist() == [*accumulate(lengths, initial=0)]
        assert starts[1].tolist() == [*accumulate((chunk.stop for chunk in chunks), initial=0)]
        assert not whole or part.segment.key_slots.equal(part.slot_mapping)
        for column in (
            part.ids, part.positions, part.following, part.logit_rows, part.slots, *starts
        ):  # fmt: skip
            assert column.dtype == torch.int64
            assert column.storage_offset() % 2 == 0, "kernels are compiled for 16 bytes"
    assert scored_seen > 10
    assert 10 < whole_seen < 30
    assert ends_seen > 10 or modules < 2


@pytest.mark.parametrize("most_drafts", [0, 3])
def test_new_rows_are_set_up_together_and_touch_no_other(most_drafts: int) -> None:
    _, rows = make(0, most_drafts)
    for column in (rows.seed, rows.num_drafts, rows.limit, rows.length, rows.last_token):
        column.fill_(77)
    rows.settings.fill_(0.75)
    rows.coupled.fill_(True)
    before = rows.tables.clone()
    asked = {
        5: (SamplingParams(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1), (3, 1, 2), -(2**63)),
        0: (SamplingParams(seed=4, speculate=False), (9,), 4),
        3: (SamplingParams(temperature=0), tuple(range(20, 20 + PAGES)), 2**63 - 1),
    }
    begun = {0: (6, 12)}  # slot: last token, length
    rows.apply(
        SchedulerOutput(
            new_requests=[
                NewRequest(slot, params, seed, pages, 3, (), frozenset(), *begun.get(slot, ()))
                for slot, (params, pages, seed) in asked.items()
            ]
        )
    )
    for slot in range(SLOTS):
        if slot not in asked:
            assert rows.tables[slot].equal(before[slot])
            assert rows.seed[slot] == 77
            assert rows.settings[slot].eq(0.75).all()
            continue
        params, pages, seed = asked[slot]
        assert rows.tables[slot].tolist() == [*pages, *[0] * (PAGES - len(pages))]
        assert rows.seed[slot] == seed
        settings = [params.temperature, params.top_p, params.min_p, params.top_k]
        assert rows.settings[slot].tolist() == settings
        assert rows.params[slot] is not None
        last, length = begun.get(slot, (77, 77))
        assert (int(rows.last_token[slot]), int(rows.length[slot])) == (last, length)
        if most_drafts:
            assert rows.num_drafts[slot] == 0
            assert rows.limit[slot] == (most_drafts if params.speculate else 0)
            assert bool(rows.coupled[slot]) == (params.seed is not None or params.greedy)
