"""Ranks that live as long as the test session: processes joined by gloo on loopback, which run
functions of tests.parallel.jobs by name."""

from __future__ import annotations

import importlib
import os
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests import forked

RANKS = 4
SECONDS = 120  # ranks that wait in the interpreter spin, on fewer cores than ranks
JOBS = "tests.parallel.jobs"


class RankError(AssertionError):
    """A job failed on a rank, or did not end in time."""


def serve(rank: int, store: str, pipe: Connection) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=SECONDS),
    )
    jobs = importlib.import_module(JOBS)
    while (order := pipe.recv()) is not None:
        name, arguments = order
        try:
            pipe.send((True, getattr(jobs, name)(**arguments)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class RankPool:
    """`run(job, world, sizes=..., ...)` calls jobs.<job>(world=world, ...) on ranks 0 .. world -
    1; results by rank. Processes start at first use."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    def start(self) -> None:
        context = forked.context()  # torch is imported once
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, str(store), theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(mine)

    def run(self, job: str, world: int, **arguments: Any) -> list[Any]:
        if not self.processes:
            self.start()
        for rank, pipe in enumerate(self.pipes):
            pipe.send((job if rank < world else "idle", {"world": world, **arguments}))
        results: dict[int, Any] = {}
        while len(results) < RANKS:
            waiting = {self.pipes[rank]: rank for rank in range(RANKS) if rank not in results}
            ready = wait(list(waiting), timeout=SECONDS)
            for pipe in ready:
                results[waiting[pipe]] = self._answer(job, waiting[pipe])  # type: ignore[index]
            if not ready:
                self.stop()
                raise RankError(
                    f"{job}: ranks {sorted(waiting.values())} did not answer within {SECONDS} s"
                )
        return [results[rank] for rank in range(world)]

    def _answer(self, job: str, rank: int) -> Any:
        try:
            fine, result = self.pipes[rank].recv()
        except EOFError:
            fine = False
            result = "the process died"
        if not fine:
            self.stop()  # the others wait for this rank: no further job would meet all of them
            raise RankError(f"{job} on rank {rank}: {result}")
        return result

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []
        self.pipes = []
