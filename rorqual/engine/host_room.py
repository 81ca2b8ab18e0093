"""Checks that hosts have the memory their ranks are configured to take for cache pages."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

from rorqual.config.host_memory import available_host_memory, check_room, host_number
from rorqual.engine.config import EngineConfig
from rorqual.errors import ConfigError
from rorqual.parallel.mesh import Mesh
from rorqual.platforms.base import Platform


def check_host_memory(
    config: EngineConfig, platform: Platform, mesh: Mesh, beside: int = 0
) -> None:
    """Collective: all ranks raise alike, whichever host has too little. beside: bytes of host
    memory that each rank will take as well. Raises ConfigError."""
    if not config.kv_host_memory:
        return
    if platform.name not in ("cpu", "cuda"):
        raise ConfigError(f"kv_host_memory={config.kv_host_memory} is for device cpu or cuda")
    mine = torch.tensor([host_number(), available_host_memory(), beside], device=platform.device)
    found = [mine]
    if not mesh.is_single and not config.single_rank_bench:
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(found, mine)
    gathered = [tuple(map(int, one.tolist())) for one in found]
    ranks = Counter(host for host, _, _ in gathered)
    most = max(more for _, _, more in gathered)
    for host, free, _ in gathered:
        check_room(config.kv_host_memory, ranks[host], most, free)
