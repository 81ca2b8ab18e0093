"""Times of all kernels of rorqual.ops.triton on one GPU, one line each, with the floor from bytes
and operations and the best peer's time.

usage: PYTHONPATH=. python3 -m rorqual.bench.kernels.run [--check] [--tune] [--peer] [--only
WORD,WORD] [--json FILE] [--limit SECONDS]

attention.py, gemm_and_experts.py and sampling.py describe how times, floors and errors are
measured; they, moe.py and quantized.py have the cases. --only takes comma-separated parts of case
names; $ marks the end of a name. --tune tries configurations of the chosen cases instead, prints
the best and stores them for this GPU (rorqual/ops/triton/runtime/tuning.py). --peer runs vLLM's
kernels, if installed, on the same data in the same process, a line each with its error; otherwise
the peer's column has earlier figures from an H200.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import Any

import torch

from rorqual.bench.kernels import attention, moe, quantized, quantized_tuning, sampling, tuning
from rorqual.bench.kernels import gemm_and_experts as experts
from rorqual.bench.kernels.vllm_kernels import check_installed
from rorqual.config.whole_file import write_whole
from rorqual.ops.triton.runtime.launch import keep_compiled

HEADER = (
    f"{'kernel':42}{'us':>9}{'floor':>8}{'of it':>6}{'GB/s':>7}{'TFLOP':>7}"
    f"{'peer':>8}{'x':>6}{'error':>9}  config"
)


def run(only: str | None = None, check: bool = False, tune: bool = False, json: Path | None = None,
        limit: float = 500, peer: bool = False) -> list[dict[str, Any]]:  # fmt: skip
    """Measure and print; start no further case after `limit` seconds. Returns one dictionary a
    case: kernel, us, floor_us, gb_s, tflop_s, peer_us, error, config, and with `peer` what
    vllm_kernels.best says; or kernel and failed. `json` has them after every case."""
    if peer:
        check_installed()
    began = time.monotonic()
    done = []
    device = torch.device("cuda")
    torch.manual_seed(0)
    keep_compiled()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n{HEADER}")
    if json:
        write_whole(json, "[]")
    for row in rows(device, only or "", check, tune, peer):
        done.append(row)
        print(line(row), flush=True)
        if json:
            write_whole(json, dumps(done, indent=1, default=vars))
        if row.get("gpu_lost"):
            raise RuntimeError("a peer left the GPU unusable: no case after this one was run")
        if time.monotonic() - began > limit:
            print("out of time: the cases after this one were not run")
            break
    return done


def rows(
    device: torch.device, only: str, check: bool, tune: bool, peer: bool = False
) -> Iterator[dict[str, Any]]:
    yield from attention.rows(device, check, tune, only, peer)
    if tune:
        tuning.tune_all(device, only, quantized_tuning.searches)
        return
    among = (*experts.cases(), *quantized.cases(), *moe.cases(), *sampling.cases())
    chosen = experts.selected(only, among)
    experts.precompile(chosen, device)
    for case in chosen:
        yield experts.row(case, device, check, peer)


def line(row: dict[str, Any]) -> str:
    head = f"{row['kernel']:42}"
    if row.get("us") is None:
        return f"{head} FAILED {row.get('failed') or row.get('failures')}"
    peer = row["peer_us"]
    error = row.get("error")
    us = row["us"]
    floor = row["floor_us"]
    against = f"{peer:8.1f}{us / peer:6.2f}" if peer else " " * 14
    judged = format_error(error) or " " * 9
    rates = f"{row['gb_s']:7.0f}{row['tflop_s']:7.0f}"
    share = f"{100 * floor / us:5.0f}%"
    text = f"{head}{us:9.1f}{floor:8.1f}{share}{rates}{against}{judged}  {short(row)}"
    trials = [
        f"\n{'':42}{trial:9.1f}  {attention.short(config)}"
        for trial, config in row.get("trials", [])[1:]
    ]
    errors = row.get("peer_errors", {})
    beside = [
        f"\n{'':42}{format_us(us)}{format_error(errors.get(name))}  {name}"
        for name, us in row.get("peers", {}).items()
    ]
    return (
        text
        + "".join(beside)
        + "".join(trials)
        + "".join(
            f"\n{'':42}{why}  {attention.short(config)}" for why, config in row.get("failures", [])
        )
    )


def format_us(us: float | str) -> str:
    return f"{us:9.1f}" if isinstance(us, float) else us


def format_error(error: float | None) -> str:
    return f"{error:9.1e}" if error is not None else ""


def short(row: dict[str, Any]) -> str:
    return attention.short(row["config"]) if row.get("config") is not None else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare with fp64")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--peer", action="store_true", help="run vLLM's kernels too")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=500)
    options = parser.parse_args()
    run(options.only, options.check, options.tune, options.json, options.limit, options.peer)


if __name__ == "__main__":
    main()
