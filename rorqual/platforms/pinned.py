"""Copies between a device and pinned host memory, by the interface that torch.cuda and torch_npu's
npu have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rorqual.platforms.base import Staging

# Elements from which torch copies with several threads, which have to wake up first: on a host with
# busy cores a copy of 0.3 MB took 7 ms, at the start of a step.
THREADED = 32768


class PinnedStaging(Staging):
    """Two alternating buffers and a separate stream. runtime: torch.cuda or torch_npu.npu; event:
    makes one of its events."""

    def __init__(self, runtime: Any, event: Callable[[], Any], device: torch.device, size: int):
        self.stream = runtime.Stream(device)
        self.buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self.copied = [event() for _ in range(2)]
        self.turn = 0
        self.entered = runtime.stream(self.stream)

    def __enter__(self) -> PinnedStaging:
        self.entered.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.entered.__exit__(*raised)
        self.stream.synchronize()

    def buffer(self) -> Tensor:
        self.turn = 1 - self.turn
        self.copied[self.turn].synchronize()
        return self.buffers[self.turn]

    def sent(self) -> None:
        self.copied[self.turn].record(self.stream)


def copy_of(data: Tensor) -> Tensor:
    """A host tensor's copy in pinned memory, made by the calling thread; itself if it is there."""
    if data.numel() < THREADED:
        return data.pin_memory()
    if data.is_pinned():
        return data
    host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
    fill(host, data.contiguous())
    return host


def fill(host: Tensor, data: Tensor) -> None:
    """Copy between contiguous host tensors of a shape and dtype, without other threads."""
    host.view(torch.uint8).numpy()[...] = data.view(torch.uint8).numpy()


def copy(tensor: Tensor, host: Tensor) -> None:
    host.copy_(tensor, non_blocking=True)


def fetch(
    tensor: Tensor, event: Any, start: Callable[[Tensor, Tensor], None] = copy
) -> Callable[[], Tensor]:
    """Start a copy to the host on the current stream; the result waits for it. event: a new one.
    start: starts the copy to a pinned tensor of the same shape."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    start(tensor, host)
    event.record()

    def wait() -> Tensor:
        event.synchronize()
        return host

    return wait
