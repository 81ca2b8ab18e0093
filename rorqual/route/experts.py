"""Expert servers that registered here. The router lists them and sends them nothing."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict
from typing import Any

from rorqual.registry.experts import ExpertRecord
from rorqual.route.answers import RouteError
from rorqual.route.config import MAX_SERVERS

EXPERTS = "experts"  # their role


class ExpertList:
    """Expert servers by address, each until its lease ends. name: identifies this list; new after a
    restart."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(8)
        self.known: dict[str, tuple[ExpertRecord, float]] = {}

    def join(self, record: ExpertRecord, seconds: float) -> dict[str, Any]:
        """Register, or renew, possibly with other experts."""
        self._end_leases()
        if record.address not in self.known and len(self.known) >= MAX_SERVERS:
            raise RouteError(503, f"there are {MAX_SERVERS} servers already", "too_many_servers")
        self.known[record.address] = (record, time.monotonic() + seconds)
        return self._as_json(record.address)

    def leave(self, address: str) -> dict[str, Any]:
        self._end_leases()
        if self.known.pop(address, None) is None:
            raise RouteError(404, f"{address!r:.300} is no expert server here", "no_such_server")
        return {"address": address}

    def as_json(self) -> list[dict[str, Any]]:
        self._end_leases()
        return [self._as_json(address) for address in sorted(self.known)]

    def _as_json(self, address: str) -> dict[str, Any]:
        record, end = self.known[address]
        return {**asdict(record), "lease_seconds": round(end - time.monotonic(), 1)}

    def _end_leases(self) -> None:
        now = time.monotonic()
        self.known = {
            name: (record, end) for name, (record, end) in self.known.items() if end > now
        }
