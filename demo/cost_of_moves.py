"""What experts that move between servers cost: moves alone, in time and in processor time of the
server that loads, and batches of requests without moves and with, in turns.

    python demo/cost_of_moves.py --streams 16 --rounds 15 --pause 0

Two expert servers hold three quarters of the experts of every layer each, so half have two holders.
While experts move, the first server drops a third of its own and loads as many that the other holds
alone, or the other way round, in every layer, again as soon as it has reported that it is done and
`--pause` seconds have passed. `--expert-rebalance` gives such orders only as the load asks."""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from rorqual import LLM, SamplingParams
from rorqual.parallel.remote.control import ServerLink
from rorqual.parallel.remote.orders import SlotChange, SlotOrder

TEXT = "It was a dark night and the"
TOKENS = 64
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """model: a folder, or none for the bundled one. timeout: as --expert-timeout, by which servers
    hear eight times as often what callers know."""

    model: str | None
    weights: str
    streams: int
    rounds: int
    pause: float
    secret: str
    timeout: float = 2.0


def arguments(setting: Setting) -> dict[str, object]:
    found = {"dtype": "float32", "weights": setting.weights, "threads": 1}
    return found | ({"model": setting.model} if setting.model else {})


def start(setting: Setting, slots: str, room: int) -> tuple[subprocess.Popen[str], str]:
    """A server, and its address."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "rorqual", "experts", *filter(None, [setting.model])),
            *("--slots", slots, "--max-slots", str(room), "--listen", "127.0.0.1:0"),
            *("--expert-secret-file", setting.secret, "--threads", "1"),
            *("--set", "dtype=float32", "--set", f"weights={setting.weights}"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"an expert server ended with {process.wait()}")
    return process, line.split()[-1]


class Mover:
    """Gives orders to one server on a thread, from `begin` to `end`. loads: experts that came."""

    loads: int
    orders: int
    seconds: float

    def __init__(self, link: ServerLink, experts: int, pause: float):
        self.link = link
        self.pause = pause
        quarter = experts // 4
        self.here = tuple(range(quarter, 2 * quarter))  # the other holds these as well
        self.there = tuple(range(3 * quarter, 4 * quarter))
        self.number = 0
        self.forget()
        self.failure = ""
        self.moving = threading.Event()
        self.idle = threading.Event()
        self.idle.set()
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def begin(self) -> None:
        self.moving.set()

    def end(self) -> None:
        self.moving.clear()
        self.idle.wait()

    def close(self) -> None:
        self.closing.set()
        self.moving.set()
        self.thread.join()

    def _run(self) -> None:
        while True:
            self.moving.wait()
            if self.closing.is_set():
                return
            self.idle.clear()
            try:
                self.order()
            except RuntimeError as error:
                self.failure = str(error)
                self.closing.set()
            self.idle.set()
            time.sleep(self.pause)

    def forget(self) -> None:
        """Count from here on."""
        self.loads = self.orders = 0
        self.seconds = 0.0

    def order(self) -> None:
        """There or back, once; waits until it is done."""
        self.number += 1
        change = SlotChange(self.here, self.there)
        layers = dict.fromkeys(self.link.holdings.layers, change)
        began = time.perf_counter()
        refused = self.link.order(SlotOrder(self.number, layers), 30)
        while not refused and self.link.holdings.finished != self.number:
            if not self.link.alive or time.perf_counter() - began > 120:
                raise RuntimeError("an order was not carried out")
            time.sleep(0.002)
        refused = refused or self.link.holdings.failure
        if refused:
            raise RuntimeError(refused)
        self.seconds += time.perf_counter() - began
        self.orders += 1
        self.loads += len(self.there) * len(layers)
        self.here, self.there = self.there, self.here


@dataclass
class Figures:
    """alone, processor: seconds, and those of the server's processor, of an expert that comes while
    nothing else is done. still, moving: tokens/s, medians. ratio: of pairs in turns. loads: experts
    that came in the batches with moves, in so many seconds of orders. wrong: answers unlike those
    of one process, of `answers`."""

    alone: float
    processor: float
    still: float
    moving: float
    ratio: float
    loads: int
    orders: int
    seconds: float
    answers: int
    wrong: int

    def print(self) -> None:
        print(
            f"an expert comes in {1e3 * self.alone:.2f} ms, {1e3 * self.processor:.2f} ms of the "
            "server's processor"
        )
        print(f"experts stay  {self.still:8.0f} tokens/s")
        print(f"experts move  {self.moving:8.0f} tokens/s, {self.ratio:.2f} of that")
        print(
            f"{self.loads} came beside requests, by {self.orders} orders, "
            f"{1e3 * self.seconds / max(1, self.loads):.2f} ms each"
        )
        print(f"{self.answers} answers, {self.wrong} unlike one process's")


def params(number: int) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=number, max_tokens=TOKENS, ignore_eos=True)


def busy(process: subprocess.Popen[str]) -> float:
    """Seconds of processors that a process has used so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def batch(llm: LLM, streams: int) -> tuple[float, list[Tokens]]:
    began = time.perf_counter()
    outs = llm.generate([TEXT] * streams, [params(number) for number in range(streams)])
    seconds = time.perf_counter() - began
    return seconds, [tuple(out.outputs[0].token_ids) for out in outs]


