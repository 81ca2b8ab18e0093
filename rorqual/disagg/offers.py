"""Prompts that are prefilled here and decoded by another engine: rank 0 leases their pages, and
every rank that holds a part of them serves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rorqual.cache.prefix import PrefixCache, page_keys
from rorqual.config.parallel import ParallelConfig
from rorqual.disagg.leases import Leases
from rorqual.disagg.page_sources import Address
from rorqual.disagg.rank_messages import (
    LeaseGrown,
    LeaseOpened,
    LeasesClosed,
    LeaseWritten,
    ToRank,
)
from rorqual.engine.cached_pages import CachedPages, hold_next
from rorqual.engine.scheduling.dp_scheduler import DataParallelInFlight
from rorqual.engine.scheduling.sequence import Sequence


class Offers:
    """broadcast: sends a message to all ranks, in the order of the steps. addresses: of the page
    servers, by rank."""

    def __init__(
        self,
        cache: CachedPages,
        leases: Leases,
        broadcast: Callable[[ToRank], None],
        sizes: ParallelConfig,
        engine_id: str,
    ):
        self.cache = cache
        self.leases = leases
        self.broadcast = broadcast
        self.sizes = sizes
        self.engine_id = engine_id
        self.addresses: list[Address] = []
        self.begun: dict[str, BegunPrompt] = {}
        # leases of requests whose answers wait for other requests; None: not made yet
        self.unanswered: dict[str, bytes | None] = {}
        self.refused = 0  # prompts not leased because too many pages were held

    def offer(self, sequence: Sequence) -> dict[str, Any]:
        """Lease a finished request's pages; returns the kv_transfer_params of its response. Call
        before the next step."""
        request = sequence.request
        outputs = sequence.outputs
        tokens = request.transferred(outputs)
        following = outputs[len(tokens) - len(request.prompt) :]
        dp_rank, pages = self.cache.hold(tokens, request.cache_salt, following)
        prefix = self.cache.prefix(dp_rank)
        name = self._lease(request.id, prefix, dp_rank, pages) if pages else None
        if name is None:
            prefix.release(list(pages.values()))
            self.refused += bool(pages)
        else:
            self.broadcast(LeaseOpened(name, dp_rank, list(pages), list(pages.values()), True))
        params = self._params(name, dp_rank, len(pages) if name else 0)
        return {**params, "first_token": True} if request.hands_over else params

    def _lease(
        self,
        request: str,
        prefix: PrefixCache,
        dp_rank: int,
        pages: dict[bytes, int],
        more: int = 0,
    ) -> bytes | None:
        """See Leases.make."""
        waits = request in self.unanswered
        name = self.leases.make(prefix, dp_rank, pages, more, waits)
        if waits:
            self.unanswered[request] = name
        return name

    def answered(self, request: str, lost: bool) -> None:
        """The answer is sent that this request has waited for, or lost: then nobody reads."""
        name = self.unanswered.pop(request, None)
        if name is not None:
            self.leases.finish(name) if lost else self.leases.begin(name)

    def _params(self, name: bytes | None, dp_rank: int, count: int) -> dict[str, Any]:
        host, port = self.addresses[0]
        return {
            "do_remote_prefill": name is not None,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": name.hex() if name else None,
            "remote_host": host,
            "remote_port": port,
            "remote_num_pages": count,
            "remote_page_size": self.cache.prefix(dp_rank).page_size,
            "tp_size": self.sizes.tp,
            "pp_size": self.sizes.pp,
            "remote_ranks": [list(self.addresses[rank]) for rank in self._ranks(dp_rank)],
        }

    def _ranks(self, dp_rank: int) -> list[int]:
        """The ranks of a data-parallel rank, stage after stage."""
        first = dp_rank * self.sizes.tp
        return [
            stage * self.sizes.stage + first + tp_rank
            for stage in range(self.sizes.pp)
            for tp_rank in range(self.sizes.tp)
        ]

    def settle(self) -> None:
        """Release leases that were read or have expired."""
        self.leases.settle(self.cache.prefixes, lambda names: self.broadcast(LeasesClosed(names)))

    # ---- transfers during prefill

    def announce(self, step: DataParallelInFlight) -> list[tuple[str, dict[str, Any]]]:
        """Before a step is launched: pages that it completes, of requests passed to `begin`, may be
        sent layer by layer. Returns the requests whose first part it computes, and the
        kv_transfer_params of their responses."""
        answers = []
        for part in step.parts:
            for done in part.computed if part is not None else ():
                name = done.sequence.request.id
                begun = self.begun.get(name)
                if begun is None:
                    continue
                if begun.lease is None:
                    params = self._open(begun, by_layer=True)
                    if params is not None:
                        answers.append((name, params))
                if begun.lease in self.leases.open:
                    self._announce(begun, done.stop)
        return answers

    def _announce(self, begun: BegunPrompt, stop: int) -> None:
        assert begun.lease is not None
        prefix = self.cache.prefix(begun.dp_rank)
        length = begun.sequence.prompt_len
        last = begun.full if stop < length else len(begun.keys)
        ends = (min(stop, length - prefix.lookahead) // prefix.page_size) if stop < length else last
        places = range(begun.held, min(ends, last))
        pages = {begun.keys[place]: begun.sequence.pages[place] for place in places}
        if not pages:
            return
        for page in pages.values():
            prefix.hold(page)
        begun.held = places.stop
        self.leases.add(begun.lease, pages, complete=False)
        message = LeaseWritten(begun.lease, begun.dp_rank, list(pages), list(pages.values()))
        self.broadcast(message)

    def begin(self, sequence: Sequence, dp_rank: int) -> None:
        """Its pages may be sent as they are computed."""
        request = sequence.request
        prefix = self.cache.prefix(dp_rank)
        keys = page_keys(request.prompt, request.cache_salt, prefix.page_size, prefix.lookahead)
        full = prefix.full_pages(len(request.prompt))
        self.begun[request.id] = BegunPrompt(sequence, dp_rank, keys, full)

    def advance(self) -> list[tuple[str, dict[str, Any]]]:
        """After each step: add the pages it computed to the leases of begun prompts. Returns the
        requests whose first part is computed, and the kv_transfer_params of their responses."""
        answers = []
        for name, begun in list(self.begun.items()):
            if begun.lease is None and begun.computes and not self._over(name):
                params = self._open(begun)
                if params is not None:
                    answers.append((name, params))
            elif begun.lease in self.leases.open:
                self._grow(begun, self._over(name))
        self.end_over()
        return answers

    def _over(self, name: str) -> bool:
        return name not in self.cache.engine.scheduler.sequences

    def end_over(self) -> None:
        """Finish prompts that are no longer being computed: those without a lease are offered like
        any other, and leases invalidated by an error are closed."""
        for name, begun in list(self.begun.items()):
            lease = None if begun.lease is None else self.leases.open.get(begun.lease)
            if lease is not None and not lease.complete and self._over(name):
                self._grow(begun, True)
            if self._over(name) or (begun.lease is not None and (lease is None or lease.complete)):
                del self.begun[name]

    def _open(self, begun: BegunPrompt, by_layer: bool = False) -> dict[str, Any] | None:
        full = begun.keys[: begun.full]
        prefix = self.cache.prefix(begun.dp_rank)
        # by_layer: called while the engine is launching a step
        pages = hold_next(prefix, full) if by_layer else self.cache.hold_next(begun.dp_rank, full)
        more = len(begun.keys) - len(pages)
        wanted = more and (pages or by_layer)
        request = begun.sequence.request.id
        name = self._lease(request, prefix, begun.dp_rank, pages, more) if wanted else None
        if name is None:
            prefix.release(list(pages.values()))
            return None
        begun.lease = name
        begun.held = len(pages)
        begun.by_layer = by_layer
        held = list(pages.values())
        self.broadcast(LeaseOpened(name, begun.dp_rank, list(pages), held, False, by_layer))
        return self._params(name, begun.dp_rank, len(begun.keys))

    def _grow(self, begun: BegunPrompt, over: bool) -> None:
        assert begun.lease is not None
        full = begun.keys[: begun.full]
        pages = self.cache.hold_next(begun.dp_rank, full[begun.held :])
        begun.held += len(pages)
        # by_layer: all pages may be leased before they are written
        complete = over or (begun.held == len(begun.keys) and not begun.by_layer)
        if over and begun.held == begun.full:
            request = begun.sequence.request
            prompt, salt = request.prompt, request.cache_salt
            outputs = begun.sequence.outputs
            pages |= self.cache.hold_tail(begun.dp_rank, prompt, salt, full, outputs)
        if pages or complete:
            held = list(pages.values())
            self.leases.add(begun.lease, pages, complete)
            self.broadcast(LeaseGrown(begun.lease, begun.dp_rank, list(pages), held, complete))


@dataclass
class BegunPrompt:
    """keys: of its pages, the first `full` of them full ones, of which the lease has `held`. A
    partial last page is added when the request has ended, or with the others where by_layer."""

    sequence: Sequence
    dp_rank: int
    keys: list[bytes]
    full: int
    lease: bytes | None = None
    held: int = 0
    by_layer: bool = False

    @property
    def computes(self) -> bool:
        """Whether a part of it has been computed, beyond what was cached."""
        cached = self.sequence.num_cached_prompt
        return cached is not None and self.sequence.collected > cached
