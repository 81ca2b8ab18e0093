"""Two thousand requests through a router, a prefill server and two decode servers; a quarter of the
clients leave, and every ten seconds, or once the one before is back, a server or the router is
killed: no wrong token, nothing is held in the end, and who stays has tokens or a clear error."""

from __future__ import annotations

import http.client
import itertools
import os
import random
import signal
import threading
import time
import urllib.error
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("fastapi")

from tests.disagg.test_pages_travel import shown
from tests.route.running import start_router
from tests.route.test_apart_deaths import COMING, HELD, options, router_options
from tests.route.test_real_servers import Read, body, killed, stream
from tests.serve.running import Running, served_port, start_server

pytestmark = [pytest.mark.exhaustive, pytest.mark.longest]

REQUESTS = int(os.environ.get("REQUESTS", "2000"))
CLIENTS = 12
SECONDS = 10.0  # between two kills
OUTPUT = 48
ROLES = ("both", "decode", "decode")


class Left(Exception):
    """A client has seen enough."""


class Cluster:
    def __init__(self, folder: Path, stack: ExitStack):
        self.folder = folder
        self.stack = stack
        self.servers = [self._start(role, "0") for role in ROLES]
        self.routing = router_options(self.servers[0], self.servers[1:])
        self.router = stack.enter_context(start_router(*self.routing))
        self.router.wait_until(self.router.healthy)
        self.router_kills = 0

    def _start(self, role: str, port: str) -> Running:
        more = ("--kv-by-layer",) if role == "both" else ("--kv-host-memory", "0.01")
        asked = (*options(self.folder, role), *more, "--port", port)
        started = self.stack.enter_context(start_server(*asked, wait=False))
        started.wait_until(lambda: served_port(started), 300)  # the others have work meanwhile
        started.port = served_port(started)
        return started

    def kill(self, which: int) -> None:
        """And start again at the same address. The last is the router."""
        if which == len(self.servers):
            self.router_kills += 1
            os.kill(self.router.pid, signal.SIGKILL)
            self.router.process.wait()
            again = start_router(*self.routing, "--port", str(self.router.port))
            self.router = self.stack.enter_context(again)
            return
        old = self.servers[which]
        killed(old)
        self.servers[which] = self._start(ROLES[which], str(old.port))


class Clients:
    def __init__(self, cluster: Cluster, right: dict[int, Read]):
        self.cluster = cluster
        self.right = right
        self.todo = iter(range(REQUESTS))
        self.lock = threading.Lock()
        self.outcomes = Counter[str]()
        self.problems: list[str] = []

    def work(self, seed: int) -> None:
        chance = random.Random(seed)
        while True:
            with self.lock:
                request = next(self.todo, None)
            if request is None:
                return
            which = chance.randrange(5)
            leaves = chance.randrange(OUTPUT) if chance.random() < 0.25 else None
            outcome = "away"  # the router is: who finds nobody there asks again
            while outcome == "away":
                outcome = self.ask(which, str(request // 4), leaves)
            with self.lock:
                self.outcomes[outcome] += 1
            if outcome in ("refused", "broken"):
                time.sleep(0.2)

    def ask(self, which: int, salt: str, leaves: int | None) -> str:
        def seen(count: int) -> None:
            if leaves is not None and count > leaves:
                raise Left

        asked = body(which, max_tokens=OUTPUT, cache_salt=salt)
        try:
            read = stream(self.cluster.router.url, asked, seen)
        except Left:
            return "left"
        except urllib.error.HTTPError as error:
            if error.code not in (502, 503):
                self.problems.append(f"status {error.code}: {error.read()[:200]!r}")
            return "refused"
        except urllib.error.URLError:
            time.sleep(0.2)
            return "away"
        except (OSError, http.client.HTTPException, AssertionError):
            return "broken"
        if read.error is not None:
            if read.error not in ("stream_lost", "no_server"):
                self.problems.append(f"error {read.error}")
            return "lost"
        if read != self.right[which]:
            self.problems.append(f"{which}: {read} is not {self.right[which]}")
        return "whole"


def test_two_thousand_requests(tmp_path: Path) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, stack)
        right = {
            which: stream(
                cluster.servers[0].url, body(which, max_tokens=OUTPUT, cache_salt="alone")
            )
            for which in range(5)
        }
        clients = Clients(cluster, right)
        threads = [threading.Thread(target=clients.work, args=(seed,)) for seed in range(CLIENTS)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        kills = 0
        for which in itertools.cycle((0, 1, 2, 0, 2, 1, 3)):
            next_kill = began + SECONDS * (kills + 1)
            while any(thread.is_alive() for thread in threads) and time.monotonic() < next_kill:
                time.sleep(0.05)
            if not any(thread.is_alive() for thread in threads):
                break
            cluster.kill(which)
            kills += 1
        print(dict(clients.outcomes), kills, "kills in", time.monotonic() - began, "s")
        check(cluster, clients, kills)


def check(cluster: Cluster, clients: Clients, kills: int) -> None:
    outcomes = clients.outcomes
    assert clients.problems == []
    assert sum(outcomes.values()) == REQUESTS
    assert kills > 0
    # a connection breaks with the router alone
    assert outcomes["broken"] <= 2 * CLIENTS * cluster.router_kills
    assert outcomes["whole"] > REQUESTS // 2
    for server in cluster.servers:
        server.wait_until(server.healthy, 120)
        server.wait_until(lambda server=server: server.held_pages() == 0, 120)
        server.wait_until(lambda server=server: shown(server, COMING) == 0, 120)
    prefill = cluster.servers[0]
    prefill.wait_until(lambda: shown(prefill, HELD) == 0, 120)
    assert "rorqual_router_open_requests 0.0" in cluster.router.get("/metrics")
