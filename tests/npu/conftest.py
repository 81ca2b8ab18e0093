"""Tests against torch_npu run where it is installed: `make test-npu`. Elsewhere their modules are
skipped before they are imported, so that they may import torch_npu as any other package."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

INSTALLED = importlib.util.find_spec("torch_npu") is not None
ORDINARY = {"test_npu_absent.py"}  # run wherever the other tests run


class SkippedModule(pytest.Module):
    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip("torch_npu is not installed here: make test-npu", allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    if INSTALLED or module_path.name in ORDINARY or not module_path.name.startswith("test_"):
        return None
    return SkippedModule.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True, scope="module")
def nothing_left_in_the_environment() -> Iterator[None]:
    """Emulated operators are also those of the processes that a test starts (`npu_platform.install`
    tells them by the environment); later files start processes that have others."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ |= before
