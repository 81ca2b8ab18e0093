"""What is said on the link of a process group, how groups are formed, and what calls carry."""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rorqual import LLM
from rorqual.config.model import nccl_unwatched
from rorqual.disagg.experts.server import ExpertServer
from rorqual.errors import ConfigError
from rorqual.ops.reference import quantize_activation
from rorqual.parallel.remote.group import forming, lane_group
from rorqual.parallel.remote.group.lane_group import LaneGroup
from rorqual.parallel.remote.group.messages import (
    MAX_GROUP_BYTES,
    TOKEN,
    GroupOffer,
    StoreRequest,
    group_made,
    read_group_made,
    read_stored,
    stored,
)
from rorqual.parallel.remote.group.rows import (
    EXPERT_MASK,
    NUMBER_SHIFT,
    GroupRows,
    marked,
    slots_of,
)
from rorqual.parallel.remote.group.store import CallerStore, LinkStore, serve_store
from rorqual.parallel.remote.link import LinkError, receive, send
from rorqual.parallel.remote.wire import GROUP, ExpertMessage, Join, join
from tests.disagg.expert_caller import Caller, Start
from tests.engine.mixed_batch import COMMON, TEXTS, params

CALLER = "34" * 16
OFFER = GroupOffer(1, 2, 2, 64, 64, 4, False, "float32", "gloo")


def offer(**changes: object) -> bytes:
    return json.dumps({**json.loads(OFFER.pack()), **changes}).encode()


# ---- with servers in this process


@pytest.mark.exhaustive
def test_tokens_are_one_process_s_until_a_server_goes_and_after(
    start: Start, secret_file: str
) -> None:
    alone = LLM(**COMMON)
    expected = [out.outputs[0].token_ids for out in alone.generate(TEXTS, params())]
    alone.engine.close()
    servers = [start(slots) for slots in ("all", "6-15")]
    llm = LLM(
        **COMMON,
        experts=tuple(f"127.0.0.1:{server.port}" for server in servers),
        expert_secret_file=secret_file,
        expert_transport="group",
        micro_batches=2,
    )
    try:
        found = [out.outputs[0].token_ids for out in llm.generate(TEXTS, params())]
        assert found == expected
        assert llm.engine.stats.all2all_backend == "expert servers in a process group over gloo"
        servers[1].close()
        found = [out.outputs[0].token_ids for out in llm.generate(TEXTS, params())]
        assert found == expected
        assert llm.engine.stats.all2all_backend.startswith("expert servers over tcp (")
    finally:
        llm.engine.close()


@pytest.mark.parametrize("transport", ["tcp", "group"])
def test_an_engine_that_is_dropped_ends_its_links(
    transport: str, start: Start, secret_file: str
) -> None:
    """Without close: its threads must not connect to expert servers for ever."""
    server = start("all")
    before = set(threading.enumerate())
    llm = LLM(
        **COMMON,
        experts=(f"127.0.0.1:{server.port}",),
        expert_secret_file=secret_file,
        expert_transport=transport,
    )
    assert llm.generate(TEXTS[:1], params(max_tokens=2))
    threads = set(threading.enumerate()) - before
    assert f"experts 127.0.0.1:{server.port}" in {thread.name for thread in threads}
    del llm
    deadline = time.monotonic() + 60
    while any(thread.is_alive() for thread in threads):
        gc.collect()  # an engine holds itself in circles
        assert time.monotonic() < deadline, [one.name for one in threads if one.is_alive()]
        time.sleep(0.01)
    assert not server.server.links


