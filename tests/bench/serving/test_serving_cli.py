"""`rorqual bench serve` from the command line: what it prints, writes and ends with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_process import Fake
from measuring import steady
from typer.testing import CliRunner

from rorqual.cli.bench import app
from rorqual.errors import ConfigError, TargetError

SMALL = ("--input-len", "12", "--output-len", "8")


def run(fake: Fake | None, *arguments: str, how: Mapping[str, Any] | None = None):
    url = ("--base-url", fake.url) if fake else ()
    body = ("--extra-body", json.dumps({"fake": how or {}})) if fake else ()
    return CliRunner().invoke(app, ["serve", *url, *body, *arguments])


def test_one_run_prints_the_table_and_writes_provenance(fake: Fake, tmp_path: Path):
    path = tmp_path / "one.json"
    done = run(
        fake,
        *SMALL,
        "--max-concurrency",
        "2",
        "--num-prompts",
        "4",
        "--api-key",
        "s3cret",
        "--card",
        "a card",
        "--json",
        str(path),
    )
    assert done.exit_code == 0, done.output
    assert "============ Serving Benchmark Result ============" in done.stdout
    assert re.search(r"Successful requests: +4\b", done.stdout)
    page = json.loads(path.read_text())
    assert page["provenance"]["server"]["version"] == {"version": "9.8.7"}
    assert page["provenance"]["server"]["info"] == {"gpu": "Fake GPU", "tp_size": 2}
    assert page["provenance"]["server"]["card"] == "a card"
    assert page["provenance"]["client"]["rorqual"]
    assert page["model_id"] == "fake", "asked of /v1/models"
    assert page["seed"] == 0
    assert "s3cret" not in path.read_text()


def test_failed_requests_make_the_status_1_and_are_listed(fake: Fake):
    failing = ("--num-warmups", "0", "--max-concurrency", "2", "--num-prompts", "4")
    done = run(fake, *SMALL, *failing, how={"fail": "status", "status": 500})
    assert done.exit_code == 1
    assert "4 x HTTP 500: the fake refuses" in done.stderr
    assert re.search(r"Failed requests: +4\b", done.stdout)


@pytest.mark.exhaustive
@steady
def test_a_sweep_with_an_slo_search_and_charts(fake: Fake, tmp_path: Path):
    """TPOT is 2 ms + 1 ms a request open: 100 tokens/s/user hold up to about 8."""
    path = tmp_path / "sweep.json"
    load = (
        "--sweep",
        "2/24",
        "--slo",
        "ttft=2s,tps_user=100",
        "--slo-probes",
        "4",
        "--prompts-per-concurrency",
        "2",
        "--gpus",
        "2",
    )
    how = {"itl": 0.002, "itl_per_open": 0.001}
    done = run(fake, *SMALL, *load, "--label", "a", "--json", str(path), how=how)
    assert done.exit_code == 0, done.output
    page = json.loads(path.read_text())
    counts = [row["max_concurrency"] for row in page["rows"]]
    assert counts == sorted(counts)
    assert {2, 24} < set(counts)
    assert len(counts) <= 6
    best = page["slo"]["max_concurrency"]
    assert 2 <= best < 12
    assert f"highest concurrency that keeps ttft=2s, tps_user=100: {best}," in done.stdout
    chosen = next(row for row in page["rows"] if row["max_concurrency"] == best)
    assert (
        page["slo"]["output_throughput"]
        == chosen["output_throughput"]
        == 2 * chosen["output_throughput_per_gpu"]
    )
    assert chosen["median_tpot_ms"] <= 10
    assert page["slo"]["broken_by"][0].startswith("median_tpot_ms")
    assert [row["num_prompts"] for row in page["rows"]] == [2 * count for count in counts]
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "<svg" in path.with_suffix(".html").read_text()
    both = run(
        None,
        "--compare",
        str(path),
        str(path.rename(tmp_path / "b.json")),
        "--chart",
        str(tmp_path / "both"),
    )
    assert isinstance(both.exception, ConfigError), "the first name is gone"
    copy = tmp_path / "c.json"
    copy.write_text((tmp_path / "b.json").read_text())
    both = run(
        None, "--compare", str(tmp_path / "b.json"), str(copy), "--chart", str(tmp_path / "both")
    )
    assert both.exit_code == 0, both.output
    assert both.stdout.count("(1.00x)") >= 5
    assert (tmp_path / "both.png").exists()
    assert (tmp_path / "both.html").exists()


def test_an_slo_search_ends_in_time(fake: Fake, tmp_path: Path):
    path = tmp_path / "slo.json"
    bounds = ("--slo-seconds", "0.01", "--send-seconds", "0.1", "--run-seconds", "5")
    done = run(fake, *SMALL, "--slo", "ttft=2s", "--slo-start", "2", *bounds, "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "--slo-seconds ended the search" in done.stdout
    page = json.loads(path.read_text())["slo"]
    assert page["out_of_time"]
    assert page["probes"] == [{"concurrency": 2, "kept": True}]


def test_an_unmet_slo_ends_with_1(fake: Fake):
    done = run(
        fake,
        *SMALL,
        "--slo",
        "ttft=1ms",
        "--slo-start",
        "2",
        "--prompts-per-concurrency",
        "2",
        how={"ttft": 0.02},
    )
    assert done.exit_code == 1
    assert "no concurrency tried keeps ttft=1ms; 1 breaks it: median_ttft_ms" in done.stdout


@steady
def test_a_trace_is_replayed(fake: Fake, tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            f'{{"timestamp": {100 * i}, "input_length": 10, "output_length": 3, "hash_ids": '
            f"[{i}]}}\n"
            for i in range(3)
        )
    )
    done = run(
        fake,
        "--dataset-name",
        "trace",
        "--dataset-path",
        str(path),
        "--num-warmups",
        "0",
        "--save-detailed",
        "--json",
        str(tmp_path / "t.json"),
    )
    assert done.exit_code == 0, done.output
    page = json.loads((tmp_path / "t.json").read_text())
    assert page["start_times"] == pytest.approx([0, 0.1, 0.2], abs=0.08)
    assert page["output_lens"] == [3, 3, 3]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--endpoint", "/v1/embeddings"), "endpoint"),
        (("--endpoint", "/v1/chat/completions", "--prompt-format", "ids"), "takes text"),
        (("--dataset-name", "trace"), "--dataset-path"),
        (("--dataset-name", "sonnet"), "accepted: random"),
        (("--slo", "speed=1"), "accepted: ttft"),
        (("--goodput", "itl:3"), "goodput"),
        (("--extra-body", "[1]"), "JSON object"),
        (("--header", "x"), "NAME=VALUE"),
        (("--repeats", "0"), "repeats"),
        (("--metric-percentiles", "0,99"), "percentiles"),
        (("--flush-cache", "/no_such_page", "--num-warmups", "0"), "flushing the cache"),
        (("--tokenizer", "no/such/folder"), "neither a folder"),
        (("--compare", "only-one.json"), "two result files"),
    ],
)
def test_a_users_mistake_is_a_typed_error(fake: Fake, arguments: tuple[str, ...], words: str):
    done = run(fake, *SMALL, "--num-prompts", "2", *arguments)
    assert isinstance(done.exception, Exception), done.output
    assert done.exit_code != 0
    assert words in str(done.exception)


def test_no_listener_is_one_error():
    done = run(Fake(9), *SMALL)
    assert isinstance(done.exception, TargetError)
    assert "is the server up" in str(done.exception)


@pytest.mark.parametrize(
    "arguments",
    [("--sweep", "1,x"), ("--sweep", "1,2", "--max-concurrency", "4"), ("a-file.json",)],
)
def test_a_bad_combination_of_options_is_a_usage_error(fake: Fake, arguments: tuple[str, ...]):
    done = run(fake, *SMALL, *arguments)
    assert done.exit_code == 2
    assert "Invalid value" in done.stderr
