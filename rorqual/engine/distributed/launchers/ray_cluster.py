"""Ranks on the hosts of a Ray cluster. Ray finds the hosts, reserves GPUs or processors and starts
the processes, which then connect over the authenticated channel like any others. Rank 0 stays in
the calling process, on a host of the cluster.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from rorqual.config.model import visible_device
from rorqual.engine.config import EngineConfig
from rorqual.engine.distributed.channel import Channel
from rorqual.engine.distributed.handshake import PeerIdentity
from rorqual.engine.distributed.launchers.placement import assign
from rorqual.engine.distributed.launchers.ray_actor import Starter
from rorqual.engine.distributed.launchers.remote import RemoteLauncher
from rorqual.engine.distributed.worker_handle import ConnectedWorker
from rorqual.errors import ConfigError, EngineError
from rorqual.platforms import device_of

RESERVE_SECONDS = 120.0  # until the cluster has reserved everything
ANSWER_SECONDS = 60.0  # until an actor responds
CHECK_EVERY = 10  # in tenths of a second, the listener's interval


def _ray() -> Any:
    """Ray, connected to the cluster that RAY_ADDRESS names, or to this host's."""
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError("launcher='ray' needs the package 'ray'; install rorqual[ray]") from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=True, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            first = str(error).splitlines()[0]
            raise ConfigError(
                f"launcher='ray' found no cluster ({first}); start one with `ray start`, or "
                "set RAY_ADDRESS"
            ) from None
    return ray


class RayLauncher(RemoteLauncher):
    def __init__(self, config: EngineConfig):
        self.ray = _ray()
        self.has_gpus = device_of(config.device).type == "cuda"
        self.actors: list[Any] = []
        self.group: Any = None
        self.waits = 0
        super().__init__(config)

    @property
    def _peer(self) -> str:
        """The cluster's name for this host: the address that its other hosts use."""
        return str(self.ray.util.get_node_ip_address())

    def device_index(self) -> int:
        """The first GPU of rank 0's placement, among those this process sees."""
        if not self.has_gpus:
            return 0
        (given,) = self.ray.get(self.actors[0].place.remote(), timeout=ANSWER_SECONDS)[1]
        return visible_device(given)

    def _announce(self, port: int, secret: bytes | None) -> None:
        self.group, nodes = self._reserve()
        places = assign(nodes, self.config.tp)
        self.actors = [self._actor(place) for place in places]
        given = None if secret is None else secret.decode()
        starts = [
            actor.start.remote(self.address, port, rank, self.world, given, self.config.secret_file)
            for rank, actor in enumerate(self.actors)
            if rank
        ]
        self._get(starts)

    def _reserve(self) -> tuple[Any, list[str]]:
        """A placement group with one bundle per rank, the first on this host; and each bundle's
        node."""
        need = {"GPU": 1, "CPU": 1} if self.has_gpus else {"CPU": 1}
        here = f"node:{self.ray.util.get_node_ip_address()}"
        bundles = [{**need, here: 0.001}, *([need] * (self.world - 1))]
        group = self.ray.util.placement_group(bundles, strategy="PACK")
        try:
            self.ray.get(group.ready(), timeout=RESERVE_SECONDS)
        except self.ray.exceptions.GetTimeoutError:
            self.ray.util.remove_placement_group(group)
            free = {
                name: amount
                for name, amount in self.ray.available_resources().items()
                if name in need
            }
            wanted = {name: amount * self.world for name, amount in need.items()}
            raise ConfigError(
                f"the cluster does not have {wanted} for {self.world} ranks, one on this "
                f"host; free: {free}"
            ) from None
        found = self.ray.util.placement_group_table(group)["bundles_to_node_id"]
        return group, [found[place] for place in range(self.world)]

    def _actor(self, place: int) -> Any:
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self.group, place
        )
        options = {
            "num_cpus": 1,
            "num_gpus": int(self.has_gpus),
            "max_restarts": 0,
            "scheduling_strategy": strategy,
        }
        return self.ray.remote(**options)(Starter).remote()

    def _get(self, calls: list[Any]) -> list[Any]:
        try:
            return list(self.ray.get(calls, timeout=ANSWER_SECONDS))
        except self.ray.exceptions.RayError as error:
            raise EngineError(
                f"Ray could not start a rank: {str(error).splitlines()[-1]}"
            ) from None

    def _check(self) -> None:
        """Raises if a rank's process has ended."""
        self.waits += 1
        if self.waits % CHECK_EVERY:
            return
        for rank, status in enumerate(self._get([actor.status.remote() for actor in self.actors])):
            if status is not None:
                raise EngineError(
                    f"rank {rank} ended with status {status} before it could reach rank 0 at "
                    f"{self.address}"
                )

    def _joined(self, rank: int, channel: Channel, identity: PeerIdentity) -> ConnectedWorker:
        return ConnectedWorker(
            channel, identity.pid, host=f"{identity.host} ({channel.peer})", device_index=0
        )  # Ray makes only its own GPU visible to a process

    def close(self) -> None:
        # the cluster may be gone already
        with suppress(self.ray.exceptions.RayError, RuntimeError, ConnectionError):
            for actor in self.actors:
                self.ray.kill(actor)  # its child dies with it, even a suspended one
            if self.group is not None:
                self.ray.util.remove_placement_group(self.group)
        self.actors = []
        self.group = None
