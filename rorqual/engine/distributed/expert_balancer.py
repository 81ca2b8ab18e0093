"""Experts that follow the load, as rank 0 sees it: it counts, plans, has experts brought, and lets
all ranks switch before the same step.

Nothing here holds up a step. Counts are asked for between two steps and come when all ranks have
told them (expert_load.py); a plan is made on a thread; ranks bring experts on threads of their own
and say when they are through; and the next step after the last of them carries the number of the
move, at which every rank puts it in force. A move that some rank gives up is never put in force on
any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from rorqual.engine.balance.mover import ExpertMover
from rorqual.engine.balance.moves import Answer, Move, changed_slots
from rorqual.engine.balance.policy import BalanceStats, Plan, RebalancePolicy
from rorqual.engine.distributed.expert_load import ExpertLoad
from rorqual.engine.distributed.worker_handle import WorkerHandle

log = logging.getLogger("rorqual.engine")
SMOOTHING = 0.05  # of the time a step takes


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
        self.seen = 0  # the step of the newest counts that were looked at
        self.asked = 0  # the step before which counts were asked for last
        self.off = ""  # why experts are moved no more
        self.pending: deque[Move] = deque()
        self.moving: Move | None = None
        self.own: Answer | None = None
        self.planning: threading.Thread | None = None
        self.plan: Plan | None = None

    @property
    def stats(self) -> BalanceStats:
        return self.policy.stats

    def ready(self) -> int:
        """The number of the move that the next step should put in force on all ranks; 0 for
        none. Nothing changes by asking."""
        answers = self._answers()
        able = len(answers) == 1 + len(self.workers) and not any(found.error for found in answers)
        return self.moving.number if able and self.moving is not None else 0

    def _answers(self) -> list[Answer]:
        """To the move under way, of those ranks that have answered."""
        if self.moving is None:
            return []
        told = [Answer.decode(data) for worker in self.workers if (data := worker.moved)]
        found = [self.own, *told]
        number = self.moving.number
        return [answer for answer in found if answer is not None and answer.number == number]

    def after_step(
        self, switched: int, send: Callable[[bytes], None], ask: Callable[[int], None]
    ) -> None:
        """A step has been launched on all ranks, with move `switched` before it: begin what comes
        next, if anything does."""
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
        """What is in force on all ranks from this step on."""
        move = self.moving
        answers = self._answers()
        assert move is not None
        self.moving = None
        ranks = self.policy.ranks
        slots = sum(
            sum(changed_slots(self.policy.placement[row].tolist(), new, ranks))
            for row, new in move.layers
        )
        slowest = max(answers, key=lambda found: found.seconds)
        self.policy.applied(move, slots, slowest.slots, slowest.seconds)
        if not self.pending:
            self.stats.rebalances += 1

    def _check(self) -> None:
        """Of a move under way: that no rank has given it up."""
        failed = next((found for found in self._answers() if found.error), None)
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
        told = self.policy.numbered(move)
        send(told.encode())
        self.mover.begin(told, self._take)

    def _take(self, answer: Answer) -> None:
        self.own = answer

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
