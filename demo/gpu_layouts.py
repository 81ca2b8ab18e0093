"""Layouts of two devices as server processes, behind a router where there is more than one: which
servers each has, how they start and end, and what they count.

    replicas  two servers that compute prompts and answer
    apart     one server computes prompts, the other one answers
    tp2       one server on both devices

On a CPU servers have no device of their own, one thread and small caches; pages go by TCP.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from served_load import LOOK_SECONDS, counted, running_router

from rorqual.bench.peers.model_folder import ServedModel
from rorqual.bench.peers.server_process import (
    RunningServer,
    StartedServer,
    last_lines,
    started_server,
)
from rorqual.errors import TargetError

LAYOUTS = ("replicas", "apart", "tp2")
COUNTERS_SECONDS = 3.0  # after which /metrics must have what the engines counted
CPU_SEQS = 64
CPU_PAGE = 16


def common_options(model: ServedModel, weights: str, device: str, max_tokens: int) -> list[str]:
    """Of every server. max_tokens: of a request's prompt and answer together."""
    max_model_len = max_tokens + CPU_PAGE
    options = [str(model.folder), "--weights", weights, "--max-model-len", str(max_model_len)]
    if device != "cpu":
        return options
    pages = CPU_SEQS * (-(-max_model_len // CPU_PAGE) + 1)
    return [
        *options,
        *("--device", "cpu", "--threads", "1", "--max-num-seqs", str(CPU_SEQS)),
        *("--page-size", str(CPU_PAGE), "--num-pages", str(pages)),
    ]


def transport_of(device: str) -> str:
    return "tcp" if device == "cpu" else "handles"


def layout_options(layout: str, device: str, secret: Path) -> list[list[str]]:
    """What each of its servers gets beside the options that all have. Both servers of a pair see
    both GPUs, since one reads the other's memory."""
    gpus = [[] if device == "cpu" else ["--device", f"cuda:{number}"] for number in (0, 1)]
    if layout == "tp2":
        return [["--tp", "2"]]
    if layout == "replicas":
        return gpus
    kv = ["--kv-transport", transport_of(device), "--kv-secret-file", str(secret)]
    return [
        [*gpus[0], "--role", "prefill", "--kv-port", "0", *kv],
        [*gpus[1], "--role", "decode", "--kv-peers", "127.0.0.1", *kv],
    ]


def router_options(layout: str, urls: Sequence[str]) -> list[str]:
    """Nothing for one server, which has no router."""
    if layout == "tp2":
        return []
    if layout == "apart":
        return ["--prefill", urls[0], "--decode", urls[1], "--prefill-from", "1"]
    return ["--replica", urls[0], "--replica", urls[1], "--policy", "least_loaded"]


@dataclass(frozen=True)
class Running:
    """A layout that takes requests. url: where they go, the router's if there is one."""

    layout: str
    url: str
    servers: tuple[RunningServer, ...]
    router: RunningServer | None
    transport: str

    def check(self) -> None:
        """Raises TargetError where one of its processes has ended."""
        for server in (*self.servers, *filter(None, [self.router])):
            if server.lost():
                raise TargetError(f"a server has ended:\n{last_lines(server.log)}")

    def pages(self, least: float = 0) -> dict[str, float]:
        """Totals since the start: prompts that the prefill server took, those whose pages the
        decode server fetched, those of which not all came, and bytes by the transport. Waits for
        `least` fetched prompts, because engines report their counts four times a second."""
        if self.layout != "apart" or self.router is None:
            return {}
        decode = self.servers[1].url
        by = f'transport="{self.transport}"'
        deadline = time.monotonic() + COUNTERS_SECONDS
        while True:
            found = {
                "prefilled": counted(self.router.url, "rorqual_router_prefills_total", '"ok"'),
                "fetched": counted(decode, "rorqual:kv_transfer_requests_total"),
                "failures": counted(decode, "rorqual:kv_transfer_failures_total"),
                "bytes": counted(decode, "rorqual:kv_transfer_bytes_received_total", by),
            }
            if found["fetched"] >= least or time.monotonic() > deadline:
                return found
            time.sleep(LOOK_SECONDS)

    def moved(self) -> float:
        """Requests and streams that the router has sent to a second server."""
        if self.router is None:
            return 0
        names = ("rorqual_router_retries_total", "rorqual_router_resumes_total")
        return sum(counted(self.router.url, name) for name in names)

    def pages_since(self, before: Mapping[str, float], requests: int) -> dict[str, float]:
        """Of so many requests that have ended."""
        if not before:
            return {}
        after = self.pages(before["fetched"] + requests)
        return {name: total - before[name] for name, total in after.items()}


@contextmanager
def running(
    layout: str, common: Sequence[str], device: str, logs: Path, seconds: float
) -> Iterator[Running]:
    """Its servers start side by side. Raises TargetError where they are not ready in time."""
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        secret = Path(name) / "kv-secret"
        secret.write_text(os.urandom(32).hex(), encoding="utf-8")
        started = []
        for number, own in enumerate(layout_options(layout, device, secret)):
            command = serve_command([*common, *own])
            log = logs / f"{layout}-{number}.log"
            started.append(stack.enter_context(started_server(command, log)))
        stack.callback(end_together, started)
        servers = tuple(one.wait_ready(end - one.began) for one in started)
        given = router_options(layout, [server.url for server in servers])
        router = None
        url = servers[0].url
        if given:
            log = logs / f"{layout}-router.log"
            left = max(1.0, end - time.monotonic())
            router = stack.enter_context(running_router(log, len(servers), left, *given))
            url = router.url
        yield Running(layout, url, servers, router, transport_of(device))


def end_together(started: Sequence[StartedServer]) -> None:
    """Ask all to end, so that each is not waited for before the next is asked."""
    for server in started:
        with suppress(ProcessLookupError):
            server.process.send_signal(signal.SIGTERM)


def serve_command(options: Sequence[str]) -> Callable[[int], list[str]]:
    command = [sys.executable, "-m", "rorqual", "serve"]
    return lambda port: [*command, *options, "--port", str(port)]
