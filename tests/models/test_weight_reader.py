"""Reading by several threads: the same parameters however finely files are cut, direct reads and
staged ones, and nothing left behind when a file turns out bad."""

from __future__ import annotations

import json
import os
import struct
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rorqual.errors import LoadError
from rorqual.layers.parameter import Target
from rorqual.models import weight_reader
from rorqual.models.checkpoint import DTYPES, CheckpointFile
from rorqual.models.loader import load_weights
from rorqual.models.weight_reader import FilePart, fill, parts_of, reads_of
from rorqual.platforms.cpu import CpuPlatform
from tests.models.test_loader_errors import DEEPSEEK, model_of, save, tensors_of

CPU = CpuPlatform(torch.device("cpu"))


def stored(folder: Path, **tensors: Tensor) -> dict[str, tuple[CheckpointFile, int, torch.dtype]]:
    """(file, offset, dtype) of each tensor."""
    save_file(tensors, folder / "model.safetensors")
    file = CheckpointFile(folder / "model.safetensors")
    return {one.name: (file, one.offset, DTYPES[one.dtype]) for one in file.tensors()}


def open_files(folder: Path) -> int:
    """Of that folder, by this process: others may close meanwhile what earlier tests left."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += os.readlink(descriptor).startswith(str(folder))
    return found


@pytest.mark.parametrize("stage", [4, 50, 4096, 8 * 2**20])
@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("merged", [False, True])
def test_any_cut_gives_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, threads: int, merged: bool
) -> None:
    wanted = tensors_of(model_of(DEEPSEEK))
    held = tensors_of(model_of(DEEPSEEK), split=not merged)
    # some in another precision than the model keeps
    saved = {name: x.bfloat16() if x.numel() % 3 == 0 else x for name, x in held.items()}
    save(tmp_path, saved)
    monkeypatch.setattr(weight_reader, "STAGE", stage)
    model = model_of(DEEPSEEK)
    for target in model.targets():
        target.view.fill_(float("nan"))
    load_weights(model, tmp_path, threads)
    for target in model.targets():
        if not target.covers:
            assert torch.allclose(target.view, wanted[target.name], rtol=1e-2), target.name
            if saved.get(target.name, target.view).dtype == torch.float32 and not merged:
                assert torch.equal(target.view, wanted[target.name])
    assert not open_files(tmp_path)


@pytest.mark.parametrize("stage", [16, 100, 10_000])
@pytest.mark.parametrize(
    ("origin", "shape"),
    [((0, 0), (12, 8)), ((3, 0), (5, 8)), ((0, 2), (12, 3)), ((5, 6), (4, 2))],
)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_windows_of_a_matrix(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: int,
    origin: tuple[int, int],
    shape: tuple[int, int],
    kept: torch.dtype,
) -> None:
    monkeypatch.setattr(weight_reader, "STAGE", stage)
    whole = torch.arange(96, dtype=torch.float32).view(12, 8)
    file, offset, dtype = stored(tmp_path, x=whole)["x"]
    view = torch.full(shape, -1, dtype=kept)
    target = Target("x", view, whole=(12, 8), start=origin)
    fill(parts_of(file, offset, dtype, target), CPU, 3)
    rows, columns = (slice(a, a + n) for a, n in zip(origin, shape, strict=True))
    assert torch.equal(view.float(), whole[rows, columns])
    file.close()


@pytest.mark.parametrize("stage", [8, 10_000])
@pytest.mark.parametrize(("first", "rows"), [(0, 12), (5, 4), (3, 9)])
def test_rows_that_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, first: int, rows: int
) -> None:
    """A scale for each block of four rows, kept for every row."""
    monkeypatch.setattr(weight_reader, "STAGE", stage)
    scales = torch.arange(6.0).view(3, 2)
    file, offset, dtype = stored(tmp_path, x=scales)["x"]
    view = torch.empty(rows, 2)
    target = Target("x", view, repeat=4, whole=(3, 2), start=(first, 0))
    fill(parts_of(file, offset, dtype, target), CPU, 2)
    assert torch.equal(view, scales.repeat_interleave(4, 0)[first : first + rows])
    file.close()


def test_experts_in_one_tensor_cut_by_rows_and_by_columns(tmp_path: Path) -> None:
    whole = torch.arange(2 * 6 * 4, dtype=torch.float32).view(2, 6, 4)
    file, offset, dtype = stored(tmp_path, x=whole)["x"]
    for origin, shape in (((0, 3, 0), (2, 3, 4)), ((1, 0, 2), (1, 6, 2))):
        view = torch.empty(shape)
        target = Target("x", view, whole=(2, 6, 4), start=origin)
        fill(parts_of(file, offset, dtype, target), CPU, 2)
        part = tuple(slice(a, a + n) for a, n in zip(origin, shape, strict=True))
        assert torch.equal(view, whole[part])
    file.close()


def test_tensors_side_by_side_are_read_at_once(tmp_path: Path) -> None:
    """Up to a buffer's size; a tensor that nobody takes ends the stretch."""
    names = [f"x{i}" for i in range(9)]
    places = stored(tmp_path, **{name: torch.full((4,), 1.0) for name in names})
    views = {name: torch.empty(4, dtype=torch.bfloat16) for name in names if name != "x5"}
    pieces: list[FilePart] = []
    for name, view in views.items():
        pieces += parts_of(*places[name], Target(name, view))
    groups = list(reads_of(pieces))
    assert sorted(map(len, groups)) == [3, 5]
    fill(pieces, CPU, 2)
    assert all(view.eq(1).all() for view in views.values())
    next(iter(places.values()))[0].close()


