"""Runs the measurements of gpu_jobs.toml, as many as fit into a time, and can go on another day.

python demo/gpu_jobs.py two-cards --out results --seconds 540 --cards 0,1
python demo/gpu_jobs.py two-cards --list     # what there is, without running anything

Jobs are taken in the order of the file. One that needs a single card runs beside another on the
next; one that needs both waits for both. A job is begun only if its `seconds` still fit, and is
ended at one and a half times these. What it printed is in OUT/NAME.log; jobs whose log says that
they ended well are not run again, in OUT or in any folder of --done.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
JOBS = Path(__file__).with_suffix(".toml")
LATE = 1.5  # times its seconds, and a job is ended
LOOK = 0.2  # seconds between two looks
PRINT_SECONDS = 0.5  # for a job's other processes to print their stacks
READY_SECONDS = 180  # for what runs beside a job to be ready
DONE = "# ended with 0"  # begins the last line of a log


@dataclass(frozen=True)
class Job:
    """cards: that it sees, as cuda:0 and on. run: one command after the other. beside: that run
    meanwhile, each ready once it has printed a line with `ready`. seconds: that all of it takes.
    env: more of the environment; {out} and {files} are filled in."""

    name: str
    run: tuple[str, ...]
    seconds: int
    cards: int = 1
    beside: tuple[str, ...] = ()
    ready: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


def read_jobs(plan: str, path: Path = JOBS) -> list[Job]:
    """Raises SystemExit where there is no such plan, TypeError for a field nobody knows."""
    plans: dict[str, list[dict[str, Any]]] = tomllib.loads(path.read_text())
    if plan not in plans:
        raise SystemExit(f"gpu_jobs: no plan {plan!r}; there are {', '.join(plans)}")
    found = [
        Job(
            **{
                key: tuple(value) if isinstance(value, list) else value
                for key, value in job.items()
            }
        )
        for job in plans[plan]
    ]
    names = [job.name for job in found]
    assert len(set(names)) == len(names), f"two jobs of {plan} have one name"
    return found


def words_of(command: str, places: Mapping[str, str]) -> list[str]:
    """As a list, with {out} and {files} filled in, and by this Python."""
    words = shlex.split(command.format(**places))
    if words[0] == "rorqual":
        return [sys.executable, "-m", *words]
    if words[0] == "python":
        return [sys.executable, *words[1:]]
    return words


def ended_well(job: Job, folders: Sequence[Path]) -> bool:
    for folder in folders:
        path = folder / f"{job.name}.log"
        if path.exists() and path.read_text().rstrip().rpartition("\n")[2].startswith(DONE):
            return True
    return False


class Running:
    """A job under way on some cards."""

    def __init__(self, job: Job, cards: Sequence[int], places: Mapping[str, str]):
        self.job = job
        self.cards = list(cards)
        self.places = places
        self.path = Path(places["out"]) / f"{job.name}.log"
        self.log: TextIO = self.path.open("w")
        self.began = time.monotonic()
        self.ended: float | None = None
        self.left = list(job.run)
        self.status: int | None = None
        self.others: list[subprocess.Popen[bytes]] = []
        self.waited: list[Path] = []
        self.now: subprocess.Popen[bytes] | None = None
        for number, command in enumerate(job.beside):
            path = self.path.with_suffix(f".{number}.beside")
            self.waited.append(path)
            self.others.append(self._start(command, path.open("w")))

    def _start(self, command: str, log: TextIO) -> subprocess.Popen[bytes]:
        print(f"$ {command}", file=log, flush=True)
        cards = ",".join(map(str, self.cards))
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": cards}
        env["PYTHONFAULTHANDLER"] = "1"  # SIGABRT prints the stacks of all threads
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH"))))
        own = {name: value.format(**self.places) for name, value in self.job.env.items()}
        return subprocess.Popen(
            words_of(command, self.places),
            cwd=ROOT,
            env={**env, **own},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.began

    def look(self) -> None:
        """Begins what is next. Afterwards `status` is set if nothing is."""
        if self.seconds > LATE * self.job.seconds:
            self.end(f"took more than {LATE * self.job.seconds:.0f} s", signal.SIGABRT)
        elif self.now is not None and self.now.poll() is None:
            return
        elif self.now is not None and self.now.returncode:
            self.end(f"ended with {self.now.returncode}")
        elif any(other.poll() is not None for other in self.others):
            self.end("what runs beside it has ended")
        elif not self._ready():
            if self.seconds > READY_SECONDS:
                self.end("what runs beside it is not ready")
        elif self.left:
            self.now = self._start(self.left.pop(0), self.log)
        else:
            self.end("")

    def _ready(self) -> bool:
        return all(self.job.ready in path.read_text().partition("\n")[2] for path in self.waited)

    def end(self, why: str, *first: signal.Signals) -> None:
        """`why` it failed, or nothing. Ends every process that it began. first: sent before SIGTERM
        and SIGKILL."""
        for process in filter(None, (self.now, *self.others)):
            for blow in (*first, signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, blow)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                if blow in first:
                    time.sleep(PRINT_SECONDS)
        self.status = 1 if why else 0
        self.ended = time.monotonic()
        print(f"# {why}, " if why else f"{DONE}, ", end="", file=self.log)
        print(f"{self.seconds:.0f} s", file=self.log)
        self.log.close()


def run(
    jobs: Sequence[Job], cards: Sequence[int], seconds: float, places: Mapping[str, str]
) -> list[Running]:
    """All that were begun, in the order of their ends."""
    end = time.monotonic() + seconds
    waiting = list(jobs)
    under_way: list[Running] = []
    done: list[Running] = []
    try:
        while under_way or waiting:
            free = [card for card in cards if not any(card in one.cards for one in under_way)]
            waiting = [job for job in waiting if time.monotonic() + job.seconds < end]
            for job in list(waiting):
                if job.cards > len(free):
                    break  # in the order of the file: a large job does not wait for ever
                under_way.append(Running(job, free[: job.cards], places))
                waiting.remove(job)
                free = free[job.cards :]
            for one in under_way:
                one.look()
                if one.status is not None:
                    print(f"{one.job.name}: {'ok' if one.status == 0 else 'FAILED'}", flush=True)
                    done.append(one)
            under_way = [one for one in under_way if one.status is None]
            time.sleep(LOOK)
    finally:
        for one in under_way:
            one.end("was interrupted")
    return done


def report(jobs: Sequence[Job], done: Sequence[Running], folders: Sequence[Path]) -> int:
    """Prints a line for each job, and the end of what failed. How many failed."""
    ran = {one.job.name: one for one in done}
    failed = 0
    for job in jobs:
        one = ran.get(job.name)
        if one is None:
            print(f"{job.name:32} {'done before' if ended_well(job, folders) else 'not run'}")
        elif one.status == 0:
            print(f"{job.name:32} {one.seconds:6.0f} s")
        else:
            failed += 1
            print(f"{job.name:32} FAILED")
            for path in (one.path, *one.waited):
                print("    " + "\n    ".join(path.read_text().splitlines()[-12:]))
    return failed


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("plan", help="a table of gpu_jobs.toml")
    parser.add_argument("--out", type=Path, default=Path("gpu_jobs"), help="a folder")
    parser.add_argument("--done", type=Path, action="append", default=[], help="earlier folders")
    parser.add_argument("--files", type=Path, default=Path("."), help="what commands read")
    parser.add_argument("--seconds", type=float, default=600, help="for everything")
    parser.add_argument("--cards", default="0,1", help="numbers of GPUs to use")
    parser.add_argument("--only", default="", help="jobs whose names begin with one of these, a,b")
    parser.add_argument("--list", action="store_true", help="print the jobs and their commands")
    args = parser.parse_args(given)
    jobs = read_jobs(args.plan)
    if args.only:
        jobs = [job for job in jobs if job.name.startswith(tuple(args.only.split(",")))]
    if args.list:
        for job in jobs:
            print(f"{job.name}  ({job.cards} cards, {job.seconds} s)")
            for command in (*job.beside, *job.run):
                print(f"    {command}")
        return 0
    cards = [int(number) for number in args.cards.split(",")]
    jobs = [job for job in jobs if job.cards <= len(cards)]
    args.out.mkdir(parents=True, exist_ok=True)
    folders = [args.out, *args.done]
    places = {"out": str(args.out.resolve()), "files": str(args.files.resolve())}
    todo = [job for job in jobs if not ended_well(job, folders)]
    return min(report(jobs, run(todo, cards, args.seconds, places), folders), 1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
