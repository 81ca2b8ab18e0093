"""A router before a prefill server and two decode servers, of which one dies, sleeps or is full, in
each state of a request: every client has the tokens of one server undisturbed, and nothing is held
in the end."""

from __future__ import annotations

import http.client
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("fastapi")

from tests.child_process import stand_still
from tests.disagg.test_pages_travel import figure, shown
from tests.route.running import start_router
from tests.route.test_real_servers import Read, body, stream
from tests.serve.running import Running, start_server

pytestmark = pytest.mark.exhaustive

LEASE = 4.0
OPTIONS = (
    "--dtype", "float32", "--max-num-seqs", "8", "--max-model-len", "256", "--page-size", "8",
    "--num-pages", "100", "--threads", "1", "--restart", "--kv-lease-seconds", str(LEASE),
)  # fmt: skip
HELD = "kv_transfer_pages_held"
MANY = 150  # tokens of an answer that takes a while
COMING = "kv_transfer_requests_waiting"


@dataclass
class Apart:
    """prefill also answers by itself, to tell what is right. killed: engines' processes."""

    prefill: Running
    decodes: list[Running]
    router: Running
    killed: set[int] = field(default_factory=set)

    @property
    def servers(self) -> list[Running]:
        return [self.prefill, *self.decodes]

    def signal(self, servers: list[Running], sign: int) -> None:
        """To their engines."""
        for server in servers:
            for pid in server.engine_pids():
                if sign == signal.SIGKILL:
                    self.killed.add(pid)
                stand_still(pid) if sign == signal.SIGSTOP else os.kill(pid, sign)

    def rest(self) -> None:
        """Until all are ready again and hold nothing: a server may not have noticed yet that its
        engine was killed."""
        for server in self.servers:
            server.wait_until(lambda server=server: self.killed.isdisjoint(server.engine_pids()))
            server.wait_until(server.healthy, 120)
            server.wait_until(lambda server=server: server.held_pages() == 0, 120)
            server.wait_until(lambda server=server: shown(server, COMING) == 0, 120)
        self.prefill.wait_until(lambda: shown(self.prefill, HELD) == 0, LEASE + 60)
        self.router.wait_until(self.router.healthy, 60)
        wanted = [f'server_ready{{server="{server.url}"}} 1.0' for server in self.servers]
        self.router.wait_until(lambda: all(one in self.router.get("/metrics") for one in wanted))

    def busy(self) -> list[Running]:
        """Decode servers to which the router has sent one request."""
        figures = self.router.get("/metrics")
        return [s for s in self.decodes if f'in_flight{{server="{s.url}"}} 1.0' in figures]

    def with_work(self) -> Running:
        (found,) = self.busy()
        return found


def options(folder: Path, role: str) -> tuple[str, ...]:
    secret = folder / "kv-secret"
    secret.write_text("of all who exchange pages")
    return (*OPTIONS, "--role", role, "--kv-secret-file", str(secret), "--kv-peers", "127.0.0.1")


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    folder = tmp_path_factory.mktemp("deaths")
    with ExitStack() as stack:
        roles = ("both", "decode", "decode")
        prefill, *decodes = (
            stack.enter_context(start_server(*options(folder, role))) for role in roles
        )
        router = stack.enter_context(start_router(*router_options(prefill, decodes)))
        router.wait_until(router.healthy)
        yield Apart(prefill, decodes, router)


def router_options(prefill: Running, decodes: list[Running]) -> list[str]:
    urls = [word for server in decodes for word in ("--decode", server.url)]
    return ["--prefill", prefill.url, *urls, "--prefill-from", "20", "--health-interval", "0.1"]


@pytest.fixture(scope="module")
def right(apart: Apart) -> dict[int, Read]:
    return {n: stream(apart.prefill.url, body(n, cache_salt="alone")) for n in range(5)}


class Client(threading.Thread):
    """Reads one stream of the router, with a prompt that nobody has cached. seen: called after each
    event with how many there were."""

    def __init__(
        self,
        apart: Apart,
        number: int,
        salt: str,
        seen: Callable[[int], None] = lambda count: None,
        **more: Any,
    ):
        super().__init__(daemon=True)
        self.url = apart.router.url
        self.asked = body(number, cache_salt=salt, **more)
        self.seen = seen
        self.read: Read | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.read = stream(self.url, self.asked, self.seen)
        except (OSError, http.client.HTTPException, AssertionError) as error:
            self.error = error

    def ended(self) -> Read:
        self.join(120)
        assert self.error is None, self.error
        assert self.read is not None, "it has not ended"
        return self.read


def computing(apart: Apart, number: int, salt: str) -> Client:
    """Its prompt is at the prefill server, whose engine is stopped."""
    apart.signal([apart.prefill], signal.SIGSTOP)
    client = Client(apart, number, salt)
    apart.prefill.wait_until(lambda: apart.prefill.get("/load")["server_load"] > 0)
    return client


def offered(apart: Apart, number: int, salt: str) -> Client:
    """Its pages are offered, and the engines that could fetch them are stopped."""
    apart.signal(apart.decodes, signal.SIGSTOP)
    client = Client(apart, number, salt)
    apart.prefill.wait_until(lambda: figure(apart.prefill, HELD) > 0)
    return client


