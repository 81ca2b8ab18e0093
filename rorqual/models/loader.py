"""Load a model's weights from safetensors files, or draw them from a seed.

Every checkpoint tensor must be used or skipped by design, and every parameter must be filled.
Otherwise loading fails, naming the tensors, before any of them is read.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rorqual.errors import LoadError
from rorqual.layers.parameter import Convert, Target, Window
from rorqual.models.checkpoint import (
    DTYPES,
    NAMES_SHOWN,
    CheckpointFile,
    StoredTensor,
    checkpoint_files,
)
from rorqual.models.weight_reader import (
    ConvertedPart,
    FilePart,
    default_threads,
    fill,
    parts_of,
)
from rorqual.ops import rng
from rorqual.ops.interface import Ops
from rorqual.ops.rounding import pack_int4
from rorqual.parallel.mesh import Mesh
from rorqual.platforms import make_platform

log = logging.getLogger("rorqual.engine")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (*FLOATS, torch.float8_e8m0fnu)
PIECE = 64 * 2**20  # bytes of random numbers that are drawn and rounded at a time
Draw = Callable[[Tensor, int, float, int, int], None]


class Loadable(Protocol):
    """A model, or a part of one, whose weights can be loaded. Members are as in Transformer."""

    dtype: torch.dtype
    mesh: Mesh
    ops: Ops

    def targets(self) -> Iterator[Target]: ...

    def skips(self, name: str) -> bool: ...

    def finalize(self) -> None: ...

    def derived(self) -> list[Tensor]: ...


def load_weights(model: Loadable, folder: str | Path, threads: int | None = None) -> None:
    """Load `model` from the safetensors files of `folder` with `threads` threads, then finalize
    it."""
    began = time.perf_counter()
    targets = TargetsByName(model.targets())
    threads = threads or default_threads(model.mesh.sizes.world)
    size = targets.read(checkpoint_files(Path(folder)), threads, model.skips)
    seconds = time.perf_counter() - began
    rate = size / 1e9 / max(seconds, 1e-9)
    log.info(
        "weights: %.2f GB in %.1f s, %.2f GB/s by %d threads", size / 1e9, seconds, rate, threads
    )
    model.finalize()


def random_weights(model: Loadable, seed: int) -> None:
    """Draw the weights of `model`, then finalize it. They depend only on (seed, tensor name,
    element), not on the parallel layout."""
    for target in model.targets():
        if not target.covers and target.view.numel():
            _draw(target, model, seed)
    model.finalize()


def _draw(target: Target, model: Loadable, seed: int) -> None:
    convert = target.convert
    if convert and convert.draw:
        convert.draw()
    elif convert and convert.into == ():  # numbers that are only checked
        return
    elif target.std is None:
        target.view.fill_(target.fill)
    elif target.view.dtype == torch.uint8 and target.place:
        _draw_int4(target, target.place, seed)
    elif convert:
        _draw_and_convert(target, convert, model, seed)
    else:
        # An fp32 parameter of a 16-bit model (a router) gets values that a 16-bit checkpoint could
        # hold.
        narrow = target.view.dtype == torch.float32 and model.dtype != torch.float32
        view = torch.empty_like(target.view, dtype=model.dtype) if narrow else target.view
        place = (target.shape, target.origin)
        fill_normal(view, target.name, seed, target.std, *place, model.ops.draw_normal)
        if narrow:
            target.view.copy_(view)


def _draw_int4(target: Target, place: Window, seed: int) -> None:
    """Draw numbers 0 to 15 around 8, some rows at a time."""
    assert target.std is not None
    rows, columns = target.view.shape[0], 2 * target.view.shape[1]
    step = max(1, PIECE // (4 * columns))
    for start in range(0, rows, step):
        part = target.view[start : start + step]
        wide = torch.empty(part.shape[0], columns, device=part.device)
        origin = (place.row + start, place.column)
        fill_normal(wide, target.name, seed, target.std, place.shape, origin)
        part.copy_(pack_int4((wide.round().clamp(-8, 7) + 8).to(torch.uint8)))


def _draw_and_convert(target: Target, convert: Convert, model: Loadable, seed: int) -> None:
    """Draw in the file's format and convert, as if a checkpoint was read."""
    assert target.std is not None
    rows, columns = convert.extent
    step = convert.pieces(PIECE)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        wide = torch.empty(stop - start, columns, dtype=model.dtype, device=target.view.device)
        origin = (target.origin[0] + start, target.origin[1])
        draw = model.ops.draw_normal
        fill_normal(wide, target.name, seed, target.std, target.shape, origin, draw)
        convert.store(slice(start, stop), wide)