def test_tensors_at_odd_places(tmp_path: Path) -> None:
    """Some writers do not sort by width."""
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [2, 2], "data_offsets": [3, 19]},
    }
    text = json.dumps(header).encode()
    numbers = torch.arange(4.0)
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\1\2\3" + numbers.numpy().tobytes())
    file = CheckpointFile(path)
    places = {one.name: one for one in file.tensors()}
    narrow = torch.empty(3, dtype=torch.int16)
    for view, start in (
        (torch.empty(2, 2), (0, 0)),
        (torch.empty(2, 2, dtype=torch.bfloat16), (0, 0)),
        (torch.empty(2, 1), (0, 1)),
    ):
        target = Target("b", view, whole=(2, 2), start=start)
        beside = parts_of(file, places["a"].offset, torch.uint8, Target("a", narrow))
        fill([*beside, *parts_of(file, places["b"].offset, torch.float32, target)], CPU, 1)
        assert torch.equal(view.float(), numbers.view(2, 2)[:, start[1] :])
        assert narrow.tolist() == [1, 2, 3]
    file.close()


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, direct: bool) -> None:
    """An error that names it; no thread goes on."""
    places = stored(tmp_path, x=torch.ones(100, 100), y=torch.ones(100, 100))
    path = tmp_path / "model.safetensors"
    os.truncate(path, path.stat().st_size - 10_000)
    kept = torch.float32 if direct else torch.bfloat16
    pieces: list[FilePart] = []
    for name, place in places.items():
        pieces += parts_of(*place, Target(name, torch.empty(100, 100, dtype=kept)))
    before = threading.active_count()
    with pytest.raises(LoadError, match=r"model\.safetensors is damaged or truncated: it ends at"):
        fill(pieces, CPU, 4)
    assert threading.active_count() == before
    next(iter(places.values()))[0].close()


def test_ctrl_c_ends_all_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While they have much to do: they end with what they are at, and files are closed."""
    model = model_of()
    save(tmp_path, tensors_of(model_of()))
    threads = threading.active_count()
    started = threading.Event()
    reads = []

    def slow(self: CheckpointFile, start: int, into: Tensor) -> None:
        reads.append(start)
        started.set()
        threading.Event().wait(0.05)

    def interrupted(*futures: object) -> None:
        started.wait()
        raise KeyboardInterrupt

    monkeypatch.setattr(CheckpointFile, "read", slow)
    monkeypatch.setattr(weight_reader.Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_weights(model, tmp_path, 2)
    assert len(reads) < 20 < len(tensors_of(model_of()))
    assert (open_files(tmp_path), threading.active_count()) == (0, threads)


def test_an_unknown_type_is_named(tmp_path: Path) -> None:
    tensors = tensors_of(model_of())
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.complex64)
    save(tmp_path, tensors)
    with pytest.raises(LoadError, match=r"lm_head\.weight in model\.safetensors is C64"):
        load_weights(model_of(), tmp_path)
