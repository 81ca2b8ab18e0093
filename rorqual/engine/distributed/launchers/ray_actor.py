"""Runs inside a Ray actor: starts one rank as a child and reports its place. No torch; weights and
steps do not pass through Ray."""

from __future__ import annotations

import socket
import subprocess
import sys

from rorqual.config.model import child_environment, shared_secret
from rorqual.errors import ConfigError


class Starter:
    """Holds the resources of one rank while it exists."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def place(self) -> tuple[str, list[int]]:
        """The host's name, and the indices of the GPUs that Ray assigned to this actor."""
        import ray

        return socket.gethostname(), [int(gpu) for gpu in ray.get_gpu_ids()]

    def start(
        self, address: str, port: int, rank: int, world: int, secret: str | None, file: str | None
    ) -> int:
        """Returns the child's process id. secret: None where every host is configured with the same
        one, in `file` or RORQUAL_SECRET. Raises ConfigError where this host is not."""
        known = secret.encode() if secret else shared_secret(file)
        if known is None:
            host = socket.gethostname()
            raise ConfigError(
                f"rank 0 was given a secret, {host} was not: set RORQUAL_SECRET before `ray "
                "start`, or secret_file"
            )
        arguments = ["--connect", address, str(port), str(rank), str(world)]
        command = [sys.executable, "-m", "rorqual.engine.distributed.worker_process", *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, env=child_environment())
        assert self.process.stdin is not None
        self.process.stdin.write(known + b"\n")
        self.process.stdin.close()
        return self.process.pid

    def status(self) -> int | None:
        """The child's exit status, None while it runs."""
        return self.process.poll() if self.process else None
