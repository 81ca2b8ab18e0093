"""GuideLLM: load of constant concurrency and of a constant rate, by chats and by completions.

Tried with guidellm 0.8.1 and torch 2.13.0 (PyPI):
`python demo/clients/guidellm_client.py http://127.0.0.1:8000`
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).resolve().parent.parent.parent / "rorqual" / "bundled"
REQUESTS = 16
ANSWER = 16  # tokens


def measure(server: str, route: str, profile: str) -> Any:
    """One benchmark of the report that a run writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        done = subprocess.run(
            [
                str(Path(sys.executable).with_name("guidellm")),
                "run",
                f"--backend=kind=openai_http,target={server},request_format={route}",
                f"--profile={profile}",
                f"--constraint=kind=max_requests,count={REQUESTS}",
                f"--tokenizer=kind=hf_auto,model={TOKENIZER}",
                f"--data=kind=synthetic_text,prompt_tokens=32,output_tokens={ANSWER}",
                f"--output=kind=json,path={out}",
                "--disable-progress",
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (benchmark,) = json.loads(out.read_text())["benchmarks"]
        return benchmark


def check(benchmark: Any) -> str:
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert totals["successful"] == REQUESTS, totals
    assert totals["errored"] == 0, totals
    for request in benchmark["requests"]["successful"]:
        assert request["output_metrics"]["text_tokens"] == ANSWER, request
        assert request["input_metrics"]["text_tokens"] >= 32, request
    first = metrics["time_to_first_token_ms"]["successful"]["median"]
    between = metrics["inter_token_latency_ms"]["successful"]["median"]
    assert first > 0
    assert between > 0
    rate = metrics["requests_per_second"]["successful"]["mean"]
    return f"{rate:.1f} requests/s, TTFT {first:.0f} ms, ITL {between:.1f} ms"


def main(server: str) -> None:
    for route, profile in (
        ("/v1/chat/completions", "kind=concurrent,streams=4"),
        ("/v1/completions", "kind=constant,rate=8"),
    ):
        print(f"measured: {route}: {check(measure(server, route, profile))}")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
