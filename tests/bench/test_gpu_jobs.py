"""demo/gpu_jobs.py: what runs beside what, what is ended, and what is not run again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.demo_script import DEMO, load_demo

gpu_jobs = load_demo("gpu_jobs")


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "out").mkdir()
    return {"out": str(tmp_path / "out"), "files": str(tmp_path)}


def job(name: str, *run: str, seconds: int = 20, **given: Any) -> Any:
    return gpu_jobs.Job(name, run, seconds, **given)


def log_of(places: dict[str, str], name: str) -> str:
    return Path(places["out"], f"{name}.log").read_text()


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_jobs_of_one_card_run_side_by_side(places: dict[str, str]) -> None:
    """Each waits for the other, on a card of its own; what needs both comes after them."""
    script = (
        'sh -c "echo $CUDA_VISIBLE_DEVICES > {out}/%s; until test -s {out}/%s; do sleep 0.05; done"'
    )
    jobs = [
        job("one", script % ("a", "b")),
        job("other", script % ("b", "a")),
        job("both", 'sh -c "cat {out}/a {out}/b; echo sees $CUDA_VISIBLE_DEVICES"', cards=2),
    ]
    done = gpu_jobs.run(jobs, [4, 7], 60, places)
    assert [one.status for one in done] == [0, 0, 0]
    assert done[-1].job.name == "both"
    assert "4\n7\nsees 4,7\n# ended with 0" in log_of(places, "both")


def test_a_job_that_fails_ends_there_and_the_next_runs(
    places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = [
        job("bad", 'sh -c "echo before; exit 3"', "touch {out}/never", env={"NAME": "value"}),
        job("good", 'sh -c "echo $NAME-"', env={"NAME": "value of {out}"}),
    ]
    done = gpu_jobs.run(jobs, [0], 60, places)
    assert [one.status for one in done] == [1, 0]
    took = done[0].seconds
    time.sleep(0.01)
    assert done[0].seconds == took > 0
    assert not Path(places["out"], "never").exists()
    assert f"value of {places['out']}-\n" in log_of(places, "good")
    assert gpu_jobs.report(jobs, done, [Path(places["out"])]) == 1
    said = capsys.readouterr().out
    assert "    # ended with 3, " in said
    assert "    before" in said


def test_what_takes_too_long_is_ended_with_its_children(places: dict[str, str]) -> None:
    slow = job("slow", 'sh -c "sleep 60 & echo $!; wait"', seconds=1)
    (one,) = gpu_jobs.run([slow], [0], 60, places)
    assert one.status == 1
    said = log_of(places, "slow")
    assert "# took more than 2 s" in said
    child = int(said.splitlines()[1])
    limit = time.monotonic() + 10
    while alive(child) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not alive(child)


def test_what_hangs_prints_where(places: dict[str, str]) -> None:
    slow = job("slow", "python -c 'import time; time.sleep(60)'", seconds=2)
    (one,) = gpu_jobs.run([slow], [0], 60, places)
    assert one.status == 1
    assert "Fatal Python error: Aborted" in log_of(places, "slow")
    assert 'File "<string>", line 1' in log_of(places, "slow")


def test_a_job_that_does_not_fit_is_left_for_another_day(places: dict[str, str]) -> None:
    jobs = [job("long", "true", seconds=600), job("short", "true")]
    done = gpu_jobs.run(jobs, [0], 60, places)
    assert [one.job.name for one in done] == ["short"]


def test_what_runs_beside_is_waited_for_and_ended(places: dict[str, str]) -> None:
    server = 'sh -c "sleep 0.3; echo I am ready $$; exec sleep 60"'
    with_server = job("with", "cat {out}/with.0.beside", beside=(server,), ready="ready ")
    (one,) = gpu_jobs.run([with_server], [0], 60, places)
    assert one.status == 0
    pid = int(log_of(places, "with").rpartition("I am ready ")[2].split()[0])
    assert not alive(pid)
    gone = job("gone", "sleep 60", beside=("false",), ready="ready ")
    (one,) = gpu_jobs.run([gone], [0], 60, places)
    assert one.status == 1
    assert "# what runs beside it has ended" in log_of(places, "gone")


def test_what_ended_well_is_not_run_again(tmp_path: Path) -> None:
    """By the script as it is started; an interrupted job runs again."""
    plan = tmp_path / "jobs.toml"
    plan.write_text(
        '[[here]]\nname = "quick"\nseconds = 9\nrun = ["sh -c \\"echo once >> {files}/runs\\""]\n'
        '[[here]]\nname = "slow"\nseconds = 9\nrun = ["sh -c \\"touch {files}/slow; sleep 60\\""]\n'
    )
    script = (
        "import sys\nfrom pathlib import Path\nimport gpu_jobs, signal\n"
        f"gpu_jobs.JOBS = Path({str(plan)!r})\n"
        "gpu_jobs.read_jobs.__defaults__ = (gpu_jobs.JOBS,)\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "sys.exit(gpu_jobs.main(sys.argv[1:]))\n"
    )
    words = ["here", "--out", str(tmp_path / "out"), "--files", str(tmp_path), "--seconds", "30"]
    env = {**os.environ, "PYTHONPATH": str(DEMO)}
    started = [sys.executable, "-c", script, *words, "--cards", "0"]
    with subprocess.Popen(started, env=env, stdout=subprocess.DEVNULL) as process:
        while not (tmp_path / "slow").exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    found = gpu_jobs.read_jobs("here", plan)
    ended = [gpu_jobs.ended_well(one, [tmp_path / "out"]) for one in found]
    assert ended == [True, False]
    assert "# was interrupted" in (tmp_path / "out" / "slow.log").read_text()
    again = [*words[:2], str(tmp_path / "more"), *words[3:], "--done", str(tmp_path / "out")]
    again += ["--only", "quick"]
    subprocess.run([sys.executable, "-c", script, *again], env=env, check=True, timeout=60)
    assert (tmp_path / "runs").read_text() == "once\n"


def test_plans_can_be_read() -> None:
    for plan in ("two-cards", "one-card", "here"):
        assert gpu_jobs.read_jobs(plan)
    with pytest.raises(SystemExit, match="no plan 'other'; there are two-cards"):
        gpu_jobs.read_jobs("other")
