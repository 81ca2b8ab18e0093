"""Predictions beside published figures: the project's promises."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from rorqual.bench.step_times.rows import steps
from rorqual.config.hardware import DATA
from rorqual.errors import ConfigError
from rorqual.planner.timing import digests
from rorqual.planner.timing.profiles import load_profile
from rorqual.planner.timing.timed_steps import TimedStep, read, rows_of
from rorqual.planner.validation import validation
from rorqual.planner.validation.fitting import GROUPS, fitted_rows, loss
from rorqual.planner.validation.validation import (
    ValidationGroup,
    ValidationPoint,
    published_rows,
    stale_groups,
    validate,
)


@pytest.fixture(scope="module")
def groups() -> dict[str, ValidationGroup]:
    return {group.name: group for group in validate()}


def test_every_figure_has_a_source(groups: dict[str, ValidationGroup]) -> None:
    steps = {name for name in groups if name.startswith("steps-")}
    assert set(groups) - steps == set(published_rows())
    assert {name.split("-")[1] for name in steps} == {"h100", "h200"}
    assert all(group.source and group.points for group in groups.values())
    assert all(group.note for group in groups.values() if group.kind != "prediction")


@pytest.mark.parametrize(("name", "tpot"), [("inferencex-1k", 0.066), ("inferencex-8k", 0.093)])
def test_sglang_on_eight_h200(groups: dict[str, ValidationGroup], name: str, tpot: float) -> None:
    """Over the half that no number was chosen on."""
    assert len(groups[name].judged("TPOT")) in (2, 3)
    assert groups[name].mean_error("TPOT") < tpot
    assert groups[name].mean_error("TTFT") < 0.25


@pytest.mark.longest
@pytest.mark.exhaustive
def test_the_halves_are_a_hashs_and_the_numbers_are_the_best_of_theirs() -> None:
    rows = sorted(
        ((group, row["clients"]) for group in GROUPS for row in published_rows()[group]["rows"]),
        key=lambda row: hashlib.sha256(f"{row[0]} {row[1]}".encode()).hexdigest(),
    )
    assert fitted_rows() == set(rows[:5])
    assert len(rows) == 10
    shipped = load_profile("sglang")
    best = loss(shipped, 0)
    for other in (shipped.expert_factor - 0.02, shipped.expert_factor + 0.02):
        assert loss(replace(shipped, expert_factor=other), 0) > best
    best = loss(shipped, 1)
    for queued in (shipped.queued_steps - 1, shipped.queued_steps + 1):
        assert loss(replace(shipped, queued_steps=queued), 1) > best


# Figures that docs/planning.md tells of: mean and worst. Steps of an H200, of the kernels
# that the tables are of; what kernels do later, `stale` and `older` say. Their GPU is slower than
# that of the steps that were learnt from, by 1.6 % in products and 1.7 % in bandwidth.
# targets: decode steps 5 %, 10 % at worst; the rest 8 %
LIMITS = {"decode": (0.035, 0.085), "prompts": (0.045, 0.06), "mixed": (0.055, 0.06)}
# figures of earlier kernels, which were slower for few requests; and of an H100, for which the
# target of decode steps is 7 %
EARLIER = {"decode": (0.06, 0.09), "prompts": (0.08, 0.10), "mixed": (0.035, 0.045)}
OFFLINE = (0.03, 0.045)
BEYOND = {
    # kernels of fp8 have changed since: an H200's step of one request takes 0.80 of what it took
    "steps-h100-qwen3-30b-a3b-fp8-decode": (0.07, 0.13),
    "steps-h100-qwen3-30b-a3b-fp8-prompts": (0.125, 0.135),
    "steps-h100-qwen3-30b-a3b-fp8-mixed": (0.10, 0.105),
    "steps-h100-qwen3-30b-a3b-mixed": (0.115, 0.115),  # one step, of the 16-bit experts before
    "steps-h100-qwen3-30b-a3b-w4a16-mixed": (0.065, 0.075),
}


def test_own_steps(groups: dict[str, ValidationGroup]) -> None:
    for name, group in groups.items():
        kind = name.rpartition("-")[2]
        if name.startswith("steps-"):
            assert group.unrecorded == ("h100" in name)
            usual = EARLIER if group.unrecorded else LIMITS
            mean, worst = BEYOND.get(name, usual[kind])
        elif name.startswith("offline-"):
            mean, worst = OFFLINE
        else:
            continue
        assert group.mean_error("step") < mean, name
        assert group.worst_error("step") < worst, name


def test_served_requests(groups: dict[str, ValidationGroup]) -> None:
    """Of earlier kernels: one stream had 2.50 ms a token, and would have 2.36."""
    served = groups["served-qwen3-30b"]
    assert served.unrecorded
    assert served.worst_error("output") < 0.08
    assert served.worst_error("TPOT") < 0.06
    assert served.mean_error("TTFT p50") < 0.065
    assert served.worst_error("TTFT p50") < 0.085
    assert served.mean_error("TTFT p99") < 0.13


OWN = ("steps", "offline", "served")


def test_own_figures_say_where_they_come_from(groups: dict[str, ValidationGroup]) -> None:
    for name, group in groups.items():
        if name.startswith(OWN):
            assert "measured at commit" in group.origin, name
            assert "`rorqual bench " in group.origin, name
            assert "not in the fit" in group.origin, name
        else:
            assert not group.origin, name


def test_what_is_judged_was_not_learnt_from() -> None:
    learnt = set(steps(learnt=True))
    for path in sorted((DATA / "measured").glob("steps_*.json")):
        found = set(rows_of(read(path)))
        assert found <= set(steps(learnt=False)), path.name
        assert not found & learnt
    table = json.loads((DATA / "kernels_h200_rorqual.json").read_text())
    assert {TimedStep(*row[:7]) for row in table["steps"]} <= learnt


def test_offline_figures_are_those_of_the_document() -> None:
    """So that a table of new figures there asks for new rows here. What was measured again counts
    instead."""
    text = (Path(__file__).parents[3] / "docs" / "performance.md").read_text()
    found: dict[str, dict[int, float]] = {}
    for head, column in (
        ("| shape | requests | floor ms | ours ms |", 3),
        ("| shape | requests | ours ms, again |", 2),
    ):
        name = ""
        for line in text[text.index(head) :].split("\n\n")[0].splitlines()[2:]:
            shape, requests, *rest = (cell.strip() for cell in line.strip("|").split("|"))
            name = shape or name
            found.setdefault(name, {})[int(requests)] = float(rest[column - 2])
    groups = [group for key, group in published_rows().items() if key.startswith("offline")]
    rows = [{row["clients"]: row["step_ms"] for row in group["rows"]} for group in groups]
    assert rows == list(found.values())


def test_stale_groups_are_named_with_what_renews_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "present", lambda: dict.fromkeys(digests.FAMILIES, "0"))
    groups = {group.name: group for group in validate()}
    stale = {name for name, group in groups.items() if group.stale}
    assert stale == {name for name in groups if name.startswith(OWN)}
    report = "\n".join(stale_groups(list(groups.values())))
    assert "rorqual bench calibrate --full" in report
    assert all(name in report for name in stale)
    assert stale_groups([groups["inferencex-1k"], groups["a3-decode"]]) == []


def test_figures_whose_kernels_are_not_recorded_are_named(
    groups: dict[str, ValidationGroup],
) -> None:
    unrecorded = {name for name, group in groups.items() if group.unrecorded}
    assert {"served-qwen3-30b", "offline-v2-lite"} < unrecorded
    first, command = validation._unrecorded(list(groups.values()))
    assert all(name in first for name in unrecorded)
    assert "steps-h200" not in first
    assert "the command that each group names" in command
    assert validation._unrecorded([groups["steps-h200-qwen3-30b-a3b-decode"]]) == []


def test_other_clusters(groups: dict[str, ValidationGroup]) -> None:
    for name, group in groups.items():
        if group.kind == "range":
            assert all(point.error == 0 for point in group.points), name
    bound = groups["a3-decode"].points[0]
    assert 0.5 < bound.predicted / bound.measured < 1, "a lower bound lies below what was reached"
    assert groups["a3-prefill"].points[0].predicted > groups["a3-prefill"].points[0].measured


def test_errors_of_ranges() -> None:
    assert ValidationPoint("", "", "", 100, 120).error == pytest.approx(0.2)
    assert ValidationPoint("", "", "", 100, 80, 130).error == 0
    assert ValidationPoint("", "", "", 100, 130, 110).error == pytest.approx(0.1)
    assert ValidationPoint("", "", "", 100, 60, 80).error == pytest.approx(-0.2)


def test_some_groups_alone() -> None:
    assert [group.name for group in validate(["a3-d"])] == ["a3-decode"]
    assert {group.name for group in validate(["steps-h200-deepseek-v3", "a3-d"])} == {
        "a3-decode",
        *(f"steps-h200-deepseek-v3-8-{kind}" for kind in ("decode", "prompts", "mixed")),
    }


@pytest.mark.parametrize("names", [["nope"], ["a3", "nope"], ["nope", "a3"]])
def test_a_name_of_no_group_is_refused(names: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"'nope'; known: .*a3-decode.*steps-h200-") as error:
        validate(names)
    assert "h800-production" in str(error.value)


def test_steps_are_no_groups_beside_other_kernels() -> None:
    """The shipped steps are compared with the shipped times alone."""
    with pytest.raises(ConfigError, match="'steps'; known: ") as error:
        validate(["steps"], kernels="h200.json")
    assert "steps-h200" not in str(error.value)
