"""Read parts of checkpoint files into parameters, with several threads.

A thread reads up to STAGE adjacent bytes of a file into its own host buffer, from which the device
copies them while the thread reads on. Parameters in host memory that have the file's format are
read directly. Columns of a matrix are copied from a memory-mapped file, so only they are read.
Extra memory is at most two buffers per thread.

Data whose format differs from the file's is converted piece by piece, one piece at a time, since
torch's operations use all cores already.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import Tensor

from rorqual.errors import LoadError
from rorqual.layers.parameter import Convert, Target
from rorqual.models.checkpoint import CheckpointFile
from rorqual.platforms.base import Platform, Staging

STAGE = 8 * 2**20
MIN_THREADS = 4  # most of them wait for the disk
MAX_THREADS = 16
CONVERTING = threading.Lock()


@dataclass(frozen=True)
class FilePart:
    """`size` bytes of a file from `start` on, values [shape]. Their columns `inner` (None: all) go
    to `view`. Each row fills `repeat` rows, of which the first `skip` are dropped."""

    file: CheckpointFile
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    inner: slice | None
    view: Tensor
    repeat: int = 1
    skip: int = 0
    is_scale: bool = False  # its numbers must be finite
    name: str = ""

    @property
    def kept(self) -> int:
        return self.view.nbytes

    @property
    def alone(self) -> bool:
        """Whether it is read on its own, not with adjacent parts."""
        return self.direct or self.inner is not None

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def direct(self) -> bool:
        """Whether the file's bytes can be read straight into the view."""
        view = self.view
        as_it_is = self.inner is None and self.repeat == 1 and self.dtype == view.dtype
        plain = as_it_is and not self.is_scale
        return plain and view.device.type == "cpu" and view.is_contiguous()


@dataclass(frozen=True)
class ConvertedPart:
    """`places` of a tensor's first axis: values [shape] from byte `start` on. Their columns `inner`
    (None: all) go through `convert`."""

    file: CheckpointFile
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    inner: slice | None
    convert: Convert
    places: slice
    is_scale: bool
    name: str

    alone = True

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def kept(self) -> int:
        columns = self.shape[1:] if self.inner is None else (self.inner.stop - self.inner.start,)
        return math.prod((self.shape[0], *columns)) * self.dtype.itemsize

    def run(self, platform: Platform) -> None:
        if self.inner is None:
            data = torch.empty(self.shape, dtype=self.dtype)
            self.file.read(self.start, data)
        else:
            data = self.file.mapped(self.start, self.dtype, self.shape)[:, self.inner].clone()
        if self.is_scale:
            check_scale(self, data)
        with CONVERTING:
            try:
                self.convert.store(self.places, data)
                platform.synchronize()  # the next piece may be on another stream
            except ValueError as error:
                raise LoadError(f"{self.name} in {self.file.path.name} {error}") from None


def check_scale(piece: FilePart | ConvertedPart, data: Tensor) -> None:
    """Raises LoadError for infinities and NaN."""
    if not data.float().isfinite().all():
        raise LoadError(f"{piece.name} in {piece.file.path.name} holds a scale that is no number")


def parts_of(
    file: CheckpointFile, offset: int, dtype: torch.dtype, target: Target
) -> Iterator[FilePart | ConvertedPart]:
    """The parts of a target's tensor, which begins at byte `offset`: at most STAGE bytes each,
    unless a conversion needs more at once."""
    if not target.view.numel():
        return
    if target.convert is not None:
        yield from _converted(file, offset, dtype, target, target.convert)
        return
    at = FilePart(
        file,
        offset,
        dtype,
        target.shape,
        None,
        target.view,
        target.repeat,
        is_scale=target.is_scale,
        name=target.name,
    )
    yield from _split(at, target.origin)


def _converted(
    file: CheckpointFile, offset: int, dtype: torch.dtype, target: Target, convert: Convert
) -> Iterator[ConvertedPart]:
    (first, *rest) = target.origin
    (count, *widths) = convert.extent
    width = math.prod(target.shape[1:])
    inner = None
    if widths and widths[0] < target.shape[1]:
        inner = slice(rest[0], rest[0] + widths[0])
    step = convert.pieces(STAGE)
    for begin in range(0, count, step):
        rows = min(step, count - begin)
        yield ConvertedPart(
            file,
            offset + (first + begin) * width * dtype.itemsize,
            dtype,
            (rows, *target.shape[1:]),
            inner,
            convert,
            slice(begin, begin + rows),
            target.is_scale,
            target.name,
        )


