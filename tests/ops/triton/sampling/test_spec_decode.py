"""How requests move on, in kernels as by torch's operations. Interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.ops import reference
from rorqual.ops.triton.sampling import spec_decode

pytestmark = pytest.mark.exhaustive(but_first=True)

SLOTS = 9
PAGE = 8
MOST = 4  # drafts that rows have room for


def numbers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape).to(DEVICE)


def some(count: int) -> Tensor:
    """So many slots, in no order."""
    return torch.randperm(SLOTS)[:count].to(DEVICE)


@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_rows_to_compute(count: int, num_speculative_tokens: int) -> None:
    torch.manual_seed(count + num_speculative_tokens)
    pages = 5
    length = numbers(pages * PAGE - num_speculative_tokens, SLOTS)
    slots = some(count)
    arguments = (
        length,
        numbers(99, SLOTS),
        numbers(99, SLOTS, MOST),
        numbers(50, SLOTS, pages + 2)[:count, :pages],
        slots,
        num_speculative_tokens,
        PAGE,
    )
    for found, expected in zip(
        spec_decode.decode_rows(*arguments), reference.decode_rows(*arguments), strict=True
    ):
        assert torch.equal(found, expected)


def test_rows_past_the_table_go_to_the_null_page() -> None:
    length = torch.tensor([15], device=DEVICE)
    zeros = torch.zeros(1, MOST, dtype=torch.int64, device=DEVICE)
    slots = zeros[0, :1]
    tables = torch.tensor([[3, 4]], device=DEVICE)
    _, positions, mapping, lens = spec_decode.decode_rows(
        length, slots, zeros, tables, slots, 2, PAGE
    )
    assert positions.tolist() == [15, 16, 17]
    assert mapping.tolist() == [4 * PAGE + 7, 0, 1]
    assert lens.tolist() == [18]


@pytest.mark.parametrize("num_speculative_tokens", [0, 2])
def test_padding_rows_have_no_cache(num_speculative_tokens: int) -> None:
    """Their table has null pages alone; they attend to nothing and their length stays 0."""
    width = num_speculative_tokens + 1
    slots = torch.tensor([1, 2, 2], device=DEVICE)
    tables = torch.tensor([[3, 0], [0, 0], [0, 0]], device=DEVICE)
    for ops in (spec_decode, reference):
        length = torch.tensor([0, 5, 0], device=DEVICE)
        last = torch.zeros_like(length)
        drafts = torch.zeros(3, MOST, dtype=torch.int64, device=DEVICE)
        _, _, mapping, lens = ops.decode_rows(
            length, last, drafts, tables, slots, num_speculative_tokens, PAGE
        )
        assert lens.tolist() == [5 + width, 0, 0]
        assert mapping.max() < 4 * PAGE
        tokens = torch.zeros(3, width, dtype=torch.int64, device=DEVICE)
        ops.commit_tokens(last, length, slots, lens, tokens, torch.zeros_like(slots))
        assert length.tolist() == [0, 6, 0]


@pytest.mark.parametrize("num_speculative_tokens", [1, 2, 3])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_drafts_are_judged_and_rows_move_on(
    count: int, told: bool, num_speculative_tokens: int
) -> None:
    """Few different tokens, so that every number of drafts stands somewhere."""
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        tokens = numbers(2, count, num_speculative_tokens + 1)
        drafts = numbers(2, SLOTS, MOST)
        there = numbers(MOST + 1, SLOTS)
        slots = some(count)
        taken = numbers(2, count, num_speculative_tokens).bool() if told else None
        judged = spec_decode.verify_drafts(tokens, drafts, there, slots, taken)
        for found, expected in zip(
            judged, reference.verify_drafts(tokens, drafts, there, slots, taken), strict=True
        ):
            assert torch.equal(found, expected)
        stand, right, _ = judged
        seen |= set(right.tolist())
        lens = numbers(30, count) + 10
        state = (numbers(99, SLOTS), numbers(99, SLOTS))
        mine = [x.clone() for x in state]
        theirs = [x.clone() for x in state]
        moved = spec_decode.commit_tokens(*mine, slots, lens, stand, right)
        for found, expected in zip(
            moved, reference.commit_tokens(*theirs, slots, lens, stand, right), strict=True
        ):
            assert torch.equal(found, expected)
        assert all(map(torch.equal, mine, theirs))
    assert count < 9 or seen == set(range(num_speculative_tokens + 1))
