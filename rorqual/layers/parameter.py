"""Where checkpoint tensors go. A layer lists its Targets; the loader fills them from a file, or
from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rorqual.config.quant import QuantConfig, WeightScheme, scheme_of
from rorqual.errors import ConfigError
from rorqual.layers.picks import Picks
from rorqual.ops.interface import Ops
from rorqual.parallel.exchange import Exchange, SlotMap
from rorqual.parallel.mesh import Mesh

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True)
class Window:
    """Where a shard lies in the file's matrix: the matrix's shape, and the shard's first row and
    column."""

    shape: tuple[int, int]
    row: int = 0
    column: int = 0


@dataclass(frozen=True)
class Convert:
    """How a window of the file's tensor, `extent` in shape, becomes what is kept. It is read in
    pieces along its first axis, `unit` places or a multiple at a time; `store(places, data)` takes
    one, of one of `dtypes`, and raises ValueError, with the end of a sentence, for numbers that
    cannot be right. `into`: what it fills, where that is not the target's view alone; nothing,
    where numbers are only looked at. `draw` fills it where weights are random."""

    extent: tuple[int, ...]
    store: Callable[[slice, Tensor], None]
    dtypes: tuple[torch.dtype, ...]
    unit: int = 1
    into: tuple[Tensor, ...] | None = None
    draw: Callable[[], None] | None = None

    def pieces(self, most: int) -> int:
        """Places of a piece of at most so many bytes, if a unit is not more."""
        each = 4 * math.prod(self.extent[1:]) * self.unit
        return max(1, most // max(1, each)) * self.unit


@dataclass(frozen=True)
class Target:
    """One checkpoint tensor's place: `view` is (part of) a parameter. `covers` names the tensors it
    stands for when it holds several merged ones. Random weights are normal with `std`, or the
    constant `fill` where std is None. Each row of the file fills `repeat` rows of the view (scales
    of blocks kept row by row).

    A shard's view holds a window of the file's tensor: `whole` is that tensor's shape (None: the
    view's own), `start` where the window begins, rows counted as the view counts them. A view
    without elements takes nothing but says that the name is known. `optional`: the file may lack
    it. `is_scale`: its numbers must be finite.

    `convert` is for tensors that are not kept as the file has them; `place` is then where the view
    lies in the matrix that random weights are drawn for.
    """

    name: str
    view: Tensor
    std: float | None = None
    fill: float = 0.0
    covers: tuple[str, ...] = ()
    repeat: int = 1
    whole: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None
    optional: bool = False
    is_scale: bool = False
    place: Window | None = None
    convert: Convert | None = None

    @property
    def views(self) -> tuple[Tensor, ...]:
        """Where it is held."""
        if self.convert is None or self.convert.into is None:
            return (self.view,)
        return self.convert.into

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
    # the exchange of a layer whose experts are in other processes
    remote: Callable[[int], Exchange | None] = lambda layer: None

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)

    def embedding(self, rows: int, columns: int) -> Tensor:
        """An embedding table, [rows, columns]."""
        make = self.embedding_memory
        return make((rows, columns), self.dtype) if make else self.empty(rows, columns)

    @property
    def rounds_rows_to_fp8(self) -> bool:
        return self.quant is not None and self.quant.rounds_rows_to_fp8

    def scheme(self, modules: Sequence[str], columns: int) -> WeightScheme:
        """Of the modules that are merged into one matrix. Raises ConfigError where they differ."""
        found = scheme_of(self.quant, modules, columns)
        if found is None:
            assert self.quant is not None
            ways = {name: self.quant.of(name, columns).describe() for name in modules}
            (first, way), *others = ways.items()
            other, differs = next(item for item in others if item[1] != way)
            raise ConfigError(
                f"{first}.weight is {way}, {other}.weight is {differs}: they are one matrix here "
                "and cannot be of two formats"
            )
        return found
