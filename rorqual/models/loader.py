"""Fill a model from safetensors files, streamed, or from a seed.

Every checkpoint tensor must be used or be skipped by design, and every parameter must be filled;
anything else is an error that names the tensors. At most WINDOW bytes of a file are mapped at a
time, so loading never holds two copies of the model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rorqual.errors import LoadError
from rorqual.layers.parameter import Convert, Target, Window
from rorqual.models.transformer import Transformer
from rorqual.ops import rng
from rorqual.ops.rounding import pack_int4

WINDOW = 64 * 2**20
NAMES_SHOWN = 5
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (*FLOATS, torch.float8_e8m0fnu)
Draw = Callable[[Tensor, int, float, int, int], None]


def load_weights(model: Transformer, folder: str | Path) -> None:
    """Fill `model` from the safetensors files of `folder`, then finalize it."""
    places = TargetsByName(model.targets())
    for path in checkpoint_files(Path(folder)):
        for name, shape, reader in read_file(path):
            if places.has(name):
                places.fill(name, shape, reader, path)
            elif not model.skips(name):
                places.surplus.append(name)
    places.check()
    model.finalize()


def random_weights(model: Transformer, seed: int) -> None:
    """Fill `model` with weights that depend on (seed, tensor name, element) alone, whatever the
    layout, then finalize it."""
    for target in model.targets():
        if not target.covers and target.view.numel():
            _draw(target, model, seed)
    model.finalize()


def _draw(target: Target, model: Transformer, seed: int) -> None:
    convert = target.convert
    if convert and convert.draw:
        convert.draw()
    elif convert and convert.into == ():  # numbers that would only be looked at
        return
    elif target.std is None:
        target.view.fill_(target.fill)
    elif target.view.dtype == torch.uint8 and target.place:
        _draw_int4(target, target.place, seed)
    elif convert:
        _draw_and_convert(target, convert, model, seed)
    else:
        # What is kept in fp32 all the same (a router) has the values that a checkpoint in the
        # model's dtype would give it.
        narrow = target.view.dtype == torch.float32 and model.dtype != torch.float32
        view = torch.empty_like(target.view, dtype=model.dtype) if narrow else target.view
        place = (target.shape, target.origin)
        fill_normal(view, target.name, seed, target.std, *place, model.ops.draw_normal)
        if narrow:
            target.view.copy_(view)


def _draw_int4(target: Target, place: Window, seed: int) -> None:
    """Numbers 0 to 15 around 8, some rows at a time."""
    assert target.std is not None
    rows, columns = target.view.shape[0], 2 * target.view.shape[1]
    step = max(1, WINDOW // (4 * columns))
    for start in range(0, rows, step):
        part = target.view[start : start + step]
        wide = torch.empty(part.shape[0], columns, device=part.device)
        origin = (place.row + start, place.column)
        fill_normal(wide, target.name, seed, target.std, place.shape, origin)
        part.copy_(pack_int4((wide.round().clamp(-8, 7) + 8).to(torch.uint8)))


def _draw_and_convert(target: Target, convert: Convert, model: Transformer, seed: int) -> None:
    """As if a file held the draw."""
    assert target.std is not None
    rows, columns = convert.extent
    step = convert.pieces(WINDOW)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        wide = torch.empty(stop - start, columns, dtype=model.dtype, device=target.view.device)
        origin = (target.origin[0] + start, target.origin[1])
        draw = model.ops.draw_normal
        fill_normal(wide, target.name, seed, target.std, target.shape, origin, draw)
        convert.store(slice(start, stop), wide)


def checkpoint_files(folder: Path) -> list[Path]:
    """The files an index names, or every *.safetensors of the folder."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            outside = any("/" in name or name.startswith(".") for name in names)
        except (
            json.JSONDecodeError,
            KeyError,
            AttributeError,
            TypeError,
            UnicodeDecodeError,
        ) as error:
            raise LoadError(f"{index} is not a valid index: {error!r}") from None
        if outside:
            raise LoadError(f"{index} names files outside its folder")
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.exists()]
    if missing or not files:
        raise LoadError(
            f"{folder} lacks {', '.join(missing[:NAMES_SHOWN]) or 'any .safetensors file'}"
        )
    return files


