"""`rorqual bench calibrate --full`: the rows the planner reads, a file that goes on where it
stopped, and a plan that stands on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rorqual.bench.kernel_times import rows as wanted
from rorqual.bench.kernel_times import run as times
from rorqual.bench.kernel_times.measure import ATTENTION, RowTimer
from rorqual.bench.kernel_times.rows import TimedRow
from rorqual.bench.kernels import gemm_and_experts as cases
from rorqual.bench.layers.timing import DeviceRates
from rorqual.bench.step_times import run as step_times
from rorqual.bench.step_times.measure import (
    MOST_BLOCKS,
    STEPS,
    DoesNotFit,
    StepTimer,
    rates,
    settled,
)
from rorqual.bench.step_times.rows import steps
from rorqual.cli.app import app
from rorqual.config.hardware import DATA, load_device
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.models.hub import BUNDLED
from rorqual.ops.activation import NormOutput, Quantized
from rorqual.ops.interface import Ops
from rorqual.ops.triton.quantized import rounded_direct
from rorqual.planner.costs.catalog import published
from rorqual.planner.costs.costs import BatchShape, GroupWork
from rorqual.planner.timing import digests, tables
from rorqual.planner.timing.between import learn
from rorqual.planner.timing.profiles import load_profile, with_kernels
from rorqual.planner.timing.roofline import StepModel
from rorqual.planner.timing.timed_steps import StepMeasurement, TimedStep, read
from rorqual.planner.validation import validation
from rorqual.platforms import make_platform
from tests.bench.kernel_times.fake_engine import RATES, FakeEngine

HERE = {"card": "a GPU", "torch": "2", "triton": "3", "driver": "1", "own_tuning": "no"}


def fake(row: TimedRow) -> float:
    """Microseconds that grow with the row's sizes."""
    size = 1.0
    for number in row.key:
        size *= number
    return 3 + size**0.5 / 100


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("times") / "h200.json"
    held, count = times.run("h200", out, 1e9, None, fake, HERE, FakeEngine, RATES)
    assert held == count == len(wanted.rows()) + len(steps(learnt=True))
    return out


def step_model(path: Path, name: str, quant: str = "auto", **sizes: int) -> StepModel:
    profile = with_kernels(load_profile("rorqual"), str(path))
    return StepModel(published(name, quant), ParallelConfig(**sizes), load_device("h200"), profile)


@pytest.mark.parametrize(("name", "quant", "sizes"), wanted.MODELS)
def test_a_whole_file_holds_every_time_of_a_step(
    whole: Path, name: str, quant: str, sizes: dict[str, int]
) -> None:
    model = step_model(whole, name, quant, **sizes)
    for work in (GroupWork(BatchShape.decode(24, 3000)), GroupWork(None, (BatchShape(2, 900),))):
        assert model.step(work).seconds > 0
    for basis in (tables.STALE, tables.BORROWED, tables.THEIRS):
        assert model.families(basis) == (), basis
    assert len(model.families(tables.CURRENT)) >= 4


def test_a_measured_size_is_read_back_as_it_is(whole: Path) -> None:
    model = step_model(whole, "deepseek-v2-lite")
    found = {item.name: item for item in model.step(GroupWork(BatchShape.decode(8, 1023))).items}
    layers = published("deepseek-v2-lite").num_layers
    head = fake(TimedRow("gemm_bfloat16", "bfloat16", (102400, 2048, 8)))
    floor = 102400 * 2048 * 2 / load_device("h200").bandwidth * 1e6
    assert found["lm_head"].seconds * 1e6 == pytest.approx(max(head, floor), rel=0.01)
    attention = fake(TimedRow("mla_decode", "bfloat16", (16, 8, 1024)))
    spent = sum(
        item.seconds
        for item in model.step(GroupWork(BatchShape.decode(8, 1023))).items
        if item.name == "attention"
    )
    assert spent * 1e6 / layers == pytest.approx(attention, rel=0.01)


