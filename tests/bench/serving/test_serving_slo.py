"""Objectives, the search for the highest concurrency that keeps one, goodput limits and the
server's speculation counters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rorqual.bench.serving.metrics import GoodputLimits
from rorqual.bench.serving.server_info import SpeculationCounters, parse_counters
from rorqual.bench.serving.slo import TOLERANCE, ConcurrencySearch, Objective
from rorqual.errors import ConfigError


def search(true: int, **settings: int) -> tuple[int | None, list[int]]:
    """Against a server that keeps the objective up to `true`."""
    state = ConcurrencySearch(**settings)
    asked = []
    while (count := state.next()) is not None:
        asked.append(count)
        state.tell(count, count <= true)
    return state.bracket[0], asked


@given(true=st.integers(1, 3000), start=st.integers(1, 512))
def test_the_search_brackets_and_halves(true: int, start: int):
    found, asked = search(true, start=start, most=4096, probes=30)
    assert found is not None
    assert found <= true
    assert true < max(found + 1, found * TOLERANCE) + 1, (
        "within 5 %, or exactly where that is less than one"
    )
    assert len(set(asked)) == len(asked) <= 14
    assert max(asked) <= 4096


def test_the_search_is_bounded():
    assert search(10**6, start=4, most=4096, probes=30) == (4096, [4, 16, 64, 256, 1024, 4096])
    assert search(0, start=16, most=64, probes=30) == (None, [16, 4, 1])
    assert len(search(777, start=4, most=4096, probes=4)[1]) == 4


def test_known_rows_are_not_measured_again():
    state = ConcurrencySearch(known={8: True, 64: False}, probes=20)
    asked = []
    while (count := state.next()) is not None:
        asked.append(count)
        state.tell(count, count <= 20)
    assert state.bracket[0] == 20
    assert all(8 < count < 64 for count in asked)


def test_a_failure_below_a_success_wins():
    """Noise: 16 broke it, 64 kept it. What is reported lies below the first failure."""
    assert ConcurrencySearch(known={4: True, 16: False, 64: True}).bracket == (4, 16)


ROW = {
    "failed": 0,
    "completed": 5,
    "median_ttft_ms": 1500.0,
    "p99_ttft_ms": 2500.0,
    "median_tpot_ms": 49.0,
    "p99_tpot_ms": 60.0,
}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("ttft=2s,tps_user=20", True),
        ("ttft=1499ms", False),
        ("ttft:1501", True),
        ("p99_ttft=2s", False),
        ("tps_user=20.5", False),
        ("p99_tps_user=20", False),
        ("p99_tps_user=16.6,median_ttft=2s", True),
        ("itl=5s", False),
    ],
)
def test_objectives(text: str, kept: bool):
    objective = Objective.parse(text)
    assert objective.kept(ROW) is kept
    assert bool(objective.broken_by(ROW)) is not kept


def test_a_failed_request_breaks_any_objective():
    objective = Objective.parse("ttft=1h".replace("1h", "3600s"))
    assert objective.kept(ROW)
    assert not objective.kept(ROW | {"failed": 1})
    assert objective.broken_by(ROW | {"failed": 1}) == ["1 failed requests"]


def test_the_rate_a_chart_can_show():
    assert Objective.parse("ttft=2s,tps_user=20").tps_user == pytest.approx(20)
    assert Objective.parse("ttft=2s,p99_tps_user=20").tps_user is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ttft",
        "ttft=0",
        "ttft=2h",
        "tps_user=x",
        "tps_user=-1",
        "speed=3",
        "p42_ttft=1s",
        "ttft=nan",
    ],
)
def test_a_bad_objective_is_refused(text: str):
    with pytest.raises(ConfigError):
        Objective.parse(text)


def test_goodput_limits_in_both_spellings():
    assert GoodputLimits.parse(["ttft:2000", "tpot=50ms", "e2el=30s"]) == GoodputLimits(
        ttft=2.0, tpot=0.05, e2el=30.0
    )
    assert not GoodputLimits.parse([])
    for bad in (["itl:5"], ["ttft"], ["ttft:-1"]):
        with pytest.raises(ConfigError):
            GoodputLimits.parse(bad)


VLLM = """
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 50.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 450.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 200.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 90.0
"""


def test_counters_of_vllm_add_up_over_engines():
    found = parse_counters(VLLM)
    assert (found.drafts, found.accepted) == (150, 240)
    assert found.accept_length(SpeculationCounters(drafts=50, accepted=40)) == (
        3.0,
        "server counters",
    )
    assert found.accept_length(found) is None, "no drafts in between"
    assert found.accept_length(SpeculationCounters()) is None, "no state to compare with"


def test_a_histogram_and_a_gauge_of_accepted_lengths():
    histogram = (
        "rorqual_accepted_length_sum 30\nrorqual_accepted_length_count "
        '10\nrorqual_accepted_length_bucket{le="1"} 2\n'
    )
    assert parse_counters(histogram).accept_length(SpeculationCounters(drafts=5, emitted=10)) == (
        4.0,
        "server counters",
    )
    length, source = parse_counters('sglang:spec_accept_length{model="m"} 2.44').accept_length(
        SpeculationCounters()
    ) or (0, "")
    assert length == 2.44
    assert "not of this run" in source
    assert parse_counters("other 1\nbroken{ 2").accept_length(SpeculationCounters()) is None
