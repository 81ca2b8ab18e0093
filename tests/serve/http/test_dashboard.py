"""The page that shows the server: who may see it, under which policy, with which figures, and
what a browser makes of it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.util
import re
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from rorqual.serve.engines.pool import EnginePool
from rorqual.serve.http import dashboard, history
from rorqual.serve.http.app import Api, create_app
from rorqual.serve.http.dashboard import PAGE, SESSION_SECONDS, Sessions
from rorqual.serve.http.history import History, HistoryRow
from rorqual.serve.http.prometheus.collector import OwnCollector
from rorqual.serve.limits import ServerLimits
from rorqual.serve.messages import RequestTimes, Snapshot
from tests.serve import browser
from tests.serve.browser import Browser
from tests.serve.running import Running

KEY = "open sesame/é"
needs_browser = pytest.mark.skipif(
    browser.PROGRAM is None or importlib.util.find_spec("aiohttp") is None, reason="no Chromium"
)


def engine_client(**figures: Any) -> SimpleNamespace:
    """What the API process knows of an engine that serves."""
    info = SimpleNamespace(
        model="m",
        dtype="bfloat16",
        device="cpu",
        max_model_len=64,
        max_num_seqs=4,
        num_pages=10,
        page_size=16,
    )
    ready = asyncio.Event()
    ready.set()
    return Client(
        index=0,
        info=info,
        snapshot=Snapshot(**{"at": time.monotonic(), **figures}),
        live={},
        ended=deque(),
        ready=ready,
    )


class Client(SimpleNamespace):
    """Known by what it is, not by what it holds."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@pytest.fixture
def api() -> Iterator[Api]:
    """An API process with room for one engine, in which none serves yet."""
    pool = EnginePool([{}], ServerLimits())
    yield Api(
        SimpleNamespace(names=("model",)),
        pool,
        ServerLimits(),
        "1.2.3",
        {"engine": {"num_speculative_tokens": 2}},
    )  # type: ignore[arg-type]
    pool.kill()


def browse(api: Api, key: str | None = None, url: str = "http://testserver") -> TestClient:
    return TestClient(create_app(api, key), url, follow_redirects=False)


# ---- the page


def test_the_page_runs_its_own_script_and_nothing_else(api: Api):
    answer = browse(api).get("/dashboard")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    rules = dict(
        rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; ")
    )
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == "'none'"
    assert rules["connect-src"] == "'self'"
    for tag in ("script", "style"):
        found = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert len(found) == 1
        digest = base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_stands_alone():
    text = PAGE.read_text()
    assert not re.findall(r"https?:|url\(|@import|[\"'`]//", text), (
        "nothing is fetched from elsewhere"
    )
    assert not re.findall(r"<[^>]*\s(?:on\w+|style)=", text), "the policy would refuse it"
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", text) == ["data:,", "stats", "metrics"]
    assert "prefers-color-scheme: dark" in text
    assert "prefers-reduced-motion" in text
    assert 'lang="en"' in text
    named = set(re.findall(r"aria-(?:labelledby|describedby)=\"([^\"]*)\"", text))
    assert named
    assert all(f'id="{name}"' in text for name in named)
    assert re.search(r'<form id="enter" method="post"', text), (
        "without the script, the key must not land in an address"
    )


# ---- who may see it


def test_without_a_key_it_is_open(api: Api):
    client = browse(api)
    assert client.get("/dashboard/data").json()["session"] is False
    assert client.post("/dashboard/login", data={"key": "any"}).headers["location"] == "/dashboard"


def test_with_a_key_one_logs_in(api: Api):
    client = browse(api, KEY)
    assert client.get("/dashboard").status_code == client.get("/dashboard/data").status_code == 401
    assert 'type="password"' in client.get("/dashboard").text
    answer = client.post("/dashboard/login", data={"key": KEY})
    assert answer.status_code == 303
    assert answer.headers["location"] == "/dashboard"
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/dashboard", f"Max-Age={SESSION_SECONDS}"} <= set(
        cookie.split("; ")
    )
    assert "Secure" not in cookie
    assert "sesame" not in cookie
    assert client.get("/dashboard").status_code == 200
    assert client.get("/dashboard/data").json()["session"] is True
    assert client.get("/stats").status_code == 401, "the session opens the page alone"
    client.post("/dashboard/logout")
    assert client.get("/dashboard/data").status_code == 401


