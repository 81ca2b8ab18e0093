"""The fused all-reduce between real processes: their buffers are shared files, and Triton's
interpreter runs the kernel on each, waits included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulation.triton_interpreter import DEVICE, needs_triton
from tests.parallel.pool import RankPool

pytestmark = [needs_triton, pytest.mark.exhaustive(but_first=True)]


@pytest.mark.skipif(DEVICE != "cpu", reason="runs in the interpreter")
@pytest.mark.parametrize(
    "two_shot",
    [[False] * 5, [True] * 5, [False, True, True, False, True]],
    ids=["one", "two", "mixed"],
)
@pytest.mark.parametrize("world", [2, 4])
def test_calls_of_uneven_length_between_processes(
    pool: RankPool, tmp_path: Path, world: int, two_shot: list[bool]
) -> None:
    """Rows come and go, ranks dawdle by turns, and nothing is reset in between: every call must
    still add what belongs together."""
    rows = [3, 1, 4, 2, 4]
    results = pool.run(
        "fused_all_reduce",
        world,
        sizes={"tp": world},
        folder=str(tmp_path),
        rows=rows,
        two_shot=two_shot,
    )
    assert max(worst for worst, _ in results) < 1e-5
    assert len({bits for _, bits in results}) == 1, "all ranks hold the same bits"
