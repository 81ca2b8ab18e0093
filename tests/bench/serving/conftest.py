"""The fake server's process, one for all tests that ask for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_process import Fake, start, stop


@pytest.fixture(scope="session")
def fake() -> Iterator[Fake]:
    process, found = start()
    yield found
    stop(process)


@pytest.fixture(scope="session")
def locked() -> Iterator[Fake]:
    """One that wants the key sk-fake."""
    process, found = start("sk-fake")
    yield found
    stop(process)
