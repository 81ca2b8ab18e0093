"""Requests whose pages another engine fetches once the answer that they share names them: their
engines are told when it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rorqual.request import Request, SamplingParams
from rorqual.serve.engines.client import ClientUsage, EngineClient
from rorqual.serve.engines.job import EngineJob
from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.errors import Disconnected
from rorqual.serve.limits import ServerLimits
from rorqual.serve.messages import Add, Answered, Cancel, Output


class Told:
    """Two engines, whose clients keep what they would send."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: list[bool]):
        self.engines: list[EngineClient] = []
        self.sent: list[list[Any]] = [[], []]
        for index in range(2):
            client = EngineClient(folder, f"engine{index}", index, ClientUsage())
            monkeypatch.setattr(client, "_send", self.sent[index].append)
            self.engines.append(client)
        pool = EnginePool([{}], ServerLimits())
        turns = iter(range(len(elsewhere)))
        monkeypatch.setattr(pool, "_choose", lambda request: self.engines[next(turns) % 2])
        self.job = EngineJob(100)
        transfer = {"do_remote_decode": True}
        requests = [
            Request(
                f"r{number}", (1, 2), SamplingParams(), kv_transfer_params=transfer if on else None
            )
            for number, on in enumerate(elsewhere)
        ]
        pool.submit(requests, False, self.job)
        pool.kill()

    def end(self, number: int) -> None:
        self.engines[number % 2]._deliver(Output(f"r{number}", [5], "length"))

    def answered(self) -> list[list[Answered]]:
        return [[one for one in sent if isinstance(one, Answered)] for sent in self.sent]

    def shares(self) -> dict[str, bool]:
        added = [one for sent in self.sent for one in sent if isinstance(one, Add)]
        return {add.request.id: add.shares for add in added}

    def close(self) -> None:
        for client in self.engines:
            client.close()


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Told]:
    return lambda *elsewhere: Told(tmp_path, monkeypatch, list(elsewhere))


def test_the_last_prompt_ends_the_wait_of_all(told: Callable[..., Told]) -> None:
    async def scenario() -> None:
        found = told(True, True, False, True)
        assert found.shares() == {"r0": True, "r1": True, "r2": False, "r3": True}
        for number in (3, 0, 2):
            found.end(number)
            assert found.answered() == [[], []]
        found.end(1)
        assert found.answered() == [[Answered(["r0"], False)], [Answered(["r1", "r3"], False)]]
        found.job.close()
        assert sum(map(len, found.answered())) == 2
        found.close()

    asyncio.run(scenario())


def test_an_answer_that_nobody_gets(told: Callable[..., Told]) -> None:
    async def scenario() -> None:
        found = told(True, True, True)
        found.end(1)
        found.job.fail(Disconnected())
        assert found.sent[0][-2:] == [Cancel(["r2"]), Answered(["r0", "r2"], True)]
        assert found.sent[1][-1] == Answered(["r1"], True)
        found.job.close()
        assert sum(map(len, found.answered())) == 2
        found.close()

    asyncio.run(scenario())


def test_one_prompt_waits_for_no_other(told: Callable[..., Told]) -> None:
    async def scenario() -> None:
        found = told(True, False)
        assert found.shares() == {"r0": False, "r1": False}
        found.end(0)
        found.end(1)
        found.job.close()
        assert found.answered() == [[], []]
        found.close()

    asyncio.run(scenario())
