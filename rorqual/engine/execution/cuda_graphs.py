"""Captured decode steps: the whole step, from reading the device rows to writing the sampled tokens
back. Where some row needs the host (SamplingVariant.FULL), only the forward pass.

For each batch bucket and number of drafts there are a graph of the forward pass, and for each
sampling variant one that samples after it. A second graph costs a step some microseconds; capturing
the forward pass for each variant would double the time that a start spends in capturing. Greedy
steps of few requests, the shortest, are one graph. They are captured before serving or, for batch
sizes not in `cudagraph_capture_sizes`, on first use. A smaller batch is padded with a row whose
block table is all null pages, which are never read.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rorqual.engine.kernels_ahead import Parts
from rorqual.engine.scheduling.buckets import bucket_sizes
from rorqual.engine.scheduling.scheduler_output import SamplingVariant, StepMetadata
from rorqual.parallel.remote.step_calls import StepCalls
from rorqual.parallel.remote.wire import Step
from rorqual.platforms.base import Platform

Body = Callable[[Tensor, SamplingVariant, int], Tensor]
HEAD = 2  # elements before the slots, which start at a multiple of 16 bytes
# the forward pass before what samples after it
CAPTURED = (
    SamplingVariant.GREEDY,
    SamplingVariant.FULL,
    SamplingVariant.PLAIN,
    SamplingVariant.FILTERED,
)
AFTER_FORWARD = (SamplingVariant.PLAIN, SamplingVariant.FILTERED)
ONE_GRAPH = 8  # requests up to which a greedy step is one graph


@runtime_checkable
class TakesLengths(Protocol):
    """A captured step that takes each request's cached length from the host (platforms/npu.py)."""

    def set_lengths(self, lengths: list[int]) -> None: ...


