"""The exchanges that `rorqual bench comm` times: over collectives of a process group, and over
memory that the ranks share (`symm`).

Experts cost nothing while the clock runs. What goes through shared memory is compared with the
process group, before it is timed and after: bit for bit, but for all-gathers, whose sums a process
group adds in its own order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rorqual.config.hardware import DATA
from rorqual.config.model import MoEConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import EngineError
from rorqual.ops import reference
from rorqual.ops.rank_rows import destination_mask
from rorqual.ops.reference import ExpertWeights, Weight
from rorqual.ops.select import ops_for
from rorqual.parallel.collectives import Axis
from rorqual.parallel.comm_counters import ROUTING_BYTES, fp8_row_bytes
from rorqual.parallel.exchange import ExpertStore, SlotMap
from rorqual.parallel.exchange_select import make_exchange
from rorqual.parallel.mesh import Mesh, ProcessGroups

WAYS = (("allgather_ep", False), ("alltoall", False), ("low_latency", False), ("low_latency", True))
SHARED = (("allgather_ep", False), ("low_latency", False), ("low_latency", True))
GATHER_TOLERANCE = 2**-5  # of the largest sum: a few roundings of a bf16 sum in another order
PUBLISHED = {"hidden": 7168, "experts": 256, "top_k": 8}  # sizes of DeepEP's published figures

Call = Callable[[], object]
Share = Callable[[Mesh, MoEConfig, Tensor], None]


@dataclass(frozen=True)
class ExchangeCase:
    """`sent`: bytes that leave a rank, if they depend on the routing. peer_us: DeepEP's published
    time for the same."""

    name: str
    axis: Axis
    call: Call
    capturable: bool = True
    sent: int | None = None
    peer_us: float | None = None


@dataclass(frozen=True)
class Sizes:
    """An expert layer over `ranks` ranks, one data-parallel rank each. checked: calls that are
    compared before and after timing."""

    ranks: int
    hidden: int
    experts: int
    top_k: int
    checked: int = 10


def share_cards(mesh: Mesh, moe: MoEConfig, x: Tensor) -> None:
    """Memory shared by GPUs, if these can."""
    mesh.all2all_backend(x.shape[0], x.shape[1], moe, x.dtype, x.device)


class ExchangeLayer:
    """Data-parallel attention over all ranks, whole experts on each, tokens routed at random."""

    def __init__(self, sizes: Sizes, groups: ProcessGroups, x: Tensor, exchange: str, fp8: bool):
        self.x = x
        self.fp8 = fp8
        self.exact = True
        self.moe = MoEConfig(sizes.experts, sizes.top_k, 1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.ids = (
            torch.rand(x.shape[0], sizes.experts, generator=generator)
            .topk(sizes.top_k)
            .indices.to(x.device)
        )
        self.weights = torch.rand(self.ids.shape, generator=generator).to(x.device)
        nothing = Weight(torch.empty(0))
        parallel = ParallelConfig(
            dp=sizes.ranks, ep=sizes.ranks, exchange=exchange, fp8_dispatch=fp8
        )
        self.mesh = Mesh.of(parallel, groups=groups)
        cut = self.mesh.axes["ep"].shard
        slots = SlotMap.identity(sizes.experts)
        self.store = ExpertStore(
            slots,
            ExpertWeights(nothing, nothing),
            self._experts,
            x.device,
            cut,
            self._experts_fp8,
            ops=ops_for(x.device.type),
        )
        self.exchange = make_exchange(parallel, self.moe, self.store)
        self.layout = self.mesh.layout([x.shape[0]] * sizes.ranks, True, self.moe)

    def _experts(self, x: Tensor, places: Tensor, weights: Tensor, *_: Any) -> Tensor:
        """Each expert returns what it gets. While the clock runs nothing is computed."""
        if not self.exact:
            return x
        weight = weights.masked_fill(places < 0, 0).sum(1, keepdim=True)
        return torch.where(weight > 0, x.float() * weight, 0).to(x.dtype)

    def _experts_fp8(
        self, x: Tensor, scale: Tensor, dtype: torch.dtype, places: Tensor, weights: Tensor, *_: Any
    ) -> Tensor:
        """fp8 rows are returned unchanged, as fp8 experts use them directly."""
        if not self.exact:
            return torch.empty(x.shape, dtype=dtype, device=x.device)
        return self._experts(reference.dequantize_activation(x, scale, dtype), places, weights)

    @property
    def axis(self) -> Axis:
        return self.mesh.dp

    def call(self) -> Tensor:
        ticket = self.exchange.dispatch(self.x, self.ids, self.weights, self.layout)
        if self.exchange.counts_first(self.layout):
            self.exchange.send(ticket)
        self.exchange.run_experts(ticket)
        return self.exchange.combine(ticket)

    def timed(self) -> Tensor:
        self.exact = False
        try:
            return self.call()
        finally:
            self.exact = True

    def rows_away(self) -> float:
        """Rows sent to other ranks, mean over ranks; as many are returned."""
        mask = destination_mask(self.ids, self.store.parts(self.axis.size))
        away = mask.sum() - mask[:, self.axis.rank].sum()
        return float(self.axis.all_reduce(away)) / self.axis.size


def exchanges(
    sizes: Sizes, groups: ProcessGroups, x: Tensor, share: Share | None
) -> Iterator[ExchangeCase]:
    """All exchanges over the process group, then, given `share`, those over shared memory."""
    for name, fp8 in WAYS:
        layer = ExchangeLayer(sizes, groups, x, name, fp8)
        yield ExchangeCase(
            f"exchange {name}{' fp8' * fp8}", layer.axis, layer.timed, layer.exchange.capturable
        )
    for name, fp8 in SHARED if share else ():
        assert share is not None
        layer, plain = (ExchangeLayer(sizes, groups, x, name, fp8) for _ in range(2))
        share(layer.mesh, layer.moe, x)
        if layer.axis.p2p_dispatch is not None:
            check(layer, plain, sizes.checked)
            yield from _shared(
                layer, f"{name} symm{' fp8' * fp8}", published(sizes, x) if fp8 else None
            )
            check(layer, plain, sizes.checked)


def _shared(
    layer: ExchangeLayer, name: str, peer: tuple[float, float] | None
) -> Iterator[ExchangeCase]:
    from rorqual.ops.triton.comm import dispatch_combine as kernels
    from rorqual.parallel.p2p_dispatch import P2PDispatchBuffers

    peers = layer.axis.p2p_dispatch
    axis = layer.axis
    x = layer.x
    assert isinstance(peers, P2PDispatchBuffers)
    buffer = peers.buffers[0]
    capacity = x.shape[0]
    columns = x.shape[1]
    place = kernels.ExpertPlacement(len(layer.store.local_slots))
    rows = layer.rows_away()
    picks = ROUTING_BYTES * layer.ids.shape[1]
    row = fp8_row_bytes(columns) if layer.fp8 else columns * x.element_size()
    there = round(rows * (picks + row))
    back = round(rows * columns * x.element_size())

    def dispatch() -> None:
        kernels.dispatch(buffer, x, layer.ids, layer.weights, capacity, place, layer.fp8)
        kernels.recv_dispatch(buffer)

    y = torch.zeros(axis.size * capacity, columns, dtype=x.dtype, device=x.device)

    def combine() -> Tensor:
        kernels.send_combine(buffer, y, capacity)
        return kernels.combine(buffer, x)

    yield ExchangeCase(
        f"exchange {name}", axis, layer.timed, True, there + back, sum(peer) if peer else None
    )
    if not name.startswith("allgather"):  # the same kernels
        yield ExchangeCase(
            f"dispatch {name}", axis, dispatch, True, there, peer[0] if peer else None
        )
        yield ExchangeCase(f"combine {name}", axis, combine, True, back, peer[1] if peer else None)


def check(layer: ExchangeLayer, plain: ExchangeLayer, calls: int) -> None:
    """Raises EngineError, on all ranks, if one of them gets other sums than from the process
    group."""
    generator = torch.Generator().manual_seed(99 + dist.get_rank())
    kept = layer.x
    wrong = 0
    for _ in range(calls):
        layer.x = plain.x = torch.randn(kept.shape, generator=generator).to(kept)
        got = layer.call()
        want = plain.call()
        if layer.layout.exchange == "low_latency":
            wrong += not torch.equal(got, want)
        else:
            wrong += not bool((got - want).abs().max() <= GATHER_TOLERANCE * want.abs().max())
    layer.x = plain.x = kept
    total = int(plain.axis.all_reduce(torch.tensor(wrong, device=kept.device)))
    if total:
        raise EngineError(
            f"{layer.layout.exchange} over shared memory differs from the process group in "
            f"{total} calls"
        )


def published(sizes: Sizes, x: Tensor) -> tuple[float, float] | None:
    """Microseconds of DeepEP's low-latency dispatch (fp8) and combine (bf16) on H200 of one
    host, from the shipped tables."""
    shape = {"hidden": sizes.hidden, "experts": sizes.experts, "top_k": sizes.top_k}
    if shape != PUBLISHED or x.dtype != torch.bfloat16 or not x.is_cuda:
        return None
    rows = json.loads((DATA / "kernels_h200_sglang.json").read_text())["deepep_low_latency"]
    found = {(ranks, tokens): (there, back) for ranks, tokens, there, back in rows}
    return found.get((sizes.ranks, x.shape[0]))
