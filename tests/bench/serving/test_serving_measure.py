"""What `bench serve` measures, against what the fake server injected: its own times of writing,
on the same clock."""

from __future__ import annotations

import asyncio
import json
import math
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fake_process import Fake
from hypothesis import given, settings
from hypothesis import strategies as st
from measuring import measure, new_mark, steady

from rorqual.bench.serving import metrics
from rorqual.bench.serving.client import CHAT, COMPLETIONS, Client, RequestRecord, ServerTarget
from rorqual.bench.serving.load import ArrivalLoad
from rorqual.bench.serving.measure import Data, Method, warnings
from rorqual.bench.serving.metrics import GoodputLimits
from rorqual.bench.serving.prompts import PromptLengths, Vocabulary
from rorqual.errors import ConfigError, TargetError
from rorqual.models.hub import BUNDLED

# seconds that a machine with other work may once add between the fake's write and our read
LATE = 0.25
USUALLY = 0.005  # and what it adds at the median


def assert_close(measured: Sequence[float], true: Sequence[float]) -> None:
    apart = np.abs(np.asarray(measured) - np.asarray(true))
    assert np.median(apart) < USUALLY
    assert apart.max() < LATE


@pytest.mark.parametrize("endpoint", [COMPLETIONS, CHAT])
@steady
def test_times_are_those_the_server_wrote_at(fake: Fake, endpoint: str):
    """TTFT, every ITL, TPOT and E2EL of every request against the server's own record of its
    writes."""
    row = measure(
        fake,
        {"ttft": 0.05, "itl": 0.01, "role_first": 0.0 if endpoint == CHAT else None},
        mark := new_mark(),
        endpoint=endpoint,
    )
    truth = fake.requests(mark)
    assert row["completed"] == len(truth) == 6
    assert row["failed"] == 0
    assert min(row["ttfts"]) >= 0.05, "the chunk that only names the role is no token"
    assert_close(row["ttfts"], [entry["writes"][0] - entry["arrived"] for entry in truth])
    assert [len(itls) for itls in row["itls"]] == [7] * 6
    assert_close(
        np.concatenate(row["itls"]), np.concatenate([np.diff(entry["writes"]) for entry in truth])
    )
    assert_close(row["latencies"], [entry["writes"][-1] - entry["arrived"] for entry in truth])
    true_tpot = [(entry["writes"][-1] - entry["writes"][0]) / 7 for entry in truth]
    assert row["median_tpot_ms"] == pytest.approx(1e3 * np.median(true_tpot), abs=1e3 * USUALLY)
    assert 9 < row["median_tpot_ms"] < 20
    assert row["tps_user"] == pytest.approx(1e3 / row["median_tpot_ms"])
    assert row["mean_e2el_ms"] == pytest.approx(
        row["mean_ttft_ms"] + 7 * row["mean_tpot_ms"], rel=1e-6
    )


@steady
def test_several_tokens_a_chunk_itl_counts_chunks_and_tpot_tokens(fake: Fake):
    row = measure(
        fake,
        {"ttft": 0.02, "itl": 0.04, "per_chunk": 4, "accepted": 3},
        data=Data(lengths=PromptLengths(12, 16), num_prompts=4),
    )
    assert row["total_output_tokens"] == 64
    assert row["total_chunks"] == 16
    assert row["tokens_per_chunk"] == 4
    assert row["median_itl_ms"] == pytest.approx(40, abs=15)
    assert row["median_tpot_ms"] == pytest.approx(3 * row["median_itl_ms"] / 15, rel=0.2)
    assert any("compare TPOT" in sentence for sentence in warnings(row))


def test_accept_length_is_the_difference_over_the_run(fake: Fake):
    """Before this run the counters hold other requests with other lengths."""
    measure(fake, {"accepted": 9})
    row = measure(fake, {"accepted": 2})
    assert row["accept_length"] == 3
    assert row["accept_length_source"] == "server counters"
    assert measure(fake, {})["accept_length"] is None, "no drafts in the run is no data, not 0 or 1"


