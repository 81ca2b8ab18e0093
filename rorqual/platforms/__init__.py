"""Choose a platform by name."""

from __future__ import annotations

import torch

from rorqual.errors import ConfigError
from rorqual.platforms.base import Platform

ACCEPTED = "auto, cpu, cuda, cuda:N, npu, npu:N"


def device_of(device: str = "auto") -> torch.device:
    """`auto` is the first CUDA GPU, else the CPU. `cpu`, `cuda`, `cuda:N`, `npu` and `npu:N` name
    one. Touches no device: a context on it costs memory."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if name.partition(":")[0] == "npu":
        return _npu(name)
    try:
        where = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={device!r} is not known; accepted: {ACCEPTED}") from None
    if where.type == "cpu":
        return where
    if where.type == "cuda":
        if not torch.cuda.is_available() or (where.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"device={device!r} is not there; torch sees {torch.cuda.device_count()} CUDA GPUs"
            )
        return torch.device("cuda", where.index or 0)
    raise ConfigError(f"device={device!r} is not supported; accepted: {ACCEPTED}")


def _npu(name: str) -> torch.device:
    from rorqual.platforms.npu import torch_npu

    index = name.partition(":")[2] or "0"
    if not index.isdigit():
        raise ConfigError(f"device={name!r} is not known; accepted: {ACCEPTED}")
    count = torch_npu().npu.device_count()  # torch knows no such device before the import
    if int(index) >= count:
        raise ConfigError(f"device={name!r} is not there; torch_npu sees {count} NPUs")
    return torch.device("npu", int(index))


def make_platform(device: str = "auto") -> Platform:
    """The platform of device_of(device)."""
    from rorqual.platforms.cpu import CpuPlatform
    from rorqual.platforms.cuda import CudaPlatform

    where = device_of(device)
    if where.type == "npu":
        from rorqual.platforms.npu import NpuPlatform

        return NpuPlatform(where)
    return CudaPlatform(where) if where.type == "cuda" else CpuPlatform(where)
