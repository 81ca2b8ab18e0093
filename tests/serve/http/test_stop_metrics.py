"""Requests that end with a stop string, or without a token, in /metrics and /stats of a server."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

import pytest

from tests.serve.http.test_metrics_names import Samples, scraped, settled
from tests.serve.running import Running, start_server

PATH = "/v1/completions"
BODY = {"prompt": "It was", "max_tokens": 50, "temperature": 0}
STOPPED = {**BODY, "stop": ["ing"]}
REASONS = ("stop", "length", "abort")
# observed once for each request that was answered
ONCE = (
    "time_to_first_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)


def ask(server: Running, body: dict[str, Any]) -> tuple[list[str], int]:
    """How each choice ended, and the tokens that the client's usage counts."""
    if not body.get("stream"):
        status, answer = server.request("POST", PATH, body)
        assert status == 200, answer
        ends = [choice["finish_reason"] for choice in answer["choices"]]
        return ends, answer["usage"]["completion_tokens"]
    body = {**body, "stream_options": {"include_usage": True}}
    status, text = server.request("POST", PATH, body)
    assert status == 200, text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    found = {
        choice["index"]: choice["finish_reason"]
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"]
    }
    return [found[place] for place in sorted(found)], events[-1]["usage"]["completion_tokens"]


def rested(server: Running) -> Samples:
    """Figures of engines at rest that were taken after this call: all that came before counts. An
    idle engine sends them once a second."""
    start = time.monotonic()

    def taken() -> bool:
        engines = server.get("/stats")["engines"]
        past = time.monotonic() - start
        return all(one["age_seconds"] < past and not one["open"] for one in engines)

    server.wait_until(taken)
    return settled(server)


class Counted:
    """What a server's figures have grown by, under one set of names."""

    def __init__(self, server: Running, before: Samples, prefix: str):
        self.before = before
        self.now = settled(server)
        self.prefix = prefix

    def total(self, name: str) -> float:
        name = f"{self.prefix}:{name}"
        return sum(self.now[name].values()) - sum(self.before.get(name, {}).values())

    @property
    def ends(self) -> dict[str, float]:
        """Requests by how they ended, without those that did not grow."""
        found = {}
        for reason in REASONS:
            totals = []
            for each in (self.now, self.before):
                values = each.get(f"{self.prefix}:request_success_total", {})
                totals.append(
                    sum(n for key, n in values.items() if dict(key)["finished_reason"] == reason)
                )
            found[reason] = totals[0] - totals[1]
        return {reason: count for reason, count in found.items() if count}


def wait_for_ends(server: Running, before: Samples, count: int) -> None:
    """Until the newest figures have so many more requests."""
    server.wait_until(lambda: sum(Counted(server, before, "rorqual").ends.values()) >= count)


def check(server: Running, before: Samples, ends: dict[str, int], tokens: int) -> None:
    """Both sets of names count these requests, which have so many tokens in all."""
    count = sum(ends.values())
    wait_for_ends(server, before, count)
    for prefix in ("rorqual", "vllm"):
        found = Counted(server, before, prefix)
        assert found.ends == ends
        assert found.total("generation_tokens_total") == tokens
        assert found.total("request_generation_tokens_sum") == tokens
        for name in ONCE:
            assert found.total(f"{name}_count") == count, name
        assert found.total("inter_token_latency_seconds_count") == max(0, tokens - count)
        several = found.total("request_time_per_output_token_seconds_count")
        assert several == (count if tokens > count else 0)
        parts = ("request_prefill_time_seconds", "request_decode_time_seconds")
        assert found.total("request_inference_time_seconds_sum") == pytest.approx(
            sum(found.total(f"{name}_sum") for name in parts)
        )


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_a_stop(server: Running, stream: bool) -> None:
    before = rested(server)
    finished = server.get("/stats")["engines"][0]["finished"]
    tokens = 0
    for _ in range(2):
        ends, used = ask(server, {**STOPPED, "stream": stream})
        assert ends == ["stop"]
        tokens += used
    assert 4 < tokens < 100
    check(server, before, {"stop": 2}, tokens)
    now = server.get("/stats")["engines"][0]["finished"]
    assert now["stop"] == finished.get("stop", 0) + 2
    assert now.get("abort", 0) == finished.get("abort", 0)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_in_the_last_token(server: Running, stream: bool, more: int) -> None:
    """Or in the one before, when the engine may have sampled the last."""
    _, used = ask(server, STOPPED)
    before = rested(server)
    ends, again = ask(server, {**STOPPED, "max_tokens": used + more, "stream": stream})
    assert (ends, again) == (["stop"], used)
    check(server, before, {"stop": 1}, used)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_does_not_come(server: Running, stream: bool) -> None:
    before = rested(server)
    ends, used = ask(server, {**BODY, "stop": ["鯨"], "max_tokens": 9, "stream": stream})
    assert (ends, used) == (["length"], 9)
    check(server, before, {"length": 1}, 9)


@pytest.mark.parametrize("stream", [False, True])
def test_one_choice_of_two_stops_by_its_string(server: Running, stream: bool) -> None:
    body = {**BODY, "temperature": 1.0, "seed": 11, "n": 2, "max_tokens": 30, "ignore_eos": True}
    status, answer = server.request("POST", PATH, body)
    assert status == 200
    one, other = [choice["text"] for choice in answer["choices"]]
    places = range(10, len(one) - 8)
    stop = next(one[i : i + 4] for i in places if one[i : i + 4] not in other)
    before = rested(server)
    ends, used = ask(server, {**body, "stop": [stop], "stream": stream})
    assert ends == ["stop", "length"]
    assert 31 < used < 60
    check(server, before, {"stop": 1, "length": 1}, used)


@pytest.mark.parametrize("stop", [["鯨"], None])
def test_a_client_that_disconnects_is_an_abort(server: Running, stop: list[str] | None) -> None:
    before = rested(server)
    body = {**BODY, "max_tokens": 400, "ignore_eos": True, "stop": stop, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", PATH, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    answer.close()
    connection.close()
    wait_for_ends(server, before, 1)
    for prefix in ("rorqual", "vllm"):
        found = Counted(server, before, prefix)
        assert found.ends == {"abort": 1}
        assert found.total("time_to_first_token_seconds_count") == 1
        for name in ONCE[1:]:
            assert found.total(f"{name}_count") == 0, name


@pytest.mark.parametrize("more", [{"echo": True}, {"echo": True, "logprobs": 2}, {"stop": ["ing"]}])
def test_no_tokens_were_asked_for(server: Running, more: dict[str, Any]) -> None:
    before = rested(server)
    ends, used = ask(server, {**BODY, "max_tokens": 0, **more})
    assert (ends, used) == (["length"], 0)
    check(server, before, {"length": 1}, 0)


@pytest.mark.exhaustive
def test_engines_of_several_replicas_count_their_own() -> None:
    options = ("--dtype", "float32", "--max-model-len", "256", "--metrics-names", "both")
    with start_server(*options, "--replicas", "2") as server:
        server.wait_until(server.healthy)
        before = rested(server)
        body = {**STOPPED, "n": 4}
        ends, used = ask(server, body)
        assert ends == ["stop"] * 4
        check(server, before, {"stop": 4}, used)
        found = scraped(server)["vllm:request_success_total"]
        by_engine = [
            sum(count for key, count in found.items() if dict(key)["engine"] == engine)
            for engine in ("0", "1")
        ]
        assert min(by_engine) > 0
