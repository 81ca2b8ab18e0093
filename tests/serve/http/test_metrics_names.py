"""/metrics under our names, under vLLM's, and what the board of docs/grafana asks for."""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from rorqual.errors import ConfigError
from rorqual.serve.config import ServeConfig
from rorqual.serve.engines.histogram import BOUNDS, Histogram
from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.http.app import Api, create_app
from rorqual.serve.limits import ServerLimits
from rorqual.serve.messages import Snapshot
from tests.serve.running import ROOT, Running

BOARD = ROOT / "docs" / "grafana" / "server.json"
PROMPT = {"prompt": "The captain said that the whale " * 20, "max_tokens": 3, "ignore_eos": True}
# what boards and rules made for vLLM ask for, of what we measure
ASKED = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "prompt_tokens_cached_total",
    "generation_tokens_total",
    "request_success_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    *(f"{name}_bucket" for name in BOUNDS),
}
SPECULATION = {
    "spec_decode_num_drafts_total": 10,
    "spec_decode_num_draft_tokens_total": 18,
    "spec_decode_num_accepted_tokens_total": 9,
}


Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def samples(text: str) -> Samples:
    """Values by name and labels."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def scraped(server: Running) -> Samples:
    status, text = server.request("GET", "/metrics")
    assert status == 200
    return samples(text)


def metrics_of(names: str | None = None, speculates: int = 0, **figures: Any) -> Samples:
    """/metrics of a server whose engine has counted `figures`."""
    pool = EnginePool([{}], ServerLimits())
    histograms = {name: Histogram(bounds).state() for name, bounds in BOUNDS.items()}
    ready = asyncio.Event()
    ready.set()
    client = SimpleNamespace(
        index=0,
        info=None,
        snapshot=Snapshot(1.0, histograms=histograms, **figures),
        live={},
        ended=deque(),
        startup={"weights": 1.5},
        ready=ready,
    )
    pool.engines[0].client = client  # type: ignore[assignment]
    served = SimpleNamespace(names=("first", "second"))
    config = {"engine": {"num_speculative_tokens": speculates}}
    more = () if names is None else (names,)
    api = Api(served, pool, ServerLimits(), "1", config, *more)  # type: ignore[arg-type]
    try:
        return samples(TestClient(create_app(api, None)).get("/metrics").text)
    finally:
        pool.kill()


def test_host_memory_is_told_where_there_is_some() -> None:
    """[pages, held, queries, hits, bytes out and in]; in vLLM's names what is looked for behind the
    device's cache."""
    figures = {"host_cache": [900, 30, 640, 512, 4096, 2048]}
    label = (("engine", "0"),)
    found = metrics_of(**figures)
    for name, value in (
        ("host_cache_pages", 900),
        ("host_cache_pages_held", 30),
        ("host_cache_queries_total", 640),
        ("host_cache_hits_total", 512),
        ("host_cache_bytes_out_total", 4096),
        ("host_cache_bytes_in_total", 2048),
    ):
        assert found[f"rorqual:{name}"] == {label: value}
    theirs = {name: list(values.values()) for name, values in metrics_of("vllm", **figures).items()}
    assert theirs["vllm:external_prefix_cache_queries_total"] == [640]
    assert theirs["vllm:external_prefix_cache_hits_total"] == [512]
    for names in (None, "vllm"):
        assert not [
            name for name in metrics_of(names) if "host_cache" in name or "external" in name
        ]


def test_kernels_that_steps_waited_for_are_told() -> None:
    found = metrics_of(late_kernels=3, late_kernel_seconds=2.5)
    label = (("engine", "0"),)
    assert found["rorqual:late_kernels_total"] == {label: 3}
    assert found["rorqual:late_kernel_seconds_total"] == {label: 2.5}
    assert not [name for name in metrics_of("vllm", late_kernels=3) if "late_kernel" in name]


def prefixes(found: Samples) -> set[str]:
    return {name.split(":")[0] for name in found}


def test_each_set_of_names_comes_where_asked_for() -> None:
    assert prefixes(metrics_of()) == {"rorqual"}
    assert prefixes(metrics_of("vllm")) == {"vllm"}
    assert prefixes(metrics_of("both")) == {"rorqual", "vllm"}
    with pytest.raises(ConfigError, match="accepted: rorqual, vllm, both"):
        ServeConfig(metrics_names="sglang")


def test_vllm_names_have_its_labels_and_meanings() -> None:
    found = metrics_of(
        "vllm", prompt_tokens=70, prompts=100, cached_prompts=30, finished={"stop": 2}
    )
    labels = (("engine", "0"), ("model_name", "first"))
    assert {f"vllm:{name}" for name in ASKED} <= {*found}
    assert found["vllm:prompt_tokens_total"] == {labels: 100}, "cached ones count"
    assert found["vllm:prompt_tokens_cached_total"] == {labels: 30}
    reasons = {
        dict(key)["finished_reason"]: n for key, n in found["vllm:request_success_total"].items()
    }
    assert reasons == {"stop": 2, "length": 0, "abort": 0}
    assert not any("spec_decode" in name for name in found), "nobody drafts here"
    assert all(dict(key)["model_name"] == "first" for each in found.values() for key in each)


