"""What a caller of expert servers over shared memory decides between steps: without servers, with
memory files in place of a GPU's."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.emulation.triton_interpreter import DEVICE, needs_triton  # before kernels are defined

pytestmark = [needs_triton, pytest.mark.skipif(DEVICE != "cpu", reason="runs in the interpreter")]

from rorqual.bench.comm.handle_hop import EchoExperts  # noqa: E402
from rorqual.config.host_memory import host_number  # noqa: E402
from rorqual.disagg.experts import steps_in_flight  # noqa: E402
from rorqual.disagg.experts.lanes import CallerLanes  # noqa: E402
from rorqual.disagg.experts.step_gate import StepGate  # noqa: E402
from rorqual.errors import ConfigError, ExpertsMissing  # noqa: E402
from rorqual.ops.triton.comm.remote_dispatch import LaneAreas  # noqa: E402
from rorqual.parallel import cuda_ipc  # noqa: E402
from rorqual.parallel.remote import handles  # noqa: E402
from rorqual.parallel.remote.control import ServerLink  # noqa: E402
from rorqual.parallel.remote.handle_link import HandleLink, LaneHeads  # noqa: E402
from rorqual.parallel.remote.handles import HandleCalls, new_block  # noqa: E402
from rorqual.parallel.remote.wire import BlockName, Holdings, LanesOffer  # noqa: E402
from rorqual.parallel.shared.handle_passing import DescriptorServer  # noqa: E402
from rorqual.platforms.cpu import CpuPlatform  # noqa: E402
from tests.disagg import streams_of_threads  # noqa: E402
from tests.parallel.memfd_driver import MemfdDriver, no_device  # noqa: E402

CPU = torch.device("cpu")
AREAS = LaneAreas(4, 128, 2, 4)


@pytest.fixture(autouse=True, scope="module")
def driver() -> Iterator[None]:
    made = MemfdDriver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_ipc, "driver", lambda: made)
        patch.setattr(cuda_ipc, "on_device", no_device)
        patch.setattr(handles, "DEVICES", ("cpu",))
        yield
        gc.collect()  # what is mapped goes as it came


class Known:
    """Members. before_lost: comes between a link's going and what is said of it."""

    def __init__(self, calls: HandleCalls, *links: ServerLink):
        self.calls = calls
        self.links = links
        self.before_lost: Callable[[], object] = int

    def drop(self, link: ServerLink, reason: str) -> None:
        if link not in self.links:
            return
        self.links = tuple(other for other in self.links if other is not link)
        link.close()
        self.before_lost()
        self.calls.lost(link, reason)

    def without_holder(self) -> str:
        return "" if self.links else "no server holds 0-1 of layer 3"

    def describe(self) -> str:
        return f"{len(self.links)} linked"


def made(noted: bool = True) -> HandleCalls:
    calls = HandleCalls(
        CpuPlatform(CPU), AREAS, torch.float32, False, 1, (3,), num_experts=2, noted=noted
    )
    assert calls.device == CPU
    return calls


ends: list[socket.socket] = []


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    yield
    while ends:
        ends.pop().close()


def link(port: int, shares: bool = True) -> ServerLink:
    control, *rest = (sock for _ in range(2) for sock in socket.socketpair())
    ends.extend(rest)
    found = ServerLink(("127.0.0.1", port), Holdings(4, {3: (0, 1)}), control, [])
    if shares:
        inboxes = new_block(AREAS.inbox_size, CPU)
        homes = new_block(AREAS.home_size, CPU)
        heads = homes.tensor(CPU).view(1, -1)[:, :8].view(torch.int32)
        heads.zero_()
        found.handles = HandleLink(rest[1], inboxes, homes, [0], LaneHeads(heads, CpuPlatform(CPU)))
    else:
        found.no_handles = "it is on another host"
    return found


def noted(calls: HandleCalls, own: bool = False) -> int:
    out = torch.full((3,), 7, dtype=torch.int32)
    calls.note(own, out[1:2])
    assert out[[0, 2]].tolist() == [7, 7]
    return int(out[1])


