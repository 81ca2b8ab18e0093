"""The kernels of int8, int4 and e4m3 weights on one GPU: right, how fast, and which tiles would be
faster.

    python demo/quantized_kernels.py [--seconds 280] [--json FILE]

Three parts, each of which ends when its share of the time is spent: every format at some numbers of
tokens against fp64, beside the floor of bytes and operations and, where there is one, the kernel of
int4 weights as loaded and of bf16 in the same process; then searches of tiles for the shapes that
decide a step, which are kept in this GPU's own tuning file; then those shapes again with what was
kept. Prints one table and a verdict: how many cases were wrong, and the share of the floor.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from rorqual.bench.kernels import gemm_and_experts as base
from rorqual.bench.kernels import quantized, quantized_tuning, run
from rorqual.bench.kernels.gemm_and_experts import KernelCase
from rorqual.ops.triton.runtime.launch import keep_compiled

# how far an output may be from fp64: rows between two products may be rounded the other way
LIMITS = {"bf16": 1e-4, "int4": 1e-4, "int8": 1e-3, "fp8": 1e-3}
FIRST = (
    "experts int4-turned T", "experts int4 T", "experts bf16 T", "experts int8 T",
    "experts int4-fp-rows T", "experts int4-int-rows T", "experts fp8-channel T",
    "experts int8-blocks T",
)  # fmt: skip
LINEAR = "5120x2048 M"
SIZES = {"1", "8", "16", "64", "256", "1024"}
SEARCHES = (
    "experts int4-turned T64", "linear int4-turned 5120x2048 M1", "experts int4-turned T1",
    "experts int8 T64", "linear int4-turned 5120x2048 M64", "experts int4-turned T256",
    "linear int8 5120x2048 M1", "experts int4-fp-rows T64", "linear int8 5120x2048 M1024",
    "experts int4-turned T1024",
)  # fmt: skip


def chosen() -> list[KernelCase]:
    """New and old forms of one shape follow one another."""
    among = [*base.cases(), *quantized.cases()]

    def wanted(case: KernelCase) -> bool:
        head, size = case.name[:-1].rstrip("0123456789"), case.name.split()[-1][1:]
        linear = LINEAR in case.name and "library" not in case.name
        return size in SIZES and (head in FIRST or linear)

    cases = [case for case in among if wanted(case)]
    return sorted(cases, key=lambda case: (case.name.split()[0], int(case.name.split()[-1][1:])))


def measured(
    cases: list[KernelCase], device: torch.device, until: float, title: str
) -> list[dict[str, Any]]:
    print(f"\n{title}\n{run.HEADER}", flush=True)
    base.precompile(cases, device)
    rows = []
    for case in cases:
        if time.monotonic() > until:
            print(f"out of time: {len(cases) - len(rows)} cases were not run")
            break
        rows.append(base.row(case, device, check=True) | {"kind": case.kind})
        print(run.line(rows[-1]), flush=True)
    return rows


def is_wrong(row: dict[str, Any]) -> bool:
    return "failed" in row or not row["error"] < LIMITS[row["kind"]]


def search(device: torch.device, until: float) -> list[str]:
    """The names of those that were made."""
    known = {search.name: search for search in quantized_tuning.searches()}
    done = []
    for name in SEARCHES:
        if time.monotonic() > until:
            print(f"out of time: not searched: {', '.join(SEARCHES[len(done) :])}")
            break
        print(f"== {name}", flush=True)
        known[name].run(device)
        done.append(name)
    return done


def main() -> None:
    """Run the three parts and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=280, help="for everything")
    parser.add_argument("--json", type=Path, help="a file for the rows")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    began = time.monotonic()
    device = torch.device("cuda")
    torch.manual_seed(0)
    keep_compiled()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    cases = chosen()
    rows = measured(cases, device, began + 0.45 * options.seconds, "As the tiles ship")
    done = search(device, began + 0.8 * options.seconds)
    again = [case for case in cases if case.name in done]
    after = measured(again, device, began + options.seconds, "With tiles found here")
    wrong = [row["kernel"] for row in rows + after if is_wrong(row)]
    shares = [row["floor_us"] / row["us"] for row in rows if "us" in row]
    print(f"\n{len(rows)} cases in {time.monotonic() - began:.0f} s, wrong: {wrong or 'none'}")
    if shares:
        print(f"share of the floor: {min(shares):.0%} to {max(shares):.0%}")
    if options.json:
        options.json.write_text(json.dumps({"shipped": rows, "found": after}, indent=1))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