def test_throughput_is_tokens_over_time_and_adds_up(fake: Fake):
    row = measure(fake, {"ttft": 0.02, "itl": 0.002}, load=ArrivalLoad(concurrency=2))
    assert row["total_input_tokens"] == 6 * 12
    assert row["total_output_tokens"] == 6 * 8 == sum(row["output_lens"])
    assert row["output_throughput"] == pytest.approx(48 / row["duration"])
    assert (
        row["total_token_throughput"]
        == pytest.approx(120 / row["duration"])
        == row["total_throughput"]
    )
    assert row["concurrency"] == pytest.approx(sum(row["latencies"]) / row["duration"])
    assert row["max_concurrent_requests"] == 2
    assert row["output_throughput_per_gpu"] == row["output_throughput"]
    assert 0 < row["client_cpu_cores"] < 2
    assert row["client_cpu_us_per_chunk"] == pytest.approx(
        1e6 * row["client_cpu_cores"] * row["duration"] / 48
    )


@steady
def test_the_peak_is_of_full_seconds_only(fake: Fake):
    assert measure(fake, {"itl": 0.001})["max_output_tokens_per_s"] is None
    row = measure(
        fake,
        {"itl": 0.15, "per_chunk": 2},
        load=ArrivalLoad(concurrency=6),
        data=Data(lengths=PromptLengths(12, 16), num_prompts=6),
    )
    assert 6 * 16 / 2 <= row["max_output_tokens_per_s"] <= 6 * 16


@steady
def test_the_cap_holds_and_the_queue_shows(fake: Fake):
    """One at a time at once: requests wait in the client, and their clocks start when they are
    sent."""
    row = measure(fake, {"ttft": 0.03}, mark := new_mark(), load=ArrivalLoad(concurrency=1))
    truth = fake.requests(mark)
    assert all(after["arrived"] >= before["writes"][-1] for before, after in pairwise(truth))
    assert np.median(row["ttfts"]) == pytest.approx(0.03, abs=2 * USUALLY)
    assert 74 < row["mean_client_queue_ms"] < 74 + 1e3 * LATE, "the mean of 0 to 5 times 30 ms"


@steady
def test_arrivals_at_a_rate(fake: Fake):
    row = measure(fake, {}, mark := new_mark(), load=ArrivalLoad(rate=40, burstiness=math.inf))
    arrived = [entry["arrived"] for entry in fake.requests(mark)]
    assert arrived[-1] - arrived[0] == pytest.approx(5 / 40, abs=0.06)
    assert row["request_rate"] == 40
    assert row["burstiness"] == "inf"


def test_rate_and_cap_together(fake: Fake):
    """40 requests/s arrive, one open at a time of 60 ms each: the server sees the cap, not the
    rate."""
    measure(
        fake,
        {"ttft": 0.06},
        mark := new_mark(),
        load=ArrivalLoad(concurrency=1, rate=40, burstiness=math.inf),
    )
    arrived = [entry["arrived"] for entry in fake.requests(mark)]
    assert min(np.diff(arrived)) >= 0.059


def test_nothing_is_sent_after_its_time(fake: Fake):
    data = Data(lengths=PromptLengths(12, 8), num_prompts=400)
    row = measure(fake, {"itl": 0.005}, load=ArrivalLoad(2, send_seconds=0.2), data=data)
    assert 2 < row["num_prompts"] == row["completed"] < 100
    assert not row["failed"]


def test_what_is_open_when_the_time_is_over_has_failed(fake: Fake):
    data = Data(lengths=PromptLengths(12, 8), num_prompts=400)
    row = measure(fake, {"itl": 0.1}, load=ArrivalLoad(3, run_seconds=0.4), data=data)
    assert row["failures"] == {"not done when the run had taken 0.4 s": 3}
    assert row["duration"] < 0.7


@steady
def test_the_first_requests_may_come_one_after_the_other(fake: Fake):
    mark = new_mark()
    data = Data(lengths=PromptLengths(12, 8), num_prompts=8)
    measure(fake, {"itl": 0.05}, mark, ArrivalLoad(4, ramp_seconds=0.2), data=data)
    times = [entry["arrived"] for entry in fake.requests(mark)]
    gaps = [after - before for before, after in pairwise(times[:4])]
    assert gaps == pytest.approx([0.05] * 3, abs=0.02)
    assert len(times) == 8


@steady
def test_without_streaming_there_are_no_token_times(fake: Fake):
    row = measure(fake, {"ttft": 0.02, "itl": 0.004}, stream=False)
    assert row["completed"] == 6
    assert row["total_output_tokens"] == 48
    assert 20 + 7 * 4 <= row["median_e2el_ms"] < 48 + 1e3 * LATE
    for key in (
        "mean_ttft_ms",
        "median_tpot_ms",
        "p99_itl_ms",
        "tps_user",
        "tokens_per_chunk",
        "max_output_tokens_per_s",
    ):
        assert row[key] is None, key


