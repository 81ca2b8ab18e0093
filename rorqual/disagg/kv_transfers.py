"""KV transfers of prompts that are prefilled by one engine and decoded by another: rank 0's side.

Pages are transferred by key: the SHA-256 chain over all tokens before a page's end identifies its
content. The last page may be partial: it holds all but the prompt's last token. The prefill engine
leases a prompt's pages and returns their location (`offer`); the decode engine makes each of its
ranks fetch its part of those not cached, puts the pages that all ranks have received into its
prefix cache, and only then queues the request, which finds them like any cached prefix. So it
starts as a decoding request, with the prompt's last token; after any failure it finds fewer pages
and computes more.

Rank 0 alone decides. All ranks carry out its messages between the steps and in their order
(rank_pages.py), and report the results.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, cast

from rorqual.disagg.arrivals import (
    PLACED_BYTES,
    PLACED_ON_DEVICE,
    Arrived,
    PromptArrivals,
    RemotePrompt,
)
from rorqual.disagg.leases import Leases
from rorqual.disagg.offers import Offers
from rorqual.disagg.page_link import engine_secret
from rorqual.disagg.page_reader import parse_lease
from rorqual.disagg.page_sources import Address, SenderLayout, is_address, read_layout
from rorqual.disagg.rank_messages import (
    LeaseDone,
    LeaseRead,
    PagesFetched,
    ServerStarted,
    ToRank,
    decode,
    encode,
)
from rorqual.disagg.rank_pages import SERVICE, RankPages, cache_shape
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.disagg.transports.installed import HANDLES
from rorqual.engine.cached_pages import CachedPages
from rorqual.engine.engine import Engine
from rorqual.engine.scheduling.dp_scheduler import DataParallelInFlight
from rorqual.engine.scheduling.sequence import Sequence
from rorqual.errors import ConfigError, RequestError, quoted
from rorqual.request import FinishReason, Request

log = logging.getLogger("rorqual.engine")

MAX_WAITING = 1024  # requests whose pages are being fetched
HELD_SHARE = 0.5  # of a data-parallel rank's cache, for other engines
MAX_ID_LENGTH = 64  # characters of an engine's id
MAX_BARRED = 64  # addresses outside kv_peers that are logged


@dataclass(frozen=True)
class ReceivedPages:
    """For a request's trace: `pages` of the `asked` pages of its prompt were received.
    size: bytes on rank 0. seconds: of the slowest rank's fetch."""

    host: str
    port: int
    asked: int
    pages: int
    size: int
    seconds: float


@dataclass
class PageTraffic:
    """Bytes of pages, of all ranks; seconds of ranks' fetches, and how many failed to get all
    pages."""

    received: int = 0
    sent: int = 0
    seconds: float = 0.0
    errors: int = 0


