"""Chunks of a stream go past the layers that only look at an answer's head; those layers still see
the head, and nothing else changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("fastapi")

from rorqual.models.hub import BUNDLED
from rorqual.request import SamplingParams
from rorqual.serve.engines.job import EngineJob
from rorqual.serve.http.connection import DirectSend
from rorqual.serve.http.response import DIRECT
from rorqual.serve.messages import Output
from rorqual.text.detokenizer import Completion
from rorqual.text.tokenizer import Tokenizer


def test_what_is_sent_by_is_left_in_the_scope() -> None:
    seen: list[tuple[str, Any]] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(("is it", scope[DIRECT] is send))
        await scope[DIRECT]({"type": "http.response.body", "body": b"x"})

    async def outer_send(message: Any) -> None:
        seen.append(("sent", message["body"]))

    async def nothing() -> Any:
        return {}

    asyncio.run(DirectSend(inner)({"type": "http"}, nothing, outer_send))
    assert seen == [("is it", True), ("sent", b"x")]


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_usual_step_adds_what_take_adds(at_once: int) -> None:
    tokenizer = Tokenizer(BUNDLED)
    ids = tokenizer.encode("The captain’s café: 鯨 and 🐋, whales — “two” of them")
    ids += [token for token in range(0, 3000, 61) if token not in tokenizer.special_ids]
    slow = Completion(0, 0, SamplingParams(), tokenizer)
    fast = Completion(0, 0, SamplingParams(), tokenizer)
    for start in range(0, len(ids), at_once):
        some = ids[start : start + at_once]
        want = "".join(slow.take(token)[0].text for token in some)
        assert fast.grow(some) == want
    assert fast.out == slow.out


def output(token: int) -> Output:
    return Output("r", [token])


def test_a_sink_is_asked_while_the_task_waits_and_has_nothing_under_way() -> None:
    async def scenario() -> list[Any]:
        job = EngineJob(100)
        seen: list[Any] = []
        takes = True

        def sink(choice: int, found: Output) -> bool:
            seen.append(("sink", found.tokens[0], takes))
            return takes

        job.sink = sink
        job.feed(0, output(1))  # nobody waits: kept
        assert [found.tokens for _, found in await job.take()] == [[1]]
        task = asyncio.create_task(job.take())
        await asyncio.sleep(0)
        job.feed(0, output(2))
        job.feed(0, output(3))
        assert not task.done()
        takes = False
        job.feed(0, output(4))  # left to the task, and so is what comes before it has woken
        takes = True
        job.feed(0, output(5))
        seen.append([found.tokens[0] for _, found in await task])
        return seen

    found = asyncio.run(scenario())
    assert found == [("sink", 2, True), ("sink", 3, True), ("sink", 4, False), [4, 5]]


def test_what_a_sink_raises_ends_its_own_request() -> None:
    async def scenario() -> None:
        job = EngineJob(100)

        def sink(choice: int, found: Output) -> bool:
            raise ValueError("of this request")

        job.sink = sink
        task = asyncio.create_task(job.take())
        await asyncio.sleep(0)
        job.feed(0, output(1))
        with pytest.raises(ValueError, match="of this request"):
            await task

    asyncio.run(scenario())
