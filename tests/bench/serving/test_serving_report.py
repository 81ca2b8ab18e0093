"""The table, the JSON, comparisons and charts of `bench serve`."""

from __future__ import annotations

import copy
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from measuring import measure
from rich.console import Console

from rorqual.bench import provenance
from rorqual.bench.serving import compare, pareto, report
from rorqual.bench.serving.client import ServerTarget
from rorqual.bench.serving.load import ArrivalLoad
from rorqual.bench.serving.measure import Method
from rorqual.bench.serving.metrics import GoodputLimits
from rorqual.errors import ConfigError

Figures = dict[str, Any]
FACTS = {
    "client": {
        "date": "2025-01-02T03:04:05+00:00",
        "rorqual": "1",
        "git_commit": None,
        "command": ["rorqual"],
    },
    "server": {"info": {"tp": 2}, "card": None, "version": None},
    "label": None,
}


@pytest.fixture(scope="module")
def row(fake) -> Figures:
    method = Method(warm_ups=0, gpus=2, limits=GoodputLimits(ttft=2.0))
    return measure(
        fake, {"ttft": 0.01, "itl": 0.002, "accepted": 1}, load=ArrivalLoad(3), method=method
    )


def test_the_table_has_the_known_shape(row: Figures):
    lines = report.result_table(row).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    assert [line for line in lines if line.startswith("-")] == [
        "---------------Time to First Token----------------",
        "-----Time per Output Token (excl. 1st token)------",
        "---------------Inter-token Latency----------------",
        "----------------End-to-end Latency----------------",
        "----------------Client and Stream-----------------",
    ]
    labels = [line.split(":")[0] for line in lines if ":" in line]
    assert labels[:12] == [
        "Successful requests",
        "Failed requests",
        "Maximum request concurrency",
        "Benchmark duration (s)",
        "Total input tokens",
        "Total generated tokens",
        "Request throughput (req/s)",
        "Request goodput (req/s)",
        "Output token throughput (tok/s)",
        "Peak output token throughput (tok/s)",
        "Peak concurrent requests",
        "Total token throughput (tok/s)",
    ]
    for short in ("TTFT", "TPOT", "ITL", "E2EL"):
        assert [label for label in labels if label.endswith(f"{short} (ms)")] == [
            f"{kind} {short} (ms)" for kind in ("Mean", "Median", "P99")
        ]
    by_label = dict(re.match(r"(.+?):\s+(\S+)", line).groups() for line in lines if ":" in line)  # type: ignore[union-attr]
    assert by_label["Median TTFT (ms)"] == f"{row['median_ttft_ms']:.2f}"
    assert by_label["Accept length"] == "2.00"
    assert by_label["Peak output token throughput (tok/s)"] == "n/a", (
        "a run of less than a second has no peak second"
    )
    assert all(
        line.index(":") < 40 and line[40] == " "
        for line in lines
        if ":" in line and len(line.split(":")[0]) < 39
    )


def test_what_has_no_data_is_na_everywhere(fake):
    row = measure(fake, {}, stream=False)
    text = report.result_table(row)
    assert len(re.findall(r"T(?:TFT|POT) \(ms\):\s+n/a", text)) == 6
    assert not re.search(r"(TTFT|TPOT|ITL) \(ms\):\s+0", text)
    shown = io.StringIO()
    Console(file=shown, width=200).print(report.sweep_table([row], "one"))
    # tok/s/user, TTFT and TPOT twice each, accepted length
    assert shown.getvalue().count("n/a") == 6
    with pytest.raises(ConfigError, match="streaming"):
        pareto.chart({"one": [row]})