def attention_seconds(model: StepModel, new: int, cached: int, requests: int = 1) -> float:
    step = model.step(GroupWork(None, (BatchShape(requests, new, cached),)))
    return sum(item.seconds for item in step.items if item.name == "attention")


@pytest.mark.parametrize(
    ("name", "family", "sizes"),
    [("qwen3-30b-a3b", "gqa_prefill", (32, 4)), ("deepseek-v2-lite", "mla_prefill", (16,))],
)
def test_a_prompt_behind_cached_tokens_has_times_of_its_own(
    tmp_path: Path, name: str, family: str, sizes: tuple[int, ...]
) -> None:
    """As measured where it was; otherwise by the share of the keys that is cached, up to the
    largest measured one, times what as many query-key pairs take."""

    def timer(row: TimedRow) -> float:
        if not row.with_cached:
            return 1000 * fake(row)
        new, cached = row.key[-2:]
        return 1e6 + 10.0 * new + cached

    out = tmp_path / "h200.json"
    times.run("h200", out, 1e9, None, timer, HERE, FakeEngine, RATES)
    model = step_model(out, name)
    layers = published(name).num_layers
    for new, cached in wanted.CACHED_PROMPTS:
        measured = timer(TimedRow(family, "bfloat16", (*sizes, 1, new, cached)))
        assert attention_seconds(model, new, cached) * 1e6 / layers == pytest.approx(
            measured, rel=1e-6
        )
    plain_seconds = tables.load_tables(str(out))._prompt_seconds

    def factor(new: int, cached: int) -> float:
        plain = plain_seconds(family, sizes[0], sizes[-1], 1, new, cached)
        return attention_seconds(model, new, cached) / layers / plain

    assert factor(4096, 2048) == pytest.approx(factor(4096, 4096) ** (2 / 3)), "a third cached"
    assert factor(64, 448) == pytest.approx(factor(1024, 7168)), "fewer new tokens"
    assert factor(8192, 8192) == pytest.approx(factor(4096, 4096)), "more"
    assert factor(1024, 31 * 1024) == pytest.approx(factor(1024, 7168)), "a larger share"
    assert factor(2048, 0) == 1.0


def test_a_file_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "part.json"
    done: list[TimedRow] = []

    def timer(row: TimedRow) -> float:
        done.append(row)
        return 5.0

    only = "mla_prefill,gqa_prefill"
    assert times.run("h200", out, -1, only, timer, HERE) == (0, 44)
    assert not done, "no row begins after the limit"
    assert times.run("h200", out, 1e9, "mla_prefill", timer, HERE) == (22, 22)
    meta = json.loads(out.read_text())["meta"]
    assert meta["kernels"] == {"mla_prefill": digests.present()["mla_prefill"]}
    assert times.run("h200", out, 1e9, only, timer, HERE) == (44, 44)
    assert len(done) == len(set(done)) == 44
    assert set(json.loads(out.read_text())["meta"]["kernels"]) == {"mla_prefill", "gqa_prefill"}


def test_rows_of_changed_kernels_are_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "part.json"
    times.run("h200", out, 1e9, "prefill", fake, HERE)
    changed = {**digests.present(), "mla_prefill": "0"}
    monkeypatch.setattr(digests, "present", lambda: changed)
    seen: list[str] = []

    def timer(row: TimedRow) -> float:
        seen.append(row.family)
        return 1.0

    times.run("h200", out, 1e9, "prefill", timer, HERE)
    assert seen == ["mla_prefill"] * 22


def test_a_row_that_fails_is_named_and_tried_again(tmp_path: Path) -> None:
    out = tmp_path / "part.json"

    def broken(row: TimedRow) -> float:
        if row.key[-1] == 8192:
            raise ValueError("out of registers")
        return 1.0

    assert times.run("h200", out, 1e9, "mla_prefill", broken, HERE) == (20, 22)
    meta = json.loads(out.read_text())["meta"]
    assert len(meta["failed"]) == 2
    assert "out of registers" in next(iter(meta["failed"].values()))
    assert meta["kernels"] == {}, "a family with a hole is not current"
    assert times.run("h200", out, 1e9, "mla_prefill", fake, HERE) == (22, 22)
    assert json.loads(out.read_text())["meta"]["failed"] == {}


