"""Bring parts of checkpoint files to where they belong, by several threads.

A thread reads up to STAGE bytes that lie side by side in a file into host memory of its own, from
where the device copies them while the thread reads on; parameters in host memory that have the
file's form are read into directly. Columns of a matrix are picked from a mapping of the file, so
that nothing else of it is touched. Beside the model there are never more than two buffers a thread.

What is not kept as the file has it is handed to its format piece by piece, one at a time: torch's
operations take all cores as they are.
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
FEWEST_THREADS = 4  # of which most wait for the disk
MOST_THREADS = 16
CONVERTING = threading.Lock()


@dataclass(frozen=True)
class FilePart:
    """size bytes of a file from `start` on hold values [shape], of which the columns `inner`, or
    all, belong into `view`. Each row fills `repeat` rows there, but for the first `skip`."""

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
        """Whether it is read by itself."""
        return self.direct or self.inner is not None

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def direct(self) -> bool:
        """Whether the file's bytes are those of the view, in host memory."""
        view = self.view
        as_it_is = self.inner is None and self.repeat == 1 and self.dtype == view.dtype
        plain = as_it_is and not self.is_scale
        return plain and view.device.type == "cpu" and view.is_contiguous()


@dataclass(frozen=True)
class ConvertedPart:
    """Places of a tensor's first axis, [shape] from byte `start` on, of which the columns `inner`,
    or all, go through `convert`."""

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
                platform.synchronize()  # the next one may be of another stream
            except ValueError as error:
                raise LoadError(f"{self.name} in {self.file.path.name} {error}") from None


def check_scale(piece: FilePart | ConvertedPart, data: Tensor) -> None:
    """Raises LoadError for infinities and what is no number."""
    if not data.float().isfinite().all():
        raise LoadError(f"{piece.name} in {piece.file.path.name} holds a scale that is no number")


def parts_of(
    file: CheckpointFile, offset: int, dtype: torch.dtype, target: Target
) -> Iterator[FilePart | ConvertedPart]:
    """What a target takes of its tensor, which begins at byte `offset`: each at most STAGE, if what
    it converts at once is not more."""
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
    """piece: a whole tensor, whose part from `origin` on belongs into the view."""
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
    """What is read at once, in the order of the files: pieces side by side, as many as a buffer
    takes, and by itself what needs no buffer or is picked from a mapping."""
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
    """Of each of so many ranks, which may share a host."""
    return max(FEWEST_THREADS, min(MOST_THREADS, len(os.sched_getaffinity(0)) // ranks))


def fill(pieces: Iterable[FilePart | ConvertedPart], platform: Platform, threads: int) -> None:
    """Read all pieces. Whatever goes wrong, no thread is left when this returns."""
    work = deque(reads_of(pieces))
    platform.synchronize()  # memory of the parameters may still be in use by what had it before
    threads = min(threads, max(1, len(work)))
    mode = torch.is_inference_mode_enabled()  # of this thread; outside it none could write weights
    with ThreadPoolExecutor(threads, "weights") as pool:
        readers: list[Future[None]] = [
            pool.submit(_read_all, work, platform, mode) for _ in range(threads)
        ]
        try:
            for reader in readers:
                reader.result()
        finally:
            work.clear()  # after an error, or Ctrl-C, the others end with what they are at
            wait(readers)


def _read_all(work: deque[Work], platform: Platform, inference_mode: bool) -> None:
    """On a thread of the pool: until nothing is left, or something went wrong."""
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference_mode))
            stack.enter_context(platform.stream())  # the current device is a thread's own
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
                part = part.clone()  # tensors of narrower types lie before it
            _place(piece, part.view(piece.dtype).view(piece.shape))
    staging.sent()


def _place(piece: FilePart, data: Tensor) -> None:
    """data: on the host. What changes its form happens on the device."""
    view = piece.view
    if piece.is_scale:
        check_scale(piece, data)
    if piece.repeat > 1 or data.dtype != view.dtype or not view.is_contiguous():
        data = data.to(view.device, non_blocking=True)
    if piece.repeat > 1:
        data = data.to(view.dtype).repeat_interleave(piece.repeat, 0)[piece.skip :][: view.shape[0]]
    view.copy_(data, non_blocking=True)
