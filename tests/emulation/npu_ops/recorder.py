"""Every call of torch_npu's operators, looked at as it is made: its outputs against the real Meta
kernel's shapes and types, and one call of each kind kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.emulation.npu_ops.core import is_nz, mark_nz

Call = tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]
NO_META = ("npu_format_cast", "npu_convert_weight_to_int4pack")
# What an output means nothing in: the Meta kernel may give it another shape than the page.
LEFT_OPEN = {
    "npu_kv_rmsnorm_rope_cache_v2": {0, 1},  # is_output_kv is not set
    "npu_mla_prolog_v3": {3, 4},  # query_norm_flag is not set
}


class CallRecorder(TorchDispatchMode):
    """counts: calls by operator; differences: outputs that are not as the Meta kernel says; kept:
    of each operator and kind of arguments the first call, with tensors as they were before it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.differences: list[str] = []
        self.kept: dict[tuple[Any, ...], Call] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "npu":
            return func(*args, **kwargs)
        name = func.name().removeprefix("npu::").partition(".")[0]
        self.counts[name] += 1
        key = (name, *_kind(args), *_kind(kwargs))
        if key not in self.kept:
            self.kept[key] = (func, *_copies((args, kwargs)))
        expected = None if name in NO_META else _on_meta(func, args, kwargs)
        out = func(*args, **kwargs)
        if expected is not None:
            self._compare(name, out, expected)
        return out

    def _compare(self, name: str, out: Any, expected: Any) -> None:
        found = pytree.tree_leaves(out)
        wanted = pytree.tree_leaves(expected)
        if len(found) != len(wanted):
            self.differences.append(f"{name}: {len(found)} outputs, not {len(wanted)}")
        for at, (mine, theirs) in enumerate(zip(found, wanted, strict=False)):
            skip = at in LEFT_OPEN.get(name, ()) or theirs.numel() == 0
            same = mine.shape == theirs.shape and mine.dtype == theirs.dtype
            if not (skip or same):
                self.differences.append(
                    f"{name}, output {at}: {tuple(mine.shape)} {mine.dtype}, Meta kernel: "
                    f"{tuple(theirs.shape)} {theirs.dtype}"
                )


def _kind(given: Any) -> tuple[Any, ...]:
    """What makes two calls alike: types, and numbers of axes, but no sizes."""
    leaves, spec = pytree.tree_flatten(given)
    kinds = [
        (leaf.dtype, leaf.dim())
        if isinstance(leaf, torch.Tensor)
        else None
        if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
        else leaf
        for leaf in leaves
    ]
    names = tuple(given) if isinstance(given, dict) else ()
    return (names, len(leaves) if names else str(spec), tuple(kinds[:24]))


def _copies(given: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, copied, given)


def copied(x: torch.Tensor) -> torch.Tensor:
    """A clone, in NZ where x is."""
    twin = x.clone(memory_format=torch.preserve_format)
    if is_nz(x):
        mark_nz(twin)
    return twin


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    move = lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
    return func(*pytree.tree_map(move, args), **pytree.tree_map(move, kwargs))
