"""The ranks of one host: started, watched and ended by rank 0, which computes along.

A rank that exits, reports a failure, or gives no sign of life for `watchdog_seconds` ends the group: its processes are killed, so that no
collective waits for it, and every later call raises EngineError with its name.
"""

from __future__ import annotations

import atexit
import json
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rorqual.config import child_environment, collectives_on_loopback
from rorqual.engine.config import EngineConfig
from rorqual.engine.grammar import SharedGrammars
from rorqual.engine.group import GroupPlan
from rorqual.engine.link import Kind, Link
from rorqual.engine.plan import StepResult
from rorqual.engine.rank import Rank, read_model
from rorqual.engine.wire import decode_result, encode_plan
from rorqual.engine.worker import START_SECONDS, meet, rank_device
from rorqual.engine.xmatcher import GrammarSender
from rorqual.errors import EngineError
from rorqual.parallel.mesh import Mesh
from rorqual.platforms import make_platform

CLOSE_SECONDS = 5.0
VERDICT_SECONDS = 3.0  # a collective fails at once when a peer dies; whose death it was is known a little later


class Member:
    """One other rank: its process, its link, and what it sent."""

    def __init__(self, number: int, name: str):
        self.number, self.name = number, name
        mine, theirs = socket.socketpair()
        command = [sys.executable, "-m", "rorqual.engine.worker", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=child_environment())
        theirs.close()
        self.link = Link(mine)
        self.results: queue.Queue[bytes] = queue.Queue()
        self.ready = threading.Event()
        self.heard = time.monotonic()
        self.failure: str | None = None

    def listen(self) -> None:
        """Until the link ends."""
        while (frame := self.link.receive()) is not None:
            self.heard = time.monotonic()
            kind, data = frame
            if kind is Kind.READY:
                self.ready.set()
            elif kind is Kind.RESULT:
                self.results.put(data)
            elif kind is Kind.FAILED:
                self.failure = data.decode()


class RankGroup:
    """Rank 0's side of all ranks."""

    def __init__(self, config: EngineConfig):
        self.config, self.sizes = config, config.parallel
        read_model(config)  # a layout the model cannot have is refused before any process is started
        self.folder = Path(tempfile.mkdtemp(prefix="rorqual-ranks-"))
        self.failed: str | None = None
        self.closed = False
        self.grammars: SharedGrammars | None = None
        self.sender = GrammarSender(lambda data: self._send(Kind.GRAMMAR, data))
        self.members = [Member(number, self._name(number)) for number in range(1, self.sizes.world)]
        for member in self.members:
            threading.Thread(target=member.listen, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()
        atexit.register(self.close)

    def _name(self, number: int) -> str:
        stage, place = divmod(number, self.sizes.stage)
        dp, tp = divmod(place, self.sizes.tp)
        return f"rank {number} (pp {stage}, dp {dp}, tp {tp})"

    def start(self) -> Rank:
        """Send every rank its configuration and make rank 0's share; returns when all can compute."""
        store = str(self.folder / "store")
        settings = asdict(self.config)
        collectives_on_loopback()
        for member in self.members:
            member.link.send(Kind.HELLO, json.dumps({"config": settings, "rank": member.number, "store": store}).encode())
        try:
            platform = make_platform(rank_device(self.config, 0))
            groups = meet(platform, store, 0, self.sizes.world, self.config.watchdog_seconds)
            self.rank = Rank(self.config, platform, Mesh.of(self.sizes, groups=groups))
            while not all(member.ready.wait(0.1) for member in self.members):
                self._check()
        except RuntimeError as error:
            try:
                self._fail(error)
            finally:
                self.close()
        except BaseException:
            self.close()
            raise
        self.leaders = [self._leader(dp) for dp in range(self.sizes.dp)]
        return self.rank

    def _leader(self, dp: int) -> Member | None:
        """Whose results are those of a data-parallel rank; None is rank 0 itself."""
        number = (self.sizes.pp - 1) * self.sizes.stage + dp * self.sizes.tp
        return self.members[number - 1] if number else None

    # ---- steps

    def launch(self, plan: GroupPlan) -> Any:
        self._check()
        try:
            if self.grammars is not None:
                self.sender.send_missing(self.grammars, plan.structures)
            self._send(Kind.PLAN, encode_plan(plan))
            return self.rank.runner.launch(plan.parts[0], plan.common())
        except (RuntimeError, OSError) as error:
            self._fail(error)

    def _send(self, kind: Kind, data: bytes) -> None:
        for member in self.members:
            member.link.send(kind, data)

    def collect(self, pending: Any) -> list[StepResult]:
        """Results of every data-parallel rank."""
        try:
            own = self.rank.runner.collect(pending)
        except RuntimeError as error:
            self._fail(error)
        return [own if leader is None else decode_result(self._next(leader)) for leader in self.leaders]

    def _next(self, member: Member) -> bytes:
        while True:
            try:
                return member.results.get(timeout=0.2)
            except queue.Empty:
                self._check()

    # ---- life and death

    def _check(self) -> None:
        if self.failed:
            raise EngineError(self.failed)

    def _fail(self, error: Exception) -> Any:
        """A call failed: say which rank is to blame, if that becomes known, and what was being waited for."""
        deadline = time.monotonic() + VERDICT_SECONDS
        while not self.failed and time.monotonic() < deadline:
            time.sleep(0.05)
        reason = " ".join(str(error).split())
        self._end(f"{self.failed}; rank 0 was in: {reason}" if self.failed else f"rank 0 failed: {reason}")
        raise EngineError(self.failed) from error

    def _watch(self) -> None:
        while not self.closed and not self.failed:
            for member in self.members:
                verdict = self._verdict(member)
                if verdict and not self.closed:
                    self._end(verdict)
                    return
            time.sleep(0.1)

    def _verdict(self, member: Member) -> str | None:
        if member.failure:
            return f"{member.name} failed: {member.failure}"
        status = member.process.poll()
        if status is not None:
            return f"{member.name} ended with status {status}"
        silent = time.monotonic() - member.heard
        if silent > (self.config.watchdog_seconds if member.ready.is_set() else START_SECONDS):
            return f"{member.name} has given no sign of life for {silent:.0f} s"
        return None

    def _end(self, verdict: str) -> None:
        self.failed = verdict
        for member in self.members:
            member.process.kill()

    def close(self) -> None:
        """Ask the ranks to stop, and end those that do not."""
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self.close)
        for member in self.members:
            try:
                member.link.send(Kind.STOP)
            except OSError:
                member.process.kill()
        deadline = time.monotonic() + CLOSE_SECONDS
        for member in self.members:
            try:
                member.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
            member.link.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        shutil.rmtree(self.folder, ignore_errors=True)
