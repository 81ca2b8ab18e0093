"""Round-trip time of rows to expert servers over a process group: NCCL on GPUs, with many hops in
one captured graph; gloo on a CPU. The servers are those of handle_hop.py, one per GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rorqual.bench.comm import handle_hop
from rorqual.bench.comm.handle_hop import (
    DTYPE,
    FINGERPRINT,
    LAYERS,
    SILENCE_SECONDS,
    HandleHop,
    HandleHopSetup,
)
from rorqual.config.model import collectives_on
from rorqual.parallel.remote.config import RemoteConfig
from rorqual.parallel.remote.exchange import RemoteLanes
from rorqual.parallel.remote.group.calls import GroupCalls
from rorqual.parallel.remote.group.exchange import GroupExchange
from rorqual.parallel.remote.group.rows import GroupRows
from rorqual.parallel.remote.servers import ExpertServers
from rorqual.platforms.base import Platform

LOOPBACK = "lo"


def bench(setup: HandleHopSetup, forms: Sequence[bool] = (True, False)) -> list[HandleHop]:
    """forms: rows in fp8 or not."""
    return handle_hop.bench(setup, forms, exchanges=_exchanges)


@contextmanager
def _exchanges(
    setup: HandleHopSetup, ports: Sequence[int], secret: str, platform: Platform, fp8: bool
) -> Iterator[list[GroupExchange]]:
    form = GroupRows(setup.hidden, setup.top_k, DTYPE, fp8)
    most = max(setup.rows)
    calls = GroupCalls(
        platform, form, most, 1, LAYERS, setup.experts, lambda address: collectives_on(LOOPBACK)
    )
    config = RemoteConfig(
        tuple(("127.0.0.1", port) for port in ports),
        secret.encode(),
        timeout=SILENCE_SECONDS,
        transport="group",
    )
    servers = ExpertServers(
        config, FINGERPRINT, LAYERS, setup.experts, 1, most, handles=None, group=calls
    )
    try:
        servers.wait_for_all(60)
        calls.decide(servers)
        lanes = RemoteLanes(1)
        yield [
            GroupExchange(servers, lanes, layer, platform.device, fp8, calls) for layer in LAYERS
        ]
        platform.synchronize()
    finally:
        servers.close()
