"""What a server writes about itself: where it is and for what, signed with the secret of the
routers and good for a while. Who can write to etcd but does not know the secret can delete records,
but make none, and bring back none that is older than SIGNED_SECONDS."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from rorqual.registry.address import is_private

PURPOSE = b"rorqual server record 1\0"
SIGNED_SECONDS = 300.0  # as long as a signature is good for; clocks may differ by part of it
LONGEST_RECORD = 2048  # bytes


class BadRecord(Exception):
    """Why a record does not count."""


@dataclass(frozen=True)
class ServerRecord:
    """expires: when its signature ends, seconds since 1970."""

    url: str
    role: str
    expires: float

    @staticmethod
    def new(url: str, role: str) -> ServerRecord:
        return ServerRecord(url, role, time.time() + SIGNED_SECONDS)

    def key(self, prefix: str) -> str:
        """One for each URL and role, whoever writes it."""
        return f"{prefix}{self.role}/{hashlib.sha256(self.url.encode()).hexdigest()[:32]}"

    def signed(self, secret: str) -> bytes:
        told = json.dumps({"url": self.url, "role": self.role, "expires": self.expires})
        return json.dumps({"record": told, "mac": _mac(secret, told)}).encode()


def read_record(value: bytes, secret: str, roles: tuple[str, ...]) -> ServerRecord:
    """Raises BadRecord."""
    if len(value) > LONGEST_RECORD:
        raise BadRecord(f"it has more than {LONGEST_RECORD} bytes")
    try:
        outer = json.loads(value)
        told, mac = outer["record"], outer["mac"]
        genuine = hmac.compare_digest(_mac(secret, told).encode(), mac.encode())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadRecord("it is no signed record") from None
    if not genuine:
        raise BadRecord("its signature is of another secret")
    try:
        found = json.loads(told)
        record = ServerRecord(str(found["url"]), str(found["role"]), float(found["expires"]))
        host = urlsplit(record.url).hostname or ""
    except (ValueError, KeyError, TypeError):
        raise BadRecord("it says no URL, role and time") from None
    late = time.time() - record.expires
    if late > 0:
        raise BadRecord(f"its signature ended {late:.0f} s ago (do the clocks agree?)")
    if not late >= -2 * SIGNED_SECONDS:
        raise BadRecord("its signature ends too far in the future (do the clocks agree?)")
    if record.role not in roles:
        raise BadRecord(f"its role {record.role!r} is not known")
    if not is_private(host):
        raise BadRecord(f"{record.url} is public; accepted: private addresses, names")
    return record


def _mac(secret: str, told: str) -> str:
    return hmac.new(secret.encode(), PURPOSE + told.encode(), hashlib.sha256).hexdigest()
