"""The engine's interface to a device, with one subclass per kind of device. Nothing above this
floor names CUDA or an NPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Pieces = Callable[[Callable[[T], None]], Tensor]
Replay = Callable[[], None]
Start = Callable[[], Callable[[], None]]  # returns what makes later work wait


class Staging:
    """Host buffers of one thread, from which the device copies while the thread fills the next one:
    get a `buffer`, start copies from it, call `sent`. When the context exits all copies are
    done."""

    def __init__(self, size: int):
        self.memory = torch.empty(size, dtype=torch.uint8)

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *raised: object) -> None: ...

    def buffer(self) -> Tensor:
        """A buffer that is not in use by a copy."""
        return self.memory

    def sent(self) -> None:
        """Call after all copies from the newest buffer have been started."""


class DeviceClock(Protocol):
    """When a device reaches points of the current stream, however long launching took."""

    def mark(self) -> None: ...

    def seconds(self) -> list[float]:
        """From each mark to the next. Waits for the last one."""


class Platform:
    """A device.

    host_step_bytes: most bytes that one step copies to host memory, and from it.
    default_page_size: tokens. default_batched_tokens: most tokens of a step, decode and prefill.
    steps_in_flight: steps to launch before reading the first one's results.
    has_graphs: `capture` works. compiles: kernels are compiled at or before their first launch.
    asynchronous: launched work runs later; else it is done when the call returns.
    copies_pages: pages are copied to the host beside steps, whose results must not wait for them.
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
    copies_pages = False

    def __init__(self, device: torch.device):
        self.device = device

    def group_options(self, buffer_mb: int) -> Any:
        """torch.distributed's options for a communicator with a buffer of `buffer_mb` MB; None if
        the backend has no such option."""
        return None

    def describe(self) -> str:
        """The device's model and capabilities: what compiled code depends on."""
        return self.name

    @property
    def converts_fp8(self) -> bool:
        """Whether kernels can read and write e4m3."""
        return True

    def total_memory(self) -> int:
        """Bytes of device memory."""
        raise AssertionError("platforms say how much memory they have")

    def has_large_memory(self, share: float) -> bool:
        """Whether this share of the device's memory has room for steps of a thousand sequences,
        whose logits and sampling take some GiB."""
        return False

    def available_memory(self) -> int:
        """Bytes that can be allocated now."""
        raise AssertionError("platforms say how much memory is free")

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def clock(self) -> DeviceClock | None:
        """None where the host's clock says when work is done, as launching waits for it."""
        return None

    def release_memory(self) -> None:
        """Free cached memory that is not in use."""

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start copying a tensor to the host; calling the result waits for that copy only."""
        return lambda: tensor

    def finished(self) -> Callable[[], bool]:
        """The result says, without waiting and on any thread, whether the device has done what was
        launched on the current stream before this call."""
        return lambda: True

    def to_device(self, data: Tensor) -> Tensor:
        """A host tensor on the device, without waiting."""
        return data

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that the device's kernels can read as long as the tensor lives."""
        return torch.empty(shape, dtype=dtype)

    def weights_made(self, tensors: Iterable[Tensor]) -> None:
        """Called with all weights before they are loaded."""

    def staging(self, size: int) -> Staging:
        """Buffers of `size` bytes for the calling thread."""
        return Staging(size)

    def capture(self, work: Callable[[], Tensor], warm: bool = True) -> Callable[[], Tensor]:
        """Capture device work in a graph. The result replays it and returns the same output tensor
        each time, overwritten. warm: run the work once before; set it to False only if it ran
        before, so that nothing has to be compiled or allocated."""
        raise AssertionError(f"the {self.name} platform records no graphs")

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run work once before similar work is captured, so that nothing has to be loaded or
        allocated then."""
        work()

    def capture_pieces(
        self, work: Callable[[Callable[[T], None]], Tensor], warm: bool = True
    ) -> Pieces[T]:
        """Capture device work in several graphs: `work(gap)` calls gap(what) wherever one ends. The
        result takes a function, replays the graphs, calls the function with each gap's `what` in
        between, and returns the same output tensor each time, overwritten. warm: as in
        `capture`."""
        raise AssertionError(f"the {self.name} platform records no graphs")

    def capture_messages(self, launch: Callable[[], Sequence[Any]]) -> Start:
        """Messages between ranks, all of which call this alike: `launch` starts them and returns
        what to wait for. The result starts them, behind what was launched before, and returns what
        makes later work wait for them. Where a platform can capture messages it is the same each
        time, so the host does less; the previous ones were waited for before they start again."""

        def start() -> Callable[[], None]:
            works = launch()

            def arrive() -> None:
                for work in works:
                    work.wait()

            return arrive

        return start

    def capture_each(
        self, works: Sequence[Callable[[], None]], warm: bool = True, use: str = "between pieces"
    ) -> list[Replay]:
        """Capture each of `works` in a graph of its own, for replays between those of
        `capture_pieces`: what they compute is in memory that no graph of these uses. Graphs of
        several calls with the same `use` share it, so the graphs of one call are replayed in order,
        and those of another not in between. warm: as in `capture`."""
        raise AssertionError(f"the {self.name} platform records no graphs")

    def separate_graphs(self) -> None:
        """Call between replays of several graphs with nothing else launched between them."""

    def stream(self) -> AbstractContextManager[object]:
        """The context in which the engine launches its steps."""
        return nullcontext()

    def background(self, stream: Any = None) -> AbstractContextManager[Callable[[], None]]:
        """Context in which another thread copies concurrently with the steps; yields a function
        that waits for these copies. No graph is captured meanwhile, so do not wait for other ranks
        in it. stream: of the device, instead of the platform's own for this."""
        return nullcontext(lambda: None)

    def beside(self, work: Callable[[], None], lane: int = 0) -> Callable[[], None]:
        """Run device work of the engine's thread concurrently with its later steps: after
        everything launched so far, and in the order of these calls for one of the lanes 0 and 1.
        Later work in `background` follows that of lane 0. Returns a function that makes later
        launches of its caller, or of `work` where it calls it, wait for it."""
        work()
        return lambda: None

    def reached(self) -> Callable[[], None]:
        """A function that waits, on any thread, for everything launched in this context so far."""
        return lambda: None

    def mark(self) -> Callable[[], None]:
        """A function that, called in another context, makes that context's later work wait for
        everything launched here so far."""
        return lambda: None


class Uncaptured(Platform):
    """A platform whose `capture` returns the work itself: for compiled steps that use the batch
    sizes of captured ones but need no graph."""

    def __init__(self, platform: Platform):
        super().__init__(platform.device)
        self.to_device = platform.to_device  # type: ignore[method-assign]

    def capture(self, work: Callable[[], Tensor], warm: bool = True) -> Callable[[], Tensor]:
        return work
