"""What a server writes about itself: where it is and for what, signed with the secret of those who
look there and good for a while. Who can write to etcd but does not know the secret can delete
records, but make none, and bring back none that is older than SIGNED_SECONDS."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rorqual.registry.address import is_private

PURPOSE = b"rorqual server record 1\0"
SIGNED_SECONDS = 300.0  # as long as a signature is good for; clocks may differ by part of it
MAX_RECORD_BYTES = 2048


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
        fields = {"url": self.url, "role": self.role, "expires": self.expires}
        return sealed(fields, secret, PURPOSE)


def sealed(fields: dict[str, Any], secret: str | bytes, purpose: bytes) -> bytes:
    """A record of `purpose`, signed."""
    text = json.dumps(fields)
    return json.dumps({"record": text, "mac": _mac(secret, text, purpose)}).encode()


def unsealed(value: bytes, secret: str | bytes, purpose: bytes) -> Any:
    """What was signed. Raises BadRecord."""
    if len(value) > MAX_RECORD_BYTES:
        raise BadRecord(f"it has more than {MAX_RECORD_BYTES} bytes")
    try:
        outer = json.loads(value)
        text, mac = outer["record"], outer["mac"]
        genuine = hmac.compare_digest(_mac(secret, text, purpose).encode(), mac.encode())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadRecord("it is no signed record") from None
    if not genuine:
        raise BadRecord("its signature is of another secret")
    try:
        return json.loads(text)
    except ValueError:
        raise BadRecord("it is no signed record") from None


def check_expiry(expires: float) -> None:
    """Raises BadRecord."""
    late = time.time() - expires
    if late > 0:
        raise BadRecord(f"its signature ended {late:.0f} s ago (do the clocks agree?)")
    if not late >= -2 * SIGNED_SECONDS:
        raise BadRecord("its signature ends too far in the future (do the clocks agree?)")


def read_record(value: bytes, secret: str, roles: tuple[str, ...]) -> ServerRecord:
    """Raises BadRecord."""
    found = unsealed(value, secret, PURPOSE)
    try:
        record = ServerRecord(str(found["url"]), str(found["role"]), float(found["expires"]))
        host = urlsplit(record.url).hostname or ""
    except (ValueError, KeyError, TypeError):
        raise BadRecord("it says no URL, role and time") from None
    check_expiry(record.expires)
    if record.role not in roles:
        raise BadRecord(f"its role {record.role!r} is not known")
    if not is_private(host):
        raise BadRecord(f"{record.url} is public; accepted: private addresses, names")
    return record


def _mac(secret: str | bytes, text: str, purpose: bytes = PURPOSE) -> str:
    key = secret.encode() if isinstance(secret, str) else secret
    return hmac.new(key, purpose + text.encode(), hashlib.sha256).hexdigest()
