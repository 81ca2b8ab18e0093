"""Servers that routers find in etcd: they join, leave and end; and etcd itself goes, forgets and
sleeps, while requests go on."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from rorqual.errors import ConfigError
from rorqual.registry import gateway, membership
from rorqual.registry.address import etcd_address
from rorqual.registry.gateway import EtcdError, encoded
from rorqual.registry.membership import Membership
from rorqual.registry.records import ServerRecord
from rorqual.route import registry
from rorqual.route.config import RouteConfig
from tests.registry.etcds import KINDS, Etcd, etcd
from tests.route.fakes import FakeServer, RouterUnderTest, routed, run
from tests.route.running import start_router
from tests.serve.running import start_server

SECRET = "of all who join the router"
LEASE = 2  # seconds; etcd gives none that are shorter
ASKED = {"prompt": "of whales", "max_tokens": 2}


@pytest.fixture(params=KINDS)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Etcd]:
    """Everything in a hurry."""
    for module, name, value in (
        (registry, "LIST_SECONDS", 0.1),
        (registry, "RETRY_SECONDS", 0.05),
        (registry, "SECONDS", 0.5),
        (registry, "LEASE_SECONDS", LEASE),
        (gateway, "SECONDS", 0.5),
        (membership, "LEASE_SECONDS", LEASE),
    ):
        monkeypatch.setattr(module, name, value)
    (tmp_path / "secret").write_text(SECRET)
    monkeypatch.chdir(tmp_path)
    with etcd(request.param, tmp_path) as found:
        yield found


class Member:
    """A server that renews its registration, as `rorqual serve` does."""

    def __init__(self, store: Etcd, *roles: str):
        self.fake = FakeServer()
        self.store = store
        self.roles = roles or ("replica",)
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> Member:
        await self.fake.start()
        address = etcd_address(self.store.address)
        self.membership = Membership(address, SECRET, self.fake.url, self.roles)
        await asyncio.to_thread(self.membership.renew)
        self.task = asyncio.create_task(self._renew())
        return self

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(LEASE / 5)
            try:
                await asyncio.to_thread(self.membership.renew)
            except EtcdError:
                continue

    def silent(self) -> None:
        """As if it had been killed, as far as etcd is concerned."""
        if self.task is not None:
            self.task.cancel()

    async def die(self) -> None:
        self.silent()
        await self.fake.stop()


@asynccontextmanager
async def router(store: Etcd, **options: Any) -> AsyncIterator[RouterUnderTest]:
    async with routed(registry=store.address, admin_secret_file="secret", **options) as found:
        yield found


def known(found: RouterUnderTest) -> dict[str, list[str]]:
    return {server.url: sorted(server.roles) for server in found.router.servers}


async def ready(found: RouterUnderTest, *members: Member) -> None:
    urls = {member.fake.url for member in members}
    await found.until(
        lambda: urls == {server.url for server in found.router.servers.usable(prefill=False)}, 10
    )


async def asks(found: RouterUnderTest) -> None:
    status, answer = await found.ask(ASKED)
    assert status == 200, answer


def test_servers_join_and_leave(store: Etcd) -> None:
    async def test() -> None:
        first = await Member(store).start()
        async with router(store) as found:
            assert known(found) == {first.fake.url: ["replica"]}, "before the first request"
            await asks(found)
            second = await Member(store, "prefill", "decode").start()
            await ready(found, first, second)
            assert known(found)[second.fake.url] == ["decode", "prefill"]
            second.silent()
            await asyncio.to_thread(second.membership.leave)
            await asyncio.to_thread(second.membership.renew)  # one that came too late
            await ready(found, first)
            async with router(store) as other:
                assert known(other) == known(found), "a router that starts again, or another"
            assert not found.router.registry.away
            assert "registry_up 1.0" in (await found.get("/metrics"))[1]
        for member in (first, second):
            await member.die()

    run(test())


@pytest.mark.exhaustive
def test_a_lease_that_ends(store: Etcd) -> None:
    """A server that was killed; and one that was stopped for longer, and goes on."""

    async def test() -> None:
        killed = await Member(store).start()
        stopped = await Member(store, "decode").start()
        async with router(store) as found:
            await ready(found, killed, stopped)
            killed.silent()
            stopped.silent()
            await found.until(lambda: known(found) == {}, 15)
            await asyncio.to_thread(stopped.membership.renew)
            await ready(found, stopped)
        for member in (killed, stopped):
            await member.die()

    run(test())


def test_a_newer_process_at_the_same_address_stays(store: Etcd) -> None:
    async def test() -> None:
        member = await Member(store).start()
        newer = Membership(etcd_address(store.address), SECRET, member.fake.url, ("replica",))
        async with router(store) as found:
            await asyncio.to_thread(newer.renew)
            member.silent()
            await asyncio.to_thread(member.membership.leave)
            await asyncio.sleep(0.4)
            assert list(known(found)) == [member.fake.url]
        await member.die()

    run(test())


@pytest.mark.exhaustive
@pytest.mark.parametrize("forgets", [False, True])
def test_etcd_goes_and_comes_back(store: Etcd, forgets: bool) -> None:
    async def test() -> None:
        members = [await Member(store).start() for _ in range(2)]
        async with router(store) as found:
            await ready(found, *members)
            await asyncio.to_thread(store.stop)
            await found.until(lambda: found.router.registry.away)
            for _ in range(4):
                await asks(found)
            await members[1].die()  # health checks decide
            await ready(found, members[0])
            await asks(found)
            assert len(known(found)) == 2
            if forgets:
                store.wipe()
            await asyncio.to_thread(store.start)
            await found.until(lambda: not found.router.registry.away, 15)
            until = time.monotonic() + 1.2
            while time.monotonic() < until:
                assert members[0].fake.url in known(found)
                await asyncio.sleep(0.02)
            await found.until(lambda: list(known(found)) == [members[0].fake.url], 15)
            await asks(found)
            third = await Member(store).start()  # the watch is on again
            await ready(found, members[0], third)
            for member in (members[0], third):
                await member.die()

    run(test())


@pytest.mark.exhaustive
def test_etcd_sleeps_past_the_end_of_leases(store: Etcd) -> None:
    async def test() -> None:
        member = await Member(store).start()
        async with router(store) as found:
            await ready(found, member)
            store.sleep()
            await asyncio.sleep(LEASE + 1)
            assert found.router.registry.away
            await asks(found)
            store.wake()
            until = time.monotonic() + 2.5
            while time.monotonic() < until:
                assert member.fake.url in known(found)
                await asyncio.sleep(0.02)
            assert not found.router.registry.away
            await asks(found)
        await member.die()

    run(test())


def test_a_router_starts_without_etcd(store: Etcd) -> None:
    async def test() -> None:
        fixed = FakeServer()
        await fixed.start()
        store.stop()
        options = {"registry": store.address, "admin_secret_file": "secret"}
        async with routed(fixed, **options) as found:
            await asks(found)
            assert found.router.registry.away
            await asyncio.to_thread(store.start)
            member = await Member(store).start()
            await found.until(lambda: member.fake.url in known(found), 15)
            await member.die()

    run(test())


def test_records_that_do_not_count(store: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    def put(key: str, value: bytes) -> None:
        store.ask("kv/put", {"key": encoded(key), "value": encoded(value)})

    async def test() -> None:
        member = await Member(store).start()
        prefix = etcd_address(store.address).prefix
        other = ServerRecord.new("http://127.0.0.1:9", "replica")
        unknown = ServerRecord.new("http://127.0.0.1:9", "captain")
        async with router(store) as found:
            await ready(found, member)
            put(other.key(prefix), other.signed("of somebody else"))
            put(unknown.key(prefix), unknown.signed(SECRET))
            put(prefix + "replica/elsewhere", other.signed(SECRET))
            put(prefix + "noise", b"\xff\x00")
            put("/rorqual/server", other.signed(SECRET))
            await found.until(lambda: len(found.router.registry.refused) == 4)
            await asyncio.sleep(0.3)  # some lists more
            assert list(known(found)) == [member.fake.url]
            await asks(found)
            assert not found.router.registry.away
            own = ServerRecord(member.fake.url, "replica", time.time() - 5)
            put(own.key(prefix), own.signed(SECRET))  # an old one, brought back
            await found.until(lambda: known(found) == {})
            put(own.key(prefix), ServerRecord.new(own.url, "replica").signed(SECRET))
            await ready(found, member)
        await member.die()

    run(test())
    messages = [record.message for record in caplog.records if "passed over" in record.message]
    assert len(messages) == 5


def test_a_registry_needs_the_secret() -> None:
    with pytest.raises(ConfigError, match="admin_secret_file"):
        RouteConfig(registry="etcd://127.0.0.1:2379")


@pytest.mark.exhaustive
def test_a_server_and_two_routers_in_processes_of_their_own(tmp_path: Path) -> None:
    """As docs/serving.md says."""
    pytest.importorskip("fastapi")
    secret = tmp_path / "router-secret"
    secret.write_text(SECRET)
    with etcd("fake", tmp_path) as store, ExitStack() as stack:
        routes = ("--registry", store.address, "--admin-secret-file", str(secret))
        routers = [stack.enter_context(start_router(*routes))]
        server = stack.enter_context(
            start_server(
                *("--dtype", "float32", "--max-model-len", "128"),
                *("--register", store.address, "--register-secret-file", str(secret)),
            )
        )
        routers[0].wait_until(routers[0].healthy)
        routers.append(stack.enter_context(start_router(*routes)))
        assert routers[1].healthy(), "at once"
        for router in routers:
            asked = {"prompt": "A whale", "max_tokens": 2}
            assert router.request("POST", "/v1/completions", asked)[0] == 200
            assert "rorqual_router_registry_up 1.0" in router.get("/metrics")
        server.process.send_signal(signal.SIGTERM)
        for router in routers:
            router.wait_until(lambda router=router: server.url not in router.get("/metrics"))
        assert server.process.wait(30) == 0
        assert store.kept == {}
