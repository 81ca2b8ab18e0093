"""Several engines behind one server: which GPUs each takes, and which engine a request goes to."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rorqual.engine.config import EngineConfig
from rorqual.engine.distributed import worker_process
from rorqual.errors import ConfigError
from rorqual.request import Request, SamplingParams
from rorqual.serve.engines.pool import EXPECTED, SLACK, EnginePool
from rorqual.serve.launch import ServeConfig, check_open_files, engine_options
from rorqual.serve.limits import ServerLimits

FOLDER = Path("model")


# ---- open files


@pytest.mark.parametrize(("limit", "warned"), [(1407, True), (1408, False), (-1, False)])
def test_a_low_limit_of_open_files_is_said(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit: int,
    warned: bool,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    check_open_files(1280)
    assert bool(caplog.records) == warned
    assert not warned or "ulimit -n 1408" in caplog.text


# ---- GPUs


def cards(monkeypatch: pytest.MonkeyPatch, replicas: int, **engine: Any) -> list[list[str]]:
    """The devices of each replica's ranks on one host, as rank 0 and its launcher count them."""
    monkeypatch.setattr(
        worker_process,
        "device_of",
        lambda device: SimpleNamespace(type="cpu" if device == "cpu" else "cuda"),
    )
    found = []
    for options in engine_options(ServeConfig(replicas=replicas, engine=engine), FOLDER):
        config = EngineConfig.from_dict(options)
        found.append(
            [
                worker_process.rank_device(config, config.first_device + rank)
                for rank in range(config.parallel.world)
            ]
        )
    return found


def test_replicas_take_disjoint_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cards(monkeypatch, 3) == [["cuda:0"], ["cuda:1"], ["cuda:2"]]
    assert cards(monkeypatch, 2, device="cuda", tp=2) == [
        ["cuda:0", "cuda:1"],
        ["cuda:2", "cuda:3"],
    ]
    assert cards(monkeypatch, 2, tp=2, dp=2, ep=4)[1] == ["cuda:4", "cuda:5", "cuda:6", "cuda:7"]
    assert cards(monkeypatch, 2, first_device=4, dp=2) == [
        ["cuda:4", "cuda:5"],
        ["cuda:6", "cuda:7"],
    ]
    assert cards(monkeypatch, 2, device="cpu", tp=2) == [["cpu", "cpu"], ["cpu", "cpu"]]
    assert cards(monkeypatch, 1, device="cuda:3") == [["cuda:3"]]


@pytest.mark.parametrize(
    ("server", "engine", "named"),
    [
        ({"replicas": 2}, {"device": "cuda:0"}, "device='cuda:0' names one device for 2 replicas"),
        ({"replicas": 2}, {"launcher": "torchrun", "tp": 2}, "neither replicas nor restart"),
        ({"restart": True}, {"launcher": "torchrun", "tp": 2}, "neither replicas nor restart"),
        ({}, {"tp": 2, "ep": 3}, "ep=3"),
        ({}, {"tpp": 2}, "'tpp'"),
    ],
)
def test_what_replicas_cannot_have_is_refused(
    server: dict[str, Any], engine: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        engine_options(ServeConfig(**server, engine=engine), FOLDER)


# ---- which engine


@dataclass
class Client:
    """As much of an engine's client as choosing needs."""

    index: int
    load: int = 0
    ready: Any = field(default_factory=lambda: SimpleNamespace(is_set=lambda: True))
    info: Any = field(
        default_factory=lambda: SimpleNamespace(max_model_len=100_000, max_num_seqs=8)
    )

    def add(self, request: Request, every_step: bool, job: Any, choice: int, tokens: int) -> None:
        self.load += tokens


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    found = EnginePool([{}, {}, {}], ServerLimits())
    for engine in found.engines:
        engine.client = Client(engine.index)  # type: ignore[assignment]
    yield found
    found.kill()


def sent(
    pool: EnginePool, start: int, length: int = 200, max_tokens: int | None = 10, salt: str = ""
) -> int:
    """The engine that a request goes to; prompts with another `start` share nothing."""
    prompt = tuple(range(start, start + length))
    job = SimpleNamespace(placed=[])
    pool.submit(
        [Request(pool.new_id(), prompt, SamplingParams(max_tokens=max_tokens), cache_salt=salt)],
        False,
        job,
    )  # type: ignore[arg-type]
    return job.placed[0][0].index


def test_new_prompts_go_to_the_engine_with_the_fewest_live_tokens(pool: EnginePool) -> None:
    assert sent(pool, 0, 600) == 0
    assert sent(pool, 1000, 100) == 1
    assert sent(pool, 2000, 300) == 2
    assert sent(pool, 3000, 100) == 1, "two short requests weigh less than a long one"
    assert [engine.client.load for engine in pool.engines] == [610, 220, 310]  # type: ignore[union-attr]


def test_a_prompt_goes_where_its_beginning_is_known(pool: EnginePool) -> None:
    homes = [sent(pool, 1000 * conversation, 400) for conversation in range(3)]
    assert homes == [0, 1, 2]
    assert [sent(pool, 1000 * conversation, 500) for conversation in (2, 0, 1, 2)] == [2, 0, 1, 2]
    assert sent(pool, 2000, 400, salt="another tenant") == 0, (
        "the least loaded: within another salt nothing is known"
    )


def test_a_prefix_is_not_worth_any_queue(pool: EnginePool) -> None:
    home = sent(pool, 0, 400)
    pool.engines[home].client.load += SLACK  # type: ignore[union-attr]
    assert sent(pool, 0, 400) != home
    assert sent(pool, 0, 400) != home, "and now the other one knows it"


def test_a_request_without_a_limit_does_not_drive_its_conversation_away(pool: EnginePool) -> None:
    """It may write to the end of the context, and counts as one that writes as much as many do."""
    home = sent(pool, 0, 400, max_tokens=None)
    assert pool.engines[home].client.load == 400 + EXPECTED  # type: ignore[union-attr]
    assert sent(pool, 0, 500, max_tokens=None) == home


def test_an_engine_that_is_gone_gets_nothing(pool: EnginePool) -> None:
    home = sent(pool, 0, 400)
    pool.engines[home].client = None
    assert sent(pool, 0, 400) != home
