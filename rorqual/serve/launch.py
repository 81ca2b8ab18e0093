"""The process tree of `rorqual serve`: this process speaks HTTP, each of its children is an engine.

Exit status: 0 after SIGTERM or SIGINT, 1 when an engine is lost for good, 2 for a mistake in how
the server was started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import secrets
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from rorqual.config.hf import read_config_file
from rorqual.config.host_memory import check_room
from rorqual.config.listen import bound_socket
from rorqual.config.process import freeze_loaded
from rorqual.engine.config import EngineConfig
from rorqual.errors import ConfigError
from rorqual.models.hub import BUNDLED, loaded_as, model_folder
from rorqual.registry.address import SCHEME, etcd_address
from rorqual.serve.config import ServeConfig
from rorqual.serve.cors import with_cors
from rorqual.serve.engines.begin import EarlyEngines
from rorqual.serve.engines.pool import EngineFailure, EnginePool
from rorqual.serve.errors import drained
from rorqual.serve.http.app import Api, create_app
from rorqual.serve.http.connection import DirectSend, limited
from rorqual.serve.http.request_builder import Served
from rorqual.serve.limits import ServerLimits
from rorqual.serve.registration import Registration, read_secret
from rorqual.telemetry.spans import RequestTracer
from rorqual.telemetry.start import start_tracer
from rorqual.text.chat_template import ChatTemplate
from rorqual.text.generation_config import read_generation
from rorqual.text.tokenizer import tokenizer_of
from rorqual.text.tool_calls import detect

log = logging.getLogger("rorqual.serve")

SAMPLE_SECONDS = 0.5
# socket send buffer in bytes, for slow readers; connections inherit it
SEND_BUFFER = 128 << 10
SPARE_FILES = 128  # open files besides the connections of requests: libraries, sockets, probes
# how long a server that lost its engine still responds, so that callers and probes see it
RED_SECONDS = 2.0


class HttpServer(uvicorn.Server):
    """Signals are handled by `serve` below."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(config: ServeConfig, version: str, early: EarlyEngines | None = None) -> int:
    """Serve until a signal; returns the exit status. early: engine processes started before."""
    tracer = start_tracer(config.otlp_endpoint, "rorqual-server", version)
    folder = model_folder(config.model)
    served = read_served(config, folder)
    options = engine_options(config, folder)
    profile_dir(config)  # raises ConfigError before anything is loaded
    config.transfer()  # likewise
    registration(config, "")
    sock = bound_socket(config.host, config.port, SEND_BUFFER)
    try:
        import uvloop

        factory: Any = uvloop.new_event_loop
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(serve(config, options, served, sock, version, tracer, early))


def read_served(config: ServeConfig, folder: Path) -> Served:
    model = read_config_file(folder, tuple(config.engine.get("ignore_config_fields", ())))
    random = config.engine.get("weights") == "random"
    tokenizer = tokenizer_of(folder, model.vocab_size, config.tokenizer, random)
    template = ChatTemplate(tokenizer)
    if template.builtin:
        log.warning(
            "this is a base model without a chat template: /v1/chat/completions writes its "
            "turns as lines `role: content`"
        )
    elif not template.describes_tools:
        log.warning(
            "the model's chat template leaves out the functions that requests bring: the model "
            "only learns of those that the messages describe"
        )
    vocabulary = tokenizer.raw.get_vocab(with_added_tokens=True)
    reasoning = "<think>" in vocabulary if config.reasoning == "auto" else config.reasoning == "on"
    tools = _tool_format(config, vocabulary, template)
    names = config.names or _names(config, folder)
    defaults = read_generation(folder, model)
    fingerprint = f"rorqual-{secrets.token_hex(4)}"
    return Served(
        names, tokenizer, template, defaults, model.vocab_size, reasoning, tools, fingerprint
    )