def test_a_server_says_why_it_takes_no_part_and_lives_on(start: Start) -> None:
    server: ExpertServer = start("all")
    config = server.shard.config
    shape = {"columns": config.hidden_size, "top_k": config.moe.top_k}
    control = Caller(server, None, caller=CALLER)
    control.holdings()
    dice = random.Random(6)

    def answer(data: bytes, caller: str = CALLER) -> str:
        link = Caller(server, GROUP, caller=caller)
        send(link.sock, ExpertMessage.GROUP, data)
        kind, found = receive(link.sock, MAX_GROUP_BYTES)
        assert kind == ExpertMessage.GROUP_MADE
        assert link.ended()
        reply: dict[str, str] = json.loads(found)
        return reply["why"]

    assert answer(offer(**shape, backend="nccl")) == (
        "messages by nccl are called for; accepted: gloo"
    )
    assert "accepted: float32" in answer(offer(**shape, dtype="int8"))
    assert "rows of 128" in answer(offer(**{**shape, "columns": 128}))
    assert "experts of a row, top_k" in answer(offer(**{**shape, "top_k": config.moe.top_k + 1}))
    assert "no control link" in answer(offer(**shape), "56" * 16)
    assert "rank 2" in answer(offer(**shape, rank=2))
    for _ in range(20):
        link = Caller(server, GROUP, caller=CALLER)
        send(link.sock, dice.randrange(25), dice.randbytes(dice.randrange(200)))
        link.sock.shutdown(socket.SHUT_WR)
        while not link.ended():
            pass
    assert Caller(server, None).holdings().version == 1