def test_without_usage_tokens_are_chunks_and_that_is_said(fake: Fake):
    row = measure(fake, {"usage": False})
    assert row["token_source"] == "chunks"
    assert row["total_output_tokens"] == 48
    assert row["total_input_tokens"] == 72, "the lengths asked for"
    assert any("no usage" in sentence for sentence in warnings(row))


def test_prompts_have_the_asked_length_and_order(fake: Fake):
    measure(fake, {}, mark := new_mark())
    measure(fake, {}, again := new_mark())
    bodies = [entry["body"] for entry in fake.requests(mark)]
    assert all(len(body["prompt"]) == 12 for body in bodies)
    assert all(
        body["max_tokens"] == 8 and body["ignore_eos"] and body["temperature"] == 0
        for body in bodies
    )
    assert bodies[0]["stream_options"] == {"include_usage": True}
    assert {tuple(body["prompt"]) for body in bodies} == {
        tuple(entry["body"]["prompt"]) for entry in fake.requests(again)
    }


def test_cached_tokens_are_summed_and_warned_of(fake: Fake):
    row = measure(fake, {"cached": 5})
    assert row["total_cached_tokens"] == 30
    assert any("prefix cache" in sentence for sentence in warnings(row))
    assert measure(fake, {})["total_cached_tokens"] is None


def test_kept_texts_are_counted_again(fake: Fake):
    row = measure(fake, {})
    assert row["generated_texts"] == [" word" * 8] * 6
    again = Vocabulary(BUNDLED, False).tokenizer.encode(" word" * 8, add_special_tokens=False)
    assert row["total_output_tokens_retokenized"] == 6 * len(again)


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ({"fail": "status", "status": 429}, "HTTP 429: the fake refuses"),
        ({"fail": "error", "itl": 0.001}, "error in the answer: the engine died"),
        ({"fail": "cut", "itl": 0.001}, "ClientPayloadError"),
        ({"fail": "hang"}, "timeout: no complete answer within 0.3 s"),
    ],
)
def test_failures_have_causes_and_no_figures(fake: Fake, how: Mapping[str, Any], cause: str):
    row = measure(fake, how, timeout=0.3)
    assert row["failed"] == 6
    assert row["completed"] == 0
    assert sum(row["failures"].values()) == 6
    assert all(found.startswith(cause) for found in row["failures"])
    assert row["output_throughput"] == 0
    assert row["median_ttft_ms"] is None
    assert row["max_output_tokens_per_s"] is None


def test_a_server_that_fails_every_warm_up_is_not_measured(fake: Fake):
    with pytest.raises(TargetError, match="HTTP 503: the fake refuses"):
        measure(fake, {"fail": "status", "status": 503}, method=Method())


def test_no_server():
    with pytest.raises(TargetError, match="every warm-up request failed"):
        measure(Fake(9), {}, method=Method())


def test_warm_ups_come_first_then_the_flush(fake: Fake):
    flushes = fake.log()["flushes"]
    mark = new_mark()
    row = measure(
        fake,
        {},
        mark,
        method=Method(warm_ups=4, repeats=3),
        data=Data(lengths=PromptLengths(12, 40), num_prompts=2),
    )
    entries = fake.requests(mark)
    assert [entry["body"]["max_tokens"] for entry in entries] == 3 * ([32] * 4 + [40] * 2)
    assert fake.log()["flushes"] == flushes + 3
    assert row["cache_flush"] == "/flush_cache"
    prompts = [tuple(entry["body"]["prompt"]) for entry in entries]
    assert len(set(prompts)) == 18, "no warm-up and no repeat sends a prompt that another sent"


def test_repeats_give_medians(fake: Fake):
    row = measure(fake, {"ttft": 0.01}, method=Method(warm_ups=0, repeats=3))
    rows = row["repeats"]
    assert len(rows) == 3
    for key in ("output_throughput", "median_ttft_ms", "p99_e2el_ms"):
        assert row[key] == sorted(one[key] for one in rows)[1]


@steady
def test_goodput_counts_requests_within_the_limits(fake: Fake):
    method = Method(warm_ups=0, limits=GoodputLimits.parse(["ttft:40", "e2el=10s"]))
    assert measure(fake, {"ttft": 0.1}, method=method)["request_goodput"] == 0
    row = measure(fake, {"ttft": 0.001}, method=method)
    assert row["request_goodput"] == pytest.approx(row["request_throughput"])
    assert measure(fake, {})["request_goodput"] is None


