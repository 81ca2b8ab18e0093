"""Tuned configurations: what ships, what a user's file changes and for whom, and how the search
keeps what it finds."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON, needs_triton

if SKIP_REASON:
    pytest.skip(SKIP_REASON, allow_module_level=True)

# isort: split
import torch
import triton

from rorqual.bench.kernels import gemm_and_experts, moe
from rorqual.bench.kernels import tuning as kernels_tuning
from rorqual.config.model import MoEConfig
from rorqual.engine.scheduling.buckets import bucket_sizes
from rorqual.errors import ConfigError
from rorqual.ops.activation import Quantized
from rorqual.ops.reference import FP8, Weight
from rorqual.ops.triton.attention import gqa_decode, mla_decode, prefill
from rorqual.ops.triton.attention.prefix_groups import FEWEST_REQUESTS, MOST_PROGRAMS
from rorqual.ops.triton.gemm import (
    fp8_gemm,
    fp8_gemm_sm90_loop,
    fp8_gemm_sm90_sliced,
    gemv,
    int4_gemm,
    skinny_gemm,
)
from rorqual.ops.triton.gemm.linear_plan import (
    LinearPlan,
    PersistentPlan,
    SlicedPlan,
    StreamKPlan,
    TilePlan,
    WholeTilesPlan,
    rounds,
    whole_tiles,
)
from rorqual.ops.triton.moe import grouped_gemm, router_gemm, small_batch
from rorqual.ops.triton.quantized import experts as quantized_experts
from rorqual.ops.triton.quantized import linear as quantized_linear
from rorqual.ops.triton.runtime import launch, tuning
from rorqual.ops.triton.runtime.launch import keep_compiled

pytestmark = needs_triton

KINDS = {
    "experts": grouped_gemm.GroupedGemmPlan,
    "experts_direct": small_batch.DirectPlan,
    "linear_fp8": LinearPlan,
    "linear_int4": int4_gemm.Int4Plan,
    "linear_quantized": quantized_linear.QuantizedLinearPlan,
    "experts_quantized": quantized_experts.QuantizedExpertsPlan,
    "linear_small": gemv.SmallPlan,
    "linear_skinny": skinny_gemm.SkinnyPlan,
    "gate": router_gemm.GatePlan,
    "gqa_decode": gqa_decode.GqaDecodeConfig,
    "mla_decode": mla_decode.MlaDecodeConfig,
    "prefill": prefill.PrefillConfig,
}
CARD = tuning.TunedDevice("NVIDIA L4 (test)", "8.9", "2.13.0+cpu", "3.6.0")
FOUND = TilePlan(16, 64, 8, 3, split=2)
# what ships for a token and 2112 x 7168
SMALL = StreamKPlan(8, 64, 4, 7, split=4, waves=3)


def forget() -> None:
    for cached in (tuning._chosen, tuning._own, tuning.shipped):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("RORQUAL_CACHE", str(tmp_path))
    forget()
    yield tmp_path
    forget()


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Kernels believe they are on this GPU."""

    def put(card: tuning.TunedDevice = CARD) -> None:
        forget()
        monkeypatch.setattr(tuning, "card_of", lambda device: card)

    put()
    return put


def linear_plan(tokens: int, rows: int = 2112, columns: int = 7168) -> LinearPlan:
    return fp8_gemm.plan_for(Weight(torch.empty(rows, columns, device=DEVICE)), tokens)


# ---- what ships


def test_every_shipped_rule_is_a_configuration() -> None:
    paths = sorted(tuning.SHIPPED.glob("*.json"))
    cards = [json.loads(path.read_text())["card"] for path in paths]
    assert tuning.DEFAULT_CARD in cards
    assert len(set(cards)) == len(cards)
    for path in paths:
        rules = tuning.read(path)
        assert rules.keys() == KINDS.keys()
        for kernel, made in KINDS.items():
            assert all(isinstance(tuning.build(made, rule.config), made) for rule in rules[kernel])


