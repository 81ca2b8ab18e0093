"""CPU kernels of torch_npu's operators under their real schemas, for machines without an NPU.

`install()` registers them; the Meta kernels of torch_npu stay. What a kernel demands is written
in its docstring with its source; what is marked [reading] there is to be checked on an Atlas.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import attention, dense, exchange, mla, moe
from .core import NpuOpError, any_width, float32_stands_for_bfloat16, is_nz
from .exchange import register_group

__all__ = [
    "NpuOpError",
    "Recorder",
    "any_width",
    "float32_stands_for_bfloat16",
    "install",
    "is_nz",
    "register_group",
]

A3_SOC_VERSION = 250
CANN_VERSION = "8.5.0"
MODULES = (dense, moe, exchange, mla, attention)
OVERLOADS = {"npu_format_cast_": "npu_format_cast_.acl_format"}
_libraries: list[torch.library.Library] = []


def kernels() -> dict[str, Any]:
    """Name of the operator -> its CPU kernel."""
    found = {}
    for module in MODULES:
        for name, value in vars(module).items():
            if name.startswith("npu_") and callable(value):
                found[name] = value
    return found


def install() -> None:
    """Register all kernels once; the Meta kernels then see an A3 with CANN 8.5."""
    if _libraries:
        return
    import torch_npu
    from torch_npu.op_plugin.meta import _meta_registrations as meta

    meta.get_soc_version = lambda: A3_SOC_VERSION
    meta.get_cann_version = lambda *args: CANN_VERSION
    torch_npu.npu.utils._is_gte_cann_version = lambda *args: True
    library = torch.library.Library("npu", "IMPL", "CPU")
    for name, kernel in kernels().items():
        library.impl(OVERLOADS.get(name, name), kernel)
    _libraries.append(library)
    _install_air()


def _install_air() -> None:
    """torchair's variants with lengths in tensors, which raise on CPU by themselves."""
    try:
        from torch_npu.dynamo import torchair  # noqa: F401
        from torchair.ops import (
            _npu_fused_infer_attention_score,  # noqa: F401
            _npu_fused_infer_attention_score_v2,  # noqa: F401
        )
    except ImportError:
        return
    library = torch.library.Library("air", "IMPL", "CPU")
    for name in ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"):
        library.impl(name, getattr(attention, name), allow_override=True)
    _libraries.append(library)


class Recorder(TorchDispatchMode):
    """Collects (operator, args, kwargs) of every npu and air call made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("npu", "air"):
            self.calls.append((func, args, kwargs))
        return func(*args, **kwargs)
