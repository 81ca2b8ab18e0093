"""The mesh: each rank's process groups, by axis name, from a ParallelConfig and an initialized
torch.distributed.

| axis                        | ranks of one stage that form a group                               |
| --------------------------- | ------------------------------------------------------------------ |
| tp                          | an attention group: the same tokens, different heads               |
| dp                          | ranks with the same index in their attention groups                |
| stage                       | all                                                                |
| dense, embed, head          | blocks of dense_tp, embed_tp, head_tp ranks                        |
| dense_dp, embed_dp, head_dp | ranks of such a block with the same index in their attention       |
|                             | groups                                                             |
| expert_tp                   | a block that splits the columns of its experts                     |
| ep                          | ranks with the same index in their expert_tp blocks: together all  |
|                             | experts                                                            |
| pp                          | across stages: ranks with the same index in their stages           |
| tokens                      | the ranks of pp, in a second group: sampled tokens are sent back   |
|                             | while activations are sent forward                                 |
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
from rorqual.parallel.shared.slow_link import SlowLink

# exchanges that P2PExchange can replace
P2P_EXCHANGES = ("low_latency", "allgather_ep", "allgather_tp")
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
    """Ranks with the same columns of different experts, in ep order, in a separate group for moving
    expert weights."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]

    @property
    def rank(self) -> int:
        """This rank's index in `ranks`."""
        return self.ranks.index(dist.get_rank())


