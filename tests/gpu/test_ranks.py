"""Engines over several cards, recorded steps and all: the tokens of one card in fp32, whatever the layout; and a rank that dies or freezes.
Run as a script it is an engine whose rank is struck."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
    pytest.skip("needs at least two CUDA devices", allow_module_level=True)
pytest.importorskip("triton")

from rorqual import LLM
from tests.engine.test_ranks import COMMON, TEXTS, everything, name_of, params, run_until_it_fails

CARDS = torch.cuda.device_count()
WATCHDOG = 8.0
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "next_n": 2},
    {"tp": 2, "peer_memory": False},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "ep": 2, "exe_mode": "eager"},
    {"dp": 2, "ep": 2, "next_n": 1},
    {"dp": 2, "ep": 2, "exchange": "low_latency", "next_n": 2},
    {"dp": 2, "ep": 2, "exchange": "alltoall"},
    {"pp": 2, "next_n": 2},
    {"pp": 2, "micro_batches": 1},
    {"tp": 2, "dp": 2, "ep": 4, "exchange": "low_latency", "next_n": 2},
    {"tp": 2, "pp": 2},
    {"tp": 4, "next_n": 2},
    {"dp": 4, "embed_tp": 4, "head_tp": 4},
    {"dp": 8, "ep": 8, "exchange": "low_latency", "next_n": 1},
    {"dp": 4, "tp": 2, "ep": 8, "dense_tp": 1},
    {"dp": 8, "ep": 8, "exchange": "alltoall"},
]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """One card, no speculation."""
    return everything(LLM(**{**COMMON, "device": "cuda"}), TEXTS)


def ranks(layout: dict[str, Any]) -> int:
    return prod(layout.get(name, 1) for name in ("tp", "dp", "pp"))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if ranks(layout) <= CARDS], ids=name_of)
def test_layouts_give_the_tokens_of_one_card(expected: list[Any], layout: dict[str, Any]) -> None:
    llm = LLM(**{**COMMON, "device": "cuda", **layout})
    stats = llm.engine.stats
    if layout.get("tp", 1) > 1 and not llm.engine.model.layout([1] * layout.get("dp", 1), True).sharded:
        assert stats.way_of_sums.startswith("one kernel" if layout.get("peer_memory", True) else "process group (as configured"), stats
    if "exchange" in layout and layout["exchange"] == "low_latency":
        assert "memory shared by the cards" in stats.way_to_experts, stats
    assert everything(llm, TEXTS) == expected


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "NCCL"])
@pytest.mark.parametrize(("blow", "named"), [("SIGKILL", "status -9"), ("SIGSTOP", "no sign of life")])
def test_a_rank_that_dies_or_freezes_ends_the_engine(blow: str, named: str, shared: bool) -> None:
    """In a process of its own, which must come to its end as well."""
    command = [sys.executable, __file__, blow, json.dumps(shared)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert "rank 1 (pp 0, dp 0, tp 1)" in told["message"]
    assert named in told["message"]
    assert told["seconds"] < (5 if blow == "SIGKILL" else WATCHDOG + 6), told


def struck(blow: str, shared: bool) -> None:
    llm = LLM(**COMMON, device="cuda", tp=2, watchdog_seconds=WATCHDOG, peer_memory=shared)
    assert llm.engine.group is not None
    process = llm.engine.group.members[0].process
    llm.generate(TEXTS, params(max_tokens=40))
    start = time.monotonic()
    os.kill(process.pid, getattr(signal, blow))
    message = run_until_it_fails(llm, 60)
    seconds = time.monotonic() - start
    llm.engine.close()
    assert process.wait(5) is not None
    print(json.dumps({"message": message, "seconds": seconds}))


if __name__ == "__main__":
    struck(sys.argv[1], json.loads(sys.argv[2]))