def test_what_does_not_go_together_is_refused(tmp_path: Path, whole: Path) -> None:
    with pytest.raises(ConfigError, match="Name another file"):
        times.run("h200", whole, 1, None, fake, {**HERE, "torch": "3"})
    with pytest.raises(ConfigError, match="names no row"):
        times.run("h200", tmp_path / "x.json", 1, "odd", fake, HERE)
    bad = tmp_path / "bad.json"
    bad.write_text("[]")
    with pytest.raises(ConfigError, match="no file of calibrate --full"):
        times.run("h200", bad, 1, None, fake, HERE)
    with pytest.raises(ConfigError, match="holds no kernel tables"):
        with_kernels(load_profile("rorqual"), str(bad))
    with pytest.raises(ConfigError, match="must be a file"):
        with_kernels(load_profile("rorqual"), "times.yaml")
    with pytest.raises(ConfigError, match="profile sglang is another's"):
        with_kernels(load_profile("sglang"), str(whole))
    with pytest.raises(ConfigError, match="no kernel times for device h100"):
        with_kernels(load_profile("rorqual"), str(whole)).check(load_device("h100"))


def test_no_other_gpu_lends_what_a_file_lacks(tmp_path: Path) -> None:
    """An H200's times are not an H100's."""
    out = tmp_path / "h100.json"
    times.run("h100", out, 1e9, "experts", fake, HERE)
    profile = with_kernels(load_profile("rorqual"), str(out))
    given = (published("qwen3-30b-a3b"), ParallelConfig(), load_device("h100"), profile)
    with pytest.raises(ConfigError, match=r"no times of gemm_bfloat16.*--based-on h100"):
        StepModel(*given).step(GroupWork(BatchShape.decode(8, 1000)))


# ---- steps of whole engines


def test_what_lies_between_kernels_is_learnt(whole: Path) -> None:
    data = json.loads(whole.read_text())
    assert data["meta"]["kernels"].keys() == digests.FAMILIES.keys()
    assert data["meta"]["rates"] == RATES
    left = data["meta"]["left_out"]
    assert len(left) == 6
    assert all("256 x 1024" in name for name in left)
    rows = data["between"]["gqa bfloat16 decode"]
    assert [at for at, _ in rows] == [1, 4, 8, 32, 128]
    model = step_model(whole, "qwen3-30b-a3b")
    for requests in (1, 4, 8, 32, 128):
        step = model.step(GroupWork(BatchShape.decode(requests, 1024)))
        assert step.seconds * 1e3 == pytest.approx(1e6 + requests / 100, rel=1e-9)


def test_a_part_of_the_rows_learns_nothing(tmp_path: Path) -> None:
    out = tmp_path / "part.json"
    only = "experts,qwen3-30b-a3b decode"
    held, count = times.run("h200", out, 1e9, only, fake, HERE, FakeEngine, RATES)
    assert held == count
    data = json.loads(out.read_text())
    assert "between" not in data
    assert set(data["meta"]["kernels"]) == {"experts", "experts_fp8", "experts_int4"}
    assert len(data["steps"]) == 6  # 256 requests do not fit