class DecodeGraphs:
    """`body(slots, variant, num_speculative_tokens)` computes one decode step of the rows `slots`
    [bucket] and returns the sampled tokens, [bucket, ...]; for SamplingVariant.FULL only the
    forward pass, and its hidden states. `sample`, with the same arguments, samples from the hidden
    states of the latest body of this bucket and number of drafts for FULL; without it every variant
    is captured as one graph. The first `num_requests` rows are not padding. few_layers: a context
    in which the body launches every kernel, but for a few layers only."""

    def __init__(
        self,
        body: Body,
        platform: Platform,
        most: int,
        padding_slot: int,
        sample: Body | None = None,
        few_layers: Callable[[], AbstractContextManager[None]] | None = None,
    ):
        self.body = body
        self.sample = sample
        self.few_layers = few_layers
        self.calls: StepCalls | None = None  # to expert servers, if any
        self.called: dict[tuple[int, SamplingVariant, int], Step] = {}
        self.platform = platform
        self.padding = padding_slot
        self.buckets = bucket_sizes(most)
        # the number of requests, one unused, the slots: they change together, in one copy
        self.given = torch.full(
            (most + HEAD,), padding_slot, dtype=torch.int64, device=platform.device
        )
        self.slots = self.given[HEAD:]
        self.graphs: dict[tuple[int, SamplingVariant, int], Callable[[], Tensor]] = {}
        self.shown: list[int] = []
        self.loaded = False  # whether all kernels of `capture` are compiled and loaded
        self.warmed: set[tuple[int, int]] = set()

    def capture(
        self,
        variants: tuple[SamplingVariant, ...] = CAPTURED,
        draft_counts: Iterable[int] = (0,),
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Capture every bucket, or those of batch sizes `sizes`; the largest first so that the
        others fit into its memory."""
        for key in self._wanted(variants, draft_counts, sizes):
            if key not in self.graphs:  # the forward pass is captured before what follows it
                self._capture(*key)

    def warm_up(
        self,
        variants: tuple[SamplingVariant, ...],
        draft_counts: Iterable[int],
        sizes: Sequence[int] | None,
        parts: Parts,
    ) -> None:
        """Run what `capture` would capture, once: each size and number of drafts is a part."""
        for count in draft_counts:
            for size in self._sizes(sizes):
                run = partial(self._run_once, variants, size, count)
                parts(f"decode {size}, {count} drafts", run)

    def _run_once(
        self, variants: tuple[SamplingVariant, ...], size: int, num_speculative_tokens: int
    ) -> None:
        slots = self._padding(size)
        sample = self.sample
        if sample is None:
            for variant in variants:
                self.body(slots, variant, num_speculative_tokens)
            return
        self.body(slots, SamplingVariant.FULL, num_speculative_tokens)
        for variant in variants:
            if variant is not SamplingVariant.FULL:
                sample(slots, variant, num_speculative_tokens)

    def _wanted(
        self,
        variants: tuple[SamplingVariant, ...],
        draft_counts: Iterable[int],
        sizes: Sequence[int] | None,
    ) -> Iterator[tuple[int, SamplingVariant, int]]:
        wanted = self._sizes(sizes)
        for num_speculative_tokens, variant in itertools.product(draft_counts, variants):
            yield from ((size, variant, num_speculative_tokens) for size in wanted)

    def _sizes(self, sizes: Sequence[int] | None) -> list[int]:
        """The largest first."""
        wanted = (
            self.buckets
            if sizes is None
            else {self.bucket(size) for size in sizes if size <= self.buckets[-1]}
        )
        return sorted(wanted, reverse=True)

    def bucket(self, size: int) -> int:
        return self.buckets[bisect_left(self.buckets, size)]

    def _capture(
        self,
        size: int,
        variant: SamplingVariant,
        num_speculative_tokens: int,
        late: bool = False,
    ) -> Callable[[], Tensor]:
        """late: on first use, perhaps of a size that `warm_up` has left out."""
        key = (size, variant, num_speculative_tokens)
        graph = None
        apart = variant in AFTER_FORWARD or (variant is SamplingVariant.GREEDY and size > ONE_GRAPH)
        if apart and self.sample is not None and self.calls is None:
            graph = self._capture_after_forward(self.sample, *key, late or not self.loaded)
        self.graphs[key] = graph or self._capture_whole(*key)
        return self.graphs[key]

    def _capture_late(self, key: tuple[int, SamplingVariant, int]) -> Callable[[], Tensor]:
        self.platform.release_memory()  # that eager steps left: a graph has memory of its own
        return self._capture(*key, late=True)

    def _capture_whole(
        self, size: int, variant: SamplingVariant, num_speculative_tokens: int
    ) -> Callable[[], Tensor]:
        slots = self._padding(size)
        key = (size, variant, num_speculative_tokens)
        calls = self.calls
        # a size's first variant has run the forward pass, so the others' kernels are loaded
        same = (size, num_speculative_tokens)
        warm = not self.loaded or calls is not None or same not in self.warmed
        self.warmed.add(same)

        def work() -> Tensor:
            return self.body(slots, *key[1:])

        if warm and self.loaded and calls is None and self.few_layers is not None:
            # with a sampled token, whose product and kernels depend on the size as well
            sampled = variant if self.sample is None else SamplingVariant.GREEDY
            with self.few_layers():
                self.platform.warm_up(lambda: self.body(slots, sampled, num_speculative_tokens))
            warm = False
        with calls.capture_calls() if calls is not None else nullcontext() as found:
            graph = self.platform.capture(work, warm)
        if calls is not None:
            assert found is not None
            self.called[key] = found.step()
            # expert servers capture their side at the first replay; no request should wait for that
            calls.announce_step(self.called[key])
            graph()
        return graph

    def _capture_after_forward(
        self,
        sample: Body,
        size: int,
        variant: SamplingVariant,
        num_speculative_tokens: int,
        warm: bool,
    ) -> Callable[[], Tensor] | None:
        """Capture sampling alone. None where the graph of the forward pass takes more than a
        replay."""
        full = (size, SamplingVariant.FULL, num_speculative_tokens)
        forward = self.graphs.get(full) or self._capture(*full)
        if isinstance(forward, TakesLengths):
            return None
        slots = self._padding(size)
        if warm:
            forward()  # so that the run before capturing samples from hidden states
        sampled = self.platform.capture(
            lambda: sample(slots, variant, num_speculative_tokens), warm
        )

        def replay() -> Tensor:
            forward()
            return sampled()

        return replay

    def _padding(self, size: int) -> Tensor:
        """Padding rows: capturing runs a step a few times, which must not change a request's
        state."""
        self.shown = []
        self.num_requests.fill_(0)
        return self.slots[:size].fill_(self.padding)

    def given_for(self, slots: list[int], size: int) -> list[int]:
        """The first elements of `given` for a replay of `size` rows."""
        return [len(slots), 0, *slots, *[self.padding] * (size - len(slots))]

    @property
    def num_requests(self) -> Tensor:
        """[1] int64 on the device, of the next replay."""
        return self.given[:1]

    def run(self, slots: list[int], common: StepMetadata, lens: Sequence[int] = ()) -> Tensor:
        """What the body returned for these slots; valid until the next run, in stream order. All
        ranks replay the same captured graph, that of the rank with the most rows; a graph that one
        rank lacks is missing on all, since all captured the same ones, so all capture it now and
        their collectives match. lens: cached entries of each, where attention takes them from the
        host."""
        size = self.bucket(max(common.sampled))
        key = (size, common.variant, common.num_speculative_tokens)
        graph = self.graphs.get(key) or self._capture_late(key)
        given = self.given_for(slots, size)
        if given != self.shown[: len(given)]:
            self.shown = []  # in case the copy, or anything before the next line, fails
            rows = self.platform.to_device(torch.tensor(given))
            self.given[: len(given)].copy_(rows, non_blocking=True)
            self.shown = given
        if isinstance(graph, TakesLengths):
            graph.set_lengths([*lens, *[1] * (size - len(slots))])
        if self.calls is not None:
            self.calls.announce_step(self.called[key])
        return graph()[: len(slots)]
