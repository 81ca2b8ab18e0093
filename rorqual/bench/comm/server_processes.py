"""Expert servers of a benchmark, each in a process of this host."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from rorqual.disagg.experts.server import ExpertServer


def read_settings() -> dict[str, Any]:
    """In a server process: its settings. It computes with one thread."""
    torch.set_num_threads(1)
    settings: dict[str, Any] = json.loads(sys.stdin.readline())
    return settings


def serve(shard: Any, settings: Mapping[str, Any], fingerprint: dict[str, str]) -> None:
    """In a server process: print the port, then serve until stdin closes. settings: with secret
    and max_rows."""
    secret = settings["secret"].encode()
    server = ExpertServer(shard, ("127.0.0.1", 0), secret, fingerprint, settings["max_rows"])
    print(server.port, flush=True)
    sys.stdin.read()
    server.close()


@contextmanager
def server_processes(module: str, settings: Sequence[Mapping[str, Any]]) -> Iterator[list[int]]:
    """Starts server processes and yields their ports. Each runs `module`, which reads one of
    `settings` as a line of JSON, prints its port and serves until its stdin closes. Raises
    RuntimeError if one exits instead."""
    processes = []
    try:
        for one in settings:
            process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(one) + "\n")
            process.stdin.flush()
        ports = []
        for process in processes:
            assert process.stdout is not None
            port = process.stdout.readline()
            if not port:
                raise RuntimeError(f"an expert server ended at its start, with {process.wait()}")
            ports.append(int(port))
        yield ports
    finally:
        for process in processes:
            process.kill()
            process.communicate()
