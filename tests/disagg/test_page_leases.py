"""Who holds a page for another engine, and until when; and who may ask for one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual.cache.page_memory import PageMemory
from rorqual.cache.page_parts import PagePart, whole_part
from rorqual.cache.pages import PageAllocator
from rorqual.cache.pool import KVPool
from rorqual.cache.prefix import PrefixCache
from rorqual.cache.spec import KVSpec, Plane
from rorqual.disagg import leases as lease_module
from rorqual.disagg import page_server as server_module
from rorqual.disagg.leases import Found, Leases, LeaseTable, lease_name
from rorqual.disagg.page_link import (
    PageMessage,
    engine_secret,
    introduce,
    pack_read,
    receive_head,
)
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
LINKS = engine_secret(SECRET, "keeper")
MINE = {"model": "m", "page_size": "4"}
CPU = CpuPlatform(torch.device("cpu"))
SPEC = KVSpec(((Plane("k", "float32", (2, 3)), Plane("v", "bfloat16", (5,))),) * 2, 4)
WHOLE = whole_part(SPEC)
TOKENS = list(range(17))
PAGE_BYTES = 2 * 4 * (4 * 6 + 2 * 5)  # of two layers, four tokens


def memory(pages: int = 12) -> PageMemory:
    pool = KVPool(SPEC, pages, CPU.device)
    for layer in pool.layers:
        for plane in layer.values():
            plane.copy_(torch.randn(plane.shape))
    return PageMemory(pool, CPU)


def wait_until(state: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not state():
        assert time.monotonic() < deadline
        time.sleep(0.005)


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
        self.leases = Leases(LINKS, seconds, 8)
        self.table = LeaseTable(LINKS)
        self.memory = memory()
        config = TransferConfig("prefill", SECRET)
        self.server = PageServer(config, LINKS, self.table, self.memory, MINE, self)
        self.announced: list[tuple[bytes, int]] = []

    def reading(self, lease: bytes, pages: int, size: int) -> None:
        assert size <= pages * self.memory.size, "of parts less"
        self.announced.append((lease, pages))
        self.leases.extend(lease)

    def done(self, lease: bytes) -> None:
        self.leases.finish(lease)

    def make(self) -> tuple[bytes, dict[bytes, int]]:
        pages, _ = self.prefix.match(TOKENS)
        held = dict(zip(self.keys, pages, strict=True))
        name = self.leases.make(self.prefix, 0, held)
        assert name is not None
        return name, held

    def offer(self) -> bytes:
        name, held = self.make()
        self.table.open(name, held)()
        return name

    def settle(self) -> None:
        self.leases.settle([self.prefix], self.table.close)

    def held(self) -> list[int]:
        return [page for page in self.pages if self.prefix.allocator.holders[page] > 1]

    def fetch(self, name: bytes, keys: list[bytes] | None = None, **changes: Any) -> PageFetch:
        given = {"secret": LINKS, "fingerprint": MINE, "part": WHOLE, **changes}
        reader = PageReader(memory(), given["fingerprint"])
        address = (self.server.host, self.server.port)
        found = fetch_of(address, name, keys or self.keys, given["secret"], given["part"])
        done = threading.Event()
        reader.start(found, done.set)
        assert done.wait(60)
        if not found.error:
            reader.finish(address, LINKS, name)
        reader.pool.shutdown()
        reader.close()
        return found


def fetch_of(
    address: tuple[str, int],
    name: bytes,
    keys: list[bytes],
    secret: bytes = LINKS,
    part: PagePart = WHOLE,
) -> PageFetch:
    return PageFetch(address, secret, name, keys, part, 4)


def gone(keeper: Keeper, name: bytes) -> bool:
    return keeper.table.read(name, keeper.keys[0], lambda page: None) is Found.GONE


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
        keeper.settle()
        if not keeper.held():
            break
        time.sleep(0.01)
    assert keeper.held() == []
    assert (keeper.leases.held, keeper.leases.expired) == (0, 0)
    assert sorted(keeper.prefix.idle) == sorted(keeper.pages), "still cached"


def test_a_lease_ends_and_its_pages_are_nobodys_to_read(keeper: Keeper) -> None:
    name = keeper.offer()
    keeper.leases.open[name].deadline = time.monotonic() - 0.1
    assert keeper.held() == keeper.pages, "until rank 0 looks"
    keeper.settle()
    assert (keeper.leases.expired, keeper.held()) == (1, [])
    found = keeper.fetch(name)
    assert (found.found, found.error) == (0, "the pages are kept no more")


def test_reading_extends_a_lease(keeper: Keeper) -> None:
    name = keeper.offer()
    lease = keeper.leases.open[name]
    before = lease.deadline
    assert keeper.fetch(name).found == 4
    wait_until(lambda: sum(pages for _, pages in keeper.announced) == 4)
    assert lease.deadline > before
    assert {lease for lease, _ in keeper.announced} == {name}


def test_a_lease_whose_reader_is_told_later(keeper: Keeper) -> None:
    """Its time begins then."""
    pages, _ = keeper.prefix.match(TOKENS)
    held = dict(zip(keeper.keys, pages, strict=True))
    name = keeper.leases.make(keeper.prefix, 0, held, waits=True)
    assert name is not None
    keeper.table.open(name, held)()
    keeper.leases.open[name].deadline = 0.0
    keeper.settle()
    assert keeper.held() == keeper.pages
    keeper.leases.begin(name)
    keeper.settle()
    assert keeper.held() == keeper.pages
    keeper.leases.open[name].deadline = 0.0
    keeper.settle()
    assert keeper.held() == []
    keeper.leases.begin(name)  # it is over


def test_a_lease_that_waits_gives_way(keeper: Keeper) -> None:
    """What it waits for may need its pages: it has its seconds, and no more."""
    pages, _ = keeper.prefix.match(TOKENS)
    held = dict(zip(keeper.keys, pages, strict=True))
    name = keeper.leases.make(keeper.prefix, 0, held, waits=True)
    assert name is not None
    keeper.leases.give_way()
    assert keeper.leases.open[name].waits
    keeper.leases.open[name].deadline = 0.0
    keeper.settle()
    assert keeper.held() == keeper.pages
    keeper.leases.give_way()
    keeper.settle()
    assert keeper.held() == []


@pytest.mark.parametrize("batch", [1, 3 * (PAGE_BYTES + HEAD.size), 2**20])
def test_pages_are_sent_several_at_a_time(
    keeper: Keeper, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all layers and of some, and up to one that is missing."""
    monkeypatch.setattr(server_module, "BATCH_BYTES", batch)
    copied = []
    together = keeper.memory.read_together

    def read(places: Any, *into: Any) -> None:
        copied.append(len(places))
        together(places, *into)

    monkeypatch.setattr(keeper.memory, "read_together", read)
    name = keeper.offer()
    for part in (WHOLE, replace(WHOLE, first_layer=1)):
        copied.clear()
        found = keeper.fetch(name, part=part)
        assert (found.found, found.error) == (4, "")
        assert found.rows is not None
        for page, row in zip(keeper.pages, found.rows, strict=True):
            alone = torch.empty_like(row)
            keeper.memory.read(page, alone, part)
            assert torch.equal(row, alone)
        most = max(1, batch // (HEAD.size + keeper.memory.part_size(part)))
        assert copied == [min(most, 4 - done) for done in range(0, 4, most)]
    found = keeper.fetch(name, [*keeper.keys[:2], bytes(32), keeper.keys[3]])
    assert (found.found, found.error) == (2, "the pages are kept no more")


def lease_ends_during(
    keeper: Keeper, name: bytes, read: Callable[[Callable[[], None]], object]
) -> None:
    """Settle while `read` copies: it calls what it is given in the midst of its copy."""
    copying = threading.Event()
    go_on = threading.Event()

    def pause() -> None:
        copying.set()
        assert go_on.wait(60)

    reader = threading.Thread(target=read, args=(pause,))
    reader.start()
    assert copying.wait(60)
    keeper.leases.open[name].deadline = 0.0
    settling = threading.Thread(target=keeper.settle)
    settling.start()
    time.sleep(0.05)
    assert settling.is_alive(), "it waits for the copy"
    go_on.set()
    reader.join(60)
    settling.join(60)


def test_pages_that_are_copied_together_do_not_go_meanwhile(keeper: Keeper) -> None:
    name = keeper.offer()
    held = []

    def read(pause: Callable[[], None]) -> int:
        def copy(places: list[Any]) -> None:
            pause()
            held.extend(keeper.prefix.allocator.holders[page] for page, _ in places)

        return keeper.table.read_together(name, keeper.keys, copy)

    lease_ends_during(keeper, name, read)
    assert held == [2] * 4
    assert read(lambda: None) == 0, "the lease is closed"
    assert len(held) == 4


def test_a_connection_serves_several_prompts(keeper: Keeper) -> None:
    """And the message that a prompt was read. One that the other side has closed is not used."""
    reader = PageReader(memory(), MINE)
    greeted = []
    serve = keeper.server.server.serve

    def count(sock: socket.socket) -> None:
        greeted.append(sock)
        serve(sock)

    keeper.server.server.serve = count
    address = (keeper.server.host, keeper.server.port)
    for number in range(3):
        name = keeper.offer()
        fetch = fetch_of(address, name, keeper.keys)
        done = threading.Event()
        reader.start(fetch, done.set)
        assert done.wait(60)
        assert (fetch.found, fetch.error) == (4, "")
        wait_until(lambda: len(reader.idle.links) == 1)
        reader.finish(address, LINKS, name)
        wait_until(lambda name=name: name in keeper.leases.done)
        wait_until(lambda: len(reader.idle.links) == 1)
        keeper.settle()
        assert len(greeted) == (1 if number < 2 else 2)
        if number == 1:
            link.shut(greeted[0])
            wait_until(lambda: not keeper.server.server.links)
    reader.close()


def test_a_connection_that_is_idle_behind_its_reader_s_end_is_closed(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch may still be under way when the reader is closed."""
    reader = PageReader(memory(), MINE)
    keep = reader.idle.keep
    kept: list[socket.socket] = []

    def late(address: tuple[str, int], secret: bytes, sock: socket.socket) -> None:
        reader.close()
        keep(address, secret, sock)
        kept.append(sock)

    monkeypatch.setattr(reader.idle, "keep", late)
    found = fetch_of((keeper.server.host, keeper.server.port), keeper.offer(), keeper.keys)
    done = threading.Event()
    reader.start(found, done.set)
    assert done.wait(60)
    assert (found.found, found.error) == (4, "")
    (sock,) = kept
    assert sock.fileno() < 0
    assert not reader.idle.links


def test_no_page_goes_while_it_is_copied(keeper: Keeper) -> None:
    name = keeper.offer()
    held = []

    def read(pause: Callable[[], None]) -> None:
        def copy(page: int) -> None:
            pause()
            held.append(keeper.prefix.allocator.holders[page])

        keeper.table.read(name, keeper.keys[1], copy)

    lease_ends_during(keeper, name, read)
    assert held == [2]
    assert keeper.held() == []


def test_a_new_cache_makes_leases_void(keeper: Keeper) -> None:
    name = keeper.offer()
    keeper.leases.settle([PrefixCache(PageAllocator(12), 4)], keeper.table.close)
    assert gone(keeper, name)
    assert (keeper.leases.held, keeper.leases.expired) == (0, 0)


def test_no_more_than_a_share_is_kept(keeper: Keeper) -> None:
    keeper.leases.most_pages = 5
    keeper.offer()
    names = {}
    for dp_rank, more in ((0, 2), (1, 0), (1, 1)):
        pages, _ = keeper.prefix.match(TOKENS)
        held = dict(zip(keeper.keys, pages, strict=True))
        names[dp_rank, more] = keeper.leases.make(keeper.prefix, dp_rank, held, more)
    assert names[0, 2] is None
    assert names[1, 0], "of another data-parallel rank's cache"
    assert names[1, 1], "with the same pages and one more"


def test_pages_of_several_leases_count_once(keeper: Keeper) -> None:
    """Of prompts with a common beginning, or of the same one again and again."""
    keeper.leases.most_pages = 5
    names = [keeper.offer() for _ in range(20)]
    assert (keeper.leases.held, keeper.leases.promised(0)) == (4, 4)
    for name in names:
        assert keeper.held() == keeper.pages
        keeper.leases.finish(name)
        keeper.settle()
    assert (keeper.leases.held, keeper.leases.promised(0), keeper.held()) == (0, 0, [])


def test_a_rank_that_has_yet_to_hear_of_a_lease_is_waited_for(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, held = keeper.make()
    found: list[PageFetch] = []
    reader = threading.Thread(target=lambda: found.append(keeper.fetch(name)))
    reader.start()
    time.sleep(0.05)
    ready = keeper.table.open(name, held)
    time.sleep(0.05)
    assert not found, "its device has yet to write the pages"
    ready()
    reader.join(60)
    assert found[0].found == 4
    # a lease of another data-parallel rank, or one that is over, is not waited for
    monkeypatch.setattr(lease_module, "OPENING_SECONDS", 60.0)
    other, _ = keeper.make()
    keeper.table.note(other)
    assert gone(keeper, other)
    # nor is one that nobody has made
    assert gone(keeper, lease_name(b"other", 99))
    # one that does not come is not waited for without end
    monkeypatch.setattr(lease_module, "OPENING_SECONDS", 0.05)
    assert gone(keeper, lease_name(LINKS, 99))


def test_pages_that_are_still_computed(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come as they are made, and their lease does not run out before."""
    monkeypatch.setattr(lease_module, "COMING_SECONDS", 0.02)
    pages, _ = keeper.prefix.match(TOKENS)
    held = dict(zip(keeper.keys, pages, strict=True))
    first = {key: held[key] for key in keeper.keys[:1]}
    rest = {key: held[key] for key in keeper.keys[1:]}
    name = keeper.leases.make(keeper.prefix, 0, first, len(rest))
    assert name is not None
    assert keeper.leases.promised(0) == 4
    keeper.table.open(name, first, False)()
    keeper.leases.open[name].deadline = 0.0
    keeper.settle()
    found: list[PageFetch] = []
    reader = threading.Thread(target=lambda: found.append(keeper.fetch(name)))
    reader.start()
    time.sleep(0.1)
    assert not found
    keeper.leases.add(name, rest, True)
    keeper.table.add(name, rest, True)()
    reader.join(60)
    assert (found[0].found, found[0].error) == (4, "")
    # no more of it will come
    other = keeper.leases.make(keeper.prefix, 1, {}, 4)
    assert other is not None
    keeper.table.open(other, {}, False)()
    threading.Timer(0.1, keeper.table.add(other, {}, True)).start()
    assert keeper.fetch(other).error == "the pages are kept no more"


def test_a_prompt_that_is_not_computed_in_time(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "COMING_SECONDS", 0.02)
    monkeypatch.setattr("rorqual.disagg.page_reader.COMPUTE_SECONDS", 0.1)
    name = keeper.leases.make(keeper.prefix, 0, {}, 4)
    assert name is not None
    keeper.table.open(name, {}, False)()
    assert keeper.fetch(name).error == "the prompt was not computed within 0.1 s"


def test_a_part_that_is_elsewhere_is_refused(keeper: Keeper) -> None:
    name = keeper.offer()
    for part in (PagePart(0, 3, 0, 1), PagePart(0, 2, 0, 2), PagePart(1, 1, 0, 1)):
        with connected(keeper) as sock:
            introduce(sock, LINKS, MINE)
            send(sock, PageMessage.READ, pack_read(name, part, keeper.keys))
            with pytest.raises(LinkError, match="is not on this rank"):
                receive_head(sock, GREETING)
    found = keeper.fetch(name, part=PagePart(1, 2, 0, 1))
    assert found.found == 4
    assert found.rows is not None
    other = memory()
    other.write([1, 2, 3, 4], found.rows, PagePart(1, 2, 0, 1))
    for plane, tensor in keeper.memory.pool.layers[1].items():
        assert torch.equal(tensor[keeper.pages], other.pool.layers[1][plane][[1, 2, 3, 4]])


def test_who_reads_knows_the_secret_and_is_alike(keeper: Keeper) -> None:
    name = keeper.offer()
    assert keeper.fetch(name, secret=engine_secret(SECRET, "other")).error == "the secrets differ"
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
        reader = PageReader(memory(), MINE)
        found = fetch_of(silent.getsockname(), bytes(32), [bytes(32)])
        done = threading.Event()
        reader.start(found, done.set)
        assert done.wait(60)
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
        introduce(sock, LINKS, MINE)
        send(sock, PageMessage.READ, pack_read(bytes(32), WHOLE, [b"no key"]))
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
    config = ServeConfig(role="decode", kv_secret_file=path)
    with pytest.raises(ConfigError, match="cannot be read"):
        config.transfer()
    (tmp_path / "secret").write_text(SECRET + "\n")
    made = config.transfer()
    assert made is not None
    assert made.secret == SECRET
    assert ServeConfig().transfer() is None
