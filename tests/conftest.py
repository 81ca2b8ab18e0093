"""One thread a process: the tests' models are tiny, and several test processes share the
machine. Without a GPU, kernels run in Triton's interpreter, which must be asked for before
anything imports Triton."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


pytest_plugins = ["tests.processor_time"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "full_matrix: every valid combination of parallel sizes (make test-parallel)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "full_matrix" in (config.option.markexpr or ""):
        return
    left_out = [item for item in items if item.get_closest_marker("full_matrix")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