def _tool_format(config: ServeConfig, vocabulary: dict[str, int], template: ChatTemplate) -> str:
    if config.tool_format != "auto":
        return config.tool_format
    found = detect(vocabulary, template.tokenizer.template)
    if found is None and template.describes_tools:
        log.warning(
            "neither the vocabulary nor the chat template says how the model writes tool calls: "
            "they are looked for in Hermes's form (--tool-format names another)"
        )
    return found or "hermes"


def _names(config: ServeConfig, folder: Path) -> tuple[str, ...]:
    if folder == Path(BUNDLED):
        return ("rorqual-bundled",)
    return (config.model or folder.name,)


def profile_dir(config: ServeConfig) -> Path | None:
    """The folder for profiles, created if missing."""
    if config.profile_dir is None:
        return None
    folder = Path(config.profile_dir).expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"profile_dir={config.profile_dir!r} is no folder that can be written: {error.strerror}"
        ) from None
    return folder


def engine_options(config: ServeConfig, folder: Path) -> list[dict[str, Any]]:
    """One set a replica; on GPUs replica i of an engine with W ranks takes W GPUs from
    first_device + i * W on.

    Raises ConfigError for invalid options, and for replicas with launchers that only start the
    ranks of one engine."""
    base = {**config.engine, "model": str(folder)}
    engine = EngineConfig.from_dict(base)
    if config.replicas > 1 and ":" in engine.device:
        raise ConfigError(
            f"device={engine.device!r} names one device for {config.replicas} replicas; "
            "accepted: auto, cpu, cuda, npu"
        )
    if engine.launcher == "torchrun" and (config.replicas > 1 or config.restart):
        raise ConfigError(
            "launcher='torchrun' starts the ranks of one engine, once: it goes with neither "
            "replicas nor restart"
        )
    if engine.kv_host_memory and engine.launcher == "local":
        # replicas start concurrently, and each by itself would find enough memory
        check_room(engine.kv_host_memory, config.replicas * engine.parallel.world)
    return [
        {**base, "first_device": engine.first_device + i * engine.parallel.world}
        for i in range(config.replicas)
    ]


async def serve(
    config: ServeConfig,
    options: list[dict[str, Any]],
    served: Served,
    sock: socket.socket,
    version: str,
    tracer: RequestTracer,
    early: EarlyEngines | None = None,
) -> int:
    """options: of each replica's engine."""
    limits = config.limits
    where = served.tokenizer.folder
    transfer = config.transfer()
    pool = EnginePool(
        options,
        limits,
        config.restart,
        config.stall,
        config.structured,
        where,
        transfer,
        config.events(),
        early,
    )
    shown = _shown(config, options[0]["model"], str(where))
    # with prompts that are answered before their first token there is none to send
    hands_over = transfer is not None and transfer.sends and not transfer.early
    api = Api(served, pool, limits, version, shown, config.metrics_names, hands_over)
    routes = create_app(api, config.api_key, profile_dir(config), tracer)
    app = DirectSend(with_cors(routes, config.cors))
    server = HttpServer(_uvicorn(app, limits))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    http = asyncio.create_task(server.serve([sock]))
    engines = asyncio.create_task(pool.run())
    known = registration(config, address(sock))
    beside = (_sample(api), _announce(api, sock, known), api.memory.run())
    others = [asyncio.create_task(work) for work in beside]
    stop = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({engines, http, stop}, return_when=asyncio.FIRST_COMPLETED)
        if known is not None:
            others[1].cancel()
            await known.deregister()
        return await _end(api, engines, stopping)
    finally:
        for task in others:
            task.cancel()
        await pool.stop()
        engines.cancel()
        stop.cancel()
        server.should_exit = True
        await asyncio.gather(http, engines, *others, return_exceptions=True)
        await asyncio.to_thread(tracer.close)


