"""Copies pages of a cache from its planes to rows of bytes, and back: one launch for all planes,
instead of one torch copy per plane and page.

A row is one page, or a part of it: plane after plane, each with its tokens in order. Rows may be
mapped memory of another GPU, or pinned memory of the host; few programs then copy over the link,
leaving the multiprocessors to the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 2048  # units per program
# two H100 (NV18): 331 GB/s of V2-Lite's pages; 1,056 programs reach 338
FAR_PROGRAMS = 66  # half of the multiprocessors get one
FAR_SIZE = 4096
FAR_WARPS = 8
# One H200: 64 KB in flight reach 27 GB/s of the host's memory, 128 KB 50, 256 KB 51, also beside
# kernels that use all of the device's bandwidth, which take 6 % longer. With a megabyte it is 20 %,
# and small kernels take 1.7 times as long instead of 1.4. Few programs leave multiprocessors to
# kernels that need one whole for each of theirs.
HOST_IN_FLIGHT = 2**18
HOST_SIZE = 8192
HOST_WARP_SIZE = 512  # units of a warp
FIELDS = 5
UNITS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}  # by bytes
VECTOR = 16  # most bytes that a thread loads at once


@triton.jit
def _copy_piece(
    pages,
    planes,
    rows,
    row_units,
    tokens,
    place,
    number,
    piece,
    TO_ROWS: tl.constexpr,
    FAR: tl.constexpr,
    BY_ADDRESS: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Pointers and mask of the units from piece * SIZE on, of page number `place` in plane
    `number`. Planes are five numbers each (`PlaneTable`). FAR: rows are on another GPU. ALIGNED:
    units that all numbers except the address are multiples of. WHOLE: tokens of a page are
    contiguous in every plane. BY_ADDRESS: `rows` has the rows' addresses."""
    place = place.to(tl.int64)
    page = tl.load(pages + place)
    plane = planes + number * 5
    address = tl.load(plane)
    page_units = tl.load(plane + 1)
    token_units = tl.multiple_of(tl.load(plane + 2), ALIGNED)
    width = tl.multiple_of(tl.load(plane + 3).to(tl.int32), ALIGNED)
    start = tl.multiple_of(tl.load(plane + 4), ALIGNED)
    BYTES: tl.constexpr = UNIT.primitive_bitwidth // 8
    # the compiler forgets an integer's alignment when it becomes a pointer
    own = (address + page * page_units * BYTES).to(tl.pointer_type(UNIT))
    own = tl.multiple_of(own, ALIGNED * BYTES)
    offsets = piece * SIZE + tl.arange(0, SIZE)
    inside = offsets < tokens * width
    if WHOLE:
        own += offsets
    else:
        token = offsets // width
        own += token * token_units + (offsets - token * width)
    if BY_ADDRESS:
        own_row = tl.load(rows + place).to(tl.pointer_type(UNIT))
        row = tl.multiple_of(own_row, ALIGNED * BYTES) + start + offsets
    else:
        row = rows + place * tl.multiple_of(row_units, ALIGNED) + start + offsets
    if TO_ROWS:
        tl.store(row, tl.load(own, mask=inside), mask=inside)
    elif FAR:  # no data is read twice
        tl.store(own, tl.load(row, mask=inside, cache_modifier=".cg"), mask=inside)
    else:
        tl.store(own, tl.load(row, mask=inside), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["pages"])
def _page_bytes_kernel(
    pages,
    planes,
    rows,
    row_units,
    tokens,
    TO_ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    SIZE: tl.constexpr,
):
    _copy_piece(
        pages,
        planes,
        rows,
        row_units,
        tokens,
        tl.program_id(0),
        tl.program_id(1),
        tl.program_id(2),
        TO_ROWS,
        False,
        False,
        UNIT,
        ALIGNED,
        WHOLE,
        SIZE,
    )


