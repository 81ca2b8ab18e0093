"""Who is linked and who is left out by what a registry says, and by what it fails to say."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from rorqual.parallel.remote import discovery
from rorqual.parallel.remote.config import RemoteConfig
from rorqual.parallel.remote.control import Address
from rorqual.parallel.remote.discovery import ExpertDiscovery
from rorqual.parallel.remote.servers import ExpertServers, KnownServer
from rorqual.parallel.remote.wire import Holdings
from rorqual.registry.expert_registry import FoundExperts
from rorqual.registry.experts import ExpertRecord, RegistryError


class Servers:
    """In place of ExpertServers: what it was told. kept: those that it does not let go."""

    def __init__(self) -> None:
        self.there: list[Address] = []
        self.kept: set[Address] = set()
        self.registry = ""
        self.closing = threading.Event()

    def join(self, address: Address) -> None:
        assert address not in self.there
        self.there.append(address)

    def leave(self, address: Address) -> bool:
        if address in self.kept:
            return False
        self.there.remove(address)
        return True

    @property
    def ports(self) -> list[int]:
        return [port for _, port in self.there]


class Registry:
    name = "a registry"

    def __init__(self) -> None:
        self.records: tuple[ExpertRecord, ...] = ()
        self.epoch = "first"
        self.away = False

    def say(self, *ports: int) -> None:
        self.records = tuple(ExpertRecord(f"127.0.0.1:{port}") for port in ports)

    def find(self) -> FoundExperts:
        if self.away:
            raise RegistryError("it does not answer")
        return FoundExperts(self.records, self.epoch)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(discovery, "time", made)
    return made


class Setting:
    def __init__(self, clock: Clock, fixed: tuple[Address, ...] = ()):
        self.clock = clock
        self.servers: Any = Servers()
        self.registry: Any = Registry()
        self.discovery = ExpertDiscovery(self.servers, self.registry, fixed)

    def look(self, after: float = 1.0) -> list[int]:
        self.clock.now += after
        self.discovery.look()
        found: list[int] = self.servers.ports
        return found


def test_who_is_listed_is_linked_and_who_is_not_leaves(clock: Clock) -> None:
    setting = Setting(clock)
    setting.registry.say(2, 1)
    assert setting.look() == [1, 2]
    setting.registry.say(2, 3)
    assert setting.look(discovery.LEASE_SECONDS) == [2, 3]
    assert setting.servers.registry == "a registry lists 2 servers"


def test_nobody_leaves_while_it_is_away_or_soon_after(clock: Clock) -> None:
    setting = Setting(clock)
    setting.registry.say(1, 2)
    setting.look()
    setting.look(100)
    setting.registry.away = True
    assert setting.look(100) == [1, 2]
    assert setting.servers.registry == "a registry is away: it does not answer"
    setting.registry.away = False
    setting.registry.say(2)
    assert setting.look() == [1, 2]
    assert setting.look(discovery.LEASE_SECONDS - 2) == [1, 2]
    assert setting.look(2) == [2]


def test_nobody_leaves_soon_after_it_forgot(clock: Clock) -> None:
    setting = Setting(clock)
    setting.registry.say(1, 2)
    setting.look()
    setting.look(100)
    setting.registry.epoch = "second"
    setting.registry.say()
    assert setting.look() == [1, 2]
    setting.registry.say(1, 3)
    assert setting.look() == [1, 2, 3]
    assert setting.look(discovery.LEASE_SECONDS) == [1, 3]


def test_one_that_may_not_leave_is_asked_again(clock: Clock) -> None:
    setting = Setting(clock)
    setting.registry.say(1, 2)
    setting.look()
    setting.servers.kept = {("127.0.0.1", 1)}
    setting.registry.say(2)
    assert setting.look(100) == [1, 2]
    setting.servers.kept = set()
    assert setting.look() == [2]


def test_those_that_were_given_stay(clock: Clock) -> None:
    setting = Setting(clock, (("127.0.0.1", 1),))
    setting.servers.there = [("127.0.0.1", 1)]
    setting.registry.say(1, 2)
    assert setting.look() == [1, 2]
    setting.registry.say()
    assert setting.look(100) == [1]


def test_names_and_too_many_are_passed_over(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "MAX_SERVERS", 3)
    setting = Setting(clock, (("127.0.0.1", 9),))
    setting.servers.there = [("127.0.0.1", 9)]
    setting.registry.records = (ExpertRecord("experts-1:9400"),)
    setting.look()
    setting.registry.say(4, 5)
    assert setting.look() == [9, 4, 5]
    setting.registry.say(1, 4, 5)
    assert setting.look(100) == [9, 4, 5], "who is known goes before others"
    setting.look()
    messages = [record.getMessage() for record in caplog.records]
    assert sum("experts-1:9400 is passed over" in one for one in messages) == 1
    assert sum("127.0.0.1:1 is passed over: there are 3 servers" in one for one in messages) == 1


# ---- who may leave


def linked(port: int, *experts: int, alive: bool = True) -> Any:
    holdings = Holdings(64, {0: experts})
    closed: list[int] = []
    link = SimpleNamespace(
        address=("127.0.0.1", port), alive=alive, holdings=holdings, closed=closed
    )
    link.close = lambda: closed.append(port)
    return link


def known(*links: Any) -> ExpertServers:
    servers = ExpertServers(RemoteConfig((), b"x" * 16), {}, [0], 4, 1, 1)
    servers.known = [KnownServer(link.address, link) for link in links]
    servers.links = links
    return servers


def test_who_alone_holds_an_expert_stays_while_linked() -> None:
    first, second, third = linked(1, 0, 1, 2), linked(2, 2, 3), linked(3, 0, 1)
    servers = known(first, second, third)
    assert not servers.leave(second.address)
    assert servers.leave(first.address)
    assert servers.links == (second, third)
    assert [server.address[1] for server in servers.known] == [2, 3]
    assert first.closed
    assert not second.closed
    assert not servers.leave(third.address)
    third.alive = False
    assert servers.leave(third.address)
    assert servers.leave(("127.0.0.1", 77)), "nobody"


def test_a_link_that_is_silent_counts_for_nobody() -> None:
    first, second = linked(1, 0, 1), linked(2, 0, 1, alive=False)
    assert not known(first, second).leave(first.address)
