"""Streams whose server dies: no token is missing or told twice, wherever it happens."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from rorqual.route.calls import RoutedCall
from tests.route.fakes import FakeServer, Faults, StreamedAnswer, routed, run

BODY = {"prompt": "abc", "max_tokens": 8, "stream": True}


def stream_of(faults: Faults, elsewhere: int = 1, **more: Any) -> None:
    """One server has these faults, another one none, which is asked so often."""

    async def test() -> None:
        bad = FakeServer("bad", faults)
        good = FakeServer("good")
        async with routed(good, bad) as router:  # turns begin with the second
            body = {**BODY, **more}
            received = await router.post(body)
            usage = "stream_options" in more
            received.assert_whole("abc", body["max_tokens"], int(body.get("n", 1)), usage)
            assert ": rorqual" not in received.raw, "the router's own"
            assert len(bad.bodies) == 1
            assert len(good.bodies) == elsewhere

    run(test())


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("after", range(1, 6))
def test_a_server_dies_after_any_event(after: int, half: bool) -> None:
    """Of an event that came by half nothing is told."""
    stream_of(Faults(die_after=after, half=half))


@pytest.mark.parametrize("after", range(1, 12))
def test_choices_that_have_ended_have_not_begun_or_are_under_way(after: int) -> None:
    stream_of(Faults(die_after=after), n=3, max_tokens=3)


@pytest.mark.parametrize("after", range(4, 8))
def test_a_number_of_choices_that_is_written_with_a_point(after: int) -> None:
    """The end of one choice is not that of both."""
    stream_of(Faults(die_after=after), n=2.0, max_tokens=3)


@pytest.mark.parametrize(
    ("given", "count"),
    [(2, 2), (2.0, 2), (1.0, 1), (None, 1), (True, 1), (2.5, 1), (math.inf, 1), (math.nan, 1)],
)
def test_how_many_choices_a_request_has(given: Any, count: int) -> None:
    """Servers refuse the others."""
    call = RoutedCall("POST", "", "", {}, b"", {"prompt": ["a", "b"], "n": given})
    assert call.choices() == 2 * count


@pytest.mark.parametrize("after", range(1, 6))
@pytest.mark.parametrize("code", ["engine_dead", "shutting_down"])
def test_an_engine_dies_under_a_server_that_lives(after: int, code: str) -> None:
    stream_of(Faults(error_after=after, error_code=code))


@pytest.mark.parametrize(("after", "elsewhere"), [(5, 1), (6, 1), (7, 0)])
def test_the_usage_is_told_once(after: int, elsewhere: int) -> None:
    """Where all that was missing is the last line, nobody is asked for it."""
    usage = {"include_usage": True}
    stream_of(Faults(die_after=after), elsewhere, stream_options=usage)


def test_all_was_told_but_the_last_line() -> None:
    stream_of(Faults(die_after=6), 0)


def test_a_silent_server_is_given_up_and_its_late_bytes_go_nowhere() -> None:
    async def test() -> None:
        bad = FakeServer("bad", Faults(hang_after=2))
        good = FakeServer("good")
        async with routed(good, bad) as router:
            (await router.post(BODY)).assert_whole("abc", 8)
            assert router.server(bad).state == "down"
            bad.hangs = False
            await router.until(lambda: router.server(bad).state == "ready")
            assert bad.left == 1, "its connection was closed"

    run(test())


def test_a_slow_server_that_answers_health_is_left_alone() -> None:
    async def test() -> None:
        slow = FakeServer("slow", Faults(slow=0.4))
        async with routed(slow, FakeServer()) as router:
            router.router.servers.policies[False].turn = 1  # the first is next
            (await router.post({**BODY, "max_tokens": 2})).assert_whole("abc", 2)
            assert len(slow.bodies) == 1

    run(test())


def test_one_death_after_another() -> None:
    """Each server dies in its turn; what they made is one stream."""

    async def test() -> None:
        fakes = [FakeServer(str(i), Faults(die_after=2)) for i in range(4)]
        async with routed(*fakes) as router:
            (await router.post({**BODY, "max_tokens": 16})).assert_whole("abc", 16)
            text = (await router.get("/metrics"))[1]
            assert "rorqual_router_resumes_total 4.0" in text

    run(test())


def test_one_server_alone_is_waited_for() -> None:
    async def test() -> None:
        only = FakeServer("only", Faults(die_after=3))
        async with routed(only) as router:
            asking = asyncio.create_task(router.post({**BODY, "max_tokens": 12}))
            await router.until(lambda: bool(only.bodies))
            port = int(only.url.rpartition(":")[2])
            await router.until(lambda: only.faults.die_after is None)
            await only.stop()
            await asyncio.sleep(0.3)
            await only.start(port)
            (await asking).assert_whole("abc", 12)

    run(test())


def test_a_stream_that_nobody_goes_on_with_ends_with_an_error() -> None:
    async def test() -> None:
        only = FakeServer("only", Faults(die_after=3))
        async with routed(only, resumes=0) as router:
            received = await router.post(BODY)
            assert received.status == 200
            assert [error["code"] for error in received.errors] == ["stream_lost"]
            assert received.done == 1
            assert "rorqual_router_streams_lost_total 1.0" in (await router.get("/metrics"))[1]

    run(test())


@pytest.mark.parametrize(("again", "asked"), [(1, 1 + 8), (0, 3 + 3)])
def test_a_poisoned_request_kills_no_more_than_the_limits_say(again: int, asked: int) -> None:
    """Eight moves, or three servers in a row without a new event."""

    async def test() -> None:
        fakes = [FakeServer(str(i), Faults(die_after=1, again=again)) for i in range(3)]
        async with routed(*fakes, breaker_failures=100) as router:
            received = await router.post({**BODY, "max_tokens": 100})
            assert [error["code"] for error in received.errors] == ["stream_lost"]
            assert sum(len(fake.bodies) for fake in fakes) == asked

    run(test())


@pytest.mark.parametrize("faults", [Faults(die_after=2, unmarked=True)])
def test_a_server_of_another_make_is_not_gone_on_with(faults: Faults) -> None:
    """Its tokens are not known; what came is passed on, then the error."""

    async def test() -> None:
        bad = FakeServer("bad", faults)
        async with routed(FakeServer(), bad) as router:
            received = await router.post(BODY)
            assert received.texts == {0: "<1291><1298>"} or received.texts[0].startswith("<")
            assert [error["code"] for error in received.errors] == ["stream_lost"]

    run(test())


def test_more_tokens_than_are_kept() -> None:
    async def test() -> None:
        bad = FakeServer("bad", Faults(die_after=4))
        async with routed(FakeServer(), bad, resume_tokens=4) as router:
            assert [error["code"] for error in (await router.post(BODY)).errors] == ["stream_lost"]
        async with routed(FakeServer(), FakeServer(), resume_tokens=4) as router:
            (await router.post(BODY)).assert_whole("abc", 8)

    run(test())


def test_a_router_before_a_router() -> None:
    """The lines go through to a client that asks for them, who may itself go on."""

    async def test() -> None:
        bad = FakeServer("bad", Faults(die_after=3))
        async with routed(FakeServer(), bad) as router:
            async with router.session.post(
                router.url + "/v1/completions", json=BODY, headers={"X-Rorqual-Resumable": "1"}
            ) as answer:
                raw = await answer.text()
            named = [line for line in raw.splitlines() if line.startswith(": rorqual 0")]
            assert len(named) == raw.count('"choices"')
            plain = "\n".join(line for line in raw.split("\n") if not line.startswith(":"))
            StreamedAnswer.of(200, plain).assert_whole("abc", 8)
            blocks = raw.split("\n\n")[:3]
            ids = [int(t) for b in blocks for t in b.split("\n")[0].split(" ")[3].split(",") if t]
            given = {"id": "x", "created": 9}
            body = {
                **BODY,
                "rorqual_resume": {
                    **given,
                    "choices": [{"index": 0, "token_ids": ids, "ended": False}],
                },
            }
            bad.faults.die_after = 1
            received = await router.post(body)
            assert len(received.ids) == 1
            assert (
                "".join(f"<{i}>" for i in ids) + received.texts[0]
                == StreamedAnswer.of(200, plain).texts[0]
            )

    run(test())


def test_clients_that_leave_end_their_request() -> None:
    async def test() -> None:
        slow = FakeServer("slow", Faults(slow=0.05))
        async with routed(slow) as router:
            for path_body in ({**BODY, "max_tokens": 400}, {"prompt": "abc", "slow": True}):
                asking = asyncio.create_task(router.post(path_body))
                count = len(slow.bodies)
                await router.until(lambda count=count: len(slow.bodies) > count)
                left = slow.left
                asking.cancel()
                await router.until(lambda left=left: slow.left == left + 1)
            await router.until(router.at_rest)
            text = (await router.get("/metrics"))[1]
            assert 'outcome="left"' in text
            assert 'outcome="lost"' not in text

    run(test())


def test_many_streams_with_deaths_and_cancels() -> None:
    """Whatever happens: the right tokens, or a clear error."""

    async def test() -> None:
        import random

        random.seed(5)
        fakes = [FakeServer(str(i), Faults(slow=0.001)) for i in range(4)]

        async def trouble() -> None:
            while True:
                faults = random.choice(fakes).faults
                kind = random.choice(["die_after", "error_after", "before_head"])
                setattr(faults, kind, kind == "before_head" or random.randrange(6))
                faults.half = random.random() < 0.5
                await asyncio.sleep(0.01)

        async with routed(*fakes, breaker_failures=1000) as router:
            making = asyncio.create_task(trouble())
            outcomes = {"whole": 0, "error": 0, "cancelled": 0}

            async def one(number: int) -> None:
                prompt = f"prompt {number}"
                count = random.randrange(1, 30)
                choices = random.choice([1, 1, 2])
                body = {"prompt": prompt, "max_tokens": count, "stream": True, "n": choices}
                asking = asyncio.create_task(router.post(body))
                if random.random() < 0.2:
                    await asyncio.sleep(random.random() / 20)
                    asking.cancel()
                try:
                    received = await asking
                except asyncio.CancelledError:
                    outcomes["cancelled"] += 1
                    return
                if received.errors:
                    outcomes["error"] += 1
                else:
                    received.assert_whole(prompt, count, choices)
                    outcomes["whole"] += 1

            for _ in range(10):
                await asyncio.gather(*(one(i) for i in range(30)))
            making.cancel()
            assert outcomes["whole"] > 150, outcomes
            assert outcomes["cancelled"] > 10, outcomes

    run(test())
