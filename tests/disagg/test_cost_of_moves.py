"""demo/cost_of_moves.py: experts come and go under every second batch, and no answer changes."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.demo_script import load_demo


@pytest.mark.exhaustive
@pytest.mark.longest
def test_answers_stay_while_experts_move_without_a_pause(tmp_path: Path) -> None:
    demo = load_demo("cost_of_moves")
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(16))
    found = demo.measure(demo.Setting(None, "checkpoint", 6, 4, 0.0, str(secret), 8.0))
    assert found.answers == 2 * 4 * 6
    assert found.wrong == 0
    assert found.orders >= 4
    assert found.loads == found.orders * 4 * 13
    assert found.ratio > 0
