"""Kill one of two expert servers under load, and start another in its place: tokens a second
beside those of engines that nothing happens to, and whether any answer lost a token or has another
than one process gives.

    python demo/kill_an_expert_server.py --streams 16 --rounds 15

All servers hold all experts of the bundled checkpoint. The engine whose server dies has two. Beside
it are one that has the survivor alone, from its start, and one with the survivor and a third. Rates
are compared in turns, a batch of requests each, so that what else the machine does falls on both;
under load are the kill, the start of the replacement, and five seconds after each."""

from __future__ import annotations

import argparse
import itertools
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rorqual import LLM, SamplingParams

TEXT = "It was a dark night and the"
TOKENS = 64
SETTLED = 5.0  # seconds after a change
Answer = tuple[int, tuple[int, ...]]  # number of a stream, and its tokens


class Server:
    def __init__(self, secret: str, port: int = 0):
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rorqual", "experts", "--threads", "1"),
                *("--listen", f"127.0.0.1:{port}", "--expert-secret-file", secret),
                *("--set", "dtype=float32"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"an expert server at port {port} ended with {self.process.wait()}")
        self.address = line.split()[-1]
        self.port = int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.process.communicate()


class Load:
    """So many requests at any time; `times`: when each token came. answers: those that ended."""

    def __init__(self, llm: LLM, streams: int):
        self.llm = llm
        self.times: list[float] = []
        self.answers: list[Answer] = []
        self.errors: list[str] = []
        self.ended = threading.Event()
        self.threads = [threading.Thread(target=self._read, args=(n,)) for n in range(streams)]
        for thread in self.threads:
            thread.start()

    def _read(self, number: int) -> None:
        try:
            while not self.ended.is_set():
                self._ask(number)
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def _ask(self, number: int) -> None:
        tokens: list[int] = []
        for delta in self.llm.stream(TEXT, params(number)):
            self.times += [time.monotonic()] * len(delta.token_ids)
            tokens += delta.token_ids
            if self.ended.is_set():
                return
        self.answers.append((number, tuple(tokens)))

    def longest_gap(self, start: float, stop: float) -> float:
        found = [start, *(at for at in self.times if start <= at < stop), stop]
        return max(b - a for a, b in itertools.pairwise(found))

    def end(self) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()


def params(number: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=number, max_tokens=TOKENS, ignore_eos=True)


def engine(streams: int, addresses: list[str], secret: str) -> LLM:
    return LLM(
        experts=(",".join(addresses),),
        expert_secret_file=secret,
        expert_timeout=1.0,
        dtype="float32",
        max_num_seqs=streams,
        threads=1,
    )


def one_process(streams: int) -> dict[int, set[tuple[int, ...]]]:
    """What one process with all its experts says to each stream, beside the others and by itself.
    Two answers where two tokens are equally good to the last digits."""
    llm = LLM(dtype="float32", max_num_seqs=streams, threads=1)
    found: dict[int, set[tuple[int, ...]]] = {number: set() for number in range(streams)}
    for numbers in (list(range(streams)), *([number] for number in range(streams))):
        outs = llm.generate([TEXT] * len(numbers), [params(number) for number in numbers])
        for number, out in zip(numbers, outs, strict=True):
            found[number].add(tuple(out.outputs[0].token_ids))
    llm.engine.close()
    return found


@dataclass
class Figures:
    """Tokens a second, and ratios of pairs of batches in turns: the engine beside one with two
    servers, before anything happens; beside one with the survivor alone, 5 s after the kill; beside
    the first 5 s after the replacement has joined. gaps: the longest without a token of any stream,
    around the kill and around the joining. answers: that ended; wrong: of these, with fewer or
    other tokens than one process gives."""

    before: Turns
    killed: Turns
    replaced: Turns
    gaps: tuple[float, float]
    answers: int
    wrong: int
    errors: list[str]

    @property
    def kept(self) -> float:
        """Of the rate before the kill, once the replacement has joined."""
        return self.replaced.ratio / self.before.ratio

    def print(self) -> None:
        for name, turns, beside in (
            ("two servers", self.before, "two that nothing happens to"),
            ("one killed, after 5 s", self.killed, "the survivor alone"),
            ("replaced, after 5 s", self.replaced, "two that nothing happens to"),
        ):
            print(
                f"{name:22}{turns.rate:7.0f} tokens/s, {turns.ratio:.2f} of {beside} "
                f"({turns.other:.0f})"
            )
        print(f"replaced {self.kept:.2f} of before")
        print(f"longest gap {self.gaps[0]:.2f} s at the kill, {self.gaps[1]:.2f} s at the joining")
        print(f"{self.answers} answers, {self.wrong} unlike one process's")
        print(*self.errors, sep="\n")


