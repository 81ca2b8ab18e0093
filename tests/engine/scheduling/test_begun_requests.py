"""Requests whose answers were begun elsewhere: they go on as if their first tokens had been drawn
here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rorqual.engine.scheduling.dp_scheduler import DataParallelScheduler
from rorqual.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from rorqual.errors import RequestError
from rorqual.request import FinishReason, Request, SamplingParams
from tests.engine.fake_runner import FakeRunner, Loop, check_idle, expected

VOCAB = 97
CONFIG = SchedulerConfig(
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, num_pages=33, page_size=4
)
PROMPT = (5, 6, 7, 8, 9)


def ask(name: str, outputs: tuple[int, ...] = (), **params: Any) -> Request:
    given: dict[str, Any] = {"max_tokens": 12, **params}
    return Request(name, PROMPT, SamplingParams(**given), outputs=outputs)


@pytest.mark.parametrize("caching", [True, False])
def test_what_follows_is_what_would_have_followed(caching: bool) -> None:
    want = expected(ask("whole"), CONFIG.max_model_len, VOCAB)
    scheduler = Scheduler(replace(CONFIG, prefix_caching=caching))
    loop = Loop(scheduler, FakeRunner.of(scheduler, VOCAB), 1)
    for begun in range(12):
        assert scheduler.add(ask(f"r{begun}", tuple(want[:begun]))) is None
        loop.drain(300)
        assert loop.outputs[f"r{begun}"] == want[begun:]
    check_idle(scheduler)


def test_cached_tokens_are_those_of_the_prompt() -> None:
    scheduler = Scheduler(CONFIG)
    loop = Loop(scheduler, FakeRunner.of(scheduler, VOCAB), 1)
    scheduler.add(ask("first"))
    loop.drain(300)
    scheduler.add(ask("again", tuple(loop.outputs["first"][:11])))
    sequence = scheduler.sequences["again"]
    loop.drain(300)
    assert scheduler.prefix.hits > len(PROMPT)
    assert sequence.num_cached_prompt == len(PROMPT)


@pytest.mark.parametrize("make", [Scheduler, lambda config: DataParallelScheduler(config, 2)])
def test_one_with_all_its_tokens_is_over(make: Any) -> None:
    scheduler = make(CONFIG)
    assert scheduler.add(ask("full", (1,) * 12)) is FinishReason.LENGTH
    assert scheduler.add(ask("context", (1,) * 59, max_tokens=None)) is FinishReason.LENGTH
    with pytest.raises(RequestError, match=r"13 tokens of the answer were given; .* at most 12"):
        scheduler.add(ask("more", (1,) * 13))
    with pytest.raises(RequestError, match=r"60 tokens .* at most 59"):
        scheduler.add(ask("long", (1,) * 60, max_tokens=None))
    assert not scheduler.has_work
    assert scheduler.add(ask("full")) is None, "its name was never in use"
