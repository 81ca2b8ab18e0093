"""The cache's memory on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rorqual.cache.pool import KVPool
from rorqual.cache.spec import kv_spec
from rorqual.config.hf import read_config_file
from rorqual.errors import CapacityError
from rorqual.models.hub import BUNDLED

CPU = torch.device("cpu")
SPEC = kv_spec(read_config_file(BUNDLED), 64, "auto")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("cache", ["auto", "fp8", "int8"])
def test_planes_are_zeros_that_can_be_written(cache: str) -> None:
    spec = kv_spec(read_config_file(BUNDLED), 64, cache)
    pool = KVPool(spec, 3, CPU)
    assert len(pool.layers) == len(spec.layers)
    for planes, layer in zip(pool.layers, spec.layers, strict=True):
        for plane in layer:
            tensor = planes[plane.name]
            assert tensor.shape == (3, 64, *plane.shape)
            assert str(tensor.dtype) == f"torch.{plane.dtype}"
            assert tensor.data_ptr() % 64 == 0
            assert not tensor.view(torch.uint8).any()
            tensor.view(torch.uint8).fill_(1)
            assert tensor.view(torch.uint8).all()


def test_memory_is_taken_as_it_is_written() -> None:
    before = resident()
    pool = KVPool(SPEC, 2**30 // SPEC.bytes_per_page, CPU)
    assert resident() - before < 2**28
    next(iter(pool.layers[0].values())).fill_(1)
    assert resident() - before > 2**25


def test_a_cache_that_no_machine_holds() -> None:
    with pytest.raises(CapacityError, match="no memory for"):
        KVPool(SPEC, 2**48 // SPEC.bytes_per_page, CPU)
