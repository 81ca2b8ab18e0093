"""Engines over several GPUs, captured steps and all: the tokens of one GPU in fp32, whatever
the layout; and a rank that dies or freezes. Run as a script it is an engine whose rank is
struck."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
    pytest.skip("needs at least two CUDA devices", allow_module_level=True)
pytest.importorskip("triton")

from rorqual import LLM
from rorqual.config.parallel import ParallelConfig
from rorqual.ops import reference
from rorqual.parallel.collectives import Axis
from rorqual.parallel.exchange_policy import captured_prompt_tokens
from rorqual.parallel.mesh import Mesh
from tests.child_process import environment
from tests.engine.distributed.test_executor import (
    COMMON,
    TEXTS,
    everything,
    name_of,
    params,
    run_until_it_fails,
)

CARDS = torch.cuda.device_count()
PROMPTS = TEXTS if find_spec("xgrammar") else TEXTS[:-1]  # the last one has a grammar
WATCHDOG = 8.0
STUCK = 100
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "num_speculative_tokens": 2},
    {"tp": 2, "p2p_memory": False},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "ep": 2, "exe_mode": "eager"},
    {"tp": 2, "piecewise_tokens": 256, "num_speculative_tokens": 1},
    {"dp": 2, "ep": 2, "piecewise_tokens": 256},
    {"dp": 2, "ep": 2, "num_speculative_tokens": 1},
    {"dp": 2, "ep": 2, "exchange": "low_latency", "num_speculative_tokens": 2},
    {"dp": 2, "ep": 2, "exchange": "alltoall"},
    # steps captured when first needed, and drafters that skip the window: all ranks must agree
    {
        "dp": 2,
        "ep": 2,
        "num_speculative_tokens": 2,
        "draft_window": False,
        "cudagraph_capture_sizes": (1,),
    },
    {"pp": 2, "num_speculative_tokens": 2},
    {"pp": 2, "pipeline_turns": 1},
    {"dp": 2, "ep": 2, "micro_batches": 2, "num_speculative_tokens": 1},
    {"dp": 2, "ep": 2, "micro_batches": 3, "exchange": "low_latency", "p2p_memory": False},
    {"dp": 2, "ep": 2, "micro_batches": 2, "exchange": "alltoall"},
    {"dp": 2, "ep": 2, "micro_batches": 2, "p2p_memory": False, "slow_link_gbits": 1.0},
    {"tp": 2, "p2p_memory": False, "slow_link_gbits": 1.0},
    {"dp": 2, "ep": 2, "micro_batches": 2, "p2p_memory": False, "num_speculative_tokens": 1},
    {"tp": 2, "micro_batches": 2, "p2p_memory": False, "sequence_parallel": True},
    {"tp": 2, "dp": 2, "ep": 4, "exchange": "low_latency", "num_speculative_tokens": 2},
    {"tp": 2, "pp": 2},
    {"tp": 4, "num_speculative_tokens": 2},
    {"dp": 4, "embed_tp": 4, "head_tp": 4},
    {"dp": 8, "ep": 8, "exchange": "low_latency", "num_speculative_tokens": 1},
    {"dp": 4, "tp": 2, "ep": 8, "dense_tp": 1},
    {"dp": 8, "ep": 8, "exchange": "alltoall"},
]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    """One GPU, no speculation."""
    return everything(LLM(**{**COMMON, "device": "cuda"}), PROMPTS)


def ranks(layout: dict[str, Any]) -> int:
    return prod(layout.get(name, 1) for name in ("tp", "dp", "pp"))


@pytest.mark.parametrize(
    "layout", [layout for layout in LAYOUTS if ranks(layout) <= CARDS], ids=name_of
)
def test_layouts_give_the_tokens_of_one_card(expected: list[Any], layout: dict[str, Any]) -> None:
    llm = LLM(**{**COMMON, "device": "cuda", **layout})
    stats = llm.engine.stats
    if (
        layout.get("tp", 1) > 1
        and not llm.engine.model.layout([1] * layout.get("dp", 1), True).sharded
    ):
        assert stats.allreduce_backend.startswith(
            "one kernel" if layout.get("p2p_memory", True) else "process group (as configured"
        ), stats
    worker = llm.engine.worker
    pieces = worker.runner.pieces
    captured = captured_prompt_tokens(
        worker.mesh.sizes, worker.model_config.moe, worker.batched_tokens
    )
    in_pieces = captured > 0 and layout.get("exe_mode") != "eager"
    assert (pieces is not None and bool(pieces.graphs)) == in_pieces
    parts = worker.runner.parts
    alternate = layout.get("micro_batches") == 2 and not layout.get("p2p_memory", True)
    assert (parts is not None and bool(parts.graphs)) == (in_pieces and alternate)
    if layout.get("exchange") == "low_latency":
        shared = layout.get("p2p_memory", True)
        expected_backend = "memory shared by the GPUs" if shared else "process group: as configured"
        assert expected_backend in stats.all2all_backend, stats
    assert everything(llm, PROMPTS) == expected


def sums(rank: int, world: int, folder: str) -> None:
    """The fused all-reduce on one GPU of `world`."""
    torch.cuda.set_device(rank)
    torch.manual_seed(rank)  # parts differ
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    device = torch.device("cuda", rank)
    mesh = Mesh.of(ParallelConfig(tp=world))
    mesh.fuse_all_reduce(300, 7168, torch.bfloat16, device)
    alike = torch.Generator(device).manual_seed(1)
    for rows in (1, 2, 17, 18, 64, 300, 300, 1):  # one and two steps, 256 KiB being 18.3 rows
        one_sum(mesh.tp, rows, alike)
    # nobody's memory goes while another still reads it
    mesh.tp.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    dist.destroy_process_group()


def one_sum(axis: Axis, rows: int, alike: torch.Generator) -> None:
    """Called and replayed, against the parts of all ranks added up in their order."""
    shape = (rows, 7168)
    kind = torch.bfloat16
    device = alike.device
    own = torch.randn(shape, device=device).to(kind)
    residual, weight = (
        torch.randn(size, generator=alike, device=device).to(kind) for size in (shape, shape[1])
    )
    added = torch.zeros(shape, device=device)
    for part in axis.all_gather(own).view(-1, *shape):
        added += part.float()
    normed, total = reference.add_norm(added.to(kind), residual, weight, 1e-6)
    call = partial(axis.add_norm, own, residual, weight, 1e-6, no_other_way)
    found = [call()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = call()
    for _ in range(5):
        graph.replay()
    for got, sum_of_all in (*found, recorded, call()):
        assert torch.equal(sum_of_all, total), rows
        assert (got.float() - normed.float()).abs().max() < 2**-5, rows


def no_other_way(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("the fused kernel takes these rows")


def test_sums_over_shared_memory_are_those_of_all_parts_in_order(tmp_path: Path) -> None:
    processes = [
        multiprocessing.get_context("spawn").Process(target=sums, args=(rank, CARDS, str(tmp_path)))
        for rank in range(CARDS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * CARDS


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "NCCL"])
@pytest.mark.parametrize(
    ("blow", "named"), [("SIGKILL", "status -9"), ("SIGSTOP", "no sign of life")]
)
def test_a_rank_that_dies_or_freezes_ends_the_engine(blow: str, named: str, shared: bool) -> None:
    """In a process of its own, which must come to its end as well."""
    command = [sys.executable, __file__, blow, json.dumps(shared)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    reported = json.loads(done.stdout.splitlines()[-1])
    assert "rank 1 (pp 0, dp 0, tp 1)" in reported["message"]
    assert named in reported["message"]
    assert reported["seconds"] < (5 if blow == "SIGKILL" else WATCHDOG + 6), reported


def struck(blow: str, shared: bool) -> None:
    faulthandler.dump_traceback_later(STUCK, exit=True)  # tells where, before the test's own limit
    llm = LLM(**COMMON, device="cuda", tp=2, watchdog_seconds=WATCHDOG, p2p_memory=shared)
    assert llm.engine.executor is not None
    process = llm.engine.executor.handles[0].process
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
