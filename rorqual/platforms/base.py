"""What the engine asks of a device. One subclass a kind of device; nothing above this floor
names CUDA or an NPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Pieces = Callable[[Callable[[T], None]], Tensor]


class Staging:
    """Host memory of one thread, from which the device copies while the thread fills it anew: get a
    `buffer`, start copies from it, say `sent`. At the end of the context all copies are done."""

    def __init__(self, size: int):
        self.memory = torch.empty(size, dtype=torch.uint8)

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *raised: object) -> None: ...

    def buffer(self) -> Tensor:
        """Bytes that nobody reads any more."""
        return self.memory

    def sent(self) -> None:
        """All copies from the newest buffer have been started."""


class Platform:
    """A device with its memory and its way of bringing results home.

    host_step_bytes: most that one step copies to or from host memory, each way.
    default_page_size in tokens; default_batched_tokens: of a step, decoding and prompts;
    steps_in_flight: how many steps to launch before reading the first;
    has_graphs: `capture` works; compiles: kernels are compiled by their first launch, or ahead of
    it; asynchronous: what is launched runs later, else it is done when the call returns.
    """

    name = "base"
    default_page_size = 16
    default_batched_tokens = 2048
    host_step_bytes = 32 * 2**20
    steps_in_flight = 1
    collectives = "gloo"
    has_graphs = False
    compiles = False
    asynchronous = False

    def __init__(self, device: torch.device):
        self.device = device

    def group_options(self, buffer_mb: int) -> Any:
        """How torch.distributed is to make a communicator with a buffer of so many MB; None where
        it has no such choice."""
        return None

    def describe(self) -> str:
        """The device's model and what it can do: what compiled code depends on."""
        return self.name

    @property
    def converts_fp8(self) -> bool:
        """Whether kernels can read and write e4m3."""
        return True

    def total_memory(self) -> int:
        """Bytes of device memory."""
        raise AssertionError("platforms say how much memory they have")

    def available_memory(self) -> int:
        """Bytes that can be allocated now."""
        raise AssertionError("platforms say how much memory is free")

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def release_memory(self) -> None:
        """Give back what this process keeps for later and nothing uses."""

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start copying a tensor to the host; calling the result waits for that copy alone."""
        return lambda: tensor

    def to_device(self, data: Tensor) -> Tensor:
        """A host tensor on the device, without waiting."""
        return data

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that the device's kernels can read, for as long as the tensor lives."""
        return torch.empty(shape, dtype=dtype)

    def weights_made(self, tensors: Iterable[Tensor]) -> None:
        """Called with all weights while nothing stands in them yet."""

    def staging(self, size: int) -> Staging:
        """Buffers of `size` bytes, for the thread that asks."""
        return Staging(size)

    def capture(self, work: Callable[[], Tensor], warm: bool = True) -> Callable[[], Tensor]:
        """Capture device work; the result replays it and returns the same output tensor each
        time, overwritten. warm: run it once before; without, all that a first run does besides
        computing has been done."""
        raise AssertionError(f"the {self.name} platform records no graphs")

    def capture_pieces(self, work: Callable[[Callable[[T], None]], Tensor]) -> Pieces[T]:
        """Capture device work with gaps: `work(gap)` calls gap(what) where one is, and what comes
        before and after is captured apart. The result takes a function, replays the pieces, calls
        the function with each gap's `what` in between, and returns the same output tensor each
        time, overwritten."""
        raise AssertionError(f"the {self.name} platform records no graphs")

    def stream(self) -> AbstractContextManager[object]:
        """The context in which the engine launches its steps."""
        return nullcontext()

    def background(self) -> AbstractContextManager[Callable[[], None]]:
        """The context in which another thread copies beside the steps; what it gives waits until
        that is done. Nothing is captured meanwhile, so nobody may wait for other ranks in it."""
        return nullcontext(lambda: None)

    def beside(self, work: Callable[[], None]) -> None:
        """Do device work of the engine's thread beside its steps: behind all that it has launched
        by now, and in the order of these calls. What `background` does comes behind it."""
        work()

    def after_beside(self) -> None:
        """What is launched here from now on waits for it."""

    def reached(self) -> Callable[[], None]:
        """What has been launched in this context by now: the result, called on any thread, waits
        until it is done."""
        return lambda: None

    def mark(self) -> Callable[[], None]:
        """After what has been launched here by now: the result, called in another context, makes
        that context's work wait for it."""
        return lambda: None


class Uncaptured(Platform):
    """A platform whose `capture` only keeps the work: for steps whose kernels are a compiled
    graph's anyway, but which want the sizes of captured ones."""

    def __init__(self, platform: Platform):
        super().__init__(platform.device)
        self.to_device = platform.to_device  # type: ignore[method-assign]

    def capture(self, work: Callable[[], Tensor], warm: bool = True) -> Callable[[], Tensor]:
        return work
