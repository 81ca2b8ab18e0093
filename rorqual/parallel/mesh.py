"""The mesh: every rank's groups, by axis name, from a ParallelConfig over an initialized
torch.distributed.

| axis                        | ranks of one stage that form a group                               |
| --------------------------- | ------------------------------------------------------------------ |
| tp                          | an attention group: the same tokens, each rank its heads           |
| dp                          | those with the same place in their attention groups                |
| stage                       | all                                                                |
| dense, embed, head          | blocks of dense_tp, embed_tp, head_tp ranks                        |
| dense_dp, embed_dp, head_dp | of such a block, those with the same place in their attention      |
|                             | groups                                                             |
| expert_tp                   | a block that splits the columns of its experts                     |
| ep                          | those with the same place in their expert_tp blocks: together all  |
|                             | experts                                                            |
| pp                          | across stages: those with the same place in their stages           |
| tokens                      | the same ranks as pp, in a group of its own: tokens go back while  |
|                             | activations go on                                                  |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rorqual.config.model import MoEConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.parallel.collectives import Axis, NullAxis
from rorqual.parallel.exchange_policy import chosen_exchange, shards_tokens
from rorqual.parallel.fake_axis import FakeAxis
from rorqual.parallel.group_axis import GroupAxis
from rorqual.parallel.layout import Layout, Replicated, Sharded
from rorqual.parallel.p2p_memory import P2PAddNorm, P2PMemory, why_not_shared
from rorqual.parallel.shard import Shard

# exchanges that P2PExchange can take over
ON_PEERS = ("low_latency", "allgather_ep", "allgather_tp")
PARTS = ("dense", "embed", "head")
AXES = (
    "tp",
    "dp",
    "stage",
    *PARTS,
    *(f"{part}_dp" for part in PARTS),
    "expert_tp",
    "ep",
    "pp",
    "tokens",
)


def members(sizes: ParallelConfig, rank: int, axis: str) -> tuple[int, ...]:
    """Ranks (0 .. world - 1) of the group of `rank` along `axis`."""
    stage, local = divmod(rank, sizes.stage)
    if axis in ("pp", "tokens"):
        return tuple(range(local, sizes.world, sizes.stage))
    return tuple(stage * sizes.stage + other for other in _within_stage(sizes, local, axis))


def _within_stage(sizes: ParallelConfig, local: int, axis: str) -> range:
    def block(size: int) -> range:
        start = local // size * size
        return range(start, start + size)

    if axis == "tp":
        return block(sizes.tp)
    if axis == "expert_tp":
        return block(sizes.expert_tp)
    if axis == "ep":
        return range(local % sizes.expert_tp, sizes.stage, sizes.expert_tp)
    if axis == "dp":
        return range(local % sizes.tp, sizes.stage, sizes.tp)
    if axis == "stage":
        return range(sizes.stage)
    part = axis.removesuffix("_dp")
    size: int = getattr(sizes, f"{part}_tp")
    if axis == part:
        return block(size)
    start = local // size * size
    return (
        range(start + local % sizes.tp, start + size, sizes.tp)
        if size > sizes.tp
        else range(local, local + 1)
    )


@dataclass(frozen=True)
class WeightsGroup:
    """Ranks that have parts of the same experts' columns, in the order of ep; they send each
    other experts in a group of its own."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        """This rank's place."""
        return self.ranks.index(dist.get_rank())


class ProcessGroups:
    """Process groups by their global ranks, each made once; that of `tokens` apart, for its
    calls must not queue behind others. torch names a group by its ranks and by how many groups
    its process has, so all processes must make as many, in the same order; ranks of one mesh do."""

    def __init__(self, timeout: timedelta | None = None):
        self.timeout = timeout
        self.known: dict[tuple[bool, tuple[int, ...]], dist.ProcessGroup] = {}

    def host_group(self, ranks: Sequence[int]) -> WeightsGroup:
        """Over host memory, whatever else the ranks use; for one thread beside those that
        compute."""
        group = dist.new_group(
            list(ranks), timeout=self.timeout, backend="gloo", use_local_synchronization=True
        )
        return WeightsGroup(group, tuple(ranks))

    def axis(self, name: str, ranks: Sequence[int]) -> Axis:
        if len(ranks) == 1:
            return NullAxis(name)
        key = name == "tokens", tuple(ranks)
        if key not in self.known:
            self.known[key] = dist.new_group(
                list(ranks), timeout=self.timeout, use_local_synchronization=True
            )
        return GroupAxis(name, self.known[key], ranks)