class ProcessGroups:
    """Process groups by their global ranks, each created once. `tokens` has its own, since its
    calls must not queue behind others. torch names a group by its ranks and by the number of groups
    of the process, so all processes must create the same groups in the same order; ranks of one
    mesh do."""

    def __init__(self, timeout: timedelta | None = None):
        self.timeout = timeout
        self.known: dict[tuple[bool, tuple[int, ...]], dist.ProcessGroup] = {}

    def host_group(self, ranks: Sequence[int]) -> WeightsGroup:
        """A gloo group over host memory, for a thread beside those that compute."""
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
    """This rank's coordinates: `axes` by name, and the layouts of its steps. `Mesh.single()` is one
    device."""

    def __init__(self, sizes: ParallelConfig, rank: int, axes: dict[str, Axis]):
        self.sizes = sizes
        self.rank = rank
        self.axes = axes
        self.pp_rank, self.stage_rank = divmod(rank, sizes.stage)
        self.dp_rank, self.tp_rank = divmod(self.stage_rank, sizes.tp)
        self.tp, self.dp, self.stage, self.pp = (axes[name] for name in ("tp", "dp", "stage", "pp"))
        self.weights: WeightsGroup | None = None
        self.stop: Tensor | None = None
        self.aborting: list[threading.Thread] = []
        self.aborting_lock = threading.Lock()

    @staticmethod
    def single() -> Mesh:
        return SINGLE

    @staticmethod
    def of(
        sizes: ParallelConfig,
        ranks: Sequence[int] | None = None,
        groups: ProcessGroups | None = None,
    ) -> Mesh:
        """The mesh over the global ranks `ranks` (None: all), which include this process.
        Collective over them.

        torch.distributed must be initialized unless sizes.world is 1. Raises ConfigError if the
        number of ranks is not sizes.world."""
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
        """Rank 0 of a mesh without other ranks (fake_axis.py). One pipeline stage."""
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

    def slow_down(self, link: SlowLink) -> None:
        """For benchmarks: this rank's collectives leave by such a link. Collective."""
        for axis in self.group_axes:
            link.join(axis, self._stop_word)
            axis.link = link

    @property
    def group_axes(self) -> list[GroupAxis]:
        """The axes of several ranks."""
        return [axis for axis in self.axes.values() if isinstance(axis, GroupAxis)]

    def allreduce_backend(
        self,
        rows: int,
        hidden: int,
        moe: MoEConfig,
        dtype: torch.dtype,
        device: torch.device,
        share: bool = True,
    ) -> str:
        """Choose the all-reduce over tp and return its description: for steps of up to `rows` rows
        a fused kernel over memory that the GPUs of a host share, if they can and `share` is set;
        else the process group. Collective."""
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
        """On GPUs of one host: fuse the all-reduce into norms over tp, for messages of up to rows x
        columns. Collective."""
        assert isinstance(self.tp, GroupAxis)
        self.tp.fused = P2PAddNorm(self.tp, rows, columns, dtype, device, self._stop_word(device))

    def _stop_word(self, device: torch.device) -> Tensor:
        """One word for all memory that this rank shares (ops/triton/comm/p2p_flags.py)."""
        if self.stop is None:
            self.stop = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        return self.stop

    def release_kernels(self) -> None:
        """From now on kernels on this rank's GPU do not wait for other ranks; their results are
        invalid."""
        if self.stop is not None:
            self.stop.fill_(1)

    def abort(self) -> None:
        """End all collectives, because other ranks are gone or hang. From any thread; returns at
        once. An NCCL abort stops the group's kernels, then waits until no captured graph uses the
        group, which may take long, so each group is aborted in its own thread."""
        self.release_kernels()
        groups = {id(axis.group): axis for axis in self.group_axes}
        with self.aborting_lock:
            if self.aborting:
                return
            for axis in groups.values():
                thread = threading.Thread(target=axis.abort, daemon=True)
                thread.start()
                self.aborting.append(thread)

    def wait_aborted(self, seconds: float) -> bool:
        """Whether all aborts finish within `seconds`. Captured graphs must be freed before."""
        deadline = time.monotonic() + seconds
        with self.aborting_lock:  # another thread may be inside `abort`
            aborting = list(self.aborting)
        for thread in aborting:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in aborting)

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
        """Choose the exchange of decode steps and return its description: through memory that the
        GPUs of a host share, if they can and `share` is set, for up to `rows` rows per
        data-parallel rank and `flights` exchanges in flight. Collective."""
        layout = self.layout([1] * self.sizes.dp, True, moe)
        axis = layout.moe_axis
        if layout.exchange not in P2P_EXCHANGES or not isinstance(axis, GroupAxis):
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
        axis.p2p_dispatch = P2PDispatchBuffers(
            P2PMemory.of(axis, flights * areas.size, device, self._stop_word(device)),
            axis.rank,
            areas,
            dtype,
            flights,
        )
        size = axis.p2p_dispatch.nbytes / 2**20
        return f"{layout.exchange} (memory shared by the GPUs, {size:.0f} MiB)"

    def dp_ranks(self, part: str) -> range:
        """The data-parallel ranks whose tokens are gathered in this rank's dense, embed or head
        group."""
        size = max(getattr(self.sizes, f"{part}_tp"), self.sizes.tp)
        start = self.stage_rank // size * size
        return range(start // self.sizes.tp, (start + size) // self.sizes.tp)

    def layout(
        self, tokens: Sequence[int], decode: bool, moe: MoEConfig, most: int | None = None
    ) -> Layout:
        """The layout of one step. `tokens` of every data-parallel rank, the same on all ranks of
        the world; `decode`: no rank has a prefill chunk; most: the tokens of a rank that the
        exchange is chosen for, if not the most of these."""
        assert len(tokens) == self.sizes.dp, f"{len(tokens)} token counts for dp={self.sizes.dp}"
        if self.is_single:
            return SINGLE_LAYOUT
        rows = -(-(max(tokens) if most is None else most) // self.sizes.tp)
        exchange = chosen_exchange(self.sizes, moe, rows, decode)
        kind = Sharded if shards_tokens(self.sizes, exchange) else Replicated
        return kind(self, tuple(tokens), exchange)


SINGLE = Mesh(ParallelConfig(), 0, {name: NullAxis(name) for name in AXES})
SINGLE_LAYOUT = Layout(SINGLE)
