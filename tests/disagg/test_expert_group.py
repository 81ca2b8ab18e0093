"""Experts in other processes that are called by messages of a process group, gloo's here: the
tokens of one process, whatever ends in between."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from rorqual import LLM
from rorqual.disagg.experts import steps_in_flight
from rorqual.disagg.experts.group_lanes import GroupLanes
from rorqual.disagg.experts.shard import LOADED_ROWS
from rorqual.errors import ConfigError, ExpertsMissing
from rorqual.parallel.remote.group import calls as group_calls
from rorqual.parallel.remote.group.calls import GroupCalls
from rorqual.parallel.remote.group.lane_group import Flight, LaneGroup
from rorqual.parallel.remote.wire import SharedCall, Step
from rorqual.platforms.cpu import CpuPlatform
from tests.disagg import streams_of_threads
from tests.disagg.expert_caller import Start
from tests.disagg.expert_processes import ExpertProcess, serving
from tests.engine.mixed_batch import COMMON, TEXTS, params

OVER_GLOO = "expert servers in a process group over gloo"
SPREADS = {1: ("all",), 2: ("0-9", "6-15"), 3: ("0-5,14", "6-11", "10-15,0")}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    llm = LLM(**COMMON)
    try:
        return tokens(llm)
    finally:
        llm.engine.close()


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(TEXTS, params())]


@contextmanager
def engine(servers: list[ExpertProcess], secret_file: str, **more: Any) -> Iterator[LLM]:
    ports = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    given = {"expert_transport": "group", "expert_secret_file": secret_file, **more}
    llm = LLM(**COMMON, experts=(ports,), **given)
    try:
        yield llm
    finally:
        llm.engine.close()


def group_of(llm: LLM) -> GroupCalls:
    found = llm.engine.worker.remote.group
    assert found is not None
    return found


def many(count: int, secret_file: str) -> list[ExpertProcess]:
    return [ExpertProcess(slots, secret_file) for slots in SPREADS[count]]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("count", "more"),
    [
        (2, {"micro_batches": 2}),
        (1, {}),
        (1, {"num_speculative_tokens": 1}),
        (2, {"num_speculative_tokens": 1}),
        (3, {"micro_batches": 3}),
    ],
)
def test_tokens_are_one_process_s(
    count: int, more: dict[str, Any], secret_file: str, expected: list[list[int]]
) -> None:
    with (
        serving(*many(count, secret_file)) as servers,
        engine(servers, secret_file, **more) as llm,
    ):
        assert llm.engine.stats.all2all_backend == OVER_GLOO
        assert tokens(llm) == expected
        assert llm.engine.stats.all2all_backend == OVER_GLOO
        calls = group_of(llm)
        assert len(calls.members) == count
        assert len(calls.lanes) == more.get("micro_batches", 1)
        assert all(lane.announced for lane in calls.lanes)
        assert [lane.counts.tolist() for lane in calls.lanes] == [
            [lane.announced, lane.announced] for lane in calls.lanes
        ]
        assert int(calls.sent) == 0


@pytest.mark.longest
def test_rows_in_fp8_come_to_the_same_tokens_as_over_sockets(secret_file: str) -> None:
    found = []
    for transport in ("tcp", "group"):
        with (
            serving(*many(2, secret_file)) as servers,
            engine(servers, secret_file, fp8_dispatch=True, expert_transport=transport) as llm,
        ):
            found.append(tokens(llm))
    assert found[0] == found[1]


def linked(llm: LLM, count: int) -> None:
    """Until so many servers are."""
    servers = llm.engine.worker.experts
    assert servers is not None
    for _ in range(600):
        if len(servers.links) == count:
            return
        time.sleep(0.05)
    raise AssertionError(servers.describe())


def test_a_server_that_is_killed_in_a_step_ends_the_group_and_no_request(
    secret_file: str, expected: list[list[int]]
) -> None:
    with (
        serving(*(ExpertProcess("all", secret_file) for _ in range(2))) as servers,
        engine(servers, secret_file, micro_batches=2) as llm,
    ):
        stream = iter(llm.stream(TEXTS[0], params()))
        begun = list(itertools.islice(stream, 2))
        assert llm.engine.stats.all2all_backend == OVER_GLOO
        servers[0].kill()
        found = [token for delta in [*begun, *stream] for token in delta.token_ids]
        assert found == expected[0]
        calls = group_of(llm)
        assert not calls.on
        assert calls.epoch == 1
        assert llm.engine.stats.all2all_backend.startswith("expert servers over tcp (")
        linked(llm, 1)
        servers[0].start()
        servers[0].wait()
        linked(llm, 2)
        assert tokens(llm) == expected


def test_a_group_that_ends_while_a_step_begins_costs_no_token(
    secret_file: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that finds a server lost ends the group at any time."""
    with (
        serving(*(ExpertProcess("all", secret_file) for _ in range(2))) as servers,
        engine(servers, secret_file) as llm,
    ):
        calls = group_of(llm)
        write_tables = calls._write_tables

        def meanwhile_lost() -> None:
            write_tables()
            calls._end("a server is lost")

        monkeypatch.setattr(calls, "_write_tables", meanwhile_lost)
        calls.tabled = None
        assert tokens(llm) == expected
        assert not calls.on
        assert calls.why == "a server is lost"


