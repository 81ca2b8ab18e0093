"""Whether a host has the memory that its ranks were told to take for pages of their caches."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rorqual.config.host_memory import check_room, host_number
from rorqual.engine.config import EngineConfig
from rorqual.errors import ConfigError
from rorqual.parallel.mesh import Mesh
from rorqual.platforms.base import Platform


def check_host_memory(config: EngineConfig, platform: Platform, mesh: Mesh) -> int:
    """Before anything is loaded. Returns how many ranks share this host. Raises ConfigError."""
    if not config.kv_host_memory:
        return 1
    if platform.name not in ("cpu", "cuda"):
        raise ConfigError(f"kv_host_memory={config.kv_host_memory} is for device cpu or cuda")
    ranks = 1
    if not mesh.is_single and not config.single_rank_bench:
        mine = torch.tensor([host_number()], device=platform.device)
        numbers = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(numbers, mine)
        ranks = sum(int(number) == int(mine) for number in numbers)
    check_room(config.kv_host_memory, ranks)
    return ranks
