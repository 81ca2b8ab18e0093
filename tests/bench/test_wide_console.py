"""Tables in a file are not cut."""

from __future__ import annotations

import pytest
from rich.table import Table

from rorqual.bench.wide_console import wide_console


def test_a_table_in_a_file_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(box=None)
    table.add_column("x" * 100)
    table.add_row("y" * 100)
    wide_console(120).print(table)
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == ["x" * 100, "y" * 100]


def test_a_terminal_has_its_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    monkeypatch.setenv("COLUMNS", "40")
    assert wide_console(120).width == 40
