"""demo/cost_of_moves.py: experts come and go under every second batch, and no answer changes."""

from __future__ import annotations

import importlib.util
import secrets
import sys
from pathlib import Path

import pytest

from tests.engine.distributed.starting import ROOT


@pytest.mark.exhaustive
def test_answers_stay_while_experts_move_without_a_pause(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        "cost_of_moves", ROOT / "demo" / "cost_of_moves.py"
    )
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = demo
    spec.loader.exec_module(demo)
    secret = tmp_path / "secret"
    secret.write_text(secrets.token_hex(16))
    found = demo.measure(demo.Setting(None, "checkpoint", 6, 4, 0.0, str(secret), 8.0))
    assert found.answers == 2 * 4 * 6
    assert found.wrong == 0
    assert found.orders >= 4
    assert found.loads == found.orders * 4 * 13
    assert found.ratio > 0
