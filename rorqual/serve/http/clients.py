"""Which client a request belongs to, and how much one client may have open at once."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from starlette.types import Scope

from rorqual.request import Request
from rorqual.serve.engines.pool import EXPECTED, EnginePool, expected_tokens
from rorqual.serve.errors import bad_request, not_ready, over_share, queue_full

CLIENT = "rorqual.client"  # scope entry: the client of a request
RESERVE = 8  # 1 / RESERVE of the queue is reserved for clients with no more than that open
SCHEME = b"bearer "
MAX_USER_LENGTH = 64  # characters; longer names are replaced by a digest


class ApiKeys:
    """The accepted keys; each is a separate client."""

    def __init__(self, keys: str | None):
        """keys: comma-separated. None: no key is required."""
        self.keys = [key.strip().encode() for key in (keys or "").split(",") if key.strip()]

    def holder(self, given: bytes) -> str | None:
        """The key's client name, or None if invalid. Compares all keys in constant time."""
        found = None
        for index, key in enumerate(self.keys):
            if hmac.compare_digest(given, key):
                found = f"key {index}"
        return found


def bearer(header: bytes | None) -> bytes | None:
    """The key of an Authorization header, empty where it is of another scheme; the scheme's name
    may have any case."""
    if header is None:
        return None
    return header[len(SCHEME) :].strip() if header[: len(SCHEME)].lower() == SCHEME else b""


def address_of(scope: Scope) -> str:
    client = scope.get("client")
    return f"address {network_of(client[0])}" if client else "address unknown"


def network_of(address: str) -> str:
    """The unit that is counted: an IPv6 address stands for its /64 network."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(found if found.version == 4 else ipaddress.ip_network((found, 64), strict=False))


def user_name(user: str | None) -> str:
    """A user's name, bounded in length."""
    if user is None or len(user) <= MAX_USER_LENGTH:
        return user or ""
    return hashlib.blake2b(user.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def check_room(pool: EnginePool, requests: list[Request], seconds: int) -> None:
    """Raises ApiError where the queue, or the client's share of it, is full: one that may be tried
    again after `seconds`, unless an idle server would not have room either."""
    if not pool.clients:
        raise not_ready("no engine is ready")
    limits = pool.limits
    wanted = len(requests)
    more = sum(map(expected_tokens, requests))
    _check_alone(pool, wanted, more)
    client = requests[0].client
    sequences, tokens = pool.usage.of(client)
    if 0 < limits.client_sequences < sequences + wanted:
        raise over_share(
            f"{sequences} of your sequences are open and {wanted} more were asked for; accepted: "
            f"{limits.client_sequences}",
            seconds,
        )
    if 0 < limits.client_tokens < tokens + more:
        raise over_share(
            f"your open sequences hold {tokens} tokens and {more} more were asked for; accepted: "
            f"{limits.client_tokens}",
            seconds,
        )
    kept = _kept(pool, sequences + wanted)
    if pool.live + wanted > pool.room - kept:
        raise queue_full(
            f"{pool.live} sequences are open and {wanted} more were asked for; "
            f"{_room(pool.rows, limits.waiting, kept)}; try again later",
            seconds,
        )


def _check_alone(pool: EnginePool, wanted: int, tokens: int) -> None:
    """Raises ApiError where the request alone has more than a client, or the server, may ever have
    open: trying again would not help."""
    limits = pool.limits
    if 0 < limits.client_sequences < wanted:
        raise bad_request(
            f"{wanted} sequences were asked for; accepted of one client: "
            f"{limits.client_sequences} (--client-sequences)",
            "n",
        )
    if 0 < limits.client_tokens < tokens:
        raise bad_request(
            f"this request counts as {tokens} tokens, prompts and up to {EXPECTED} of each answer; "
            f"accepted of one client: {limits.client_tokens} (--client-tokens)"
        )
    kept = _kept(pool, wanted)
    rows = pool.most_rows
    if wanted > rows + limits.waiting - kept:
        raise bad_request(
            f"{wanted} sequences were asked for; {_room(rows, limits.waiting, kept)} "
            "(--max-num-seqs, --max-waiting)",
            "n",
        )


def _kept(pool: EnginePool, of_client: int) -> int:
    """The part of the queue that a client with so many open sequences may not take."""
    reserve = pool.limits.waiting // RESERVE
    return reserve if of_client > reserve else 0


def _room(rows: int, waiting: int, kept: int) -> str:
    others = f", {kept} of these for clients with at most {kept} open" if kept else ""
    return f"this server runs {rows} and queues {waiting}{others}"
