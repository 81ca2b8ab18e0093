"""Expert servers as processes of their own, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.child_process import stand_still
from tests.engine.distributed.starting import environment, free_port
from tests.forked import Started, start

READY_SECONDS = 60
LOG_BYTES = 4000


class ExpertProcess:
    """`rorqual experts` for the bundled model, at a port of its own for life. fork: as
    `tests.forked.start` has it."""

    def __init__(
        self,
        slots: str,
        secret_file: str,
        more: tuple[str, ...] = (),
        module: str = "rorqual",
        fork: bool = True,
    ):
        self.module = module
        self.fork = fork
        self.port = free_port()
        self.arguments = ["--slots", slots, "--expert-secret-file", secret_file, *more]
        self.process: Started | None = None
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
        self.start()

    def start(self) -> None:
        words = ["experts", *self.arguments, "--listen", f"127.0.0.1:{self.port}"]
        words += ["--set", "dtype=float32", "--threads", "1"]
        self.process = start(self.module, words, environment(), self.log.fileno(), self.fork)

    def wait(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == f"experts at 127.0.0.1:{self.port}\n", line + self.log_end()

    def log_end(self) -> str:
        """The end of what it wrote to stderr."""
        size = os.fstat(self.log.fileno()).st_size
        start = max(0, size - LOG_BYTES)
        return os.pread(self.log.fileno(), LOG_BYTES, start).decode(errors="replace")

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        assert self.process is not None
        if self.process.returncode is not None:
            return
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """As it is told to, by SIGTERM."""
        assert self.process is not None
        self.process.terminate()
        self.process.wait(30)

    def restart(self) -> None:
        self.kill()
        self.start()
        self.wait()

    def pause(self, seconds: float) -> None:
        assert self.process is not None
        stand_still(self.process.pid)
        time.sleep(seconds)
        self.signal(signal.SIGCONT)


def write_secret(folder: Path) -> str:
    path = folder / "secret"
    path.write_text("a secret that is long enough\n")
    return str(path)


@contextlib.contextmanager
def serving(*servers: ExpertProcess) -> Iterator[list[ExpertProcess]]:
    """All of them ready; stopped ones end as well."""
    try:
        for server in servers:
            server.wait()
        yield list(servers)
    finally:
        for server in servers:
            if server.process is not None and server.process.returncode is None:
                server.signal(signal.SIGCONT)
            server.kill()
