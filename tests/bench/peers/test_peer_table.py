"""Pairs out of a file of rows, and what the table says of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rorqual.bench.peers import table
from rorqual.bench.peers.results import OFFLINE, OURS, Measured, Results
from rorqual.errors import ConfigError

LATENCIES = {key: 10.0 for _, key, _ in table.LATENCIES}


def measured(engine: str, row: str = "1000/1000@256", **given: object) -> Measured:
    figures = LATENCIES | {
        "failed": 0,
        "completed": 9,
        "output_throughput": 100.0,
        "request_throughput": 2.0,
    }
    base = Measured(
        call="a",
        date="2026-11-23T00:00:00+00:00",
        commit="1234abcd",
        card="a card",
        model="shape",
        engine=engine,
        version="1",
        settings="default",
        row=row,
        command=[],
        prefix_cache=False,
        ready_seconds=1.0,
        spread=True,
        routing="spread",
        api_us=20.0,
        figures=figures,
    )
    more = {name: value for name, value in given.items() if name in LATENCIES or name in figures}
    rest = {name: value for name, value in given.items() if name not in more}
    return replace(base, figures=figures | more, **rest)  # type: ignore[arg-type]


def page(path: Path, *rows: Measured, settings: str | None = "default") -> str:
    path.unlink(missing_ok=True)
    results = Results(path)
    for row in rows:
        results.add(row)
    assert Results(path).rows == list(rows), "the file holds what was added"
    return table.page(Results(path), "shape", "vllm", settings, "1000/1000@256")


def test_a_pair_is_of_one_call_and_one_card(tmp_path: Path):
    path = tmp_path / "peers.jsonl"
    assert "| 1000/1000@256 |" in page(path, measured("vllm"), measured(OURS))
    for other in ({"call": "b"}, {"card": "another"}, {"failed": 1}, {"model": "other"}):
        assert "| 1000/1000@256 |" not in page(path, measured("vllm"), measured(OURS, **other))
    assert "| 1000/1000@256 |" not in page(path, measured("vllm", settings="x"), measured(OURS))
    rows = (measured("vllm"), measured(OURS))
    again = [
        replace(row, call="b", figures={**row.figures, "output_throughput": 321.0}) for row in rows
    ]
    assert "| 321 / 321 = 1.00 |" in page(path, *rows, *again), "the last pair counts"


def test_the_best_settings_of_a_row_are_those_of_most_tokens(tmp_path: Path):
    rows = [measured("vllm"), measured(OURS, output_throughput=120.0)]
    fast = measured("vllm", settings="fast", output_throughput=110.0, call="b")
    own = measured(OURS, output_throughput=130.0, call="b")
    found = page(tmp_path / "f", *rows, fast, own, settings=None)
    assert "| 130 / 110 = 1.18 |" in found
    assert "vllm 1, fast" in found


def test_the_verdicts(tmp_path: Path):
    ours = measured(OURS, output_throughput=111.0, p99_itl_ms=11.5, median_ttft_ms=5.0)
    step = measured(OFFLINE)
    offline = replace(step, api_us=None, figures={"step_ms": 9.8, "concurrency": 256})
    found = page(tmp_path / "f", measured("vllm"), ours, offline)
    assert "- PASS: 1000/1000@256, output tokens/s at least 1.10x: 1.110x" in found
    mean = (1.15 * 0.5) ** (1 / 6)
    assert f"- PASS: geometric mean of the latency cells at most 1.00: {mean:.3f} of 6" in found
    assert "- MISS: no latency cell above 1.10: 1 are, the worst 1.15 (1000/1000@256 ITL" in found
    assert "- PASS: API processor time at 256 streams at most 25 us a token: 20.0 us" in found
    assert "- PASS: 1000/1000@256, served steps at most 1.03x of offline's 9.80 ms: 1.020x" in found
    other = replace(offline, commit="5678")
    found = page(tmp_path / "f", measured("vllm"), ours, other)
    assert "- not measured: served steps over offline's" in found
    slow = replace(ours, api_us=26.0, figures={**ours.figures, "median_itl_ms": 10.2})
    found = page(tmp_path / "f", measured("vllm"), slow, offline)
    assert "- MISS: API processor time" in found
    assert "- MISS: 1000/1000@256, served steps" in found


def test_collapsed_routing_does_not_count(tmp_path: Path):
    theirs = measured("vllm", spread=False, routing="dummy weights")
    found = page(tmp_path / "f", theirs, measured(OURS, output_throughput=200.0))
    assert "1000/1000@256 (does not count)" in found
    assert "does not count: dummy weights" in found
    assert "PASS" not in found


def test_a_row_that_was_cut_short_is_measured_again(tmp_path: Path):
    path = tmp_path / "f"
    page(path, measured("vllm"), measured(OURS))
    path.write_text(path.read_text()[:-20])
    results = Results(path)
    assert [row.engine for row in results.rows] == ["vllm"]
    results.add(measured(OURS))
    assert [row.engine for row in Results(path).rows] == ["vllm", OURS]


@pytest.mark.parametrize("text", ["{}\n", "nonsense\n", '{"schema": "other"}\n', "[]\n"])
def test_another_file_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "f"
    path.write_text(text)
    with pytest.raises(ConfigError, match="line 1 is no result"):
        Results(path)
