"""Predictions beside published figures: the project's promises."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

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


OWN = ("own", "now")


def test_own_figures_say_where_they_come_from(groups: dict[str, ValidationGroup]) -> None:
    for name, group in groups.items():
        if name.startswith(OWN):
            assert "measured at commit" in group.origin, name
            kept = "by a command that was not kept" not in group.origin
            assert kept == name.startswith("now"), name
            assert kept == ("`rorqual bench offline" in group.origin), name
            assert "not in the fit" in group.origin, name
        else:
            assert not group.origin, name


def test_todays_figures_are_those_of_the_document() -> None:
    """So that a table of new figures there asks for new rows here."""
    text = (Path(__file__).parents[3] / "docs" / "performance.md").read_text()
    table = text[text.index("| shape | requests | floor ms | ours ms |") :].split("\n\n")[0]
    found: dict[str, list[tuple[int, float]]] = {}
    name = ""
    for line in table.splitlines()[2:]:
        shape, requests, _, ours, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        name = shape or name
        found.setdefault(name, []).append((int(requests), float(ours)))
    groups = [group for key, group in published_rows().items() if key.startswith("now")]
    rows = [[(row["clients"], row["step_ms"]) for row in group["rows"]] for group in groups]
    assert rows == list(found.values())


def test_stale_groups_are_named_with_what_renews_them(groups: dict[str, ValidationGroup]) -> None:
    """The shipped tables kept no digest of their kernels; when they are renewed, this goes."""
    stale = {name for name, group in groups.items() if group.stale}
    assert stale == {name for name in groups if name.startswith(OWN)}
    told = "\n".join(stale_groups(list(groups.values())))
    assert "rorqual bench calibrate --full" in told
    assert all(name in told for name in stale)
    assert stale_groups([groups["inferencex-1k"], groups["a3-decode"]]) == []


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