async def _end(api: Api, engines: asyncio.Task[None], stopping: asyncio.Event) -> int:
    """On a signal: let open requests finish. When an engine is lost: report unhealthy for a moment,
    then exit with an error."""
    if stopping.is_set():
        await _drain(api, stopping)
        return 0
    api.draining = True
    error = (
        engines.exception() if engines.done() else RuntimeError("the HTTP server ended by itself")
    )
    for failure in getattr(error, "exceptions", [error]):
        log.error("%s", failure if isinstance(failure, EngineFailure) else repr(failure))
    mistake = any(client.dying is not None and client.dying.user for client in _last_clients(api))
    if not mistake:
        await asyncio.sleep(RED_SECONDS)
    return 2 if mistake else 1


def _last_clients(api: Api) -> list[Any]:
    return [engine.client for engine in api.pool.engines if engine.client is not None]


async def _drain(api: Api, stopping: asyncio.Event) -> None:
    """Reject new requests; open ones have `drain` seconds, or until a second signal."""
    api.draining = True
    stopping.clear()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + api.limits.drain
    if api.running:
        log.warning(
            "shutting down: %d requests have up to %g s", len(api.running), api.limits.drain
        )
    while api.running and loop.time() < deadline and not stopping.is_set():
        await asyncio.sleep(0.05)
    for job in list(api.running):
        job.fail(drained())
    await asyncio.sleep(0.05 if api.running else 0)


async def _sample(api: Api) -> None:
    while True:
        api.rates.sample()
        api.history.sample()
        await asyncio.sleep(SAMPLE_SECONDS)


async def _announce(api: Api, sock: socket.socket, known: Registration | None) -> None:
    """Log once the server is ready; then register with routers while it serves."""
    while not api.pool.complete:
        await asyncio.sleep(0.05)
    freeze_loaded()
    check_open_files(api.pool.room)
    slowest = max(api.pool.clients, key=lambda client: client.start_seconds)
    phases = {"api": api.pool.began, **slowest.startup}
    shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items())
    log.warning("ready after %.1f s: %s", sum(phases.values()), shown)
    log.warning("serving %s on %s (docs at /docs)", ", ".join(api.served.names), address(sock))
    if known is not None:
        await known.run()


def address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def registration(config: ServeConfig, url: str) -> Registration | None:
    """Raises ConfigError where the secret cannot be read."""
    if not config.register or config.register_secret_file is None:
        return None
    secret = read_secret(config.register_secret_file)
    routers = tuple(one.rstrip("/") for one in config.register if not one.startswith(SCHEME))
    etcd = tuple(etcd_address(one) for one in config.register if one.startswith(SCHEME))
    return Registration(routers, secret, config.register_url or url, config.role, etcd)


def check_open_files(room: int) -> None:
    """Warn where connections would be refused before `room` sequences are open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = room + SPARE_FILES
    if most != resource.RLIM_INFINITY and most < needed:
        log.warning(
            "at most %d files may be open, but %d requests may run or wait, each with a "
            "connection: raise the limit (ulimit -n %d), or lower --max-waiting",
            most,
            room,
            needed,
        )


def _uvicorn(app: Any, limits: ServerLimits) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=limited(limits),
        ws="none",
        loop="none",
        lifespan="off",
        access_log=False,
        log_config=None,  # uvicorn's own would log callers' text unescaped
        log_level="error",
        server_header=False,
        date_header=False,
        timeout_keep_alive=65,
        timeout_graceful_shutdown=2,
        backlog=2048,
    )


def _shown(config: ServeConfig, folder: str, tokenizer: str) -> dict[str, Any]:
    """The content of /server_info; never the key. root, tokenizer_root: names by which clients load
    them."""
    where = {"model": folder, "tokenizer": tokenizer, "pid": os.getpid()}
    words = config.tokenizer or (config.model if tokenizer == folder else None)
    where["root"] = loaded_as(config.model, Path(folder))
    where["tokenizer_root"] = loaded_as(words, Path(tokenizer))
    how = {"replicas": config.replicas, "restart": config.restart, "engine": config.engine}
    return {**where, **how}