def test_over_https_the_cookie_keeps_to_it(api: Api):
    assert "Secure" in browse(api, KEY, "https://testserver").post(
        "/dashboard/login", data={"key": KEY}
    ).headers["set-cookie"].split("; ")


@pytest.mark.parametrize(
    "body",
    [
        b"key=wrong",
        b"",
        b"key=",
        b"\xff\xfe",
        b"&".join([b"key=a"] * 99),
        b"key=" + b"a" * 9000,
        b"Bearer " + KEY.encode(),
    ],
)
def test_a_wrong_key_opens_nothing(api: Api, body: bytes):
    client = browse(api, KEY)
    answer = client.post("/dashboard/login", content=body)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert client.get("/dashboard/data", params={"key": KEY}).status_code == 401, (
        "the key is not taken from an address"
    )


def test_a_program_may_use_the_key_itself(api: Api):
    client = browse(api, "plain")
    assert (
        client.get("/dashboard/data", headers={"authorization": "Bearer plain"}).status_code == 200
    )
    assert (
        client.get("/dashboard/data", headers={"authorization": "Bearer plai"}).status_code == 401
    )
    assert (
        client.get(
            "/dashboard/data", headers={"authorization": "Bearer é".encode("latin-1")}
        ).status_code
        == 401
    )


def test_sessions_end_and_cannot_be_made_up():
    sessions = Sessions(KEY)
    now = 1_000_000.0
    token = sessions.token(now)
    assert sessions.valid(token, now)
    assert Sessions(KEY).valid(token, now), "a restart with the same key keeps it"
    assert not sessions.valid(token, now + SESSION_SECONDS)
    assert not Sessions("another").valid(token, now)
    assert Sessions("another").cookie != sessions.cookie
    end, rest = token.split(".", 1)
    later = f"{int(end) + 1}.{rest}"
    assert not any(
        sessions.valid(forged, now)
        for forged in ("", ".", "é", later, token[:-1], f"{token}0", token.rpartition(".")[0])
    )
    assert token != sessions.token(now)


def test_a_broken_cookie_is_no_session(api: Api):
    client = browse(api, KEY)
    name = Sessions(KEY).cookie
    for cookie in ("\x01=;;", "a=b; =", f"{name}=x", "[]={}"):
        assert client.get("/dashboard/data", headers={"cookie": cookie}).status_code == 401


# ---- the figures


def test_without_an_engine_nothing_is_zero(api: Api):
    api.history.sample()
    found = browse(api).get("/dashboard/data", params={"experts": True}).json()
    assert found["healthy"] is False
    assert found["engines"] == []
    assert found["expert_load"] == []
    assert found["records_experts"] is False
    assert found["places"] == [
        {"engine": 0, "state": "starting", "deaths": 0, "num_speculative_tokens": 2}
    ]
    assert found["fields"] == list(HistoryRow._fields)
    assert found["rows"][0][1:] == [None] * (len(HistoryRow._fields) - 1)
    assert found["recent"]["ttft"] == {"p50": None, "p90": None, "p95": None, "p99": None}


