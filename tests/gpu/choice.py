"""Which cases a plain run leaves out."""

from __future__ import annotations

from typing import Any

import pytest


def rarely(*values: Any) -> list[Any]:
    """Values of a parameter that `--exhaustive all` runs; a tuple is several parameters' values."""
    mark = pytest.mark.exhaustive
    return [
        pytest.param(*value, marks=mark)
        if isinstance(value, tuple)
        else pytest.param(value, marks=mark)
        for value in values
    ]
