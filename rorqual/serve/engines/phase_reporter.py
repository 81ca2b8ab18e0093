"""Reports phases of traced requests from the engine process: one message per phase, none per
token."""

from __future__ import annotations

import time
from collections.abc import Callable

from rorqual.disagg.kv_transfers import KVTransfers, ReceivedPages
from rorqual.engine.scheduling.sequence import Sequence
from rorqual.request import Request
from rorqual.serve import messages
from rorqual.serve.engines.sockets import EngineSockets

Details = dict[str, str | int | float]


class PhaseReporter:
    """Phases are grammar, kv_transfer, queue, prefill and decode; a request reports those it goes
    through, in order."""

    def __init__(self, link: EngineSockets):
        self.link = link
        # by request while its pages are fetched: start time, and its ReceivedPages
        self.arrivals: dict[str, tuple[float, Callable[[], ReceivedPages]]] = {}

    def _send(
        self, name: str, request_id: str, arrival: float, start: float, end: float, details: Details
    ) -> None:
        self.link.send(messages.RequestPhase(request_id, name, arrival, start, end, details))

    def grammar(self, add: messages.Add) -> None:
        """Its grammar was compiled, or rejected."""
        if add.traced:
            came = add.request.arrival
            self._send("grammar", add.request.id, came, came, time.monotonic(), {})

    def fetching(self, add: messages.Add, transfers: KVTransfers) -> None:
        """Pages of its prompt are being fetched."""
        if add.traced:
            name = add.request.id
            self.arrivals[name] = (time.monotonic(), transfers.received(name))

    def fetched(self, add: messages.Add, error: str) -> None:
        """The received pages are in the cache."""
        name = add.request.id
        start, received = self.arrivals.pop(name, (0.0, None))
        if received is None:
            return
        found = received()
        details: Details = {
            "server.address": found.host,
            "server.port": found.port,
            "rorqual.kv.pages": found.pages,
            "rorqual.kv.pages_asked": found.asked,
            "rorqual.kv.bytes": found.size,
            "rorqual.kv.network_seconds": found.seconds,
        }
        if error:
            details["error.type"] = "pages_lost"
            details["rorqual.kv.error"] = error
        self._send("kv_transfer", name, add.request.arrival, start, time.monotonic(), details)

    def began(self, sequence: Sequence, queued: float, started: float, now: float) -> None:
        """Its first token was sampled. started: when it was scheduled."""
        request = sequence.request
        self._send("queue", request.id, request.arrival, queued, started, {})
        details: Details = {
            "gen_ai.usage.input_tokens": sequence.prompt_len,
            "gen_ai.usage.cache_read.input_tokens": sequence.num_cached_prompt or 0,
        }
        self._send("prefill", request.id, request.arrival, started, now, details)

    def ended(self, request: Request, tokens: int, first: float, now: float) -> None:
        details: Details = {"gen_ai.usage.output_tokens": tokens}
        self._send("decode", request.id, request.arrival, first, now, details)
