"""Grammar compilation: queues that are fair between clients, and the child processes that
compile."""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rorqual.config.model import one_threaded_environment
from rorqual.request import StructuredOutput


@dataclass(eq=False)
class GrammarJob:
    """One structure to compile, and its waiters: (callback for the error or None, whether it is
    still wanted). `found` keeps the result until all callbacks were called."""

    structure: StructuredOutput
    client: str = ""
    waiters: list[tuple[Callable[[Exception | None], None], Callable[[], bool]]] = field(
        default_factory=list
    )
    found: Any = None
    tries: int = 0

    @property
    def wanted(self) -> bool:
        return any(wanted() for _, wanted in self.waiters)


class GrammarQueue:
    """At most `most` jobs; clients take turns, and a client's jobs with the fewest tries come
    first. When full, a job of the client with most jobs is dropped, so that no client can block the
    others."""

    def __init__(self, most: int):
        self.most = most
        self.turns: OrderedDict[str, deque[GrammarJob]] = OrderedDict()
        self.changed = threading.Condition()
        self.closed = False

    def push(self, job: GrammarJob) -> list[GrammarJob]:
        """Returns the jobs dropped: unwanted ones, another client's, or this one."""
        with self.changed:
            dropped = self._unwanted() if len(self) >= self.most else []
            if len(self) >= self.most:
                fullest = max(self.turns.values(), key=len)
                if len(self.turns.get(job.client, ())) + 1 >= len(fullest):
                    return [*dropped, job]
                dropped.append(fullest.pop())
            self.turns.setdefault(job.client, deque()).append(job)
            self.changed.notify()
        return dropped

    def pop(self) -> GrammarJob | None:
        """The next client's least tried job, oldest first; waits for one. None when the queue is
        closed."""
        with self.changed:
            while not self.turns and not self.closed:
                self.changed.wait()
            if self.closed:
                return None
            client, jobs = self.turns.popitem(last=False)
            job = min(jobs, key=lambda it: it.tries)
            jobs.remove(job)
            if jobs:
                self.turns[client] = jobs
            return job

    def has(self, client: str) -> bool:
        """Whether the client has a waiting job."""
        with self.changed:
            return client in self.turns

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def _unwanted(self) -> list[GrammarJob]:
        found = [job for jobs in self.turns.values() for job in jobs if not job.wanted]
        for job in found:
            jobs = self.turns[job.client]
            jobs.remove(job)
            if not jobs:
                del self.turns[job.client]
        return found

    def __len__(self) -> int:
        return sum(map(len, self.turns.values()))


class Framed:
    """Length-prefixed msgpack messages over a child's standard input and output."""

    def __init__(self, command: list[str]):
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=one_threaded_environment(),
        )
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.input = self.child.stdin
        self.output = self.child.stdout

    def ask(self, message: Any, seconds: float) -> Any:
        """Send one message and wait for its response; raises TimeoutError, or EOFError where the
        child has ended."""
        data = msgspec.msgpack.encode(message)
        try:
            self.input.write(len(data).to_bytes(8, "little") + data)
            self.input.flush()
        except BrokenPipeError:
            raise EOFError from None
        deadline = time.monotonic() + seconds
        size = int.from_bytes(self._read(8, deadline), "little")
        return msgspec.msgpack.decode(self._read(size, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        fd = self.output.fileno()
        parts = []
        missing = size
        while missing:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(fd, min(missing, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        for pipe in (self.input, self.output):
            with suppress(BrokenPipeError):
                pipe.close()


class Lane:
    """One compiling process, for one grammar at a time; started on demand."""

    def __init__(self, start: Callable[[], Framed]):
        self.start = start
        self.helper: Framed | None = None
        self.lock = threading.Lock()

    def ask(self, message: Any, seconds: float) -> Any:
        """Raises TimeoutError or EOFError, after which the next call starts a new process."""
        with self.lock:
            try:
                self.helper = self.helper or self.start()
                return self.helper.ask(message, seconds)
            except (TimeoutError, EOFError):
                self.close()
                raise

    def close(self) -> None:
        if self.helper is not None:
            self.helper.close()
            self.helper = None