@dataclass
class Turns:
    """Medians: tokens/s of two engines, and the ratio of pairs."""

    rate: float
    other: float
    ratio: float


class Scene:
    """Three engines, and servers by name."""

    def __init__(self, streams: int, rounds: int, secret: str):
        self.streams = streams
        self.rounds = rounds
        self.secret = secret
        self.answers: list[Answer] = []
        self.errors: list[str] = []
        self.survivor, self.victim, self.third = (Server(secret) for _ in range(3))
        self.engine = engine(streams, [self.survivor.address, self.victim.address], secret)
        self.untouched = engine(streams, [self.survivor.address, self.third.address], secret)
        self.alone = engine(streams, [self.survivor.address], secret)

    def close(self) -> None:
        for llm in (self.engine, self.untouched, self.alone):
            llm.engine.close()
        for server in (self.survivor, self.victim, self.third):
            server.kill()

    def under_load(self, act: Callable[[], None]) -> float:
        """Does something after two seconds and goes on until SETTLED after it; the longest gap."""
        load = Load(self.engine, self.streams)
        time.sleep(2.0)
        start = time.monotonic()
        try:
            act()
            time.sleep(SETTLED)
        finally:
            stop = time.monotonic()
            load.end()
        self.answers += load.answers
        self.errors += load.errors
        return load.longest_gap(start, stop)

    def turns(self, other: LLM) -> Turns:
        self._batch(other)
        pairs = [(self._batch(self.engine), self._batch(other)) for _ in range(self.rounds)]
        tokens = self.streams * TOKENS
        own, others = zip(*pairs, strict=True)
        return Turns(
            tokens / statistics.median(own),
            tokens / statistics.median(others),
            statistics.median(b / a for a, b in pairs),
        )

    def _batch(self, llm: LLM) -> float:
        """Seconds."""
        numbers = range(self.streams)
        start = time.monotonic()
        outs = llm.generate([TEXT] * self.streams, [params(number) for number in numbers])
        seconds = time.monotonic() - start
        self.answers += [
            (number, tuple(out.outputs[0].token_ids))
            for number, out in zip(numbers, outs, strict=True)
        ]
        return seconds

    def replace(self) -> None:
        """Returns once the new one has joined."""
        self.victim.kill()
        self.victim = Server(self.secret, self.victim.port)
        servers = self.engine.engine.worker.experts
        assert servers is not None
        while len(servers.links) < 2:
            time.sleep(0.01)


def measure(streams: int, rounds: int, secret: str, fault: str = "kill") -> Figures:
    """fault: kill, or stop (SIGSTOP; it is killed for good when its replacement starts)."""
    allowed = one_process(streams)
    scene = Scene(streams, rounds, secret)
    try:
        before = scene.turns(scene.untouched)
        number = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
        first = scene.under_load(lambda: scene.victim.process.send_signal(number))
        killed = scene.turns(scene.alone)
        second = scene.under_load(scene.replace)
        replaced = scene.turns(scene.untouched)
    finally:
        scene.close()
    wrong = sum(tokens not in allowed[number] for number, tokens in scene.answers)
    answers = len(scene.answers)
    return Figures(before, killed, replaced, (first, second), answers, wrong, scene.errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fault", choices=("kill", "stop"), default="kill")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text(secrets.token_hex(16))
        measure(given.streams, given.rounds, str(secret), given.fault).print()


if __name__ == "__main__":
    main()
