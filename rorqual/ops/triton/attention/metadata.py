"""Data that attention kernels derive from AttentionMetadata, once per step, on the device, kept in
its scratch.

The host reads nothing from the device here. Host lists are copied through pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from itertools import accumulate

import torch
from torch import Tensor

from rorqual.ops.interface import AttentionMetadata, Share, shares_of
from rorqual.ops.triton.attention import prefix_groups
from rorqual.ops.triton.attention.gqa_decode import padded
from rorqual.ops.triton.attention.shared_prefix import SharedPrefixes
from rorqual.ops.triton.attention.split_kv import SplitPlan

DECODE_QUERIES = 4  # most query tokens per request for the decode kernels


class Derived:
    """Starts, schedules and gather indices of one segment. Packed keys are in request order,
    `max_kv_lens` entries each."""

    def __init__(self, segment: AttentionMetadata):
        self.segment = segment
        self.device = segment.kv_lens.device
        self.captured = _capturing(self.device)
        self.longest = max(segment.max_kv_lens)
        self.most_queries = max(segment.query_lens)
        self._plans: dict[Hashable, SplitPlan] = {}
        self._kept: dict[Hashable, Tensor] = {}
        self._by_token: AttentionMetadata | None = None
        self._shares: dict[tuple[int, int], list[Share]] = {}
        self._prefixes: dict[Hashable, SharedPrefixes | None] = {}

    @property
    def decodes(self) -> bool:
        """Whether all requests have the same small number of query tokens."""
        return (
            self.most_queries <= DECODE_QUERIES
            and self.segment.tokens == self.most_queries * len(self.segment)
        )

    def plan(self, key: Hashable, make: Callable[[], SplitPlan]) -> SplitPlan:
        """The schedule of the kernel `key`, computed in the first layer that needs it."""
        if key not in self._plans:
            self._plans[key] = make()
        return self._plans[key]

    def shared_prefixes(
        self, page: int, heads: tuple[int, int], width: int, dtype: torch.dtype, workers: int
    ) -> SharedPrefixes | None:
        """As prefix_groups.find, in the first layer that asks."""
        key = (page, heads, width, dtype, workers)
        if key not in self._prefixes:
            where = self.segment
            given = (where.tables, where.kv_lens, self.most_queries)
            self._prefixes[key] = prefix_groups.find(
                *given, page, heads, padded(width), dtype, workers
            )
        return self._prefixes[key]

    def shares(self, tokens: int, page: int) -> list[Share]:
        key = (tokens, page)
        if key not in self._shares:
            self._shares[key] = shares_of(self.segment, tokens, page)
        return self._shares[key]

    def query_starts(self) -> Tensor:
        """[R + 1] int64"""
        known = self.segment.query_starts
        return self._starts("queries", self.segment.query_lens) if known is None else known

    def key_starts(self) -> Tensor:
        """[R + 1] int64"""
        known = self.segment.key_starts
        return self._starts("keys", self.segment.max_kv_lens) if known is None else known

    def _starts(self, name: str, lens: tuple[int, ...]) -> Tensor:
        if name not in self._kept:
            same = min(lens) == max(lens)
            steps = torch.arange(len(lens) + 1, device=self.device) * lens[0] if same else None
            self._kept[name] = (
                to_device([0, *accumulate(lens)], self.device) if steps is None else steps
            )
        return self._kept[name]

    def owners(self, starts: Tensor, count: int) -> Tensor:
        """The request of each of `count` packed rows, [count] int64."""
        return torch.searchsorted(starts, torch.arange(count, device=self.device), right=True) - 1

    def gather_slots(self, page: int) -> Tensor:
        """The cache position of every packed key, [sum of max_kv_lens] int64; 0 (page 0) past a
        request's end."""
        if self.segment.key_slots is not None:
            return self.segment.key_slots
        if page not in self._kept:
            starts = self.key_starts()
            count = sum(self.segment.max_kv_lens)
            owner = self.owners(starts, count)
            position = torch.arange(count, device=self.device) - starts[owner]
            inside = position < self.segment.kv_lens[owner]
            position = torch.where(inside, position, 0)
            slots = self.segment.tables[owner, position // page] * page + position % page
            self._kept[page] = torch.where(inside, slots, 0)
        return self._kept[page]

    def by_token(self) -> AttentionMetadata:
        """The same queries with each token as a request that sees the cache up to itself, which
        makes any mixture a decode batch."""
        if self._by_token is None:
            where = self.segment
            starts = self.query_starts()
            owner = self.owners(starts, where.tokens)
            after = starts[owner + 1] - 1 - torch.arange(where.tokens, device=self.device)
            lens = where.kv_lens[owner] - after
            self._by_token = AttentionMetadata(
                where.tables[owner], lens, (1,) * where.tokens, (self.longest,) * where.tokens
            )
        return self._by_token


def derived(segment: AttentionMetadata) -> Derived:
    """The segment's Derived. Recomputed during a graph capture: what a graph reads must be computed
    inside it."""
    found = segment.scratch
    if not isinstance(found, Derived) or found.captured != _capturing(found.device):
        found = segment.scratch = Derived(segment)
    return found


def to_device(values: list[int], device: torch.device) -> Tensor:
    host = torch.tensor(values)
    return (
        host.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else host.to(device)
    )


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