@triton.jit
def _copy_pieces(
    pages,
    planes,
    rows,
    row_units,
    tokens,
    first,
    count,
    plane_count,
    pieces,
    BY_ADDRESS: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Copies `count` pages of the `plane_count` planes from number `first` on, in several pieces
    each. Programs are interleaved, so that concurrent accesses are adjacent."""
    for item in range(tl.program_id(0), count * plane_count * pieces, tl.num_programs(0)):
        row = item // pieces
        _copy_piece(
            pages,
            planes,
            rows,
            row_units,
            tokens,
            row // plane_count,
            first + row % plane_count,
            item % pieces,
            False,
            True,
            BY_ADDRESS,
            UNIT,
            ALIGNED,
            WHOLE,
            SIZE,
        )


# one kernel for any number of pages and any alignment of their list
@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["pages"])
def _far_rows_kernel(
    pages,
    planes,
    rows,
    row_units,
    tokens,
    count,
    plane_count,
    pieces,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    SIZE: tl.constexpr,
):
    _copy_pieces(
        pages,
        planes,
        rows,
        row_units,
        tokens,
        0,
        count,
        plane_count,
        pieces,
        False,
        UNIT,
        ALIGNED,
        WHOLE,
        SIZE,
    )


@triton.jit(
    do_not_specialize=["first", "count", "plane_count", "pieces"],
    do_not_specialize_on_alignment=["pages", "addresses"],
)
def _host_rows_kernel(
    pages,
    planes,
    addresses,
    tokens,
    first,
    count,
    plane_count,
    pieces,
    UNIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    SIZE: tl.constexpr,
):
    _copy_pieces(
        pages,
        planes,
        addresses,
        0,
        tokens,
        first,
        count,
        plane_count,
        pieces,
        True,
        UNIT,
        ALIGNED,
        WHOLE,
        SIZE,
    )


@dataclass(frozen=True)
class PlaneTable:
    """The kernel's description of planes on one device. `planes` [planes, 5] int64: address of page
    0's first byte, then, in units of `unit` bytes, page stride, token stride, a token's width, and
    the plane's offset in a row. width: the largest width. size: bytes of a row."""

    planes: Tensor
    unit: int
    aligned: int
    whole: bool
    width: int
    tokens: int
    size: int
    reads_host: ClassVar[bool] = True

    @staticmethod
    def of(planes: Sequence[Tensor]) -> PlaneTable:
        """planes: [pages, tokens, ...] each, or some heads of it; the entries of a token must be
        contiguous. They must live as long as the table is used."""
        tokens = planes[0].shape[1]
        device = planes[0].device
        found: list[tuple[int, ...]] = []
        start = 0
        for plane in planes:
            assert plane[0, 0].is_contiguous(), "a token's entries lie together"
            assert plane.shape[1] == tokens
            width = plane[0, 0].nbytes
            page_bytes, token_bytes = (plane.stride(i) * plane.element_size() for i in range(2))
            found.append((plane.data_ptr(), page_bytes, token_bytes, width, start))
            start += width * tokens
        common = gcd(VECTOR, *(number for plane in found for number in plane), start)
        unit = min(8, common)
        table = [(plane[0], *(number // unit for number in plane[1:])) for plane in found]
        return PlaneTable(
            torch.tensor(table, dtype=torch.int64).to(device),
            unit,
            common // unit,
            all(plane[2] == plane[3] for plane in found),
            max(plane[3] for plane in table),
            tokens,
            start,
        )

    def gather(self, pages: Tensor, rows: Tensor) -> None:
        """Copies pages [n] int64 to the first n of rows [rows, size] uint8, both on the device."""
        self._launch(pages, rows, True, False)

    def scatter(self, rows: Tensor, pages: Tensor, far: bool = False) -> None:
        """Copies the first n of rows [rows, size] uint8 to pages [n] int64. far: the rows are
        another GPU's, mapped here."""
        self._launch(pages, rows, False, far)

    def read_host(self, addresses: Tensor, pages: Tensor, planes: range) -> None:
        """Copies some planes of rows in pinned memory to pages [n] int64. addresses [n] int64: of
        the rows, multiples of 16 bytes or of what divides all of a page's sizes."""
        size = min(HOST_SIZE, triton.next_power_of_2(self.tokens * self.width))
        pieces = triton.cdiv(self.tokens * self.width, size)
        items = pages.shape[0] * len(planes) * pieces
        programs = max(1, min(HOST_IN_FLIGHT // (size * self.unit), items))
        if pages.is_cuda:
            self.planes.record_stream(torch.cuda.current_stream(pages.device))
        _host_rows_kernel[(programs,)](
            pages,
            self.planes,
            addresses,
            self.tokens,
            planes.start,
            pages.shape[0],
            len(planes),
            pieces,
            UNIT=UNITS[self.unit],
            ALIGNED=self.aligned,
            WHOLE=self.whole,
            SIZE=size,
            num_warps=max(1, size // HOST_WARP_SIZE),
        )

    def _launch(self, pages: Tensor, rows: Tensor, to_rows: bool, far: bool) -> None:
        assert rows.shape[1] == self.size
        assert rows.is_contiguous()
        assert pages.shape[0] <= rows.shape[0]
        if not pages.shape[0]:
            return
        # rows may begin anywhere, and then fewer bytes go at once than planes would allow
        assert rows.data_ptr() % self.unit == 0, f"rows begin at a multiple of {self.unit} bytes"
        aligned = 1 if rows.data_ptr() % (self.unit * self.aligned) else self.aligned
        if rows.is_cuda:
            self.planes.record_stream(torch.cuda.current_stream(rows.device))
        kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[self.unit]
        size = FAR_SIZE if far else SIZE
        grid = (
            pages.shape[0],
            self.planes.shape[0],
            triton.cdiv(self.tokens * self.width, size),
        )
        if far:
            _far_rows_kernel[(min(FAR_PROGRAMS, grid[0] * grid[1] * grid[2]),)](
                pages,
                self.planes,
                rows.view(kind),
                self.size // self.unit,
                self.tokens,
                *grid,
                UNIT=UNITS[self.unit],
                ALIGNED=aligned,
                WHOLE=self.whole,
                SIZE=size,
                num_warps=FAR_WARPS,
            )
            return
        _page_bytes_kernel[grid](
            pages,
            self.planes,
            rows.view(kind),
            self.size // self.unit,
            self.tokens,
            TO_ROWS=to_rows,
            UNIT=UNITS[self.unit],
            ALIGNED=aligned,
            WHOLE=self.whole,
            SIZE=size,
            num_warps=8,
        )