def test_steps_go_on_and_are_judged(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "steps.json"
    asked = [step for step in steps(learnt=False) if step.requests != 250]
    half = asked[:7]
    given = (FakeEngine, HERE, RATES)
    assert step_times.run("h200", out, 1e9, half, *given) == (7, 7)
    assert step_times.run("h200", out, -1, asked, *given) == (7, len(asked))
    slower = {name: rate * 0.9 for name, rate in RATES.items()}
    assert step_times.run("h200", out, 1e9, asked, FakeEngine, HERE, slower)[0] == len(asked)
    assert read(out)["meta"]["rates"] == RATES, "of the first run"
    with pytest.raises(ConfigError, match="Name another file"):
        step_times.run("h100", out, 1, asked, *given)
    found = validation.validate(steps=str(out), kernels=str(whole))
    assert {group.name for group in found} >= {
        "steps-h200-qwen3-30b-a3b-decode",
        "steps-h200-deepseek-v3-8-mixed",
        "steps-h200-deepseek-v2-lite-w4a16-prompts",
    }
    assert sum(len(group.points) for group in found) == len(asked)
    assert not validation.stale_groups(found)
    some = validation.validate(["steps-h200-deepseek-v3"], str(whole), str(out))
    assert {group.name.rsplit("-", 1)[0] for group in some} == {"steps-h200-deepseek-v3-8"}
    with pytest.raises(ConfigError, match="no group begins with 'offline'; known: steps-h200-"):
        validation.validate(["offline"], str(whole), str(out))


def test_steps_of_other_kernels_are_named_and_measured_again(tmp_path: Path, whole: Path) -> None:
    out = tmp_path / "steps.json"
    asked = [step for step in steps(learnt=False) if step.requests == 3 and step.quant == "auto"]
    given = ("h200", out, 1e9, asked, FakeEngine, HERE)
    step_times.run(*given, RATES)
    data = read(out)
    data["meta"]["kernels"]["mla_decode"] = "0"
    data["rows"][0][7] = -1
    out.write_text(json.dumps(data))
    found = validation.validate(steps=str(out), kernels=str(whole))
    older = {group.name: group.older for group in found}
    assert older["steps-h200-deepseek-v2-lite-decode"] == ("mla_decode",)
    assert older["steps-h200-qwen3-30b-a3b-decode"] == ()
    (named, renewal) = validation.stale_groups(found)
    assert "mla_decode" in named
    assert "qwen3" not in named
    assert "rorqual bench steps" in renewal
    told = CliRunner().invoke(
        app, ["plan", "--validate", "--steps", str(out), "--kernels", str(whole)]
    )
    assert told.exit_code == 1
    assert "steps of older kernels: mla_decode" in told.output
    step_times.run(*given, RATES)
    assert min(row[7] for row in read(out)["rows"]) > 0
    assert read(out)["meta"]["kernels"] == digests.present()
    del data["meta"]["kernels"]
    out.write_text(json.dumps(data))
    found = validation.validate(steps=str(out), kernels=str(whole))
    assert all(group.unrecorded and not group.older for group in found)
    (named, how) = validation.stale_groups(found)
    assert all(group.name in named for group in found)
    assert "measured at an earlier commit" in named
    assert "the command" in how


def test_predictions_are_those_of_the_plan(tmp_path: Path, whole: Path) -> None:
    """Whatever the GPU reached in that run: who plans does not know it either."""
    asked = [step for step in steps(learnt=False) if step.engine == ("qwen3-30b-a3b", "auto", None)]
    out = tmp_path / "steps.json"
    rates = {name: rate * 0.8 for name, rate in RATES.items()}
    step_times.run("h200", out, 1e9, asked, FakeEngine, HERE, rates)
    points = [
        point
        for group in validation.validate(steps=str(out), kernels=str(whole))
        for point in group.points
    ]
    model = step_model(whole, "qwen3-30b-a3b")
    for step, point in zip(asked, points, strict=True):
        seconds = sum(model.step(work).seconds for work in step.works(step.context))
        assert point.predicted == pytest.approx(seconds * 1e3)


def test_blocks_are_repeated_until_three_agree() -> None:
    def taken(*times: float) -> tuple[float, int]:
        left = list(times)
        return settled(lambda: left.pop(0)), len(times) - len(left)

    assert taken(1.01, 1.0, 1.02, 9.0) == (1.01, 3)
    assert taken(1.9, 1.0, 1.5, 1.4, 1.01, 1.02, 9.0) == (1.01, 6)
    assert taken(*(1.1**n for n in range(20))) == (1.1, 9), "no more than nine"


def test_rates_are_medians_of_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([DeviceRates(1e12 * n, 1e14 * n) for n in [1, 9, 5, *[4] * 5, *[6] * 7]])
    monkeypatch.setattr(DeviceRates, "measured", lambda platform: next(found))
    monkeypatch.setattr("rorqual.bench.step_times.measure.REST", 0)
    assert rates(make_platform("cpu")) == {"bandwidth_gb_s": 6000.0, "bf16_tflops": 600.0}
    assert not list(found)


def test_a_file_that_is_none_of_steps_is_refused(tmp_path: Path, whole: Path) -> None:
    for text in ("", "[]", '{"meta": {}, "rows": []}'):
        bad = tmp_path / "bad.json"
        bad.write_text(text)
        with pytest.raises(ConfigError, match="no file of rorqual bench steps"):
            validation.validate(steps=str(bad))
    out = tmp_path / "h100.json"
    step_times.run("h100", out, 1e9, steps(learnt=False)[:2], FakeEngine, HERE, RATES)
    with pytest.raises(ConfigError, match="--kernels names others"):
        validation.validate(steps=str(out), kernels=str(whole))


def test_a_step_of_a_real_engine_is_timed() -> None:
    """On this machine's CPU, the bundled model: the same calls as on a GPU."""
    model = str(BUNDLED)
    asked = [
        TimedStep(model, "auto", None, 3, 300, 0, 0),
        TimedStep(model, "auto", None, 0, 0, 2, 64),
        TimedStep(model, "auto", None, 2, 300, 1, 128),
        TimedStep(model, "auto", None, 300, 300, 0, 0),
    ]
    timer = StepTimer(asked, device="cpu", num_pages=400)
    try:
        decode, prompts, mixed = (timer.measure(step) for step in asked[:3])
        with pytest.raises(DoesNotFit, match="tokens of"):
            timer.measure(asked[3])
        assert not timer.engine.has_work
    finally:
        timer.close()
    assert 0 < decode.ms < mixed.ms
    assert prompts.ms > 0
    for found in (decode, mixed):  # longer where blocks had to be repeated
        assert 270 < found.context < 300 + MOST_BLOCKS * (STEPS + 4) / 2


# ---- on a user's command line


def test_the_steps_list_needs_no_gpu() -> None:
    asked = ["bench", "steps", "--based-on", "h200", "--list", "--only", "w4a16"]
    found = CliRunner().invoke(app, asked)
    assert found.exit_code == 0
    names = found.output.split("\n")[:-1]
    assert len(names) == len(set(names)) == 30
    assert all("w4a16" in name for name in names)


def plan(*arguments: str) -> str:
    return CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False).output


