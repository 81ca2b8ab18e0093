"""Who holds a page for another engine, and until when; and who may ask for one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual.cache.page_memory import PageMemory
from rorqual.cache.pages import PageAllocator
from rorqual.cache.pool import KVPool
from rorqual.cache.prefix import PrefixCache
from rorqual.cache.spec import KVSpec, Plane
from rorqual.disagg.leases import Leases
from rorqual.disagg.page_link import PageMessage, introduce
from rorqual.disagg.page_reader import PageFetch, PageReader
from rorqual.disagg.page_server import PageServer
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.errors import ConfigError
from rorqual.parallel.remote import link
from rorqual.parallel.remote.link import (
    GREETING,
    HEAD,
    LinkError,
    LinkMessage,
    differences,
    receive,
    send,
)
from rorqual.platforms.cpu import CpuPlatform
from rorqual.serve.config import ServeConfig

SECRET = "a secret that is long enough"
MINE = {"model": "m", "page_size": "4"}
CPU = CpuPlatform(torch.device("cpu"))
SPEC = KVSpec(((Plane("k", "float32", (2, 3)), Plane("v", "bfloat16", (5,))),) * 2, 4)
TOKENS = list(range(17))


def memory(pages: int = 12) -> PageMemory:
    pool = KVPool(SPEC, pages, CPU.device)
    for layer in pool.layers:
        for plane in layer.values():
            plane.copy_(torch.randn(plane.shape))
    return PageMemory(pool, CPU)


class Keeper:
    """A prefix cache with one prompt in it, and a server of its pages."""

    def __init__(self, seconds: float = 30.0):
        self.prefix = PrefixCache(PageAllocator(12), 4)
        self.keys: list[bytes] = []
        self.pages = [self.prefix.take() for _ in range(4)]
        key, previous = b"", self.prefix.match([])[1]
        for place, page in enumerate(self.pages):
            key = previous = self.prefix.insert(previous, self.prefix.covered(TOKENS, place), page)
            self.keys.append(key)
        self.prefix.release(self.pages)
        self.leases = Leases(seconds, 8)
        self.memory = memory()
        config = TransferConfig("prefill", SECRET)
        self.server = PageServer(config, self.leases, self.memory, MINE)

    def offer(self) -> bytes:
        pages, _ = self.prefix.match(TOKENS)
        name = self.leases.make(self.prefix, dict(zip(self.keys, pages, strict=True)))
        assert name is not None
        return name

    def held(self) -> list[int]:
        return [page for page in self.pages if self.prefix.allocator.holders[page] > 1]

    def fetch(self, name: bytes, keys: list[bytes] | None = None, **changes: Any) -> PageFetch:
        given = {"secret": SECRET, "fingerprint": MINE, **changes}
        reader = PageReader(given["secret"], memory(), given["fingerprint"])
        found = PageFetch((self.server.host, self.server.port), name, keys or self.keys)
        done = threading.Event()
        reader.start(found, done.set)
        assert done.wait(20)
        reader.close()
        return found


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper()
    yield made
    made.server.close()


def test_pages_come_as_they_are(keeper: Keeper) -> None:
    name = keeper.offer()
    assert keeper.held() == keeper.pages
    found = keeper.fetch(name)
    assert (found.found, found.error) == (4, "")
    other = memory()
    assert found.rows is not None
    other.write([7, 2, 9, 4], found.rows)
    for mine, copy in zip(keeper.memory.pool.layers, other.pool.layers, strict=True):
        for plane in mine:
            assert torch.equal(mine[plane][keeper.pages], copy[plane][[7, 2, 9, 4]])
    for _ in range(200):
        keeper.leases.settle(keeper.prefix)
        if not keeper.held():
            break
        time.sleep(0.01)
    assert keeper.held() == []
    assert (keeper.leases.held, keeper.leases.expired) == (0, 0)
    assert sorted(keeper.prefix.idle) == sorted(keeper.pages), "still cached"


def test_a_lease_ends_and_its_pages_are_nobodys_to_read(keeper: Keeper) -> None:
    keeper.leases.seconds = 0.05
    name = keeper.offer()
    time.sleep(0.1)
    found = keeper.fetch(name)  # late, and nobody has looked since
    assert (found.found, found.error) == (0, "the pages are kept no more")
    keeper.leases.settle(keeper.prefix)
    assert (keeper.leases.expired, keeper.held()) == (1, [])
    assert keeper.fetch(name).error == "the pages are kept no more"


def test_reading_extends_a_lease(keeper: Keeper) -> None:
    name = keeper.offer()
    lease = keeper.leases.open[name]
    before = lease.deadline
    assert keeper.leases.read(name, keeper.keys[0], lambda page: None)
    assert lease.deadline > before


def test_no_page_goes_while_it_is_copied(keeper: Keeper) -> None:
    name = keeper.offer()
    copying = threading.Event()
    go_on = threading.Event()
    held = []

    def copy(page: int) -> None:
        copying.set()
        assert go_on.wait(10)
        held.append(keeper.prefix.allocator.holders[page])

    reader = threading.Thread(target=keeper.leases.read, args=(name, keeper.keys[1], copy))
    reader.start()
    assert copying.wait(10)
    keeper.leases.open[name].deadline = 0.0
    settling = threading.Thread(target=keeper.leases.settle, args=(keeper.prefix,))
    settling.start()
    time.sleep(0.05)
    assert settling.is_alive(), "it waits for the copy"
    go_on.set()
    reader.join(10)
    settling.join(10)
    assert held == [2]
    assert keeper.held() == []


def test_a_new_cache_makes_leases_void(keeper: Keeper) -> None:
    name = keeper.offer()
    keeper.leases.settle(PrefixCache(PageAllocator(12), 4))
    assert not keeper.leases.read(name, keeper.keys[0], lambda page: None)
    assert (keeper.leases.held, keeper.leases.expired) == (0, 0)


def test_no_more_than_a_share_is_kept(keeper: Keeper) -> None:
    keeper.offer()
    keeper.offer()
    pages, _ = keeper.prefix.match(TOKENS)
    assert keeper.leases.make(keeper.prefix, dict(zip(keeper.keys, pages, strict=True))) is None


def test_who_reads_knows_the_secret_and_is_alike(keeper: Keeper) -> None:
    name = keeper.offer()
    assert keeper.fetch(name, secret="another secret, as long").error == "the secrets differ"
    error = keeper.fetch(name, fingerprint={"model": "m", "page_size": "8"}).error
    assert error == "pages cannot be exchanged: page_size is '4' at the keeper, '8' here"
    assert keeper.fetch(bytes(32)).error == "the pages are kept no more"
    assert keeper.fetch(name, [bytes(32)]).error == "the pages are kept no more"


def test_a_page_that_is_missing_ends_what_was_found(keeper: Keeper) -> None:
    found = keeper.fetch(keeper.offer(), [*keeper.keys[:2], bytes(32), keeper.keys[3]])
    assert (found.found, found.error) == (2, "the pages are kept no more")


def test_a_keeper_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rorqual.disagg.page_reader.CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reader = PageReader(SECRET, memory(), MINE)
        found = PageFetch(silent.getsockname(), bytes(32), [bytes(32)])
        done = threading.Event()
        reader.start(found, done.set)
        assert done.wait(10)
        assert found.error == "the other engine has gone silent"
        reader.close()


def connected(keeper: Keeper) -> socket.socket:
    return socket.create_connection((keeper.server.host, keeper.server.port), 5)


def read_to_the_end(sock: socket.socket) -> None:
    while True:
        assert receive(sock, GREETING)[0] == LinkMessage.REFUSED


def test_a_reader_that_says_nothing_is_let_go(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "GREETING_SECONDS", 0.2)
    with connected(keeper) as sock:
        assert receive(sock, GREETING)[0] == LinkMessage.CHALLENGE
        with pytest.raises((LinkError, OSError)):
            receive(sock, GREETING)


@pytest.mark.parametrize(
    "data",
    [
        HEAD.pack(LinkMessage.HELLO, 2**31),
        HEAD.pack(77, 3) + b"abc",
        HEAD.pack(PageMessage.READ, 3) + b"abc",
        HEAD.pack(LinkMessage.HELLO, 4) + b"abcd",
    ],
    ids=["huge", "unknown", "unasked", "short"],
)
def test_what_a_stranger_sends_is_refused(keeper: Keeper, data: bytes) -> None:
    with connected(keeper) as sock:
        receive(sock, GREETING)
        sock.sendall(data)
        with pytest.raises((LinkError, OSError)):
            read_to_the_end(sock)


def test_what_a_known_reader_may_not_send(keeper: Keeper) -> None:
    with connected(keeper) as sock:
        introduce(sock, SECRET.encode(), MINE)
        send(sock, PageMessage.READ, bytes(32) + b"no key")
        with pytest.raises((LinkError, OSError)):
            receive(sock, GREETING)


def test_differences_are_named() -> None:
    assert differences(MINE, dict(MINE)) == ""
    assert differences({"a": "1"}, {"b": "2"}) == (
        "a is '1' at the keeper, None here; b is None at the keeper, '2' here"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"role": "encode"}, "role='encode'"),
        ({"secret": "short"}, "5 bytes; accepted: at least 16"),
        ({"host": "8.8.8.8"}, "kv_host='8.8.8.8' is public"),
        ({"host": "0.0.0.0"}, "kv_host='0.0.0.0' is public"),
        ({"peers": ("example.org",)}, "kv_peers='example.org' is no IPv4 address"),
        ({"peers": ("10.0.0.1:0",)}, "kv_peers='10.0.0.1:0' is no address"),
        ({"peers": ("8.8.0.0/16",)}, "kv_peers='8.8.0.0/16' is public"),
        ({"peers": ("0.0.0.0/0",)}, "is public"),
        ({"peers": ("10.0.0.1/8",)}, "has host bits set"),
        ({"lease_seconds": 0.0}, "accepted: 1 to 3600"),
        ({"port": 70000}, "kv_port=70000"),
        ({"on_failure": "pray"}, "kv_load_failure='pray'"),
    ],
)
def test_options_out_of_range(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TransferConfig(**{"role": "both", "secret": SECRET, **given})


def test_peers_are_hosts_or_addresses() -> None:
    network = TransferConfig("decode", SECRET, peers=("10.1.0.0/16", "192.168.7.3"))
    assert network.allows("10.1.255.3", 9)
    assert network.allows("192.168.7.3", 9)
    for other in ("10.2.0.1", "192.168.7.4", "127.0.0.1", "10.1.0.0/16", "localhost", ""):
        assert not network.allows(other, 9)
    config = TransferConfig("decode", SECRET, peers=("10.0.0.1", "127.0.0.1:9001"))
    assert config.allows("10.0.0.1", 5)
    assert config.allows("127.0.0.1", 9001)
    assert not config.allows("127.0.0.1", 9002)
    assert not config.allows("10.0.0.2", 5)


def test_a_server_with_a_role(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs kv_secret_file"):
        ServeConfig(role="decode")
    path = str(tmp_path / "secret")
    with pytest.raises(ConfigError, match="one rank so far; tp=2"):
        ServeConfig(role="decode", kv_secret_file=path, engine={"tp": 2})
    config = ServeConfig(role="decode", kv_secret_file=path)
    with pytest.raises(ConfigError, match="cannot be read"):
        config.transfer()
    (tmp_path / "secret").write_text(SECRET + "\n")
    made = config.transfer()
    assert made is not None
    assert made.secret == SECRET
    assert ServeConfig().transfer() is None