def test_no_product_of_many_columns_leaves_half_of_the_multiprocessors_idle() -> None:
    for tokens in range(65, 513, 13):
        for rows in range(1536, 8192, 576):
            plan = linear_plan(tokens, rows, 7168)
            high = -(-tokens // 128)
            tiles = high * -(-rows // 128)
            if isinstance(plan, PersistentPlan) and tiles <= 66:
                assert plan.parts(rows, 7168, high, 132)[0] > 1, (tokens, rows)


def test_plans_of_products_are_written_as_they_were_read() -> None:
    """Rows of every kind: what a plan has no field for has one value in all files."""
    rows = [rule.config for rule in tuning.shipped(tuning.DEFAULT_CARD)["linear_fp8"]]
    rows += [
        asdict(plan.row()) for plan in (FOUND, TilePlan(64, 128, 4, 2, False, True, 1, 2, True))
    ]
    plans = [LinearPlan.from_row(row) for row in rows]
    assert {type(plan) for plan in plans} == {
        TilePlan,
        StreamKPlan,
        PersistentPlan,
        WholeTilesPlan,
        SlicedPlan,
    }
    assert [asdict(plan.row()) for plan in plans] == rows


@pytest.mark.parametrize(
    ("high", "rows", "processors", "expected"),
    [
        (6, 4096, 132, 2),  # 192 tiles
        (4, 4096, 132, 1),
        (8, 2112, 132, 1.5),  # 128 whole tiles, and 8 narrow ones for four processors
        (6, 2112, 132, 1),
        (16, 2112, 132, 2.5),  # one whole tile and two narrow ones
        (17, 192, 3, 10.5),  # the last: six whole tiles, then six narrow ones
        (2, 64, 2, 0.75),
    ],
)
def test_rounds_of_tiles(high: int, rows: int, processors: int, expected: float) -> None:
    assert rounds(high, rows, processors) == expected


def test_a_start_meets_every_height(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of tokens with one height may have no size that the start goes through."""
    run: list[LinearPlan] = []
    monkeypatch.setattr(fp8_gemm, "is_hopper", lambda device: True)
    monkeypatch.setattr(fp8_gemm, "_run", lambda x, weight, bias, y, plan: run.append(plan))
    weight = Weight(torch.empty(4096, 7168, device=DEVICE))
    x = Quantized(torch.empty(1500, 7168, device=DEVICE), torch.empty(1500, 56, device=DEVICE))
    fp8_gemm.linear(x, weight)
    assert run == [PersistentPlan(128, 6)]
    with launch.ahead(), launch.ahead():
        fp8_gemm.linear(x, weight)
    assert [plan.m for plan in run[1:]] == [256, 192, 128, 128]
    fp8_gemm.linear(x, weight)
    assert run[5:] == [PersistentPlan(128, 6)]


@pytest.mark.parametrize("longest", [1023, 2047, 4095, 40959])
@pytest.mark.parametrize(
    ("heads", "groups", "queries"), [(32, 4, 1), (32, 4, 2), (64, 4, 1), (8, 1, 1)]
)
def test_a_start_meets_all_tiles_of_gqa_decode(
    longest: int, heads: int, groups: int, queries: int
) -> None:
    """Of every number of requests and every length: as ModelRunner._warm_mixed_steps goes through
    them. Where prefixes may be shared, a kernel is also of a power of two of requests."""
    most = 1024
    plane = torch.empty(2, 16, groups, 128, dtype=torch.bfloat16)

    def variants(counts: Iterable[int], lengths: Iterable[int]) -> dict[object, tuple[int, int]]:
        found: dict[object, tuple[int, int]] = {}
        for count in counts:
            q = torch.empty(1, heads, 128, dtype=torch.bfloat16).expand(count * queries, -1, -1)
            for length in lengths:
                config = gqa_decode.config_for(q, plane, count, max(length, queries))
                shares = count >= FEWEST_REQUESTS and config.per_sm <= MOST_PROGRAMS
                size = launch.next_power(count) if shares else 0
                found.setdefault((config, size), (count, length))
        return found

    met = variants(
        bucket_sizes(most), [n for n in (64, 256, 1024, 4096, 16384) if n < longest] + [longest]
    )
    near = {1 << power for power in range(longest.bit_length())}  # rules change at such lengths
    near |= {limit // count for limit in (2048, 16384, 131072) for count in (5, 33, 100, 300, 700)}
    lengths = sorted({n + by for n in near for by in (-1, 0, 1) if 0 < n + by <= longest})
    counts = (1, 2, 3, 4, 5, 7, 9, 24, 25, 31, 32, 33, 40, 63, 64, 65, 200, 256, 257, 700, 1024)
    unmet = {key: at for key, at in variants(counts, lengths).items() if key not in met}
    assert not unmet, list(unmet.items())[:3]


def test_no_round_of_tiles_is_taken_for_a_few_tokens() -> None:
    """The heights that one H200 showed, whose 132 multiprocessors ran shapes of no rule."""
    measured = {
        (384, 7168, 16384): 192,
        (576, 7168, 16384): 128,
        (1152, 7168, 16384): 128,
        (1500, 7168, 16384): 256,
        (768, 4096, 7168): 192,
        (1500, 4096, 7168): 128,
        (4096, 4096, 7168): 256,
        (160, 10240, 5120): 192,
        (1152, 6144, 4096): 256,
    }
    assert {shape: whole_tiles(*shape, 132).m for shape in measured} == measured
    # with fewer multiprocessors, as beside NCCL's programs, other heights
    assert whole_tiles(768, 4096, 7168, 116).m == 256


def test_a_row_of_kernels_that_were_is_refused() -> None:
    row = asdict(SMALL.row())
    for change in ({"warps": 8}, {"stages": 1}, {"n": 256, "warps": 16}):
        with pytest.raises(ValueError, match="no streaming product"):
            LinearPlan.from_row({**row, **change})
    with pytest.raises(TypeError, match="swap"):
        LinearPlan.from_row({**row, "swap": 3})


def test_shipped_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them the edges of their ranges."""
    assert [linear_plan(t) for t in (1, 8)] == [SMALL, SMALL]
    assert [linear_plan(t).m for t in (9, 17, 64, 65, 129, 512, 513)] == [
        16,
        32,
        64,
        64,
        64,
        128,
        128,
    ]
    assert [linear_plan(t).m for t in (1024, 1025, 1344, 1345)] == [128, 192, 192, 256]
    assert [linear_plan(t, rows=7168, columns=2048).m for t in (256, 257, 385, 897)] == [
        128,
        192,
        256,
        256,
    ]
    sliced = [linear_plan(t) for t in (64, 65, 256, 257, 512, 513)]
    assert [(type(plan), plan.m) for plan in sliced] == [
        (StreamKPlan, 64),
        *[(SlicedPlan, 64)] * 2,
        *[(SlicedPlan, 128)] * 2,
        (PersistentPlan, 128),
    ]
    wider = [linear_plan(t, rows=4096) for t in (8, 9, 128, 129, 256, 257)]
    assert [(type(plan), plan.m) for plan in wider] == [
        (StreamKPlan, 8),
        (SlicedPlan, 16),
        (SlicedPlan, 64),
        *[(SlicedPlan, 128)] * 2,
        (PersistentPlan, 128),
    ]
    assert [
        (type(plan), plan.m)
        for t in (8, 9, 16, 17, 32, 33, 64, 65, 104, 105, 128, 129)
        for plan in [linear_plan(t, rows=7168, columns=2048)]
    ] == [
        (SlicedPlan, 8),
        *[(SlicedPlan, 16)] * 2,
        *[(SlicedPlan, 32)] * 2,
        *[(SlicedPlan, 64)] * 2,
        *[(PersistentPlan, 128)] * 2,
        *[(SlicedPlan, 128)] * 2,
        (PersistentPlan, 128),
    ]
    kinds = (StreamKPlan, PersistentPlan)
    deep = [linear_plan(t, rows=7168, columns=16384) for t in (8, 9, 64, 128, 129, 512)]
    assert [plan.row().n for plan in deep] == [128, 64, 64, 128, 128, 128]
    assert [type(plan) for plan in deep] == 3 * [StreamKPlan] + 3 * [PersistentPlan]
    assert [plan.m for plan in deep] == [8, 16, 64, 128, 128, 256]
    assert tuple(type(linear_plan(t, rows=24576, columns=1536)) for t in (64, 65)) == kinds
    assert [linear_plan(t, rows=36864).stages for t in (64, 128)] == [6, 2]
    down = Weight(torch.empty(128, 64, 32, dtype=torch.bfloat16))
    assert [
        grouped_gemm.plan_for(down, picks).rows for picks in (1, 768, 769, 2560, 12288, 12289)
    ] == [16, 16, 32, 32, 64, 128]
    assert grouped_gemm.plan_for(down, 5).up == grouped_gemm.Tile(128, 128, 4, 3, tma=True)
    quantized = Weight(torch.empty(32, 128, 128, dtype=FP8), torch.empty(32, 1, 1))
    assert [
        grouped_gemm.plan_for(quantized, picks).rows for picks in (32 * 20, 32 * 21, 32 * 300)
    ] == [32, 64, 64]
    monkeypatch.setattr(grouped_gemm, "is_hopper", lambda device: True)
    means = (32, 33, 112, 113, 184, 185, 272, 273)
    many = [grouped_gemm.plan_for(quantized, 32 * mean) for mean in means]
    tall = [(128, 6), (128, 6), (192, 5), (192, 5), (256, 4), (256, 4), (192, 5)]
    assert [(plan.rows, plan.tall) for plan in many] == [(64, 0), *tall]
    tall_down = Weight(torch.empty(2, 4096, 128, dtype=FP8), torch.empty(2, 32, 1))
    few = [grouped_gemm.plan_for(tall_down, 2 * mean) for mean in (20, 21)]
    assert [(plan.rows, plan.tall) for plan in few] == [(32, 0), (128, 6)]
    assert grouped_gemm.plan_for(quantized, 32 * 97, dtype=torch.float32).tall == 0
    assert [small_batch.direct_plan_for(quantized, picks).up_rows for picks in (2, 3)] == [16, 4]
    assert [small_batch.direct_plan_for(down, picks).up_rows for picks in (8, 9)] == [8, 16]
    assert [grouped_gemm.plan_for(quantized, picks).up.stages for picks in (2, 3)] == [2, 4]
    wide = Weight(torch.empty(32, 128, 640, dtype=FP8), torch.empty(32, 1, 5))
    assert small_batch.direct_plan_for(wide, 8).down_rows == 64
    q = torch.empty(1, 32, 128, dtype=torch.bfloat16)
    plane = torch.empty(2, 16, 4, 128, dtype=torch.bfloat16)

    def decode(requests: int, longest: int, queries: int = 1) -> gqa_decode.GqaDecodeConfig:
        return gqa_decode.config_for(q.expand(requests * queries, -1, -1), plane, requests, longest)

    at = ((1, 2048), (32, 2048), (1, 2049), (2, 2049), (4, 1024), (8, 512), (8, 513), (5, 2049))
    found = [decode(*each) for each in at]
    assert [config.block_n for config in found] == [64, 128, 64, 128, 64, 64, 128, 128]
    assert [config.masked for config in found] == [False, True] + [False] * 4 + [True, True]
    assert [config.finish for config in found] == [False, True, False, False] + [True] * 4
    assert [decode(*each).stages for each in ((1, 2048), (64, 1024), (256, 1024))] == [1, 2, 5]
    # more rows than a product has at least: tiles of 64, and two programs a multiprocessor
    more = [decode(*each, 2) for each in ((8, 1024), (16, 1500), (64, 1024), (256, 1024))]
    assert [(config.block_n, config.tma, config.per_sm) for config in more] == [
        (64, False, 2),
        (64, False, 2),
        (64, True, 2),
        (64, True, 2),
    ]
    assert not decode(5, 2049, 2).masked
    assert [config.masked for config in more] == [True, True, False, False]
    plane = plane[:, :, :1]  # where all rows share keys, such tiles were slower
    assert not decode(8, 1024).masked
    plane = plane.expand(-1, -1, 4, -1)
    assert decode(256, 1024).per_sm == 3
    held = plane.to(torch.int8)  # no masked tiles were timed over 8-bit caches
    assert not any(
        gqa_decode.config_for(q, held, *each).masked for each in ((8, 1024), (8, 4096), (64, 512))
    )
    assert [
        mla_decode.config_for(q, 16, q.dtype, *at).block_n
        for at in ((128, 1024), (256, 1024), (256, 4096))
    ] == [64, 32, 64]
    assert [mla_decode.config_for(q, rows, q.dtype, 1, 99).block_h for rows in (16, 17, 33)] == [
        16,
        32,
        64,
    ]
    # where there is no Hopper
    assert mla_decode.config_for(q, 128, torch.uint8, 1, 99) == mla_decode.MlaDecodeConfig(
        64, 64, 8, 2
    )
    assert mla_decode.config_for(q, 128, q.dtype, 1, 99).gluon
    assert mla_decode.config_for(q.float(), 128, torch.uint8, 1, 99).block_n == 16
    assert prefill.config_for(q, 4, True, 16) == prefill.PrefillConfig(16, 64, 4, 3)
    assert prefill.config_for(
        torch.empty(1, 8, 192, dtype=torch.bfloat16), 8, False, 4096
    ) == prefill.PrefillConfig(128, 64, 8, 3)


# ---- a user's own


def test_a_stored_configuration_is_for_its_shape_card_and_versions(
    on_card: Callable[..., None], folder: Path
) -> None:
    before = linear_plan(64)
    path = tuning.store(
        CARD,
        "linear_fp8",
        {"rows": 2112, "columns": 7168, "tokens": tuning.near(64)},
        FOUND,
        12.345,
    )
    assert path.parent == folder / "tuned"
    assert json.loads(path.read_text())["triton"] == "3.6.0"
    assert [linear_plan(t) == FOUND for t in (45, 46, 64, 89, 90)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert linear_plan(64, rows=2048) == before
    for other in ("name", "capability", "torch", "triton"):
        on_card(tuning.TunedDevice(**{**vars(CARD), other: "9.9"}))
        assert linear_plan(64) == before, other
    on_card(CARD)
    assert linear_plan(64) == FOUND


def test_a_second_search_takes_the_place_of_the_first(on_card: Callable[..., None]) -> None:
    shape = {"rows": 2112, "columns": 7168, "tokens": [1, 4]}
    tuning.store(CARD, "linear_fp8", shape, FOUND, 12.0)
    tuning.store(CARD, "mla_decode", {"rows": 16}, mla_decode.MlaDecodeConfig(16, 32, 4, 2), 9.0)
    tuning.store(CARD, "linear_fp8", shape, TilePlan(16, 128, 4, 4), 11.0)
    assert linear_plan(1) == TilePlan(16, 128, 4, 4)
    assert {kernel: len(rules) for kernel, rules in tuning.read(CARD.file).items()} == {
        "linear_fp8": 1,
        "mla_decode": 1,
    }


def test_a_failed_write_leaves_the_old_file(
    on_card: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tuning.store(CARD, "linear_fp8", {"tokens": 1}, FOUND, 12.0)
    before = path.read_text()
    monkeypatch.setattr(
        Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("no space left"))
    )
    with pytest.raises(OSError, match="no space"):
        tuning.store(CARD, "linear_fp8", {"tokens": 2}, FOUND, 12.0)
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"format": 0, "kernels": {}}', '{"format": 1, "kernels": {"linear_fp8": [{}]}}'],
)
def test_a_damaged_file_is_passed_by_and_never_overwritten(
    on_card: Callable[..., None], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    CARD.file.parent.mkdir()
    CARD.file.write_text(text)
    with caplog.at_level(logging.WARNING, logger="rorqual"):
        assert linear_plan(1) == SMALL
    assert str(CARD.file) in caplog.text
    with pytest.raises(ConfigError, match="tuned"):
        tuning.store(CARD, "linear_fp8", {"tokens": 1}, FOUND, 12.0)
    assert CARD.file.read_text() == text


@pytest.mark.parametrize("change", [{"color": 3}, {"m": "16"}, {"m": None}])
def test_a_configuration_of_another_version_is_passed_by(
    on_card: Callable[..., None], change: dict[str, Any]
) -> None:
    tuning.store(CARD, "linear_fp8", {"tokens": 1}, FOUND, 12.0)
    data = json.loads(CARD.file.read_text())
    data["kernels"]["linear_fp8"][0]["config"] |= change
    CARD.file.write_text(json.dumps(data))
    forget()
    assert linear_plan(1) == SMALL


def test_a_field_that_is_gone_is_read_and_means_nothing(on_card: Callable[..., None]) -> None:
    """Users' tuning files of earlier versions have `waves` in every tile."""
    down = Weight(torch.empty(4, 64, 32, dtype=torch.bfloat16))
    tile = grouped_gemm.Tile(32, 32, 4, 2)
    plan = grouped_gemm.GroupedGemmPlan(16, tile, tile)
    tuning.store(CARD, "experts", {"kind": "bf16"}, plan, 12.0)
    data = json.loads(CARD.file.read_text())
    for part in ("up", "down"):
        data["kernels"]["experts"][0]["config"][part]["waves"] = 0
    CARD.file.write_text(json.dumps(data))
    forget()
    assert grouped_gemm.plan_for(down, 4) == plan


# ---- the search


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU to time on: every option takes less than the one before it."""
    times = iter(range(10**6, 0, -1))
    monkeypatch.setattr(gemm_and_experts, "compiling", nullcontext)
    monkeypatch.setattr(gemm_and_experts, "median_us", lambda calls, replays=15: float(next(times)))


def test_the_search_keeps_the_fastest_that_is_right(
    on_card: Callable[..., None], clock: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def calls(plan: TilePlan) -> list[Callable[[], torch.Tensor]]:
        return [
            lambda: torch.full(
                (3,), float("nan") if plan.warps == 16 else 2.0 if plan.warps == 8 else 1.0
            )
        ]

    used, good, wrong, unwritten = (
        TilePlan(16, 64, warps, stages) for warps, stages in ((4, 2), (4, 3), (8, 3), (16, 3))
    )
    results = kernels_tuning.timed("some", [used, good, wrong, unwritten], calls)
    assert [plan for _, plan in results] == [unwritten, wrong, good, used]
    kernels_tuning.keep(
        "linear_fp8", {"tokens": 7}, results, calls, used, 1e-3, torch.device(DEVICE)
    )
    assert linear_plan(7) == good
    assert capsys.readouterr().out.count("another result") == 2


@pytest.mark.skipif(DEVICE != "cpu", reason="times are invented")
def test_searches_store_what_their_kernels_then_take(
    on_card: Callable[..., None], clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device(DEVICE)
    monkeypatch.setattr(gemm_and_experts, "ROTATE", 1)
    monkeypatch.setattr(
        kernels_tuning,
        "tile_candidates",
        lambda kind, rows, first: [
            grouped_gemm.Tile(32, 32, 4, 2),
            grouped_gemm.Tile(16, 64, 4, 2),
        ],
    )
    monkeypatch.setattr(kernels_tuning, "row_candidates", lambda picks, slots: [16])
    monkeypatch.setattr(kernels_tuning, "linear_candidates", lambda tokens: [FOUND])
    monkeypatch.setattr(
        kernels_tuning, "small_candidates", lambda tokens: [gemv.SmallPlan(2, 256, 4, 1)]
    )
    kernels_tuning.tune_linear(128, 256, 4, device)
    assert linear_plan(4, 128, 256) == FOUND
    kernels_tuning.tune_small(64, 512, 2, device)
    assert gemv.plan_for(torch.empty(64, 512), 2) == gemv.SmallPlan(2, 256, 4, 1)
    shape = gemm_and_experts.ExpertShape("bf16", 4, 64, 32, 2)
    kernels_tuning.tune_experts(shape, 20, device)
    plan = grouped_gemm.plan_for(Weight(torch.empty(4, 64, 32, dtype=torch.bfloat16)), 40)
    assert plan.up == plan.down == grouped_gemm.Tile(16, 64, 4, 2)
    assert (
        grouped_gemm.plan_for(Weight(torch.empty(4, 64, 32, dtype=torch.bfloat16)), 400).up
        != plan.up
    )


def test_case_names_of_searches_are_those_of_the_table() -> None:
    names = {case.name for case in (*gemm_and_experts.cases(), *moe.cases())}
    assert {search.name.replace(" gluon", "") for search in kernels_tuning.searches()} <= names


def test_every_gluon_candidate_is_one_the_kernels_take() -> None:
    for tokens in (1, 8, 20, 64, 128, 200, 4096):
        for plan in kernels_tuning.gluon_candidates(tokens, 2112, 7168, 132):
            assert (
                plan.m >= min(tokens, 128)
                or isinstance(plan, SlicedPlan)
                or (tokens > 128 and plan.m == 64)
            )
            if isinstance(plan, SlicedPlan):
                assert fp8_gemm_sm90_sliced.stages_of(plan, 7168) == plan.stages
                assert fp8_gemm_sm90_sliced.programs(plan, tokens, 2112) <= 132
                continue
            tall = isinstance(plan, PersistentPlan)
            rows = 128 if tall else plan.n
            assert tall != isinstance(plan, StreamKPlan)
            if isinstance(plan, PersistentPlan):
                fp8_gemm_sm90_loop.assert_fits(plan.m, plan.stages)
            assert (rows + plan.m) * 128 * plan.stages <= 226 * 1024, plan


def test_no_shipped_rule_slices_what_does_not_fit() -> None:
    """A plan that does not fit is replaced by one that nobody tuned."""
    for rows in range(64, 9000, 192):
        for columns in (512, 1536, 2048, 4096, 5120, 7168, 16384):
            for tokens in (2, 8, 9, 16, 17, 32, 64, 65, 105, 128, 129, 200, 256, 300, 384, 512):
                plan = linear_plan(tokens, rows, columns)
                if isinstance(plan, SlicedPlan):
                    weight = Weight(torch.empty(rows, columns, device="meta"))
                    y = torch.empty(tokens, rows, dtype=torch.bfloat16, device="meta")
                    assert fp8_gemm_sm90_sliced.fits(plan, weight, y), (plan, tokens, rows, columns)


@pytest.mark.skipif(DEVICE != "cpu", reason="times are invented")
def test_a_streaming_plan_is_kept_for_as_many_tokens_as_it_takes_at_once(
    on_card: Callable[..., None], clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_and_experts, "ROTATE", 1)
    monkeypatch.setattr(kernels_tuning, "is_hopper", lambda device: True)
    plan = StreamKPlan(8, 64, 4, 6, split=64)
    monkeypatch.setattr(kernels_tuning, "gluon_candidates", lambda *shape: [plan])
    before = linear_plan(9, 128, 256)
    kernels_tuning.tune_linear(128, 256, 8, torch.device(DEVICE), gluon=True)
    assert linear_plan(2, 128, 256) == linear_plan(8, 128, 256) == plan
    assert linear_plan(9, 128, 256) == before
    assert linear_plan(1, 128, 256) != plan
    fitting = ((8, 1), (8, 8), (16, 16), (128, 128), (64, 256))
    sizes = {
        tokens: kernels_tuning.sizes_alike(replace(plan, m=m), tokens) for m, tokens in fitting
    }
    assert sizes == {1: [1, 1], 8: [2, 8], 16: [9, 16], 128: [65, 128], 256: tuning.near(256)}


@pytest.mark.longest
@pytest.mark.exhaustive
@pytest.mark.skipif(DEVICE != "cpu", reason="as the table itself")
def test_cases_around_experts_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones of each kind of row, interpreted: shared experts among the others and beside
    them are the same sums."""
    device = torch.device(DEVICE)
    small = MoEConfig(16, 4, 8, norm_topk_prob=True)
    monkeypatch.setattr(gemm_and_experts, "ROTATE", 1)
    monkeypatch.setattr(moe, "ROUTERS", {"V2-Lite": small})
    for kind, hidden, inner in (("bf16", 64, 32), ("fp8", 128, 128)):
        shape = gemm_and_experts.ExpertShape(kind, 6, hidden, inner, 4, 2)
        setups = [
            gemm_and_experts.expert_setup(shape, 9, device),
            moe.beside_setup(shape, 9, device),
        ]
        assert all(setup.error() < 1e-3 for setup in setups)
    for way in (moe.joint, moe.split, moe.apart):
        assert moe.router_setup("V2-Lite", 3, way, None, device).error() < 1e-9
    for buckets in (True, False):
        assert moe.sort_setup("V2-Lite", 9, buckets, device).error() == 0
    monkeypatch.setattr(
        moe, "LAYERS", {"V2-Lite": gemm_and_experts.ExpertShape("bf16", 18, 2048, 16, 6, 2)}
    )
    for way in moe.WAYS:
        assert moe.layer_setup("V2-Lite", 5, way, device).error() < 1e-3
    for way in moe.SUM_WAYS:
        assert moe.sum_norm_setup(72, 3, 5, way, device).error() < 1e-4
    for parts in (1, 3):
        assert all(plan.m <= 64 for plan in kernels_tuning.gate_candidates(64, 128, parts))


# ---- compiled kernels


def test_compiled_kernels_stay_in_the_cache_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # first: Triton's knob sets it too, and what was there before must come back
    monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
    monkeypatch.setattr(triton.knobs.cache, "dir", "elsewhere")
    keep_compiled()
    assert triton.knobs.cache.dir == "elsewhere", "the user has chosen"
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    keep_compiled()
    assert triton.knobs.cache.dir == str(folder / "triton")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_kernels_for_hopper_are_for_it_alone(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later GPUs do not have its products of whole warpgroups."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    hopper = launch.is_hopper.__wrapped__(torch.device("cuda"))
    assert hopper == (capability == (9, 0))
