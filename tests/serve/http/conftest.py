"""Servers over an engine that is told what to say, as new for each test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.serve.scripted import Scripted


@pytest.fixture(scope="module")
def one_plain() -> Iterator[Scripted]:
    from tests.serve.scripted import scripted

    with scripted(reasoning=False) as found:
        yield found


@pytest.fixture(scope="module")
def one_that_thinks() -> Iterator[Scripted]:
    from tests.serve.scripted import scripted

    with scripted() as found:
        yield found


@pytest.fixture
def plain(one_plain: Scripted) -> Scripted:
    return one_plain.reset()


@pytest.fixture
def thinks(one_that_thinks: Scripted) -> Scripted:
    return one_that_thinks.reset()
