"""Expert servers (`rorqual experts`) at a router's /admin: they say where they are and what they
hold, and who looks for experts asks. They serve no HTTP, so no request is ever sent to them."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from typing import Any

from rorqual.errors import ConfigError
from rorqual.registry.address import is_private

SECONDS = 3.0  # for an answer
MAX_LIST_BYTES = 4 << 20
RANGES = re.compile(r"all|none|\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?){0,255}")
ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9.-]{1,253}):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class ExpertRecord:
    """address: HOST:PORT, a private one. slots, layers: as --slots and --layers of `rorqual
    experts`. Raises ConfigError."""

    address: str
    slots: str = "all"
    layers: str = "all"

    def __post_init__(self) -> None:
        found = ADDRESS.fullmatch(str(self.address))
        if found is None or not 0 < int(found["port"]) < 65536 or not is_private(found["host"]):
            raise ConfigError(
                f"address={self.address!r} is not accepted; accepted: HOST:PORT, a name or an "
                "address of loopback or of a private network"
            )
        for name in ("slots", "layers"):
            value = getattr(self, name)
            if not isinstance(value, str) or not RANGES.fullmatch(value):
                raise ConfigError(f"{name}={value!r} is no range; accepted: all, or as 0-63,70")


class RegistryError(Exception):
    """A registry does not answer, or says no."""


def register_experts(router: str, secret: str, record: ExpertRecord, seconds: float) -> None:
    """For so long; to be called again before that. Raises RegistryError."""
    fields = {"role": "experts", **asdict(record), "lease_seconds": seconds}
    _ask(f"{router}/admin/register", secret, fields)


def forget_experts(router: str, secret: str, record: ExpertRecord) -> None:
    """They are there no more. Raises RegistryError."""
    _ask(f"{router}/admin/leave", secret, {"role": "experts", "address": record.address})


def find_experts(router: str, secret: str) -> list[ExpertRecord]:
    """Those whose leases have not ended. Raises RegistryError."""
    return list_experts(router, secret)[0]


def list_experts(router: str, secret: str) -> tuple[list[ExpertRecord], str]:
    """Those whose leases have not ended, and the name of the list: another one where the router was
    started anew, and knows nobody of before. Raises RegistryError."""
    found = _ask(f"{router}/admin/experts", secret, None)
    try:
        records = [
            ExpertRecord(one["address"], one["slots"], one["layers"]) for one in found["servers"]
        ]
        return records, str(found["list"])
    except (KeyError, TypeError, ConfigError) as error:
        raise RegistryError(f"{router} answers something else than a list: {error}") from None


def _ask(url: str, secret: str, fields: dict[str, Any] | None) -> Any:
    headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
    data = None if fields is None else json.dumps(fields).encode()
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return json.loads(answer.read(MAX_LIST_BYTES))
    except urllib.error.HTTPError as error:
        text = error.read(300).decode(errors="replace")
        raise RegistryError(f"{url}: it answers {error.code} {text}") from None
    except (OSError, ValueError) as error:
        raise RegistryError(f"{url}: {getattr(error, 'reason', error)}") from None
