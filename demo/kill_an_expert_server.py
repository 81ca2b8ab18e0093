"""Kill one of two expert servers under load, and start it again: tokens a second before, without it
and after.

    python demo/kill_an_expert_server.py --streams 16 --seconds 20

Both servers hold all experts of the bundled checkpoint. `survivor alone` is a run of its own, in
which the other server was never there."""

from __future__ import annotations

import argparse
import itertools
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from rorqual import LLM, SamplingParams

TEXT = "It was a dark night and the"
SETTLED = 5.0  # seconds after a change


class Server:
    def __init__(self, secret: str, port: int = 0):
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rorqual", "experts", "--threads", "1"),
                *("--listen", f"127.0.0.1:{port}", "--expert-secret-file", secret),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]
        self.port = int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Load:
    """So many requests at any time; `times`: when each token came."""

    def __init__(self, llm: LLM, streams: int):
        self.llm = llm
        self.times: list[float] = []
        self.ended = threading.Event()
        self.threads = [threading.Thread(target=self._read, args=(n,)) for n in range(streams)]
        for thread in self.threads:
            thread.start()

    def _read(self, number: int) -> None:
        params = SamplingParams(temperature=0.8, seed=number, max_tokens=64, ignore_eos=True)
        while not self.ended.is_set():
            for delta in self.llm.stream(TEXT, params):
                self.times += [time.monotonic()] * len(delta.token_ids)
                if self.ended.is_set():
                    break

    def rate(self, start: float, stop: float) -> float:
        return sum(start <= at < stop for at in self.times) / (stop - start)

    def longest_gap(self, start: float, stop: float) -> float:
        found = [start, *(at for at in self.times if start <= at < stop), stop]
        return max(b - a for a, b in itertools.pairwise(found))

    def end(self) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()


def engine(addresses: list[str], secret: str, streams: int) -> LLM:
    return LLM(
        experts=(",".join(addresses),),
        expert_secret_file=secret,
        expert_timeout=1.0,
        max_num_seqs=streams,
        threads=1,
    )


def measure(streams: int, seconds: float, secret: str) -> None:
    first, second = Server(secret), Server(secret)
    llm = engine([first.address, second.address], secret, streams)
    load = Load(llm, streams)
    time.sleep(SETTLED)
    began = time.monotonic()
    time.sleep(seconds)
    killed = time.monotonic()
    second.kill()
    time.sleep(SETTLED + seconds)
    back = time.monotonic()
    second = Server(secret, second.port)
    joined = time.monotonic()
    time.sleep(SETTLED + seconds)
    done = time.monotonic()
    load.end()
    llm.engine.close()
    second.kill()
    llm = engine([first.address], secret, streams)
    alone = Load(llm, streams)
    time.sleep(SETTLED)
    start = time.monotonic()
    time.sleep(seconds)
    survivor = alone.rate(start, time.monotonic())
    alone.end()
    llm.engine.close()
    first.kill()
    both = load.rate(began, killed)
    without = load.rate(killed + SETTLED, back)
    after = load.rate(joined + SETTLED, done)
    window = [load.rate(killed + n, killed + n + 1) for n in range(int(SETTLED))]
    print(f"both servers          {both:8.0f} tokens/s")
    print(
        f"one killed, after 5 s {without:8.0f} tokens/s, {without / survivor:.2f} of survivor alone"
    )
    print(f"  the first 5 seconds {', '.join(f'{rate:.0f}' for rate in window)}")
    print(f"  longest gap         {load.longest_gap(killed, killed + SETTLED):8.2f} s")
    print(f"survivor alone        {survivor:8.0f} tokens/s")
    print(f"replaced, after 5 s   {after:8.0f} tokens/s, {after / both:.2f} of both")
    spread = [load.rate(began + n, began + n + 1) for n in range(int(seconds))]
    print(f"spread of both: {statistics.pstdev(spread) / both:.2f} of the rate, second by second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text(secrets.token_hex(16))
        measure(given.streams, given.seconds, str(secret))


if __name__ == "__main__":
    main()
