"""SGLang's load generator, by the backends that speak OpenAI's API, with the cache flushed after
the warm-up as `--flush-cache` asks.

Tried with sglang 0.5.23 (PyPI), installed without what it needs for GPUs: its benchmark modules
run as they are, and only the package's own __init__ modules, which load kernels, are passed over.
`python demo/clients/sglang_bench.py http://127.0.0.1:8000`
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tempfile
import types
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / "rorqual" / "bundled"
PASSED_OVER = ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation")
REQUESTS = 16
PROMPT = 32  # tokens
ANSWER = 16


def run_module() -> None:
    """`python -m sglang.benchmark.serving`, without the packages around it."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    for name in PASSED_OVER:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    # the one thing that the load generator takes from the engine: an address that means no host
    utils = types.ModuleType("sglang.srt.disaggregation.utils")
    utils.FAKE_BOOTSTRAP_HOST = "2.2.2.2"  # type: ignore[attr-defined]
    sys.modules[utils.__name__] = utils
    runpy.run_module("sglang.benchmark.serving", run_name="__main__", alter_sys=True)


def measure(server: str, backend: str, *options: str) -> dict[str, float]:
    """One run; the row that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.jsonl"
        sizes = [f"--random-input-len={PROMPT}", f"--random-output-len={ANSWER}"]
        given = [
            f"--backend={backend}",
            f"--base-url={server}",
            "--dataset-name=random-ids",
            f"--num-prompts={REQUESTS}",
            "--random-range-ratio=1.0",
            f"--output-file={out}",
            "--flush-cache",
            "--disable-tqdm",
            *sizes,
            *options,
        ]
        done = subprocess.run(
            [sys.executable, __file__, "--inside", *given],
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(out.read_text())


def check(row: dict[str, float]) -> None:
    assert row["completed"] == REQUESTS, row
    assert row["total_output_tokens"] == REQUESTS * ANSWER, row
    assert row["total_input_tokens"] > 0, row
    assert 0 < row["median_ttft_ms"] <= row["median_e2e_latency_ms"], row
    assert row["mean_itl_ms"] > 0, row


def main(server: str) -> None:
    tokenizer = f"--tokenizer={FOLDER}"
    for backend in ("vllm", "vllm-chat", "sglang-oai", "sglang-oai-chat"):
        row = measure(server, backend, tokenizer)
        check(row)
        print(
            f"measured: {backend}: {row['output_throughput']:.0f} tokens/s, "
            f"TTFT {row['median_ttft_ms']:.0f} ms, ITL {row['median_itl_ms']:.1f} ms"
        )
    # without a tokenizer's name the server is asked for it: it must lie on this host
    check(measure(server, "sglang-oai"))
    print("sglang-oai: the tokenizer by /model_info, as it should be")


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        del sys.argv[1]
        run_module()
    else:
        main(sys.argv[1].rstrip("/"))
