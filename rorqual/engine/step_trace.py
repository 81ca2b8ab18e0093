"""A trace of a rank's next steps in Perfetto's format: host calls, device kernels, and a named span
around each step.

Steps cost nothing more while no trace runs: a trace replaces the runner's `launch` and `collect`
and restores them afterwards. Recording ends after the last step, once the device has computed it; a
thread writes the file while further steps run, and it appears when it is complete.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rorqual.engine.execution.sampler import PendingStep
from rorqual.engine.execution.worker import Worker
from rorqual.engine.scheduling.scheduler_output import SchedulerOutput, StepMetadata, StepResult

log = logging.getLogger("rorqual.engine")

MAX_STEPS = 200
SUFFIX = ".json.gz"
GZIP_LEVEL = 3
BLOCK = 1 << 20
LEAVE_SECONDS = 2.0  # for a file being written when its process ends


@dataclass(frozen=True)
class TraceFile:
    """error: why the file was not written; empty where it was."""

    path: str
    error: str = ""


def trace_path(prefix: str, rank: int, world: int) -> Path:
    """Every rank's own file."""
    return Path(f"{prefix}{SUFFIX}" if world == 1 else f"{prefix}-rank{rank}{SUFFIX}")


def step_name(number: int, part: SchedulerOutput, metadata: StepMetadata) -> str:
    """The name of a step's span on this rank."""
    decoding = len(part.decode_slots)
    chunks = len(part.chunks)
    kind = "copies" if part.copies else "idle"
    if decoding or chunks:
        kind = "mixed" if decoding and chunks else "prefill" if chunks else "decode"
    drafts = metadata.num_speculative_tokens
    more = f", {drafts} drafts each" if drafts else ""
    if part.copies:
        out = sum(copy.to_host for copy in part.copies)
        more += f", {out} pages out, {len(part.copies) - out} in"
    rows = f"{decoding} decoding, {chunks} chunks, {part.num_tokens} tokens{more}"
    return f"step {number} {kind}: {rows}"


class StepTrace:
    """Recording starts with construction. `result` is set once the file is written or has failed;
    `done` is then called with it, on the writing thread."""

    def __init__(
        self,
        worker: Worker,
        path: Path,
        steps: int,
        done: Callable[[TraceFile], None] = lambda result: None,
    ):
        self.worker = worker
        self.path = path
        self.steps = steps
        self.done = done
        self.launched = 0
        self.result: TraceFile | None = None
        self.dropped = False
        self.writer: threading.Thread | None = None
        self.scratch: str | None = None
        self.profile: Any = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.scratch = tempfile.mkdtemp(prefix=".rorqual-trace-", dir=path.parent)
            self.profile = self._started()
        except (OSError, RuntimeError) as error:
            self._finish(f"{type(error).__name__}: {error}")
            return
        # replaces the methods, so that untraced steps need no check
        vars(worker.runner).update(launch=self._launch, collect=self._collect)

    def _started(self) -> Any:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self.worker.platform.name == "cuda":
            activities.append(ProfilerActivity.CUDA)
        made = profile(activities=activities)
        made.start()
        return made

    def _launch(self, output: SchedulerOutput, metadata: StepMetadata) -> PendingStep:
        from torch.profiler import record_function

        runner = self.worker.runner
        if self.launched == self.steps:
            self.end()
            return runner.launch(output, metadata)
        self.launched += 1
        with record_function(step_name(self.launched, output, metadata)):
            return type(runner).launch(runner, output, metadata)

    def _collect(self, pending: PendingStep) -> StepResult:
        from torch.profiler import record_function

        runner = self.worker.runner
        if self.launched == self.steps:
            self.end()
            return runner.collect(pending)
        with record_function("wait for a step's tokens"):
            return type(runner).collect(runner, pending)

    def end(self) -> None:
        """Stop recording, and write the steps recorded so far."""
        if self.profile is None:
            return
        recorded = self._stopped()
        if not self.launched:
            self._finish("no step was computed")
            return
        self.writer = threading.Thread(target=self._write, args=(recorded,), daemon=True)
        self.writer.start()

    def _stopped(self) -> Any:
        """Restores the runner's methods; returns what was recorded."""
        for name in ("launch", "collect"):
            vars(self.worker.runner).pop(name)
        recorded = self.profile
        self.profile = None
        self.worker.platform.synchronize()
        recorded.stop()
        return recorded

    def _write(self, recorded: Any) -> None:
        try:
            assert self.scratch is not None
            plain = Path(self.scratch, "trace.json")
            recorded.export_chrome_trace(str(plain))
            packed = Path(self.scratch, "trace.gz")
            with plain.open("rb") as source, gzip.open(packed, "wb", GZIP_LEVEL) as target:
                while (block := source.read(BLOCK)) and not self.dropped:
                    target.write(block)
            if not self.dropped:
                os.replace(packed, self.path)
            self._finish("the engine ended" if self.dropped else "")
        except (OSError, RuntimeError) as error:
            self._finish(f"{type(error).__name__}: {error}")

    def _finish(self, error: str) -> None:
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)
        self.result = TraceFile(str(self.path), error)
        if error:
            log.warning("no trace %s: %s", self.path, error)
        else:
            log.info("trace of %d steps: %s", self.launched, self.path)
        with suppress(OSError):  # rank 0 is gone
            self.done(self.result)

    def drop(self) -> None:
        """The engine ends: discard the recording, wait for a file being written, and leave no
        partial file."""
        if self.profile is not None:
            self._stopped()
            self._finish("the engine ended")
        if self.writer is not None:
            self.writer.join(LEAVE_SECONDS)
            self.dropped = True
            self.writer.join(LEAVE_SECONDS / 4)
            if self.scratch is not None:
                shutil.rmtree(self.scratch, ignore_errors=True)