def test_figures_of_engines(api: Api):
    client = engine_client(
        running=3,
        waiting=1,
        pages_total=10,
        pages_used=4,
        pages_cached=2,
        expert_load=[[1, 2], [3, 4]],
        expert_balancedness=[0.5, 0.75],
        expert_moves=[1, 4, 30, 2],
    )
    client.ended.append(RequestTimes(time.monotonic(), 0.5, 0.02, 2.0, 0.1))
    api.pool.engines[0].client = client  # type: ignore[assignment]
    api.history.sample()
    page = browse(api)
    found = page.get("/dashboard/data").json()
    assert found["healthy"] is True
    assert found["version"] == "1.2.3"
    assert found["models"] == ["model"]
    assert found["draining"] is False
    row = dict(zip(found["fields"], found["rows"][-1], strict=True))
    assert (row["running"], row["waiting"], row["kv_used"], row["kv_cached"]) == (3, 1, 0.4, 0.2)
    assert row["output"] is row["prefix_hit"] is row["accepted_length"] is None, (
        "nothing has been counted between two moments yet"
    )
    assert (
        dict(zip(found["latency_fields"], found["latency_rows"][-1], strict=True))["ttft_p95"]
        == 0.5
    )
    read = re.findall(r"\bplace(?:s\[0\]\??)?\.(\w+)", PAGE.read_text())
    assert read
    assert set(read) <= {*found["places"][0]}, "the page reads what nobody sends"
    assert found["places"][0]["state"] == "serving"
    assert found["places"][0]["dtype"] == "bfloat16"
    assert found["expert_load"] is None
    assert "expert_load" not in found["engines"][0]
    assert found["engines"][0]["expert_balancedness"] == [0.5, 0.75]
    later = page.get("/dashboard/data", params={"since": row["at"], "experts": True}).json()
    assert later["rows"] == later["latency_rows"] == []
    assert later["expert_load"] == [[1, 2], [3, 4]]
    assert page.get("/dashboard/data", params={"since": "x"}).status_code == 400
    client.ready.clear()
    assert page.get("/dashboard/data").json()["places"][0]["state"] == "down"


def test_balance_of_ranks_in_metrics(api: Api):
    figures = {"expert_balancedness": [0.5, 0.75], "expert_moves": [1, 4, 30, 2]}
    client = engine_client(**figures)
    client.startup = {"weights": 2.5}
    pool = SimpleNamespace(clients=[client], restarts=0, healthy=True, began=0.25)
    families = {found.name: found for found in OwnCollector(pool, Counter()).collect()}
    assert [
        (sample.labels["phase"], sample.value)
        for sample in families["rorqual:startup_seconds"].samples
    ] == [("api", 0.25), ("weights", 2.5)]
    assert [
        (sample.labels["layer"], sample.value)
        for sample in families["rorqual:expert_balancedness"].samples
    ] == [("0", 0.5), ("1", 0.75)]
    names = ("expert_rebalances", "expert_moves", "expert_slots_moved", "expert_moves_failed")
    assert [families[f"rorqual:{name}"].samples[0].value for name in names] == [1, 4, 30, 2]


def test_what_is_off_is_said_to_be(api: Api):
    page = browse(api)
    api.config["engine"] = {"record_expert_load": True}
    found = page.get("/dashboard/data").json()
    assert found["records_experts"] is True
    assert found["places"][0]["num_speculative_tokens"] == 0
    text = PAGE.read_text()
    for part in ("c-speculation", "c-experts"):
        assert re.search(f'<section id="{part}"[^>]* hidden>', text), "hidden until it is known"