@pytest.mark.exhaustive
def test_a_stopped_server_that_goes_on_disturbs_nobody(
    secret_file: str, expected: list[list[int]]
) -> None:
    with (
        serving(*(ExpertProcess("all", secret_file) for _ in range(2))) as servers,
        engine(servers, secret_file, expert_timeout=0.5) as llm,
    ):
        stream = iter(llm.stream(TEXTS[0], params()))
        begun = list(itertools.islice(stream, 2))
        servers[0].signal(signal.SIGSTOP)
        found = [token for delta in [*begun, *stream] for token in delta.token_ids]
        assert found == expected[0]
        assert "silent for 0.5 s" in llm.engine.stats.all2all_backend
        servers[0].signal(signal.SIGCONT)
        linked(llm, 2)
        assert tokens(llm) == expected


@pytest.mark.longest
def test_a_server_stopped_for_less_than_the_timeout_only_costs_time(
    secret_file: str, expected: list[list[int]]
) -> None:
    with (
        serving(*many(2, secret_file)) as servers,
        engine(servers, secret_file, expert_timeout=20) as llm,
    ):
        stream = iter(llm.stream(TEXTS[0], params()))
        begun = list(itertools.islice(stream, 2))
        servers[0].pause(0.5)
        found = [token for delta in [*begun, *stream] for token in delta.token_ids]
        assert found == expected[0]
        assert llm.engine.stats.all2all_backend == OVER_GLOO


@pytest.mark.longest
def test_without_a_holder_a_step_waits_and_is_given_up(
    secret_file: str, expected: list[list[int]]
) -> None:
    with (
        serving(*many(2, secret_file)) as servers,
        engine(servers, secret_file, expert_wait=2.0) as llm,
    ):
        servers[1].kill()
        with pytest.raises(ExpertsMissing, match="no server holds 10-15 of layer"):
            llm.generate(TEXTS[0], params())
        servers[1].start()
        servers[1].wait()
        linked(llm, 2)
        assert tokens(llm) == expected


@pytest.mark.longest
def test_two_engines_share_a_server_and_one_s_end_is_not_the_other_s(
    secret_file: str, expected: list[list[int]]
) -> None:
    with serving(ExpertProcess("all", secret_file)) as servers, engine(servers, secret_file) as one:
        with engine(servers, secret_file) as other:
            assert tokens(other) == expected
            assert tokens(one) == expected
        assert tokens(one) == expected
        assert one.engine.stats.all2all_backend == OVER_GLOO


WHOLE: dict[str, Any] = {"precompile_kernels": False, "cudagraph_capture_sizes": (4,)}


