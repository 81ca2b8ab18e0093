"""Predictions beside published figures: the project's promises."""

from __future__ import annotations

from statistics import fmean

import pytest

from rorqual.planner.validation.validation import (
    ValidationGroup,
    ValidationPoint,
    published_rows,
    validate,
)


@pytest.fixture(scope="module")
def groups() -> dict[str, ValidationGroup]:
    return {group.name: group for group in validate()}


def test_every_figure_has_a_source(groups: dict[str, ValidationGroup]) -> None:
    assert set(groups) == set(published_rows())
    assert all(group.source and group.points for group in groups.values())
    assert all(group.note for group in groups.values() if group.kind != "prediction")


@pytest.mark.parametrize("name", ["inferencex-1k", "inferencex-8k"])
def test_sglang_on_eight_h200(groups: dict[str, ValidationGroup], name: str) -> None:
    assert groups[name].mean_error("TPOT") < 0.10
    assert groups[name].mean_error("TTFT") < 0.35


def test_own_measurements(groups: dict[str, ValidationGroup]) -> None:
    own = [
        point for name, group in groups.items() if name.startswith("own") for point in group.points
    ]
    assert len(own) == 14
    assert fmean(abs(point.error) for point in own) < 0.08
    assert max(abs(point.error) for point in own) < 0.15


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
