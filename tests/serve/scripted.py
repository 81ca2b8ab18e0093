"""The plain app over an engine that says what it is told to: for tests of how answers are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from starlette.testclient import TestClient

from rorqual.engine.scheduling.scheduler_output import TokenLogprobs
from rorqual.models.hub import BUNDLED
from rorqual.request import Request
from rorqual.serve.engines.job import EngineJob
from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.http.app import Api, create_app
from rorqual.serve.http.request_builder import Served
from rorqual.serve.limits import ServerLimits
from rorqual.serve.messages import Output, Snapshot
from rorqual.text.chat_template import ChatTemplate
from rorqual.text.generation_config import GenerationDefaults
from rorqual.text.tokenizer import Tokenizer

NAME = "scripted"
EOS = 1


class ScriptedEngine:
    """Stands for a client of an engine: answers each request with `text`, token by token, as if
    `max_tokens` allowed all of it. error: fails the request after that."""

    index = load = 0
    info = SimpleNamespace(max_model_len=4096, max_num_seqs=4)
    snapshot = Snapshot(0.0)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.live: dict[str, Any] = {}
        self.ended: list[Any] = []
        self.reset()

    def reset(self) -> None:
        self.text = "Hello"
        self.finish = "stop"
        self.cached = 0
        self.error: Exception | None = None
        self.seen: list[Request] = []

    @property
    def prompt(self) -> str:
        """Of the last request."""
        return self.tokenizer.decode(list(self.seen[-1].prompt), skip_special_tokens=False)

    def add(
        self, request: Request, every_step: bool, job: EngineJob, choice: int, tokens: int
    ) -> None:
        self.seen.append(request)
        ids = self.tokenizer.encode(self.text, False)
        if self.finish == "stop":
            ids.append(EOS)
        outputs = [Output(request.id, [token], cached=self.cached) for token in ids]
        if request.params.logprobs is not None:
            for output in outputs:
                output.logprobs = [TokenLogprobs(-0.5, 1, (output.tokens[0], 7), (-0.5, -1.5))]
        if not self.error:
            outputs[-1].finish = self.finish
            outputs[-1].stop_token = EOS if self.finish == "stop" else None
        asyncio.get_running_loop().create_task(self._feed(job, choice, outputs, every_step))

    async def _feed(
        self, job: EngineJob, choice: int, outputs: list[Output], every_step: bool
    ) -> None:
        if every_step or self.error:
            for output in outputs:
                job.feed(choice, output)
                while job.items and job.error is None:  # one event each
                    await asyncio.sleep(0)
        else:
            first = outputs[0]
            first.tokens = [output.tokens[0] for output in outputs]
            first.finish = outputs[-1].finish
            first.stop_token = outputs[-1].stop_token
            if first.logprobs is not None:
                first.logprobs = [(output.logprobs or [])[0] for output in outputs]
            job.feed(choice, first)
        if self.error:
            job.fail(self.error)

    def cancel(self, ids: list[str]) -> None:
        pass

    def end_text(self, name: str, stopped: bool) -> None:
        pass


class Scripted:
    """`engine` is told what to say; `client` asks."""

    def __init__(self, api: Api, engine: ScriptedEngine, key: str | None = None) -> None:
        self.api = api
        self.engine = engine
        self.client = TestClient(create_app(api, key))

    def reset(self) -> Scripted:
        """As new, for the next test."""
        self.engine.reset()
        self.api.draining = False
        return self

    def ask(self, path: str, **body: Any) -> Any:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refusal(self, path: str, **body: Any) -> Any:
        """The error of a request that is the caller's mistake."""
        answer = self.client.post(path, content=json.dumps(body), headers=JSON)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events; each must be named as its data says."""
        answer = self.client.post(path, json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = []
        for part in answer.text.removesuffix("\n\n").split("\n\n"):
            name, data = part.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found


JSON = {"content-type": "application/json"}
# what a model says in these tests
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "a"}}\n</tool_call>'


@contextmanager
def scripted(reasoning: bool = True, key: str | None = None) -> Iterator[Scripted]:
    """reasoning: the vocabulary has <think> and </think>."""
    tokenizer = Tokenizer(BUNDLED)
    if reasoning:
        tokenizer.raw.add_tokens(["<think>", "</think>"])
    engine = ScriptedEngine(tokenizer)
    served = Served(
        (NAME,),
        tokenizer,
        ChatTemplate(tokenizer),
        GenerationDefaults((EOS,), {}),
        4100,
        reasoning,
        "hermes",
        "print",
    )
    pool = EnginePool([{}], ServerLimits())
    slot: Any = SimpleNamespace(serving=engine, index=0, client=None, child=None)
    pool.engines = [slot]
    yield Scripted(Api(served, pool, ServerLimits(), "1", {"engine": {}}), engine, key)
    pool.kill()