def travelling(apart: Apart, number: int, salt: str) -> tuple[Client, Running]:
    """Its pages are asked for, and the prefill engine is stopped; who waits for them."""
    client = offered(apart, number, salt)
    apart.signal([apart.prefill], signal.SIGSTOP)
    apart.signal(apart.decodes, signal.SIGCONT)
    found: list[Running] = []

    def waits() -> bool:
        found[:] = [server for server in apart.decodes if figure(server, COMING)]
        return bool(found)

    apart.router.wait_until(waits, 9)
    return client, found[0]


def streaming(apart: Apart, number: int, salt: str) -> Client:
    """It has had a few events; the decode engines are stopped."""
    pids = [pid for server in apart.decodes for pid in server.engine_pids()]
    stopped = threading.Event()

    def stop(count: int) -> None:
        if count == 5:
            for pid in pids:
                stand_still(pid)
            stopped.set()

    client = Client(apart, number, salt, stop, max_tokens=MANY)
    assert stopped.wait(60)
    return client


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_killed_while_the_prompt_is_computed(
    apart: Apart, right: dict[int, Read], victim: str
) -> None:
    apart.rest()
    client = computing(apart, 0, f"computing {victim}")
    apart.signal([apart.prefill if victim == "prefill" else apart.decodes[0]], signal.SIGKILL)
    if victim == "decode":
        apart.signal([apart.prefill], signal.SIGCONT)
    assert client.ended() == right[0]
    apart.rest()


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_killed_while_pages_travel(apart: Apart, right: dict[int, Read], victim: str) -> None:
    apart.rest()
    client, waiting = travelling(apart, 1, f"travelling {victim}")
    apart.signal([apart.prefill if victim == "prefill" else waiting], signal.SIGKILL)
    if victim == "decode":
        apart.signal([apart.prefill], signal.SIGCONT)
    assert client.ended() == right[1]
    apart.rest()


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_killed_while_the_answer_streams(apart: Apart, victim: str) -> None:
    """The decode engines are stopped in the midst of it, so that there is a midst."""
    apart.rest()
    want = stream(apart.prefill.url, body(2, cache_salt="alone", max_tokens=MANY))
    client = streaming(apart, 2, f"streaming {victim}")
    apart.signal([apart.prefill if victim == "prefill" else apart.with_work()], signal.SIGKILL)
    for server in apart.decodes:
        for pid in server.engine_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert client.ended() == want
    apart.rest()


@pytest.mark.longest
def test_a_reader_that_sleeps_for_longer_than_the_lease(
    apart: Apart, right: dict[int, Read]
) -> None:
    """When it wakes the pages are others'."""
    apart.rest()
    expired = figure(apart.prefill, "kv_transfer_leases_expired_total")
    client = offered(apart, 3, "late reader")
    try:
        apart.prefill.wait_until(
            lambda: figure(apart.prefill, "kv_transfer_leases_expired_total") > expired
        )
        for number in range(8):
            stream(apart.prefill.url, body(number, cache_salt=f"others {number}"))
    finally:
        apart.signal(apart.decodes, signal.SIGCONT)
    assert client.ended() == right[3]
    assert any("the pages are kept no more" in server.text() for server in apart.decodes)
    apart.rest()


def test_a_keeper_that_sleeps_for_longer_than_the_lease(
    apart: Apart, right: dict[int, Read]
) -> None:
    apart.rest()
    client, _ = travelling(apart, 4, "late keeper")
    assert client.ended() == right[4], "the answering server has computed the prompt"
    apart.signal([apart.prefill], signal.SIGCONT)
    apart.rest()


def test_decoders_that_are_full(apart: Apart, right: dict[int, Read]) -> None:
    """Many more streams than their caches hold."""
    apart.rest()
    clients = [Client(apart, number % 5, f"full {number}") for number in range(30)]
    for number, client in enumerate(clients):
        assert client.ended() == right[number % 5]
    apart.rest()


@pytest.mark.parametrize("state", ["computing", "travelling", "streaming"])
def test_a_router_that_is_killed(apart: Apart, right: dict[int, Read], state: str) -> None:
    """Its clients see their connections break; servers let go of their requests, and another router
    serves at once."""
    apart.rest()
    options = router_options(apart.prefill, apart.decodes)
    with start_router(*options) as router:
        router.wait_until(router.healthy)
        own = Apart(apart.prefill, apart.decodes, router)
        states: dict[str, Callable[[], Client]] = {
            "computing": lambda: computing(own, 0, f"router {state}"),
            "travelling": lambda: travelling(own, 0, f"router {state}")[0],
            "streaming": lambda: streaming(own, 0, f"router {state}"),
        }
        client = states[state]()
        os.kill(router.pid, signal.SIGKILL)
        client.join(30)
        assert client.read is None
        assert client.error is not None
    apart.signal(apart.servers, signal.SIGCONT)
    apart.rest()
    assert Client(apart, 0, f"router {state}").ended() == right[0]