def test_the_api_key_is_sent(locked: Fake):
    assert measure(locked, {}, api_key="sk-fake")["completed"] == 6
    row = measure(locked, {}, api_key="wrong")
    assert row["failures"] == {"HTTP 401: wrong API key": 6}


def test_a_busy_client_is_warned_of(fake: Fake):
    row = measure(fake, {})
    assert warnings(row | {"client_cpu_cores": 0.97}) == [
        "the client used 0.97 cores: it may be what was measured"
    ]
    assert warnings(row | {"client_cpu_cores": 0.2}) == []


def test_the_client_reads_fast_enough(fake: Fake):
    """64 streams of 300 tokens as fast as the fake writes. The bound is far below what an idle
    machine reaches (above 50,000 a second)."""
    data = Data(lengths=PromptLengths(4, 300), num_prompts=64)
    row = measure(
        fake,
        {"ttft": 0.1, "itl": 0.0},
        load=ArrivalLoad(concurrency=64),
        method=Method(warm_ups=8),
        data=data,
    )
    assert row["total_chunks"] == 64 * 300
    assert row["client_cpu_us_per_chunk"] < 100


EVENTS = [
    {
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        ]
    },
    {"choices": [{"index": 0, "delta": {"content": "Wal é"}, "finish_reason": None}]},
    # a token that ends no character
    {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": None}]},
    {
        "choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}],
        "usage": {"completion_tokens": 3},
    },
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0}]}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 9,
            "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    },
]


class Pieces:
    """A response whose body comes in given pieces."""

    def __init__(self, pieces: Sequence[bytes]):
        self.content = self
        self.pieces = pieces

    async def iter_any(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece


@settings(deadline=None, max_examples=60)
@given(
    cuts=st.lists(st.integers(0, 900), max_size=12),
    newline=st.sampled_from(["\n", "\r\n"]),
    end=st.booleans(),
)
def test_a_stream_is_read_alike_however_it_is_cut(cuts: list[int], newline: str, end: bool):
    lines = [
        ": ping",
        "",
        *(
            part
            for event in EVENTS
            for part in (f"data: {json.dumps(event, ensure_ascii=False)}", "")
        ),
        "data:[DONE]",
    ]
    body = (newline.join(lines) + (newline if end else "")).encode()
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    record = RequestRecord(9, 4, due=0.0)
    pieces: Any = Pieces([body[a:b] for a, b in pairwise(edges)])
    asyncio.run(Client(ServerTarget(keep_text=True))._read_stream(pieces, record))
    assert len(record.chunks) == 4
    assert (
        record.prompt_tokens,
        record.completion_tokens,
        record.cached_tokens,
        record.finish,
    ) == (9, 4, 2, "tool_calls")
    assert "".join(record.text) == "Wal éhm"


def test_urls_with_and_without_v1():
    for base in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"):
        assert ServerTarget(base).url("/v1/models") == "http://a:1/v1/models"
        assert ServerTarget(base).url("/metrics") == "http://a:1/metrics"
    assert (
        ServerTarget("https://a/gate/v1").url("/v1/completions") == "https://a/gate/v1/completions"
    )
    for bad in ("a:1", "ftp://a", ""):
        with pytest.raises(ConfigError):
            ServerTarget(bad)


def test_record_arithmetic():
    """One request by hand: sent at 1, chunks of 2 tokens at 2, 4, 6, the end at 7."""
    record = RequestRecord(
        10, 6, due=0.5, start=1.0, end=7.0, chunks=array("d", [2.0, 4.0, 6.0]), completion_tokens=6
    )
    assert (record.ttft, record.tpot, record.itls, record.latency) == (1.0, 1.0, [2.0, 2.0], 6.0)
    assert metrics.peak_tokens([record]) == 2.0
    assert (
        metrics.peak_open(
            [
                record,
                RequestRecord(1, 1, 0.0, start=6.0, end=8.0),
                RequestRecord(1, 1, 0.0, start=7.0, end=9.0),
            ]
        )
        == 2
    )
    single = RequestRecord(
        10, 1, 0.0, start=1.0, end=2.0, chunks=array("d", [2.0]), completion_tokens=1
    )
    assert single.tpot is None
    assert GoodputLimits(ttft=1.0, tpot=1e-9).kept(single), "one token has no TPOT to break"
    assert not GoodputLimits(ttft=1.0).kept(
        RequestRecord(1, 1, 0.0, start=1.0, end=1.5, completion_tokens=1)
    ), "no TTFT keeps no limit of it"
