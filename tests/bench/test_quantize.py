"""`rorqual quantize`: what it writes is read, loses no more than plain rounding, and mistakes are
refused before anything is written."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from rorqual.bench.quantize import run
from rorqual.bench.quantize.calibration import RecordingOps, moments_by_name
from rorqual.bench.quantize.run import (
    FORMATS,
    MatrixError,
    QuantizedModel,
    matrices,
    quantize,
    report,
)
from rorqual.bench.quantize.text import Score, TextReader
from rorqual.bench.quantize.writing import ShardWriter, new_checkpoint, pattern
from rorqual.config.hf import read_config_file
from rorqual.config.quant import QUANTIZATIONS, WeightScheme, quantization_named
from rorqual.errors import ConfigError, LoadError, WriteError
from rorqual.layers.weight_format.compensation import output_loss, round_calibrated
from rorqual.layers.weight_format.rounding import PLAIN, SHARES, round_matrix
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.reference import dequantize
from tests.layers.weight_format.test_weight_formats import wide_rows
from tests.models.checkpoints import save, save_with_mtp
from tests.models.driver import all_logits, load

QUIET = Console(file=io.StringIO())


def draw(rows: int = 24, columns: int = 256, seed: int = 0) -> Tensor:
    made = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return made * (1 + 3 * (made.abs() > 2.5))  # with outliers


# ---- rounding


@pytest.mark.parametrize("name", QUANTIZATIONS)
def test_a_search_never_loses_more_than_plain_rounding(name: str) -> None:
    scheme = quantization_named(name).scheme
    assert scheme is not None
    weights = torch.rand(256, generator=torch.Generator().manual_seed(3))
    for importance in (None, weights):
        plain, most = round_matrix(draw(), scheme, torch.bfloat16, PLAIN, importance)
        found, least = round_matrix(draw(), scheme, torch.bfloat16, SHARES, importance)
        assert least <= most
        assert least < 0.97 * most or scheme.kind != "int4"
        for weight, loss in ((plain, most), (found, least)):
            lost = (dequantize(weight, torch.float32) - draw()).square()
            total = (lost * (1 if importance is None else importance)).sum()
            assert loss == pytest.approx(float(total), rel=1e-3)


@pytest.mark.parametrize("name", ["w4a16", "w4a16-g32", "w8a8", "fp8"])
def test_rounding_for_rows_loses_less_of_the_products(name: str) -> None:
    scheme = quantization_named(name).scheme
    assert scheme is not None
    mix = torch.randn(256, 256, generator=torch.Generator().manual_seed(5)) / 16
    rows = draw(512, 256, seed=6) @ mix
    moments = rows.T @ rows
    found, least, plain = round_calibrated(draw(), scheme, torch.bfloat16, moments)
    assert least == pytest.approx(output_loss(draw(), found, moments))
    assert least < (0.8 if scheme.kind == "int4" else 0.9) * plain
    products = rows @ (dequantize(found, torch.float32) - draw()).T
    assert least == pytest.approx(float(products.square().sum()), rel=1e-2)


def test_rows_never_seen_change_nothing_for_the_worse() -> None:
    scheme = WeightScheme("int4", (1, 64))
    nothing = torch.zeros(256, 256)
    found, least, plain = round_calibrated(draw(), scheme, torch.float32, nothing)
    assert least == plain == 0
    assert dequantize(found, torch.float32).isfinite().all()
    few = torch.zeros(256, 256)
    few[3, 3] = 2.0
    _, least, plain = round_calibrated(draw(), scheme, torch.float32, few)
    assert least <= plain


# ---- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a file beside it."""
    place = tmp_path_factory.mktemp("wide")
    save("v3", place)
    (place / "notes.txt").write_text("kept")
    return place


@pytest.mark.exhaustive(but_first=True)
@pytest.mark.parametrize("form", FORMATS)
def test_what_is_written_is_what_was_rounded(
    tmp_path: Path, folder: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = quantize(str(folder), tmp_path / "out", form, console=QUIET)
    assert done.bytes_after < done.bytes_before
    assert all(error.written <= error.plain for error in done.errors)
    config = read_config_file(tmp_path / "out")
    wide = read_config_file(folder)
    every = matrices(wide, quantization_named(form))
    known = {module: scheme for module, scheme in every.items() if ".layers.3." not in module}
    assert {error.module for error in done.errors} == known.keys()
    for module, scheme in known.items():
        found = config.quant.of(module)
        assert (found.kind, found.block, found.activation) == (
            scheme.kind,
            scheme.block,
            scheme.activation,
        ), module
    assert (tmp_path / "out" / "notes.txt").read_text() == "kept"
    ids = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(1))
    want = all_logits(load(folder, CpuOps()), ids, [6])
    wide_rows(monkeypatch)
    got = all_logits(load(tmp_path / "out", CpuOps()), ids, [6])
    assert torch.cosine_similarity(got, want, dim=-1).median() > (
        0.8 if form.startswith("w4") else 0.98
    )


