"""What two steps in turns gain where experts are far: tokens a second through a proxy that holds
back every byte for a while, in both directions.

    python demo/steps_in_turns.py --delay-ms 2 --streams 16 --rounds 3

One expert server holds all experts of the bundled checkpoint; engines with one way of overlapping
each take turns round by round, on the same machine."""

from __future__ import annotations

import argparse
import queue
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rorqual import LLM, SamplingParams

WAYS: dict[str, dict[str, int]] = {
    "one step at a time": {},
    "--micro-batches 2": {"micro_batches": 2},
    "--pipeline-turns 2": {"pipeline_turns": 2},
}


class DelayingProxy:
    """Passes links on, every byte so many seconds later."""

    def __init__(self, port: int, delay: float):
        self.target = port
        self.delay = delay
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            sock, _ = self.listener.accept()
            other = socket.create_connection(("127.0.0.1", self.target))
            for one, two in ((sock, other), (other, sock)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                for work in (self._read, self._write):
                    end = one if work == self._read else two
                    threading.Thread(target=work, args=(end, waiting), daemon=True).start()

    def _read(self, sock: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        while data := sock.recv(1 << 20):
            waiting.put((time.monotonic() + self.delay, data))
        waiting.put((0.0, b""))

    def _write(self, sock: socket.socket, waiting: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        while (item := waiting.get())[1]:
            time.sleep(max(0.0, item[0] - time.monotonic()))
            sock.sendall(item[1])
        with suppress(OSError):  # the other direction has ended before
            sock.shutdown(socket.SHUT_WR)


def rate(llm: LLM, streams: int, tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([f"It was a dark night, number {n}, and" for n in range(streams)], params)
    return streams * tokens / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay-ms", type=float, default=2.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text(secrets.token_hex(16))
        command = [sys.executable, "-m", "rorqual", "experts", "--threads", "1"]
        command += ["--listen", "127.0.0.1:0", "--expert-secret-file", str(secret)]
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().rpartition(":")[2])
            proxy = DelayingProxy(port, args.delay_ms / 1000)
            compare(args, str(secret), proxy.port)
        finally:
            server.kill()
            server.wait()


def compare(args: argparse.Namespace, secret: str, port: int) -> None:
    common: dict[str, Any] = {
        "experts": (f"127.0.0.1:{port}",),
        "expert_secret_file": secret,
        "max_num_seqs": args.streams,
        "max_model_len": 512,
        "enable_prefix_caching": False,
        "threads": 1,
    }
    engines = {name: LLM(**common, **more) for name, more in WAYS.items()}
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(args.rounds + 1):
        for name, llm in engines.items():
            tokens = rate(llm, args.streams, args.tokens if turn else 4)
            found[name] += [tokens] if turn else []
    first = statistics.median(found["one step at a time"])
    for name, rates in found.items():
        middle = statistics.median(rates)
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        print(f"{name:20} {middle:7,.0f} tokens/s ({spread}), {middle / first:.2f}")
    for llm in engines.values():
        llm.engine.close()


if __name__ == "__main__":
    main()