class KVTransfers:
    """`wake` is called from threads when a message has arrived. The constructor returns when all
    ranks can serve and fetch; raises ConfigError where rank 0 cannot, EngineError where another
    cannot."""

    def __init__(self, engine: Engine, config: TransferConfig, wake: Callable[[], None]):
        if not engine.config.enable_prefix_caching:
            raise ConfigError(f"role={config.role!r} needs enable_prefix_caching")
        if engine.worker.alternates:
            raise ConfigError(
                f"role={config.role!r} does not go with pipeline_turns=2 and experts in other "
                "processes: pages are placed while a step still writes"
            )
        self.config = config
        self.engine = engine
        self.wake = wake
        self.engine_id = secrets.token_hex(8)
        self.inbox: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        sizes = engine.config.parallel
        cache = CachedPages(engine)
        secret = engine_secret(config.secret, self.engine_id)
        most = int(HELD_SHARE * engine.worker.num_pages)
        self.leases = Leases(secret, config.lease_seconds, most)
        self.offers = Offers(cache, self.leases, self._broadcast, sizes, self.engine_id)
        ranks = dataclasses.replace(config, secret=secret.hex()).to_json()
        self.pages = cast(
            RankPages, engine.executor.start_service(SERVICE, ranks, self._on_message)
        )
        self.shape = cache_shape(engine.worker)
        page_bytes = self.pages.memory.size
        placed_bytes = PLACED_ON_DEVICE if config.transport == HANDLES else PLACED_BYTES
        self.arrivals = PromptArrivals(
            *(cache, self._broadcast, self._finish, sizes, self.shape, page_bytes, placed_bytes),
            config.transport == HANDLES,
        )
        self.barred: set[Address] = set()  # logged
        self.sent = 0  # pages, or with several ranks parts of pages
        self.bytes = PageTraffic()
        self._wait_for_ranks(sizes.world)
        engine.on_restart = self._restarted
        # called with requests that can be answered before they are computed; set by the server
        self.answer: Callable[[str, dict[str, Any]], None] = lambda name, params: None
        if config.by_layer:
            engine.on_launch = self._announce

    def _on_message(self, rank: int, message: bytes) -> None:
        """On any thread."""
        self.inbox.put((rank, message))
        self.wake()

    def _broadcast(self, message: ToRank) -> None:
        self.engine.executor.send_to_service(encode(message))

    def _wait_for_ranks(self, world: int) -> None:
        """Wait until all ranks have sent their address. A rank that fails ends the group."""
        started: dict[int, Address] = {}
        while len(started) < world:
            self.engine.executor.check()
            while not self.inbox.empty():
                rank, data = self.inbox.get()
                message = decode(data)
                assert isinstance(message, ServerStarted), "nothing else comes first"
                started[rank] = (message.host, message.port)
            time.sleep(0.005)
        self.offers.addresses = [started[rank] for rank in range(world)]

    def _read_inbox(self) -> None:
        while not self.inbox.empty():
            rank, data = self.inbox.get()
            message = decode(data)
            if isinstance(message, PagesFetched):
                self.arrivals.on_pages_fetched(rank, message)
                self.bytes.received += message.size
                self.bytes.seconds += message.seconds
                self.bytes.errors += bool(message.error)
            elif isinstance(message, LeaseRead):
                self.leases.extend(message.lease)
                self.sent += message.pages
                self.bytes.sent += message.size
            else:
                assert isinstance(message, LeaseDone)
                self.leases.finish(message.lease)

    # ---- prompts prefilled here

    def offer(self, sequence: Sequence) -> dict[str, Any] | None:
        """kv_transfer_params for the response to a request that is decoded elsewhere; None also
        where it is handed over and has ended with its first token. Call before the next step."""
        request = sequence.request
        if not self.config.sends or not request.goes_on_elsewhere:
            return None
        if request.hands_over and sequence.finish is not FinishReason.LENGTH:
            return None
        return self.offers.offer(sequence)

    def expect_answer(self, name: str) -> None:
        """A request whose answer waits for others: its lease does not expire before `answered`,
        since nobody can read the pages until then."""
        self.offers.unanswered[name] = None

    def answered(self, names: list[str], lost: bool) -> None:
        """The answer that these requests share is sent now, or lost."""
        for name in names:
            self.offers.answered(name, lost)

    def give_way(self) -> None:
        """Requests wait, and no step can be computed."""
        self.leases.give_way()

    def begin(self, request: Request) -> None:
        """A request was just queued: its pages may be sent while it is computed, where
        configured. One that is handed over is answered with its first token instead."""
        scheduler = self.engine.scheduler
        early = self.config.early and not request.hands_over
        if early and self.config.sends and request.goes_on_elsewhere:
            dp_rank = scheduler.schedulers.index(scheduler.assigned_rank[request.id])
            self.offers.begin(scheduler.sequences[request.id], dp_rank)

    def _announce(self, step: DataParallelInFlight) -> None:
        if self.offers.begun:
            for name, params in self.offers.announce(step):
                self.answer(name, params)

    def advance(self) -> list[tuple[str, dict[str, Any]]]:
        """After each step: requests to answer now, though they are still being computed, and the
        kv_transfer_params of the responses."""
        return self.offers.advance() if self.offers.begun else []

    def settle(self) -> None:
        """Release leases that were read or have expired."""
        self.offers.end_over()
        self._close_leases()

    def _restarted(self) -> None:
        """Called after an error during a step, before any other: all cached pages are lost."""
        self._close_leases()
        self.arrivals.restarted()

    def _close_leases(self) -> None:
        self._read_inbox()
        self.offers.settle()

    # ---- prompts prefilled elsewhere

    def check(self, request: Request) -> None:
        """Raises RequestError where the request needs what this engine does not support."""
        given = request.kv_transfer_params or {}
        for name, able in (
            ("do_remote_decode", self.config.sends),
            ("do_remote_prefill", self.config.fetches),
        ):
            if given.get(name) and not able:
                raise RequestError(
                    f"kv_transfer_params: {name} is not for a server with role={self.config.role!r}"
                )
        if given.get("do_remote_prefill"):
            self._remote(given)

    def _remote(self, given: dict[str, Any]) -> RemotePrompt:
        address = (given.get("remote_host"), given.get("remote_port"))
        if not is_address(address):
            raise RequestError("kv_transfer_params: remote_host and remote_port name no address")
        lease = parse_lease(given.get("remote_request_id"))
        engine_id = given.get("remote_engine_id")
        layout = read_layout(given, cast(Address, address), self._page_size)
        problem = layout if isinstance(layout, str) else layout.problem(self.shape)
        if problem:
            raise RequestError(f"kv_transfer_params: {problem}")
        assert isinstance(layout, SenderLayout)
        if lease is None or not isinstance(engine_id, str) or len(engine_id) > MAX_ID_LENGTH:
            raise RequestError(
                "kv_transfer_params: remote_request_id and remote_engine_id are not what a prefill "
                "server gave"
            )
        secret = engine_secret(self.config.secret, engine_id)
        found = dict.fromkeys((cast(Address, address), *layout.addresses))
        barred = tuple(one for one in found if not self.config.allows(*one))
        return RemotePrompt(cast(Address, address), secret, lease, layout, barred)

    @property
    def _page_size(self) -> int:
        return self.engine.worker.spec.page_size

    def fetch(self, request: Request) -> bool:
        """Start to fetch a request that passed `check`. True where pages are being fetched: queue
        the request once `arrived` returns it."""
        given = request.kv_transfer_params or {}
        if not self.config.fetches or not given.get("do_remote_prefill"):
            return False
        remote = self._remote(given)
        if len(self.arrivals.waiting) >= MAX_WAITING:
            self.arrivals.let_go(remote)
            return False
        started = self.arrivals.start(request, remote)
        if started:
            self._note_barred(remote.barred)
        return started

    def _note_barred(self, addresses: tuple[Address, ...]) -> None:
        """Log each address once, however many requests name it."""
        new = [one for one in addresses if one not in self.barred]
        shown = new[: MAX_BARRED - len(self.barred)]
        if not shown:
            return
        self.barred.update(shown)
        log.warning(
            "pages of prompts are not fetched from %s: not among kv_peers%s",
            ", ".join(quoted(f"{host}:{port}", "") for host, port in shown),
            "; further addresses are not logged" if len(self.barred) == MAX_BARRED else "",
        )

    def _finish(self, remote: RemotePrompt) -> None:
        reader = self.pages.reader
        assert reader is not None
        reader.finish(remote.address, remote.secret, remote.lease)

    def received(self, name: str) -> Callable[[], ReceivedPages]:
        """For a request whose pages are being fetched: call the returned function once it has
        arrived."""
        arrival = self.arrivals.waiting[name]

        def result() -> ReceivedPages:
            size = arrival.placed * self.pages.memory.size
            address = arrival.remote.address
            return ReceivedPages(*address, arrival.wanted, arrival.placed, size, arrival.seconds)

        return result

    def cancel(self, name: str) -> None:
        self.arrivals.cancel(name)

    @property
    def busy(self) -> bool:
        """Whether there are unprocessed messages, or received pages not yet in the cache."""
        return bool(self.arrivals.placing) or not self.inbox.empty()

    def arrived(self) -> list[Arrived]:
        """Requests that may be queued now. Also writes some pages of others to the cache."""
        self._read_inbox()
        if self.arrivals.waiting:
            self.engine.executor.check()  # a dead rank would never report
        return self.arrivals.place()

    def figures(self) -> list[int]:
        """For metrics, in the order of their names (serve/http/prometheus)."""
        arrivals = self.arrivals
        return [
            arrivals.fetched,
            arrivals.failed,
            arrivals.pages_in,
            self.sent,
            self.leases.expired,
            self.offers.refused,
            self.leases.held,
            len(arrivals.waiting),
        ]

    def traffic(self) -> dict[str, list[float]]:
        """By transport, for metrics (serve/http/prometheus): bytes received and sent, seconds
        and errors of fetches."""
        found = self.bytes
        figures = [found.received, found.sent, found.seconds, found.errors]
        return {self.config.transport: figures}

    def close(self) -> None:
        """Close this rank's connections; other ranks' close with their processes."""
        self.pages.close()
