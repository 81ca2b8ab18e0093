"""Reference attention that takes a segment's host lengths for bounds, as kernels do: what it
computes is decided by the starts and lengths on the device alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rorqual.ops.interface import AttentionMetadata, Ops

WHOLE = {name: getattr(Ops, name) for name in ("attention", "dense_attention", "gather")}
calls: list[tuple[int, ...]] = []  # queries of the prompts of each


def _exact(segment: AttentionMetadata) -> tuple[AttentionMetadata, slice] | None:
    """The requests that a bounded segment has, and their rows; None for an exact one."""
    if segment.exact or segment.query_starts is None:
        return None
    starts = segment.query_starts.tolist()
    lens = segment.kv_lens.tolist()
    queries = [after - before for before, after in pairwise(starts)]
    kept = [i for i, count in enumerate(queries) if count]
    assert all(queries[i] <= lens[i] for i in kept)
    assert sum(queries) <= segment.tokens
    assert not any(lens[i] for i in range(len(queries)) if i not in kept)
    found = AttentionMetadata(
        segment.tables[kept],
        segment.kv_lens[kept],
        tuple(queries[i] for i in kept),
        tuple(lens[i] for i in kept),
    )
    return found, slice(starts[0], starts[-1])


def _bounded(name: str) -> Callable[..., Tensor]:
    whole = WHOLE[name]

    def attend(
        ops: Ops, q: Tensor, k: Tensor, v: Tensor, segment: AttentionMetadata, *rest: Any
    ) -> Tensor:
        found = _exact(segment)
        if found is None:
            return whole(ops, q, k, v, segment, *rest)
        exact, rows = found
        calls.append(exact.query_lens)
        # a kernel leaves rows of no request as they are: anything
        out = torch.full((*q.shape[:2], v.shape[-1]), torch.nan, dtype=q.dtype)
        if exact.query_lens:
            out[rows] = whole(ops, q[rows], k, v, exact, *rest)
        return out

    return attend


def _gather(ops: Ops, plane: Tensor, segment: AttentionMetadata) -> Tensor:
    found = _exact(segment)
    if found is not None and not found[0].query_lens:
        return plane.flatten(0, 1)[:0]
    return WHOLE["gather"](ops, plane, segment if found is None else found[0])


def put_in_place(put: Callable[[type, str, Any], None] = setattr) -> None:
    put(Ops, "captures_prompts", lambda ops, width: True)
    put(Ops, "gather", _gather)
    for name in ("attention", "dense_attention"):
        put(Ops, name, _bounded(name))
