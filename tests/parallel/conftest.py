"""The ranks of the session, and the marker of the full matrix, which runs only when it is asked for (`-m full_matrix`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.pool import RankPool


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full_matrix: every valid combination of parallel sizes (make test-parallel)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "full_matrix" in (config.option.markexpr or ""):
        return
    left_out = [item for item in items if item.get_closest_marker("full_matrix")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    ranks = RankPool()
    yield ranks
    ranks.stop()
