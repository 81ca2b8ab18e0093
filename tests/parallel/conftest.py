"""The ranks of the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    ranks = RankPool()
    yield ranks
    ranks.stop()
