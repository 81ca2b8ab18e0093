"""The fake server as a process of its own, and what it logged."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

FAKE = Path(__file__).with_name("fake_openai.py")


class Fake:
    def __init__(self, port: int):
        self.url = f"http://127.0.0.1:{port}"

    def log(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/log", timeout=10) as page:
            return json.load(page)

    def requests(self, mark: str) -> list[dict[str, Any]]:
        """Those whose body carries `mark`, in the order they came; warm-ups, which are shorter,
        left out by their own mark."""
        return [entry for entry in self.log()["requests"] if entry["body"].get("mark") == mark]


def start(*arguments: str) -> tuple[subprocess.Popen[str], Fake]:
    process = subprocess.Popen(
        [sys.executable, str(FAKE), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Fake(int(process.stdout.readline()))


def stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait(timeout=60)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
