"""An NVIDIA GPU: steps are launched ahead, results are copied to pinned memory."""

from __future__ import annotations

import gc
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rorqual.errors import CapacityError
from rorqual.platforms import pinned
from rorqual.platforms.base import DeviceClock, Pieces, Platform, Replay, Staging, Start, T

LARGE_MEMORY = 100 * 2**30


class EventClock:
    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)

    def seconds(self) -> list[float]:
        self.events[-1].synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(self.events)]


class AnyThreadEvent:
    """An event that any thread may wait for. Without its GPU as the current one, waiting gives the
    process a context on the first GPU, about half a gigabyte there."""

    def __init__(self, device: torch.device):
        self.device = device
        self.event = torch.cuda.Event()

    def record(self) -> None:
        self.event.record()

    def synchronize(self) -> None:
        with torch.cuda.device(self.device):
            self.event.synchronize()

    def query(self) -> bool:
        with torch.cuda.device(self.device):
            return self.event.query()


class CudaPlatform(Platform):
    name = "cuda"
    default_page_size = 64
    # a step reads all expert weights for few tokens and for many: Qwen3-30B on an H200 computes
    # 40,000 prompt tokens/s with 2,048 per step, 75,000 with 8,192
    default_batched_tokens = 8192
    host_step_bytes = 256 * 2**20  # 5 ms at 50 GB/s
    steps_in_flight = 2
    collectives = "nccl"
    has_graphs = True
    compiles = True
    asynchronous = True

    def __init__(self, device: torch.device):
        super().__init__(device)
        # kernels, streams and events are created on the current GPU; a process uses one
        torch.cuda.set_device(device)
        self.pools: dict[str, Any] = {}
        self.keepers: list[torch.cuda.CUDAGraph] = []
        self.separator: Tensor | None = None
        self.capturing = threading.Lock()
        self.side = torch.cuda.Stream(device)
        self.second = torch.cuda.Stream(device)
        self.recording = torch.cuda.Stream(device)  # of captures
        self.messages = torch.cuda.Stream(device)  # of captured ones

    def _graph_pool(self, use: str = "steps") -> Any:
        """The memory pool that all captured graphs of one use share. A tiny graph keeps it in use:
        when all graphs of a pool are freed but some of its memory is not, torch cannot capture into
        it again."""
        if use not in self.pools:
            pool = torch.cuda.graph_pool_handle()
            keeper = torch.cuda.CUDAGraph()
            with torch.cuda.graph(keeper, pool=pool):
                torch.zeros(1, device=self.device)
            self.keepers.append(keeper)
            self.pools[use] = pool
        return self.pools[use]

    def stream(self) -> AbstractContextManager[object]:
        """The current device is per thread, and steps may be launched by another thread than the
        one that created the engine."""
        return torch.cuda.device(self.device)

    @contextmanager
    def background(self, stream: Any = None) -> Iterator[Callable[[], None]]:
        """A second stream. The lock excludes captures, during which the driver rejects blocking
        calls of other threads."""
        stream = stream or self.side
        with self.capturing, torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield stream.synchronize

    def beside(self, work: Callable[[], None], lane: int = 0) -> Callable[[], None]:
        """On the stream of `background`, or another one, without its lock: the engine's thread is
        not capturing when it calls this."""
        side = self.second if lane else self.side
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            work()
            return self.mark()

    def reached(self) -> Callable[[], None]:
        event = AnyThreadEvent(self.device)
        event.record()

        def wait() -> None:
            with self.capturing:
                event.synchronize()

        return wait

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record()
        return lambda: torch.cuda.current_stream(self.device).wait_event(event)

    def describe(self) -> str:
        return (
            f"{torch.cuda.get_device_name(self.device)} "
            f"{torch.cuda.get_device_capability(self.device)}"
        )

    @property
    def converts_fp8(self) -> bool:
        return torch.cuda.get_device_capability(self.device) >= (8, 9)

    def total_memory(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]

    def has_large_memory(self, share: float) -> bool:
        return share * self.total_memory() >= LARGE_MEMORY

    def available_memory(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def clock(self) -> DeviceClock:
        return EventClock()

    def release_memory(self) -> None:
        torch.cuda.empty_cache()

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        if self.copies_pages and tensor.numel():
            from rorqual.platforms import host_stores

            if tensor.nbytes <= host_stores.MOST_BYTES:
                return pinned.fetch(tensor, AnyThreadEvent(self.device), host_stores.store)
        return pinned.fetch(tensor, AnyThreadEvent(self.device))

    def finished(self) -> Callable[[], bool]:
        event = AnyThreadEvent(self.device)
        event.record()
        return event.query

    def to_device(self, data: Tensor) -> Tensor:
        return pinned.copy_of(data).to(self.device, non_blocking=True)

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pinned memory, which has the same address on the GPU."""
        try:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        except RuntimeError as error:
            raise CapacityError(
                f"no {math.prod(shape) * dtype.itemsize / 2**30:.2f} GiB of host memory can "
                "be pinned"
            ) from error

    def staging(self, size: int) -> Staging:
        # blocking events: waiting threads leave the CPU to those that read
        blocking = partial(torch.cuda.Event, blocking=True)
        return pinned.PinnedStaging(torch.cuda, blocking, self.device, size)

    def warm_up(self, work: Callable[[], object]) -> None:
        with self.capturing:
            self._warm(work)

    def capture(self, work: Callable[[], Tensor], warm: bool = True) -> Callable[[], Tensor]:
        """The warm-up runs on the stream of captures: kernels compile, libraries allocate
        workspaces. All captured graphs share one memory pool."""
        with self.capturing:
            if warm:
                self._warm(work)
            return self._capture(work)

    def _warm(self, work: Callable[[], object]) -> None:
        """Ends with no memory cached: what is captured next allocates in a pool of its own."""
        self.recording.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.recording):
            work()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def _capture(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        pool = self._graph_pool()
        # not torch.cuda.graph, which empties the cache of memory each time, 2 ms
        with torch.cuda.stream(self.recording), _nothing_collected():
            graph.capture_begin(pool=pool)
            try:
                out = work()
            finally:
                graph.capture_end()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def capture_pieces(
        self, work: Callable[[Callable[[T], None]], Tensor], warm: bool = True
    ) -> Pieces[T]:
        with self.capturing:
            if warm:
                self._warm(lambda: work(lambda what: None))
            return self._capture_pieces(work)

    def _capture_pieces(self, work: Callable[[Callable[[T], None]], Tensor]) -> Pieces[T]:
        parts: list[tuple[torch.cuda.CUDAGraph, list[T]]] = []
        pool = self._graph_pool()
        graph = torch.cuda.CUDAGraph()

        def gap(what: T) -> None:
            nonlocal graph
            if _ended(graph) or not parts:
                parts.append((graph, [what]))
            else:  # two gaps with no operation between them
                parts[-1][1].append(what)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool)

        with torch.cuda.stream(self.recording), _nothing_collected():
            graph.capture_begin(pool=pool)
            try:
                out = work(gap)
            finally:
                graph.capture_end()
        last = graph

        def replay(between: Callable[[T], None]) -> Tensor:
            for piece, gaps in parts:
                piece.replay()
                for what in gaps:
                    between(what)
            last.replay()
            return out

        return replay

    def separate_graphs(self) -> None:
        """Launch a kernel of no use. A graph that is launched behind n others which have not begun
        yet, with nothing between them, begins up to 0.1 n us late (H200, driver 580); a kernel
        after every few graphs prevents that."""
        if self.separator is None:
            self.separator = torch.zeros(1, device=self.device)
        self.separator.add_(1)

    def capture_each(
        self, works: Sequence[Callable[[], None]], warm: bool = True, use: str = "between pieces"
    ) -> list[Replay]:
        with self.capturing:
            if warm:
                self._warm(lambda: [work() for work in works])
            pool = self._graph_pool(use)
            graphs = []
            with torch.cuda.stream(self.recording), _nothing_collected():
                for work in works:
                    graph = torch.cuda.CUDAGraph()
                    graph.capture_begin(pool=pool)
                    try:
                        work()
                    finally:
                        graph.capture_end()
                    graphs.append(graph)
            return [graph.replay for graph in graphs]

    def capture_messages(self, launch: Callable[[], Sequence[Any]]) -> Start:
        """All of them in one graph, so that they need one launch instead of a call of NCCL each,
        which takes the host 60 us or more."""

        def whole() -> None:
            for work in launch():
                work.wait()

        with self.capturing:
            self._warm(whole)  # NCCL connects ranks at their first message
            graph = torch.cuda.CUDAGraph()
            pool = self._graph_pool("messages")
            with torch.cuda.stream(self.recording), _nothing_collected():
                graph.capture_begin(pool=pool)
                try:
                    whole()
                finally:
                    graph.capture_end()
        arrived = torch.cuda.Event()

        def arrive() -> None:
            torch.cuda.current_stream(self.device).wait_event(arrived)

        def start() -> Callable[[], None]:
            self.messages.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.messages):
                graph.replay()
                arrived.record()
            return arrive

        return start


def _ended(graph: torch.cuda.CUDAGraph) -> bool:
    """End the capture; whether it captured anything. Only a warning tells."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        graph.capture_end()
    empty = [one for one in found if "is empty" in str(one.message)]
    for one in found:
        if one not in empty:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return not empty


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Disable Python's garbage collector, which must not free GPU memory during a capture. A full
    collection before each capture would take longer than the capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