def test_expert_load_is_summed_over_engines():
    assert dashboard._summed([[[1, 2], [3, 4]], [], [[10, 20], [30, 40]]]) == [[11, 22], [33, 44]]
    assert dashboard._summed([[], []]) == []


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_history_counts_by_each_engines_own_clock(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(history, "time", clock)
    pool = SimpleNamespace(clients=[])
    past = History(pool)  # type: ignore[arg-type]

    def step(seconds: float = 1.0) -> HistoryRow:
        clock.now += seconds
        past.sample()
        return past.rows[-1]

    assert step().running is None
    pool.clients = [one, two] = [engine_client(at=clock.now), engine_client(at=clock.now)]
    step()
    for _ in range(20):
        one.snapshot = Snapshot(clock.now + 0.7, output_tokens=one.snapshot.output_tokens + 100)
        two.snapshot = Snapshot(
            clock.now + 0.9,
            output_tokens=two.snapshot.output_tokens + 10,
            prefix_queries=80,
            prefix_hits=20,
        )
        row = step()
    assert row.output == pytest.approx(110)
    assert row.prompt == 0
    assert row.prefix_hit == 0.25
    count = len(past.rows)
    step(0.5)
    assert len(past.rows) == count, "one row a second"
    pool.clients = [engine_client(at=clock.now, output_tokens=5)]
    assert step().output is None, "a new engine counts from 0; that is no rate"
    pool.clients[0].snapshot = Snapshot(
        clock.now + 1, output_tokens=35, drafted=[10, 8], accepted=[6, 3]
    )
    row = step()
    assert row.output == pytest.approx(30 / 2)
    assert row.accepted_length == pytest.approx(1.9)
    for _ in range(400):
        step()
    assert len(past.rows) == history.KEPT_SECONDS
    assert len(past.latencies) == history.KEPT_SECONDS // history.LATENCY_EVERY
    assert past.rows[-1].output is None, "no word for five seconds"
    assert past.rows[-1].running == 0


# ---- in a browser

STATE = "document.getElementById('state').textContent"
TILES = (
    "Object.fromEntries([...document.querySelectorAll('#tiles > div')].map(d => "
    "[d.children[0].textContent, d.children[1].innerText]))"
)
TOO_WIDE = """[...document.querySelectorAll('body *')]
    .filter(e => e.checkVisibility() && !e.closest('.scroll')
    && e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"""
OFF = "document.getElementById('off').textContent"
PARTS = "[...document.querySelectorAll('.card[id^=c-]:not([hidden])')].map(part => part.id)"
# figures of one moment, as the tiles and as the charts' legends have them: [[tile, legend], ...]
AGREE = """(() => {
    const tile = (i, j) => document.querySelectorAll('#tiles > div')[i].children[j].textContent;
    const keys = id => [...document.querySelectorAll(`#${id} .keys b`)].map(b => b.textContent);
    const value = i => document.querySelectorAll('#tiles b')[i].textContent;
    const [ttft50, ttft95, tpot50, tpot95] = keys('latency'), [used, , hits] = keys('kv');
    const [running, waiting] = keys('batch'), late = i => tile(i, 2).replace('p95 ', '');
    return [[value(1), running], [value(2), waiting], [value(3), ttft50], [late(3), ttft95],
        [value(4), tpot50], [late(4), tpot95], [value(5), used], [value(6), hits]]; })()"""
NAMELESS = "document.querySelectorAll('.card:not([hidden]) [role=img]:not([aria-label])').length"
CUT_OFF = (
    "[...document.querySelectorAll('dt, dd, h2, td, .legend')].filter(e => e.scrollWidth > "
    "e.clientWidth + 1).map(e => e.textContent)"
)
PAINTED = """(() => { const map = document.getElementById('map');
    const row = map.getContext('2d').getImageData(30, map.height / 2, map.width - 80, 1).data;
    const pixel = (_, i) => row.slice(4 * i, 4 * i + 4).join();
    return new Set(Array.from({ length: row.length / 4 }, pixel)).size; })()"""


@contextmanager
def load(server: Running) -> Iterator[None]:
    """Four clients that ask, with a common beginning, until told to stop."""
    stop = threading.Event()
    body = {
        "prompt": "Once upon a time there was a little whale. " * 4,
        "max_tokens": 24,
        "ignore_eos": True,
    }

    def ask() -> None:
        while not stop.is_set():
            server.request("POST", "/v1/completions", body)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@pytest.mark.exhaustive
@needs_browser
def test_numbers_appear_under_load(server: Running):
    async def look() -> None:
        async with Browser() as tab:
            for width, scheme in ((1280, "light"), (320, "dark")):
                await tab.shape(width, 800, scheme)
                await tab.open(f"{server.url}/dashboard")
                # the rate is a mean of the last seconds
                await tab.until(f"parseFloat((({TILES}).Output || '').replace(',', '')) > 0")
                tiles = await tab.until(f"!JSON.stringify({TILES}).includes('n/a') && {TILES}")
                assert await tab.value(STATE) == "Healthy"
                assert re.match(r"[0-9.,]+", tiles["Output"])
                assert tiles["TTFT, p50"].endswith("s")
                assert "Accepted length" not in tiles, "this server does not speculate"
                assert len(tiles) == 8
                assert await tab.value(PARTS) == ["c-requests", "c-experts"]
                assert await tab.value(f"{OFF}") == "Off: speculation (--next-n)."
                shown = await tab.value(AGREE)
                assert len(shown) == 8
                assert all(tile == legend for tile, legend in shown), shown
                assert (
                    await tab.until("document.querySelectorAll('#throughput path.line').length")
                    == 2
                )
                await tab.until("!document.getElementById('load').hidden")
                assert await tab.until(PAINTED) > 3, "the heat map has colours"
                assert await tab.value("document.querySelectorAll('#layers tr').length > 1")
                assert await tab.value(NAMELESS) == 0
                assert await tab.value(TOO_WIDE) == []
                assert await tab.value("document.documentElement.scrollWidth") <= width
                assert await tab.value(CUT_OFF) == []
            assert tab.errors == []

    with load(server):
        asyncio.run(look())


@contextmanager
def listening(api: Api, key: str | None, port: int = 0) -> Iterator[int]:
    """The routes on a socket, for a browser to reach; the engine is made up."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen()  # who comes before the server is up waits
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(api, key), lifespan="off", log_level="error", timeout_graceful_shutdown=1
        )
    )
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


@pytest.mark.exhaustive
@needs_browser
def test_log_in_then_what_can_go_wrong_and_come_back(api: Api):
    client = engine_client(running=2, pages_total=10)
    api.pool.engines[0].client = client  # type: ignore[assignment]
    running = "document.querySelectorAll('#tiles b')[1]?.textContent"

    async def enter(tab: Browser, key: str) -> None:
        await tab.until("!document.getElementById('login').hidden")
        await tab.value(
            f"document.getElementById('key').value = {key!r}; document.querySelector('#enter "
            "button').click()"
        )

    async def look() -> None:
        async with Browser() as tab:
            await tab.shape(320, 800)
            with listening(api, KEY) as port:
                await tab.open(f"http://127.0.0.1:{port}/dashboard")
                await enter(tab, "wrong")
                await tab.until(
                    "document.getElementById('wrong').textContent.includes('not this server')"
                )
                assert await tab.value("document.getElementById('main').hidden")
                await enter(tab, KEY)
                assert (
                    await tab.until(f"{STATE} === 'Healthy' && {running} !== 'n/a' && {running}")
                    == "2"
                )
                assert await tab.value("location.href") == f"http://127.0.0.1:{port}/dashboard"
                assert await tab.value("document.cookie") == "", "no script can read it"
                assert await tab.value(PARTS) == ["c-speculation", "c-requests"]
                assert await tab.value(OFF) == "Off: expert load (--record-expert-load)."
                client.ready.clear()
                await tab.until(f"{STATE} === 'Engine down' && {running} === 'n/a'")
                assert await tab.value("document.getElementById('health').className") == "bad"
                client.ready.set()
                await tab.until(f"{STATE} === 'Healthy' && {running} === '2'")
            await tab.until(
                f"{STATE} === 'Server unreachable' && !document.getElementById('banner').hidden"
            )
            assert (
                await tab.value(
                    f"document.getElementById('main').classList.contains('stale') && {running}"
                )
                == "2"
            )
            with listening(api, KEY, port):
                await tab.until(
                    f"{STATE} === 'Healthy' && document.getElementById('banner').hidden"
                )
            assert all("401" in error or "ERR_CONNECTION" in error for error in tab.errors), (
                tab.errors
            )

    asyncio.run(look())