def test_what_a_step_is_worth_is_noted_on_the_device() -> None:
    calls = made()
    calls.decide(Known(calls, link(1), link(2)), must=True)
    assert calls.on
    calls.begin()
    assert noted(calls) == 0
    assert noted(calls, own=True) == 1
    for word in (0, 1):
        calls.words.zero_()
        calls.words[word] = 1
        assert noted(calls) == 1
        calls.words.zero_()
    assert noted(calls) == 0


def test_a_report_ends_with_the_step_that_is_begun_next() -> None:
    calls = made()
    calls.decide(Known(calls, link(1)), must=True)
    calls.begin()
    calls.words[1] = 1
    assert noted(calls) == 1
    calls.begin()
    assert noted(calls) == 0
    assert "no server held an expert" in calls.describe_failure()
    assert len(calls.active) == 1


def test_alone_a_step_is_given_up_by_its_epoch() -> None:
    calls = made(noted=False)
    known = Known(calls, link(1))
    calls.decide(known, must=True)
    epoch = calls.begin()
    calls.check(epoch)
    epoch = calls.begin()
    known.drop(known.links[0], "its link ended")
    with pytest.raises(ExpertsMissing, match="no server holds 0-1 of layer 3; 0 linked"):
        calls.check(epoch)


@pytest.mark.parametrize("must", [True, False])
def test_what_another_rank_cannot_this_one_does_not(must: bool) -> None:
    calls = made()
    links = (link(1), link(2))
    reasons: list[str] = []

    def agree(why: str) -> str:
        reasons.append(why)
        return f"rank 1: {why or 'none is near'}"

    known = Known(calls, *links)
    if must:
        with pytest.raises(ConfigError, match="handles': rank 1: none is near"):
            calls.decide(known, True, agree)
    else:
        calls.decide(known, False, agree)
        assert known.links == ()  # linked anew they have no memory
    assert reasons == [""]
    assert not calls.on
    assert calls.decided
    assert not calls.takes(1)


def test_all_ranks_hear_why_one_cannot() -> None:
    calls = made()
    reasons: list[str] = []
    calls.decide(
        Known(calls, link(1), link(2, False)), False, lambda why: reasons.append(why) or why
    )
    assert reasons == ["127.0.0.1:2: it is on another host"]
    assert calls.why == reasons[0]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_server_that_goes_while_a_step_begins_ends_the_waits_of_those_before(steps: int) -> None:
    """Its going is seen by the engine's thread before it is told of it: steps on their way may wait
    for it, so they must be ended before it is forgotten."""
    calls = made()
    known = Known(calls, link(1), link(2))
    calls.decide(known, must=True)
    for _ in range(steps):
        calls.begin()
    stopped: list[int] = []
    rest = calls._come_to_rest

    def come_to_rest() -> None:
        stopped.append(noted(calls))
        calls.halts.fill_(1)  # as waits that the stop word ends do
        rest()

    calls._come_to_rest = come_to_rest  # type: ignore[method-assign]
    known.before_lost = calls.begin
    known.drop(known.links[0], "its process ended")
    assert stopped == [1]
    assert [other.address[1] for other in calls.active] == [2]
    assert noted(calls) == 0
    assert not calls.halts.any()


def test_a_server_that_goes_while_tables_are_written_is_lost() -> None:
    calls = made()
    known = Known(calls, link(1), link(2))
    calls.decide(known, must=True)
    known.links = (*known.links,)  # holdings are newer
    holders = calls._holders

    def gone_meanwhile() -> Any:
        calls._holders = holders  # type: ignore[method-assign]
        known.links = known.links[1:]
        return holders()

    calls._holders = gone_meanwhile  # type: ignore[method-assign]
    calls.begin()
    assert noted(calls) == 1
    calls.begin()
    assert noted(calls) == 0
    assert [other.address[1] for other in calls.active] == [2]


def test_one_that_was_linked_meanwhile_without_memory_is_linked_anew() -> None:
    calls = made()
    known = Known(calls, link(1))
    calls.decide(known, must=True)
    known.links = (*known.links, link(2, False))
    calls.begin()
    assert [other.address[1] for other in known.links] == [1]
    calls.begin()
    assert [other.address[1] for other in calls.active] == [1]