def test_prediction_modules_are_rounded_too(tmp_path: Path) -> None:
    save_with_mtp(tmp_path / "wide")
    done = quantize(str(tmp_path / "wide"), tmp_path / "out", "w8a8", console=QUIET)
    assert any(error.module.startswith("model.layers.3.") for error in done.errors)
    names = [
        name
        for path in sorted((tmp_path / "out").glob("*.safetensors"))
        for name in load_file(path)
    ]
    assert "model.layers.3.mlp.experts.0.up_proj.weight_scale" in names
    assert "model.layers.3.eh_proj.weight_scale" not in names


def test_groups(tmp_path: Path, folder: Path) -> None:
    quantize(str(folder), tmp_path / "out", "w4a16", 32, console=QUIET)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    sizes = {group["weights"].get("group_size") for group in raw["config_groups"].values()}
    assert 32 in sizes
    assert sizes <= {32, 16, 8, None}


@pytest.mark.parametrize(
    ("form", "group", "said"),
    [
        ("int3", None, "format='int3' is not known; accepted: w4a16"),
        ("w8a8", 64, "group=64 goes with w4a16, w4a8, w4afp8"),
        ("w4a16", 48, "group=48 is not supported; accepted: 128, 64, 32"),
    ],
)
def test_unknown_formats_are_refused(
    tmp_path: Path, folder: Path, form: str, group: int | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        quantize(str(folder), tmp_path / "out", form, group, console=QUIET)
    assert not (tmp_path / "out").exists()


def test_a_full_folder_and_a_quantized_model_are_refused(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="exists; accepted: a new or an empty folder"):
        quantize(str(folder), folder, "w8a8", console=QUIET)
    quantize(str(folder), tmp_path / "out", "w8a8", console=QUIET)
    with pytest.raises(ConfigError, match="int8, a scale a row already"):
        quantize(str(tmp_path / "out"), tmp_path / "more", "w8a8", console=QUIET)


def test_numbers_that_are_not_finite_are_named(tmp_path: Path, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name][0, 0] = math.nan
    (tmp_path / "broken").mkdir()
    save_file(tensors, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "broken" / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(LoadError, match=f"{name} holds a number that is not finite"):
        quantize(str(tmp_path / "broken"), tmp_path / "out", "w8a8", console=QUIET)


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_files_have_the_mode_that_the_umask_leaves(tmp_path: Path, folder: Path) -> None:
    quantize(str(folder), tmp_path / "out", "fp8", console=QUIET)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "notes.txt", "model-00001-of-00001.safetensors"} <= modes.keys()
    assert set(modes.values()) == {0o640}


@pytest.mark.parametrize("present", [False, True])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, folder: Path, present: bool) -> None:
    out = tmp_path / "out"
    if present:
        out.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(WriteError, match=r"part-00000\.safetensors cannot be written"):
            quantize(str(folder), out, "fp8", console=QUIET)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if present else [])
    assert not present or not list(out.iterdir())


def test_other_files_that_do_not_fit_are_said_too(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(WriteError, match="out cannot be written: No space left on device"):
        quantize(str(folder), tmp_path / "out", "fp8", console=QUIET)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_said_before_the_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "calibrate", lambda *given: pytest.fail("the work began"))
    text = folder / "notes.txt"
    with pytest.raises(ConfigError, match=r"notes\.txt/out cannot be written: Not a directory"):
        quantize(str(folder), text / "out", "w8a8", calibration=str(text), console=QUIET)


@pytest.mark.parametrize("there", [False, True])
def test_folders_that_were_made_for_it_go_with_it(
    tmp_path: Path, folder: Path, there: bool
) -> None:
    if there:
        (tmp_path / "kept").mkdir()
    text = tmp_path / "none.txt"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=r"none\.txt cannot be read as text"):
        quantize(str(folder), tmp_path / "kept/more/out", "w8a8", evaluate=str(text), console=QUIET)
    assert sorted(tmp_path.rglob("*")) == before
    long = tmp_path / "kept" / ("long" * 100) / "out"
    with pytest.raises(ConfigError, match="cannot be written: File name too long"):
        quantize(str(folder), long, "w8a8", console=QUIET)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_others_put_beside_it_stays(tmp_path: Path) -> None:
    def fails() -> None:
        with new_checkpoint(tmp_path / "above" / "out"):
            (tmp_path / "above" / "notes.txt").write_text("another's")
            (tmp_path / "above" / "out" / "part").touch()
            raise LoadError("damaged")

    with pytest.raises(LoadError):
        fails()
    assert [path.name for path in tmp_path.rglob("*")] == ["above", "notes.txt"]