def test_drafts_are_told_where_there_are_any() -> None:
    found = metrics_of("vllm", 2, drafted=[10, 8], accepted=[6, 3])
    for name, value in SPECULATION.items():
        assert [*found[f"vllm:{name}"].values()] == [value], name
    places = found["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert [(dict(key)["position"], n) for key, n in places.items()] == [("0", 6), ("1", 3)]


def test_a_server_tells_both_and_they_agree(server: Running) -> None:
    body = {**PROMPT, "cache_salt": "metrics"}
    before = settled(server)
    for _ in range(2):
        status, answer = server.request("POST", "/v1/completions", body)
        assert status == 200
    length = answer["usage"]["prompt_tokens"]

    def grown(name: str) -> float:
        now, then = scraped(server), before
        return sum(now[name].values()) - sum(then[name].values())

    server.wait_until(lambda: grown("vllm:generation_tokens_total") == 6)
    assert grown("rorqual:generation_tokens_total") == 6
    assert grown("vllm:prompt_tokens_total") == 2 * length
    cached = grown("vllm:prompt_tokens_cached_total")
    assert 0 < cached < length, "the second prompt was found"
    assert grown("rorqual:prompt_tokens_total") == 2 * length - cached
    for name in ("time_to_first_token", "request_prefill_time", "request_inference_time"):
        for prefix in ("rorqual", "vllm"):
            assert grown(f"{prefix}:{name}_seconds_count") == 2, name
    assert grown("vllm:e2e_request_latency_seconds_sum") == pytest.approx(
        grown("vllm:request_queue_time_seconds_sum")
        + grown("vllm:request_inference_time_seconds_sum")
    )


def settled(server: Running) -> Samples:
    """Once the newest figures are those of an engine at rest."""

    def still() -> bool:
        engine = server.get("/stats")["engines"][0]
        return not engine["open"] and not engine["running"] and not engine["waiting"]

    server.wait_until(still)
    return scraped(server)


# ---- the board


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    return json.loads(BOARD.read_text())


def expressions(board: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(where, PromQL) of every panel and variable."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def test_the_board_can_be_imported(board: dict[str, Any]) -> None:
    """What Grafana's schema asks of a board, and no two panels in one place."""
    assert board["schemaVersion"] >= 36
    assert re.fullmatch(r"[\w-]{1,40}", board["uid"])
    assert "id" not in board, "one that exists in the importer's Grafana would be overwritten"
    source = {"type": "prometheus", "uid": "${datasource}"}
    names = [variable["name"] for variable in board["templating"]["list"]]
    assert names[0] == "datasource", "the others are asked of it"
    cells: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) > 10
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] >= 0
        assert at["x"] + at["w"] <= 24
        own = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not own & cells, panel["title"]
        cells |= own
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("stat", "timeseries")
        assert panel["title"]
        assert panel["targets"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(refs) == len(set(refs))
        assert [panel["datasource"]] + [t["datasource"] for t in panel["targets"]] == [source] * (
            len(refs) + 1
        )
    for where, text in expressions(board):
        assert text.count("(") == text.count(")"), where
        used = set(re.findall(r"\$(\w+)", text))
        assert used <= {*names, "__rate_interval", "__range"}, where


def test_every_figure_of_the_board_is_told(board: dict[str, Any], server: Running) -> None:
    """By a server that records the experts' load and has refused a request; drafts by one that
    drafts. Prometheus itself adds `instance`."""
    server.request("POST", "/v1/completions", {"prompt": 1})
    status, _ = server.request("POST", "/v1/completions", PROMPT)
    assert status == 200
    server.wait_until(lambda: "rorqual:request_success_total" in scraped(server))
    drafts = metrics_of("rorqual", 2, drafted=[10, 8], accepted=[6, 3])
    found = scraped(server) | {name: it for name, it in drafts.items() if "spec_decode" in name}
    asked = 0
    for where, text in expressions(board):
        for name, selector in re.findall(r"(rorqual:\w+)(\{.*?\})?", text):
            assert name in found, f"{where}: {name}"
            labels = {label for key in found[name] for label, _ in key}
            wanted = set(re.findall(r"(\w+)=", selector)) - {"instance"}
            wanted |= {word for by in re.findall(r"by \((.*?)\)", text) for word in by.split(", ")}
            assert wanted <= labels | {"instance"}, f"{where}: {name}"
            asked += 1
    assert asked > 20
    assert not re.search(r"vllm:", BOARD.read_text())