def test_who_has_answered_all_that_came_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step waits for another server or another rank, and this one is told of calls to come."""
    monkeypatch.setattr(handles, "STEP_SECONDS", 0.0)
    calls = made()
    one = link(1)
    assert one.handles is not None
    calls.decide(Known(calls, one), must=True)
    assert calls._why_late(one.handles) == ""
    calls.begin()
    one.handles.announced = [9]
    assert calls._why_late(one.handles) == ""
    one.handles.heads.heads[0, 1] = 3
    assert "a step took longer" in calls._why_late(one.handles)
    one.handles.heads.heads[0, 0] = 3
    assert calls._why_late(one.handles) == ""
    calls.ended()
    one.handles.heads.heads[0, 1] = 5
    assert calls._why_late(one.handles) == ""


def test_a_loss_stops_the_waits_of_an_engine_made_in_inference_mode() -> None:
    """The thread of a link, which is not in that mode, writes the stop word."""
    with torch.inference_mode():
        calls = made()
        known = Known(calls, link(1), link(2))
        calls.decide(known, must=True)
        calls.begin()
    thread = threading.Thread(target=known.drop, args=(known.links[0], "its process ended"))
    thread.start()
    thread.join()
    assert calls.words.tolist() == [1, 0]
    with torch.inference_mode():
        calls.begin()
    assert calls.words.tolist() == [0, 0]


def test_a_step_of_an_engine_made_in_inference_mode_is_given_up() -> None:
    """Steps are launched in that mode, and checked outside of it."""
    with torch.inference_mode():
        calls = made(noted=False)
        calls.decide(Known(calls, link(1)), must=True)
        epoch = calls.begin()
    calls.words[1] = 1
    with pytest.raises(ExpertsMissing):
        calls.check(epoch)
    assert calls.words.tolist() == [0, 0]


def test_heads_are_read_by_copies_alone_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in a GPU's place copies at once, and says that it has when it is told to."""
    done: list[bool] = []
    platform = CpuPlatform(CPU)
    monkeypatch.setattr(platform, "finished", lambda: lambda: bool(done))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    memory = torch.arange(3 * 64, dtype=torch.uint8).view(3, 64)
    heads = LaneHeads(memory[:, :8].view(torch.int32), platform)
    heads.stream = object()  # type: ignore[assignment]
    assert heads.read(0.01) is None
    done.append(True)
    assert heads.read(60) == memory[:, :8].contiguous().view(torch.int32).tolist()


def test_a_device_that_copies_nothing_is_left_by_a_server_that_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handles, "STEP_SECONDS", 0.0)
    calls = made()
    one = link(1)
    assert one.handles is not None
    calls.decide(Known(calls, one), must=True)
    calls.begin()
    monkeypatch.setattr(one.handles.heads, "read", lambda seconds: None)
    assert "the device copies nothing" in calls._why_late(one.handles)
    monkeypatch.setattr(handles, "STEP_SECONDS", 60.0)
    assert calls._why_late(one.handles) == ""


def test_calls_that_are_dropped_end_their_thread() -> None:
    calls = made()
    thread = calls._descriptors().thread
    assert thread.is_alive()
    del calls
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_server_s_lanes_load_what_they_need_as_on_a_gpu(
    lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the hop benchmark's experts, with nothing to wait for and nothing that is sent."""
    noted = streams_of_threads.put_in_place(monkeypatch)
    monkeypatch.setattr(CallerLanes, "on_gpu", True)
    monkeypatch.setattr(torch.cuda, "current_stream", streams_of_threads.ThreadStream)
    shard: Any = EchoExperts(CpuPlatform(CPU), 128, 8, [0, 1], 2)
    shard.room(4)
    areas = LaneAreas(4, 128, 2, 2)
    homes = new_block(lanes * areas.home_size, CPU)
    homes.tensor(CPU).zero_()
    descriptors = DescriptorServer()
    fd = homes.fd()
    block = BlockName(descriptors.name, descriptors.offer([fd]).hex())
    os.close(fd)
    try:
        offer = LanesOffer(host_number(), lanes, 4, 128, 2, True, "bfloat16", block)
        made = CallerLanes(shard, offer, StepGate(), threading.Lock())
        assert noted == ["warm up 1"] * 3
        assert len(steps_in_flight.STREAMS.taken) == lanes
        assert not homes.tensor(CPU).any()
        made.launcher.synchronize()
        made.close()
        made.close()
        assert not steps_in_flight.STREAMS.taken
    finally:
        descriptors.close()
