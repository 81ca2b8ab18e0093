"""Graphs of the attention between the pieces of a captured pass.

Attention depends on a step's requests, so it is captured apart from the pieces, by layer: that of
decoding requests for each bucket of requests (`DecodeRows`), and that of prompts for bounds of
their number, rows and keys (`PromptRows`). Block tables and lengths are at fixed addresses, where
`CapturedAttention` puts those of a step. What no graph takes is launched eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.engine.execution.piecewise.gaps import Gap
from rorqual.layers.forward_batch import CapturablePrompts, ForwardBatch
from rorqual.ops.interface import AttentionMetadata, TokenPlaces
from rorqual.platforms.base import Platform, Replay

# Rows of a step. 256 more than 2,048 are for requests that decode beside a chunk.
PROMPT_ROWS = (64, 128, 256, 512, 1024, 2304, 4096)
# Of a micro-batch: a little more than half of a full step, and any number.
PART_ROWS = (576, 1088, 2112, 4160, 1 << 20)
MOST_PROMPTS = 16
# Rows that all prompts of a graph would have if each had the most: programs that find nothing.
EMPTY_ROWS = 9216
SHORT = 4  # more prompts than that have at most a part of the rows each
# Packed keys of prompts that continue a cached prefix, for these numbers of rows.
LONG_KEYS = (2048, 4096, 8192)
LONG_ROWS = (64, 512, 2304)
MOST_KEYS = 32768  # of a prompt whose keys are read from their pages
FEW_ROWS = 512  # of one prompt, which programs share the keys of where it may have many


class CapturedRows:
    """Requests of a step at fixed addresses: `step` has them alone, and `graphs` compute one gap
    after the other for their rows."""

    def __init__(self, name: str, pool: KVPool, rows: int, device: torch.device):
        self.name = name
        self.rows = rows
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        nowhere = TokenPlaces(ids, ids, ids)  # not for attention
        self.step = ForwardBatch(ids, ids, nowhere, ids[:0], pool)
        self.graphs: list[Replay] = []

    def works(self, gaps: Sequence[Gap]) -> list[Callable[[], None]]:
        return [partial(self._attend, gap) for gap in gaps]

    def _attend(self, gap: Gap) -> None:
        raise NotImplementedError


class DecodeRows(CapturedRows):
    """So many decoding requests of a step with prompts. tables [requests, columns] int64 and lens
    [requests] int64 hold their block tables and cached entries, of up to `max_len`."""

    def __init__(
        self,
        pool: KVPool,
        max_len: int,
        queries: int,
        tables: Tensor,
        lens: Tensor,
        may_share: bool,
    ):
        requests = tables.shape[0]
        name = f"decode rows {requests} x {queries}"
        super().__init__(name, pool, requests * queries, lens.device)
        self.requests = requests
        self.queries = queries
        self.tables = tables
        self.lens = lens
        each = ((queries,) * requests, (max_len,) * requests)
        segment = AttentionMetadata(tables, lens, *each, exact=False)
        segment.may_share = may_share
        self.step.decode = segment

    def _attend(self, gap: Gap) -> None:
        inputs = (tensor[: self.rows] for tensor in gap.inputs)
        gap.out[: self.rows].copy_(gap.work(self.step, *inputs))

    def hold(self, segment: AttentionMetadata) -> None:
        """The requests of the next replay. Padding has no cached entries."""
        count, columns = segment.tables.shape
        self.tables[:count, :columns].copy_(segment.tables)
        self.lens[:count].copy_(segment.kv_lens)
        self.lens[count:].zero_()


@dataclass(frozen=True, order=True)
class PromptBounds:
    """Of the prompts that a graph takes: their keys, of all together where these are packed, else
    of each; the rows of their step up to the last of theirs; their number; and the rows of one,
    which divide those of the step."""

    keys: int
    rows: int
    requests: int
    longest: int

    def take(self, keys: int, rows: int, requests: int, longest: int) -> bool:
        return (
            keys <= self.keys
            and rows <= self.rows
            and requests <= self.requests
            and longest <= self.longest
        )


def prompt_bounds(
    sizes: Iterable[int], most: int, longest: int, prompts: CapturablePrompts, single: bool
) -> list[PromptBounds]:
    """What is captured for passes of up to `most` rows, the fewest keys, rows and requests first.
    sizes: numbers of rows. longest: keys of a request. single: also for one prompt alone, whose
    keys several programs may share."""
    found = set()
    if prompts.packed is not None:
        most = min(most, prompts.packed)
    for rows in {min(size, most) for size in sizes}:
        few = max(2, min(MOST_PROMPTS, EMPTY_ROWS // rows))
        numbers = [(1, rows), (few, rows)] if single else [(few, rows)]
        if few < MOST_PROMPTS and rows % SHORT == 0:
            numbers.append((MOST_PROMPTS, rows // SHORT))
        for requests, each in numbers:
            if prompts.packed is None:
                found.add(PromptBounds(min(longest, MOST_KEYS), rows, requests, each))
                if requests == 1 and rows <= FEW_ROWS:
                    found.add(PromptBounds(min(longest, rows), rows, requests, each))
                continue
            limit = min(prompts.packed, requests * longest)
            for keys in (rows, *(LONG_KEYS if rows in LONG_ROWS else ())):
                if min(rows, requests * longest) <= min(keys, limit):
                    found.add(PromptBounds(min(keys, limit), rows, requests, each))
    return sorted(found)


class HeldPrompts:
    """Prompts of the next replay, at fixed addresses. tables [requests, columns] int64: block
    tables. numbers [3, requests + 1] int64: first rows, first packed keys, and lengths."""

    def __init__(self, platform: Platform, requests: int, columns: int, rows: int):
        self.platform = platform
        device = platform.device
        self.tables = torch.zeros(requests, columns, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(3, requests + 1, dtype=torch.int64, device=device)
        self.numbers[1, 1:] = torch.iinfo(torch.int32).max  # at first every key is request 0's
        self.places = torch.arange(rows, device=device)
        self.inside = torch.zeros(rows, dtype=torch.bool, device=device)  # rows of prompts

    def hold(self, segment: AttentionMetadata, before: int, bounds: PromptBounds) -> None:
        """before: rows of the step in front of the prompts'. The host knows all lengths, so that
        one copy brings them."""
        count, columns = segment.tables.shape
        most = self.numbers.shape[1]
        rows = [*accumulate(segment.query_lens, initial=before)]
        keys = [*accumulate(segment.max_kv_lens, initial=0)]
        lens = list(segment.max_kv_lens)
        keys += [keys[-1]] * (most - len(keys))
        keys[bounds.requests] = bounds.keys  # the last one owns the rest, which is not read
        rows += [rows[-1]] * (most - len(rows))
        lens += [0] * (most - count)
        self.numbers.copy_(self.platform.to_device(torch.tensor([rows, keys, lens])))
        self.tables[:count, :columns].copy_(segment.tables)


class PromptRows(CapturedRows):
    """Prompts within `bounds`, as `held`. Kernels read starts and lengths from the device, and take
    the host's for bounds."""

    def __init__(self, pool: KVPool, bounds: PromptBounds, held: HeldPrompts):
        super().__init__(f"prompt rows {bounds}", pool, bounds.rows, held.numbers.device)
        self.bounds = bounds
        self.held = held
        count = bounds.requests
        starts, keys, lens = held.numbers
        columns = -(-bounds.keys // pool.spec.page_size)
        full = bounds.rows // bounds.longest
        segment = AttentionMetadata(
            held.tables[:count, :columns],
            lens[:count],
            (*(bounds.longest,) * full, *(0,) * (count - full)),
            (bounds.keys, *(0,) * (count - 1)),
            exact=False,
        )
        segment.query_starts = starts[: count + 1]
        segment.key_starts = keys[: count + 1]
        self.step.prefill = segment

    def _attend(self, gap: Gap) -> None:
        """Other rows of the result stay: those of decoding requests, and padding, which must be
        finite."""
        rows = self.rows
        held = self.held
        inside = held.inside[:rows]
        if gap.index == 0:
            starts = held.numbers[0]
            places = held.places[:rows]
            torch.logical_and(places >= starts[0], places < starts[-1], out=inside)
        out = gap.out[:rows]
        self.step.attention_out = out.view(rows, gap.inputs[0].shape[1], -1)
        found = gap.work(self.step, *(tensor[:rows] for tensor in gap.inputs))
        if found.data_ptr() == out.data_ptr():  # the kernel left other rows alone
            return
        out, found = out.flatten(1), found.flatten(1)
        if out.stride(0) * out.element_size() % 8 == 0:  # four of 16 bits at once
            out, found = out.view(torch.int64), found.view(torch.int64)
        torch.where(inside[:, None], found, out, out=out)


class CapturedAttention:
    """The attention of one forward pass at a time. gaps: of its capture with the most rows.
    number: of the passes that alternate."""

    def __init__(self, platform: Platform, number: int = 0):
        self.platform = platform
        self.number = number
        self.gaps: list[Gap] = []
        self.decodes: dict[tuple[int, int], DecodeRows] = {}  # by requests, and queries of each
        self.prompts: list[PromptRows] = []  # the largest first
        self.packed = False

    def decode_rows(
        self,
        pool: KVPool,
        max_len: int,
        most: int,
        rows: int,
        queries: Iterable[int],
        may_share: bool,
    ) -> list[DecodeRows]:
        """What is captured of decoding: powers of two of up to `most` requests, which may reach
        `max_len` cached entries, with each number of query tokens, in up to so many rows. None
        where attention reads more than its queries (MLA's materialized form)."""
        if len(self.gaps[0].inputs) > 1:
            return []
        sizes = sorted({most, *(1 << power for power in range(most.bit_length()))})
        columns = -(-max_len // pool.spec.page_size)
        device = self.platform.device
        # of whichever is replayed
        tables = torch.zeros(most, columns, dtype=torch.int64, device=device)
        lens = torch.zeros(most, dtype=torch.int64, device=device)
        return [
            DecodeRows(pool, max_len, each, tables[:requests], lens[:requests], may_share)
            for each, requests in product(queries, sizes)
            if requests * each <= rows
        ]

    def prompt_rows(
        self, pool: KVPool, bounds: Collection[PromptBounds], packed: bool
    ) -> list[PromptRows]:
        """What is captured of prompts. packed: their keys."""
        self.packed = packed
        if not bounds:
            return []
        most = max(each.keys for each in bounds)
        held = HeldPrompts(
            self.platform,
            max(each.requests for each in bounds),
            -(-most // pool.spec.page_size),
            max(each.rows for each in bounds),
        )
        # the largest first: the others fit into its memory
        return [PromptRows(pool, each, held) for each in sorted(bounds, reverse=True)]

    def capture(self, wanted: Iterable[CapturedRows], loaded: bool) -> None:
        """Without, attention is launched eagerly. loaded: all kernels are compiled and loaded."""
        for rows in wanted:
            works = rows.works(self.gaps)
            if loaded:  # a layer's products are those of all
                self.platform.warm_up(works[0])
            # the kinds are replayed by turns
            use = f"{type(rows).__name__} {self.number}"
            rows.graphs = self.platform.capture_each(works, not loaded, use)
            if isinstance(rows, DecodeRows):
                self.decodes[rows.requests, rows.queries] = rows
            elif isinstance(rows, PromptRows):
                self.prompts.append(rows)

    def begin(self, step: ForwardBatch) -> Callable[[Gap], None]:
        """Take a step's requests. Returns what computes their attention in a gap, called for the
        gaps of a pass in order before the next step is taken."""
        tokens = step.num_tokens
        split = step.decode_tokens
        decodes = self._decodes_for(step.decode)
        prompts = self._prompts_for(step.prefill, split)
        first = split if decodes is not None else 0
        last = split if prompts is not None else tokens
        rest = step
        graphs: list[list[Replay]] = []
        if decodes is not None and step.decode is not None:
            decodes.hold(step.decode)
            graphs.append(decodes.graphs)
            rest = step.prompts
        if prompts is not None and step.prefill is not None:
            prompts.held.hold(step.prefill, split, prompts.bounds)
            graphs.append(prompts.graphs)
            rest = step.decoding
        padded = slice(tokens, max(tokens, decodes.rows if decodes is not None else 0))

        def between(gap: Gap) -> None:
            if graphs and step.layer_read is not None:  # captured attention does not wait itself
                step.layer_read(gap.index)
            for one in graphs:
                one[gap.index]()
            if first == last:
                self.platform.separate_graphs()
            if padded.start < padded.stop:
                gap.out[padded].zero_()  # padding attended to nothing
            if first < last:
                inputs = (tensor[first:last] for tensor in gap.inputs)
                gap.out[first:last].copy_(gap.work(rest, *inputs))
            if step.layer_written is not None:
                step.layer_written()

        return between

    def _decodes_for(self, segment: AttentionMetadata | None) -> DecodeRows | None:
        """The captured ones of at least as many requests."""
        if segment is None:
            return None
        queries = segment.query_lens[0]
        sizes = [size for size, each in self.decodes if each == queries and size >= len(segment)]
        return self.decodes[min(sizes), queries] if sizes else None

    def _prompts_for(self, segment: AttentionMetadata | None, before: int) -> PromptRows | None:
        """The captured ones with the fewest keys, rows and requests that take these."""
        if segment is None or not self.prompts or not segment.exact:
            return None
        keys = sum(segment.max_kv_lens) if self.packed else max(segment.max_kv_lens)
        longest = max(segment.query_lens)
        asked = (keys, before + segment.tokens, len(segment), longest)
        fits = (rows for rows in reversed(self.prompts) if rows.bounds.take(*asked))
        return next(fits, None)

    def drop(self) -> None:
        """Release everything captured."""
        self.decodes.clear()
        self.prompts.clear()
