"""Grammars that take long hold up their like alone, and clients take turns."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

pytest.importorskip("xgrammar")

from rorqual.errors import BusyError, ConfigError, RequestError
from rorqual.models.hub import BUNDLED
from rorqual.request import StructuredOutput
from rorqual.text.grammar import GrammarLimitError, XGrammars
from rorqual.text.grammar_lanes import Framed, GrammarJob, GrammarQueue
from rorqual.text.grammar_limits import GrammarLimits

pytestmark = pytest.mark.exhaustive(but_first=True)

WORDS = StructuredOutput("choice", json.dumps(["yes", "no"]))
SECONDS = 3.0


def bomb(number: int) -> StructuredOutput:
    """A grammar of exponential size."""
    rules = "".join(f"r{i} ::= r{i + 1} r{i + 1} r{i + 1} r{i + 1} | [a-z]\n" for i in range(20))
    return StructuredOutput(
        "grammar", f"root ::= r0\n{rules}" + f'r20 ::= "x"{{0,{3000 + number}}}'
    )


def made(**limits: float) -> XGrammars:
    found = XGrammars.make(BUNDLED, 4096, (1,), GrammarLimits(**limits))  # type: ignore[arg-type]
    assert found is not None
    found.warm()
    return found


@pytest.fixture(scope="module")
def grammars() -> Iterator[XGrammars]:
    found = made(seconds=SECONDS, quick=0.3)
    wait_for(found, StructuredOutput("regex", "warm"))
    yield found
    found.close()


def wait_for(grammars: XGrammars, structure: StructuredOutput) -> Exception | None:
    heard: SimpleQueue[Exception | None] = SimpleQueue()
    grammars.prepare(structure, heard.put, "waiter")
    return heard.get(timeout=60)


COUNTS_THREADS = """
import os, sys, msgspec, numpy
sys.stdin.buffer.read(8)
data = msgspec.msgpack.encode(len(os.listdir("/proc/self/task")))
sys.stdout.buffer.write(len(data).to_bytes(8, "little") + data)
"""


def test_a_process_that_forks_has_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's thread may hold a lock when a child is forked, and is never released there."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "2")
    child = Framed([sys.executable, "-c", COUNTS_THREADS])
    assert child.ask("how many", 60.0) == 1
    child.close()


@pytest.mark.exhaustive
@pytest.mark.longest
def test_bombs_do_not_hold_up_two_words(grammars: XGrammars) -> None:
    """Three bombs are three times all the seconds in one queue; here three first tries, of which
    clients who take turns wait for one."""
    heard: SimpleQueue[Exception | None] = SimpleQueue()
    for number in range(3):
        grammars.prepare(bomb(number), heard.put, "bomber")
    assert wait_for(grammars, WORDS) is None
    assert heard.empty(), "no bomb has had all its seconds yet"
    for _ in range(3):
        assert isinstance(heard.get(timeout=60), RequestError)


@pytest.mark.exhaustive
def test_a_clients_bombs_do_not_hold_up_its_own_two_words() -> None:
    """Five first tries of two seconds each would; it waits for one of them, and short ones."""
    grammars = made(seconds=SECONDS, quick=2.0)
    try:
        wait_for(grammars, StructuredOutput("regex", "warm"))
        heard: SimpleQueue[Exception | None] = SimpleQueue()
        for number in range(5):
            grammars.prepare(bomb(number), heard.put, "waiter")
        start = time.monotonic()
        assert wait_for(grammars, WORDS) is None
        assert time.monotonic() - start < 10.0  # which five tries would take at least
    finally:
        grammars.close()


def test_each_has_a_short_try_before_any_has_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = XGrammars.make(BUNDLED, 4096, (1,), GrammarLimits(quick=0.5, short=0.1))
    assert grammars is not None
    tried: list[tuple[str, float]] = []
    begun = threading.Event()

    def find(structure: StructuredOutput, lane: object, seconds: float) -> None:
        assert begun.wait(60)
        tried.append((structure.value, seconds))
        if structure.value.startswith("big"):
            raise GrammarLimitError("it takes longer")

    monkeypatch.setattr(grammars, "_find", find)
    heard: SimpleQueue[Exception | None] = SimpleQueue()
    for client, name in (("b", "other"), ("a", "big0"), ("a", "big1"), ("a", "small")):
        grammars.prepare(StructuredOutput("regex", name), heard.put, client)
    begun.set()
    assert [heard.get(timeout=60) is None for _ in range(4)].count(True) == 2
    first = [it for it in tried if it[1] < grammars.limits.seconds]
    assert first == [
        ("other", 0.5),  # its client has no other
        ("big0", 0.1),
        ("big1", 0.1),
        ("small", 0.1),
        ("big0", 0.5),
        ("big1", 0.5),
    ]
    grammars.close()


@pytest.mark.exhaustive
def test_what_takes_longer_than_its_first_try_is_compiled_all_the_same() -> None:
    grammars = made(quick=0.002)
    try:
        assert wait_for(grammars, StructuredOutput("regex", "[a-z]{1,200}x{1,200}")) is None
        assert grammars.slow.helper is not None
    finally:
        grammars.close()


@pytest.mark.exhaustive
def test_the_same_grammar_is_compiled_once_for_all_who_wait(grammars: XGrammars) -> None:
    heard: SimpleQueue[Exception | None] = SimpleQueue()
    start = time.monotonic()
    for _ in range(8):
        grammars.prepare(bomb(100), heard.put)
    assert all(isinstance(heard.get(timeout=60), RequestError) for _ in range(8))
    assert time.monotonic() - start < 8 * SECONDS
    assert not grammars.jobs


@pytest.mark.exhaustive
def test_nobody_waits_for_what_nobody_wants(grammars: XGrammars) -> None:
    """Requests that were cancelled while they waited cost no time."""
    heard: SimpleQueue[Exception | None] = SimpleQueue()
    for number in range(30):
        grammars.prepare(bomb(200 + number), heard.put, "gone", lambda: False)
    start = time.monotonic()
    assert wait_for(grammars, StructuredOutput("regex", "wanted")) is None
    assert time.monotonic() - start < 8  # thirty first tries take 9
    assert heard.empty()
    assert not grammars.jobs


@pytest.mark.exhaustive
def test_too_many_are_refused_at_once() -> None:
    grammars = made(waiting=2, seconds=1.0, quick=0.3)
    try:
        wait_for(grammars, WORDS)
        heard: SimpleQueue[Exception | None] = SimpleQueue()
        for number in range(6):
            grammars.prepare(bomb(number), heard.put, "bomber")
        error = heard.get(timeout=60)  # before those of bombs, which take longer
        assert isinstance(error, BusyError)
        assert "2 grammars wait" in str(error)
    finally:
        grammars.close()


def job(client: str, number: int = 0) -> GrammarJob:
    return GrammarJob(
        StructuredOutput("regex", f"{client}{number}"), client, [(lambda error: None, lambda: True)]
    )


def test_clients_take_turns() -> None:
    queue = GrammarQueue(10)
    for number in range(3):
        assert queue.push(job("a", number)) == []
    queue.push(job("b"))
    queue.push(job("c"))
    taken = [queue.pop() for _ in range(5)]
    assert [it.structure.value for it in taken if it is not None] == ["a0", "b0", "c0", "a1", "a2"]


def test_of_one_client_the_least_tried_come_first() -> None:
    queue = GrammarQueue(10)
    jobs = [job("a", number) for number in range(4)]
    jobs[0].tries = jobs[2].tries = 1
    for it in jobs:
        queue.push(it)
    assert [queue.pop() for _ in range(4)] == [jobs[1], jobs[3], jobs[0], jobs[2]]
    assert not queue.has("a")


def test_the_client_with_most_gives_way() -> None:
    queue = GrammarQueue(3)
    mine = [job("a", number) for number in range(4)]
    assert [queue.push(it) for it in mine] == [[], [], [], [mine[3]]]
    assert queue.push(job("b")) == [mine[2]]
    assert queue.push(job("c")) == [mine[1]], "of a's two the newer"
    late = job("d")
    assert queue.push(late) == [late], "everybody has one"
    assert len(queue) == 3


def test_closing_ends_whoever_waits_for_a_job() -> None:
    queue = GrammarQueue(3)
    heard: SimpleQueue[GrammarJob | None] = SimpleQueue()
    threading.Thread(target=lambda: heard.put(queue.pop())).start()
    queue.close()
    assert heard.get(timeout=60) is None


def test_limits_are_checked() -> None:
    wrong = {
        "quick": ("--grammar-quick-seconds", 0.0),
        "seconds": ("--grammar-seconds", math.nan),
        "waiting": ("--max-grammars-waiting", 0),
        "slow_waiting": ("--max-slow-grammars-waiting", 0),
        "memory_mib": ("--grammar-memory", -1),
        "regex": ("--max-regex-size", 0),
    }
    for name, (flag, value) in wrong.items():
        with pytest.raises(ConfigError, match=f"^{flag}={value} is "):
            GrammarLimits(**{name: value})  # type: ignore[arg-type]


def test_a_busy_engine_is_429_to_the_client() -> None:
    from rorqual.serve.engines.job import EngineJob
    from rorqual.serve.errors import ApiError

    refused = EngineJob(10)
    refused.refuse("2 grammars wait", busy=True)
    assert isinstance(refused.error, ApiError)
    assert refused.error.status == 429
    assert refused.error.headers()["retry-after"] == "5"
