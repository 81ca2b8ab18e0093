"""What a server says of itself: version, configuration, speculation counters; and flushing its
prefix cache. All of it is optional: a page a server does not have is None, never a failure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rorqual.bench.serving.client import Client
from rorqual.errors import TargetError

# SGLang's two spellings; vLLM has the first in development mode
INFO_PAGES = ("/server_info", "/get_server_info")
FLUSH_PAGES = ("/flush_cache", "/reset_prefix_cache")  # SGLang, vLLM in development mode
LOOPBACK = ("127.0.0.1", "localhost", "::1")
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+([^\s]+)")


@dataclass(frozen=True)
class SpeculationCounters:
    """Totals of speculation since the server started, and a gauge where that is all it has; None
    where it has none."""

    drafts: float | None = None
    accepted: float | None = None
    emitted: float | None = None
    gauge: float | None = None

    def accept_length(self, before: SpeculationCounters) -> tuple[float, str] | None:
        """(mean tokens per verification step since `before`, source of the figure)."""
        if self.drafts is None or before.drafts is None:
            return (self.gauge, "server gauge, not of this run alone") if self.gauge else None
        steps = self.drafts - before.drafts
        if steps <= 0:
            return None
        if self.emitted is not None and before.emitted is not None:
            return (self.emitted - before.emitted) / steps, "server counters"
        if self.accepted is not None and before.accepted is not None:
            return 1 + (self.accepted - before.accepted) / steps, "server counters"
        return None


def parse_counters(text: str) -> SpeculationCounters:
    """Prometheus text. Understood under any prefix: spec_decode_num_drafts with
    spec_decode_num_accepted_tokens (vLLM's names, `_total` or not), a histogram
    ...accept(ed)_length, and the gauge spec_accept_length (SGLang). Series of several engines
    are added."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if match := SAMPLE.match(line):
            name = re.split(r"[:]", match[1])[-1].removeprefix("rorqual_").removesuffix("_total")
            try:
                sums[name] = sums.get(name, 0.0) + float(match[2])
            except ValueError:
                continue
    lengths = next((name for name in sums if re.search(r"accept(ed)?_length_sum$", name)), None)
    if lengths is not None:
        return SpeculationCounters(
            drafts=sums.get(lengths.removesuffix("_sum") + "_count"), emitted=sums[lengths]
        )
    return SpeculationCounters(
        sums.get("spec_decode_num_drafts"),
        sums.get("spec_decode_num_accepted_tokens"),
        gauge=sums.get("spec_accept_length"),
    )


@dataclass(frozen=True)
class ServerFacts:
    """Provenance: the pages as they came."""

    version: Any = None
    info: Any = None
    models: Any = None


async def facts(client: Client, info_path: str | None = None) -> ServerFacts:
    pages = INFO_PAGES if info_path is None else (info_path,)
    info = [await _json(client, page) for page in pages]
    given = next((page for page in info if page is not None), None)
    return ServerFacts(await _json(client, "/version"), given, await _json(client, "/v1/models"))


async def counters(client: Client, path: str) -> SpeculationCounters:
    status, text = await client.page(path)
    return parse_counters(text) if status == 200 else SpeculationCounters()


async def flush(client: Client, path: str) -> str | None:
    """Ask the server to forget cached prefixes; returns the page that did. `path` is auto (try
    what is known), none, or a page, which must then work."""
    if path == "none":
        return None
    known: Sequence[str] = FLUSH_PAGES if path == "auto" else (path,)
    for page in known:
        status, text = await client.page(page, "POST")
        if status in (200, 204):
            return page
    if path != "auto":
        raise TargetError(
            f"flushing the cache at {client.target.url(path)} failed: {status or ''} "
            f"{' '.join(text.split())[:200]}"
        )
    return None


def is_local(base_url: str) -> bool:
    return (urlsplit(base_url).hostname or "") in LOOPBACK


async def _json(client: Client, path: str) -> Any:
    status, text = await client.page(path)
    if status != 200:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None
