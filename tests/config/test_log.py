"""Logged text stays on its line."""

from __future__ import annotations

import io
import logging

import pytest

from rorqual.config.log import LineFormatter
from rorqual.errors import ECHOED, escaped, quoted

FORGED = "a\nrorqual: forged\r\x1b[31m\u2028\x85"


@pytest.fixture
def logged() -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("rorqual: %(message)s"))
    log = logging.Logger("one")
    log.addHandler(handler)
    return log, stream


def test_a_message_is_one_line(logged: tuple[logging.Logger, io.StringIO]):
    logged[0].warning("the text %s é", FORGED)
    (line,) = logged[1].getvalue().removesuffix("\n").splitlines()
    assert line == r"rorqual: the text a\nrorqual: forged\r\x1b[31m\u2028\x85 é"


def test_no_line_of_a_traceback_passes_for_a_record(logged: tuple[logging.Logger, io.StringIO]):
    try:
        raise ValueError(FORGED)
    except ValueError:
        logged[0].exception("failed")
    first, *rest = logged[1].getvalue().removesuffix("\n").splitlines()
    assert first == "rorqual: failed"
    assert any(line.startswith("  Traceback") for line in rest)
    assert any("forged" in line for line in rest)
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


def test_quoted_is_short_and_on_one_line():
    assert quoted("plain 'é'") == "'plain 'é''"
    assert quoted("a\nb") == r"'a\nb'"
    assert len(quoted("\x00" * 10**6)) < 4 * ECHOED + 40
    assert escaped("\ud800") == r"\ud800"
