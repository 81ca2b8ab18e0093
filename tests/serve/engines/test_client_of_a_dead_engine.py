"""Between an engine's end and the moment the API process notices, requests come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rorqual.request import Request, SamplingParams
from rorqual.serve.engines.client import ClientUsage, EngineClient
from rorqual.serve.engines.job import EngineJob
from rorqual.serve.errors import ApiError
from rorqual.serve.messages import Counting, Output


def test_nobody_reads_and_nothing_raises(tmp_path: Path) -> None:
    async def come_and_go() -> ApiError:
        client = EngineClient(tmp_path, "gone", 0, ClientUsage())
        jobs = [EngineJob(100) for _ in range(2)]
        for number, job in enumerate(jobs):
            request = Request(f"r{number}", (1, 2), SamplingParams())
            job.placed.append((client, request.id))
            client.add(request, True, job, 0, 10)
        client.cancel(["r0"])
        assert list(client.live) == ["r1"]
        assert client.load == 10
        client.close()
        with pytest.raises(ApiError) as caught:
            await jobs[1].take()
        return caught.value

    assert asyncio.run(come_and_go()).status == 500


def test_texts_that_end_after_the_engine(tmp_path: Path) -> None:
    """One that the engine had sent whole, and one that it had not; both had stop strings."""

    async def read_late() -> None:
        client = EngineClient(tmp_path, "gone", 0, ClientUsage())
        job = EngineJob(100)
        job.counting = Counting.READ
        for choice, name in enumerate(("r0", "r1")):
            job.placed.append((client, name))
            request = Request(name, (1, 2), SamplingParams(stop=("a",)))
            client.add(request, True, job, choice, 10)
        client._deliver(Output("r0", [5], "length", times=[1.0]))
        assert [*client.live] == ["r1"]
        assert [*client.unread] == ["r0", "r1"]
        client.close()
        for choice in range(2):
            job.read(choice, [1.0], 1)
            job.end_text(choice, stopped=choice == 1)
        job.close()
        assert not client.unread
        assert client.load == 0

    asyncio.run(read_late())
