"""Expert load balancing (EPLB), rank 0's side: count, plan, have experts transferred, and let all
ranks switch before the same step.

Nothing here delays a step. Counts are requested between two steps and used once all ranks have
responded (expert_load.py); plans are made on a thread; ranks receive experts on separate threads
and report completion; the next step after the last report carries the move's number, and every rank
applies the move before that step. A move that fails on one rank is applied on none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from rorqual.engine.balance.mover import ExpertMover
from rorqual.engine.balance.moves import Move, MoveResult, changed_slots
from rorqual.engine.balance.policy import BalanceStats, Plan, RebalancePolicy
from rorqual.engine.distributed.expert_load import ExpertLoad
from rorqual.engine.distributed.worker_handle import WorkerHandle

log = logging.getLogger("rorqual.engine")
SMOOTHING = 0.05  # of the running mean of step times


class ExpertBalancer:
    def __init__(
        self,
        policy: RebalancePolicy,
        load: ExpertLoad,
        workers: list[WorkerHandle],
        mover: ExpertMover,
    ):
        self.policy = policy
        self.load = load
        self.workers = workers
        self.mover = mover
        self.steps = 0
        self.step_seconds = 0.0
        self.last = 0.0
        self.seen = 0  # the step of the newest counts processed
        self.asked = 0  # the step before which counts were last requested
        self.off = ""  # why balancing was disabled
        self.pending: deque[Move] = deque()
        self.moving: Move | None = None
        self.own: MoveResult | None = None
        self.planning: threading.Thread | None = None
        self.plan: Plan | None = None

    @property
    def stats(self) -> BalanceStats:
        return self.policy.stats

    def ready(self) -> int:
        """The number of the move that all ranks should apply before the next step; 0 for none. Has
        no side effects."""
        results = self._results()
        able = len(results) == 1 + len(self.workers) and not any(found.error for found in results)
        return self.moving.number if able and self.moving is not None else 0

    def _results(self) -> list[MoveResult]:
        """Results of the move in progress, from the ranks that have reported."""
        if self.moving is None:
            return []
        reported = [
            MoveResult.decode(data) for worker in self.workers if (data := worker.move_result)
        ]
        found = [self.own, *reported]
        number = self.moving.number
        return [result for result in found if result is not None and result.number == number]

    def after_step(
        self, switched: int, send: Callable[[bytes], None], ask: Callable[[int], None]
    ) -> None:
        """A step has been launched on all ranks, after applying move `switched` (0: none): start
        the next move, plan or request, if one is due."""
        self._count()
        if switched:
            self._applied()
        elif self.moving is not None:
            self._check()
        if self.off or self.moving is not None:
            return
        if self.pending:
            self._begin(self.pending.popleft(), send)
        elif self.planning is not None:
            self._finish_plan()
        else:
            self._watch(ask)

    def _count(self) -> None:
        now = time.perf_counter()
        if self.steps:
            share = SMOOTHING if self.step_seconds else 1.0
            self.step_seconds += share * (now - self.last - self.step_seconds)
        self.last = now
        self.steps += 1

    def _applied(self) -> None:
        """Record the move that all ranks apply from this step on."""
        move = self.moving
        results = self._results()
        assert move is not None
        self.moving = None
        ranks = self.policy.ranks
        slots = sum(
            sum(changed_slots(self.policy.placement[row].tolist(), new, ranks))
            for row, new in move.layers
        )
        slowest = max(results, key=lambda found: found.seconds)
        self.policy.applied(move, slots, slowest.slots, slowest.seconds)
        if not self.pending:
            self.stats.rebalances += 1

    def _check(self) -> None:
        """Cancel the move in progress if a rank has failed it."""
        failed = next((found for found in self._results() if found.error), None)
        if failed is None:
            return
        self.moving = None
        self.pending.clear()
        self.policy.failed(self.steps)
        if failed.broken:
            self.off = failed.error
        more = "; experts are moved no more" if self.off else ""
        log.warning("experts stay where they are: %s%s", failed.error, more)

    def _begin(self, move: Move, send: Callable[[bytes], None]) -> None:
        self.moving = move
        self.own = None
        numbered = self.policy.numbered(move)
        send(numbered.encode())
        self.mover.begin(numbered, self._on_result)

    def _on_result(self, result: MoveResult) -> None:
        self.own = result

    def _watch(self, ask: Callable[[int], None]) -> None:
        self.load.read()
        step = self.load.newest_step
        fresh = step > self.seen
        self.seen = step
        if fresh and self.policy.observe(step, self.load.newest):
            self.planning = threading.Thread(target=self._make_plan, daemon=True)
            self.planning.start()
        elif self.load.own is None and self.steps >= self.asked + self.policy.window.steps:
            self.asked = self.steps
            ask(self.steps)

    def _make_plan(self) -> None:
        self.plan = self.policy.plan()

    def _finish_plan(self) -> None:
        assert self.planning is not None
        if self.planning.is_alive():
            return
        self.planning = None
        if self.plan is None:
            self.off = "no plan could be made"
            log.warning("experts are moved no more: %s", self.off)
            return
        plan = self.plan
        self.plan = None
        self.pending.extend(self.policy.decide(plan, self.steps, self.step_seconds))
        if self.pending:
            log.info(
                "experts move: balancedness %.3f, %.3f expected, %d moves",
                plan.before,
                plan.expected,
                len(self.pending),
            )
