"""Where checkpoint tensors go. A layer lists its Targets; the loader fills them from a file, or
from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rorqual.config.model import QuantConfig
from rorqual.layers.picks import Picks
from rorqual.ops.interface import Ops
from rorqual.ops.reference import FP8, Weight
from rorqual.parallel.exchange import SlotMap
from rorqual.parallel.mesh import Mesh

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
# A random fp8 weight is drawn with this standard deviation in fp8 units: 448 then lies at five
# sigma.
FP8_STD = 89.6


@dataclass(frozen=True)
class Target:
    """One checkpoint tensor's place: `view` is (part of) a parameter. `covers` names the tensors it
    stands for when it holds several merged ones. Random weights are normal with `std`, or the
    constant `fill` where std is None. Each row of the file fills `repeat` rows of the view (scales
    of blocks kept row by row).

    A shard's view holds a window of the file's tensor: `whole` is that tensor's shape (None: the
    view's own), `start` where the window begins, rows counted as the view counts them. A view
    without elements takes nothing but says that the name is known.
    """

    name: str
    view: Tensor
    std: float | None = None
    fill: float = 0.0
    covers: tuple[str, ...] = ()
    repeat: int = 1
    whole: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the file."""
        if self.whole is not None:
            return self.whole
        first = self.view.shape[:1]
        return tuple(-(-rows // self.repeat) for rows in first) + tuple(self.view.shape[1:])

    @property
    def origin(self) -> tuple[int, ...]:
        return self.start or (0,) * self.view.dim()

    @property
    def stands_for(self) -> tuple[str, ...]:
        return self.covers or (self.name,)


@dataclass(frozen=True)
class Build:
    """What every layer needs to make its parameters."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    quant: QuantConfig | None = None
    residual_gain: float = 1.0  # shrinks the random weights that write to the residual stream
    mesh: Mesh = field(default_factory=Mesh.single)
    # makes the embedding table elsewhere than on `device`: in host memory the device can read
    embedding_memory: Allocate | None = None
    # where experts lie, by the number of their layer; in order where it says nothing
    slot_maps: Mapping[int, SlotMap] = field(default_factory=dict)
    fixed_experts: bool = False  # dense layers are computed as experts
    # experts in place of those that the router of a layer chooses; for benchmarks
    picks: Callable[[int], Picks | None] = lambda layer: None

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)

    def embedding(self, rows: int, columns: int) -> Tensor:
        """An embedding table, [rows, columns]."""
        make = self.embedding_memory
        return make((rows, columns), self.dtype) if make else self.empty(rows, columns)

    def is_quantized(self, module: str) -> bool:
        return self.quant is not None and self.quant.covers(module)


@dataclass(frozen=True)
class Window:
    """Where a shard lies in the file's matrix: the matrix's shape, and the shard's first row and
    column."""

    shape: tuple[int, int]
    row: int = 0
    column: int = 0


def matrix_targets(
    name: str,
    weight: Weight,
    std: float,
    window: Window,
    block: tuple[int, int] = (128, 128),
    covers: tuple[str, ...] = (),
) -> Iterator[Target]:
    """Targets of one weight matrix, or of the shard of it that `window` places: its data and,
    for fp8, its `_scale_inv` with one scale for each `block` of the file. A weight that keeps
    one scale a row repeats them."""
    start = (window.row, window.column)
    if weight.scale is None:
        yield Target(name, weight.data, std=std, covers=covers, whole=window.shape, start=start)
        return
    assert weight.data.dtype == FP8
    yield Target(name, weight.data, std=FP8_STD, covers=covers, whole=window.shape, start=start)
    whole = (-(-window.shape[0] // block[0]), -(-window.shape[1] // block[1]))
    repeat = block[0] // weight.block[0]
    start = (window.row // weight.block[0], window.column // block[1])
    scales = tuple(part + "_scale_inv" for part in covers)
    yield Target(
        name + "_scale_inv", weight.scale, None, std / FP8_STD, scales, repeat, whole, start
    )


def absent_targets(
    name: str, empty: Tensor, shape: tuple[int, int], block: tuple[int, int] | None
) -> Iterator[Target]:
    """A matrix that another rank holds: its names are known and its shapes are checked; nothing
    is read. `block` where it is fp8."""
    yield Target(name, empty, whole=shape)
    if block is not None:
        yield Target(
            name + "_scale_inv", empty, whole=(-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        )
