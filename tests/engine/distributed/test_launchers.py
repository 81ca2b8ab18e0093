"""Engines whose ranks torchrun has started: the tokens of one process, who may take part, and
what is left when one dies."""

from __future__ import annotations

import os
import re
import signal
import time
from itertools import pairwise
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rorqual import LLM, SamplingParams
from rorqual.engine.config import EngineConfig
from rorqual.engine.distributed.launchers import torchrun as module
from rorqual.engine.distributed.launchers.placement import assign
from rorqual.engine.distributed.launchers.torchrun import TorchrunPlace, take_part
from rorqual.errors import ConfigError, EngineError
from tests.engine.distributed.starting import (
    ENGINE,
    TEXT,
    finished,
    free_port,
    generating,
    gone,
    pids_below,
    start,
    torchrun,
    variables,
)

pytestmark = pytest.mark.exhaustive

GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def expected() -> str:
    (found,) = LLM(**ENGINE).generate(TEXT, GREEDY)
    return TEXT + found.outputs[0].text + "\n"


# ---- torchrun itself


def check_torchrun(expected: str, processes: int, **sizes: Any) -> None:
    status, out, err = finished(
        start(torchrun(*generating("torchrun", **sizes), processes=processes))
    )
    assert status == 0, err
    assert out == expected


def test_torchrun_gives_the_tokens_of_one_process(expected: str) -> None:
    check_torchrun(expected, 2, tp=2)


@pytest.mark.full_matrix
@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 2, "dp": 2, "ep": 4},
        {"pp": 2, "tp": 2, "num_speculative_tokens": 2},
        {"dp": 4, "exchange": "low_latency", "ep": 4},
    ],
)
def test_torchrun_of_four(expected: str, sizes: dict[str, int]) -> None:
    check_torchrun(expected, 4, **sizes)


@pytest.mark.full_matrix
def test_two_agents_that_find_each_other_by_c10d(expected: str) -> None:
    port = free_port()
    meet = [
        "--nnodes",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--rdzv-id",
        "one",
        "--local-addr",
        "127.0.0.1",
    ]
    agents = [start(torchrun(*meet, *generating("torchrun", tp=2), processes=1)) for _ in range(2)]
    found = [finished(agent) for agent in agents]
    assert [status for status, _, _ in found] == [0, 0], found
    assert sorted(out for _, out, _ in found) == ["", expected]


@pytest.mark.full_matrix
def test_a_layout_that_is_not_torchruns_is_refused_by_every_rank() -> None:
    status, _, err = finished(start(torchrun(*generating("torchrun", tp=4), processes=2)), 30)
    assert status == 1
    assert err.count("tp=4 x dp=1 x pp=1 needs 4 ranks, torchrun has started 2") == 2


@pytest.mark.full_matrix
def test_a_server_under_torchrun_drains_and_all_end_with_it() -> None:
    """The agent passes SIGTERM on to every rank; only rank 0 decides what it means."""
    port = free_port()
    settings = [f"--set={name}={value}" for name, value in {**ENGINE, "tp": 2}.items()]
    agent = start(
        torchrun(
            "-m",
            "rorqual",
            "serve",
            "--port",
            str(port),
            "--no-structured-output",
            "--launcher",
            "torchrun",
            *settings,
        )
    )
    assert agent.stderr is not None
    ready = next(line for line in agent.stderr if "serving" in line)
    assert f":{port}" in ready
    children = pids_below(agent.pid)
    assert len(children) == 3, "the API process, its engine, and rank 1"
    agent.send_signal(signal.SIGTERM)
    finished(agent)
    assert all(gone(pid) for pid in children)


# ---- rank 0 in this process, rank 1 in another, started by hand


