"""Pages that leave layer by layer while a step still writes them: nobody reads what is not written,
and whatever ends the step, the lease or the link leaves right pages or none."""

from __future__ import annotations

import itertools
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rorqual.cache.page_memory import PageMemory
from rorqual.cache.written_layers import WrittenLayers
from rorqual.disagg import leases as lease_module
from rorqual.disagg import page_reader
from rorqual.disagg.page_link import PIECE, PURPOSE, PageMessage
from rorqual.disagg.page_reader import PageFetch, PageReader
from rorqual.parallel.remote.link import HEAD, receive, send
from rorqual.parallel.remote.link_server import LinkServer
from tests.disagg.apart import Apart, Engine
from tests.disagg.test_page_leases import LINKS, MINE, WHOLE, Keeper, gone, memory
from tests.disagg.test_ranks_travel import nothing_is_held, prompt, started, waits
from tests.models.checkpoints import save

LAYERS = 2  # of the keeper's cache, see there


class Step:
    """A step that writes a keeper's four pages, layer after layer as it is told."""

    def __init__(self, keeper: Keeper):
        self.keeper = keeper
        self.mark_reached: list[int] = []
        self.name, self.held = keeper.make()
        keeper.leases.open[self.name].complete = False
        changed = keeper.table.changed
        self.written = WrittenLayers(LAYERS, lambda: lambda: self.mark_reached.append(1), changed)
        keeper.table.open(self.name, {}, complete=False, by_layer=True)()
        planes = [plane for layer in keeper.memory.pool.layers for plane in layer.values()]
        self.values = [plane.clone() for plane in planes]
        for plane in planes:
            plane.fill_(-1)
        self.planes = planes
        self.rows = keeper.memory.rows(len(self.held))

    def announce(self, count: int = 4) -> None:
        keys = list(self.held)[:count]
        self.keeper.table.write(self.name, {key: self.held[key] for key in keys}, self.written)

    def layer(self) -> None:
        """Write the next one."""
        each = len(self.planes) // LAYERS
        number = len(self.written.marks)
        for plane, value in list(zip(self.planes, self.values, strict=True))[
            number * each : (number + 1) * each
        ]:
            plane.copy_(value)
        self.written.layer()

    def begin_fetch(self) -> tuple[PageFetch, threading.Event]:
        keeper = self.keeper
        reader = PageReader(memory(), MINE)
        address = (keeper.server.host, keeper.server.port)
        fetch = PageFetch(address, LINKS, self.name, list(self.held), WHOLE, 4)
        done = threading.Event()
        reader.start(fetch, done.set)
        return fetch, done

    def right(self, fetch: PageFetch) -> bool:
        """Whether what was found is what the step wrote."""
        for row, page in zip(self.rows, self.held.values(), strict=True):
            self.keeper.memory.read(page, row)
        assert fetch.rows is not None
        return torch.equal(fetch.rows[: fetch.found], self.rows[: fetch.found])


@pytest.fixture
def step() -> Iterator[Step]:
    keeper = Keeper()
    keeper.reading = lambda lease, pages, size: keeper.announced.append((lease, pages))  # type: ignore[method-assign]
    yield Step(keeper)
    keeper.server.close()


def came(fetch: PageFetch, size: int) -> int:
    """Bytes of the first page that are there: what is not was never written."""
    return 0 if fetch.rows is None else int((fetch.rows[0] != 0).sum()) * (size > 0)


