"""A server makes itself known to routers (`rorqual route`), again and again for as long as it
serves."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from rorqual.errors import ConfigError

log = logging.getLogger("rorqual.serve")

LEASE_SECONDS = 15.0
TIMEOUT = 3.0
ROLES = {"none": ("replica",), "attention": ("replica",), "both": ("prefill", "decode")}


@dataclass
class Registration:
    """routers: their URLs. url: where they find this server. role: as --role."""

    routers: tuple[str, ...]
    secret: str
    url: str
    role: str

    async def run(self) -> None:
        """Until cancelled. A router that is away is told when it is back."""
        away: set[str] = set()
        while True:
            for router in self.routers:
                for role in ROLES.get(self.role, (self.role,)):
                    fields = {"url": self.url, "role": role, "lease_seconds": LEASE_SECONDS}
                    error = await self._tell(router, "register", fields)
                    if error is not None and router not in away:
                        log.warning("%s does not take this server: %s", router, error)
                    elif error is None and router in away:
                        log.warning("%s takes this server again", router)
                    (away.discard if error is None else away.add)(router)
            await asyncio.sleep(LEASE_SECONDS / 5)

    async def leave(self) -> None:
        """No more requests, please."""
        told = [self._tell(router, "leave", {"url": self.url}) for router in self.routers]
        await asyncio.gather(*told)

    async def _tell(self, router: str, what: str, fields: dict[str, object]) -> str | None:
        """What went wrong, if anything did."""
        return await asyncio.to_thread(self._post, f"{router}/admin/{what}", fields)

    def _post(self, url: str, fields: dict[str, object]) -> str | None:
        headers = {"authorization": f"Bearer {self.secret}", "content-type": "application/json"}
        request = urllib.request.Request(url, json.dumps(fields).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT):
                return None
        except urllib.error.HTTPError as error:
            return f"it answers {error.code} {error.read(300).decode(errors='replace')}"
        except (OSError, ValueError) as error:
            return str(getattr(error, "reason", error))


def read_secret(path: str) -> str:
    """Raises ConfigError."""
    try:
        found = Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"register_secret_file={path!r} cannot be read: {error}") from None
    if not found or not found.isprintable():
        raise ConfigError(f"register_secret_file={path!r} holds no secret of one line")
    return found
