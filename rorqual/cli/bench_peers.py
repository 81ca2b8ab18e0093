"""rorqual bench peers: our server beside vLLM's or SGLang's."""

from __future__ import annotations

from rorqual.bench.peers.settings import PeerSettings
from rorqual.cli.options import Given, Model, with_options
from rorqual.cli.output import check_chart, check_output


@with_options(chosen=PeerSettings)
def bench_peers(chosen: Given, model: Model = None) -> None:
    """Start the peer and then ours on this machine, send both the same load, and show pairs of
    rows. Rows are kept in a file; a call measures those that have no pair yet."""
    from rorqual.bench.peers import run

    asked = PeerSettings(**chosen)
    if not asked.table:
        check_output(asked.results, "--results")
    if asked.chart is not None:
        check_chart(asked.chart)
    run.run(model, asked)
