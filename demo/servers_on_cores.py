"""Servers for measurements on a CPU: a core for each; two replicas, or one that computes prompts
and one that answers, behind a router each. What is measured while other programs take a tenth of a
processor (`others`) is measured again, where a better moment comes soon."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from served_load import play, running_router

from rorqual.bench.serving.client import RequestRecord, ServerTarget
from rorqual.bench.serving.launched_server import launched_server
from rorqual.bench.serving.load import ArrivalLoad
from rorqual.bench.serving.prompts import Prompt

PAGE = 16
SEQS = 64
BUDGET = 1024
DISTURBED = 0.1  # processors that other programs take: what was measured is not kept
LOOK_SECONDS = 0.5
WAIT_SECONDS = 40.0  # for a better moment
NAMES = ("replicas", "apart")

T = TypeVar("T")


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started meanwhile stays on this core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# ---- servers


def options(longest: int) -> list[str]:
    pages = SEQS * (-(-longest // PAGE) + 1)
    return [
        *("--threads", "1", "--page-size", str(PAGE), "--max-num-seqs", str(SEQS)),
        *("--max-num-batched-tokens", str(BUDGET), "--max-model-len", str(longest)),
        *("--num-pages", str(pages)),
    ]


def apart_options(prefill: str, decode: str, first_token: str) -> tuple[str, ...]:
    """Of a router. first_token: the server that it comes from."""
    servers = ("--prefill", prefill, "--decode", decode)
    return (*servers, "--prefill-from", "1", "--first-token", first_token)


def apart_roles(folder: Path) -> list[tuple[str, ...]]:
    """Options of the server that computes prompts, and of the one that answers."""
    secret = folder / "kv-secret"
    secret.write_bytes(os.urandom(32).hex().encode())
    apart = ("--kv-secret-file", str(secret), "--kv-port", "0", "--kv-peers", "127.0.0.1")
    return [("--role", "prefill", *apart), ("--role", "decode", *apart)]


@dataclass(frozen=True)
class Deployed:
    """Addresses: of both routers, and of the server that answers behind the second. processes: of
    each deployment its two servers, and its router."""

    replicas: str
    apart: str
    decode: str
    processes: dict[str, tuple[int, int, int]]

    def spent(self, name: str) -> list[float]:
        """Processor seconds of these so far."""
        return [processor_seconds(pid) for pid in self.processes[name]]


def processor_seconds(pid: int) -> float:
    """Of a process and those that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    own = time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)
    return own + sum(processor_seconds(int(child)) for child in children)


@contextmanager
def deployed(longest: int, cores: tuple[int, int], folder: Path) -> Iterator[Deployed]:
    """All four servers; the two that are not asked sleep."""
    roles = [(), (), *apart_roles(folder)]
    with ExitStack() as stack:
        urls, pids = [], []
        for number, role in enumerate(roles):
            with on_core(cores[number % 2]):
                started = launched_server([*options(longest), *role])
                server = stack.enter_context(started)
            urls.append(server.url)
            pids.append(server.pid)
        both = ("--replica", urls[0], "--replica", urls[1], "--policy", "least_loaded")
        split = apart_options(urls[2], urls[3], "decode")
        one, other = (
            stack.enter_context(running_router(folder / f"{name}.log", 2, 60, *given))
            for name, given in zip(NAMES, (both, split), strict=True)
        )
        processes = {
            "replicas": (pids[0], pids[1], one.pid),
            "apart": (pids[2], pids[3], other.pid),
        }
        yield Deployed(one.url, other.url, urls[3], processes)


def played(url: str, prompts: list[Prompt], load: ArrivalLoad) -> list[RequestRecord]:
    """Raises SystemExit where a request failed."""
    records = play(ServerTarget(url), prompts, load).records
    wrong = next((record.error for record in records if record.error), None)
    if wrong:
        raise SystemExit(f"{url}: a request failed: {wrong}")
    return records


def measured(records: list[RequestRecord]) -> dict[str, float]:
    """tokens/s, and milliseconds."""
    began = min(record.due for record in records)
    ended = max(record.end for record in records)
    first = [1e3 * (record.ttft or 0.0) for record in records]
    gaps = [1e3 * gap for record in records for gap in record.itls]
    return {
        "tokens_s": sum(record.output_tokens for record in records) / (ended - began),
        "ttft_p50": float(np.percentile(first, 50)),
        "ttft_p99": float(np.percentile(first, 99)),
        "itl_p50": float(np.percentile(gaps, 50)),
        "itl_p99": float(np.percentile(gaps, 99)),
    }


def shapes_of(text: str) -> list[tuple[int, int]]:
    """ "1024:64,256:256" as tokens of prompts and of answers."""
    pairs = (one.partition(":") for one in text.split(","))
    return [(int(length), int(output)) for length, _, output in pairs]


# ---- other programs


def busy_seconds() -> float:
    """Of all processors, since the machine started."""
    with open("/proc/stat", encoding="utf-8") as file:
        user, nice, system, _, _, irq, soft, steal, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def others(where: Deployed, work: Callable[[], T]) -> tuple[T, float]:
    """`work` while other programs take little, if that can be had soon; and the processors that
    they took meanwhile."""
    deadline = time.monotonic() + WAIT_SECONDS
    found = None
    while True:
        while _watched(where, lambda: time.sleep(LOOK_SECONDS))[1] > DISTURBED:
            if time.monotonic() > deadline:
                break
        again = _watched(where, work)
        if found is None or again[1] < found[1]:
            found = again
        if found[1] <= DISTURBED or time.monotonic() > deadline:
            return found


def _watched(where: Deployed, work: Callable[[], T]) -> tuple[T, float]:
    def ours() -> float:
        return sum(sum(where.spent(name)) for name in NAMES) + time.process_time()

    began = time.monotonic()
    before = busy_seconds() - ours()
    result = work()
    after = busy_seconds() - ours()
    return result, max(0.0, after - before) / (time.monotonic() - began)