def _split(piece: FilePart, origin: tuple[int, ...]) -> Iterator[FilePart]:
    """piece: a whole tensor; its window from `origin` on goes to the view."""
    view = piece.view
    shape = piece.shape
    if not shape:
        yield piece
        return
    item = piece.dtype.itemsize
    row = math.prod(shape[1:]) * item
    width = math.prod(view.shape[1:]) * item
    if len(shape) > 1 and (width > STAGE or (len(shape) > 2 and width < row)):
        assert piece.repeat == 1, "scales are small matrices"
        for i in range(view.shape[0]):
            start = piece.start + (origin[0] + i) * row
            inside = replace(piece, start=start, shape=shape[1:], view=view[i])
            yield from _split(inside, origin[1:])
        return
    inner = slice(origin[1], origin[1] + view.shape[1]) if width < row else None
    first = origin[0]
    last = first + view.shape[0]
    repeat = piece.repeat
    end = -(-last // repeat)
    step = max(1, STAGE // width)
    for begin in range(first // repeat, end, step):
        rows = min(step, end - begin)
        lowest = max(first, begin * repeat)
        highest = min(last, (begin + rows) * repeat)
        yield replace(
            piece,
            start=piece.start + begin * row,
            shape=(rows, *shape[1:]),
            inner=inner,
            view=view[lowest - first : highest - first],
            skip=lowest - begin * repeat,
        )


Work = list[FilePart] | ConvertedPart


def reads_of(pieces: Iterable[FilePart | ConvertedPart]) -> Iterator[Work]:
    """Units of reading, in file order: adjacent pieces that fit a buffer together, or single pieces
    that need no buffer or are read from a mapping."""
    by_file: dict[CheckpointFile, list[FilePart | ConvertedPart]] = {}
    for piece in pieces:
        by_file.setdefault(piece.file, []).append(piece)
    for found in by_file.values():
        group: list[FilePart] = []
        stop = 0
        for piece in sorted(found, key=attrgetter("start")):
            if group and (
                piece.alone or piece.start > stop or max(stop, piece.stop) - group[0].start > STAGE
            ):
                yield group
                group = []
            if isinstance(piece, ConvertedPart):
                yield piece
            elif piece.alone:
                yield [piece]
            else:
                stop = max(stop, piece.stop) if group else piece.stop
                group.append(piece)
        if group:
            yield group


def default_threads(ranks: int) -> int:
    """Threads per rank, if `ranks` ranks share the host."""
    return max(MIN_THREADS, min(MAX_THREADS, len(os.sched_getaffinity(0)) // ranks))


def fill(pieces: Iterable[FilePart | ConvertedPart], platform: Platform, threads: int) -> None:
    """Read all pieces. No thread is left running when this returns or raises."""
    work = deque(reads_of(pieces))
    platform.synchronize()  # the parameters' memory may still be in use by its previous owner
    threads = min(threads, max(1, len(work)))
    mode = torch.is_inference_mode_enabled()  # threads need the same mode to write the weights
    with ThreadPoolExecutor(threads, "weights") as pool:
        readers: list[Future[None]] = [
            pool.submit(_read_all, work, platform, mode) for _ in range(threads)
        ]
        try:
            for reader in readers:
                reader.result()
        finally:
            work.clear()  # after an error or Ctrl-C the others stop after their current piece
            wait(readers)


def _read_all(work: deque[Work], platform: Platform, inference_mode: bool) -> None:
    """Thread body: read until no work is left or a thread failed."""
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference_mode))
            stack.enter_context(platform.stream())  # the current device is per thread
            staging: Staging | None = None
            while work:
                try:
                    group = work.popleft()
                except IndexError:  # another thread was faster
                    return
                if isinstance(group, ConvertedPart):
                    group.run(platform)
                    continue
                if len(group) == 1 and group[0].direct:
                    group[0].file.read(group[0].start, group[0].view)
                    continue
                if staging is None:
                    staging = stack.enter_context(platform.staging(STAGE))
                _read_staged(group, staging)
    except BaseException:
        work.clear()
        raise


def _read_staged(group: Sequence[FilePart], staging: Staging) -> None:
    first = group[0]
    buffer = staging.buffer()
    if first.inner is not None:
        mapped = first.file.mapped(first.start, first.dtype, first.shape)[:, first.inner]
        size = mapped.numel() * first.dtype.itemsize
        staged = buffer[:size].view(first.dtype).view(mapped.shape)
        _place(first, staged.copy_(mapped))
    else:
        size = max(piece.stop for piece in group) - first.start
        first.file.read(first.start, buffer[:size])
        for piece in group:
            begin = piece.start - first.start
            part = buffer[begin : begin + piece.size]
            if part.storage_offset() % piece.dtype.itemsize:
                part = part.clone()  # misaligned: tensors of narrower types precede it
            _place(piece, part.view(piece.dtype).view(piece.shape))
    staging.sent()


def _place(piece: FilePart, data: Tensor) -> None:
    """Copy `data`, in host memory, to its view. Conversions run on the device."""
    view = piece.view
    if piece.is_scale:
        check_scale(piece, data)
    if piece.repeat > 1 or data.dtype != view.dtype or not view.is_contiguous():
        data = data.to(view.device, non_blocking=True)
    if piece.repeat > 1:
        data = data.to(view.dtype).repeat_interleave(piece.repeat, 0)[piece.skip :][: view.shape[0]]
    view.copy_(data, non_blocking=True)