VLLM_KEYS = {
    *(
        "duration",
        "completed",
        "failed",
        "total_input_tokens",
        "total_output_tokens",
        "request_throughput",
        "request_goodput",
    ),
    *(
        "output_throughput",
        "total_token_throughput",
        "max_output_tokens_per_s",
        "max_concurrent_requests",
        "date",
        "endpoint_type",
    ),
    *(
        "backend",
        "label",
        "model_id",
        "tokenizer_id",
        "num_prompts",
        "request_rate",
        "burstiness",
        "max_concurrency",
    ),
    *(
        f"{kind}_{name}_ms"
        for name in ("ttft", "tpot", "itl", "e2el")
        for kind in ("mean", "median", "std", "p99")
    ),
}
SGLANG_KEYS = {
    *(
        "backend",
        "dataset_name",
        "request_rate",
        "max_concurrency",
        "random_input_len",
        "random_output_len",
        "random_range_ratio",
    ),
    *(
        "server_info",
        "duration",
        "completed",
        "total_input_tokens",
        "total_output_tokens",
        "total_output_tokens_retokenized",
    ),
    *(
        "request_throughput",
        "input_throughput",
        "output_throughput",
        "total_throughput",
        "concurrency",
        "accept_length",
    ),
    *(
        f"{kind}_{name}_ms"
        for name in ("ttft", "tpot", "e2e_latency")
        for kind in ("mean", "median", "std", "p99")
    ),
    *("mean_itl_ms", "p95_itl_ms", "p99_itl_ms", "sharegpt_output_len"),
}
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}


def test_one_row_lies_flat_under_both_scripts_keys(row: Figures, fake, tmp_path: Path):
    path = tmp_path / "deep" / "one.json"
    report.write_json(path, report.document([row], FACTS))
    page = json.loads(path.read_text())
    assert not VLLM_KEYS - set(page)
    assert not SGLANG_KEYS - set(page)
    assert not DETAILS & set(page)
    assert page["request_rate"] == "inf"
    assert page["server_info"] == {"tp": 2}
    assert set(measure(fake, {})) >= DETAILS
    several = report.document([row, row], FACTS, {"objective": "x"})
    assert len(several["rows"]) == 2
    assert not VLLM_KEYS - set(several["rows"][0]) - {"date", "label"}


def test_keys_stay_out_of_the_command_line():
    shown = provenance.command_line(
        [
            "/x/__main__.py",
            "bench",
            "--api-key",
            "s3cret",
            "--header",
            "A=s3cret",
            "--api-key=s3cret",
            "--seed",
            "1",
        ]
    )
    assert shown == [
        "rorqual",
        "bench",
        "--api-key",
        "***",
        "--header",
        "***",
        "--api-key=***",
        "--seed",
        "1",
    ]
    assert "s3cret" not in repr(ServerTarget(api_key="s3cret", headers={"A": "s3cret"}))


def test_client_facts_name_versions():
    facts = provenance.client_facts()
    assert facts["packages"]["aiohttp"]
    assert facts["host"]["cpus"] >= 1


# ---- comparison


def test_comparison_reads_three_kinds_of_files(row: Figures, tmp_path: Path):
    ours = tmp_path / "ours.json"
    vllm = tmp_path / "vllm.json"
    sglang = tmp_path / "sglang.jsonl"
    slower = copy.deepcopy(row) | {"max_concurrency": 8}
    report.write_json(ours, report.document([row, slower], FACTS | {"label": "main"}))
    base = {
        "max_concurrency": 3,
        "request_rate": "inf",
        "output_throughput": row["output_throughput"] / 2,
        "median_ttft_ms": 5.0,
    }
    vllm.write_text(json.dumps(base | {"median_tpot_ms": 10.0, "median_e2el_ms": 7.0}))
    sglang.write_text(
        "\n".join(
            json.dumps(
                base | {"median_tpot_ms": 0, "median_e2e_latency_ms": 9.0, "max_concurrency": c}
            )
            for c in (3, 8)
        )
    )
    series = compare.read([ours, vllm, sglang])
    assert list(series) == ["main", "vllm", "sglang"]
    assert [len(rows) for rows in series.values()] == [2, 1, 2]
    assert series["vllm"][0]["tps_user"] == 100
    assert series["sglang"][1]["tps_user"] is None
    assert series["sglang"][1]["median_e2el_ms"] == 9.0
    assert series["main"][0]["output_throughput_per_gpu"] == row["output_throughput"] / 2
    shown = io.StringIO()
    Console(file=shown, width=200).print(compare.table(series))
    assert "(1.00x)" in shown.getvalue(), (
        "half the throughput on one GPU is as much a GPU as ours on two"
    )
    assert len(pareto.chart(series).series["sglang"]) == 0
    assert (
        compare.read([ours], gpus=4)["main"][0]["output_throughput_per_gpu"]
        == row["output_throughput"] / 4
    )