class TensorReader:
    """Reads one tensor's windows, opening its file anew for every WINDOW bytes so that mapped
    pages are given back."""

    def __init__(self, path: Path, name: str, shape: tuple[int, ...]):
        self.path = path
        self.name = name
        self.shape = shape

    def chunks(self, target: Target) -> Iterator[tuple[slice, Tensor]]:
        """(rows of the target's view, what belongs there): the file's pages outside the target's
        window are not touched."""
        if not self.shape:
            yield slice(0, 1), self._read(()).reshape(target.shape)
            return
        if target.convert:
            yield from self._pieces(target, target.convert)
            return
        count = target.view.shape[0]
        (first, *rest) = target.origin
        inner = tuple(
            slice(start, start + length)
            for start, length in zip(rest, target.view.shape[1:], strict=True)
        )
        row = math.prod(target.view.shape[1:]) * max(4, target.view.element_size())
        step = max(1, WINDOW // max(1, row) // target.repeat) * target.repeat
        start = 0
        while start < count:
            # ends where a row of the file ends
            stop = min(count, (first + start) // target.repeat * target.repeat + step - first)
            rows = slice((first + start) // target.repeat, -(-(first + stop) // target.repeat))
            data = self._read((rows, *inner))
            if target.repeat > 1:
                data = data.repeat_interleave(target.repeat, 0)[
                    first + start - rows.start * target.repeat :
                ][: stop - start]
            yield slice(start, stop), data
            start = stop

    def _pieces(self, target: Target, convert: Convert) -> Iterator[tuple[slice, Tensor]]:
        """(places of the window's first axis, what the file has there)"""
        (first, *rest) = target.origin
        (count, *widths) = convert.extent
        inner = tuple(
            slice(start, start + width) for start, width in zip(rest, widths, strict=True)
        )
        step = convert.pieces(WINDOW)
        for start in range(0, count, step):
            stop = min(count, start + step)
            yield slice(start, stop), self._read((slice(first + start, first + stop), *inner))

    def whole(self) -> Tensor:
        return self._read(())

    def _read(self, window: tuple[slice, ...]) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            return file.get_slice(self.name)[window] if window else file.get_tensor(self.name)


def read_file(path: Path) -> Iterator[tuple[str, tuple[int, ...], TensorReader]]:
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path} is damaged or truncated: {error}") from None
    for name, shape in shapes.items():
        yield name, shape, TensorReader(path, name, shape)


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

    def fill(self, name: str, shape: tuple[int, ...], rows: TensorReader, path: Path) -> None:
        for target in self.by_name[name]:
            if target.shape != shape and not (target.shape == (1,) and not shape):
                raise LoadError(
                    f"{name} in {path.name} has shape {list(shape)}, the configuration asks "
                    f"for {list(target.shape)}"
                )
        again = self.filled.intersection(self.by_name[name][0].stands_for)
        if again:
            raise LoadError(f"{name} in {path.name} fills {sorted(again)[0]} a second time")
        self._copy(name, rows, path)
        self.filled.update(self.by_name[name][0].stands_for)

    def _copy(self, name: str, rows: TensorReader, path: Path) -> None:
        try:
            for target in self.by_name[name]:
                for part, data in rows.chunks(target) if target.view.numel() else ():
                    fault = self._put(target, part, data)
                    if fault:
                        raise LoadError(f"{name} in {path.name} {fault}")
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{path} is damaged or truncated: {error}") from None

    @staticmethod
    def _put(target: Target, part: slice, data: Tensor) -> str:
        """What is wrong with the numbers, or nothing."""
        convert = target.convert
        view = target.view[part] if target.view.dim() and not convert else target.view
        wide = FLOATS if not target.is_scale else SCALES
        known = (
            data.dtype in convert.dtypes
            if convert
            else data.dtype == view.dtype or (data.dtype in wide and view.dtype in FLOATS)
        )
        if not known:
            asked = " or ".join(map(str, convert.dtypes)) if convert else str(view.dtype)
            return f"is {data.dtype}, the configuration asks for {asked}"
        if target.is_scale and not data.float().isfinite().all():
            return "holds a scale that is no number"
        if convert is None:
            view.copy_(data)
            return ""
        try:
            convert.store(part, data)
        except ValueError as error:
            return str(error)
        return ""

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
