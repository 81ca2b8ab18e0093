"""What placing experts by their load is worth, on one device: the fullest rank of a layout times
its steps, computing alone, under counts of real requests, with experts in order and placed by them.

    python demo/placement_worth.py deepseek-v3 --load load.json --layers 12 --ep 8,32 --redundant 32

Each row is a run of `rorqual bench offline --single-rank-bench --expert-load` for the rank with
most to do in each layer (`--rank hottest`), or the one nearest to the mean. All ranks wait for the
fullest, so the ratio of its step times, in order to placed, is that of the throughputs, as far as
exchanges take the same. Weights are random, tokens meaningless. --placed-by: other counts to place
experts by than those that they are then timed under.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RANKS = ("hottest", "mean")


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="A folder or a shape's name; bundled if left out.")
    parser.add_argument("--load", type=Path, required=True, help="Counts, as --expert-load takes.")
    parser.add_argument("--placed-by", type=Path, help="Counts to place by; --load if left out.")
    parser.add_argument("--ep", default="8,32", help="Comma-separated; dp is the same.")
    parser.add_argument("--redundant", type=int, default=32)
    parser.add_argument("--layers", type=int, help="Of the model, the first so many.")
    parser.add_argument("--requests", type=int, default=64, help="Of each rank.")
    parser.add_argument("--prompt", type=int, default=1000, help="Tokens.")
    parser.add_argument("--output", type=int, default=65, help="Tokens.")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measured(wanted: argparse.Namespace, ep: int, rank: str, placed: bool) -> dict[str, Any]:
    """The row of one run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = ["bench", "offline", *([wanted.model] if wanted.model else [])]
        command += ["--weights", "random", "--dp", str(ep), "--ep", str(ep), "--single-rank-bench"]
        command += ["--concurrency", str(ep * wanted.requests), "--repeats", "1"]
        command += ["--prompt-len", str(wanted.prompt), "--output-len", str(wanted.output)]
        command += ["--expert-load", str(wanted.load), "--rank", rank, "--json", str(out)]
        if wanted.layers:
            command += ["--layers", str(wanted.layers)]
        if placed:
            counts = str(wanted.placed_by or wanted.load)
            command += ["--redundant-experts", str(wanted.redundant), "--init-expert-load", counts]
        done = subprocess.run(
            [sys.executable, "-m", "rorqual", *command],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            sys.exit(f"rorqual {' '.join(command)} ended with status {done.returncode}")
        found: dict[str, Any] = json.loads(out.read_text())["rows"][0]
        if found["step_ms"] <= 0:  # a difference of two runs
            sys.exit("steps are shorter than the runs' noise; accepted: a longer --output")
        return found


def main() -> None:
    wanted = asked()
    rows = []
    print("SINGLE RANK, SIMULATED expert load; decode steps, and prompts of one rank")
    print("| ep | experts | rank | step ms | prefill tokens/s |")
    print("|---|---|---|---|---|")
    for ep in map(int, wanted.ep.split(",")):
        hottest = []
        for placed in (False, True):
            for rank in RANKS:
                row = measured(wanted, ep, rank, placed)
                rows.append({"ep": ep, "placed": placed, "rank": rank, **row})
                experts = f"placed, {wanted.redundant} copies" if placed else "in order"
                rate = row["prefill_tokens_per_s"]
                print(f"| {ep} | {experts} | {rank} | {row['step_ms']:.2f} | {rate:,.0f} |")
                if rank == "hottest":
                    hottest.append(row)
        order, moved = hottest
        decode = order["step_ms"] / moved["step_ms"]
        prompts = moved["prefill_tokens_per_s"] / order["prefill_tokens_per_s"]
        print(
            f"ep {ep}: placed to in order: decode x{decode:.2f}, prompts x{prompts:.2f}", flush=True
        )
    if wanted.json:
        wanted.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
