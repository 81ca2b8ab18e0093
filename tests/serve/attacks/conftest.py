"""A server for all attacks, which must be as it was after each of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.serve.attacks.victim import Victim

collect_ignore_glob = []
if importlib.util.find_spec("fastapi") is None:
    collect_ignore_glob += ["test_*.py"]


@pytest.fixture(scope="package")
def attacked() -> Iterator[Victim]:
    from tests.serve.running import start_server

    options = {
        "--dtype": "float32",
        "--max-num-seqs": "16",
        "--max-model-len": "512",
        "--max-waiting": "400",
        "--client-seconds": "2",
        "--grammar-seconds": "2",
        "--api-key": "owner,guest",
    }
    with start_server(*(word for pair in options.items() for word in pair)) as running:
        yield Victim(running)


@pytest.fixture
def victim(attacked: Victim) -> Iterator[Victim]:
    """Each test ends with a look at what the attack left behind."""
    attacked.note()
    yield attacked
    attacked.check()
