"""Ranks as processes of their own, started in torchrun's way, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.child_process import python_path

ROOT = Path(__file__).resolve().parents[3]
TEXT = "The captain of the ship"
ENGINE = {
    "dtype": "float32",
    "max_model_len": 256,
    "page_size": 8,
    "threads": 1,
    "num_pages": 160,
    "max_num_seqs": 8,
}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def environment(**changes: str) -> dict[str, str]:
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC", "GLOO_SOCKET", "NCCL_SOCKET", "RORQUAL_SECRET"))
    }
    return {**own, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), **changes}


def variables(rank: int, world: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def generating(launcher: str, tokens: int = 20, **sizes: Any) -> list[str]:
    """The command line that continues TEXT greedily."""
    settings = [f"--set={name}={value}" for name, value in {**ENGINE, **sizes}.items()]
    return [
        "-m",
        "rorqual",
        "generate",
        "-q",
        "-p",
        TEXT,
        "-n",
        str(tokens),
        "--temperature",
        "0",
        "--launcher",
        launcher,
        *settings,
    ]


def start(arguments: list[str], **changes: str) -> subprocess.Popen[str]:
    command = [sys.executable, *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        command, env=environment(**changes), cwd=ROOT, start_new_session=True, **pipes
    )


def torchrun(*arguments: str, processes: int = 2) -> list[str]:
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), *arguments]


def finished(process: subprocess.Popen[str], seconds: float = 90) -> tuple[int, str, str]:
    """(status, standard output, standard error); a process that does not end in time is killed
    and fails the test."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        raise AssertionError(f"still running after {seconds} s:\n{out}\n{err}") from None
    return process.returncode, out, err


def gone(pid: int, seconds: float = 60) -> bool:
    """Whether the process ends in time; one that nobody has waited for has ended too."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def pids_below(pid: int) -> list[int]:
    """Children, their children and so on."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    below = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return below + [deeper for child in below for deeper in pids_below(child)]
