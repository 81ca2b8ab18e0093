"""`rorqual bench peers`: measure what is missing, then show all of it."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path
from types import FrameType

from rorqual.bench.peers import table
from rorqual.bench.peers.call import PeerCall
from rorqual.bench.peers.model_folder import served_model
from rorqual.bench.peers.results import Results
from rorqual.bench.peers.settings import PeerSettings
from rorqual.bench.serving.session import write_charts


def run(model: str | None, asked: PeerSettings) -> None:
    """Raises TargetError if a server fails, KeyboardInterrupt if the user or a time limit stops it;
    in both cases no server is left running, and results so far are in the file and shown."""
    results = Results(asked.results)
    _ = asked.flags, asked.wanted  # mistakes are said before anything is started
    with tempfile.TemporaryDirectory(prefix="rorqual-peers-") as folder:
        served = served_model(model, Path(folder), asked.layers)
        try:
            if not asked.table:
                before = signal.signal(signal.SIGTERM, _interrupt)
                try:
                    PeerCall(served, asked, results, Path(folder)).run()
                finally:
                    signal.signal(signal.SIGTERM, before)
        finally:
            _show(results, served.name, asked)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _show(results: Results, model: str, asked: PeerSettings) -> None:
    if asked.peer == "none":
        print(table.alone(results, model, asked.rows))
    for settings in (None,) if asked.best else asked.flags:
        print(table.page(results, model, asked.peer, settings, asked.rows))
    if asked.chart is not None:
        stem = asked.chart.with_suffix("") if asked.chart.suffix == ".png" else asked.chart
        peer = None if asked.peer == "none" else asked.peer
        series, sources = table.chart_series(results, model, peer)
        write_charts(series, stem, sources)
