"""The per-module sweep on tiny shapes: what it measures is real, complete and honestly labelled."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import rorqual
from rorqual.bench.layers import cases, timing
from rorqual.bench.layers import run as layers
from rorqual.bench.layers.backbone import make_backbone
from rorqual.bench.layers.cases import CASES, LayerBench, LayerCase, modules_of, routed_ids
from rorqual.bench.layers.run import LayerRow, as_json, print_table, sweep
from rorqual.cache.spec import MLA_FORMS
from rorqual.config.hf import read_config
from rorqual.config.model import ModelConfig
from rorqual.errors import CapacityError, ConfigError
from rorqual.layers.moe import run_stages
from rorqual.planner.costs import costs
from rorqual.platforms.cpu import CpuPlatform
from tests.engine.execution.replaying import ReplayingPlatform

pytestmark = pytest.mark.exhaustive

SHAPES = Path(rorqual.__file__).parent / "shapes"
TOKENS = (1, 3, 20)
DEEPSEEK = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "vocab_size": 64,
    "quantization_config": None,
    "torch_dtype": "float32",
}
QWEN = {
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "torch_dtype": "float32",
}


def config_of(name: str, **changes: Any) -> ModelConfig:
    tiny: dict[str, Any] = QWEN if name.startswith("qwen") else DEEPSEEK
    return read_config(
        {**json.loads((SHAPES / name / "config.json").read_text()), **tiny, **changes}
    )


def bench_of(
    config: ModelConfig, tokens: tuple[int, ...] = TOKENS, requests: int = 1
) -> LayerBench:
    return LayerBench(config, CpuPlatform(torch.device("cpu")), torch.float32, tokens, requests)


def quick(config: ModelConfig, **options: Any) -> list[LayerRow]:
    return sweep(
        config,
        tokens=options.pop("tokens", TOKENS),
        device="cpu",
        repeats=1,
        min_seconds=0.0,
        **options,
    )


@pytest.fixture(scope="module")
def rows() -> list[LayerRow]:
    return quick(config_of("deepseek-v3"))


def test_every_module_at_every_size(rows: list[LayerRow]) -> None:
    assert {row.module for row in rows} == set(CASES) - {"gqa"}
    both = {(phase, n) for phase in ("prefill", "decode") for n in TOKENS}
    for module in ("mla", "dense_layer", "backbone"):
        assert {(row.phase, row.n) for row in rows if row.module == module} == both
    assert {row.variant for row in rows if row.module == "mla"} == set(MLA_FORMS)
    assert {row.variant for row in rows if row.module == "moe"} == {"natural", "uniform", "zipf"}
    assert all(row.seconds >= row.best > 0 and row.bytes > 0 and row.parameters > 0 for row in rows)
    assert len(rows) == len(TOKENS) * (1 + 1 + 2 * 5 + 2 + 3 + 2)


def test_embedding_tables_here_and_there() -> None:
    """On a device with memory of its own: rows gathered by the host, copied over as well, read
    by the device, and at home there."""

    class Card(CpuPlatform):
        name = "card"

    bench = replace(bench_of(config_of("deepseek-v3")), platform=Card(torch.device("cpu")))
    found: dict[int, list[torch.Tensor]] = {}
    for case in CASES["embed_tokens"](bench):
        out = case.run()
        assert isinstance(out, torch.Tensor)
        found.setdefault(case.n, []).append(out)
    assert [case.variant for case in CASES["embed_tokens"](bench)][:: len(TOKENS)] == [
        "cpu",
        "cpu+h2d",
        "pinned",
        "device",
    ]
    assert set(found) == set(TOKENS)
    for outs in found.values():
        assert all(torch.equal(out, outs[0]) for out in outs)


class Graphs(ReplayingPlatform):
    """A device with memory and graphs of its own."""

    name = "card"


def test_what_is_captured_and_what_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and embeddings call by call; the host's part of these by one thread."""
    monkeypatch.setattr(layers, "make_platform", lambda device: Graphs(torch.device("cpu")))
    monkeypatch.setattr(timing, "SHORTEST", 0.0)
    used: dict[str, int] = {}
    seen = cases.partial

    def counting(run: Any, *rest: Any) -> Any:
        def call() -> Any:
            used[getattr(run, "__name__", "")] = torch.get_num_threads()
            return run(*rest)

        return call

    monkeypatch.setattr(cases, "partial", counting)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = quick(config_of("deepseek-v3"), tokens=(1, 3))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        monkeypatch.setattr(cases, "partial", seen)
    assert used["index_select"] == 1
    assert used["embed"] == 2
    how = {(row.module, row.phase): row.timing for row in found}
    assert {key for key, kind in how.items() if kind == "call"} == {
        ("embed_tokens", "tokens"),
        *((module, "prefill") for module in ("mla", "dense_layer", "backbone")),
    }
    assert "captured, in a row" in printed(found)


