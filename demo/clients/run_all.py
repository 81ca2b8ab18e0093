"""Runs clients that others wrote against a server with the bundled model, and prints a table.

    python demo/clients/run_all.py --install          # makes a venv a client, then runs them all
    python demo/clients/run_all.py openai litellm     # these alone
    python demo/clients/run_all.py --url http://127.0.0.1:8000

Each client is a script here; it fails by its exit status. The venvs lie in `--venvs`; a client
without one is left out, and named. Without `--url` a server is started, in float32, for the
comparison with transformers. Exit status 1 where a client failed, 2 where none ran.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CPU_TORCH = ("torch==2.13.0",)  # the build for CPUs where pip finds it
START_SECONDS = 120.0
CLIENT_SECONDS = 600.0

# What the load generators import of vLLM and SGLang, whose own lists are for GPUs.
OF_VLLM = """
    aiohttp blake3 cachetools cbor2 cloudpickle datasets einops fastapi<0.137 filelock jsonschema
    lark llguidance msgspec numpy openai orjson oss-harmony pandas partial-json-parser pillow
    prometheus_client protobuf psutil py-cpuinfo pybase64 pydantic python-json-logger pyyaml pyzmq
    regex requests sentencepiece setproctitle tiktoken torch==2.13.0 tqdm transformers>=5.16,<5.20
    typing_extensions uvicorn uvloop watchfiles xgrammar==0.2.8
"""
OF_SGLANG = """
    aiohttp datasets jinja2 msgspec numpy orjson pillow psutil pybase64 pyzmq requests tqdm
    transformers==5.19.0
"""


@dataclass(frozen=True)
class Client:
    """module: by whose presence a Python can run the script. install: pip's arguments, run by
    run. package: whose version is printed. venv: another client's, where it has none of its own."""

    script: str
    package: str
    module: str
    install: tuple[tuple[str, ...], ...] = ()
    venv: str | None = None


CLIENTS = {
    "openai": Client("openai_client.py", "openai", "openai", (("openai==3.57.0",),)),
    "openai-responses": Client("openai_responses.py", "openai", "openai", venv="openai"),
    "anthropic": Client(
        "anthropic_messages.py", "anthropic", "anthropic", (("anthropic==2.14.0",),)
    ),
    "litellm": Client(
        "litellm_client.py", "litellm", "litellm", (("litellm==1.106.12", "mcp>=2,<3"),)
    ),
    "langchain-openai": Client(
        "langchain_client.py",
        "langchain-openai",
        "langchain_openai",
        (("langchain-openai==1.7.4",),),
    ),
    "instructor": Client(
        "instructor_client.py", "instructor", "instructor", (("instructor==1.17.0",),)
    ),
    "lm_eval": Client(
        "lm_eval_client.py",
        "lm_eval",
        "lm_eval",
        (CPU_TORCH, ("lm_eval[api]==0.4.13", "transformers>=5,<6", "accelerate")),
    ),
    "vllm": Client(
        "vllm_bench.py",
        "vllm",
        "vllm",
        (CPU_TORCH, ("--no-deps", "vllm==0.33.0"), tuple(OF_VLLM.split())),
    ),
    "sglang": Client(
        "sglang_bench.py",
        "sglang",
        "sglang",
        (("--no-deps", "sglang==0.5.23"), tuple(OF_SGLANG.split())),
    ),
    "guidellm": Client(
        "guidellm_client.py", "guidellm", "guidellm", (CPU_TORCH, ("guidellm==0.8.1",))
    ),
    "aiperf": Client("aiperf_client.py", "aiperf", "aiperf", (("aiperf==0.13.0",),)),
}


@dataclass(frozen=True)
class Outcome:
    """status: "passed", "failed" or why it did not run."""

    client: str
    version: str
    status: str
    seconds: float
    measured: list[str]


def install(client: Client, venv: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    for arguments in client.install:
        pip = [str(venv / "bin" / "pip"), "install", "-q", *arguments]
        subprocess.run(pip, check=True, timeout=1800)


@contextmanager
def server(log: Path) -> Iterator[str]:
    """`rorqual serve` on a free port; its address."""
    command = [sys.executable, "-m", "rorqual", "serve", "--port", "0", "--dtype", "float32"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=environment)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(r"serving .* on (http://\S+:\d+)", log.read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield found[1]
    finally:
        process.terminate()
        process.wait(60)


def version_of(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def run(name: str, python: Path, url: str) -> Outcome:
    client = CLIENTS[name]
    version = version_of(python, client.package) if python.exists() else ""
    if not version:
        return Outcome(name, "", "not installed", 0.0, [])
    began = time.monotonic()
    command = [str(python), str(HERE / client.script), url]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_SECONDS)
    except subprocess.TimeoutExpired:
        return Outcome(name, version, "failed", CLIENT_SECONDS, ["nothing in time"])
    seconds = time.monotonic() - began
    if done.returncode != 0:
        print(f"---- {name}\n{done.stdout}{done.stderr}----", file=sys.stderr)
        return Outcome(name, version, "failed", seconds, [])
    lines = done.stdout.splitlines()
    measured = [line.partition(": ")[2] for line in lines if line.startswith("measured: ")]
    status = "passed" if measured else "failed"  # a client that measured nothing tried nothing
    return Outcome(name, version, status, seconds, measured)


def show(outcomes: list[Outcome]) -> None:
    print("| client | version | result | s | measured |\n|---|---|---|---:|---|")
    for one in outcomes:
        measured = "<br>".join(one.measured)
        print(f"| {one.client} | {one.version} | {one.status} | {one.seconds:.0f} | {measured} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="clients to run; all if left out")
    parser.add_argument("--install", action="store_true", help="make the venvs that are missing")
    parser.add_argument("--url", help="a server that runs; one is started if left out")
    parser.add_argument("--venvs", type=Path, default=Path(tempfile.gettempdir()) / "clients")
    asked = parser.parse_args()
    names = asked.names or list(CLIENTS)
    if wrong := set(names) - set(CLIENTS):
        parser.error(f"{sorted(wrong)} are no clients; known: {', '.join(CLIENTS)}")
    venvs = {name: asked.venvs / (CLIENTS[name].venv or name) for name in names}
    for name, venv in venvs.items():
        if asked.install and not (venv / "bin" / "python").exists():
            install(CLIENTS[CLIENTS[name].venv or name], venv)
    pythons = {name: venv / "bin" / "python" for name, venv in venvs.items()}
    if asked.url:
        outcomes = [run(name, python, asked.url) for name, python in pythons.items()]
    else:
        with tempfile.TemporaryDirectory() as folder, server(Path(folder) / "log") as url:
            outcomes = [run(name, python, url) for name, python in pythons.items()]
    show(outcomes)
    if not any(one.seconds for one in outcomes):
        return 2
    return int(any(one.status == "failed" for one in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
