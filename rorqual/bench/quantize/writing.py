"""The files of a quantized checkpoint, as compressed-tensors has them."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rorqual.config.quant import LEFT_WIDE, WeightScheme
from rorqual.errors import ConfigError, WriteError
from rorqual.layers.weight_format.four_bits import WORD
from rorqual.ops.reference import Weight

SHARD = 2**30  # bytes of a file, roughly
INDEX = "model.safetensors.index.json"
FORMS = {"int4": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "fp8_token": {"type": "float", "strategy": "token"},
    "fp8_group": {"type": "float", "strategy": "group", "group_size": 128},
    "int8_token": {"type": "int", "strategy": "token"},
}
# linear layers of these architectures that no format here covers
OTHERS = (r"re:.*\.mlp\.gate$", r"re:.*\.eh_proj$", r"re:.*\.shared_head\.head$")


@contextmanager
def new_checkpoint(folder: Path) -> Iterator[None]:
    """Create the folder for what is written inside; where that fails, all of it is removed, with
    the folders above it that were missing. `folder` is missing or empty. Raises ConfigError if it
    cannot be created, WriteError if it cannot be written."""
    missing = _missing(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        _remove(missing)
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from None
    try:
        yield
    except BaseException as error:
        with suppress(OSError):
            for path in folder.iterdir():
                path.unlink()
        _remove(missing)
        if isinstance(error, OSError):
            raise WriteError(f"{folder} cannot be written: {error.strerror or error}") from None
        raise


def _missing(folder: Path) -> list[Path]:
    """Those that creating it creates, the innermost first."""
    # os.path's: one that cannot be asked for is no error here
    return list(takewhile(lambda path: not os.path.exists(path), (folder, *folder.parents)))


def _remove(folders: Iterable[Path]) -> None:
    """Those that were created, the innermost first, and in which nothing else has come to lie."""
    for path in folders:
        with suppress(OSError):
            path.rmdir()


class ShardWriter:
    """Tensors to files of moderate size, which have their names once all are written."""

    def __init__(self, folder: Path, most: int = SHARD):
        self.folder = folder
        self.most = most
        self.pending: dict[str, Tensor] = {}
        self.size = 0
        self.places: dict[str, int] = {}
        self.files = 0
        self.total = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if self.pending and self.size + size > self.most:
            self._flush()
        self.pending.update(tensors)
        self.size += size
        self.total += size

    def _flush(self) -> None:
        path = self._part(self.files)
        path.touch(exist_ok=False)
        mode = path.stat().st_mode  # what the umask leaves, which save_file does not ask
        try:
            save_file(self.pending, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise WriteError(f"{path} cannot be written: {error}") from None
        path.chmod(stat.S_IMODE(mode))
        self.places.update(dict.fromkeys(self.pending, self.files))
        self.pending = {}
        self.size = 0
        self.files += 1

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:05}.safetensors"

    def close(self) -> None:
        """Write what is left and the index."""
        if self.pending:
            self._flush()
        names = [f"model-{i + 1:05}-of-{self.files:05}.safetensors" for i in range(self.files)]
        for number, name in enumerate(names):
            self._part(number).rename(self.folder / name)
        held = {name: names[number] for name, number in sorted(self.places.items())}
        index = {"metadata": {"total_size": self.total}, "weight_map": held}
        (self.folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def stored(module: str, weight: Weight, shape: tuple[int, int]) -> dict[str, Tensor]:
    """The tensors of a matrix."""
    assert weight.scale is not None
    if not weight.is_int4:
        return {f"{module}.weight": weight.data, f"{module}.weight_scale": weight.scale}
    rows, columns = shape
    return {
        f"{module}.weight_packed": weight.data.view(torch.int32).view(rows, columns // WORD),
        f"{module}.weight_scale": weight.scale,
        f"{module}.weight_shape": torch.tensor(shape),
    }


def pattern(module: str) -> str:
    """A regular expression for modules whose names differ from this one only in numbers."""
    parts = [r"\d+" if part.isdigit() else re.escape(part) for part in module.split(".")]
    return "re:" + r"\.".join(parts) + "$"


def quantization_config(schemes: Mapping[str, WeightScheme]) -> dict[str, Any]:
    """For these modules, each of its scheme."""
    targets: dict[WeightScheme, dict[str, None]] = {}
    for module, scheme in schemes.items():
        targets.setdefault(scheme, {})[pattern(module)] = None
    groups = {
        f"group_{number}": {**_group(scheme), "targets": sorted(names)}
        for number, (scheme, names) in enumerate(targets.items())
    }
    ignored = [*(rf"re:.*{name}$" for name in LEFT_WIDE), *OTHERS]
    return {
        "quant_method": "compressed-tensors",
        "format": FORMS[next(iter(targets)).kind],
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
    }


def _group(scheme: WeightScheme) -> dict[str, Any]:
    rows, columns = scheme.block
    weights: dict[str, Any] = {
        "num_bits": scheme.bits,
        "type": "float" if scheme.kind == "fp8" else "int",
        "symmetric": scheme.symmetric,
        "dynamic": False,
        "strategy": "block" if rows > 1 else "group" if columns else "channel",
    }
    if rows > 1:
        weights["block_structure"] = [rows, columns]
    elif columns:
        weights["group_size"] = columns
    inputs = None
    if scheme.activation != "wide":
        inputs = {
            "num_bits": 8, "symmetric": True, "dynamic": True, **ACTIVATIONS[scheme.activation]
        }  # fmt: skip
    return {"weights": weights, "input_activations": inputs, "format": FORMS[scheme.kind]}


def copy_others(source: Path, out: Path, names: Iterable[str]) -> None:
    """Tokenizer, templates and similar: all files except weights and config.json."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in {*names, INDEX, "config.json"}:
            shutil.copyfile(path, out / path.name)
