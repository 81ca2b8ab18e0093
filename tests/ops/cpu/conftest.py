"""The compiled kernels of every processor that this machine can run or emulate."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rorqual.config.model import cache_folder
from rorqual.ops.cpu.native import Native, library
from tests.ops.cpu import remote

OLDER = pytest.mark.exhaustive
# what this machine may lack, in plain C++: the very kernels for it are compiled and run
EMULATED = {
    f"{name}, emulated": Path(__file__).with_name(f"{name}.h") for name in ("vnni", "bf16", "amx")
}
CI_LACKS = ("bf16, emulated", "vnni, emulated")  # AMX's form has their instructions too
PROCESSORS = [
    "native",
    pytest.param("cooperlake", marks=OLDER),  # AVX512-BF16 and VNNI without AMX
    pytest.param("haswell", marks=OLDER),
    pytest.param("x86-64", marks=(OLDER, pytest.mark.longest)),
    *(pytest.param(name, marks=OLDER) for name in EMULATED if name not in CI_LACKS),
    *(pytest.param(name, marks=(OLDER, pytest.mark.longest)) for name in CI_LACKS),
    *(pytest.param(name, marks=(OLDER, pytest.mark.longest)) for name in remote.AARCH64),
]


@contextmanager
def one_compiles() -> Iterator[None]:
    """Of several test processes: the others find what it has compiled, which may take half a
    minute, in the cache folder."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "tests.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module", params=PROCESSORS)
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    name = request.param
    if name in remote.AARCH64:
        with remote.kernels_of(name) as kernels:
            yield Native(kernels)
        return
    header = EMULATED.get(name)
    if header and not torch.cpu._is_avx512_supported():
        pytest.skip("emulated in AVX-512")
    # what is emulated need not be fast, and -O1 takes half the time to compile
    more = ("-include", str(header), "-O1") if header else ()
    with one_compiles():
        found = library("native", more) if header else library(name)
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