def test_the_shipped_tables_follow_from_their_rows() -> None:
    """So that rows measured again by hand do not leave the tables behind that a plan reads."""
    data = json.loads((DATA / "kernels_h200_rorqual.json").read_text())
    measured = {TimedRow(row[0], row[1], tuple(row[2])): row[3] for row in data["rows"]}
    for name, table in json.loads(json.dumps(wanted.tables(measured))).items():
        assert data[name] == table, name
    of_steps = {TimedStep(*row[:7]): StepMeasurement(*row[7:9]) for row in data["steps"]}
    base = tables.load_tables(data["meta"]["base"])
    learnt = learn(of_steps, data["meta"]["device"], tables.KernelTables(data, base))
    assert data["between"] == json.loads(json.dumps(learnt))


def test_a_plan_on_a_fresh_file_is_not_stale(whole: Path) -> None:
    asked = ("qwen3-30b-a3b", "--count", "1", "--no-splits", "--top", "1")
    assert "stale" not in plan(*asked, "--kernels", str(whole))
    fresh = validation.validate(["offline"], str(whole))
    assert len(fresh) == 3
    assert not any(group.stale for group in fresh)


def test_four_bits_need_times_of_their_own(whole: Path) -> None:
    asked = ("qwen3-30b-a3b", "--count", "1", "--no-splits", "--top", "1", "--quant", "w4a16")
    assert "Best deployments" in plan(*asked, "--kernels", str(whole))
    for quant, missing in (("w8a8", "gemm_int8"), ("w4afp8", "no times of")):
        with pytest.raises(ConfigError, match=missing):
            plan(*asked[:-1], quant, "--kernels", str(whole))


