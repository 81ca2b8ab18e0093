"""Rank 0's executor: a launcher starts the other ranks, this watches and ends them. Rank 0 computes
too.

A rank that exits, reports a failure, or sends no heartbeat for `watchdog_seconds` ends the group:
children are killed and connections closed, upon which every other rank ends itself, so that no
collective waits for the failed one; every later call raises EngineError with its name.

Ranks stay in step because all launch the same steps. An error in rank 0 alone, including Ctrl-C,
has three cases. Before any byte of a step is sent, no other rank is affected. From then until rank
0 has launched the step, others may be in a collective that rank 0 never enters, or have half a
frame: the group ends; Ctrl-C is deferred until the step is launched. After that the step runs on
every rank even if its tokens are not wanted: results carry the step's number, and older ones are
discarded.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from types import FrameType
from typing import NoReturn, cast

import numpy as np
import torch.distributed as dist

from rorqual.config.model import collectives_on, nccl_without_clusters
from rorqual.engine.balance.initial import initial_maps
from rorqual.engine.balance.policy import BalanceStats, LoadWindow, RebalancePolicy
from rorqual.engine.config import EngineConfig
from rorqual.engine.distributed.channel import FrameKind
from rorqual.engine.distributed.codec import decode_result, encode_output, number_of, numbered
from rorqual.engine.distributed.expert_balancer import ExpertBalancer
from rorqual.engine.distributed.expert_load import Counts, ExpertLoad
from rorqual.engine.distributed.launchers import make_launcher
from rorqual.engine.distributed.rendezvous import START_SECONDS
from rorqual.engine.distributed.tracing import GroupTrace
from rorqual.engine.distributed.worker_handle import ConnectedWorker, WorkerHandle
from rorqual.engine.distributed.worker_process import ALIVE_SECONDS, rank_device, send_heartbeats
from rorqual.engine.execution.grammar import Grammars, SharedGrammars
from rorqual.engine.execution.grammar_matcher import GrammarSender
from rorqual.engine.execution.worker import Worker, read_model
from rorqual.engine.executor import LaunchedStep
from rorqual.engine.rank_service import RankService, ServiceContext, make_service
from rorqual.engine.scheduling.dp_scheduler import DataParallelOutput
from rorqual.engine.scheduling.scheduler_output import StepResult
from rorqual.engine.step_trace import TraceFile
from rorqual.errors import ConfigError, EngineError
from rorqual.parallel.eplb.placement import Ints
from rorqual.parallel.mesh import Mesh
from rorqual.platforms import make_platform

log = logging.getLogger("rorqual.engine")

CLOSE_SECONDS = 5.0
FIRST_FAILURE_SECONDS = 1.0
SUSPECT_SECONDS = 3.5 * ALIVE_SECONDS  # of silence, when another rank's collective has failed
# until SIGALRM ends a process whose groups were aborted, after its exit handlers
EXIT_SECONDS = 20
# a collective fails at once when a peer dies; which peer it was is known a little later
FIND_FAILURE_SECONDS = 3.0


class DistributedExecutor:
    """Rank 0's side. `doing`: the current activity, for error messages."""

    balancer: ExpertBalancer | None = None

    def __init__(self, config: EngineConfig):
        self.config = config
        self.sizes = config.parallel
        # an invalid layout is rejected before any process starts
        read_model(config)
        if dist.is_initialized():
            raise ConfigError(
                "this process is in a process group already, as that of another LLM with ranks: "
                "end it first, or use another process"
            )
        self.pid = os.getpid()
        self.failed: str | None = None
        self.mesh: Mesh | None = None
        self.closed = False
        self.launched = 0  # the number of the newest step
        self.in_collective = False  # inside a collective operation, or interrupted in one
        self.doing = "starting"
        self._grammars: SharedGrammars | None = None
        self.service: RankService | None = None
        self.sender = GrammarSender(lambda data: self._send(FrameKind.GRAMMAR, data))
        self.handles: list[WorkerHandle] = []
        self.stopped = threading.Event()
        self.launcher = make_launcher(config)
        # first of all: an interrupt may come between any two lines
        atexit.register(self.close)
        try:
            self._start_ranks()
        except BaseException:
            self.close()
            raise
        self._start()

    def _start_ranks(self) -> None:
        for number, worker in enumerate(self.launcher.start(), 1):
            self.handles.append(self._handle_of(number, worker))
        threading.Thread(
            target=send_heartbeats,
            args=([handle.channel for handle in self.handles], self.stopped),
            daemon=True,
        ).start()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def dp(self) -> int:
        return self.sizes.dp

    @property
    def grammars(self) -> Grammars | None:
        return self._grammars

    @grammars.setter
    def grammars(self, grammars: Grammars | None) -> None:
        """Must be SharedGrammars: other ranks receive the grammars that rank 0 compiled."""
        self._grammars = cast("SharedGrammars | None", grammars)
        self.worker.runner.rows.grammars = grammars

    def _handle_of(self, number: int, worker: ConnectedWorker) -> WorkerHandle:
        stage, place = divmod(number, self.sizes.stage)
        dp, tp = divmod(place, self.sizes.tp)
        handle = WorkerHandle(number, f"rank {number} (pp {stage}, dp {dp}, tp {tp})", worker)
        threading.Thread(target=handle.listen, daemon=True).start()
        return handle

    def _start(self) -> None:
        """Send every rank its configuration and make rank 0's share; returns when all can
        compute."""
        try:
            self._load()
        except (RuntimeError, OSError) as error:
            try:
                self._fail(error)
            finally:
                self.close()
        except BaseException:
            self.close()
            raise
        self.leaders = [self._leader(dp) for dp in range(self.sizes.dp)]
        experts = self.worker.model_config.moe.num_experts
        self.load = ExpertLoad(self.handles, self.sizes.stage, experts)
        self.trace = GroupTrace(self.handles, lambda data: self._send(FrameKind.TRACE, data))
        self.balancer = self._balancer()

    def _balancer(self) -> ExpertBalancer | None:
        config = self.config
        mover = self.worker.mover
        layers = self.worker.expert_layers
        if mover is None or not layers:
            return None
        maps = initial_maps(config, self.worker.model_config)
        policy = RebalancePolicy(
            np.array([maps[layer] for layer in layers]),
            layers,
            self.sizes.ep,
            config.eplb_threshold,
            LoadWindow(config.eplb_window, config.eplb_decay),
            mover.most,
        )
        return ExpertBalancer(policy, self.load, self.handles, mover)

    @property
    def balance(self) -> BalanceStats | None:
        return None if self.balancer is None else self.balancer.stats

    @property
    def placement(self) -> Ints | None:
        return None if self.balancer is None else self.balancer.policy.placement

    def _load(self) -> None:
        launcher = self.launcher
        config = self.config
        self.doing = "loading"
        collectives_on(launcher.interface)
        for handle in self.handles:
            handle.send_config({"config": asdict(config), "meeting": asdict(launcher.rendezvous)})
        platform = make_platform(rank_device(config, launcher.device_index()))
        if self.sizes.micro_batches != 1:
            nccl_without_clusters()
        groups = launcher.rendezvous.join(
            platform, 0, self.sizes.world, config.watchdog_seconds, self._check
        )
        self.mesh = Mesh.of(self.sizes, groups=groups)
        self.worker = Worker(config, platform, self.mesh)
        self.doing = "waiting for all ranks to load"
        while not all(handle.ready.wait(0.1) for handle in self.handles):
            self._check()
        for handle in self.handles:
            handle.channel.send(FrameKind.READY)

    def _leader(self, dp: int) -> WorkerHandle | None:
        """The rank that sends a data-parallel rank's results; None is rank 0 itself."""
        number = (self.sizes.pp - 1) * self.sizes.stage + dp * self.sizes.tp
        return self.handles[number - 1] if number else None

    # ---- steps

    def launch(self, output: DataParallelOutput) -> LaunchedStep:
        """Start a step on every rank; all receive the same output."""
        self._check()
        if self.balancer is not None:
            output = replace(output, switch=self.balancer.ready())
        data = encode_output(output)
        metadata = output.metadata()
        with uninterrupted(), self._collective(f"launching step {self.launched + 1}"):
            self.launched += 1
            if self._grammars is not None:
                self.sender.send_missing(self._grammars, output.structures)
            self._send(FrameKind.STEP, numbered(self.launched, data))
            pending = self.worker.runner.launch(output.parts[0], metadata)
            if self.balancer is not None:
                self.balancer.after_step(
                    output.switch, lambda move: self._send(FrameKind.MOVE, move), self._ask_for_load
                )
            return LaunchedStep(self.launched, pending)

    def _ask_for_load(self, step: int) -> None:
        self.load.ask(lambda data: self._send(FrameKind.LOAD, data), self.worker.fetch_load(), step)

    @contextmanager
    def _collective(self, doing: str) -> Iterator[None]:
        """Wraps what all ranks must do or none. Any exception inside ends the group: at once or, if
        that is interrupted too, with the next call."""
        self.doing = doing
        self.in_collective = True
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._fail(error)
        except BaseException as error:
            self._abort(self._interrupted_reason(error))
            if isinstance(error, Exception):
                raise EngineError(self.failed) from error
            raise
        self.in_collective = False

    def _interrupted_reason(self, error: BaseException | None = None) -> str:
        found = [type(error).__name__, *str(error).split()] if error else ["interrupted"]
        reason = f"rank 0 failed while {self.doing}: {' '.join(found)}"
        return f"{reason}; the other ranks may have gone on without it and were ended"

    def _send(self, kind: FrameKind, data: bytes) -> None:
        for handle in self.handles:
            handle.channel.send(kind, data)

    def collect(self, step: LaunchedStep) -> list[StepResult]:
        """Results of every data-parallel rank. Raises ExpertsMissing for a step that all ranks give
        up."""
        self._check()
        self.doing = f"waiting for step {step.number} on its own device"
        try:
            own = self.worker.runner.collect(step.pending)
        except RuntimeError as error:
            self._fail(error)
        # collectives aborted after a rank's failure leave meaningless tokens
        self._check()
        return [self._result(leader, step.number) if leader else own for leader in self.leaders]

    def _result(self, handle: WorkerHandle, wanted: int) -> StepResult:
        """The result of step `wanted`; results of earlier steps are discarded."""
        self.doing = f"waiting for the results of step {wanted} from {handle.name}"
        while True:
            try:
                number, data = number_of(handle.results.get(timeout=0.2))
            except queue.Empty:
                self._check()
                continue
            if number == wanted:
                return decode_result(data)
            assert number < wanted, f"{handle.name} has passed over step {wanted}"

    def expert_load(self) -> Counts:
        """Of all ranks' tokens, as of the last request that all ranks answered; requests the next
        counts."""
        self._check()
        self.load.read()
        if self.load.own is None:
            with uninterrupted(), self._collective("asking for the load of experts"):
                self._ask_for_load(self.launched)
        return self.load.newest

    # ---- traces

    def start_trace(self, prefix: str, steps: int) -> None:
        self._check()
        with uninterrupted(), self._collective("starting a trace"):
            self.trace.start(self.worker, prefix, steps)

    def stop_trace(self) -> None:
        self._check()
        with uninterrupted(), self._collective("ending a trace"):
            self.trace.stop()

    def traced(self) -> list[TraceFile] | None:
        self._check()
        return self.trace.results()

    # ---- services

    def start_service(
        self, name: str, config: bytes, on_message: Callable[[int, bytes], None]
    ) -> RankService:
        self._check()
        # rank 0 first: a failure to construct it does not reach the others
        service = make_service(
            name, ServiceContext(self.worker, None, partial(on_message, 0)), config
        )
        self.service = service
        for handle in self.handles:
            handle.on_message = partial(on_message, handle.number)
        with uninterrupted(), self._collective(f"starting {name}"):
            self._send(FrameKind.SERVICE_START, name.encode() + b"\n" + config)
        return service

    def send_to_service(self, message: bytes) -> None:
        self._check()
        assert self.service is not None
        with uninterrupted(), self._collective("telling all ranks what lies beside the steps"):
            self._send(FrameKind.SERVICE, message)
            done = self.service.handle(message)
            if done is not None:
                done()  # rank 0's device has finished every step whose result it has

    # ---- failures

    def check(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.in_collective and not self.failed:
            self._abort(self._interrupted_reason())
        if self.failed:
            raise EngineError(self.failed)

    def _fail(self, error: Exception) -> NoReturn:
        """A call failed: raise EngineError that names the failed rank, if that becomes known, and
        the current activity."""
        deadline = time.monotonic() + FIND_FAILURE_SECONDS
        while not self.failed and time.monotonic() < deadline:
            time.sleep(0.05)
        reason = " ".join(str(error).split())
        self._abort(
            f"{self.failed}: {reason}"
            if self.failed
            else f"rank 0 failed while {self.doing}: {reason}"
        )
        raise EngineError(self.failed) from error

    def _watch(self) -> None:
        while not self.closed and not self.failed:
            failure = self._find_failure()
            if failure and not self.closed and not self.failed:
                self._abort(f"{failure}; rank 0 was {self.doing}")
                # log it now: rank 0 itself may be stuck in a collective for a while
                log.error("%s", self.failed)
                return
            time.sleep(0.1)

    def _find_failure(self) -> str | None:
        """Which rank failed first. A rank that reported a failure may only have waited for one that
        died or hangs, so allow a moment to detect that one, and name it first."""
        dead = first_error(
            handle.liveness_error(self._max_silence(handle)) for handle in self.handles
        )
        failed = first_error(handle.reported_failure() for handle in self.handles)
        deadline = time.monotonic() + FIRST_FAILURE_SECONDS
        while failed and not dead and time.monotonic() < deadline and not self.closed:
            time.sleep(0.05)
            dead = first_error(
                handle.liveness_error(SUSPECT_SECONDS)
                for handle in self.handles
                if handle.ready.is_set()
            )
        return f"{dead}; {failed}" if dead and failed else dead or failed

    def _max_silence(self, handle: WorkerHandle) -> float:
        return self.config.watchdog_seconds if handle.ready.is_set() else START_SECONDS

    def _abort(self, failure: str) -> None:
        """Set `failed` before aborting collectives, so that no caller takes what they return for a
        result."""
        self.failed = failure
        for handle in self.handles:
            handle.kill()
        if self.mesh is not None:
            self.mesh.abort()

    def close(self) -> None:
        """Ask the ranks to stop, and kill those that do not."""
        if self.closed or os.getpid() != self.pid:  # the ranks belong to the process before a fork
            return
        self.closed = True
        self.stopped.set()
        atexit.unregister(self.close)
        if self.service is not None:
            self.service.close()
        for handle in self.handles:
            try:
                handle.channel.send(FrameKind.STOP)
            except OSError:
                handle.kill()
        deadline = time.monotonic() + CLOSE_SECONDS
        for handle in self.handles:
            exit_error = handle.wait_stopped(deadline)
            # not after a failure, which was reported and killed the ranks
            if exit_error and handle.ready.is_set() and not self.failed:
                log.warning("%s", exit_error)
        if self.mesh is not None:
            self.mesh.release_kernels()
        if hasattr(self, "trace"):
            self.trace.drop()
        if self.balancer is not None:
            self.balancer.mover.close()
        if hasattr(self, "worker"):
            # NCCL cannot destroy a group while a captured graph holds its calls
            self.worker.runner.drop_captured()
            self.worker.close()
        if self.mesh is not None and not self.mesh.wait_aborted(CLOSE_SECONDS):
            log.warning("a process group has not ended within %.0f s", CLOSE_SECONDS)
        if dist.is_initialized():
            if self.failed and dist.get_backend() == "nccl":
                skip_group_teardown()
            else:
                dist.destroy_process_group()
        self.launcher.close()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block; a second one interrupts at once. Only on the main
    thread and under Python's own handler, where it raises KeyboardInterrupt."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            signal.default_int_handler(number, frame)
        held.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if held:
        raise KeyboardInterrupt


def skip_group_teardown() -> None:
    """Keep aborted process groups from being destroyed at interpreter exit, where they could wait
    forever for dead ranks: leak a reference to each, and exit without the libraries' clean-up."""
    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    libc = ctypes.CDLL(None)
    # glibc: called with the exit status, after Python's handlers and before the libraries'
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)
    # in case something else hangs: an unhandled signal ends the process
    atexit.register(signal.alarm, EXIT_SECONDS)


def first_error(found: Iterable[str | None]) -> str | None:
    return next((text for text in found if text), None)
