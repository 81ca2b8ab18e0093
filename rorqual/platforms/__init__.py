"""Choose a platform by name."""

from __future__ import annotations

import torch

from rorqual.errors import ConfigError
from rorqual.platforms.base import Platform


def device_of(device: str = "auto") -> torch.device:
    """`auto` is the first CUDA GPU, else the CPU. `cpu`, `cuda` and `cuda:N` name one. Touches
    no GPU: a context on it costs memory."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        where = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"device={device!r} is not known; accepted: auto, cpu, cuda, cuda:N"
        ) from None
    if where.type == "cpu":
        return where
    if where.type == "cuda":
        if not torch.cuda.is_available() or (where.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device={device!r} is not there; torch sees {torch.cuda.device_count()} CUDA GPUs"
            )
        return torch.device("cuda", where.index or 0)
    raise ConfigError(f"device={device!r} is not supported; accepted: auto, cpu, cuda, cuda:N")


def make_platform(device: str = "auto") -> Platform:
    """The platform of device_of(device)."""
    from rorqual.platforms.cpu import CpuPlatform
    from rorqual.platforms.cuda import CudaPlatform

    where = device_of(device)
    return CudaPlatform(where) if where.type == "cuda" else CpuPlatform(where)
