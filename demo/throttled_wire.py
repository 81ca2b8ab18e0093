"""Runs `rorqual bench micro-batches` over a wire that is as slow as asked: ranks on this machine's
processors, in a network namespace whose loopback lets so many Mbit/s through (tc, a token bucket),
messages of all ranks together.

    python demo/throttled_wire.py --mbit 100,200 -- --prompts 160,600 --batches 12,30

What follows `--` goes to the benchmark. Needs root and iproute2 with tc. The model is small and has
random weights: layers of one shared and 16 routed experts, 8 a token, wide for the rows that
travel, and with a third of their products in attention, about as DeepSeek-V3 has them. Two things
cost the processors that hiding the wire cannot gain back: its bytes, which are a small part of
computing here, and weights that are read once for each part, which are little where each expert has
many rows, as it has with prompts on a GPU. Memory of past steps is kept by the C library: else long
steps alone would ask the system for new pages, and lose by it to shorter parts.

--priority: on a machine with other work. Its scheduler divides processors between sessions first,
so the nice value of a process does not help against another session's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MTU = 9000
BURST = "20kb"  # what goes through at once after a pause; above a packet's bytes
LATENCY = "5s"  # the longest that bytes queue; what would queue longer is lost, and sent again
KEPT = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
MODEL = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 7,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 128,
    "q_lora_rank": 256,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "max_position_embeddings": 4096,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def asked() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", default="100,200", help="Comma-separated Mbit/s.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, help="A folder for the benchmark's figures.")
    parser.add_argument(
        "--priority", type=int, default=0, help="Nice value of the session, -20 on."
    )
    parser.add_argument("bench", nargs="*", help="Options of rorqual bench micro-batches.")
    found = parser.parse_args()
    return found, found.bench


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)


@contextmanager
def namespace() -> Iterator[str]:
    name = f"rorqual-wire-{os.getpid()}"
    ip("netns", "add", name)
    try:
        ip("-n", name, "link", "set", "lo", "mtu", str(MTU), "up")
        yield name
    finally:
        ip("netns", "del", name)


def throttle(name: str, mbit: int) -> None:
    inside = ["ip", "netns", "exec", name]
    bucket = ["tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", LATENCY]
    subprocess.run([*inside, "tc", "qdisc", "replace", "dev", "lo", "root", *bucket], check=True)


def timed(command: list[str], priority: int) -> int:
    """The exit status of a command that runs as a session of its own."""
    own = {**os.environ, **KEPT}
    with subprocess.Popen(command, cwd=ROOT, env=own, start_new_session=True) as process:
        if priority:
            Path(f"/proc/{process.pid}/autogroup").write_text(str(priority))
        try:
            return process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise


def main() -> int:
    wanted, options = asked()
    if os.geteuid() or not shutil.which("tc") or not shutil.which("ip"):
        print("throttled_wire.py needs root, ip and tc (iproute2)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as model, namespace() as name:
        (Path(model) / "config.json").write_text(json.dumps(MODEL))
        ranks = str(wanted.ranks)
        engine = ["--weights", "random", "--dp", ranks, "--ep", ranks, "--threads", "1"]
        engine += ["--max-model-len", "1024", "--dtype", "float32"]
        for mbit in map(int, wanted.mbit.split(",")):
            throttle(name, mbit)
            load = f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}"
            print(f"{mbit} Mbit/s, {ranks} ranks, {load}", flush=True)
            command = ["rorqual", "bench", "micro-batches", model, *engine, *options]
            if wanted.json:
                command += ["--json", str(wanted.json / f"micro-batches-{mbit}.json")]
            inside = ["ip", "netns", "exec", name, sys.executable, "-m", *command]
            if status := timed(inside, wanted.priority):
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
