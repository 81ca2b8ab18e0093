"""Load balancing policies."""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

BLOCK = 512  # bytes of prompt: about 128 tokens, eight pages
BLOCKS = 256  # most blocks of a prompt that are hashed
REMEMBERED = 1 << 17  # prompt prefixes, over all servers
EXCESS = 1.25  # times the average load above which prefix affinity is ignored


class Loaded(Protocol):
    url: str
    in_flight: int


S = TypeVar("S", bound=Loaded)


class Policy:
    """choose: from at least one candidate, for a prompt whose text begins with `key`."""

    def choose(self, servers: Sequence[S], key: bytes) -> S:
        raise NotImplementedError

    def remove_server(self, server: Loaded) -> None:
        """The server was removed."""


class RoundRobin(Policy):
    def __init__(self) -> None:
        self.turn = 0

    def choose(self, servers: Sequence[S], key: bytes) -> S:
        self.turn += 1
        return servers[self.turn % len(servers)]


class LeastLoaded(Policy):
    def choose(self, servers: Sequence[S], key: bytes) -> S:
        least = min(server.in_flight for server in servers)
        return random.choice([server for server in servers if server.in_flight == least])


class PowerOfTwo(Policy):
    """Power of two choices: nearly as even as the least loaded, and without herding where several
    routers share servers (Mitzenmacher 2001)."""

    def choose(self, servers: Sequence[S], key: bytes) -> S:
        drawn = random.sample(servers, min(2, len(servers)))
        return min(drawn, key=lambda server: server.in_flight)


class Prefix(Policy):
    """Cache-aware: the server that last received the prompt's longest known prefix, as its pages
    may be cached there; an unknown prompt goes to the server that its first block hashes to. Loads
    are bounded by EXCESS times the average, but at least one request above it (Mirrokni et al.,
    arXiv 1608.01350)."""

    def __init__(self) -> None:
        self.seen: OrderedDict[bytes, str] = OrderedDict()
        self.spill = PowerOfTwo()

    def choose(self, servers: Sequence[S], key: bytes) -> S:
        chain = beginnings(key)
        by_url = {server.url: server for server in servers}
        known = next((by_url[url] for url in self._went(chain) if url in by_url), None)
        server = known or max(
            servers, key=lambda one: _hash(chain[0] if chain else b"", one.url.encode())
        )
        average = (sum(one.in_flight for one in servers) + 1) / len(servers)
        if server.in_flight + 1 > EXCESS * average + 1:
            server = self.spill.choose(servers, key)
        for block in chain:
            self.seen[block] = server.url
            self.seen.move_to_end(block)
        while len(self.seen) > REMEMBERED:
            self.seen.popitem(last=False)
        return server

    def _went(self, chain: list[bytes]) -> list[str]:
        """Servers that received prefixes of the prompt, the longest first."""
        return [self.seen[block] for block in reversed(chain) if block in self.seen]

    def remove_server(self, server: Loaded) -> None:
        for block in [block for block, url in self.seen.items() if url == server.url]:
            del self.seen[block]


def beginnings(key: bytes) -> list[bytes]:
    """A hash of each prefix of whole blocks, or of the whole key where it is shorter than one
    block."""
    chain: list[bytes] = []
    last = b""
    for at in range(0, max(1, len(key) - BLOCK + 1), BLOCK):
        last = _hash(last, key[at : at + BLOCK])
        chain.append(last)
        if len(chain) == BLOCKS:
            break
    return chain


def _hash(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"\0".join(parts), digest_size=8).digest()


NAMED: dict[str, type[Policy]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "prefix": Prefix,
}
