"""Traces of an engine of several ranks: rank 0 starts them, every rank records its own steps into
its own file and reports the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rorqual.engine.distributed.worker_handle import WorkerHandle
from rorqual.engine.execution.worker import Worker
from rorqual.engine.step_trace import StepTrace, TraceFile, trace_path


class RankTrace:
    """The side of a rank other than 0. send: sends rank 0 the result."""

    def __init__(self, worker: Worker, send: Callable[[bytes], None]):
        self.worker = worker
        self.send = send
        self.trace: StepTrace | None = None

    def take(self, request: bytes) -> None:
        """Start a trace, or stop the running one."""
        wanted = json.loads(request)
        if wanted:
            path = Path(wanted["paths"][self.worker.mesh.rank])
            self.trace = StepTrace(self.worker, path, wanted["steps"], self._report)
        elif self.trace is not None:
            self.trace.end()

    def _report(self, result: TraceFile) -> None:
        self.send(json.dumps(asdict(result)).encode())

    def drop(self) -> None:
        if self.trace is not None:
            self.trace.drop()


class GroupTrace:
    """Rank 0's side. send: broadcasts to every other rank."""

    def __init__(self, members: list[WorkerHandle], send: Callable[[bytes], None]):
        self.members = members
        self.send = send
        self.own: StepTrace | None = None

    def start(self, worker: Worker, prefix: str, steps: int) -> None:
        world = len(self.members) + 1
        paths = [trace_path(prefix, rank, world) for rank in range(world)]
        for member in self.members:
            member.trace_result = None
        self.send(json.dumps({"paths": list(map(str, paths)), "steps": steps}).encode())
        self.own = StepTrace(worker, paths[0], steps)

    def stop(self) -> None:
        if self.own is not None:
            self.send(b"null")
            self.own.end()

    def results(self) -> list[TraceFile] | None:
        """Of all ranks, returned once, when all have reported; else None."""
        results = [
            member.trace_result for member in self.members if member.trace_result is not None
        ]
        if self.own is None or self.own.result is None or len(results) < len(self.members):
            return None
        found = [self.own.result, *(TraceFile(**json.loads(result)) for result in results)]
        self.own = None
        return found

    def drop(self) -> None:
        if self.own is not None:
            self.own.drop()
