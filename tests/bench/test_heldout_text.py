"""The scripts beside the bundled checkpoint that read held-out text run as their documentation
says, on a short text."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.child_process import environment

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.exhaustive


def printed(script: str, *arguments: str) -> str:
    """What a script of demo/ prints."""
    found = subprocess.run(
        [sys.executable, f"demo/{script}", *arguments],
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_text((ROOT / "demo" / "heldout-sample.txt").read_text()[:4000])
    return path


def test_what_an_8bit_cache_costs(text: Path) -> None:
    rows = re.findall(
        r"(float32|bfloat16) +cache (auto|fp8|int8) +(\d\.\d+) nats a token, perplexity (\d+\.\d+)",
        printed("fp8_cache.py", str(text), "--length", "512"),
    )
    assert len(rows) == 6, rows
    nats = {(dtype, cache): float(loss) for dtype, cache, loss, _ in rows}
    plain = nats["float32", "auto"]
    assert 1 < plain < 5, "not the loss of a model that knows the text"
    assert all(abs(loss - plain) < 0.02 * plain for loss in nats.values())
    assert nats["float32", "int8"] != plain != nats["float32", "fp8"]
