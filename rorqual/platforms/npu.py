"""An Ascend NPU through torch_npu: written against its interfaces and not yet run on the hardware
(docs/design/ascend.md says what has been checked, and how)."""

from __future__ import annotations

import gc
import importlib.metadata
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from rorqual.config.model import hccl_on_vector_cores
from rorqual.errors import CapacityError, ConfigError
from rorqual.platforms import pinned
from rorqual.platforms.base import Platform, Staging

INSTALL = "install torch_npu {0}.* beside torch {0} and CANN, and source CANN's set_env.sh"
SOCS = {"910B": "A2", "910_93": "A3"}  # parts of the device's name
VECTOR_CORES = 3  # hccl_op_expansion_mode: AIV


def torch_npu() -> Any:
    """The torch_npu package. Raises ConfigError, with advice, if it is missing, is for another
    torch version (importing it may then end the process), or cannot find CANN."""
    version = ".".join(torch.__version__.split(".")[:2])
    advice = INSTALL.format(version)
    try:
        found = importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"device='npu' needs the package torch_npu: {advice}") from None
    if ".".join(found.split(".")[:2]) != version:
        raise ConfigError(f"torch_npu {found} belongs to another torch: {advice}")
    try:
        import torch_npu as package
    except (ImportError, RuntimeError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"torch_npu cannot be loaded ({first}): {advice}") from None
    return package


class UpdatedGraph:
    """A captured step whose attention takes lengths from the host: call `set_lengths` before each
    replay."""

    def __init__(self, graph: Any, out: Tensor):
        self.graph = graph
        self.out = out
        self.lengths: list[int] = []

    def set_lengths(self, lengths: list[int]) -> None:
        """Cached entries of each request, including this step's."""
        self.lengths = lengths

    def __call__(self) -> Tensor:
        """Replay. The graph's attention calls wait for their lengths, which are set on another
        stream after the replay has started."""
        self.graph.replay()
        self.graph.update(cpu_update_input=[{"actual_seq_kvlen": self.lengths}])
        return self.out


class NpuPlatform(Platform):
    """One step in flight: attention takes lengths from the host, which knows them only after the
    previous step's results were read."""

    name = "npu"
    default_page_size = 128
    default_batched_tokens = 8192
    steps_in_flight = 1
    collectives = "hccl"
    has_graphs = True
    asynchronous = True

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.npu: Any = torch_npu().npu
        self.npu.set_device(device)
        hccl_on_vector_cores()
        self.side: Any = None
        self.pool: Any = None
        self.copying = threading.Lock()

    @property
    def soc(self) -> str:
        """A2 or A3; limits of operators depend on it."""
        found = self.npu.get_device_name(self.device)
        kinds = [kind for part, kind in SOCS.items() if part in found]
        if not kinds:
            raise ConfigError(
                f"{found} is not a known NPU; accepted: Atlas A2 (Ascend 910B) and A3 (910_93)"
            )
        return kinds[0]

    def group_options(self, buffer_mb: int) -> Any:
        from torch_npu._C._distributed_c10d import ProcessGroupHCCL

        options = ProcessGroupHCCL.Options()
        options.hccl_config = {
            "hccl_buffer_size": buffer_mb,
            "hccl_op_expansion_mode": VECTOR_CORES,
        }
        return options

    def stream(self) -> AbstractContextManager[object]:
        """The current device is per thread."""
        return self.npu.device(self.device)

    @contextmanager
    def background(self, stream: Any = None) -> Iterator[Callable[[], None]]:
        with self.copying, self.npu.device(self.device):
            if self.side is None:
                self.side = self.npu.Stream(self.device)
            stream = stream or self.side
            with self.npu.stream(stream):
                yield stream.synchronize

    def mark(self) -> Callable[[], None]:
        event = self.npu.Event()
        event.record()
        return lambda: self.npu.current_stream(self.device).wait_event(event)

    def capture(self, work: Callable[[], Tensor], warm: bool = True) -> UpdatedGraph:
        """Always runs once before, so that libraries allocate workspaces. All graphs share one
        memory pool."""
        with self.copying:
            work()
            self.npu.synchronize()
            if self.pool is None:
                self.pool = self.npu.graph_pool_handle()
            graph = self.npu.NPUGraph()
            with self.npu.graph(graph, pool=self.pool, auto_dispatch_capture=True):
                out = work()
            return UpdatedGraph(graph, out)

    def describe(self) -> str:
        return self.npu.get_device_name(self.device)

    @property
    def converts_fp8(self) -> bool:
        return False

    def total_memory(self) -> int:
        return self.npu.mem_get_info(self.device)[1]

    def available_memory(self) -> int:
        return self.npu.mem_get_info(self.device)[0]

    def synchronize(self) -> None:
        self.npu.synchronize(self.device)

    def release_memory(self) -> None:
        gc.collect()
        self.npu.empty_cache()

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        return pinned.fetch(tensor, self.npu.Event())

    def finished(self) -> Callable[[], bool]:
        event = self.npu.Event()
        event.record()
        query: Callable[[], bool] = event.query
        return query

    def to_device(self, data: Tensor) -> Tensor:
        return pinned.copy_of(data).to(self.device, non_blocking=True)

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        raise CapacityError("an NPU's kernels read no host memory; accepted: embed_device='auto'")

    def staging(self, size: int) -> Staging:
        return pinned.PinnedStaging(self.npu, self.npu.Event, self.device, size)
