"""How one rank of an engine calls expert servers: the transport, what all ranks agree on about it,
and the exchange of each layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from rorqual.config.model import ModelConfig, collectives_on
from rorqual.engine.config import EngineConfig
from rorqual.engine.distributed.network import interface_of
from rorqual.errors import ConfigError
from rorqual.models.fingerprint import expert_fingerprint
from rorqual.parallel.collectives import gather_texts
from rorqual.parallel.mesh import Mesh
from rorqual.parallel.remote.config import RemoteConfig
from rorqual.parallel.remote.discovery import ExpertDiscovery
from rorqual.parallel.remote.exchange import MissedExperts, RemoteExchange, RemoteLanes
from rorqual.parallel.remote.group.calls import GroupCalls
from rorqual.parallel.remote.group.exchange import GroupExchange
from rorqual.parallel.remote.group.rows import GroupRows
from rorqual.parallel.remote.handle_exchange import HandleExchange
from rorqual.parallel.remote.handles import HandleCalls
from rorqual.parallel.remote.servers import ExpertServers
from rorqual.parallel.remote.step_calls import StepCalls
from rorqual.parallel.remote.wire import MAX_SHARED_ROWS, ranges
from rorqual.platforms.base import Platform

log = logging.getLogger("rorqual.engine")
MAX_REASON = 1000  # bytes of a rank's reason


class RemoteExperts:
    """Connecting to the servers starts with construction. dtype: of hidden states. layers: those
    with routed experts. rows: most of a step; decode_rows: most of a decode step. calls_at_once:
    concurrent calls to one server. `misses`: with several ranks, the experts that this rank found
    missing in a step."""

    def __init__(
        self,
        remote: RemoteConfig,
        config: EngineConfig,
        model: ModelConfig,
        dtype: torch.dtype,
        layers: Sequence[int],
        rows: int,
        decode_rows: int,
        calls_at_once: int,
        platform: Platform,
        mesh: Mesh,
    ):
        self.config = config
        self.model = model
        self.dtype = dtype
        self.layers = layers
        self.rows = rows
        self.decode_rows = decode_rows
        self.calls_at_once = calls_at_once
        self.platform = platform
        self.mesh = mesh
        self.ue8m0 = model.quant is not None and model.quant.ue8m0_rows
        self.no_handles = ""  # why shared memory is not used
        self.handles = self._handles()
        self.group = self._group()
        self.lanes = RemoteLanes(calls_at_once)
        self.misses = None if mesh.is_single else MissedExperts()
        self.servers = ExpertServers(
            remote,
            expert_fingerprint(
                config.model, model, dtype, config.seed if config.weights == "random" else None
            ),
            layers,
            model.moe.num_experts,
            calls_at_once,
            rows,
            self.handles,
            self.group,
        )
        if remote.registry is not None:
            ExpertDiscovery(self.servers, remote.registry, remote.servers).start()

    # ---- the transport

    @property
    def shared_rows(self) -> int:
        """Most rows of a call that does not go over tcp."""
        return min(self.rows, MAX_SHARED_ROWS)

    def _handles(self) -> HandleCalls | None:
        """Calls over shared memory, where this engine can make them."""
        transport = self.config.expert_transport
        if transport in ("tcp", "group"):
            return None
        reason = self._why_no_handles(transport == "handles")
        if reason:
            if transport == "handles":
                raise ConfigError(f"expert_transport='handles': {reason}; accepted: auto, tcp")
            self.no_handles = reason
            return None
        from rorqual.ops.triton.comm.remote_dispatch import LaneAreas

        moe = self.model.moe
        areas = LaneAreas(self.shared_rows, self.model.hidden_size, moe.top_k, self.dtype.itemsize)
        return HandleCalls(
            self.platform,
            areas,
            self.dtype,
            self.config.fp8_dispatch,
            self.calls_at_once,
            self.layers,
            moe.num_experts,
            noted=not self.mesh.is_single,
        )

    def _why_no_handles(self, asked: bool) -> str:
        if self.platform.name != "cuda" and not asked:
            return f"memory of {self.platform.name} is not shared so"
        if self.decode_rows > MAX_SHARED_ROWS:
            return f"steps have up to {self.decode_rows} rows"
        return ""

    def _group(self) -> GroupCalls | None:
        """Calls by process group messages, where configured."""
        if self.config.expert_transport != "group":
            return None
        if self.decode_rows > MAX_SHARED_ROWS:
            raise ConfigError(
                f"expert_transport='group': steps have up to {self.decode_rows} rows; accepted: "
                f"{MAX_SHARED_ROWS}"
            )
        moe = self.model.moe
        hidden = self.model.hidden_size
        fp8 = self.config.fp8_dispatch
        form = GroupRows(hidden, moe.top_k, self.dtype, fp8, self.ue8m0)
        return GroupCalls(
            self.platform,
            form,
            self.shared_rows,
            self.calls_at_once,
            self.layers,
            moe.num_experts,
            _collectives_at,
        )

    def decide(self) -> str:
        """Choose the transport; returns its description. Collective."""
        if self.group is not None:
            with self.platform.stream(), torch.inference_mode():
                self.group.decide(self.servers)
            log.info("expert servers are called by a process group over %s", self.group.backend)
            return f"expert servers in a process group over {self.group.backend}"
        if self.handles is not None:
            must = self.config.expert_transport == "handles"
            with self.platform.stream(), torch.inference_mode():
                self.handles.decide(self.servers, must, self._agree_on_reasons)
            self.no_handles = self.handles.why
            if self.no_handles:
                self.servers.wait_for_all(self.config.expert_wait)  # some reconnect
        because = f" ({self.no_handles})" if self.no_handles else ""
        transport = "shared memory" if self.uses_handles else f"tcp{because}"
        log.info("expert servers are called over %s", transport)
        return f"expert servers over {transport}"

    def describe_tcp(self) -> str:
        """After the loss of a group, in the format of `decide`."""
        assert self.group is not None
        return f"expert servers over tcp ({self.group.why})"

    @property
    def uses_handles(self) -> bool:
        return self.handles is not None and self.handles.on

    @property
    def calls(self) -> StepCalls | None:
        """Launches a step's calls from the device; None where the host does."""
        return self.handles if self.uses_handles else self.group

    @property
    def capturable(self) -> bool:
        """Whether a step including its calls can be captured as one graph."""
        return self.calls is not None and self.calls.on

    @property
    def piecewise_rows(self) -> int:
        """Most rows of a step that can be captured piecewise; 0: none."""
        return self.shared_rows if self.uses_handles else 0

    # ---- the model's

    def exchange(self, layer: int) -> RemoteExchange | HandleExchange:
        device = self.platform.device
        fp8 = self.config.fp8_dispatch
        if self.group is not None:
            return GroupExchange(self.servers, self.lanes, layer, device, fp8, self.group)
        plain = RemoteExchange(
            self.servers, self.lanes, layer, device, fp8, self.misses, self.ue8m0
        )
        return plain if self.handles is None else HandleExchange(plain, self.handles)

    # ---- what ranks agree on

    def agree_on_misses(self) -> Callable[[], str]:
        """After a step: which ranks found no holder of an expert or lost a server, so that all
        ranks drop the step; empty where none did. Over shared memory only the device knows, so the
        device sums the ranks' flags, and the host reads them when it collects the step.
        Collective."""
        assert self.misses is not None
        own = self.misses.take()
        stage = self.mesh.stage
        missed = torch.zeros(stage.size, dtype=torch.int32, device=self.platform.device)
        if self.handles is not None and self.handles.on:
            self.handles.note(own is not None, missed[stage.rank : stage.rank + 1])
        else:
            missed[stage.rank] = own is not None
        fetched = self.platform.fetch(stage.all_reduce(missed))

        def why() -> str:
            ranks = fetched().nonzero().flatten().tolist()
            if not ranks:
                return ""
            if own is not None:
                return str(own)
            if stage.rank in ranks and self.handles is not None:
                return self.handles.describe_failure()
            return f"rank {ranges(ranks)} found no holder of an expert, or lost a server"

        return why

    def _agree_on_reasons(self, own: str) -> str:
        """The reasons that ranks gave, joined; empty where none gave one. Collective where there
        are several ranks."""
        stage = self.mesh.stage
        if stage.size == 1 or self.config.single_rank_bench:
            return own
        short = own.encode()[:MAX_REASON].decode(errors="replace")
        reasons = gather_texts(stage, short, self.platform.device)
        return "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why)


def _collectives_at(address: str) -> None:
    """Make communicators use the interface that has this address."""
    interface = interface_of(address)
    if interface is not None:
        collectives_on(interface)
