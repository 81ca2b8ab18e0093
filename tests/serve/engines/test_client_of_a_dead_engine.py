"""Between an engine's end and the moment the API process notices, requests come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rorqual.request import Request, SamplingParams
from rorqual.serve.engines.client import ClientUsage, EngineClient
from rorqual.serve.engines.job import EngineJob
from rorqual.serve.errors import ApiError


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
