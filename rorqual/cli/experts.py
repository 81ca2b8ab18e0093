"""rorqual experts: the routed experts of a model, for attention processes to call."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Annotated

import typer

from rorqual.cli.options import Flags, Given, Model, Recipe, Settings, engine_options, with_options
from rorqual.config.log import log_to_stderr
from rorqual.engine.config import EngineConfig

log = logging.getLogger("rorqual.experts")
ENGINE = Flags(
    EngineConfig,
    only=(
        "dtype",
        "device",
        "weights",
        "quantization",
        "seed",
        "num_layers",
        "threads",
        "ignore_config_fields",
    ),
)
MAX_ROWS = 16_384


@with_options(engine=ENGINE)
def experts(
    engine: Given,
    model: Model = None,
    layers: Annotated[
        str, typer.Option("--layers", help="Numbers of layers: all, or such as 0-13,20.")
    ] = "all",
    slots: Annotated[
        str, typer.Option("--slots", help="Experts of each: all, none, or such as 0-63,70.")
    ] = "all",
    max_slots: Annotated[
        int | None,
        typer.Option(
            "--max-slots",
            min=1,
            help="Experts of each layer that there is memory for, where --expert-rebalance moves "
            "them; without it as many as --slots names.",
        ),
    ] = None,
    listen: Annotated[
        str,
        typer.Option("--listen", help="HOST:PORT, a private address; port 0 takes a free one."),
    ] = "127.0.0.1:9400",
    secret_file: Annotated[
        str | None,
        typer.Option("--expert-secret-file", help="A file with the secret that callers know."),
    ] = None,
    max_rows: Annotated[
        int, typer.Option("--max-rows", min=1, max=1_048_576, help="Most rows of a call.")
    ] = MAX_ROWS,
    config: Recipe = None,
    settings: Settings = None,
) -> None:
    """Hold routed experts of a model, and compute with them for servers started with --experts."""
    from rorqual.disagg.expert_server import serve_experts

    log_to_stderr("rorqual experts: %(message)s", logging.INFO)
    named, options = engine_options(config, settings, engine)
    server = serve_experts(
        model or named, options, layers, slots, listen, secret_file, max_rows, max_slots or 0
    )
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    print(f"experts at {server.host}:{server.port}", flush=True)
    stopped.wait()
    server.close()
