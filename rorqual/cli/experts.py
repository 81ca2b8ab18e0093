"""rorqual experts: the routed experts of a model, for attention processes to call."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from rorqual.cli.options import Flags, Given, Model, Recipe, Settings, engine_options, with_options
from rorqual.config.log import log_to_stderr
from rorqual.config.process import freeze_loaded
from rorqual.engine.config import EngineConfig
from rorqual.errors import ConfigError
from rorqual.parallel.remote.config import read_link_secret
from rorqual.registry.address import SCHEME
from rorqual.registry.expert_registry import ExpertMembership, ExpertRegistry, expert_registry
from rorqual.registry.experts import ExpertRecord

if TYPE_CHECKING:
    from rorqual.disagg.experts.server import ExpertServer

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
Register = Annotated[
    list[str] | None,
    typer.Option(
        "--register",
        help="Where callers look (--experts-from): http://HOST:PORT of a `rorqual route`, or "
        "etcd://HOST:PORT; may be repeated.",
    ),
]
RegisterSecret = Annotated[
    str | None,
    typer.Option(
        "--register-secret-file",
        help="A file with the router's --admin-secret-file secret; etcd needs none.",
    ),
]


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
    register: Register = None,
    register_secret_file: RegisterSecret = None,
    max_rows: Annotated[
        int, typer.Option("--max-rows", min=1, max=1_048_576, help="Most rows of a call.")
    ] = MAX_ROWS,
    config: Recipe = None,
    settings: Settings = None,
) -> None:
    """Hold routed experts of a model, and compute with them for servers started with --experts."""
    from rorqual.disagg.experts.server import serve_experts

    log_to_stderr("rorqual experts: %(message)s", logging.INFO)
    # callers' lanes wait for each other on separate streams, which must not share a hardware queue
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    named, options = engine_options(config, settings, engine)
    announced = (slots.replace(" ", ""), layers.replace(" ", ""))
    registries = _registries(register or [], register_secret_file, secret_file)
    if registries:
        ExpertRecord("127.0.0.1:1", *announced)  # fail now, not after minutes of loading
    server = serve_experts(
        model or named, options, layers, slots, listen, secret_file, max_rows, max_slots or 0
    )
    _serve(server, registries, announced)


def _serve(
    server: ExpertServer, registries: list[ExpertRegistry], announced: tuple[str, str]
) -> None:
    """Serve until a signal."""
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    freeze_loaded()
    print(f"experts at {server.host}:{server.port}", flush=True)
    record = ExpertRecord(f"{server.host}:{server.port}", *announced)
    members = [ExpertMembership(registry, record) for registry in registries]
    stopped.wait()
    for member in members:
        member.leave()
    server.close()


def _registries(
    given: list[str], register_secret_file: str | None, secret_file: str | None
) -> list[ExpertRegistry]:
    """Raises ConfigError."""
    if not given:
        if register_secret_file is not None:
            raise ConfigError("register_secret_file goes with register alone")
        return []
    secret = read_link_secret(secret_file, "expert_secret_file")
    etcd = [url for url in given if url.startswith(SCHEME)]
    if register_secret_file is not None and len(etcd) == len(given):
        raise ConfigError("register_secret_file goes with a router's address alone")
    files = [None if url in etcd else register_secret_file for url in given]
    return [
        expert_registry(url, secret, file, "register")
        for url, file in zip(given, files, strict=True)
    ]
