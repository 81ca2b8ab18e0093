"""Choose a platform by name."""

from __future__ import annotations

import torch

from rorqual.errors import ConfigError
from rorqual.platforms.base import Platform


def make_platform(device: str = "auto") -> Platform:
    """`auto` takes the first CUDA card, else the CPU. `cpu`, `cuda` and `cuda:N` name one."""
    from rorqual.platforms.cpu import CpuPlatform
    from rorqual.platforms.cuda import CudaPlatform

    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        where = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={device!r} is not known; accepted: auto, cpu, cuda, cuda:N") from None
    if where.type == "cpu":
        return CpuPlatform(where)
    if where.type == "cuda":
        if not torch.cuda.is_available() or (where.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device={device!r} is not there; torch sees {torch.cuda.device_count()} CUDA cards")
        return CudaPlatform(torch.device("cuda", where.index or 0))
    raise ConfigError(f"device={device!r} is not supported; accepted: auto, cpu, cuda, cuda:N")
