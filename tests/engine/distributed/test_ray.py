"""Ranks that Ray has started, on a cluster of one host over loopback. Skipped where Ray is not
installed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rorqual import LLM, SamplingParams
from rorqual.errors import ConfigError
from tests.engine.distributed.starting import (
    ENGINE,
    TEXT,
    environment,
    finished,
    free_port,
    generating,
    gone,
    start,
)

pytestmark = pytest.mark.exhaustive

try:
    import ray
except ModuleNotFoundError:
    pytest.skip("needs the package ray", allow_module_level=True)

# Without the first Ray takes another address of this host than loopback.
SETTINGS = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """What a driver needs in its environment. Four processors, whatever the host has: ranks here
    are small."""
    folder = tempfile.mkdtemp(prefix="rqray-")
    port = free_port()
    head_of_all = (
        "from rorqual.config.model import die_with_parent; die_with_parent(); from "
        "ray.scripts.scripts import main; main()"
    )
    command = [
        sys.executable,
        "-c",
        head_of_all,
        "start",
        "--head",
        "--block",
        "--node-ip-address",
        "127.0.0.1",
    ]
    command += [
        "--port",
        str(port),
        "--num-cpus",
        "4",
        "--num-gpus",
        "0",
        "--include-dashboard",
        "false",
        "--temp-dir",
        folder,
    ]
    log = Path(folder) / "head.log"
    with log.open("w") as out:
        head = subprocess.Popen(
            command, env=environment(**SETTINGS), stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 60
        while "--block" not in log.read_text():
            assert head.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield {**SETTINGS, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def expected() -> str:
    (found,) = LLM(**ENGINE).generate(TEXT, SamplingParams(temperature=0, max_tokens=20))
    return TEXT + found.outputs[0].text + "\n"


def test_two_ranks_give_the_tokens_of_one_process(cluster: dict[str, str], expected: str) -> None:
    status, out, err = finished(start(generating("ray", tp=2), **cluster))
    assert status == 0, err
    assert out == expected


@pytest.mark.full_matrix
def test_four_ranks_and_a_secret_of_all_hosts(
    cluster: dict[str, str], expected: str, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    status, out, err = finished(
        start(generating("ray", tp=2, dp=2, ep=4, secret_file=secret), **cluster)
    )
    assert status == 0, err
    assert out == expected


@pytest.mark.full_matrix
def test_a_secret_that_ray_hosts_do_not_know_is_refused(cluster: dict[str, str]) -> None:
    status, _, err = finished(
        start(generating("ray", tp=2), **cluster, RORQUAL_SECRET="0123456789abcdef")
    )
    assert status == 2
    assert "rank 0 was given a secret, " in err
    assert "before `ray start`" in err


@pytest.mark.full_matrix
def test_a_cluster_that_is_too_small_says_so(
    cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
from rorqual import LLM
from rorqual.engine.distributed.launchers import ray_cluster
ray_cluster.RESERVE_SECONDS = 3
LLM(**{ENGINE!r}, dp=8, launcher="ray")
"""
    status, _, err = finished(start(["-c", script], **cluster))
    assert status == 1
    assert (
        "ConfigError: the cluster does not have {'CPU': 8} for 8 ranks, one on this host; "
        "free: {'CPU': 4.0}"
    ) in err


@pytest.mark.full_matrix
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_nothing_is_left_of_a_group_with_a_dead_rank(
    cluster: dict[str, str], blow: signal.Signals
) -> None:
    """A stopped process dies too: it goes with the actor that started it."""
    script = f"""
import json, sys
from rorqual import LLM, SamplingParams
llm = LLM(**{ENGINE!r}, tp=2, dp=2, ep=4, launcher="ray", watchdog_seconds=5)
print(json.dumps([member.pid for member in llm.engine.executor.handles]), flush=True)
while True:
    llm.generate([{TEXT!r}] * 4, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
"""
    driver = start(["-c", script], **cluster)
    assert driver.stdout is not None
    pids = json.loads(driver.stdout.readline())
    assert len(pids) == 3
    time.sleep(0.5)
    os.kill(pids[1], blow)
    status, _, err = finished(driver, 60)
    assert status == 1
    assert f"rank 2 (pp 0, dp 1, tp 0) on {socket.gethostname()} (127.0.0.1) has" in err
    assert all(gone(pid, 5) for pid in pids)


def test_no_cluster_is_a_clear_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(**options: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.\nAnd more.")

    monkeypatch.setattr(ray, "init", nowhere)
    with pytest.raises(
        ConfigError,
        match=r"found no cluster \(Could not find any running Ray instance.\); start one",
    ):
        LLM(**ENGINE, tp=2, launcher="ray")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"install rorqual\[ray\]"):
        LLM(**ENGINE, tp=2, launcher="ray")
