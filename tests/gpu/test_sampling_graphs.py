"""Steps that sample in a graph of their own draw the tokens of steps that are one graph."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from tests.demo_script import load_demo


def test_two_graphs_draw_the_tokens_of_one() -> None:
    demo = load_demo("sampling_graphs")
    rows = demo.main(["--requests", "1,3,8", "--steps", "4", "--turns", "1"])
    assert [row.variant for row in rows] == [name for name in demo.VARIANTS for _ in range(3)]
    assert all(row.equal for row in rows)