@pytest.mark.parametrize("content", ["", "[]", "nonsense", '{"a": 1}', "[1, 2]"])
def test_what_is_no_result_file_is_named(tmp_path: Path, content: str):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"x\.json"):
        compare.read([path])


# ---- charts


def point_row(concurrency: int, user: float, gpu: float, **more: Any) -> Figures:
    base = {
        "max_concurrency": concurrency,
        "tps_user": user,
        "output_throughput_per_gpu": gpu,
        "output_throughput": 2 * gpu,
    }
    lengths = {
        "dataset_name": "random",
        "random_input_len": 1000,
        "random_output_len": 500,
        "num_gpus": 2,
        "model_id": "org/<b>model</b>",
    }
    return base | lengths | more


ROWS = [
    point_row(1, 100, 10),
    point_row(8, 80, 60),
    point_row(64, 30, 200, slo_choice=True),
    point_row(128, 20, 150, slo_probe=True),
]


def test_the_front_is_what_nothing_beats():
    assert pareto.frontier([(1, 5), (2, 4), (1, 4), (2, 1), (2, 4)]) == {(1, 5), (2, 4)}
    chart = pareto.chart({"a": ROWS})
    assert [(p.label, p.efficient, p.chosen, p.probe) for p in chart.series["a"]] == [
        ("128", False, False, True),
        ("64", True, True, False),
        ("8", True, False, False),
        ("1", True, False, False),
    ]
    assert (
        chart.subtitle
        == "random tokens, 1000/500 in/out, 2 GPUs, labels are the maximum concurrency"
    )
    assert chart.y_label == "Output tokens/s per GPU"
    one = pareto.chart({"a": [{**row, "num_gpus": 1} for row in ROWS]})
    assert one.subtitle == "random tokens, 1000/500 in/out, labels are the maximum concurrency"
    assert one.y_label == "Output tokens/s", "a server on a CPU has no GPU"


class Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            value for name, value in attrs if name in ("src", "href", "action") and value
        ]


def test_the_page_needs_nothing_else_and_escapes_what_it_shows(tmp_path: Path):
    path = tmp_path / "chart.html"
    hostile = "</script><img src=x onerror=alert(1)>"
    pareto.write_html(pareto.chart({hostile: ROWS}, limit=20.0), path, [f"note {hostile}"])
    text = path.read_text()
    page = Page(text)
    assert page.links == []
    assert "img" not in page.tags
    assert "b" not in page.tags
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)
    assert "@" not in re.sub(r"@media", "", text)
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S).group(1))  # type: ignore[union-attr]
    assert data["limit"] == 20.0
    assert [p["label"] for p in data["series"][0]["points"]] == ["128", "64", "8", "1"]
    assert data["series"][0]["points"][0]["facts"]["Accept length"] == "n/a"
    assert page.tags.count("tr") == 5


def test_the_picture_is_a_png_of_its_size(tmp_path: Path):
    path = tmp_path / "chart.png"
    pareto.write_png(pareto.chart({"a": ROWS, "b": ROWS[:2], "empty": []}, limit=20.0), path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")) == (1200, 750)