class Mesh:
    """This rank's place: `axes` by name, and the layouts of its steps. `Mesh.single()` stands
    for one device alone."""

    def __init__(self, sizes: ParallelConfig, rank: int, axes: dict[str, Axis]):
        self.sizes = sizes
        self.rank = rank
        self.axes = axes
        self.pp_rank, self.stage_rank = divmod(rank, sizes.stage)
        self.dp_rank, self.tp_rank = divmod(self.stage_rank, sizes.tp)
        self.tp, self.dp, self.stage, self.pp = (axes[name] for name in ("tp", "dp", "stage", "pp"))
        self.weights: WeightsGroup | None = None
        self.stop: Tensor | None = None
        self.leaving: list[threading.Thread] = []
        self.leaving_lock = threading.Lock()

    @staticmethod
    def single() -> Mesh:
        return SINGLE

    @staticmethod
    def of(
        sizes: ParallelConfig,
        ranks: Sequence[int] | None = None,
        groups: ProcessGroups | None = None,
    ) -> Mesh:
        """The mesh over the global ranks `ranks` (all of them if left out), this process among
        them. Collective: all of them call it.

        torch.distributed must be initialized unless sizes.world is 1. Raises ConfigError where
        the numbers of ranks differ."""
        if ranks is None:
            ranks = range(dist.get_world_size() if dist.is_initialized() else 1)
        if len(ranks) != sizes.world:
            raise ConfigError(
                f"tp={sizes.tp} x dp={sizes.dp} x pp={sizes.pp} needs {sizes.world} ranks, "
                f"{len(ranks)} are there"
            )
        if sizes.world == 1:
            return SINGLE
        groups = groups or ProcessGroups()
        rank = list(ranks).index(dist.get_rank())
        axes = {
            name: groups.axis(name, [ranks[member] for member in members(sizes, rank, name)])
            for name in AXES
        }
        mesh = Mesh(sizes, rank, axes)
        if sizes.enable_eplb:
            mesh.weights = groups.host_group([ranks[i] for i in members(sizes, rank, "ep")])
        return mesh

    @staticmethod
    def fake(sizes: ParallelConfig) -> Mesh:
        """Rank 0's place in a mesh that has no other ranks (fake_axis.py). One pipeline stage."""
        assert sizes.pp == 1, "a single stage has none to receive from"
        lengths = {name: len(members(sizes, 0, name)) for name in AXES}
        return Mesh(
            sizes,
            0,
            {
                name: FakeAxis(name, Shard(0, size)) if size > 1 else NullAxis(name)
                for name, size in lengths.items()
            },
        )

    @property
    def is_single(self) -> bool:
        return self.sizes.is_single

    @property
    def first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.sizes.pp - 1

    def allreduce_backend(
        self,
        rows: int,
        hidden: int,
        moe: MoEConfig,
        dtype: torch.dtype,
        device: torch.device,
        share: bool = True,
    ) -> str:
        """How partial sums over tp become the next norm's input, in words, decided here: for
        steps of up to `rows` rows by one kernel over memory that the GPUs of a host share, if
        they can and `share` allows it; else by the process group. Collective."""
        if not isinstance(self.tp, GroupAxis):
            return "local"
        if self.layout([1] * self.sizes.dp, True, moe).sharded:
            return "process group (tokens are sharded: sums are scattered)"
        reason = why_not_shared(self.tp, device) if share else "as configured"
        if reason:
            return f"process group ({reason})"
        self.fuse_all_reduce(rows, hidden, dtype, device)
        return f"one kernel with the norm, up to {rows} rows"

    def fuse_all_reduce(
        self, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """On GPUs of one host: norms over tp take messages of up to rows x columns through
        symmetric memory. Collective."""
        assert isinstance(self.tp, GroupAxis)
        self.tp.fused = P2PAddNorm(self.tp, rows, columns, dtype, device, self._stop_word(device))

    def _stop_word(self, device: torch.device) -> Tensor:
        """Of all memory that this rank shares (ops/triton/comm/p2p_flags.py)."""
        if self.stop is None:
            self.stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        return self.stop

    def let_go(self) -> None:
        """Kernels on this rank's GPU wait for no other rank from now on, and their results mean
        nothing."""
        if self.stop is not None:
            self.stop.fill_(1)

    def abandon(self) -> None:
        """Other ranks are gone, or stand still: collectives end as well. From any thread, and
        returns at once: NCCL tells a group's kernels to end, then waits until nothing captured
        holds a call of the group, which may be long; so each group has a thread of its own."""
        self.let_go()
        groups = {
            id(axis.group): axis for axis in self.axes.values() if isinstance(axis, GroupAxis)
        }
        with self.leaving_lock:
            if self.leaving:
                return
            for axis in groups.values():
                thread = threading.Thread(target=axis.abandon, daemon=True)
                thread.start()
                self.leaving.append(thread)

    def left(self, seconds: float) -> bool:
        """Whether groups that were abandoned are no more, within so many seconds. Captured graphs
        must be gone before."""
        deadline = time.monotonic() + seconds
        with self.leaving_lock:  # another thread may be in the midst of `abandon`
            leaving = list(self.leaving)
        for thread in leaving:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in leaving)

    def all2all_backend(
        self,
        rows: int,
        hidden: int,
        moe: MoEConfig,
        dtype: torch.dtype,
        device: torch.device,
        share: bool = True,
        flights: int = 1,
    ) -> str:
        """The way that decode steps take, in words, decided here: through memory that the GPUs
        of a host share for up to `rows` rows a data-parallel rank, `flights` exchanges at a
        time, if the GPUs can and `share` allows it. Collective."""
        layout = self.layout([1] * self.sizes.dp, True, moe)
        axis = layout.moe_axis
        if layout.exchange not in ON_PEERS or not isinstance(axis, GroupAxis):
            return layout.exchange
        reason = why_not_shared(axis, device) if share else "as configured"
        if (
            not reason
            and layout.exchange != "low_latency"
            and moe.num_shared
            and layout.dense_rows is not None
        ):
            reason = "its rows are those of shared experts as well"
        if reason:
            return f"{layout.exchange} (process group: {reason})"
        from rorqual.ops.triton.comm.dispatch_combine import Areas
        from rorqual.parallel.p2p_dispatch import P2PDispatchBuffers

        most = -(-rows // self.sizes.tp) if layout.sharded else rows
        areas = Areas(axis.size, most, hidden, moe.top_k, dtype.itemsize)
        axis.peers = P2PDispatchBuffers(
            P2PMemory.of(axis, flights * areas.size, device, self._stop_word(device)),
            axis.rank,
            areas,
            dtype,
            flights,
        )
        return f"{layout.exchange} (memory shared by the GPUs, {axis.peers.nbytes / 2**20:.0f} MiB)"

    def dp_ranks(self, part: str) -> range:
        """The data-parallel ranks whose tokens meet in this rank's group of dense, embed or
        head."""
        size = max(getattr(self.sizes, f"{part}_tp"), self.sizes.tp)
        start = self.stage_rank // size * size
        return range(start // self.sizes.tp, (start + size) // self.sizes.tp)

    def layout(self, tokens: Sequence[int], decode: bool, moe: MoEConfig) -> Layout:
        """The layout of one step: `tokens` of every data-parallel rank, the same on all ranks of
        the world; `decode` where no rank brings a chunk of prompt."""
        assert len(tokens) == self.sizes.dp, f"{len(tokens)} token counts for dp={self.sizes.dp}"
        if self.is_single:
            return SINGLE_LAYOUT
        exchange = chosen_exchange(self.sizes, moe, -(-max(tokens) // self.sizes.tp), decode)
        kind = Sharded if shards_tokens(self.sizes, exchange) else Replicated
        return kind(self, tuple(tokens), exchange)


SINGLE = Mesh(ParallelConfig(), 0, {name: NullAxis(name) for name in AXES})
SINGLE_LAYOUT = Layout(SINGLE)
