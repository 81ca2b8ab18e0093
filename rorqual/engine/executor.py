"""Executor: launches an engine's steps on all of its ranks and collects their results.

The engine uses only this protocol. `LocalExecutor` is one process with one rank,
`DistributedExecutor` (distributed/executor.py) is rank 0, which starts and drives the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from rorqual.engine.balance.policy import BalanceStats
from rorqual.engine.config import EngineConfig
from rorqual.engine.distributed.expert_load import Counts
from rorqual.engine.distributed.launchers import check_alone
from rorqual.engine.distributed.worker_process import rank_device
from rorqual.engine.execution.grammar import Grammars
from rorqual.engine.execution.sampler import PendingStep
from rorqual.engine.execution.worker import Worker
from rorqual.engine.rank_service import RankService, ServiceContext, make_service
from rorqual.engine.scheduling.dp_scheduler import DataParallelOutput
from rorqual.engine.scheduling.scheduler_output import StepResult
from rorqual.engine.step_trace import StepTrace, TraceFile, trace_path
from rorqual.parallel.eplb.placement import Ints
from rorqual.parallel.mesh import Mesh
from rorqual.platforms import make_platform


@dataclass(frozen=True)
class LaunchedStep:
    """number: of the step, from 1. pending: this process's own part of the step, to be
    collected."""

    number: int
    pending: PendingStep


class Executor(Protocol):
    """worker: this process's own rank. grammars: makes matchers for structured output, None without
    a tokenizer."""

    worker: Worker
    grammars: Grammars | None

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks that are scheduled: the parts of a step."""

    def launch(self, output: DataParallelOutput) -> LaunchedStep:
        """Start a step on every rank, without waiting for a device. Raises EngineError when a
        rank has died or hangs."""

    def collect(self, step: LaunchedStep) -> list[StepResult]:
        """Wait for a step, oldest first; returns the result of every data-parallel rank. Steps may
        be skipped: later ones can still be collected. Raises EngineError when a rank has died or
        hangs."""

    @property
    def balance(self) -> BalanceStats | None:
        """Statistics of expert load balancing between ranks; None where it is off."""

    @property
    def placement(self) -> Ints | None:
        """The present expert placement, [layers, slots]; None where load balancing is off."""

    def expert_load(self) -> Counts:
        """How often each expert was chosen, by MoE layer, for the tokens of all ranks. With several
        ranks the counts are gathered between steps, and no step waits for them: a call returns what
        all ranks reported for an earlier call, at first nothing."""

    def start_trace(self, prefix: str, steps: int) -> None:
        """Record the next steps on every rank, each into its own file. One trace at a time."""

    def stop_trace(self) -> None:
        """Stop recording, if a trace is being recorded."""

    def traced(self) -> list[TraceFile] | None:
        """The files of all ranks, returned once, when they are written; else None."""

    def check(self) -> None:
        """Raises EngineError when a rank has died or hangs."""

    def start_service(
        self, name: str, config: bytes, on_message: Callable[[int, bytes], None]
    ) -> RankService:
        """Make a service (rank_service.py) on every rank, once; returns this rank's. A message from
        rank i calls on_message(i, message), on any thread."""

    def send_to_service(self, message: bytes) -> None:
        """Broadcast a message to the service on all ranks, which handle it before any step launched
        later."""

    def close(self) -> None:
        """End the other ranks, if any. The executor cannot be used afterwards."""


class LocalExecutor:
    """One rank in this process: the only one, or with single_rank_bench the one of many that is
    timed. The latter computes as if every data-parallel rank had the same requests."""

    def __init__(self, config: EngineConfig):
        check_alone(config)
        mesh = Mesh.fake(config.parallel) if config.single_rank_bench else Mesh.single()
        platform = make_platform(rank_device(config, config.first_device))
        self.worker = Worker(config, platform, mesh)
        self.copies = config.parallel.dp
        self.launched = 0
        self.trace: StepTrace | None = None
        self.service: RankService | None = None

    @property
    def dp(self) -> int:
        return 1

    @property
    def grammars(self) -> Grammars | None:
        return self.worker.runner.rows.grammars

    @grammars.setter
    def grammars(self, grammars: Grammars | None) -> None:
        self.worker.runner.rows.grammars = grammars

    def launch(self, output: DataParallelOutput) -> LaunchedStep:
        (part,) = output.parts
        metadata = replace(output, parts=[part] * self.copies).metadata()
        self.launched += 1
        return LaunchedStep(self.launched, self.worker.runner.launch(part, metadata))

    def collect(self, step: LaunchedStep) -> list[StepResult]:
        return [self.worker.runner.collect(step.pending)]

    @property
    def balance(self) -> BalanceStats | None:
        return None

    @property
    def placement(self) -> Ints | None:
        return None

    def expert_load(self) -> Counts:
        found: Counts = self.worker.fetch_load()().tolist()
        return found

    def start_trace(self, prefix: str, steps: int) -> None:
        self.trace = StepTrace(self.worker, trace_path(prefix, 0, 1), steps)

    def stop_trace(self) -> None:
        if self.trace is not None:
            self.trace.end()

    def traced(self) -> list[TraceFile] | None:
        if self.trace is None or self.trace.result is None:
            return None
        found = [self.trace.result]
        self.trace = None
        return found

    def check(self) -> None:
        """There are no other ranks."""

    def start_service(
        self, name: str, config: bytes, on_message: Callable[[int, bytes], None]
    ) -> RankService:
        self.service = make_service(
            name, ServiceContext(self.worker, None, partial(on_message, 0)), config
        )
        return self.service

    def send_to_service(self, message: bytes) -> None:
        assert self.service is not None
        done = self.service.handle(message)
        if done is not None:
            done()

    def close(self) -> None:
        """There are no other ranks to end."""
        if self.service is not None:
            self.service.close()
        self.worker.close()
        if self.trace is not None:
            self.trace.drop()
