"""Two hosts, as far as one machine can be two: network namespaces joined by a virtual cable, each
with its own loopback and interface.

Needs root and `ip` (iproute2); skipped elsewhere.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rorqual import LLM, SamplingParams
from tests.engine.distributed.starting import (
    ENGINE,
    ROOT,
    TEXT,
    environment,
    finished,
    generating,
    gone,
    torchrun,
)

HOSTS = ("rorqual-a", "rorqual-b")
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = "29517"


def ip(*words: str, check: bool = True) -> bool:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr
    return done.returncode == 0


def possible() -> bool:
    """Whether namespaces can be made here."""
    if (
        os.geteuid()
        or shutil.which("ip") is None
        or not ip("netns", "add", "rorqual-probe", check=False)
    ):
        return False
    return ip("netns", "del", "rorqual-probe")


pytestmark = [pytest.mark.full_matrix]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    if not possible():
        pytest.skip("needs root and network namespaces")
    ends = [f"rq-veth-{host[-1]}" for host in HOSTS]
    for host in HOSTS:
        ip("netns", "del", host, check=False)
        ip("netns", "add", host)
    ip(
        "link",
        "add",
        ends[0],
        "netns",
        HOSTS[0],
        "type",
        "veth",
        "peer",
        "name",
        ends[1],
        "netns",
        HOSTS[1],
    )
    for host, end, address in zip(HOSTS, ends, ADDRESSES, strict=True):
        ip("-n", host, "addr", "add", f"{address}/24", "dev", end)
        ip("-n", host, "link", "set", "lo", "up")
        ip("-n", host, "link", "set", end, "up")
    yield HOSTS
    for host in HOSTS:
        ip("netns", "del", host)


@pytest.fixture(scope="module")
def expected() -> str:
    (found,) = LLM(**ENGINE).generate(TEXT, SamplingParams(temperature=0, max_tokens=20))
    return TEXT + found.outputs[0].text + "\n"


def start_on(host: str, arguments: list[str], **changes: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = ["ip", "netns", "exec", host, sys.executable, *arguments]
    return subprocess.Popen(
        command, env=environment(**changes), cwd=ROOT, start_new_session=True, **pipes
    )


def agents(command: list[list[str]], each: int, **changes: str) -> list[subprocess.Popen[str]]:
    meet = ["--nnodes", "2", "--master-addr", ADDRESSES[0], "--master-port", PORT]
    return [
        start_on(
            host,
            torchrun(*meet, "--node-rank", str(node), *command[node], processes=each),
            **changes,
        )
        for node, host in enumerate(HOSTS)
    ]


@pytest.mark.parametrize(
    ("each", "sizes"),
    [
        (1, {"tp": 2}),
        (1, {"dp": 2, "ep": 2, "num_speculative_tokens": 1}),
        (2, {"tp": 2, "dp": 2, "ep": 4}),
    ],
)
def test_two_hosts_give_the_tokens_of_one_process(
    hosts: tuple[str, str], expected: str, each: int, sizes: dict[str, int]
) -> None:
    """Each finds its interface by itself: loopback would not reach the other."""
    found = [
        finished(agent)
        for agent in agents(
            [generating("torchrun", **sizes)] * 2, each, RORQUAL_SECRET="known on both hosts"
        )
    ]
    assert [status for status, _, _ in found] == [0, 0], found
    assert [out for _, out, _ in found] == [expected, ""]


def test_rank_0_listens_on_the_private_address_alone(hosts: tuple[str, str]) -> None:
    command = generating("torchrun", tokens=100_000, tp=2, max_model_len=512)
    both = agents([command] * 2, 1)
    assert both[0].stdout is not None
    assert both[0].stdout.read(len(TEXT)) == TEXT
    listeners = subprocess.run(
        ["ip", "netns", "exec", hosts[0], "ss", "-Hltnp"], capture_output=True, text=True
    ).stdout.splitlines()
    # that one is torchrun's own store
    own = [line.split()[3] for line in listeners if f":{PORT} " not in line]
    for agent in both:
        os.killpg(agent.pid, signal.SIGTERM)
    for agent in both:
        finished(agent, 60)
    assert own, "the store that process groups meet at stays open"
    assert {address.rpartition(":")[0] for address in own} == {ADDRESSES[0]}


def test_another_secret_is_refused_on_both_hosts(hosts: tuple[str, str]) -> None:
    command = generating("torchrun", tp=2)
    meet = ["--nnodes", "2", "--master-addr", ADDRESSES[0], "--master-port", PORT]
    both = [
        start_on(
            host,
            torchrun(*meet, "--node-rank", str(node), *command, processes=1),
            RORQUAL_SECRET=f"the secret of {host}",
        )
        for node, host in enumerate(hosts)
    ]
    status, _, err = finished(both[1])
    assert status == 1
    assert "rank 0 refuses this rank: its secret is not that of rank 0" in err
    os.killpg(both[0].pid, signal.SIGTERM)  # it would wait for a rank with the right one
    finished(both[0], 60)


def test_a_host_that_is_cut_off_ends_both_sides(hosts: tuple[str, str]) -> None:
    """No packet says that anything ended: only silence does."""
    command = generating("torchrun", tokens=100_000, tp=2, max_model_len=512, watchdog_seconds=4)
    both = agents([command] * 2, 1)
    assert both[0].stdout is not None
    assert both[0].stdout.read(len(TEXT)) == TEXT
    inside = [
        subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout
        for host in hosts
    ]
    ranks = [int(pid) for found in inside for pid in found.split()]
    ip("-n", hosts[1], "link", "set", "rq-veth-b", "down")
    try:
        status, _, err = finished(both[0], 60)
        assert status == 1
        assert "rank 1 (pp 0, dp 0, tp 1) on " in err
        assert f"({ADDRESSES[1]}) has given no sign of life" in err
        _, _, err = finished(both[1], 90)
        # Its link and its collective are given up after the same time: either may be first.
        assert (
            "rank 1 ends: rank 0 has gone, or has been silent for too long" in err
            or "a rank ends: RuntimeError" in err
        )
        assert all(gone(pid, 1) for pid in ranks)
    finally:
        ip("-n", hosts[1], "link", "set", "rq-veth-b", "up")
