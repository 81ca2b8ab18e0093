"""Attention of prompts captured for bounds, with the kernels: as with exact lengths, for fewer
prompts, rows and keys than the bounds, behind rows that decode. On a GPU if there is one, where a
graph is replayed for several steps, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual.engine.execution.piecewise.attention import (
    CapturedAttention,
    HeldPrompts,
    PromptBounds,
    PromptRows,
)
from rorqual.engine.execution.piecewise.gaps import Gap
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.ops.interface import AttentionMetadata
from rorqual.platforms import make_platform
from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON, needs_triton
from tests.ops.triton.attention.test_triton_attention import check, paged, random, segment

if SKIP_REASON is None:
    from rorqual.ops.triton.backend import TritonOps

pytestmark = [needs_triton, pytest.mark.exhaustive(but_first=True)]
PAGE = 16
HEADS = 4
BOUNDS = PromptBounds(keys=192, rows=128, requests=4, longest=128)
SHORT = PromptBounds(keys=192, rows=128, requests=5, longest=64)
# (queries, keys) of each prompt, and rows before them
STEPS = [
    ([(40, 40), (1, 1), (64, 64)], 0),
    ([(17, 150)], 3),
    ([(128, 130)], 0),
    ([(9, 50), (30, 31), (20, 40), (5, 70)], 60),
    ([], 0),  # at the start
]


def heads_of_pages(step: list[tuple[int, int]], dtype: torch.dtype) -> tuple[Any, Tensor]:
    """Attention that reads keys from their pages."""
    keys = [n for _, n in step] or [1]
    k, tables = paged([random(n, 2, 64, dtype=dtype).cpu() for n in keys], PAGE)
    v = random(*k.shape, dtype=dtype)
    ops = TritonOps()

    def attend(segment: AttentionMetadata, q: Tensor, out: Tensor | None = None) -> Tensor:
        found = ops.attention(q, k, v, segment, 0.1, None, out)
        assert out is None or found is out, "the result was made elsewhere, and is copied"
        return found

    return attend, tables


def heads_of_latents(step: list[tuple[int, int]], dtype: torch.dtype) -> tuple[Any, Tensor]:
    """Attention to packed keys, which are made of cached latents."""
    keys = [n for _, n in step] or [1]
    plane, tables = paged([random(n, 144, dtype=dtype).cpu() for n in keys], PAGE)
    plane = plane.nan_to_num(7.0)  # as everywhere in a cache: rows of no request are finite
    ops = TritonOps()

    def attend(segment: AttentionMetadata, q: Tensor, out: Tensor | None = None) -> Tensor:
        assert len(ops.shares(segment, 192, PAGE)) == 1
        entries = ops.latent_entries(plane, segment, 128, dtype)
        nope, v, rope = entries.split((64, 64, 16), -1)
        every = (entries.shape[0], HEADS, 64)
        parts = (nope[:, None].expand(every).contiguous(), rope)
        v = v[:, None].expand(every).contiguous()
        return ops.decompressed_attention(q, parts, v, segment, 0.1, out=out)

    return attend, tables


@pytest.mark.parametrize("make", [heads_of_pages, heads_of_latents])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("number", "bounds"),
    [*((n, BOUNDS) for n in range(len(STEPS))), *((n, SHORT) for n in (0, 1, 3, 4))],
)
def test_bounds_give_what_exact_lengths_give(
    make: Callable[..., tuple[Any, Tensor]],
    dtype: torch.dtype,
    number: int,
    bounds: PromptBounds,
) -> None:
    torch.manual_seed(number)
    step, before = STEPS[number]
    width = 64 if make is heads_of_pages else 80
    attend, tables = make(step, dtype)
    tokens = sum(count for count, _ in step)
    held = HeldPrompts(make_platform(DEVICE), 6, 20, 200)
    if step:
        held.numbers.fill_(9)  # of an earlier step
        held.inside.fill_(True)
        held.tables.fill_(1)
    pool: Any = SimpleNamespace(spec=SimpleNamespace(page_size=PAGE), layers=[])
    rows = PromptRows(pool, bounds, held)
    q = random(160, HEADS, width, dtype=dtype)
    out = torch.full((160, HEADS, 64), 5.0, dtype=dtype, device=DEVICE)

    def work(of: ForwardBatch, q: Tensor) -> Tensor:
        assert of.prefill is not None
        return attend(of.prefill, q, of.attention_out)

    expected = out.clone()
    lens = [n for _, n in step]
    queries = [count for count, _ in step]
    exact = segment(tables[: len(step)], lens, queries)
    if step:
        held.hold(exact, before, bounds)
        mine = slice(before, before + tokens)
        expected[mine] = attend(segment(tables, lens, queries), q[mine])
    for gap in (Gap(0, work, (q,), out), Gap(1, work, (q,), out)):
        out.fill_(5.0)
        rows.works([gap])[0]()
        check(out, expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs need a GPU")
@pytest.mark.parametrize("make", [heads_of_pages, heads_of_latents])
def test_a_graph_is_replayed_for_several_steps(make: Callable[..., tuple[Any, Tensor]]) -> None:
    dtype = torch.bfloat16
    platform = make_platform(DEVICE)
    width = 64 if make is heads_of_pages else 80
    longest = [(128, 192)] * 4
    attend, tables = make(longest, dtype)
    pool: Any = SimpleNamespace(spec=SimpleNamespace(page_size=PAGE), layers=[])
    attention = CapturedAttention(platform)
    q = random(160, HEADS, width, dtype=dtype)
    out = torch.full((160, HEADS, 64), 5.0, dtype=dtype, device=DEVICE)

    def work(of: ForwardBatch, q: Tensor) -> Tensor:
        assert of.prefill is not None
        return attend(of.prefill, q, of.attention_out)

    attention.gaps = [Gap(0, work, (q,), out), Gap(1, work, (q,), out)]
    packed = make is heads_of_latents
    with platform.stream():
        attention.capture(attention.prompt_rows(pool, [BOUNDS], packed), loaded=False)
        graphs = attention.prompts[0]
        for step, before in STEPS[:-1]:
            lens = [n for _, n in step]
            queries = [count for count, _ in step]
            own = tables[: len(step), : 192 // PAGE]
            graphs.held.hold(segment(own, lens, queries), before, BOUNDS)
            mine = slice(before, before + sum(queries))
            expected = torch.full_like(out, 5.0)
            expected[mine] = attend(segment(own, lens, queries), q[mine])
            for replay in graphs.graphs:
                out.fill_(5.0)
                replay()
                check(out, expected)