class TargetsByName:
    """The targets of a model by checkpoint name, and which of them have been filled."""

    def __init__(self, targets: Iterable[Target]):
        self.by_name: dict[str, list[Target]] = {}
        for target in targets:
            self.by_name.setdefault(target.name, []).append(target)
        self.filled: set[str] = set()
        self.surplus: list[str] = []

    def has(self, name: str) -> bool:
        return name in self.by_name

    @property
    def device(self) -> str:
        """The parameters' device; some parameters may be in host memory."""
        found = {str(target.view.device) for targets in self.by_name.values() for target in targets}
        return next(iter(found - {"cpu"}), "cpu")

    def read(
        self,
        paths: Iterable[Path],
        threads: int,
        skips: Callable[[str], bool] = lambda name: False,
    ) -> int:
        """Fill all targets; returns the bytes loaded. `skips`: names that are skipped by design."""
        pieces: list[FilePart | ConvertedPart] = []
        with ExitStack() as stack:
            for path in paths:
                file = CheckpointFile(path)
                stack.callback(file.close)
                for stored in file.tensors():
                    if self.has(stored.name):
                        pieces += self._place(stored, file)
                    elif not skips(stored.name):
                        self.surplus.append(stored.name)
            self.check()
            fill(pieces, make_platform(self.device), threads)
        return sum(piece.kept for piece in pieces)

    def _place(
        self, stored: StoredTensor, file: CheckpointFile
    ) -> Iterator[FilePart | ConvertedPart]:
        """The parts to read of a tensor, after checking its shape and dtype."""
        name = stored.name
        where = f"{name} in {file.path.name}"
        targets = self.by_name[name]
        for target in targets:
            if target.shape != (stored.shape or (1,)):
                raise LoadError(
                    f"{where} has shape {list(stored.shape)}, the configuration asks "
                    f"for {list(target.shape)}"
                )
        again = self.filled.intersection(targets[0].covered_names)
        if again:
            raise LoadError(f"{where} fills {sorted(again)[0]} a second time")
        dtype = DTYPES.get(stored.dtype)
        for target in targets:
            if not target.view.numel():
                continue
            wanted = _dtypes_of(target)
            if dtype not in wanted:
                asked = " or ".join(map(str, wanted[:1] if target.convert is None else wanted))
                raise LoadError(
                    f"{where} is {dtype or stored.dtype}, the configuration asks for {asked}"
                )
            yield from parts_of(file, stored.offset, dtype, target)
        self.filled.update(targets[0].covered_names)

    def check(self) -> None:
        wanted = {
            name
            for name, targets in self.by_name.items()
            if not targets[0].covers and not targets[0].optional
        }
        missing = sorted(wanted - self.filled)
        if missing:
            raise LoadError(f"the checkpoint lacks {_listing(missing)}")
        if self.surplus:
            raise LoadError(
                "the checkpoint holds tensors the model does not use: "
                f"{_listing(sorted(self.surplus))}"
            )


def _dtypes_of(target: Target) -> tuple[torch.dtype, ...]:
    """Dtypes that the file may have; the view's first."""
    if target.convert is not None:
        return target.convert.dtypes
    wanted = target.view.dtype
    if wanted not in FLOATS:
        return (wanted,)
    return (wanted, *(SCALES if target.is_scale else FLOATS))


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def fill_normal(
    view: Tensor,
    name: str,
    seed: int,
    std: float,
    whole: tuple[int, ...] | None = None,
    start: tuple[int, ...] | None = None,
    draw: Draw = rng.draw_normal,
) -> None:
    """Normal random numbers, the same on every device and for every sharding. `view` is a whole
    checkpoint tensor, or the window from `start` on of a matrix of shape `whole`."""
    key = int.from_bytes(
        hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little", signed=True
    )
    columns = view.shape[-1]
    rows = view.view(-1, columns) if view.is_contiguous() else view.flatten(0, -2)
    width = columns if whole is None else whole[-1]
    first_row, first_column = (0, 0) if start is None or view.dim() == 1 else start
    assert view.dim() <= 2 or width == columns, "windows are drawn of matrices alone"
    draw(rows, key, std, first_row * width + first_column, width)
