"""What a server's span says of a completion, over an engine that is told what to say."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from starlette.testclient import TestClient

from rorqual.serve.engines.phases import note_phase
from rorqual.serve.errors import engine_died
from rorqual.serve.http.app import create_app
from rorqual.serve.http.spans.answers import note_answer
from rorqual.serve.messages import RequestPhase
from tests.serve.scripted import Scripted, scripted
from tests.telemetry.recorded import (
    PARENT,
    TRACE,
    TRACEPARENT,
    Recorded,
    attributes,
    failed,
    id_of,
    parent_of,
    trace_of,
)

HEADERS = {"traceparent": TRACEPARENT, "x-request-id": "mine"}


@pytest.fixture(scope="module")
def one() -> Iterator[Scripted]:
    with scripted(reasoning=False) as found:
        yield found


@pytest.fixture
def recorded(one: Scripted) -> Recorded:
    one.reset()
    found = Recorded()
    one.client = TestClient(create_app(one.api, None, None, found.tracer))
    return found


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "A whale", "max_tokens": 9, "temperature": 0.5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "A"}], "stream": True},
    "/v1/responses": {"input": "A"},
    "/v1/messages": {"messages": [{"role": "user", "content": "A"}], "max_tokens": 9},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_completion_is_one_span(one: Scripted, recorded: Recorded, path: str) -> None:
    answer = one.client.post(path, json={"model": "scripted", **BODIES[path]}, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    (span,) = recorded.spans
    assert (span.name, trace_of(span), parent_of(span)) == (f"POST {path}", TRACE, PARENT)
    assert not failed(span)
    said = attributes(span)
    assert said["gen_ai.request.id"] == "mine"
    assert said["gen_ai.response.model"] == "scripted"
    assert said["http.response.status_code"] == 200
    tokens = len(one.engine.tokenizer.encode("Hello", False)) + 1
    assert said["gen_ai.usage.output_tokens"] == said["gen_ai.usage.completion_tokens"] == tokens
    prompt = len(one.engine.seen[-1].prompt)
    assert said["gen_ai.usage.input_tokens"] == said["gen_ai.usage.prompt_tokens"] == prompt
    assert said["gen_ai.response.finish_reasons"] == ("stop",)
    assert said["gen_ai.request.stream"] == ("stream" in BODIES[path])
    if path == "/v1/completions":
        assert said["gen_ai.request.temperature"] == 0.5
        assert said["gen_ai.request.max_tokens"] == 9
        assert said["gen_ai.operation.name"] == "text_completion"


def test_a_callers_mistake_is_no_failure_and_a_dead_engine_is(
    one: Scripted, recorded: Recorded
) -> None:
    assert one.client.post("/v1/completions", json={"prompt": 3}).status_code == 400
    one.engine.error = engine_died()
    for stream in (False, True):
        one.client.post("/v1/completions", json={"prompt": "A", "stream": stream})
    wrong, whole, stream = recorded.spans
    assert attributes(wrong)["http.response.status_code"] == 400
    assert [failed(span) for span in (wrong, whole, stream)] == [False, True, True]
    assert attributes(stream)["error.type"] == "engine_dead"
    assert one.client.get("/health").status_code in (200, 503)
    assert len(recorded.spans) == 3  # probes have none


def test_phases_are_its_children(recorded: Recorded) -> None:
    span = recorded.tracer.start("request", {})
    details = {"rorqual.kv.pages": 3, "rorqual.kv.bytes": 96}
    lost = {**details, "error.type": "pages_lost"}
    note_phase(span, 0, RequestPhase("7", "kv_transfer", 1.0, 1.0, 2.0, lost))
    note_phase(span, 0, RequestPhase("7", "queue", 1.0, 2.0, 2.25, {}))
    note_phase(span, 0, RequestPhase("7", "prefill", 1.0, 2.25, 3.0, {}))
    note_phase(span, 1, RequestPhase("8", "prefill", 1.0, 2.25, 9.0, {}))
    note_phase(span, 0, RequestPhase("7", "decode", 1.0, 3.0, 5.0, {}))
    span.end()
    *phases, whole = recorded.spans
    assert [phase.name for phase in phases] == [
        *("kv_transfer", "queue", "prefill", "prefill", "decode")
    ]
    assert {parent_of(phase) for phase in phases} == {id_of(whole)}
    assert [failed(phase) for phase in phases] == [True, False, False, False, False]
    assert attributes(phases[0])["rorqual.kv.bytes"] == 96
    said = attributes(whole)
    assert said["gen_ai.latency.time_in_queue"] == 0.25
    assert said["gen_ai.latency.time_in_model_prefill"] == 0.75
    assert said["gen_ai.latency.time_to_first_token"] == 2.0
    assert said["gen_ai.latency.time_in_model_decode"] == 2.0
    assert said["gen_ai.latency.e2e"] == 4.0


@pytest.mark.parametrize(
    ("offered", "pages"),
    [({"remote_num_pages": 3}, 3), ([{"remote_num_pages": 3}, None, {"remote_num_pages": 4}], 7)],
)
def test_pages_of_all_prompts_are_counted(offered: Any, pages: int) -> None:
    noted: dict[str, Any] = {}
    more = {"kv_transfer_params": offered}
    call: Any = SimpleNamespace(replies=[], cached_tokens=0, more=more)
    note_answer(cast(Any, SimpleNamespace(recording=True, set=noted.update)), call)
    assert noted["rorqual.kv.pages_offered"] == pages
