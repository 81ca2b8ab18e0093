"""rorqual bench pages: a prompt's pages between two processes."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from rorqual.bench.comm.page_transfers import as_json, bench, print_table
from rorqual.bench.comm.transfer_setup import TransferSetup


@pytest.mark.exhaustive
def test_pages_travel_and_are_timed() -> None:
    setup = TransferSetup(
        "deepseek-v2-lite", tokens=32, page_size=8, repeats=2, request_after=0.002
    )
    found = bench(setup)
    assert found.bytes == 32 * 27 * 576 * 2
    assert (found.pieces, found.piece) == (4 * 27, 8 * 576 * 2)
    (times,) = found.transports
    assert (times.transport, len(times.pages), times.library) == ("tcp", 2, [])
    assert min(*times.pages, *found.socket, *found.copy) > 0
    assert json.loads(as_json([(setup, found)]))["runs"][0]["figures"]["pieces"] == 108
    out = io.StringIO()
    print_table(found, setup, Console(file=out, width=200))
    assert "pages by tcp" in out.getvalue()
    assert "plain socket" in out.getvalue()
    assert "asked for 2 ms after their lease opened" in " ".join(out.getvalue().split())


def test_an_impossible_transport_is_refused_in_one_line() -> None:
    """Its other process says nothing of its own."""
    asked = "pages deepseek-v2-lite --tokens 64 --transports handles --devices cpu,cpu"
    told = subprocess.run(
        [sys.executable, "-m", "rorqual", "bench", *asked.split()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.returncode != 0
    assert told.stdout == ""
    assert told.stderr.splitlines() == [
        "rorqual: kv_transport='handles' is between NVIDIA GPUs; the device is cpu"
    ]
