"""How busy both GPUs are while attention runs on one and all experts on the other: the share of
decode steps during which a GPU computes or copies, waits for the other one excluded.

    python demo/split_busy.py deepseek-v2-lite --weights random --requests 8 --prompt 32000 \
        --micro-batches 2 --devices cuda:0,cuda:1 --json busy.json

Both sides are profiled during the same steps. A kernel that waits for rows or sums of the other GPU
counts as idle for all of its time, also the few microseconds in which it maps ids or adds sums.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from child_process import ChildProcess

from rorqual import LLM
from rorqual.bench.offline.profile import busy_share, spans_of_steps, summarize, timeline
from rorqual.bench.provenance import client_facts
from rorqual.cli.experts import MAX_ROWS
from rorqual.disagg.experts.server import serve_experts

WAITS = ("_remote_arrival_kernel", "_remote_combine_kernel")


@dataclass(frozen=True)
class Trial:
    """prompt: tokens of each of so many requests. layers: all if None. devices: of attention, and
    of the experts."""

    model: str
    weights: str
    layers: int | None
    requests: int
    prompt: int
    steps: int
    micro_batches: int
    devices: tuple[str, str]

    def options(self, device: str) -> dict[str, Any]:
        found = {"weights": self.weights, "num_layers": self.layers, "device": device}
        return {name: value for name, value in found.items() if value is not None}


def keep() -> None:
    """The main of the expert server: a line begins a profile, the next ends it."""
    from torch.profiler import ProfilerActivity, profile

    settings = json.loads(sys.stdin.readline())
    trial = Trial(**{**settings["trial"], "devices": tuple(settings["trial"]["devices"])})
    server = serve_experts(
        trial.model,
        trial.options(trial.devices[1]),
        "all",
        "all",
        "127.0.0.1:0",
        settings["secret"],
        MAX_ROWS,
    )
    print(json.dumps(server.port), flush=True)
    while sys.stdin.readline():
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            print(json.dumps("profiling"), flush=True)
            sys.stdin.readline()
        spans, _ = timeline(found.events())
        print(json.dumps(side(spans, trial.steps)), flush=True)
    server.close()


def side(spans: Any, steps: int) -> dict[str, Any]:
    kernels = summarize(spans, steps).kernels
    return {
        "busy": busy_share(spans, WAITS),
        "kernels_us_a_step": {kernel.name: kernel.us for kernel in kernels[:12]},
    }


def measure(trial: Trial) -> dict[str, Any]:
    """Busy shares of both sides, and each side's kernels with most time."""
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.write_text(secrets.token_hex(32))
        with closing(
            ChildProcess(__file__, {"trial": asdict(trial), "secret": str(secret)})
        ) as server:
            return measure_with(server, trial, str(secret))


def measure_with(server: ChildProcess, trial: Trial, secret: str) -> dict[str, Any]:
    port = server.receive()
    llm = LLM(
        trial.model,
        **trial.options(trial.devices[0]),
        experts=(f"127.0.0.1:{port}",),
        expert_secret_file=secret,
        expert_transport="handles",
        micro_batches=trial.micro_batches,
        max_num_seqs=trial.requests,
        max_model_len=trial.prompt + 512,
        skip_tokenizer_init=True,
    )
    found: dict[str, Any] = {}

    @contextmanager
    def experts() -> Iterator[None]:
        server.send("begin")
        server.receive()
        yield
        server.send("end")
        found["experts"] = server.receive()

    with closing(llm.engine):  # before the server, whose end it would report as a loss
        vocabulary = llm.engine.model_config.vocab_size
        shape = (trial.requests, trial.prompt)
        prompts = np.random.default_rng(1).integers(10, vocabulary, shape).tolist()
        spans, _ = spans_of_steps(llm, prompts, trial.steps, experts())
    found["attention"] = side(spans, trial.steps)
    found["step_ms"] = summarize(spans, trial.steps).step / 1e3
    return found


def main() -> None:
    if "--keep" in sys.argv:
        keep()
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model")
    parser.add_argument("--weights", choices=("checkpoint", "random"), default="checkpoint")
    parser.add_argument("--layers", type=int, help="with random weights: of so many alone")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32000, help="tokens of each")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--devices", default="cuda:0,cuda:1", help="attention's and the experts'")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    devices = tuple(args.devices.split(","))
    if len(devices) != 2 or not all(device.startswith("cuda") for device in devices):
        parser.error(f"--devices {args.devices}: two GPUs, such as cuda:0,cuda:1")
    trial = Trial(
        args.model,
        args.weights,
        args.layers,
        args.requests,
        args.prompt,
        args.steps,
        args.micro_batches,
        devices,
    )
    found = measure(trial)
    print(
        f"{trial.requests} requests of {trial.prompt} tokens, {trial.micro_batches} micro-batches: "
        f"{found['step_ms']:.2f} ms a step, attention busy {100 * found['attention']['busy']:.0f} "
        f"%, experts {100 * found['experts']['busy']:.0f} %"
    )
    for name in ("attention", "experts"):
        for kernel, us in found[name]["kernels_us_a_step"].items():
            print(f"  {name:10} {us:9.1f} us  {kernel[:80]}")
    if args.json:
        facts = client_facts(("torch", "triton"))
        text = json.dumps({"trial": asdict(trial), **found, "facts": facts}, indent=1)
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