def test_the_list_needs_no_gpu() -> None:
    found = CliRunner().invoke(app, ["bench", "calibrate", "--full", "--list"])
    assert found.exit_code == 0
    names = found.output.split("\n")[:-1]
    assert len(names) == len(set(names)) == len(wanted.rows()) + len(steps(learnt=True))
    assert "experts_int4 int4 2048x768x128x128x8x64" in names


# ---- what a row calls


class Recorded(Ops):
    """What the engine's operations are given."""

    def __init__(self) -> None:
        self.given: list[tuple[torch.Tensor, ...]] = []

    def linear(self, x, weight, bias=None):  # type: ignore[no-untyped-def]
        self.given.append((x, weight.data))
        return x

    def experts(self, x, ids, weights, w, base=None):  # type: ignore[no-untyped-def]
        self.given.append((x, ids, weights, w.gate_up.data, w.down.data))
        assert w.local_fraction == 0.25
        return x


def test_rows_call_the_engines_operations_with_their_sizes() -> None:
    torch.manual_seed(0)  # every expert is drawn
    ops = Recorded()
    timer = RowTimer(ops, torch.device("cpu"))
    for dtype, columns in (("bfloat16", 256), ("int4", 128)):
        for call in timer.calls(TimedRow(f"gemm_{dtype}", dtype, (128, 256, 3)))[:2]:
            call()
        assert all(x.shape == (3, 256) for x, _ in ops.given)
        assert all(weight.shape == (128, columns) for _, weight in ops.given)
        assert ops.given[0][1] is not ops.given[1][1], "buffers take turns"
        ops.given.clear()
    for call in timer.calls(TimedRow("experts", "bfloat16", (256, 128, 32, 8, 4, 64))):
        call()
    x, ids, shares, up, down = ops.given[0]
    assert x.shape == (64, 256)
    assert ids.shape == shares.shape == (64, 4)
    assert (up.shape, down.shape) == ((8, 256, 256), (8, 256, 128))
    assert set(ids.unique().tolist()) == {-1, *range(8)}
    product = timer.calls(TimedRow("bmm", "bfloat16", (2, 3)))[0]()
    assert product.shape == (3, 2, 512)
    families = {row.family for row in wanted.rows()}
    assert families | {tables.BETWEEN} == set(digests.FAMILIES)
    assert set(ATTENTION) == {name for name in families if "decode" in name or "prefill" in name}


def test_an_fp8_product_of_one_token_rounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "quantize", lambda x: Quantized.empty(*x.shape, x.device))
    monkeypatch.setattr(rounded_direct, "INTERPRETED", False)
    monkeypatch.setattr(rounded_direct, "takes_fp8", lambda device: True)
    timer = RowTimer(Recorded(), torch.device("cpu"))
    for columns, rounds in ((1024, True), (7168, False)):
        timer.ops = ops = Recorded()
        timer.calls(TimedRow("gemm_fp8", "fp8", (128, columns, 1)))[0]()
        assert isinstance(ops.given[0][0], NormOutput) is not rounds


def test_an_fp8_product_takes_rows_as_norms_leave_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "quantize", lambda x: Quantized.empty(*x.shape, x.device))
    ops = Recorded()
    for call in RowTimer(ops, torch.device("cpu")).calls(
        TimedRow("gemm_fp8", "fp8", (256, 1024, 3))
    )[:2]:
        call()
    rows, weight = ops.given[0]
    assert isinstance(rows, NormOutput)
    assert rows.hidden.shape == rows.quantized.shape == (3, 1024)
    assert (weight.shape, weight.dtype) == ((256, 1024), torch.float8_e4m3fn)