def test_the_way_of_timing_may_be_chosen() -> None:
    found = quick(config_of("deepseek-v3"), modules=["mlp"], timing="call")
    assert {row.timing for row in found} == {"call"}
    with pytest.raises(ConfigError, match="timing='graph'; accepted here: auto, call"):
        quick(config_of("deepseek-v3"), modules=["mlp"], timing="graph")


def test_no_case_begins_after_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    assert quick(config_of("deepseek-v3"), limit=-1) == []
    assert "backbone was left out" in caplog.text


def test_floors_are_printed_beside_times() -> None:
    rates = timing.DeviceRates(bandwidth=4e12, operations=8e14)
    assert rates.floor(cases.Op("a", "b", 8e11, 0, 4e9)) == pytest.approx(1e-3)
    assert rates.floor(cases.Op("a", "b", 8e12, 0, 4e9)) == pytest.approx(1e-2)
    text = printed([row_of(floor=1e-3), row_of(variant="zipf", floor=None)])
    assert "2 (200) 50%" in text
    assert "rates measured here" in text


def test_qwen_has_other_modules() -> None:
    found = quick(config_of("qwen3-30b-a3b"))
    assert {row.module for row in found} == {"embed_tokens", "gqa", "moe", "backbone"}
    assert {row.cache_bytes for row in found if row.module == "gqa"} == {2 * 16 * 4}


def test_rows_say_what_a_form_costs(rows: list[LayerRow]) -> None:
    config = config_of("deepseek-v3")
    for row in rows:
        if row.module == "mla":
            assert row.parameters == costs.attention_parameters(config, row.variant)
            assert row.cache_bytes == (2 * (16 + 8) if row.variant == "CD" else 16 + 8) * 4
    flops = {
        row.variant: row.flops
        for row in rows
        if (row.module, row.phase, row.n) == ("mla", "decode", 20)
    }
    assert len(set(flops.values())) == 4
    assert flops["A_CC"] == flops["A_CC_ME"]


def test_backbone_holds_everything_but_experts(rows: list[LayerRow]) -> None:
    parts = costs.parameters(config_of("deepseek-v3"))
    # the last norm is the head's
    expected = (
        parts.attention + parts.dense_ffn + parts.router + parts.shared_experts + parts.norms - 32
    )
    assert {row.parameters for row in rows if row.module == "backbone"} == {expected}


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b"])
@pytest.mark.parametrize("requests", [1, 3])
def test_cases_compute(name: str, requests: int) -> None:
    """Every call returns finite hidden states, one row a token, and its input is not zero."""
    bench = bench_of(config_of(name), requests=requests)
    with torch.inference_mode():
        for module in modules_of(bench.config):
            for case in CASES[module](bench):
                out = case.run()
                assert isinstance(out, torch.Tensor)
                assert out.shape == (requests if case.phase == "decode" else case.n, 32), case
                assert out.isfinite().all()
                assert out.abs().sum() > 0


