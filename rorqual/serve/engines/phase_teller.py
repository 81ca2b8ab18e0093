"""The engine process tells of phases of requests that are traced, once for each phase and never
for a token."""

from __future__ import annotations

import time
from collections.abc import Callable

from rorqual.disagg.kv_transfers import KVTransfers, ReceivedPages
from rorqual.engine.scheduling.sequence import Sequence, TokenOut
from rorqual.serve import messages
from rorqual.serve.engines.sockets import EngineSockets

Details = dict[str, str | int | float]


class PhaseTeller:
    """Phases are grammar, kv_transfer, queue, prefill and decode; a request has those that it
    went through, one after the other."""

    def __init__(self, link: EngineSockets):
        self.link = link
        # by request, while its pages are on their way: since when, and what came
        self.arrivals: dict[str, tuple[float, Callable[[], ReceivedPages]]] = {}

    def _tell(
        self, name: str, request_id: str, arrival: float, start: float, end: float, told: Details
    ) -> None:
        self.link.send(messages.RequestPhase(request_id, name, arrival, start, end, told))

    def grammar(self, add: messages.Add) -> None:
        """It is compiled, or was refused."""
        if add.traced:
            came = add.request.arrival
            self._tell("grammar", add.request.id, came, came, time.monotonic(), {})

    def fetching(self, add: messages.Add, transfers: KVTransfers) -> None:
        """Pages of its prompt are on their way."""
        if add.traced:
            name = add.request.id
            self.arrivals[name] = (time.monotonic(), transfers.received(name))

    def fetched(self, add: messages.Add, error: str) -> None:
        """They are in the cache, as many as came."""
        name = add.request.id
        start, received = self.arrivals.pop(name, (0.0, None))
        if received is None:
            return
        found = received()
        told: Details = {
            "server.address": found.host,
            "server.port": found.port,
            "rorqual.kv.pages": found.pages,
            "rorqual.kv.pages_asked": found.asked,
            "rorqual.kv.bytes": found.size,
            "rorqual.kv.network_seconds": found.seconds,
        }
        if error:
            told["error.type"] = "pages_lost"
            told["rorqual.kv.error"] = error
        self._tell("kv_transfer", name, add.request.arrival, start, time.monotonic(), told)

    def began(self, sequence: Sequence, queued: float, started: float, now: float) -> None:
        """Its first token has come. started: when a step took it in."""
        request = sequence.request
        self._tell("queue", request.id, request.arrival, queued, started, {})
        told: Details = {
            "gen_ai.usage.input_tokens": sequence.prompt_len,
            "gen_ai.usage.cache_read.input_tokens": sequence.num_cached_prompt or 0,
        }
        self._tell("prefill", request.id, request.arrival, started, now, told)

    def ended(self, out: TokenOut, first: float, now: float) -> None:
        sequence = out.sequence
        request = sequence.request
        told: Details = {"gen_ai.usage.output_tokens": len(sequence.tokens) - len(request.tokens)}
        self._tell("decode", request.id, request.arrival, first, now, told)