def test_both_texts_are_read_before_the_work(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def refuses_the_second(file: str, *given: object) -> tuple[Tensor, int]:
        read.append(file)
        if len(read) == 2:
            raise ConfigError(f"{file} is empty")
        return torch.tensor([1, 2, 3]), 3

    monkeypatch.setattr(run, "read_text", refuses_the_second)
    monkeypatch.setattr(run, "calibrate", lambda *given: pytest.fail("the work began"))
    with pytest.raises(ConfigError, match="b is empty"):
        quantize(
            str(folder), tmp_path / "out", "w8a8", calibration="a", evaluate="b", console=QUIET
        )
    assert read == ["a", "b"]
    assert not (tmp_path / "out").exists()


def test_files_are_of_moderate_size(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, most=1000)
    for number in range(5):
        writer.add({f"t{number}": torch.full((100,), float(number))})
    writer.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(set(index.values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    held = {name: load_file(tmp_path / file)[name] for name, file in index.items()}
    assert [float(held[f"t{number}"][0]) for number in range(5)] == [0, 1, 2, 3, 4]


def test_patterns_name_the_same_layer_of_all_layers() -> None:
    found = re.compile(pattern("model.layers.3.mlp.experts.14.up_proj")[3:])
    assert found.match("model.layers.11.mlp.experts.0.up_proj")
    assert not found.match("model.layers.11.mlp.experts.0.up_proj2")
    assert not found.match("model.layers.11.mlp.shared_experts.up_proj")


# ---- calibration


def test_moments_are_of_the_rows_that_come(folder: Path) -> None:
    ops = RecordingOps()
    model = load(folder, ops)
    ids = torch.randint(0, 128, (24,), generator=torch.Generator().manual_seed(1))
    reader = TextReader(model)
    reader.logits(ids)
    moments = moments_by_name(model, ops)
    at = "model.layers.1."
    assert moments[f"{at}mlp.experts.0.up_proj.weight"].shape == (64, 64)
    gate, up = (moments[f"{at}mlp.shared_experts.{name}_proj.weight"] for name in ("gate", "up"))
    assert gate is up
    every = [moments.get(f"{at}mlp.experts.{expert}.gate_proj.weight") for expert in range(16)]
    chosen = sum(float(one.trace()) for one in every if one is not None)
    # every token has four experts
    assert chosen == pytest.approx(4 * float(gate.trace()), rel=1e-4)
    tight = RecordingOps(memory=64 * 64 * 4)
    again = load(folder, tight)
    TextReader(again).logits(ids)
    kinds = sorted({one.dim() for one in tight.moments.values()})
    assert kinds == [1, 2], "beyond the memory only diagonals are kept"


def test_a_score_is_that_of_the_logits(folder: Path) -> None:
    reader = TextReader(load(folder, CpuOps()))
    reader.length = 8
    ids = torch.randint(0, 128, (20,), generator=torch.Generator().manual_seed(1))
    score = reader.score(ids, 40)
    assert score.tokens == 19
    nats = 0.0
    for start, stop in ((0, 8), (8, 16), (16, 19)):
        logits = reader.logits(ids[start:stop]).log_softmax(-1)
        nats -= float(logits.gather(1, ids[start + 1 : stop + 1, None]).sum())
    assert score.nats == pytest.approx(nats, rel=1e-5)
    assert score.perplexity == pytest.approx(math.exp(nats / 19), rel=1e-5)
    assert score.bits_per_byte == pytest.approx(nats / math.log(2) / 40, rel=1e-5)


def test_the_report_is_by_layer() -> None:
    errors = [
        MatrixError("model.layers.0.mlp.up_proj", 0.04, 0.01),
        MatrixError("model.layers.0.mlp.down_proj", 0.04, 0.0225),
    ]
    console = Console(file=io.StringIO(), width=120)
    done = QuantizedModel(errors, 100, 30, Score(10, 20, 20.0), Score(10, 20, 21.0))
    report(done, console)
    text = console.file.getvalue()
    assert "20.00%" in text
    assert "12.50%" in text
    assert "15.00% mlp.down_proj" in text
    assert "+10.52%" in text
