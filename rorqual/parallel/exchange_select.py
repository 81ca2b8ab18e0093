"""An exchange that selects another one for each step; all of them use the same experts, tables and
counters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rorqual.config.model import MoEConfig
from rorqual.config.parallel import REMOTE, ParallelConfig
from rorqual.parallel.exchange import Exchange, ExpertStore, LocalExchange, StoreExchange
from rorqual.parallel.exchange_alltoall import AllToAllExchange, FusedExchange, LowLatencyExchange
from rorqual.parallel.exchange_gather import AllGatherExchange
from rorqual.parallel.exchange_p2p import P2PExchange
from rorqual.parallel.exchange_policy import chosen_exchange, possible_exchanges
from rorqual.parallel.layout import Layout

KINDS: dict[str, type[StoreExchange]] = {
    "local": LocalExchange,
    "allgather_tp": AllGatherExchange,
    "allgather_ep": AllGatherExchange,
    "alltoall": AllToAllExchange,
    "low_latency": LowLatencyExchange,
}


def captures_decode(sizes: ParallelConfig, moe: MoEConfig) -> bool:
    """Whether a device graph can capture decode steps. Decided from the configuration, so that all
    ranks agree: a pipeline stage may have no experts to ask."""
    name = chosen_exchange(sizes, moe, 1, decode=True)
    return name != REMOTE and KINDS[name].capturable


def make_exchange(
    sizes: ParallelConfig, moe: MoEConfig, store: ExpertStore, fused: Any = None
) -> Exchange:
    """The exchange of one layer, for all exchanges that steps of this configuration may use. fused:
    the device's dispatch and combine operators, if it has them."""
    names = possible_exchanges(sizes, moe)
    made = {name: _make(name, sizes, store, moe.num_shared > 0, fused) for name in names}
    if len(made) == 1:
        return made[names[0]]
    return SelectedExchange(store, made, captures_decode(sizes, moe))


def _make(
    name: str, sizes: ParallelConfig, store: ExpertStore, shared: bool, fused: Any
) -> Exchange:
    if name == "low_latency" and fused is not None:
        return FusedExchange(store, fused)
    if fused is not None and name in ("allgather_tp", "allgather_ep"):
        return AllGatherExchange(store, shared)
    if name == "local":
        return LocalExchange(store)
    if name == "alltoall":
        return AllToAllExchange(store)
    if name == "low_latency":
        return P2PExchange(
            store, LowLatencyExchange(store, sizes.fp8_dispatch), False, shared, sizes.fp8_dispatch
        )
    return P2PExchange(store, AllGatherExchange(store, shared), True, shared)


class SelectedExchange(StoreExchange):
    """Each step uses the exchange that its layout names."""

    def __init__(self, store: ExpertStore, made: dict[str, Exchange], capturable: bool):
        super().__init__(store)
        self.made = made
        self.capturable = capturable

    def dispatch(
        self, x: Tensor, ids: Tensor, weights: Tensor, layout: Layout
    ) -> tuple[Exchange, Any]:
        exchange = self.made[layout.exchange]
        return exchange, exchange.dispatch(x, ids, weights, layout)

    def takes_absent(self, x: Tensor, top_k: int, layout: Layout) -> bool:
        return self.made[layout.exchange].takes_absent(x, top_k, layout)

    def counts_first(self, layout: Layout) -> bool:
        return self.made[layout.exchange].counts_first(layout)

    def send(self, ticket: tuple[Exchange, Any]) -> None:
        ticket[0].send(ticket[1])

    def dense_rows(self, ticket: tuple[Exchange, Any]) -> Tensor | None:
        return ticket[0].dense_rows(ticket[1])

    def run_experts(self, ticket: tuple[Exchange, Any], dense: Tensor | None = None) -> None:
        ticket[0].run_experts(ticket[1], dense)

    def combine(self, ticket: tuple[Exchange, Any], base: Tensor | None = None) -> Tensor:
        return ticket[0].combine(ticket[1], base)
