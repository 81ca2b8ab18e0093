"""Whose request is next: order, shares of rows and tokens, and what it costs."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from rorqual.engine.scheduling.sequence import Sequence
from rorqual.engine.scheduling.waiting_queue import MAX_IDLE, WaitingQueue, charge
from rorqual.errors import RequestError
from rorqual.request import Request, SamplingParams
from tests.engine.fake_runner import FakeRunner, Loop, check_idle, check_pages, expected

VOCAB = 97


def request(name: str, prompt: int = 8, most: int = 8, **more) -> Request:
    draw = random.Random(name)
    tokens = tuple(draw.randrange(VOCAB) for _ in range(prompt))
    return Request(name, tokens, SamplingParams(max_tokens=most, ignore_eos=True), **more)


def sequence(name: str, **more) -> Sequence:
    return Sequence(request(name, **more), 100, 0, 0)


def scheduler_of(**changes) -> Scheduler:
    settings = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 256,
        "num_pages": 400,
        "page_size": 4,
    }
    return Scheduler(SchedulerConfig(**{**settings, **changes}))


def popped(queue: WaitingQueue, cost: int = 1) -> list[str]:
    """Names as they come, each charged `cost`."""
    found = []
    while queue:
        taken = queue.pop_head()
        charge(taken, cost)
        found.append(taken.request.id)
    return found


def test_one_client_s_requests_come_in_order() -> None:
    queue = WaitingQueue()
    for index in range(5):
        queue.append(sequence(str(index)))
    first = queue.pop_head()
    queue.append_left(first)
    assert popped(queue) == list("01234")


def test_clients_take_turns_and_their_users_within_their_turns() -> None:
    queue = WaitingQueue()
    for index in range(4):
        queue.append(sequence(f"a{index}", client="a"))
    for index in range(2):
        queue.append(sequence(f"x{index}", client="b", user="x"))
        queue.append(sequence(f"y{index}", client="b", user="y"))
    assert popped(queue) == ["a0", "x0", "a1", "y0", "a2", "x1", "a3", "y1"]


def test_invented_users_share_their_key_s_turn() -> None:
    queue = WaitingQueue()
    for index in range(50):
        queue.append(sequence(f"a{index}", client="a", user=f"user {index}"))
    queue.append(sequence("b", client="b"))
    assert popped(queue).index("b") <= 1


def test_tokens_count_not_requests() -> None:
    """Whoever asks for ten times as much comes a tenth as often."""
    queue = WaitingQueue()
    for index in range(200):
        queue.append(sequence(f"large {index}", client="large"))
        queue.append(sequence(f"small {index}", client="small"))
    seen: Counter[str] = Counter()
    for _ in range(110):
        taken = queue.pop_head()
        charge(taken, 100 if taken.request.client == "large" else 10)
        seen[taken.request.client] += 1
    assert seen == {"small": 100, "large": 10}


def test_nobody_saves_up_while_away() -> None:
    queue = WaitingQueue()
    for index in range(100):
        queue.append(sequence(f"a{index}", client="a"))
    for _ in range(50):
        charge(queue.pop_head(), 10)
    for index in range(20):
        queue.append(sequence(f"late {index}", client="late"))
    found = popped(queue, 10)[:20]
    assert 9 <= sum(name.startswith("late") for name in found) <= 11


def test_lower_priorities_come_first() -> None:
    queue = WaitingQueue()
    for name, priority in (("c", 1), ("a", -1), ("d", 1), ("b", 0)):
        queue.append(sequence(name, priority=priority))
    assert popped(queue) == list("abcd")
    with pytest.raises(RequestError, match="priority=101"):
        request("x", priority=101)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_calls_loses_and_repeats_nobody(seed: int) -> None:
    draw = random.Random(seed)
    queue = WaitingQueue()
    waiting: dict[str, Sequence] = {}
    out: list[Sequence] = []
    for index in range(400):
        choice = draw.random()
        if choice < 0.45:
            more = {"client": draw.choice("abc"), "user": draw.choice("xy")}
            found = sequence(str(index), priority=draw.randrange(2), **more)
            waiting[found.request.id] = found
            queue.append(found)
        elif choice < 0.6 and waiting:
            name = draw.choice(list(waiting))
            queue.remove(waiting.pop(name))
        elif choice < 0.7 and out:
            found = out.pop(draw.randrange(len(out)))
            waiting[found.request.id] = found
            queue.append_left(found)
        elif waiting:
            head = queue.head
            assert queue.pop_head() is head
            assert waiting.pop(head.request.id) is head
            charge(head, draw.randrange(50))
            out.append(head)
        assert len(queue) == len(waiting)
        assert {found.request.id for found in queue} == set(waiting)


def test_names_that_are_gone_are_forgotten() -> None:
    queue = WaitingQueue()
    for index in range(5 * MAX_IDLE):
        queue.append(sequence(str(index), client=f"client {index}"))
        charge(queue.pop_head(), 1)
    (level,) = queue.levels.values()
    assert len(level.clients.accounts) <= MAX_IDLE + 1
    keep = sequence("keep", client="keep")
    queue.append(keep)
    for index in range(5 * MAX_IDLE):
        found = sequence(str(index), client="comes and goes")
        queue.append(found)
        queue.remove(found)
    assert len(level.clients.heap) <= MAX_IDLE + 4
    assert queue.head is keep


# ---- rows


def run(scheduler: Scheduler, work: list[tuple[int, Request]], depth: int = 2) -> dict[str, int]:
    """Add each request before its step; the step that brought each one's first token. Every
    output is checked against that of the request alone."""
    loop = Loop(scheduler, FakeRunner.of(scheduler, VOCAB), depth)
    queue = sorted(work, key=lambda item: item[0])
    first: dict[str, int] = {}
    step = 0
    while queue or scheduler.has_work or loop.in_flight:
        while queue and queue[0][0] <= step:
            scheduler.add(queue.pop(0)[1])
        for out in loop.step():
            first.setdefault(out.sequence.request.id, step)
        check_pages(scheduler)
        assert sum(scheduler.rows.values()) == scheduler.num_running
        step += 1
        assert step < 20_000
    for _, item in work:
        assert loop.outputs[item.id] == expected(item, scheduler.config.max_model_len, VOCAB)
    assert not scheduler.rows
    check_idle(scheduler)
    return first


def test_a_single_request_beside_hundreds_of_another_client_starts_at_once() -> None:
    """All rows are taken by answers that last long."""
    crowd = [(0, request(f"crowd {i}", 8, 100, client="crowd")) for i in range(100)]
    single = (50, request("single", 8, 5, client="single"))
    scheduler = scheduler_of()
    found = run(scheduler, [*crowd, single])
    assert found["single"] <= 50 + 4
    assert scheduler.num_preemptions == 1


def test_and_beside_hundreds_of_invented_users() -> None:
    crowd = [
        (0, request(f"crowd {i}", 8, 100, client="crowd", user=f"user {i}")) for i in range(100)
    ]
    single = (50, request("single", 8, 5, client="single"))
    assert run(scheduler_of(), [*crowd, single])["single"] <= 50 + 4


def test_where_pages_are_missing_too() -> None:
    """Rows are free, pages are not: one request after the other gives way."""
    crowd = [(0, request(f"crowd {i}", 60, 60, client="crowd")) for i in range(12)]
    single = (20, request("single", 90, 5, client="single"))
    scheduler = scheduler_of(num_pages=100, max_num_seqs=16)
    found = run(scheduler, [*crowd, single])
    assert found["single"] <= 20 + 8


def test_two_clients_with_long_queues_share_rows_without_a_back_and_forth() -> None:
    work = [(0, request(f"a{i}", 8, 40, client="a")) for i in range(60)]
    work += [(20, request(f"b{i}", 8, 40, client="b")) for i in range(60)]
    scheduler = scheduler_of()
    found = run(scheduler, work)
    assert scheduler.num_preemptions <= 8
    early = [name for name, step in found.items() if 40 < step < 400]
    assert 0.35 <= sum(name.startswith("b") for name in early) / len(early) <= 0.65


def test_a_lower_number_takes_a_row_and_the_oldest_keeps_its_own() -> None:
    work = [(0, request(f"slow {i}", 8, 60, priority=5)) for i in range(12)]
    work += [(10, request(f"fast {i}", 8, 10, priority=0)) for i in range(12)]
    found = run(scheduler_of(max_num_seqs=4), work)
    assert max(found[f"fast {i}"] for i in range(12)) < min(
        found[f"slow {i}"] for i in range(5, 12)
    )
    assert found["slow 0"] < 10


@pytest.mark.parametrize("seed", range(12))
def test_outputs_do_not_depend_on_who_else_waits(seed: int) -> None:
    draw = random.Random(seed)
    work = [
        (
            draw.randrange(60),
            request(
                f"r{i}",
                draw.randint(1, 60),
                draw.randint(1, 40),
                client=draw.choice("abcd"),
                user=draw.choice("xy"),
                priority=draw.choice((0, 0, 0, 1)),
            ),
        )
        for i in range(40)
    ]
    run(scheduler_of(num_pages=60, max_num_seqs=5), work, depth=draw.randint(1, 3))


@pytest.mark.parametrize("expected_len", [256.0, 4000.0])
def test_whoever_gives_way_does_not_come_back_before_whom_it_gave_way_to(
    expected_len: float,
) -> None:
    """A client gets back what was charged in advance. If it were the least served then, its request
    would take the row again, and give way again."""
    scheduler = scheduler_of(max_num_seqs=4, max_model_len=12_000, num_pages=4_001)
    scheduler.mean_output_len = expected_len
    loop = Loop(scheduler, FakeRunner.of(scheduler, VOCAB), depth=2)
    scheduler.add(request("earlier", 20, int(expected_len), client="single"))
    loop.step()
    for i in range(4):
        scheduler.add(request(f"crowd {i}", 20, 10_000, client="crowd"))
    while "earlier" in scheduler.sequences:
        loop.step()
    for _ in range(5):
        loop.step()
    scheduler.add(request("again", int(expected_len * 0.75), 5, client="single"))
    while "again" in scheduler.sequences:
        loop.step()
    for _ in range(3):
        loop.step()
    before = scheduler.num_preemptions
    scheduler.add(request("last", 20, 5, client="single"))
    steps = 0
    while "last" not in loop.outputs:
        loop.step()
        steps += 1
    assert steps <= 4
    assert scheduler.num_preemptions - before <= 1


def test_a_high_priority_finds_the_one_that_may_give_way() -> None:
    """The only request of the lowest priority is the oldest, which keeps its row; another one,
    still below the new one, gives way."""
    scheduler = scheduler_of(max_num_seqs=2)
    loop = Loop(scheduler, FakeRunner.of(scheduler, VOCAB))
    scheduler.add(request("oldest", 8, 100, priority=9))
    scheduler.add(request("between", 8, 100, priority=5))
    loop.step()
    scheduler.add(request("first", 8, 5, priority=0))
    for _ in range(3):
        loop.step()
    assert "first" in loop.outputs
    assert scheduler.sequences["between"].preemptions == 1
    assert scheduler.sequences["oldest"].preemptions == 0