class Pair:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, watchdog: float):
        port = free_port()
        for name, value in variables(0, 2, port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("RORQUAL_SECRET", raising=False)
        self.process = start(generating("torchrun", tp=2), **variables(1, 2, port))
        self.llm = LLM(**ENGINE, tp=2, launcher="torchrun", watchdog_seconds=watchdog)

    def until_it_fails(self, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                self.llm.generate(
                    [TEXT] * 4, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
                )
        except EngineError as error:
            return str(error)
        pytest.fail(f"the engine went on for {seconds} s")


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_ends_the_engine_with_its_name_and_host(
    monkeypatch: pytest.MonkeyPatch, expected: str, blow: signal.Signals
) -> None:
    pair = Pair(monkeypatch, watchdog=5)
    try:
        (found,) = pair.llm.generate(TEXT, GREEDY)
        assert TEXT + found.outputs[0].text + "\n" == expected
        os.kill(pair.process.pid, blow)
        message = pair.until_it_fails(60)
        assert re.match(
            r"rank 1 \(pp 0, dp 0, tp 1\) on \S+ \(127\.0\.0\.1\) has (closed its link|given "
            r"no sign of life)",
            message,
        )
        assert re.search(r"rank 0 was (launching|waiting for) .*step \d+", message)
    finally:
        pair.llm.engine.close()
        if blow is signal.SIGSTOP:
            os.kill(pair.process.pid, signal.SIGCONT)
    status, _, err = finished(pair.process, 60)  # nobody but the end of its link tells it to
    assert status == (-signal.SIGKILL if blow is signal.SIGKILL else 1)
    assert blow is signal.SIGKILL or "rank 1 ends: rank 0 has gone" in err


def test_a_rank_ends_with_rank_0_even_if_that_only_hangs() -> None:
    check_orphan(signal.SIGSTOP)


@pytest.mark.full_matrix
def test_a_rank_ends_with_rank_0() -> None:
    check_orphan(signal.SIGKILL)


def check_orphan(blow: signal.Signals) -> None:
    port = free_port()
    command = generating("torchrun", tokens=100_000, tp=2, watchdog_seconds=4, max_model_len=512)
    ranks = [start(command, **variables(rank, 2, port)) for rank in range(2)]
    try:
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.read(len(TEXT)) == TEXT
        os.kill(ranks[0].pid, blow)
        status, _, err = finished(ranks[1], 60)
        assert status == 1
        assert "rank 1 ends: rank 0 has gone, or has been silent for too long" in err
    finally:
        os.killpg(ranks[0].pid, signal.SIGKILL)
        ranks[0].communicate()


# ---- who may take part


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """A process that believes to be rank 1 of 2, with a store of its own."""
    for name, value in variables(1, 2, 1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RORQUAL_SECRET", raising=False)
    store = dist.HashStore()
    monkeypatch.setattr(TorchrunPlace, "store", lambda self: store)
    return store


TWO = EngineConfig("", tp=2, launcher="torchrun")


def test_a_secret_is_given_to_all_hosts_or_to_none(
    alone: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.set(module.WHERE, '["127.0.0.1", 1, null]')
    with pytest.raises(ConfigError, match="rank 0 was given a secret, rank 1 was not"):
        take_part(TWO)
    alone.set(module.WHERE, '["127.0.0.1", 1, "0123456789abcdef"]')
    monkeypatch.setenv("RORQUAL_SECRET", "0123456789abcdef")
    with pytest.raises(ConfigError, match="rank 1 was given a secret, rank 0 was not"):
        take_part(TWO)


def test_a_listener_out_of_reach_is_said(
    alone: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.set(module.WHERE, '["127.0.1.1", 1, "0123456789abcdef"]')
    monkeypatch.setattr(module, "route_to", lambda host: "10.0.0.7")
    with pytest.raises(ConfigError, match="out of reach for rank 1; name its network interface"):
        take_part(TWO)


def test_sizes_must_be_those_of_torchrun(alone: dist.Store) -> None:
    for config in (
        EngineConfig("", tp=2, dp=2, launcher="torchrun"),
        EngineConfig("", launcher="torchrun"),
    ):
        with pytest.raises(ConfigError, match="torchrun has started 2"):
            take_part(config)
    with pytest.raises(ConfigError, match="torchrun has started 2"):
        LLM(launcher="torchrun")
    with pytest.raises(ConfigError, match="rank 1 of torchrun's"):
        LLM(launcher="torchrun", tp=2)


def test_the_variables_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    assert take_part(TWO) is None
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="must be integers"):
        take_part(TWO)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ConfigError, match="missing: WORLD_SIZE"):
        take_part(TWO)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"launcher": "mpi"}, "launcher='mpi'"),
        ({"interface": "lo"}, "interface='lo' does not go with launcher='local'"),
        ({"secret_file": "x"}, "secret_file='x' does not go"),
        ({"first_device": -1}, "first_device=-1"),
        ({"device": "cuda:1", "tp": 2}, "device='cuda:1' names one device"),
    ],
)
def test_options_are_checked(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig("", **options)


# ---- places on the hosts of a cluster


@given(st.data())
def test_attention_groups_stay_on_one_node(data: st.DataObject) -> None:
    """Every place is taken once; and where nodes hold whole groups, no group is split."""
    tp = data.draw(st.sampled_from([1, 2, 4, 8]))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    nodes = [f"node {index}" for index, groups in enumerate(sizes) for _ in range(groups * tp)]
    home = data.draw(st.sampled_from(sorted(set(nodes))))
    nodes.remove(home)
    nodes = [home, *data.draw(st.permutations(nodes))]
    places = assign(nodes, tp)
    assert sorted(places) == list(range(len(nodes)))
    assert places[0] == 0
    hosts = [nodes[place] for place in places]
    assert all(len(set(hosts[group : group + tp])) == 1 for group in range(0, len(hosts), tp))
    runs = 1 + sum(a != b for a, b in pairwise(hosts))
    assert runs == len(set(hosts)), "the groups of a node follow each other"


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=16), st.sampled_from([1, 2, 4]))
def test_any_places_are_assigned(nodes: list[str], tp: int) -> None:
    nodes = (nodes * tp)[: len(nodes) // tp * tp or tp]
    places = assign(nodes, tp)
    assert sorted(places) == list(range(len(nodes)))
    assert places[0] == 0


def test_a_group_is_split_only_where_it_must() -> None:
    places = assign(["a", "b", "b", "b", "a", "b"], 2)
    assert [["a", "b", "b", "b", "a", "b"][place] for place in places] == [
        "a",
        "a",
        "b",
        "b",
        "b",
        "b",
    ]
    places = assign(["a", "b", "b", "c"], 2)
    assert places == [0, 3, 1, 2]
