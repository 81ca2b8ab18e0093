"""vLLM's load generator, `vllm bench serve`.

Tried with vllm 0.33.0 (PyPI) and torch 2.13.0 for CPUs, installed without what it needs for GPUs,
which this command does not: `python demo/clients/vllm_bench.py http://127.0.0.1:8000`
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REQUESTS = 16
PROMPT = 32  # tokens
ANSWER = 16
CHAT = ("--backend=openai-chat", "--endpoint=/v1/chat/completions")


def measure(server: str, *options: str) -> dict[str, Any]:
    """One run; the result that it writes. No model is named: the server is asked for it, and
    its tokenizer must lie on this host."""
    with tempfile.TemporaryDirectory() as folder:
        given = [
            f"--base-url={server}",
            "--dataset-name=random",
            f"--num-prompts={REQUESTS}",
            f"--random-input-len={PROMPT}",
            f"--random-output-len={ANSWER}",
            "--ignore-eos",
            "--disable-tqdm",
            "--save-result",
            "--save-detailed",
            f"--result-dir={folder}",
            "--result-filename=result.json",
            *options,
        ]
        done = subprocess.run(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", *given],
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((Path(folder) / "result.json").read_text())


def check(result: dict[str, Any]) -> None:
    assert result["completed"] == REQUESTS, result
    assert result["failed"] == 0, result
    assert result["output_lens"] == [ANSWER] * REQUESTS, result
    assert all(count >= PROMPT for count in result["input_lens"]), result
    assert result["median_ttft_ms"] > 0, result
    # one chunk a token, or fewer where a socket was busy
    assert all(0 < len(gaps) <= ANSWER for gaps in result["itls"]), result


def main(server: str) -> None:
    for kind, options in (("completions", ()), ("chat", CHAT)):
        result = measure(server, *options, "--num-warmups=2")
        check(result)
        print(
            f"measured: {kind}: {result['output_throughput']:.0f} tokens/s, "
            f"TTFT {result['median_ttft_ms']:.0f} ms, ITL {result['median_itl_ms']:.1f} ms"
        )
    sampled = ("--temperature=0.8", "--top-p=0.9", "--top-k=40", "--min-p=0.01", "--logprobs=2")
    check(measure(server, *sampled, "--request-rate=20", "--max-concurrency=4"))
    print("with sampling, log probabilities and a rate: as it should be")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
