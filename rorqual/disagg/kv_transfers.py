"""An engine's part in prompts that are computed by one engine and answered by another.

Whole pages travel, by their keys: the SHA-256 chain over all tokens before a page's end names what
is in it. The engine that computed a prompt keeps its pages under a lease and tells where they are
(`offer`); the one that answers fetches those it has not cached itself, on a thread, puts them into
its prefix cache and only then queues the request, which finds them there as it finds any prefix. So
the rest of the prompt, less than a page, is computed where the answer is; and whatever goes wrong,
the request finds fewer pages and computes more.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from rorqual.cache.page_memory import PageMemory
from rorqual.config.quant import QuantConfig
from rorqual.disagg.leases import Leases
from rorqual.disagg.page_reader import PageFetch, PageReader, lease_name
from rorqual.disagg.page_server import PageServer
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.engine.cached_pages import CachedPages
from rorqual.engine.engine import Engine
from rorqual.engine.scheduling.sequence import Sequence
from rorqual.errors import ConfigError, RequestError
from rorqual.parallel.remote.link import Fingerprint
from rorqual.request import Request

FORMAT = "1"  # of pages as bytes, and of what their keys cover
PLACED_BYTES = 16 * 2**20  # taken into the cache between two steps
MOST_WAITING = 1024  # requests whose pages are on their way
HELD_SHARE = 0.5  # of the cache, for other engines


@dataclass
class TransferStats:
    """Requests whose pages were fetched, and of which not all came; pages; leases that nobody
    read in time, and answers that were offered to nobody since too much was held."""

    fetched: int = 0
    failed: int = 0
    pages_in: int = 0
    unkept: int = 0


@dataclass
class ArrivingPrompt:
    """What of a prompt is on its way: pages from number `first` on, of which `placed` are in the
    cache. requests: those that wait for it, by id; the choices of one call share theirs."""

    prompt: tuple[int, ...]
    salt: str
    fetch: PageFetch
    first: int
    requests: dict[str, Request] = field(default_factory=dict)
    placed: int = 0


@dataclass(frozen=True)
class ReceivedPages:
    """For a request's trace: of `asked` pages of its prompt so many came, from there. seconds: of
    the fetch alone."""

    host: str
    port: int
    asked: int
    pages: int
    size: int  # bytes
    seconds: float


class KVTransfers:
    """`wake` is called from threads when something has come."""

    def __init__(self, engine: Engine, config: TransferConfig, wake: Callable[[], None]):
        if not engine.config.parallel.is_single:
            raise ConfigError(f"role={config.role!r} is for engines of one rank so far")
        if not engine.config.enable_prefix_caching:
            raise ConfigError(f"role={config.role!r} needs enable_prefix_caching")
        self.config = config
        self.cache = CachedPages(engine)
        self.wake = wake
        self.stats = TransferStats()
        self.engine_id = secrets.token_hex(8)
        pool = engine.worker.runner.pool
        self.memory = PageMemory(pool, engine.platform)
        self.leases = Leases(config.lease_seconds, int(HELD_SHARE * pool.num_pages))
        mine = fingerprint(engine)
        self.server = PageServer(config, self.leases, self.memory, mine) if config.sends else None
        self.reader = PageReader(config.secret, self.memory, mine) if config.fetches else None
        self.waiting: dict[str, ArrivingPrompt] = {}
        self.done: SimpleQueue[ArrivingPrompt] = SimpleQueue()
        self.placing: list[ArrivingPrompt] = []

    # ---- prompts computed here

    def offer(self, sequence: Sequence) -> dict[str, Any] | None:
        """For the answer to a request whose tokens go on elsewhere: where its pages are. To be
        called before the next step."""
        request = sequence.request
        if self.server is None or not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return None
        pages = self.cache.hold(request.prompt, request.cache_salt)
        name = self.leases.make(self.cache.prefix, pages) if pages else None
        if name is None:
            self.cache.prefix.release(list(pages.values()))
            self.stats.unkept += bool(pages)
        return {
            "do_remote_prefill": name is not None,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": name.hex() if name else None,
            "remote_host": self.server.host,
            "remote_port": self.server.port,
            "remote_num_pages": len(pages) if name else 0,
        }

    def settle(self) -> None:
        self.leases.settle(self.cache.prefix)

    # ---- prompts computed elsewhere

    def check(self, request: Request) -> None:
        """Raises RequestError where the request asks for what this engine does not do."""
        given = request.kv_transfer_params or {}
        for name, able in (
            ("do_remote_decode", self.server is not None),
            ("do_remote_prefill", self.reader is not None),
        ):
            if given.get(name) and not able:
                raise RequestError(
                    f"kv_transfer_params: {name} is not for a server with role={self.config.role!r}"
                )
        if given.get("do_remote_prefill"):
            self._address(given)

    def _address(self, given: dict[str, Any]) -> tuple[str, int]:
        host = given.get("remote_host")
        port = given.get("remote_port")
        if not isinstance(host, str) or not isinstance(port, int) or not 0 < port < 65536:
            raise RequestError("kv_transfer_params: remote_host and remote_port name no address")
        if not self.config.allows(host, port):
            raise RequestError(
                f"kv_transfer_params: {host}:{port} is not among kv_peers, from which pages may be "
                "fetched"
            )
        if lease_name(given.get("remote_request_id")) is None:
            raise RequestError(
                "kv_transfer_params: remote_request_id is not one that a prefill server gave"
            )
        return host, port

    def fetch(self, request: Request) -> bool:
        """Whether pages of the request are on their way: it is to be queued once `arrived` says
        so. Of a request that `check` has passed."""
        given = request.kv_transfer_params or {}
        if self.reader is None or not given.get("do_remote_prefill"):
            return False
        if len(self.waiting) >= MOST_WAITING:
            return False
        lease = lease_name(given["remote_request_id"])
        assert lease is not None, "checked before"
        prompt, salt = tuple(request.prompt), request.cache_salt
        same = (a for a in self.waiting.values() if a.fetch.lease == lease)
        arrival = next((a for a in same if (a.prompt, a.salt) == (prompt, salt)), None)
        if arrival is None:
            first, keys = self.cache.missing(prompt, salt)
            if not keys:
                return False
            found = PageFetch(self._address(given), lease, keys)
            arrival = ArrivingPrompt(prompt, salt, found, first)
            self.reader.start(found, partial(self._when_done, arrival))
        arrival.requests[request.id] = request
        self.waiting[request.id] = arrival
        return True

    def _when_done(self, arrival: ArrivingPrompt) -> None:
        self.done.put(arrival)
        self.wake()

    def received(self, name: str) -> Callable[[], ReceivedPages]:
        """Of a request whose pages are on their way: what to ask once it has arrived."""
        arrival = self.waiting[name]
        fetch = arrival.fetch

        def told() -> ReceivedPages:
            size = arrival.placed * self.memory.size
            return ReceivedPages(
                *fetch.address, len(fetch.keys), arrival.placed, size, fetch.seconds
            )

        return told

    def cancel(self, name: str) -> None:
        arrival = self.waiting.pop(name, None)
        if arrival is not None:
            del arrival.requests[name]
            if not arrival.requests:
                arrival.fetch.cancelled.set()

    @property
    def busy(self) -> bool:
        """Whether pages are here that are not yet in the cache."""
        return bool(self.placing) or not self.done.empty()

    def arrived(self) -> list[tuple[Request, str]]:
        """Requests that may be queued now, and why not all of a request's pages came. Takes in
        some pages of others."""
        while not self.done.empty():
            self.placing.append(self.done.get())
        found: list[tuple[Request, str]] = []
        budget = max(1, PLACED_BYTES // self.memory.size)
        while self.placing and budget > 0:
            arrival = self.placing[0]
            if not arrival.requests:  # cancelled
                del self.placing[0]
                continue
            left = arrival.fetch.found - arrival.placed
            count = min(left, budget)
            placed = self._place(arrival, count) if count else 0
            budget -= max(1, placed)
            arrival.placed += placed
            if placed == count == left or placed < count:
                del self.placing[0]
                error = self._end(arrival)
                for name, request in arrival.requests.items():
                    del self.waiting[name]
                    found.append((request, error))
        return found

    def _place(self, arrival: ArrivingPrompt, count: int) -> int:
        rows = arrival.fetch.rows
        assert rows is not None
        start = arrival.placed

        def write(pages: list[int], after: int) -> None:
            self.memory.write(pages, rows[start + after : start + after + len(pages)])

        first = arrival.first + start
        return self.cache.keep(arrival.prompt, arrival.salt, first, count, write)

    def _end(self, arrival: ArrivingPrompt) -> str:
        fetch = arrival.fetch
        self.stats.fetched += len(arrival.requests)
        self.stats.pages_in += arrival.placed
        if arrival.placed == len(fetch.keys):
            return ""
        self.stats.failed += len(arrival.requests)
        why = fetch.error or "the cache has no room for them"
        return f"{arrival.placed} of {len(fetch.keys)} pages of the prompt came: {why}"

    def figures(self) -> list[int]:
        """For metrics, in the order of their names (serve/http/prometheus)."""
        stats = self.stats
        sent = self.server.sent if self.server is not None else 0
        leases = self.leases
        return [
            stats.fetched,
            stats.failed,
            stats.pages_in,
            sent,
            leases.expired,
            stats.unkept,
            leases.held,
            len(self.waiting),
        ]

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        if self.reader is not None:
            self.reader.close()


def fingerprint(engine: Engine) -> Fingerprint:
    """All that must be equal for one engine's pages to be another's."""
    config = engine.config
    model = dataclasses.asdict(engine.model_config)
    spec = engine.worker.spec
    planes = [[dataclasses.asdict(plane) for plane in layer] for layer in spec.layers]
    quant: QuantConfig | None = engine.model_config.quant
    return {
        "format": FORMAT,
        "model": _digest(model),
        "weights": f"random {config.seed}" if config.weights == "random" else "of a checkpoint",
        "dtype": engine.dtype,
        "quantization": quant.describe() if quant is not None else "none",
        "cache": f"{spec.layers[0][0].dtype} {_digest(planes)}",
        "page_size": str(spec.page_size),
        "modules": str(engine.worker.mtp_layers),
    }


def _digest(found: Any) -> str:
    data = json.dumps(found, sort_keys=True, default=str).encode()
    return hashlib.sha256(data).hexdigest()[:16]
