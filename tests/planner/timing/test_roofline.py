"""Step times: never under their floors, exact at measured points, scaled by rooflines elsewhere,
refused where there is nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from rorqual.config.hardware import DATA, load_device
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.planner.costs import costs
from rorqual.planner.costs.catalog import published
from rorqual.planner.costs.costs import BatchShape, Format, GroupWork
from rorqual.planner.costs.parallel_costs import RankOp, rank_step
from rorqual.planner.timing.profiles import load_profile, profile_for
from rorqual.planner.timing.roofline import (
    LIMITERS,
    StepModel,
    compute_bound_tokens,
    expert_seconds,
    largest_batch,
    rpc_seconds,
    with_link,
)
from rorqual.planner.timing.tables import KernelTables, interpolate, load_tables, nest

R1 = published("deepseek-ai/DeepSeek-R1")
QWEN = published("qwen3-30b-a3b")
TABLE = json.loads((DATA / "kernels_h200_sglang.json").read_text())


def model(profile: str = "sglang", device: str = "h200", **sizes: int) -> StepModel:
    return StepModel(
        R1, ParallelConfig(**(sizes or {"tp": 8})), load_device(device), load_profile(profile)
    )


# ---- tables


def test_interpolation_is_exact_at_points_and_linear_between() -> None:
    table = nest([(2, 10, 5.0), (2, 40, 20.0), (8, 10, 20.0), (8, 40, 80.0)])

    def at(first: float, second: float) -> float:
        return math.exp(interpolate(table, [math.log(first), math.log(second)]))

    assert at(2, 10) == pytest.approx(5)
    assert at(8, 40) == pytest.approx(80)
    assert at(4, 20) == pytest.approx(20)
    assert at(2, 5) == pytest.approx(5), "below the table: its first point"
    assert at(2, 80) == pytest.approx(40), "above it: the last slope goes on"


def gemm(m: int, n: int, k: int) -> RankOp:
    return RankOp("x", "x", "gemm", 2.0 * m * n * k, n * k, 0, 0, "fp8", (m, n, k))


def test_measured_products_come_back() -> None:
    tables = load_tables("h200_sglang")
    sizes = TABLE["gemm"]["m"]
    for n, k, *times in TABLE["gemm"]["tables"]["fp8"][::17]:
        for m, time in list(zip(sizes, times, strict=True))[::4]:
            assert tables.seconds(gemm(m, n, k), True) == pytest.approx(time * 1e-6, rel=1e-6)


def test_fused_shared_experts_count_one_by_one() -> None:
    """Few tokens: what experts cost beyond a launch goes with how many are read, here 8 of a
    token and one or two shared."""
    rest = []
    for shared in (0, 1, 2):
        config = replace(R1, moe=replace(R1.moe, num_shared=shared))
        timed = StepModel(
            config, ParallelConfig(tp=8), load_device("h200"), load_profile("sglang")
        ).step(GroupWork(BatchShape.decode(1, 1000)))
        rest.append(next(item.seconds for item in timed.items if item.name == "experts"))
    assert rest[2] - rest[1] == pytest.approx(rest[1] - rest[0])
    assert rest[1] > rest[0]


def test_no_table_lies_under_the_datasheet() -> None:
    """Products too large for the L2 cache, latent attention over more than it holds, and experts
    by what their routing reads."""
    device = load_device("h200")
    for n, k, *times in TABLE["gemm"]["tables"]["fp8"]:
        for m, time in zip(TABLE["gemm"]["m"], times, strict=True):
            floor = max(
                n * k / device.bandwidth if n * k > 120e6 else 0, 2 * m * n * k / device.peak("fp8")
            )
            assert time * 1e-6 > floor, (n, k, m)
    for heads, batch, context, time in TABLE["mla_decode"]:
        read = batch * context * 1152
        assert time * 1e-6 > max(
            read / device.bandwidth if read > 120e6 else 0,
            2 * batch * context * heads * 1088 / device.peak("bfloat16"),
        )
    for entry in TABLE["experts"]:
        one = 3 * entry["hidden"] * entry["inter"] * (1 if entry["dtype"] == "fp8" else 2)
        for _, distinct, time in entry["rows"]:
            assert time * 1e-6 > distinct * one / device.bandwidth


def test_own_kernels_are_ratios_to_the_base() -> None:
    base = load_tables("h200_sglang")
    assert load_tables("h200_rorqual").base is base
    meta = {"device": "h200", "source": "a test", "engine": "rorqual"}
    curve = {"gemm_fp8": [[1, 1.0], [64, 1.25], [4096, 1.5]]}
    own = KernelTables({"meta": meta, "relative": curve}, base)
    op = gemm(64, 4096, 7168)
    assert own.seconds(op, True) / base.seconds(op, True) == pytest.approx(1.25)
    assert own.has(op, True)
    assert not own.has(replace(op, kind="gather"), True)


# ---- steps


@pytest.mark.parametrize(
    "work",
    [
        GroupWork(BatchShape.decode(16, 2000)),
        GroupWork(None, (BatchShape(1, 2048),)),
        GroupWork(BatchShape.verify(8, 900, 1), drafts=1),
    ],
)
def test_a_step_is_the_sum_of_its_parts_and_above_the_floor(work: GroupWork) -> None:
    timed = model().step(work)
    bare = model("roofline").step(work)
    assert timed.seconds == pytest.approx(sum(item.seconds for item in timed.items))
    assert set(timed.by("limiter")) <= set(LIMITERS)
    assert bare.seconds < timed.seconds
    assert timed.measured_share > 0.7
    assert bare.measured_share == 0


def test_the_bare_roofline_is_bytes_and_operations() -> None:
    one = StepModel(QWEN, ParallelConfig(), load_device("h200"), load_profile("roofline"))
    step = one.step(GroupWork(BatchShape.decode(4, 1000)))
    floor = costs.decode_floor_seconds(QWEN, 4, 1000, 4.8e12)
    assert floor < step.seconds < floor * 1.02, "activations are all that is more"
    assert step.by("limiter")["memory"] > 0.98 * step.seconds


def test_more_work_takes_longer() -> None:
    found = [
        model().step(GroupWork(BatchShape.decode(batch, 2000))).seconds
        for batch in (1, 4, 16, 64, 256)
    ]
    assert found == sorted(found)
    found = [
        model().step(GroupWork(BatchShape.decode(16, context))).seconds
        for context in (500, 2000, 8000, 32000)
    ]
    assert found == sorted(found)


def test_skewed_routing_reads_fewer_experts() -> None:
    from rorqual.planner.costs.routing import Routing

    even = StepModel(QWEN, ParallelConfig(), load_device("h200"), load_profile("rorqual"))
    skewed = replace(even, routing=Routing("zipf", 1.2))
    work = GroupWork(BatchShape.decode(8, 1000))
    assert skewed.step(work).by("name")["experts"] < even.step(work).by("name")["experts"]


def test_slower_memory_adds_the_difference_of_the_floors() -> None:
    """What a kernel takes besides stays: a start is no slower where memory is."""
    here = model()
    there = model(device="h100")
    slower = load_device("h200").bandwidth / load_device("h100").bandwidth
    ops = rank_step(R1, here.sizes, GroupWork(BatchShape.decode(64, 4000))).ops
    ops = [op for op in ops if op.name in ("attention", "experts")]
    assert {op.name for op in ops} == {"attention", "experts"}
    for op in ops:
        (taken, more) = (each.time_of([op]) / op.layers for each in (here, there))
        assert taken < more < slower * taken
        floor, limiter = here.floor(op)
        if op.name == "attention":
            assert limiter == "memory"
            assert more - taken == pytest.approx(floor * (slower - 1))
    assert model(device="h100").profile.check(load_device("h100")) is False


def test_where_computing_limits_the_fraction_of_the_peak_stays() -> None:
    here = model()
    there = model(device="h20-96")
    slower = load_device("h200").peak("fp8") / load_device("h20-96").peak("fp8")
    ops = rank_step(R1, here.sizes, GroupWork(None, (BatchShape(8, 4096),))).ops
    (op,) = [op for op in ops if op.name == "o_proj"][:1]
    (taken, more) = (each.time_of([op]) / op.layers for each in (here, there))
    assert here.floor(op)[1] == there.floor(op)[1] == "compute"
    start = here.profile.small_us * 1e-6
    assert more - start == pytest.approx((taken - start) * slower)


def test_measured_collectives_come_first() -> None:
    device = load_device("h200-measured")
    own = StepModel(R1, ParallelConfig(tp=8), device, load_profile("sglang"))
    message = next(
        m
        for m in rank_step(R1, own.sizes, GroupWork(BatchShape.decode(8, 100))).messages
        if m.kind == "all_reduce"
    )
    assert own.message_seconds(message, False) == (pytest.approx(14.6e-6, rel=1e-3), True)
    other = replace(own, device=load_device("h800"))
    seconds, measured = other.message_seconds(message, False)
    assert not measured, "other links: no table"
    assert seconds == pytest.approx(2 * 4e-6 + message.wire_bytes / (200e9 * 0.8))


def test_messages_beyond_a_node_take_the_network() -> None:
    wide = StepModel(
        R1,
        ParallelConfig(dp=16, ep=16, exchange="allgather_ep"),
        load_device("h100"),
        load_profile("sglang"),
    )
    message = next(
        m
        for m in rank_step(R1, wide.sizes, GroupWork(BatchShape.decode(8, 100))).messages
        if m.kind == "all_gather"
    )
    assert wide.message_seconds(message, False)[0] > message.wire_bytes / 50e9


def test_a_pipeline_passes_through_every_stage() -> None:
    whole = StepModel(QWEN, ParallelConfig(), load_device("h200"), load_profile("rorqual")).step(
        GroupWork(BatchShape.decode(8, 1000))
    )
    piped = StepModel(
        QWEN, ParallelConfig(pp=4), load_device("h200"), load_profile("rorqual")
    ).step(GroupWork(BatchShape.decode(8, 1000)))
    assert piped.seconds == pytest.approx(4 * piped.stage)
    assert whole.seconds / 4 < piped.stage < whole.seconds


def test_nothing_takes_no_time() -> None:
    assert model().step(GroupWork()).seconds == 0


# ---- refusals


def test_no_data_no_guess() -> None:
    with pytest.raises(ConfigError, match="no kernel times for device rtx4090"):
        model(device="rtx4090")
    with pytest.raises(ConfigError, match="bf16 cache alone"):
        StepModel(
            R1,
            ParallelConfig(tp=8),
            load_device("h200"),
            load_profile("sglang"),
            Format(kv_dtype="float8_e4m3fn"),
        )
    with pytest.raises(ConfigError, match="needs a measured device"):
        model("calibrated")
    with pytest.raises(ConfigError, match="profile 'vllm' is not known"):
        load_profile("vllm")
    with pytest.raises(ConfigError, match="tp=3 does not divide"):
        model(tp=3)


def test_the_profile_of_a_gpu() -> None:
    names = {
        name: profile_for(load_device(name)).name
        for name in ("h200", "h100", "rtx4090", "ascend-a3")
    }
    assert names == {
        "h200": "rorqual",
        "h100": "rorqual",
        "rtx4090": "roofline",
        "ascend-a3": "ascend",
    }


# ---- memory and critical sizes


def test_memory_adds_up() -> None:
    found = model(tp=8)
    left = found.memory_left(0)
    assert left + found.weight_bytes == pytest.approx(0.9 * found.device.memory)
    assert found.cache_tokens() == int(left // 70_272)
    assert largest_batch(found, 4096) == found.cache_tokens() // 4096
    with pytest.raises(ConfigError, match="context=0"):
        largest_batch(found, 0)


def test_critical_sizes() -> None:
    rows, batch = compute_bound_tokens(R1, load_device("h20-96"))
    assert (rows, batch) == (pytest.approx(37), pytest.approx(1184))
    assert expert_seconds(R1, load_device("rtx4090")) == pytest.approx(44_040_192 / 1008e9)
    device = with_link(load_device("rtx4090"), 25)
    assert rpc_seconds(R1, device, 128) == pytest.approx(2 * (30e-6 + 128 * 7168 * 2 / 3.125e9))
    with pytest.raises(ConfigError, match="network=0"):
        with_link(device, 0)
