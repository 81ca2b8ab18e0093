"""rorqual bench hop: rows to expert servers and back."""

from __future__ import annotations

import json

import pytest

from rorqual.bench.comm.expert_hop import HopSetup, as_json, bench


@pytest.mark.exhaustive
@pytest.mark.parametrize("fp8", [False, True])
def test_rows_travel_and_are_counted(fp8: bool) -> None:
    """One row picks all four experts, so each of two servers gets it."""
    setup = HopSetup((1, 6), 2, 256, 4, 4, repeats=5, fp8=fp8)
    found = bench(setup)
    assert [hop.rows for hop in found] == [1, 6]
    row = 256 + 4 * 2 if fp8 else 2 * 256
    for hop in found:
        assert hop.sent == 2 * (20 + hop.rows * (row + 8 * 4))
        assert hop.back == 2 * (20 + hop.rows * 2 * 256)
        assert 0 < hop.us <= hop.p90
        assert hop.plain > 0
    assert json.loads(as_json(found, setup))["setup"]["servers"] == 2
