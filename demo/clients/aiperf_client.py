"""AIPerf: streamed chats and completions, with the prefix cache reset before and the server's own
metrics read meanwhile.

Tried with aiperf 0.13.0 (PyPI): `python demo/clients/aiperf_client.py http://127.0.0.1:8000`
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).resolve().parent.parent.parent / "rorqual" / "bundled"
REQUESTS = 16
ANSWER = 16  # tokens


def measure(server: str, kind: str, *options: str) -> tuple[Any, Any]:
    """The summary of a run, and what it read from /metrics."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                str(Path(sys.executable).with_name("aiperf")),
                "profile",
                "--model=rorqual-bundled",
                f"--url={server}",
                f"--endpoint-type={kind}",
                "--streaming",
                f"--tokenizer={TOKENIZER}",
                f"--request-count={REQUESTS}",
                "--concurrency=4",
                "--isl=32",
                f"--osl={ANSWER}",
                "--extra-inputs=ignore_eos:true",
                "--reset-kv-cache",
                "--wait-for-model-timeout=30",
                "--wait-for-model-mode=both",
                f"--artifact-dir={folder}",
                "--ui=none",
                *options,
            ],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
        metrics = json.loads((Path(folder) / "server_metrics_export.json").read_text())
        return summary, metrics


def check(summary: Any, metrics: Any) -> str:
    assert summary["is_complete"], summary
    assert summary["error_summary"] == [], summary["error_summary"]
    assert summary["request_count"]["avg"] == REQUESTS, summary["request_count"]
    assert summary["total_usage_completion_tokens"]["avg"] == REQUESTS * ANSWER
    first = summary["time_to_first_token"]["p50"]
    between = summary["inter_token_latency"]["p50"]
    rate = summary["output_token_throughput"]["avg"]
    assert min(first, between, rate) > 0
    assert "generation_tokens" in json.dumps(metrics), "nothing was read from /metrics"
    return f"{rate:.0f} tokens/s, TTFT {first:.0f} ms, ITL {between:.1f} ms"


def main(server: str) -> None:
    counted = "--use-server-token-count"
    for kind, options in (("chat", (counted, "--per-chunk-usage")), ("completions", (counted,))):
        print(f"measured: {kind}: {check(*measure(server, kind, *options))}")


if __name__ == "__main__":
    main(sys.argv[1].rstrip("/"))