@pytest.mark.parametrize("fuses", [False, True])
def test_the_backbone_is_the_model_without_experts(
    fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With routed experts that return their input, which is what a token sent nowhere amounts
    to."""
    bench = bench_of(config_of("deepseek-v3"))
    monkeypatch.setattr(type(bench.build.ops), "fuses_shared_experts", fuses)
    model = make_backbone(replace(bench.config, vocab_size=1), bench.build)
    cases.fill(model)
    model.finalize()
    moe = model.moe_layers()[0]
    x = bench.hidden(3)
    assert moe.shared is not None
    torch.testing.assert_close(run_stages(moe.stages(), x), x + moe.shared.forward(x))


# ---- routing


def moe_case(bench: LayerBench, kind: str, n: int) -> LayerCase:
    return next(case for case in CASES["moe"](bench) if (case.variant, case.n) == (kind, n))


def test_given_ids_reach_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    build = bench_of(config_of("deepseek-v3")).build
    real = type(build.ops).experts

    def spy(self: Any, x: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(ids)
        return real(self, x, ids, *rest)

    monkeypatch.setattr(type(build.ops), "experts", spy)
    bench = bench_of(config_of("deepseek-v3"))
    for kind in ("uniform", "zipf"):
        case = moe_case(bench, kind, 20)
        case.run()
        assert torch.equal(seen[-1], routed_ids(kind, 20, bench.config.moe))
        assert case.experts_hit == seen[-1].unique().numel()
    natural = moe_case(bench, "natural", 20)
    natural.run()
    assert natural.experts_hit == seen[-1].unique().numel()


def test_drawn_routing() -> None:
    moe = read_config(json.loads((SHAPES / "deepseek-v3" / "config.json").read_text())).moe
    hits = {}
    for kind in ("uniform", "zipf"):
        ids = routed_ids(kind, 64, moe)
        assert ids.shape == (64, 8)
        assert all(row.unique().numel() == 8 for row in ids)
        hits[kind] = ids.unique().numel()
    assert hits["uniform"] == pytest.approx(costs.expected_experts(256, 8, 64), rel=0.05)
    assert hits["zipf"] < 0.8 * hits["uniform"]
    counts = (
        routed_ids("zipf", 512, moe).flatten().bincount(minlength=256).sort(descending=True).values
    )
    assert counts[0] > 10 * counts[128]


def test_bytes_follow_the_experts_hit() -> None:
    bench = bench_of(config_of("deepseek-v3"))
    one_expert = 3 * 32 * 24 * 4
    natural, zipf = (moe_case(bench, kind, 20) for kind in ("natural", "zipf"))
    assert natural.experts_hit is not None
    assert zipf.experts_hit is not None
    assert natural.cost.bytes - zipf.cost.bytes == pytest.approx(
        (natural.experts_hit - zipf.experts_hit) * one_expert
    )


def test_natural_routing_spreads(rows: list[LayerRow]) -> None:
    assert not any(row.collapsed for row in rows)
    assert {row.experts_hit for row in rows if row.module == "moe" and row.n == 1} == {4}


# ---- options, errors, output


def test_requests_decode_together() -> None:
    found = quick(config_of("deepseek-v3"), modules=["mla"], requests=3)
    assert {row.requests for row in found if row.phase == "decode"} == {3}
    assert {row.requests for row in found if row.phase == "prefill"} == {1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": ["gqa"]}, "module 'gqa' is not one of this model's; accepted: embed_tokens"),
        ({"tokens": (0,)}, "tokens=0 must be at least 1"),
        ({"tokens": ()}, "tokens is empty"),
        ({"requests": 0}, "requests=0"),
        ({"dtype": "int8"}, "dtype='int8' is not supported"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quick(config_of("deepseek-v3"), **options)


def test_too_large_modules_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CpuPlatform, "available_memory", lambda self: 20 * 2**30)
    config = read_config(json.loads((SHAPES / "deepseek-v3" / "config.json").read_text()))
    bench = LayerBench(config, CpuPlatform(torch.device("cpu")), torch.bfloat16, (1,))
    cases.check_memory(bench, ["embed_tokens", "mlp", "mla", "dense_layer", "moe", "backbone"])
    assert cases._weight_bytes(bench, "mla") == pytest.approx(
        187.1e6 + 16.8e6 + 2 * 583.0e6, rel=1e-3
    )
    assert cases._weight_bytes(bench, "dense_layer") == pytest.approx(
        187.1e6 + 16.8e6 + 396.4e6, rel=1e-3
    )
    with pytest.raises(CapacityError, match=r"module moe needs 21\.\d+ GiB"):
        cases.check_memory(replace(bench, config=replace(config, quant=None)), ["mla", "moe"])


def row_of(**changes: Any) -> LayerRow:
    row = LayerRow(
        "moe",
        "natural",
        "tokens",
        64,
        1,
        2e-3,
        1.9e-3,
        5,
        1.0,
        1.0,
        1_234_567,
        0,
        experts_hit=200,
        experts_expected=222.0,
    )
    return replace(row, **changes)


def printed(rows: list[LayerRow]) -> str:
    console = Console(file=io.StringIO(), width=120)
    print_table(rows, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_table_names_the_experts_hit() -> None:
    text = printed(
        [row_of(), row_of(variant="zipf", experts_hit=8), row_of(variant="uniform", best=0.5e-3)]
    )
    assert "2 (200)" in text
    assert "2 (8!)" in text
    assert "collapsed routing" in text
    assert "2~ (200)" in text
    assert "1.23 M" in text


def test_table_of_a_whole_sweep(rows: list[LayerRow]) -> None:
    text = printed(rows)
    assert all(module in text for module in modules_of(config_of("deepseek-v3")))
    assert "AM_CC_ME" in text


def test_json(rows: list[LayerRow]) -> None:
    data = json.loads(as_json(rows, model="tiny"))
    assert data["model"] == "tiny"
    assert data["rows"] == [row.as_dict() for row in rows]


def test_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**config_of("deepseek-v3").raw, "new_field": 1})
    )
    found = layers.bench(
        str(tmp_path),
        modules=["mlp"],
        tokens=(1, 2),
        device="cpu",
        repeats=1,
        ignore_fields=("new_field",),
    )
    assert [(row.module, row.n) for row in found] == [("mlp", 1), ("mlp", 2)]


def test_what_cannot_be_captured_is_called_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(Graphs):
        def capture(self, work: Any, warm: bool = True) -> Any:
            raise RuntimeError("no such operation while capturing")

    monkeypatch.setattr(layers, "make_platform", lambda device: Refusing(torch.device("cpu")))
    found = quick(config_of("deepseek-v3"), modules=["mlp"])
    assert {row.timing for row in found} == {"call"}
    assert "mlp dense is called, not captured: no such operation" in caplog.text
