"""Where checkpoint tensors go. A layer lists its Targets; the loader fills them from a file or from
a seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rorqual.config.quant import QuantConfig, WeightScheme, scheme_of
from rorqual.errors import ConfigError
from rorqual.layers.routing_simulator import SimulatedRouting
from rorqual.ops.interface import Ops
from rorqual.parallel.exchange import Exchange, SlotMap
from rorqual.parallel.mesh import Mesh

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


@dataclass(frozen=True)
class Window:
    """A shard of a matrix in the file: the matrix's shape, and the shard's first row and column."""

    shape: tuple[int, int]
    row: int = 0
    column: int = 0


@dataclass(frozen=True)
class Convert:
    """Converts a window of the file's tensor, of shape `extent`, to the parameter's format. The
    window is read in pieces along its first axis, of `unit` entries or a multiple. `store(places,
    data)` takes one piece, in one of `dtypes`, and raises ValueError, with the end of a sentence,
    for invalid numbers. `into`: the tensors it fills, if not just the target's view; empty if the
    numbers are only checked. `draw` fills them for random weights."""

    extent: tuple[int, ...]
    store: Callable[[slice, Tensor], None]
    dtypes: tuple[torch.dtype, ...]
    unit: int = 1
    into: tuple[Tensor, ...] | None = None
    draw: Callable[[], None] | None = None

    def pieces(self, most: int) -> int:
        """Entries in a piece of at most `most` bytes, at least `unit`."""
        each = 4 * math.prod(self.extent[1:]) * self.unit
        return max(1, most // max(1, each)) * self.unit


@dataclass(frozen=True)
class Target:
    """Where one checkpoint tensor goes: `view` is (part of) a parameter. `covers`: names of the
    separate tensors that a merged one replaces. Random weights are normal with `std`, or the
    constant `fill` if std is None. Each row of the file fills `repeat` rows of the view (block
    scales that are stored per row).

    A shard's view is a window of the file's tensor: `whole` is that tensor's shape (None: the
    view's own), `start` the window's first index, in rows of the view. An empty view loads nothing
    but makes the name known. `optional`: the file may lack the tensor. `is_scale`: its numbers must
    be finite.

    `convert` is for tensors whose format differs from the file's; `place` is then the view's window
    in the matrix that random weights are drawn for.
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
        """The tensors that it fills."""
        if self.convert is None or self.convert.into is None:
            return (self.view,)
        return self.convert.into

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in the file."""
        if self.whole is not None:
            return self.whole
        first = self.view.shape[:1]
        return tuple(-(-rows // self.repeat) for rows in first) + tuple(self.view.shape[1:])

    @property
    def origin(self) -> tuple[int, ...]:
        return self.start or (0,) * self.view.dim()

    @property
    def covered_names(self) -> tuple[str, ...]:
        return self.covers or (self.name,)


@dataclass(frozen=True)
class Build:
    """What every layer needs to create its parameters."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    quant: QuantConfig | None = None
    residual_gain: float = 1.0  # shrinks the random weights that write to the residual stream
    mesh: Mesh = field(default_factory=Mesh.single)
    # allocates the embedding table in host memory that the device can read; None: on `device`
    embedding_memory: Allocate | None = None
    # by layer index; layers without an entry have their experts in order
    slot_maps: Mapping[int, SlotMap] = field(default_factory=dict)
    fixed_experts: bool = False  # dense layers are computed as experts
    # by layer index: replaces the router's choice, for benchmarks
    simulated_routing: Callable[[int], SimulatedRouting | None] = lambda layer: None
    # by layer index: the exchange of a layer whose experts are in other processes
    remote: Callable[[int], Exchange | None] = lambda layer: None

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)

    def embedding(self, rows: int, columns: int) -> Tensor:
        """An embedding table, [rows, columns]."""
        make = self.embedding_memory
        return make((rows, columns), self.dtype) if make else self.empty(rows, columns)

    @property
    def fp8_rows(self) -> str | None:
        """QuantConfig.fp8_rows."""
        return self.quant.fp8_rows if self.quant is not None else None

    def scheme(self, modules: Sequence[str], columns: int) -> WeightScheme:
        """The format of modules merged into one matrix. Raises ConfigError if theirs differ."""
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
