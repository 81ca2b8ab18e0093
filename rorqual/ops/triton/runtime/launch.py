"""Kernel launches: programmatic dependent launch, and GPU capabilities.

A kernel launched with `DEPENDENT` may start while the previous one on the stream is finishing;
`wait_for_inputs` must then be its first memory operation, and blocks until everything launched
before is complete and visible.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rorqual.config.model import nccl_channels, triton_cache_folder

INTERPRETED = triton.knobs.runtime.interpret


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Allow the next kernel to start, then wait for the previous one's results."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


def keep_compiled() -> None:
    """Use our cache folder for compiled kernels. Triton keys them by source, its version, ptxas and
    compute capability, so one folder serves all GPUs and versions, and a restart compiles
    nothing."""
    folder = triton_cache_folder()
    if folder is not None:
        triton.knobs.cache.dir = str(folder)


# NCCL's programs, one a channel, each keep a multiprocessor while they run
NCCL_CHANNELS = 16
_reserved: list[int] = []
_ahead: set[int] = set()  # threads


@cache
def _multiprocessors(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 132
    )


def multiprocessors(device: torch.device) -> int:
    """For programs that stay on their multiprocessor: all, less those that `beside_nccl` leaves."""
    return _multiprocessors(device) - (_reserved[-1] if _reserved else 0)


@contextmanager
def ahead() -> Iterator[None]:
    """Inside, this thread's launches are for what comes later: see `is_ahead`."""
    own = threading.get_ident()
    entered = own not in _ahead
    _ahead.add(own)
    try:
        yield
    finally:
        if entered:
            _ahead.discard(own)


def is_ahead() -> bool:
    """Whether this thread's launches only compile kernels. Where the number of tokens decides
    between some, all of them should be launched."""
    return threading.get_ident() in _ahead


@contextmanager
def beside_nccl() -> Iterator[None]:
    """Inside, `multiprocessors` leaves some to NCCL's programs. A kernel with one program for each
    multiprocessor would otherwise have a program that waits for another to end, and take twice as
    long. Some: NCCL's channels, at most 16, or fewer if its variables say so."""
    _reserved.append(nccl_channels(NCCL_CHANNELS))
    try:
        yield
    finally:
        _reserved.pop()


@cache
def takes_fp8(device: torch.device) -> bool:
    """Compute capability 8.9 or later: e4m3 conversions and products. (Elsewhere kernels are
    interpreted, or only compiled.)"""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def is_hopper(device: torch.device) -> bool:
    """Compute capability 9: bulk tensor copies, dependent launches, and products of whole
    warpgroups, which later GPUs lack. Those run what GPUs before Hopper run."""
    return (
        device.type == "cuda"
        and not INTERPRETED
        and torch.cuda.get_device_capability(device)[0] == 9
    )


def dependent(device: torch.device, after_long: bool = False) -> dict[str, Any]:
    """Launch arguments of a kernel that has a DEPENDENT parameter. after_long: the kernel before
    takes long, as products of experts do. In `beside_nccl` this one then begins after it: programs
    that wait would take the multiprocessors that are left to NCCL for all of that time."""
    if not is_hopper(device):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": not (after_long and _reserved)}


def next_power(n: int) -> int:
    return 1 << (max(n, 1) - 1).bit_length()


COUNTERS = 1024
# with a counter of tiles, in units of 16 bytes: for less aligned addresses, as most streams' sets
# would have, kernels are compiled again
SET = COUNTERS + 4
STREAMS = 128  # of a device; torch has 65
_counters: dict[torch.device, Tensor] = {}
_owners: dict[torch.device, dict[int, int]] = {}
_adding_owner = threading.Lock()


def _counters_of_stream(device: torch.device) -> Tensor:
    if device not in _counters:
        assert device.type != "cuda" or not torch.cuda.is_current_stream_capturing(), (
            "run once before capturing"
        )
        _counters[device] = torch.zeros(STREAMS, SET, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    owners = _owners.setdefault(device, {})
    owner = owners.get(stream)
    if owner is None:
        with _adding_owner:
            owner = owners.setdefault(stream, len(owners))
        assert owner < STREAMS, "more streams than counters"
    return _counters[device][owner]


def zeroed_counters(device: torch.device, count: int) -> Tensor:
    """int32 counters, zero between kernels: every kernel resets them. One set per stream, since
    kernels of two streams may run concurrently.

    All sets are created at the first call, which must not be during a graph capture: only that
    graph would zero a set created there. A graph has the set of the stream that it was captured on:
    graphs of one stream must not be replayed at the same time, nor beside other kernels of that
    stream.
    """
    assert count <= COUNTERS, count
    return _counters_of_stream(device)


def tile_counter(device: torch.device) -> Tensor:
    """[1] int32, as zeroed_counters, that no other kernel shares with those that take tiles from
    it: a number left by another would cost them tiles."""
    return _counters_of_stream(device)[COUNTERS : COUNTERS + 1]