def whole_steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """As with captured graphs, with what records nothing and computes anew in their place: the
    steps that servers are told whole."""
    replaying: list[bool] = []

    def announce(self: GroupCalls, lane: int, layer: int, rows: int) -> None:
        if replaying:
            return
        if self.capturing is not None:
            self.capturing.calls.append((lane, SharedCall(layer, rows)))
        self._send_step({lane: (SharedCall(layer, rows),)})

    def capture(
        self: CpuPlatform, work: Callable[[], Tensor], warm: bool = True
    ) -> Callable[[], Tensor]:
        work()

        def replay() -> Tensor:
            replaying.append(True)
            try:
                return work()
            finally:
                replaying.pop()

        return replay

    steps: list[Step] = []
    replay_step = GroupCalls.announce_step
    monkeypatch.setattr(GroupCalls, "announce", announce)
    monkeypatch.setattr(
        GroupCalls,
        "announce_step",
        lambda self, step: (steps.append(step), replay_step(self, step)),
    )
    monkeypatch.setattr(CpuPlatform, "capture", capture)
    monkeypatch.setattr(CpuPlatform, "has_graphs", True)
    return steps


@pytest.mark.exhaustive
def test_a_step_is_told_whole_before_it_is_replayed(
    secret_file: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with captured graphs, with what records nothing and computes anew in their place; and all
    are gone once the group is over."""
    steps = whole_steps(monkeypatch)
    with (
        serving(*(ExpertProcess("all", secret_file) for _ in range(2))) as servers,
        engine(servers, secret_file, **WHOLE, micro_batches=2) as llm,
    ):
        assert llm.engine.worker.runner.graphs is not None
        assert tokens(llm) == expected
        layers = list(llm.engine.worker.expert_layers)
        announced = [[call.layer for call in calls] for step in steps for calls in step.values()]
        assert announced
        assert all(found == layers for found in announced)
        assert max(map(len, steps)) == 2
        servers[1].kill()
        assert tokens(llm) == expected
        assert llm.engine.worker.runner.graphs is None
        before = len(steps)
        assert tokens(llm) == expected
        assert len(steps) == before


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", ["announced", "sent", "waiting", "waited"])
def test_an_interrupt_leaves_no_call_behind(
    place: str, secret_file: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After servers were told of a call, after its rows left, before its sums are waited for, and
    as a wait for them returns, where a signal that comes in it is seen."""
    rest = [3]

    def interrupts(plain: Callable[..., Any]) -> Callable[..., Any]:
        def work(*given: Any, **more: Any) -> Any:
            rest[0] -= 1
            if rest[0] == 0:
                if place == "waited":
                    plain(*given, **more)
                raise KeyboardInterrupt
            return plain(*given, **more)

        return work

    with (
        serving(*many(2, secret_file)) as servers,
        engine(servers, secret_file, micro_batches=2) as llm,
    ):
        with monkeypatch.context() as patch:
            where, name = {
                "announced": (GroupCalls, "_send"),
                "sent": (GroupCalls, "receive"),
                "waiting": (Flight, "wait"),
                "waited": (Flight, "wait"),
            }[place]
            patch.setattr(where, name, interrupts(getattr(where, name)))
            with pytest.raises(KeyboardInterrupt):
                tokens(llm)
        assert tokens(llm) == expected
        assert llm.engine.stats.all2all_backend == OVER_GLOO


@pytest.mark.exhaustive
def test_a_message_that_is_lost_or_comes_twice_is_no_other_s(
    secret_file: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sees that it is not the one to come, and the caller that it says so."""
    sent: list[int] = []
    plain = LaneGroup.send

    def send(self: LaneGroup, messages: Any) -> Flight:
        sent.append(len(messages))
        if len(sent) == 9:
            plain(self, messages)  # again
        return plain(self, messages)

    with (
        serving(*many(1, secret_file)) as servers,
        engine(servers, secret_file) as llm,
    ):
        monkeypatch.setattr(LaneGroup, "send", send)
        monkeypatch.setattr(group_calls, "STEP_SECONDS", 5.0)
        assert tokens(llm) == expected
        assert len(sent) >= 9
        assert llm.engine.stats.all2all_backend.startswith("expert servers over tcp (")


@pytest.mark.longest
def test_tokens_stay_while_experts_move(
    start: Start, secret_file: str, expected: list[list[int]]
) -> None:
    """Tables follow what servers hold, and a call that comes too late for it is made again."""
    servers = [start("0-12", max_slots=13), start("13-15", max_slots=8)]
    llm = LLM(
        **COMMON,
        experts=tuple(f"127.0.0.1:{server.port}" for server in servers),
        expert_secret_file=secret_file,
        expert_transport="group",
        expert_rebalance=True,
        eplb_window=5,
        eplb_threshold=0.97,
    )
    try:
        balancer = llm.engine.slot_balancer
        assert balancer is not None
        deadline = time.monotonic() + 240
        while not balancer.stats.rebalances:
            assert tokens(llm) == expected
            assert time.monotonic() < deadline, balancer.stats
        assert tokens(llm) == expected
        assert balancer.stats.slots
        assert llm.engine.stats.all2all_backend == OVER_GLOO
    finally:
        llm.engine.close()


def test_all_servers_must_be_there_at_the_start(start: Start, secret_file: str) -> None:
    server = start("all")
    options = {**COMMON, "expert_secret_file": secret_file, "expert_transport": "group"}
    ports = (f"127.0.0.1:{server.port}", "127.0.0.1:1")
    with pytest.raises(
        ConfigError, match=r"not all servers answer.*127.0.0.1:1 Connection refused"
    ):
        LLM(**options, experts=ports, expert_wait=0.2)


def test_another_checkpoint_s_server_is_refused(start: Start, secret_file: str) -> None:
    server = start("all", weights="random", seed=3)
    with pytest.raises(ConfigError, match="experts cannot be exchanged"):
        LLM(
            **COMMON,
            experts=(f"127.0.0.1:{server.port}",),
            expert_secret_file=secret_file,
            expert_transport="group",
            expert_wait=0.2,
        )


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tp": 2}, "tp=2"),
        ({"dp": 2}, "dp=2"),
        ({"pipeline_turns": 2}, "pipeline_turns=2"),
        ({"experts_from": "http://127.0.0.1:1"}, "experts_from"),
        ({"experts": tuple(f"127.0.0.1:{port}" for port in range(9000, 9065))}, "65 servers"),
    ],
)
def test_what_a_group_cannot_do_is_refused_before_anything_is_built(
    more: dict[str, Any], said: str, secret_file: str
) -> None:
    given = {"experts": ("127.0.0.1:9000",), "expert_secret_file": secret_file, **more}
    with pytest.raises(ConfigError, match=f"group.*{said}|{said}.*group"):
        LLM(**COMMON, expert_transport="group", **given)


@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [{"micro_batches": 2}, {}, {"fp8_dispatch": True}], ids=str)
@pytest.mark.parametrize("whole", [True, False])
def test_a_server_launches_steps_as_on_a_gpu(
    whole: bool,
    more: dict[str, Any],
    start: Start,
    secret_file: str,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With threads in place of streams: calls of a step one by one and whole, a caller's end and
    the next caller."""
    server = start("all")
    noted = streams_of_threads.put_in_place(monkeypatch)
    monkeypatch.setattr(GroupLanes, "on_gpu", True)
    if whole:
        whole_steps(monkeypatch)
    given = {
        **COMMON,
        **(WHOLE if whole else {}),
        **more,
        "experts": (f"127.0.0.1:{server.port}",),
        "expert_secret_file": secret_file,
        "expert_transport": "group",
    }
    for _ in range(2):
        noted.clear()
        llm = LLM(**given)
        try:
            found = tokens(llm)
            assert found == expected or more.get("fp8_dispatch")
            assert llm.engine.stats.all2all_backend == OVER_GLOO
            assert noted.count("warm up 1") >= len(LOADED_ROWS)  # kernels of a call
            assert ("capture" in noted) == whole
        finally:
            llm.engine.close()
    deadline = time.monotonic() + 30
    while server.groups.lanes or server.moves.steps.steps:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not steps_in_flight.STREAMS.taken
