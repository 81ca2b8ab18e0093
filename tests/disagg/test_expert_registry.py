"""Expert servers that are found by a registry, a router's list or etcd: processes that join, leave,
are killed and come back, and the registry itself away, back and empty, while requests run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest

pytest.importorskip("aiohttp")

from rorqual import LLM
from rorqual.parallel.remote.servers import ExpertServers
from rorqual.registry.expert_registry import expert_registry
from rorqual.registry.experts import ExpertRecord
from rorqual.registry.membership import LEASE_SECONDS
from tests.disagg.expert_processes import ExpertProcess, write_secret
from tests.engine.distributed.starting import free_port
from tests.engine.mixed_batch import COMMON, TEXTS, params
from tests.registry.etcds import KINDS, FakeEtcd, RealEtcd
from tests.route.running import start_router
from tests.serve.running import Running, start_server

pytestmark = pytest.mark.exhaustive
ENDS = LEASE_SECONDS + 10
PAUSE = 0.5  # seconds


class Registry(Protocol):
    address: str
    registers: tuple[str, ...]  # options of an expert server
    finds: dict[str, Any]  # of an engine

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def forget(self) -> None:
        """While it is stopped, all that it knew."""


class RouterList:
    def __init__(self, folder: Path):
        path = folder / "router-secret"
        path.write_text("of all who join the router")
        self.port = free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.secret = str(path)
        self.registers = ("--register", self.address, "--register-secret-file", self.secret)
        self.finds = {"experts_from": self.address, "experts_from_secret_file": self.secret}
        self.router: Running | None = None

    def start(self) -> None:
        secret = ("--admin-secret-file", self.secret)
        self.router = start_router(*secret, "--port", str(self.port))

    def stop(self) -> None:
        if self.router is not None:
            self.router.process.kill()
            self.router.__exit__(None)
        self.router = None

    def forget(self) -> None:
        """It keeps nothing."""


class EtcdList:
    def __init__(self, etcd: FakeEtcd | RealEtcd):
        self.etcd = etcd
        self.address = etcd.address
        self.registers = ("--register", self.address)
        self.finds = {"experts_from": self.address}

    def start(self) -> None:
        self.etcd.start()

    def stop(self) -> None:
        self.etcd.stop()

    def forget(self) -> None:
        self.etcd.wipe()


@pytest.fixture(
    params=["router", *(pytest.param(kind, marks=pytest.mark.longest) for kind in KINDS)]
)
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Registry]:
    made: Registry
    if request.param == "router":
        made = RouterList(tmp_path)
    else:
        made = EtcdList(RealEtcd(tmp_path) if request.param == "real" else FakeEtcd())
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def greedy() -> list[list[int]]:
    llm = LLM(**COMMON)
    try:
        return tokens(llm)
    finally:
        llm.engine.close()


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(TEXTS, params())]


def servers_of(llm: LLM) -> ExpertServers:
    found = llm.engine.worker.experts
    assert found is not None
    return found


def linked(llm: LLM) -> set[int]:
    return {link.address[1] for link in servers_of(llm).links if link.alive}


def known(llm: LLM) -> set[int]:
    return {server.address[1] for server in servers_of(llm).known}


class Load:
    """Requests, one batch after another, all of whose tokens are right, until something is so. The
    pauses between them leave the processor to others: most of the time a lease is waited for."""

    def __init__(self, llm: LLM, greedy: list[list[int]]):
        self.llm = llm
        self.greedy = greedy

    def until(self, done: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while True:
            assert tokens(self.llm) == self.greedy
            if done():
                return
            assert time.monotonic() < deadline, servers_of(self.llm).describe()
            time.sleep(PAUSE)

    def during(self, seconds: float, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert tokens(self.llm) == self.greedy
            assert holds(), servers_of(self.llm).describe()
            time.sleep(PAUSE)


@pytest.mark.longest
def test_servers_come_and_go_by_the_registry(
    registry: Registry, tmp_path: Path, greedy: list[list[int]]
) -> None:
    secret = write_secret(tmp_path)
    with ExitStack() as stack:

        def begin(slots: str) -> ExpertProcess:
            made = ExpertProcess(slots, secret, registry.registers)
            stack.callback(made.kill)
            return made

        first, second = begin("0-9"), begin("10-15,0-5")
        options = {**COMMON, **registry.finds, "expert_secret_file": secret}
        llm = LLM(**options, expert_timeout=1.0, expert_wait=60.0)
        stack.callback(llm.engine.close)
        load = Load(llm, greedy)
        two = {first.port, second.port}
        load.until(lambda: linked(llm) == two)

        third = begin("all")  # while requests run; it is taken in once it has loaded
        load.until(lambda: linked(llm) == {*two, third.port})

        second.kill()  # its link ends at once, its lease later
        load.until(lambda: linked(llm) == {first.port, third.port}, 5)
        assert known(llm) == {first.port, second.port, third.port}
        load.until(lambda: known(llm) == {first.port, third.port}, ENDS)

        first.end()  # it says so, and is known no more; the third alone holds all
        load.until(lambda: known(llm) == {third.port}, 5)

        registry.stop()
        load.during(4.0, lambda: linked(llm) == {third.port})
        assert "is away" in servers_of(llm).describe()
        fourth = begin("all")
        fourth.wait()
        registry.forget()
        registry.start()  # it knows nobody: whoever is linked stays, and joins anew
        load.until(lambda: linked(llm) == {third.port, fourth.port})
        load.during(LEASE_SECONDS + 3, lambda: linked(llm) == {third.port, fourth.port})


@pytest.mark.longest
def test_a_quick_restart_of_a_registry_that_forgets(
    registry: Registry, tmp_path: Path, greedy: list[list[int]]
) -> None:
    """Two servers that hold the same, so that either could be left out."""
    secret = write_secret(tmp_path)
    with ExitStack() as stack:
        made = [ExpertProcess("all", secret, registry.registers) for _ in range(2)]
        for one in made:
            stack.callback(one.kill)
        options = {**COMMON, **registry.finds, "expert_secret_file": secret}
        llm = LLM(**options, expert_wait=60.0)
        stack.callback(llm.engine.close)
        load = Load(llm, greedy)
        ports = {one.port for one in made}
        load.until(lambda: linked(llm) == ports)
        links = servers_of(llm).links
        registry.stop()
        registry.forget()
        registry.start()
        load.during(8.0, lambda: servers_of(llm).links == links)


@pytest.mark.longest
def test_one_that_left_and_alone_holds_an_expert_stays_while_it_is_linked(
    registry: Registry, tmp_path: Path, greedy: list[list[int]]
) -> None:
    """A registry may lose a server that is there: stopped for long, or cut off from it."""
    secret = write_secret(tmp_path)
    with ExitStack() as stack:
        options = {**COMMON, **registry.finds, "expert_secret_file": secret}
        lone = ExpertProcess("all", secret)  # renews nothing
        stack.callback(lone.kill)
        lone.wait()
        tell_for_once(registry, secret, lone.port)
        llm = LLM(**options, expert_wait=60.0)
        stack.callback(llm.engine.close)
        load = Load(llm, greedy)
        load.during(LEASE_SECONDS + 3, lambda: linked(llm) == {lone.port})
        other = ExpertProcess("all", secret, registry.registers)
        stack.callback(other.kill)
        load.until(lambda: known(llm) == {other.port}, ENDS)


def tell_for_once(registry: Registry, secret: str, port: int) -> None:
    found = expert_registry(
        registry.address,
        Path(secret).read_bytes().strip(),
        registry.finds.get("experts_from_secret_file"),
        "register",
    )
    found.join(ExpertRecord(f"127.0.0.1:{port}"))


@pytest.mark.longest
@pytest.mark.parametrize("more", [("--tp", "2"), ("--dp", "2")])
def test_a_server_of_several_ranks_finds_its_experts(more: tuple[str, ...], tmp_path: Path) -> None:
    """As docs/serving.md starts them; the router hands requests on as well."""
    lists = RouterList(tmp_path)
    lists.start()
    secret = write_secret(tmp_path)
    engine = ("--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "256")
    asked = {"prompt": "In the beginning", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    with ExitStack() as stack:
        stack.callback(lists.stop)
        alone = stack.enter_context(start_server(*engine, "--threads", "1"))
        expected = text(alone, asked)
        made = [ExpertProcess(slots, secret, lists.registers) for slots in ("0-9", "10-15")]
        for one in made:
            stack.callback(one.kill)
        found = ("--experts-from", lists.address, "--experts-from-secret-file", lists.secret)
        secrets = ("--expert-secret-file", secret)
        server = stack.enter_context(
            start_server(*engine, "--threads", "1", "--role", "attention", *found, *secrets, *more)
        )
        assert text(server, asked) == expected
        third = ExpertProcess("all", secret, lists.registers)
        stack.callback(third.kill)
        server.wait_until(lambda: up(server) == 3)
        made[0].kill()
        assert text(server, asked) == expected
        server.wait_until(lambda: up(server) == 2)


def text(server: Running, asked: dict[str, Any]) -> str:
    status, answer = server.request(
        "POST", "/v1/completions", {"model": "rorqual-bundled", **asked}
    )
    assert status == 200, answer
    found: str = answer["choices"][0]["text"]
    return found


def up(server: Running) -> int:
    lines = server.get("/metrics").splitlines()
    found = [line for line in lines if line.startswith("rorqual:expert_server_up{")]
    return sum(line.endswith(" 1.0") for line in found)
