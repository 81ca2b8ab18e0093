"""`rorqual quantize`: a bf16 checkpoint to one of eight or four bits, matrix by matrix."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from rorqual.bench.quantize.calibration import RecordingOps, moments_by_name
from rorqual.bench.quantize.text import Score, TextReader, load_on_cpu, read_text
from rorqual.bench.quantize.writing import (
    ShardWriter,
    copy_others,
    new_checkpoint,
    quantization_config,
    stored,
)
from rorqual.config.hf import read_config_file
from rorqual.config.model import ModelConfig
from rorqual.config.quant import QuantConfig, WeightScheme, quantization_named
from rorqual.errors import ConfigError, LoadError
from rorqual.layers.parameter import Build
from rorqual.layers.weight_format.compensation import round_calibrated
from rorqual.layers.weight_format.rounding import PLAIN, SHARES, round_matrix
from rorqual.models.checkpoint import CheckpointFile, checkpoint_files
from rorqual.models.hub import model_folder
from rorqual.models.loader import FLOATS
from rorqual.models.registry import make_model
from rorqual.ops.cpu.backend import CpuOps
from rorqual.ops.interface import Ops

FORMATS = ("w4a16", "w4a8", "w8a8", "fp8", "w4afp8")
GROUPED = ("w4a16", "w4a8", "w4afp8")


@dataclass(frozen=True)
class MatrixError:
    """Squared errors of a matrix, or of its products where a text was given, as shares of what it
    is without error: of plain rounding, and of what was written."""

    module: str
    plain: float
    written: float


@dataclass(frozen=True)
class QuantizedModel:
    """What was done."""

    errors: list[MatrixError]
    bytes_before: int
    bytes_after: int
    before: Score | None = None
    after: Score | None = None


def quantize(
    model: str | None,
    out: str | Path,
    form: str,
    group: int | None = None,
    calibration: str | None = None,
    evaluate: str | None = None,
    console: Console | None = None,
) -> QuantizedModel:
    """Write `out`, a folder that does not exist or is empty. Raises ConfigError and LoadError
    before anything is written where it cannot be done, WriteError where the disk is full; the
    folder is then as it was, and so are those above it. `calibration` and `evaluate` are texts;
    with either, the model must fit in memory."""
    quant = quantization_of(form, group)
    folder = model_folder(model)
    config = read_config_file(folder)
    if config.quant is not None:
        raise ConfigError(f"{folder}: its weights are {config.quant.describe()} already")
    target = Path(out)
    if os.path.exists(target) and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{out} exists; accepted: a new or an empty folder")
    schemes = _present(folder, config, matrices(config, quant))
    with new_checkpoint(target):
        # both at first: calibrating may take hours
        known = read_text(calibration, folder, config.vocab_size) if calibration else None
        text = read_text(evaluate, folder, config.vocab_size) if evaluate else None
        moments = calibrate(folder, known[0]) if known else {}
        before = TextReader(load_on_cpu(folder, CpuOps())).score(*text) if text else None
        done = _write(folder, target, config, schemes, moments, console or Console(stderr=True))
    if text:
        after = TextReader(load_on_cpu(target, CpuOps())).score(*text)
        done = replace(done, before=before, after=after)
    return done


def quantization_of(form: str, group: int | None) -> QuantConfig:
    if form not in FORMATS:
        raise ConfigError(f"format={form!r} is not known; accepted: {', '.join(FORMATS)}")
    if group is None or (group == 128 and form in GROUPED):
        return quantization_named(form)
    if form not in GROUPED:
        raise ConfigError(f"group={group} goes with {', '.join(GROUPED)}, not with format={form!r}")
    if group not in (64, 32):
        raise ConfigError(f"group={group} is not supported; accepted: 128, 64, 32")
    return quantization_named(f"{form}-g{group}")


def matrices(config: ModelConfig, quant: QuantConfig) -> dict[str, WeightScheme]:
    """The modules whose matrices are rounded, prediction modules included."""
    build = Build(Ops(), torch.bfloat16, torch.device("meta"), quant)
    model = make_model(config, build, 16, with_mtp=config.num_mtp_layers > 0)
    found = {}
    for target in model.targets():
        if target.convert is not None and not target.covers:
            module = target.name.removesuffix(".weight")
            found[module] = quant.of(module, target.shape[1])
    return found


def _present(
    folder: Path, config: ModelConfig, schemes: dict[str, WeightScheme]
) -> dict[str, WeightScheme]:
    """Those that the files hold: all but prediction modules, which may be left out. Raises
    LoadError."""
    names: set[str] = set()
    for path in checkpoint_files(folder):
        with closing(CheckpointFile(path)) as file:
            names.update(stored.name for stored in file.tensors())
    found = {module: scheme for module, scheme in schemes.items() if f"{module}.weight" in names}
    for module in schemes:
        if module not in found and int(_layer(module)) < config.num_layers:
            raise LoadError(f"{folder} lacks {module}.weight, or holds it merged with others")
    return found


def calibrate(folder: Path, ids: Tensor) -> dict[str, Tensor]:
    """Moments of the rows that a text brings each matrix, by its name."""
    ops = RecordingOps()
    model = load_on_cpu(folder, ops)
    reader = TextReader(model)
    for window, _ in reader.windows(ids):
        reader.logits(window)
    return moments_by_name(model, ops)


def _write(
    folder: Path,
    out: Path,
    config: ModelConfig,
    schemes: dict[str, WeightScheme],
    moments: dict[str, Tensor],
    console: Console,
) -> QuantizedModel:
    files = checkpoint_files(folder)
    writer = ShardWriter(out)
    dtype = getattr(torch, config.dtype)
    errors = []
    left = dict(schemes)
    size = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("matrices", total=len(schemes))
        for path in files:
            for name, data in _tensors(path):
                size += data.nbytes
                module = name.removesuffix(".weight")
                scheme = left.pop(module, None) if name.endswith(".weight") else None
                if scheme is None:
                    writer.add({name: data})
                    continue
                if data.dtype not in FLOATS or data.dim() != 2:
                    raise LoadError(f"{name} in {path.name} is {data.dtype} {list(data.shape)}")
                tensors, error = _rounded(module, data, scheme, dtype, moments.get(name))
                errors.append(error)
                writer.add(tensors)
                progress.advance(task)
    assert not left, "files hold what they held"
    writer.close()
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = quantization_config(schemes)
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    copy_others(folder, out, [path.name for path in files])
    return QuantizedModel(errors, size, writer.total)


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    with closing(CheckpointFile(path)) as file:
        for stored in file.tensors():
            yield stored.name, file.whole(stored)


def _rounded(
    module: str, data: Tensor, scheme: WeightScheme, dtype: torch.dtype, moments: Tensor | None
) -> tuple[dict[str, Tensor], MatrixError]:
    if not data.isfinite().all():
        raise LoadError(f"{module}.weight holds a number that is not finite and cannot be rounded")
    wide = data.float()
    if moments is not None and moments.dim() == 2:
        weight, loss, plain = round_calibrated(wide, scheme, dtype, moments)
        whole = float((wide @ moments * wide).sum())
    else:
        _, plain = round_matrix(wide, scheme, dtype, PLAIN, moments)
        weight, loss = round_matrix(wide, scheme, dtype, SHARES, moments)
        weights = torch.ones(wide.shape[1]) if moments is None else moments
        whole = float((wide.square() * weights).sum())
    whole = max(whole, 1e-30)
    tensors = stored(module, weight, (data.shape[0], data.shape[1]))
    return tensors, MatrixError(module, plain / whole, loss / whole)


def report(done: QuantizedModel, console: Console) -> None:
    """Errors by layer, bytes, and the text before and after."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, title in enumerate(("layer", "matrices", "plain rounding", "written", "largest")):
        table.add_column(title, justify="right" if 0 < number < 4 else "left")
    layers: dict[str, list[MatrixError]] = defaultdict(list)
    for error in done.errors:
        layers[_layer(error.module)].append(error)
    for layer, errors in layers.items():
        worst = max(errors, key=lambda error: error.written)
        plain, written = (
            fmean(getattr(error, field) ** 0.5 for error in errors)
            for field in ("plain", "written")
        )
        short = worst.module.partition(f"layers.{layer}.")[2] or worst.module
        table.add_row(
            layer, str(len(errors)), f"{plain:.2%}", f"{written:.2%}",
            f"{worst.written**0.5:.2%} {short}",
        )  # fmt: skip
    console.print(table)
    console.print(f"{done.bytes_before:,} bytes before, {done.bytes_after:,} after")
    if done.before and done.after:
        change = done.after.perplexity / done.before.perplexity - 1
        console.print(
            f"perplexity of {done.before.tokens:,} tokens: {done.before.perplexity:.3f} before, "
            f"{done.after.perplexity:.3f} after ({change:+.2%}); bits a byte: "
            f"{done.before.bits_per_byte:.4f}, {done.after.bits_per_byte:.4f}"
        )


def _layer(module: str) -> str:
    parts = module.split(".")
    return parts[parts.index("layers") + 1] if "layers" in parts else module
