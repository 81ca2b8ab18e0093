"""An NPU without the hardware: the engine's own NPU path over CPU tensors, on which torch_npu's
operators run by the CPU implementations of tests.emulation.npu_ops, with gloo in place of HCCL.

`install` makes `device="npu"` mean that, in this process. Ranks are processes of their own: they
find tests/npu/site on their path, which installs it too.
"""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rorqual.ops import select
from rorqual.ops.interface import Ops
from rorqual.platforms.base import Platform
from rorqual.platforms.cpu import CpuPlatform
from rorqual.platforms.npu import NpuPlatform

SITE = Path(__file__).parents[1] / "npu" / "site"
SWITCH = "RORQUAL_NPU_BENCH"
PLAIN = "RORQUAL_NPU_BENCH_PLAIN"  # device="cpu" means PlainPlatform
# Random weights of the engine hardly let layers speak; here a token must follow from all of them.
RESIDUAL_GAIN = 4.0
GAIN = "RORQUAL_NPU_BENCH_GAIN"
WIDE = "fp32"  # the switch's value: float32 stands for bfloat16
PATCHED = (
    "rorqual.platforms",
    "rorqual.engine.executor",
    "rorqual.engine.distributed.executor",
    "rorqual.engine.distributed.worker_process",
)


class EmulatedNpu(NpuPlatform):
    """NpuPlatform but for what asks the device."""

    collectives = "gloo"
    has_graphs = False
    asynchronous = False
    soc = "A3"
    fetch = Platform.fetch
    to_device = Platform.to_device
    stream = Platform.stream
    background = Platform.background
    mark = Platform.mark
    staging = Platform.staging
    synchronize = Platform.synchronize
    release_memory = Platform.release_memory

    def __init__(self) -> None:
        Platform.__init__(self, torch.device("cpu"))
        self.host = CpuPlatform(self.device)

    def group_options(self, buffer_mb: int) -> Any:
        return None

    def describe(self) -> str:
        return "emulated NPU"

    def total_memory(self) -> int:
        return self.host.total_memory()

    def available_memory(self) -> int:
        return self.host.available_memory()


def make_platform(device: str = "auto") -> Platform:
    if device.partition(":")[0] == "npu":
        return EmulatedNpu()
    if device == "cpu" and os.environ.get(PLAIN):
        return PlainPlatform(torch.device("cpu"))
    return CpuPlatform(torch.device("cpu"))


class PlainPlatform(CpuPlatform):
    """The definitions of all ops, in plain torch, over a cache as an NPU has it."""

    name = "plain"
    default_page_size = 128


class PlainOps(Ops):
    splits_latents = True
    static_cache_scales = True


def ops_for(platform: str) -> Ops:
    return PlainOps() if platform == "plain" else select.ops_for(platform)


def communicator_name(group: dist.ProcessGroup, rank: int) -> str:
    from tests.emulation import npu_ops

    name = f"ranks-{'-'.join(map(str, dist.get_process_group_ranks(group)))}"
    npu_ops.register_group(name, group)
    return name


_wide: AbstractContextManager[Any] | None = None


def traced_step(method: Any, folder: Path | None) -> Any:
    """Traced as torchair has it traced, and computed as it was traced."""
    return torch.compile(
        method, dynamic=False, fullgraph=True, backend=lambda graph, inputs: graph.forward
    )


def set_gain(gain: float) -> None:
    """How much the layers of a model with random weights add to a token's own embedding, here and
    on ranks that start later."""
    from rorqual.engine.execution import worker

    worker.RESIDUAL_GAIN = gain
    os.environ[GAIN] = str(gain)


def set_wide(wide: bool) -> None:
    """Whether float32 stands for bfloat16 in all operators, here and on ranks that start later."""
    global _wide
    from tests.emulation import npu_ops

    if _wide is not None:
        _wide.__exit__(None, None, None)
        _wide = None
    if wide:
        _wide = npu_ops.float32_stands_for_bfloat16()
        _wide.__enter__()
    os.environ[SWITCH] = WIDE if wide else "bf16"


def install(wide: bool) -> None:
    """`device="npu"` is an emulated NPU in this process, and in ranks that it starts."""
    from tests.emulation import npu_ops

    npu_ops.install()
    set_wide(wide)
    from rorqual.engine.execution import request_state, worker
    from rorqual.engine.npu import compiled
    from rorqual.ops.npu import dispatch

    for name in PATCHED:
        importlib.import_module(name).make_platform = make_platform  # type: ignore[attr-defined]
    dispatch.communicator_name = communicator_name
    for module in (worker, request_state):
        module.ops_for = ops_for  # type: ignore[attr-defined]
    compiled.torchair_step = traced_step
    set_gain(float(os.environ.get(GAIN, RESIDUAL_GAIN)))
    path = os.environ.get("PYTHONPATH", "")
    if str(SITE) not in path.split(os.pathsep):
        os.environ["PYTHONPATH"] = f"{SITE}{os.pathsep}{path}" if path else str(SITE)