def one_process(setting: Setting) -> tuple[int, list[set[Tokens]]]:
    """How many experts a layer has, and what one process says to each stream, beside the others
    and by itself: two answers where two tokens are equally good to the last digits."""
    llm = LLM(**arguments(setting), max_num_seqs=setting.streams)  # type: ignore[arg-type]
    try:
        experts = llm.engine.worker.model_config.moe.num_experts
        found = [{tokens} for tokens in batch(llm, setting.streams)[1]]
        for number, known in enumerate(found):
            out = llm.generate([TEXT], params(number))[0]
            known.add(tuple(out.outputs[0].token_ids))
        return experts, found
    finally:
        llm.engine.close()


def measure(setting: Setting) -> Figures:
    experts, allowed = one_process(setting)
    quarter = experts // 4
    servers = [
        start(setting, f"0-{3 * quarter - 1}", 3 * quarter),
        start(setting, f"{quarter}-{experts - 1}", experts - quarter),
    ]
    try:
        llm = LLM(
            **arguments(setting),  # type: ignore[arg-type]
            experts=tuple(address for _, address in servers),
            expert_secret_file=setting.secret,
            expert_timeout=setting.timeout,
            max_num_seqs=setting.streams,
        )
        try:
            return _measured(llm, setting, experts, allowed, servers[0][0])
        finally:
            llm.engine.close()
    finally:
        for process, _ in servers:
            process.kill()
            process.communicate()


def _measured(
    llm: LLM,
    setting: Setting,
    experts: int,
    allowed: list[set[Tokens]],
    server: subprocess.Popen[str],
) -> Figures:
    known = llm.engine.worker.experts
    assert known is not None
    mover = Mover(known.links[0], experts, setting.pause)
    alone, processor = _alone(mover, server, setting.rounds)
    batch(llm, setting.streams)
    times: list[tuple[float, float]] = []
    answers: list[tuple[int, Tokens]] = []
    for number in range(setting.rounds):
        pair: dict[bool, float] = {}
        for moves in (bool(number % 2), not number % 2):
            if moves:
                mover.begin()
            pair[moves], found = batch(llm, setting.streams)
            if moves:
                mover.end()
            answers += enumerate(found)
        times.append((pair[False], pair[True]))
    mover.close()
    if mover.failure:
        raise RuntimeError(mover.failure)
    tokens = TOKENS * setting.streams
    still, moving = (list(part) for part in zip(*times, strict=True))
    return Figures(
        alone,
        processor,
        tokens / statistics.median(still),
        tokens / statistics.median(moving),
        statistics.median(a / b for a, b in times),
        mover.loads,
        mover.orders,
        mover.seconds,
        len(answers),
        sum(found not in allowed[number] for number, found in answers),
    )


def _alone(mover: Mover, server: subprocess.Popen[str], rounds: int) -> tuple[float, float]:
    """Seconds and processor seconds of an expert that comes, with nothing beside."""
    mover.order()  # memory for those to come is set aside
    before = busy(server)
    mover.forget()
    for _ in range(rounds):
        mover.order()
    found = (mover.seconds / mover.loads, (busy(server) - before) / mover.loads)
    mover.forget()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder; the bundled checkpoint if left out")
    parser.add_argument("--weights", choices=("checkpoint", "random"), default="checkpoint")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--timeout", type=float, default=Setting.timeout)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text(secrets.token_hex(16))
        measure(Setting(**vars(given), secret=str(secret))).print()


if __name__ == "__main__":
    main()
