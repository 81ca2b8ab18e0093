"""Fill a model from safetensors files, streamed, or from a seed.

Every checkpoint tensor must be used or be skipped by design, and every parameter must be filled;
anything else is an error that names the tensors, before any of them is read.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from rorqual.errors import LoadError
from rorqual.layers.parameter import Target
from rorqual.models.checkpoint import (
    DTYPES,
    NAMES_SHOWN,
    CheckpointFile,
    StoredTensor,
    checkpoint_files,
)
from rorqual.models.transformer import Transformer
from rorqual.models.weight_reader import FilePart, default_threads, fill, parts_of
from rorqual.ops import rng
from rorqual.platforms import make_platform

log = logging.getLogger("rorqual.engine")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Draw = Callable[[Tensor, int, float, int, int], None]


def load_weights(model: Transformer, folder: str | Path, threads: int | None = None) -> None:
    """Fill `model` from the safetensors files of `folder`, read by so many threads, then finalize
    it."""
    began = time.perf_counter()
    targets = TargetsByName(model.targets())
    threads = threads or default_threads(model.mesh.sizes.world)
    pieces: list[FilePart] = []
    with ExitStack() as stack:
        for path in checkpoint_files(Path(folder)):
            file = CheckpointFile(path)
            stack.callback(file.close)
            for stored in file.tensors():
                if targets.has(stored.name):
                    pieces += targets.place(stored, file)
                elif not model.skips(stored.name):
                    targets.surplus.append(stored.name)
        targets.check()
        fill(pieces, make_platform(targets.device), threads)
    size = sum(piece.view.numel() * piece.view.element_size() for piece in pieces)
    seconds = time.perf_counter() - began
    rate = size / 1e9 / max(seconds, 1e-9)
    log.info(
        "weights: %.2f GB in %.1f s, %.2f GB/s by %d threads", size / 1e9, seconds, rate, threads
    )
    model.finalize()


def random_weights(model: Transformer, seed: int) -> None:
    """Fill `model` with weights that depend on (seed, tensor name, element) alone, whatever the
    layout, then finalize it."""
    for target in model.targets():
        if target.covers or not target.view.numel():
            continue
        if target.std is None:
            target.view.fill_(target.fill)
        else:
            # What is kept in fp32 all the same (a router) has the values that a checkpoint in the
            # model's dtype would give it.
            narrow = target.view.dtype == torch.float32 and model.dtype != torch.float32
            view = torch.empty_like(target.view, dtype=model.dtype) if narrow else target.view
            fill_normal(
                view,
                target.name,
                seed,
                target.std,
                target.shape,
                target.origin,
                model.ops.draw_normal,
            )
            if narrow:
                target.view.copy_(view)
    model.finalize()


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
        """That of the parameters; some may lie in the host's memory."""
        found = {str(target.view.device) for targets in self.by_name.values() for target in targets}
        return next(iter(found - {"cpu"}), "cpu")

    def place(self, stored: StoredTensor, file: CheckpointFile) -> Iterator[FilePart]:
        """What is to be read for a tensor, once it is known to fit."""
        name = stored.name
        where = f"{name} in {file.path.name}"
        targets = self.by_name[name]
        for target in targets:
            if target.shape != stored.shape:
                raise LoadError(
                    f"{where} has shape {list(stored.shape)}, the configuration asks "
                    f"for {list(target.shape)}"
                )
        again = self.filled.intersection(targets[0].stands_for)
        if again:
            raise LoadError(f"{where} fills {sorted(again)[0]} a second time")
        dtype = DTYPES.get(stored.dtype)
        for target in targets:
            if not target.view.numel():
                continue
            wanted = target.view.dtype
            alike = dtype == wanted or (dtype in FLOATS and wanted in FLOATS)
            if dtype is None or not alike:
                raise LoadError(
                    f"{where} is {dtype or stored.dtype}, the configuration asks for {wanted}"
                )
            yield from parts_of(file, stored.offset, dtype, target)
        self.filled.update(targets[0].stands_for)

    def check(self) -> None:
        wanted = {name for name, targets in self.by_name.items() if not targets[0].covers}
        missing = sorted(wanted - self.filled)
        if missing:
            raise LoadError(f"the checkpoint lacks {_listing(missing)}")
        if self.surplus:
            raise LoadError(
                "the checkpoint holds tensors the model does not use: "
                f"{_listing(sorted(self.surplus))}"
            )


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
    """A draw that every device and every shard makes alike. `view` is a whole checkpoint tensor,
    or the window of a matrix of shape `whole` that begins at `start`."""
    key = int.from_bytes(
        hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little", signed=True
    )
    columns = view.shape[-1]
    rows = view.view(-1, columns) if view.is_contiguous() else view.flatten(0, -2)
    width = columns if whole is None else whole[-1]
    first_row, first_column = (0, 0) if start is None or view.dim() == 1 else start
    assert view.dim() <= 2 or width == columns, "windows are drawn of matrices alone"
    draw(rows, key, std, first_row * width + first_column, width)
