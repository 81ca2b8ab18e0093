"""The compiled kernels of every processor that this machine can run or emulate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rorqual.ops.cpu.native import Native, library
from tests.ops.cpu import remote

OLDER = pytest.mark.exhaustive
PROCESSORS = [
    "native",
    *(pytest.param(name, marks=OLDER) for name in ("haswell", "x86-64")),
    *(pytest.param(name, marks=(OLDER, pytest.mark.longest)) for name in remote.AARCH64),
]


@pytest.fixture(scope="module", params=PROCESSORS)
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    name = request.param
    if name in remote.AARCH64:
        with remote.kernels_of(name) as kernels:
            yield Native(kernels)
        return
    found = library(name)
    if found is None:
        pytest.skip(f"no compiler for {name}")
    yield Native(found)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)