def test_a_group_without_its_secret_bytes_is_none(
    start: Start, secret_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else at the other end of what gloo has connected."""
    server: ExpertServer = start("all")
    monkeypatch.setattr(forming, "FORM_SECONDS", 10.0)
    plain = LaneGroup.prove

    def prove(self: LaneGroup, tokens: dict[int, bytes], seconds: float) -> None:
        wrong = {rank: bytes(TOKEN) for rank in tokens}
        plain(self, wrong if self.rank == 0 else tokens, seconds)

    monkeypatch.setattr(LaneGroup, "prove", prove)
    with pytest.raises(ConfigError, match="expert_transport='group' over gloo"):
        LLM(
            **COMMON,
            experts=(f"127.0.0.1:{server.port}",),
            expert_secret_file=secret_file,
            expert_transport="group",
        )
    assert Caller(server, None).holdings().version == 1


# ---- messages


def test_messages_come_back() -> None:
    assert GroupOffer.unpack(OFFER.pack()) == OFFER
    for request in (StoreRequest("set", "a/0", b"\0\xff"), StoreRequest("add", "n", amount=-3)):
        assert StoreRequest.unpack(request.pack()) == request
    read_group_made(group_made())
    with pytest.raises(LinkError, match="too far away"):
        read_group_made(group_made("too far away"))
    assert read_stored(stored(b"\x01\x02")) == b"\x01\x02"
    with pytest.raises(LinkError, match="nobody came"):
        read_stored(stored(why="nobody came"))
    assert Join.unpack(join(GROUP, CALLER)) == Join(GROUP, CALLER)
    with pytest.raises(LinkError, match="the caller's name"):
        Join.unpack(join(GROUP))


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 0},
        {"rank": 2},
        {"size": 66},
        {"lanes": 9},
        {"rows": 2**14 + 1},
        {"rows": True},
        {"columns": -1},
        {"top_k": 65},
        {"fp8": 1},
        {"dtype": 3},
        {"backend": None},
    ],
)
def test_offers_that_are_none_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(LinkError, match="offered"):
        GroupOffer.unpack(offer(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"operation": "delete"},
        {"key": 3},
        {"key": "k" * 501},
        {"value": "0"},
        {"value": "zz"},
        {"value": "00" * (2**15 + 1)},
        {"amount": 2**32},
        {"amount": "1"},
    ],
)
def test_a_store_is_asked_for_nothing_else(changes: dict[str, object]) -> None:
    data = {**json.loads(StoreRequest("set", "key").pack()), **changes}
    with pytest.raises(LinkError, match="store"):
        StoreRequest.unpack(json.dumps(data).encode())


def test_a_store_over_a_link() -> None:
    near, far = socket.socketpair()
    store = CallerStore(5)
    served = threading.Thread(target=serve_store, args=(near, store))
    served.start()
    own = LinkStore(far)  # torch does not keep it
    remote = dist.PrefixStore("lane 0", own)
    remote.set("own", b"\0\x01")
    assert store.values == {"lane 0/own": b"\0\x01"}
    late = threading.Timer(0.1, store.set, ("lane 0/late", b"there"))
    late.start()
    assert remote.get("late") == b"there"
    assert remote.check(["own"])
    assert not remote.check(["other"])
    assert [remote.add("n", 2), remote.add("n", 3)] == [2, 5]
    late.join()
    waits = threading.Timer(0.1, store.close)
    waits.start()
    with pytest.raises(LinkError, match="not every member"):
        remote.get("never")
    own.close()
    with pytest.raises(LinkError, match="nothing is stored any more"):
        remote.set("after", b"")
    send(far, ExpertMessage.GROUP_READY)
    served.join(10)
    assert not served.is_alive()
    near.close()
    far.close()


def test_a_store_has_no_end_of_keys() -> None:
    store = CallerStore(0.01)
    for number in range(4096):
        store.set(str(number), b"")
    with pytest.raises(LinkError, match="4096 keys"):
        store.set("another", b"")


# ---- what calls carry


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(
    ("fp8", "ue8m0"), [(False, False), (True, False), (True, True)], ids=["", "fp8", "ue8m0"]
)
def test_parts_of_a_buffer_do_not_touch(rows: int, fp8: bool, ue8m0: bool) -> None:
    form = GroupRows(200, 3, torch.bfloat16, fp8, ue8m0)
    buffer = torch.zeros(form.call_size(16), dtype=torch.uint8)
    call = form.call(buffer, rows)
    x = torch.randn(rows, 200).to(torch.bfloat16)
    ids = torch.randint(-1, 9, (rows, 3), dtype=torch.int32)
    weights = torch.rand(rows, 3)
    for part, new in ((call.head, torch.arange(4)), (call.ids, ids), (call.weights, weights)):
        part.copy_(new)
    form.fill(call.rows, x)
    again = form.call(buffer[: form.call_size(rows)].clone(), rows)
    assert torch.equal(again.head, torch.arange(4))
    assert torch.equal(again.ids, ids)
    assert torch.equal(again.weights, weights)
    sent = quantize_activation(x, ue8m0) if fp8 else (x,)
    for part, wanted in zip(again.rows, sent, strict=True):
        assert torch.equal(part.float(), wanted.float())
    assert not buffer[form.call_size(rows) :].any()
    reply = form.reply(torch.zeros(form.reply_size(rows), dtype=torch.uint8), rows)
    assert reply.sums.shape == (rows, 200)


def test_each_pick_is_one_holder_s_and_a_row_s_go_together() -> None:
    held = [range(6), range(4, 9), range(2, 9)]
    count = torch.zeros(10, dtype=torch.int64)
    table = torch.zeros(10, 3, dtype=torch.int64)
    for number, experts in enumerate(held):
        for expert in experts:
            table[expert, count[expert]] = number
            count[expert] += 1
    ids = torch.randint(0, 9, (64, 4))
    turn = torch.arange(64)[:, None] + 5
    found, missed = marked(ids, count, table, turn)
    assert not missed
    assert found.dtype == torch.int32
    numbers = found >> NUMBER_SHIFT
    assert torch.equal((found & EXPERT_MASK).long(), ids)
    assert all(int(e) in held[int(n)] for e, n in zip(ids.view(-1), numbers.view(-1), strict=True))
    assert all(len(numbers[ids == expert].unique()) == count[expert] for expert in range(9))
    same = marked(torch.tensor([[4, 5, 4]]), count, table, turn[:1])[0] >> NUMBER_SHIFT
    assert len(same.unique()) == 1
    # none holds the last; and -1 is nobody's
    found, missed = marked(torch.tensor([[-1, 9, 3]]), count, table, turn[:1])
    assert missed
    assert found[0, :2].tolist() == [-1, -1]
    assert not marked(torch.tensor([[-1, 3]]), count, table, turn[:1])[1]


def test_a_server_takes_its_own_picks_and_no_id_as_an_index() -> None:
    places = torch.tensor([3, -1, 0, 1, -1])  # of 4 experts
    ids = torch.tensor([[0, 2, -1], [3 | 1 << NUMBER_SHIFT, 3, 2 | 1 << NUMBER_SHIFT]])
    slots, missed = slots_of(ids.int(), 0, places)
    assert slots.tolist() == [[3, 0, -1], [-1, 1, -1]]
    assert not missed
    for wrong in (1, 4, 5, EXPERT_MASK):
        slots, missed = slots_of(torch.tensor([[wrong]], dtype=torch.int32), 0, places)
        assert slots.tolist() == [[-1]]
        assert missed
    least = torch.tensor([[-(2**31), 2**31 - 1]], dtype=torch.int32)
    assert slots_of(least, 0, places)[0].tolist() == [[-1, -1]]


# ---- NCCL, by what stands in its place


WATCHDOG = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
)


class FakeNccl:
    """Writes down what is asked of it."""

    class Options:
        _timeout = timedelta(0)

    made: list[FakeNccl] = []  # noqa: RUF012

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options):
        self.calls: list[Any] = [("made", rank, size, options._timeout)]
        self.environment = {name: os.environ.get(name) for name in WATCHDOG}
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append("connect")

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> FakeNccl:
        self.calls.append("end")
        return self

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        self.calls.append(("send", rank, tensors[0].numel()))

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        self.calls.append(("recv", rank, tensors[0].numel()))

    def wait(self) -> None:
        self.calls.append("wait")

    def abort(self) -> None:
        self.calls.append("abort")


def fake_nccl(monkeypatch: pytest.MonkeyPatch) -> tuple[LaneGroup, FakeNccl]:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "")
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")  # as it was, at the end
    group = LaneGroup("nccl", CallerStore(1), 0, 0, 3, torch.device("cpu"), "127.0.0.1", 1)
    return group, FakeNccl.made[-1]


def test_nccl_sends_to_all_in_one_group_call_and_never_with_what_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    group, fake = fake_nccl(monkeypatch)
    # torch ends no process by itself, here alone
    assert set(fake.environment.values()) == {"0"}
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"
    data = torch.zeros(7, dtype=torch.uint8)
    group.send([(1, data), (2, data)]).wait(1)
    group.receive([(1, data), (2, data[:3])]).wait(1)
    assert not group.early
    group.abort()
    group.abort()
    assert fake.calls == [
        ("made", 0, 3, timedelta(days=1)),
        "connect",
        "start",
        ("send", 1, 7),
        ("send", 2, 7),
        "end",
        "wait",
        "start",
        ("recv", 1, 7),
        ("recv", 2, 3),
        "end",
        "wait",
        "abort",
    ]


def test_groups_that_are_made_at_once_leave_the_environment_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in WATCHDOG:
        monkeypatch.delenv(name, raising=False)
    together = threading.Barrier(4)
    failures: list[BaseException] = []

    def make() -> None:
        try:
            together.wait(30)
            for _ in range(200):
                with nccl_unwatched():
                    assert all(os.environ[name] == "0" for name in WATCHDOG)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert not any(name in os.environ for name in WATCHDOG)


def test_nccl_s_abort_waits_for_a_launch_and_none_begins_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who launched meanwhile would wait for the abort, and that for graphs which it would never let
    go of."""
    group, fake = fake_nccl(monkeypatch)
    data = torch.zeros(7, dtype=torch.uint8)
    begun = threading.Event()
    ends = threading.Event()

    def send(tensors: list[Tensor], rank: int, tag: int) -> None:
        begun.set()
        assert ends.wait(30)

    monkeypatch.setattr(lane_group, "LAUNCH_SECONDS", 30.0)
    monkeypatch.setattr(fake, "send", send, raising=False)
    sender = threading.Thread(target=group.send, args=([(1, data)],))
    sender.start()
    assert begun.wait(30)
    aborting = threading.Thread(target=group.abort)
    aborting.start()
    while not group.aborted:
        time.sleep(0.001)
    aborting.join(0.05)
    assert "abort" not in fake.calls
    ends.set()
    sender.join(30)
    aborting.join(30)
    assert fake.calls[-2:] == ["end", "abort"]
    with pytest.raises(LinkError, match="has ended"):
        group.send([(1, data)])


def test_nccl_s_last_error_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    group, fake = fake_nccl(monkeypatch)

    def end() -> None:
        raise RuntimeError(
            "NCCL error in: a file, invalid usage\nncclInvalidUsage: This usually reflects it.\n"
            "Last error:\nDuplicate GPU detected : rank 1 and rank 0\n"
        )

    monkeypatch.setattr(fake, "_end_coalescing", end, raising=False)
    with pytest.raises(LinkError, match="invalid usage: Duplicate GPU detected : rank 1 and rank"):
        group.send([(1, torch.zeros(1, dtype=torch.uint8))])
