"""Packing against the library that defines it. `compressed_tensors.json` holds tiny matrices as
compressed-tensors 0.20 compressed them, so that the check needs no library; where it is installed,
it is asked again:

    python -m tests.layers.weight_format.test_compressed_tensors   (writes the file)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rorqual.bench.quantize.writing import quantization_config, stored
from rorqual.config.hf import _Reader
from rorqual.config.quant import quantization_named
from rorqual.config.quant_methods import read_quantization
from rorqual.layers.parameter import Window
from rorqual.layers.weight_format.rounding import SHARES, round_matrix
from rorqual.ops.reference import dequantize
from tests.layers.weight_format.test_weight_formats import in_file, read

FILE = Path(__file__).with_name("compressed_tensors.json")
SHAPES = {"fp8-block": (130, 10)}  # blocks are 128 x 128
SHAPE = (16, 64)
TYPES = {
    str(kind): kind
    for kind in (torch.int32, torch.int64, torch.int8, torch.float8_e4m3fn, torch.float32)
}
CASES: dict[str, dict[str, Any]] = {
    "w4a16-g32": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}},
    "w4a16-g32-asym": {
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
    },
    "w4a16-channel": {"weights": {"num_bits": 4, "strategy": "channel"}},
    "w4a8": {
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 32},
        "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
    },
    "w4afp8": {
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 32},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    },
    "w8a8": {
        "weights": {"num_bits": 8, "strategy": "channel"},
        "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
    },
    "fp8-channel": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    },
    "fp8-block": {
        "weights": {
            "num_bits": 8,
            "type": "float",
            "strategy": "block",
            "block_structure": [128, 128],
        },
        "input_activations": {
            "num_bits": 8,
            "type": "float",
            "strategy": "group",
            "group_size": 128,
            "dynamic": True,
        },
    },
}


def by_library(name: str) -> dict[str, Any]:
    """The configuration as the library writes it, what it stores, and what that means to it."""
    from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-not-found]
    from compressed_tensors.compressors.format import (  # type: ignore[import-not-found]
        infer_module_format,
    )
    from compressed_tensors.quantization import (  # type: ignore[import-not-found]
        QuantizationScheme,
    )
    from compressed_tensors.quantization.utils import (  # type: ignore[import-not-found]
        calculate_qparams,
    )

    scheme = QuantizationScheme(targets=["Linear"], **CASES[name])
    shape = SHAPES.get(name, SHAPE)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.1 + 0.02
    group = scheme.weights.group_size
    if name == "fp8-block":
        padded = torch.nn.functional.pad(weight, (0, -shape[1] % 128, 0, -shape[0] % 128))
        parts = padded.view(-(-shape[0] // 128), 128, -1, 128)
        ends = parts.amin((1, 3)), parts.amax((1, 3))
    else:
        parts = weight.view(shape[0], -1, group or shape[1])
        ends = parts.amin(-1), parts.amax(-1)
    scale, zero = calculate_qparams(*ends, scheme.weights)
    form = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(form.value)
    state = {"weight": weight, "weight_scale": scale.float(), "weight_zero_point": zero}
    stored = compressor.compress(state, scheme)
    means = compressor.decompress(dict(stored), scheme)["weight"]
    return {
        "format": form.value,
        "scheme": json.loads(scheme.model_dump_json()),
        "shape": list(shape),
        "tensors": {key: written(tensor) for key, tensor in sorted(stored.items())},
        "means": [round(float(value), 7) for value in means.float().flatten()],
    }


def written(tensor: Tensor) -> dict[str, Any]:
    plain = tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor
    return {
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "data": plain.flatten().tolist(),
    }


def tensor_of(held: dict[str, Any]) -> Tensor:
    kind = TYPES[held["dtype"]]
    plain = torch.int8 if kind == torch.float8_e4m3fn else kind
    return torch.tensor(held["data"], dtype=plain).view(kind).view(held["shape"])


@pytest.mark.parametrize("name", CASES)
def test_what_the_library_compressed_is_read(tmp_path: Path, name: str) -> None:
    held = json.loads(FILE.read_text())[name]
    group = {key: value for key, value in held["scheme"].items() if key != "format"}
    config = {
        "quant_method": "compressed-tensors",
        "format": held["format"],
        "config_groups": {"group_0": group},
    }
    quant = read_quantization(_Reader({}, "", frozenset()), config)
    assert quant is not None
    path = in_file(tmp_path, {key: tensor_of(value) for key, value in held["tensors"].items()})
    rows, columns = held["shape"]
    weight = read(path, quant.of("m"), Window((rows, columns)), (rows, columns))
    means = torch.tensor(held["means"]).view(rows, columns)
    assert (dequantize(weight, torch.float32) - means).abs().max() < 1e-6


@pytest.mark.parametrize("name", CASES)
def test_the_file_is_what_the_library_makes(name: str) -> None:
    pytest.importorskip("compressed_tensors")
    assert by_library(name) == json.loads(FILE.read_text())[name]


@pytest.mark.parametrize("name", ["w8a8", "fp8", "w4a16", "w4a8-g64", "w4afp8-g32"])
def test_the_library_unpacks_what_is_written(name: str) -> None:
    """Negative scales of int4 included."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    given = torch.randn(256, 256, generator=torch.Generator().manual_seed(2))
    scheme = quantization_named(name).scheme
    assert scheme is not None
    weight, _ = round_matrix(given, scheme, torch.bfloat16, SHARES)
    assert weight.scale is not None
    assert bool((weight.scale < 0).any()) == (scheme.kind == "int4")
    tensors = {key[2:]: tensor for key, tensor in stored("m", weight, (256, 256)).items()}
    config = quantization_config({"m": scheme})
    (group,) = config["config_groups"].values()
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    theirs = QuantizationScheme(**{key: group[key] for key in group if key != "format"})
    means = compressor.decompress(tensors, theirs)["weight"].float()
    ours = dequantize(weight, torch.float32)
    assert (means - ours).abs().max() <= ours.abs().max() * 2**-8, "bf16 scales give bf16 numbers"


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: by_library(name) for name in CASES}, separators=(",", ":")))