def until(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_layer_leaves_before_the_next_is_computed(step: Step) -> None:
    fetch, done = step.begin_fetch()
    step.announce()
    step.layer()
    until(lambda: len(step.mark_reached) == 4)
    until(lambda: came(fetch, 1) > 0)
    assert fetch.found == 0
    assert not done.wait(0.1)
    step.layer()
    assert done.wait(60)
    assert (fetch.error, fetch.found) == ("", 4)
    assert step.right(fetch)
    assert len(step.mark_reached) == 8, "each copy came behind its layer's mark"
    until(lambda: sum(pages for _, pages in step.keeper.announced) == 4)


def test_chunks_one_after_the_other(step: Step) -> None:
    fetch, done = step.begin_fetch()
    step.announce(2)
    step.layer()
    step.layer()
    until(lambda: fetch.found == 2)
    assert not done.is_set()
    step.written = WrittenLayers(LAYERS, lambda: lambda: None, step.keeper.table.changed)
    step.keeper.table.write(step.name, dict(list(step.held.items())[2:]), step.written)
    step.written.whole()
    assert done.wait(60)
    assert fetch.found == 4
    assert step.right(fetch)


@pytest.mark.parametrize("layers", [0, 1])
def test_a_lease_that_is_closed_amid_a_step(step: Step, layers: int) -> None:
    """As after an error in it: the pages are others', and what is written there goes nowhere."""
    fetch, done = step.begin_fetch()
    step.announce()
    for _ in range(layers):
        step.layer()
    until(lambda: len(step.mark_reached) == 4 * layers)
    step.keeper.table.close([step.name])
    for plane in step.planes:
        plane.fill_(77)
    step.written.whole()
    assert done.wait(60)
    assert fetch.error == "the pages are kept no more"
    assert fetch.found == 0
    assert gone(step.keeper, step.name)


def test_a_prompt_that_is_given_up_amid_its_chunks(step: Step) -> None:
    fetch, done = step.begin_fetch()
    step.announce(2)
    step.layer()
    step.layer()
    step.keeper.table.add(step.name, {}, True)()
    assert done.wait(60)
    assert (fetch.error, fetch.found) == ("the pages are kept no more", 2)
    assert step.right(fetch)


def test_a_slow_step_is_waited_for(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "COMING_SECONDS", 0.05)
    monkeypatch.setattr(page_reader, "QUIET_SECONDS", 0.5)
    fetch, done = step.begin_fetch()
    step.announce()
    step.layer()
    assert not done.wait(1.0), "it is told that they are coming"
    step.layer()
    assert done.wait(60)
    assert fetch.found == 4


def test_whole_pages_are_read_behind_the_last_mark(step: Step) -> None:
    """As a transport that is a library does."""
    step.announce()
    step.layer()
    table = step.keeper.table
    key = next(iter(step.held))
    copied: list[Any] = []

    def read() -> None:
        table.read(step.name, key, lambda *place: copied.append(place))

    reading = threading.Thread(target=read)
    reading.start()
    time.sleep(0.05)
    assert not copied
    step.layer()
    reading.join(60)
    ((page, mark),) = copied
    assert page == step.held[key]
    assert mark is step.written.marks[-1]


# ---- what comes by the link


Says = list[tuple[PageMessage, bytes]]
SIZE = memory().size


def fetched_from(says: Says, half: bytes = b"") -> PageFetch:
    """Of two pages, from a keeper that says this, then the beginning of a message, and goes."""

    def serve(sock: socket.socket) -> None:
        receive(sock, 10_000)
        for kind, data in says:
            send(sock, kind, data)
        sock.sendall(half)

    server = LinkServer("127.0.0.1", 0, LINKS, MINE, PURPOSE, serve, 4)
    try:
        reader = PageReader(memory(), MINE)
        where = (server.host, server.port)
        fetch = PageFetch(where, LINKS, bytes(32), [b"a" * 32, b"b" * 32], WHOLE, 4)
        done = threading.Event()
        reader.start(fetch, done.set)
        assert done.wait(60)
        return fetch
    finally:
        server.close()


def piece(number: int, size: int) -> tuple[PageMessage, bytes]:
    return PageMessage.PIECE, PIECE.pack(number) + bytes(size)


def page(size: int) -> tuple[PageMessage, bytes]:
    return PageMessage.PAGE, bytes(size)


@pytest.mark.parametrize(
    ("says", "half", "found", "error"),
    [
        ([page(SIZE)], HEAD.pack(PageMessage.PAGE, SIZE) + bytes(SIZE // 2), 1, "ended"),
        ([page(SIZE), piece(1, 8)], HEAD.pack(PageMessage.PIECE, 20) + PIECE.pack(1), 1, "ended"),
        ([piece(1, SIZE), piece(0, SIZE - 1)], b"", 0, "ended"),
        ([piece(1, 5), piece(0, SIZE), piece(1, SIZE - 5)], b"", 2, ""),
        ([piece(0, SIZE), piece(0, 1)], b"", 1, "of page 0, where none were to"),
        ([piece(2, 1)], b"", 0, "of page 2, where none were to"),
        ([piece(0, 3), page(SIZE)], b"", 0, "of page 0, where none were to"),
        ([piece(1, SIZE), piece(1, 0)], b"", 0, "kept no more"),
        ([page(SIZE - 1)], b"", 0, "came where a page was to"),
        ([(PageMessage.PIECE, b"abc")], b"", 0, "came where a page was to"),
    ],
)
def test_what_a_keeper_may_say(says: Says, half: bytes, found: int, error: str) -> None:
    """Whatever it is, only whole pages count, and those before them are whole."""
    fetch = fetched_from(says, half)
    assert fetch.found == found
    assert error in fetch.error
    assert bool(error) == bool(fetch.error)


# ---- engines


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("heads")
    save("qwen", folder)
    return {"model": str(folder)}


@contextmanager
def keeper_here(**settings: Any) -> Iterator[Engine]:
    side = Engine("both", {"by_layer": True, "chunked_prefill_size": 40, **settings})
    try:
        yield side
    finally:
        side.transfers.close()
        side.engine.close()


def asked(side: Engine, reader: Apart, ids: list[int]) -> None:
    """The reader begins to fetch as soon as it may; the keeper has still to compute all of it."""
    request = side._request(ids, {"do_remote_decode": True}, max_tokens=1)
    side.transfers.answer = lambda name, params: reader.begin("answer", ids, params)
    side.engine.add(request)
    side.transfers.begin(request)


@pytest.mark.exhaustive
@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
@pytest.mark.parametrize("settings", [{}, {"num_speculative_tokens": 2}], ids=["heads", "modules"])
def test_each_layer_is_fetched_before_the_next_is_computed(
    model: dict[str, Any],
    settings: dict[str, Any],
    captured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step waits in each layer until all of its pages have left."""
    settings = {**(settings or model), "captured": captured}
    layer, read = WrittenLayers.layer, PageMemory.read
    layers: list[int] = []
    copies: list[Any] = []

    def counted(self: PageMemory, page: int, into: Any, part: Any, after: Any) -> None:
        read(self, page, into, part, after)
        copies.append((page, part))

    def slow(self: WrittenLayers) -> None:
        layer(self)
        number = len(self.marks)
        if number == 1:
            copies.clear()  # of the step before
        layers.append(number)
        leases = side.transfers.pages.leases.leases.values()
        places = [place for lease in leases for place in lease.writing.values()]
        pages = {page for page, written in places if written is self}
        assert pages
        until(lambda: {page for page, part in copies if part.last_layer == number} == pages, 30)

    with keeper_here(**settings) as side, Apart("both", **dict(settings)) as reader:
        reader.end()
        monkeypatch.setattr(PageMemory, "read", counted)
        monkeypatch.setattr(WrittenLayers, "layer", slow)
        ids = prompt(5)
        asked(side, reader, ids)
        side.go_on(20)
        monkeypatch.undo()
        ((tokens, cached, error),) = reader.end()
        assert (cached, error) == (99, "")
        assert len(layers) > 3
        ((want, _, _),) = side.answer(ids, None, salt="alone")
        assert tokens == want
        nothing_is_held(reader)
        until(lambda: side.state()["held"] == side.state()["used"] == 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", [1, 5])
def test_an_error_in_the_midst_of_a_layer(
    model: dict[str, Any], after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first or in the second chunk: the reader computes what did not come, and the keeper
    goes on."""
    count = itertools.count(1)
    layer = WrittenLayers.layer

    def fails(self: WrittenLayers) -> None:
        if next(count) == after:
            raise ZeroDivisionError
        layer(self)

    with keeper_here(**model) as side, Apart("both", **model) as reader:
        reader.end()
        monkeypatch.setattr(WrittenLayers, "layer", fails)
        ids = prompt(6)
        asked(side, reader, ids)
        with pytest.raises(ZeroDivisionError):
            side.go_on(20)
        monkeypatch.undo()
        side.transfers.answer = lambda name, params: None
        side.go_on(20)
        assert not side.engine.has_work
        ((tokens, cached, error),) = reader.end()
        assert "kept no more" in error
        assert cached <= 40
        ((want, _, _),) = side.answer(ids, None, salt="alone")
        assert tokens == want
        nothing_is_held(reader)
        until(lambda: side.state()["held"] == side.state()["used"] == 0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_keeper_that_is_lost_amid_a_prompt(model: dict[str, Any], sign: int) -> None:
    """Stopped for longer than a reader waits: what it has to say then nobody hears."""
    settings = {**model, "by_layer": True, "chunked_prefill_size": 16}
    with started(settings, model) as pair:
        ids = prompt(7)
        given = pair.first.ask("begin", ids)
        pair.second.begin("answer", ids, given)
        waits(pair.second)
        pair.first.process.send_signal(sign)
        ((tokens, cached, error),) = pair.second.end(60)
        assert error
        assert cached < 99
        pair.first.process.send_signal(signal.SIGCONT)
        assert tokens == pair.second.ask("answer", ids, None, salt="alone")[0][0]
        nothing_is_held(pair.second)
        if sign == signal.SIGSTOP:
            pair.first.ask("go_on", 20)
            nothing_is_held(pair.first)


@pytest.mark.exhaustive
@pytest.mark.longest
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"tp": 2, "page_size": 16, "chunked_prefill_size": 24}, {}),
        ({"pp": 2}, {"tp": 2, "page_size": 16}),
        ({"dp": 2, "kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int8"}),
    ],
    ids=["ranks", "stages", "data-parallel"],
)
def test_layouts(model: dict[str, Any], first: Any, second: Any) -> None:
    with started({**model, **first, "by_layer": True}, {**model, **second}) as pair:
        for number in range(3):
            ids = prompt(number)
            given = pair.first.ask("begin", ids)
            pair.second.begin("answer", ids, given)
            pair.first.ask("go_on", 20)
            ((tokens, cached, error),) = pair.second.end()
            assert (cached, error) == (99, "")
            assert tokens == pair.first.ask("answer", ids, None, salt="alone")[0][0]
        nothing_is_held(pair.first)
        nothing_is_held(pair.second)
