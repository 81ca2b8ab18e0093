"""rorqual bench hop: rows to expert servers and back."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rorqual.bench.comm.expert_hop import HopSetup, as_json, bench, print_reads
from rorqual.bench.comm.expert_reads import bench_reads
from rorqual.cli.app import app


@pytest.mark.exhaustive
@pytest.mark.parametrize("fp8", [False, True])
def test_rows_travel_and_are_counted(fp8: bool) -> None:
    """One row is routed to all four experts, so each of two servers gets it."""
    setup = HopSetup((1, 6), 2, 256, 4, 4, repeats=5, fp8=fp8)
    found = bench(setup)
    assert [hop.rows for hop in found] == [1, 6]
    row = 256 + 4 * 2 if fp8 else 2 * 256
    for hop in found:
        assert hop.sent == 2 * (20 + hop.rows * (row + 8 * 4))
        assert hop.back == 2 * (20 + hop.rows * 2 * 256)
        assert 0 < hop.us <= hop.p90
        assert hop.plain > 0
    assert json.loads(as_json(found, setup))["setup"]["servers"] == 2


@pytest.mark.exhaustive
def test_experts_are_read_here_for_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    setup = HopSetup((1,), 2, 256, 4, 2, repeats=5, intermediate=512)
    reads = bench_reads(256, 512, 2, "cpu", 5)
    assert reads.bytes == 3 * 256 * 512 * 2
    assert 0 < reads.one < reads.us
    hops = bench(setup)
    print_reads(reads, hops, setup)
    printed = " ".join(capsys.readouterr().out.split())
    assert f"through one each on 2 servers: {hops[0].us + reads.one:.0f} us" in printed
    assert json.loads(as_json(hops, setup, reads))["reads"]["picks"] == 2


def test_servers_compute_for_a_time_on_a_gpu_alone() -> None:
    for transport, said in (("handles", "needs a GPU"), ("tcp", "goes with --transport handles")):
        words = ["bench", "hop", "--busy-us", "5", "--device", "cpu", "--transport", transport]
        done = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
        assert done.exit_code == 2
        assert said in done.output
