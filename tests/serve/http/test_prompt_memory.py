"""A large prompt is let go of with its request, and its memory goes back to the system."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from rorqual.engine.config import EngineConfig
from rorqual.engine.engine import Engine
from rorqual.errors import RequestError
from rorqual.models.hub import BUNDLED
from rorqual.request import Request, SamplingParams
from rorqual.serve.engines.job import EngineJob
from rorqual.serve.engines.pool import EnginePool, EngineSlot
from rorqual.serve.http import memory
from rorqual.serve.http.app import Api, create_app
from rorqual.serve.http.memory import TRIMS, MemoryTrimmer
from rorqual.serve.http.request_builder import Served
from rorqual.serve.limits import LARGE_BODIES, ServerLimits
from rorqual.serve.messages import Output
from rorqual.text.chat_template import ChatTemplate
from rorqual.text.generation_config import GenerationDefaults
from rorqual.text.tokenizer import Tokenizer

pytestmark = pytest.mark.exhaustive(but_first=True)


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Engines:
    """Stands for a client: refuses each request, or answers it with one token."""

    index = load = 0
    info = SimpleNamespace(max_model_len=512, max_num_seqs=4)

    def __init__(self, refuses: bool):
        self.refuses = refuses
        self.live: dict[str, Any] = {}
        self.ended: list[Any] = []
        self.seen: list[weakref.ref[Request]] = []

    def add(
        self, request: Request, every_step: bool, job: EngineJob, choice: int, tokens: int
    ) -> None:
        self.seen.append(weakref.ref(request))
        soon = asyncio.get_running_loop().call_soon
        if self.refuses:
            soon(job.refuse, "too long")
        else:
            soon(job.feed, choice, Output(request.id, [5], "length"))

    def cancel(self, ids: list[str]) -> None:
        pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("refuses", [False, True])
def test_the_api_process_keeps_no_prompt(
    monkeypatch: pytest.MonkeyPatch, no_collection: None, refuses: bool, stream: bool
):
    tokenizer = Tokenizer(BUNDLED)
    defaults = GenerationDefaults((1,), {})
    served = Served(
        ("m",), tokenizer, ChatTemplate(tokenizer), defaults, 4096, False, "hermes", "print"
    )
    pool = EnginePool([{}], ServerLimits())
    api = Api(served, pool, ServerLimits(), "1", {"engine": {}})
    engines: Any = Engines(refuses)
    monkeypatch.setattr(EngineSlot, "serving", property(lambda self: engines))
    client = TestClient(create_app(api, None))
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "stream": stream})
    assert answer.status_code == (400 if refuses else 200)
    assert len(engines.seen) == 1
    assert engines.seen[0]() is None
    pool.kill()


def test_the_engine_keeps_no_prompt_that_it_refused(no_collection: None):
    config = {"model": str(BUNDLED), "device": "cpu", "max_model_len": 64, "max_num_seqs": 2}
    engine = Engine(EngineConfig.from_dict(config))
    for prompt in ((5,) * 100, (99_999,)):
        request = Request("a", prompt, SamplingParams(max_tokens=1), (1,))
        seen = weakref.ref(request)
        with pytest.raises(RequestError):
            engine.add(request)
        del request
        assert seen() is None


def test_memory_is_given_back_after_large_bodies_only(monkeypatch: pytest.MonkeyPatch):
    found = MemoryTrimmer()
    trimmed: list[int] = []
    found.trim = trimmed.append
    monkeypatch.setattr(memory, "TRIM_SECONDS", 0.001)

    async def work() -> None:
        running = asyncio.create_task(found.run())
        found.note(LARGE_BODIES - 1)
        await asyncio.sleep(0.05)
        assert not trimmed
        found.note(1)
        await asyncio.sleep(0.2)
        assert trimmed == [0] * TRIMS
        running.cancel()

    asyncio.run(work())


def test_bodies_are_noted(monkeypatch: pytest.MonkeyPatch):
    pool = EnginePool([{}], ServerLimits())
    api = Api(SimpleNamespace(names=("m",)), pool, ServerLimits(), "1", {"engine": {}})  # type: ignore[arg-type]
    body = json.dumps({"prompt": "word " * 1000}).encode()
    TestClient(create_app(api, None)).post(
        "/v1/completions", content=body, headers={"content-type": "application/json"}
    )
    assert api.memory.size == len(body)
    pool.kill()
