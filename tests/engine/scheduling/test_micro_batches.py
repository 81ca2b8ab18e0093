"""A step in parts: where it is cut, and that all ranks cut alike."""

from __future__ import annotations

import pytest

from rorqual.config.parallel import ParallelConfig
from rorqual.engine.scheduling.scheduler_output import (
    PrefillChunk,
    SamplingVariant,
    SchedulerOutput,
    StepMetadata,
    split_lengths,
    split_lengths_of_ranks,
)
from rorqual.errors import ConfigError


@pytest.mark.parametrize(
    ("lengths", "parts", "found"),
    [
        ((1,) * 8, 2, (4, 4)),
        ((1,) * 7, 3, (2, 3, 2)),
        ((3,) * 5, 2, (6, 9)),
        ((1, 1, 1, 120), 2, (3, 120)),
        ((120, 1, 1, 1), 2, (120, 3)),
        ((5,), 2, (5,)),
        ((2, 2), 3, (2, 2)),
        ((), 2, (0,)),
        ((4, 4, 4, 4), 1, (16,)),
    ],
)
def test_runs_of_whole_requests(
    lengths: tuple[int, ...], parts: int, found: tuple[int, ...]
) -> None:
    assert split_lengths(lengths, parts) == found


@pytest.mark.parametrize(
    ("lengths", "parts", "found"),
    [
        ((1, 1, 1, 900), 2, (451, 452)),
        ((900, 1, 1, 1), 2, (448, 455)),
        ((128,), 2, (64, 64)),
        ((127,), 2, (127,)),
        ((900,), 3, (320, 256, 324)),
        ((200,), 8, (64, 64, 72)),  # pieces of fewer tokens are not made
        ((500, 480), 2, (500, 480)),  # as even as need be
        ((700, 300), 2, (512, 488)),
        ((300, 700), 3, (300, 384, 316)),
    ],
)
def test_a_long_chunk_is_cut(lengths: tuple[int, ...], parts: int, found: tuple[int, ...]) -> None:
    assert split_lengths(lengths, parts) == found


def test_every_cut_lies_between_requests_or_leaves_whole_pieces() -> None:
    lengths = (7, 1, 30, 2, 2, 11, 400, 3)
    edges = {sum(lengths[:i]) for i in range(len(lengths) + 1)}
    start, stop = sum(lengths[:6]), sum(lengths[:7])
    inside = set(range(start + 64, stop - 63, 64))
    cut = set()
    for parts in range(1, 9):
        sizes = split_lengths(lengths, parts)
        assert sum(sizes) == sum(lengths)
        assert all(sizes)
        assert len(sizes) <= parts
        cut |= {sum(sizes[:i]) for i in range(len(sizes))}
    assert cut <= edges | inside
    assert cut & inside


def test_a_rank_that_cannot_be_cut_leaves_all_whole() -> None:
    assert split_lengths_of_ranks([(1, 1), (5, 5)], 2) == ((1, 5), (1, 5))
    assert split_lengths_of_ranks([(1, 1), (5,)], 2) == ()
    assert split_lengths_of_ranks([(1, 1), ()], 2) == ()
    assert split_lengths_of_ranks([(1, 1), (5, 5)], 1) == ()


def test_what_ranks_agree_on_names_the_parts() -> None:
    chunks = [PrefillChunk(7, 0, [1] * 10, True), PrefillChunk(8, 0, [1] * 12, True)]
    outputs = [
        SchedulerOutput([0, 1], [9, 9], chunks, num_speculative_tokens=2),
        SchedulerOutput([0, 1, 2, 3], [9] * 4, num_speculative_tokens=2),
    ]
    found = StepMetadata.of(outputs, SamplingVariant.GREEDY, False, micro_batches=2)
    assert found.tokens == (28, 12)
    assert found.micro_batches == ((16, 6), (12, 6))
    assert found.row_micro_batches == ((2, 2), (2, 2))
    assert StepMetadata.of(outputs, SamplingVariant.GREEDY, False).micro_batches == ()


def test_a_captured_step_has_the_parts_of_its_padded_rows() -> None:
    found = StepMetadata.padded(6, 2, SamplingVariant.GREEDY, 1, micro_batches=3)
    assert found.micro_batches == ((4, 4), (4, 4), (4, 4))
    assert StepMetadata.padded(2, 2, SamplingVariant.GREEDY, 1, 3).micro_batches == ()


def test_one_rank_alone_has_nothing_to_overlap() -> None:
    with pytest.raises(ConfigError, match="micro_batches=2 needs several ranks"):
        ParallelConfig(micro_batches=2)
    with pytest.raises(ConfigError, match="micro_batches=9 is out of range; accepted: 1 to 8"):
        ParallelConfig(dp=2, ep=2, micro_batches=9)
