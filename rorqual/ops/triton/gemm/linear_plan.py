"""Plans of fp8 GEMMs: one class for each of four kernels, one for tiles that the shape decides, and
the row of a tuning file that all of them share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rorqual.ops.triton.runtime import tuning
from rorqual.ops.triton.runtime.launch import COUNTERS


@dataclass(frozen=True)
class LinearRow:
    """A plan in a tuning file: the fields of all kinds, and its kind."""

    m: int
    n: int
    warps: int
    stages: int
    swap: bool = True
    tma: bool = False
    split: int = 1
    waves: int = 0
    halves: bool = False
    stream: bool = False
    tall: bool = False
    slices: int = 0


class LinearPlan(tuning.StoredConfig):
    """One of those below."""

    @staticmethod
    def from_row(data: Mapping[str, Any]) -> LinearPlan:
        """Raises TypeError or ValueError: a stored row may be of kernels that no longer exist."""
        row = tuning.build(LinearRow, data)
        if row.stream:
            return StreamKPlan(row.m, row.n, row.warps, row.stages, row.split, row.waves)
        if row.slices:
            return SlicedPlan(row.m, row.slices, row.stages)
        if row.tall and row.m == 0:
            return WholeTilesPlan()
        if row.tall:
            return PersistentPlan(row.m, row.stages, row.split)
        return TilePlan(
            row.m, row.n, row.warps, row.stages, row.swap, row.tma, row.split, row.waves, row.halves
        )

    def row(self) -> LinearRow:
        raise NotImplementedError

    def portable(self) -> TilePlan:
        """For GPUs without bulk copies, and for the interpreter."""
        raise NotImplementedError


@dataclass(frozen=True)
class TilePlan(LinearPlan):
    """The kernels of fp8_gemm.py. m tokens and n weight rows a tile; swap: weights on the M side;
    tma: bulk copies; split: at most so many programs share a tile's columns; waves: at most so many
    programs a multiprocessor (0: one a tile); halves: the tile's weight rows in two products, so
    that half the partial sums are alive and two programs fit a multiprocessor (with bulk copies, no
    split)."""

    m: int
    n: int
    warps: int
    stages: int
    swap: bool = True
    tma: bool = False
    split: int = 1
    waves: int = 0
    halves: bool = False

    def row(self) -> LinearRow:
        return LinearRow(**vars(self))

    def portable(self) -> TilePlan:
        return replace(self, tma=False, halves=False, stages=min(self.stages, 2))


@dataclass(frozen=True)
class StreamKPlan(LinearPlan):
    """The kernel of fp8_gemm_sm90_streamk.py: weights on the M side, bulk copies. m from 8 on; n:
    16 rows a warp; split: at most so many programs share a tile's columns on average, 1 for whole
    tiles; waves: as of a TilePlan."""

    m: int
    n: int
    warps: int
    stages: int
    split: int = 1
    waves: int = 0

    def __post_init__(self) -> None:
        if self.n != 16 * self.warps or self.n > 128 or self.stages < 2:
            raise ValueError(
                f"no streaming product has {self.n} weight rows, {self.warps} warps and "
                f"{self.stages} stages"
            )

    def row(self) -> LinearRow:
        return LinearRow(**vars(self), stream=True)

    def portable(self) -> TilePlan:
        return TilePlan(max(16, self.m), 64, 4, 2, split=min(8, self.split))


@dataclass(frozen=True)
class PersistentPlan(LinearPlan):
    """The kernel of fp8_gemm_sm90_persistent.py, for many tokens: tiles of m (128, 192 or 256)
    tokens and 128 weight rows. split: so many programs share a tile's columns (m 128 alone)."""

    m: int
    stages: int
    split: int = 1

    def __post_init__(self) -> None:
        if self.split > 1 and self.m != 128:
            raise ValueError(f"tiles of {self.m} tokens are not split")

    def parts(self, rows: int, columns: int, high: int, processors: int) -> tuple[int, int]:
        """(programs that share a tile, programs) for `high` tiles of tokens: (1, 0) if not split.
        All programs run at once. Each part has two blocks of 128 columns or more (of one, the
        compiler clears registers after the fence of the product that uses them)."""
        blocks, left = divmod(columns // 128, self.split)
        wide, rest = divmod(rows, 128)
        narrow = 0 < rest <= 64  # such tiles have half as many parts
        whole = wide + (rest > 64)
        programs = high * (whole * self.split + narrow * max(1, self.split // 2))
        even = self.split % 2 == 0 or not narrow
        few = high <= 16 and programs <= processors and 4 * high * (whole + narrow) <= COUNTERS
        if self.split == 1 or left or blocks < 2 or not even or not few:
            return 1, 0
        return self.split, programs

    def row(self) -> LinearRow:
        return LinearRow(
            self.m, 128, 4, self.stages, swap=False, tma=True, tall=True, split=self.split
        )

    def portable(self) -> TilePlan:
        return TilePlan(128, 128, 8, 2, swap=False)


@dataclass(frozen=True)
class WholeTilesPlan(LinearPlan):
    """A PersistentPlan without split whose m the shape decides: see `whole_tiles`."""

    def row(self) -> LinearRow:
        return LinearRow(0, 128, 4, 0, swap=False, tma=True, tall=True)


# of tiles of m tokens: time of 128 columns, in that of 256 tokens; stages that fit
HEIGHTS = {256: (1.0, 4), 192: (0.87, 4), 128: (0.555, 6)}
TILE_OVERHEAD = 2.0  # the first copies and the last results of a tile, in the same unit
NARROW = 0.75  # time of a tile of up to 64 weight rows, in that of one of 128
TOKEN_TILES = 16  # that iterate over all weight tiles together


@lru_cache(4096)
def whole_tiles(tokens: int, rows: int, columns: int, processors: int) -> PersistentPlan:
    """The m that takes least time by the number of tiles that a program has, since all wait for
    those with one more than the others: 768 tokens and 4096 weight rows are 192 tiles of 128
    tokens, two rounds on 132 multiprocessors; 128 of 192, one; 96 of 256, one that takes longer. Of
    equal times the highest, which reads least."""
    blocks = -(-columns // 128)

    def time(m: int) -> float:
        tile = HEIGHTS[m][0] * blocks + TILE_OVERHEAD
        return rounds(-(-tokens // m), rows, processors) * tile

    m = min(HEIGHTS, key=time)
    return PersistentPlan(m, HEIGHTS[m][1])


def rounds(high: int, rows: int, processors: int) -> float:
    """Tiles one after the other on the processor with most work: `high` of tokens by each 128
    weight rows, in the order of fp8_gemm_sm90_loop.tile_of."""
    wide = -(-rows // 128)
    full, left = divmod(high * wide, processors)
    if not 0 < rows % 128 <= 64:
        return full + (left > 0)
    loads = [float(full + (processors - 1 - p < left)) for p in range(processors)]
    for start in range(0, high, TOKEN_TILES):
        height = min(TOKEN_TILES, high - start)
        last = start * wide + height * wide
        for tile in range(last - height, last):
            turn, place = divmod(tile, processors)
            loads[place if turn < full else processors - 1 - place] -= 1 - NARROW
    return max(loads)


@dataclass(frozen=True)
class SlicedPlan(LinearPlan):
    """The kernel of fp8_gemm_sm90_sliced.py, for up to some hundred tokens: tiles of m tokens and
    64 weight rows, one a program, whose columns `slices` warpgroups share. stages: a multiple of
    slices."""

    m: int
    slices: int
    stages: int

    def __post_init__(self) -> None:
        if (
            self.m not in (8, 16, 32, 64, 128)
            or self.slices not in (2, 3)
            or self.stages % self.slices
        ):
            raise ValueError(
                f"no product has {self.slices} slices of {self.m} tokens and {self.stages} stages"
            )

    def row(self) -> LinearRow:
        return LinearRow(self.m, 64, 4, self.stages, slices=self.slices)

    def unsliced(self) -> StreamKPlan | PersistentPlan:
        """Where it does not fit: see fp8_gemm_sm90_sliced.fits."""
        return PersistentPlan(128, 6) if self.m == 128 else StreamKPlan(self.m, 64, 4, 6, 4, 2)

    def portable(self) -> TilePlan:
        return TilePlan(max(16, self.m), 64, 4, 2)
