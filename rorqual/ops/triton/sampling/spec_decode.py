"""Request state in decode steps, one kernel for each of the three ops (rorqual.ops.reference), with
one program per request. As torch operations these are about thirty launches per step, which for one
request take as long as a layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs


@triton.jit(do_not_specialize=["draft_row", "table_row", "columns"])
def _rows_kernel(
    length,
    last_token,
    drafts,
    tables,
    slots,
    ids,
    positions,
    mapping,
    lens,
    draft_row,
    table_row,
    columns,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, SIZE)
    here = row < ROWS
    slot = tl.load(slots + request)
    first = tl.load(length + slot)
    draft = tl.load(drafts + slot * draft_row + row - 1, mask=here & (row > 0), other=0)
    position = first + row
    page = tl.load(
        tables + request * table_row + position // PAGE,
        mask=here & (position // PAGE < columns),
        other=0,
    )
    out_row = request * ROWS + row
    tl.store(ids + out_row, tl.where(row == 0, tl.load(last_token + slot), draft), mask=here)
    tl.store(positions + out_row, position, mask=here)
    tl.store(mapping + out_row, page * PAGE + position % PAGE, mask=here)
    padding = tl.load(tables + request * table_row) == 0
    tl.store(lens + request, tl.where(padding, 0, first + ROWS))


def decode_rows(
    length: Tensor,
    last_token: Tensor,
    drafts: Tensor,
    tables: Tensor,
    slots: Tensor,
    num_speculative_tokens: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As rorqual.ops.reference.decode_rows."""
    count = slots.shape[0]
    width = num_speculative_tokens + 1
    ids, positions, mapping = (
        torch.empty(count * width, dtype=torch.int64, device=slots.device) for _ in range(3)
    )
    lens = torch.empty_like(slots)
    if count:
        _rows_kernel[count,](
            length,
            last_token,
            drafts,
            tables,
            slots,
            ids,
            positions,
            mapping,
            lens,
            drafts.stride(0),
            tables.stride(0),
            tables.shape[1],
            width,
            next_power(width),
            page_size,
            num_warps=1,
            **dependent(slots.device),
        )
    return ids, positions, mapping, lens


@triton.jit(do_not_specialize=["draft_row"])
def _judge_kernel(
    tokens,
    drafts,
    num_drafts,
    slots,
    taken,
    out,
    num_accepted,
    drafted,
    draft_row,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    TOLD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, SIZE)
    slot = tl.load(slots + request)
    draws = row < ROWS - 1
    present = tl.minimum(tl.load(num_drafts + slot), ROWS - 1)
    own = tl.load(tokens + request * ROWS + row, mask=row < ROWS, other=0)
    draft = tl.load(drafts + slot * draft_row + row, mask=draws, other=0)
    good = (
        tl.load(taken + request * (ROWS - 1) + row, mask=draws, other=0) != 0
        if TOLD
        else own == draft
    )
    first_bad = tl.where(good & draws & (row < present), SIZE, row)
    stand = tl.min(first_bad, 0).to(tl.int64)
    token = tl.where(row < stand, draft, tl.where(row == stand, own, -1))
    tl.store(out + request * ROWS + row, token, mask=row < ROWS)
    tl.store(num_accepted + request, stand)
    tl.store(drafted + request, present)


def verify_drafts(
    tokens: Tensor, drafts: Tensor, num_drafts: Tensor, slots: Tensor, taken: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As rorqual.ops.reference.verify_drafts."""
    count, width = tokens.shape
    assert tokens.is_contiguous()
    assert taken is None or taken.is_contiguous()
    out = torch.empty_like(tokens)
    num_accepted = torch.empty_like(slots)
    drafted = torch.empty_like(slots)
    if count:
        _judge_kernel[count,](
            tokens,
            drafts,
            num_drafts,
            slots,
            taken,
            out,
            num_accepted,
            drafted,
            drafts.stride(0),
            width,
            next_power(width),
            taken is not None,
            num_warps=1,
            **dependent(slots.device),
        )
    return out, num_accepted, drafted


@triton.jit
def _move_kernel(
    last_token,
    length,
    slots,
    lens,
    tokens,
    num_accepted,
    following,
    last,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_inputs(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, SIZE)
    slot = tl.load(slots + request)
    newest = tl.load(num_accepted + request)
    token = tl.load(tokens + request * ROWS + row, mask=row < ROWS, other=-1)
    tl.store(following + request * ROWS + row, tl.maximum(token, 0), mask=row < ROWS)
    tl.store(last + request, request * ROWS + newest)
    tl.store(last_token + slot, tl.load(tokens + request * ROWS + newest))
    tl.store(length + slot, tl.maximum(tl.load(lens + request) - ROWS + 1 + newest, 0))


def commit_tokens(
    last_token: Tensor,
    length: Tensor,
    slots: Tensor,
    lens: Tensor,
    tokens: Tensor,
    num_accepted: Tensor,
) -> tuple[Tensor, Tensor]:
    """As rorqual.ops.reference.commit_tokens."""
    count, width = tokens.shape
    assert tokens.is_contiguous()
    following = torch.empty(count * width, dtype=torch.int64, device=slots.device)
    last = torch.empty_like(slots)
    if count:
        _move_kernel[count,](
            last_token,
            length,
            slots,
            lens,
            tokens,
            num_accepted,
            following,
            last,
            width,
            next_power(width),
            num_warps=1,
            **dependent(slots.device),
        )
    return following, last
