"""One process runs all of this folder: what a test leaves in the GPU's memory is given back, or the
models of later ones have no room.

A plain run takes the cases that reach every kernel, format and way through the code once, in some
ten minutes on one GPU with 16 cores; `--exhaustive all` takes all.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

KEPT = 2 << 30  # bytes that torch may hold for later between two tests of a file


def give_back() -> None:
    gc.collect()  # engines hold themselves in circles
    torch.cuda.empty_cache()  # what torch keeps for later counts as used for whoever asks the GPU


@pytest.fixture(autouse=True, scope="module")
def nothing_left_by_a_file() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        give_back()


@pytest.fixture(autouse=True)
def little_left_by_a_test() -> Iterator[None]:
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > KEPT:
        give_back()
