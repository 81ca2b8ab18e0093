"""What rows to an expert server and sums back would take over NIXL (UCX), on this host's CPU,
beside the hop over tcp as it is and the same bytes over a plain socket, in one run.

    python demo/nixl_hop.py --rows 1,8,64,256 --repeats 200

Two processes: one writes rows into the other's memory with a notification, the other answers by
writing sums back with one. Both ask for progress all the time, as NIXL moves only then. Nothing is
packed, rounded or added, so this is the least that a transport over NIXL could take. `--tls` names
UCX's transports (UCX_TLS): such as tcp, or sysv,cma; by default it chooses."""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import IO, Any

import torch

from rorqual.bench.comm import expert_hop
from rorqual.disagg.transports.nixl import PACKAGES

WARM = 20
HIDDEN = 7168
TOP_K = 8
SECONDS = 20.0  # for one message


def sizes(rows: int) -> tuple[int, int]:
    """Bytes out (e4m3, scales, ids, weights) and back (bf16)."""
    return rows * (HIDDEN + 4 * HIDDEN // 128 + 8 * TOP_K), rows * 2 * HIDDEN


@dataclass(frozen=True)
class PeerInfo:
    """What the other process says of itself. into, source: addresses of its memory."""

    agent: str
    into: int
    source: int

    def line(self) -> str:
        return json.dumps(vars(self)) + "\n"

    @staticmethod
    def read(stream: IO[str]) -> PeerInfo:
        while not (line := stream.readline()).startswith("{"):
            if not line:
                raise SystemExit("the other process has ended")
        return PeerInfo(**json.loads(line))  # behind what NIXL writes there


class Side:
    """One process' agent and memory; `most` bytes each way."""

    def __init__(self, most: int):
        for package in PACKAGES:
            try:
                api = importlib.import_module(f"{package}._api")
                break
            except ImportError:
                continue
        else:
            raise SystemExit(f"NIXL is not installed; accepted: {', '.join(PACKAGES)}")
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self.agent: Any = api.nixl_agent(f"hop-{secrets.token_hex(8)}", config)
        self.memory = [torch.zeros(most, dtype=torch.uint8) for _ in range(2)]
        self.into, self.source = (memory.data_ptr() for memory in self.memory)
        registered = [(address, most, 0, "") for address in (self.into, self.source)]
        self.agent.register_memory(registered, "DRAM")
        self.peer: Any = None
        self.there = 0

    def info(self) -> PeerInfo:
        agent = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return PeerInfo(agent, self.into, self.source)

    def meet(self, other: PeerInfo) -> None:
        self.peer = self.agent.add_remote_agent(base64.b64decode(other.agent))
        self.there = other.into

    def writer(self, size: int) -> Any:
        here = self.agent.get_xfer_descs([(self.source, size, 0)], "DRAM")
        there = self.agent.get_xfer_descs([(self.there, size, 0)], "DRAM")
        return self.agent.initialize_xfer("WRITE", here, there, self.peer)

    def write(self, handle: Any, name: bytes) -> None:
        if self.agent.transfer(handle, name) == "ERR":
            raise SystemExit("NIXL does not start a write")

    def finish(self, handle: Any) -> None:
        deadline = time.monotonic() + SECONDS
        while (state := self.agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR" or time.monotonic() > deadline:
                raise SystemExit("a write over NIXL has failed")

    def hear(self, name: bytes) -> None:
        deadline = time.monotonic() + SECONDS
        while not any(name in heard for heard in self.agent.get_new_notifs().values()):
            if time.monotonic() > deadline:
                raise SystemExit(f"no notification has come in {SECONDS:g} s")


def answer(rows: list[int], repeats: int) -> None:
    """The other process."""
    side = Side(max(max(sizes(count)) for count in rows))
    print(side.info().line(), end="", flush=True)
    side.meet(PeerInfo.read(sys.stdin))
    for count in rows:
        handle = side.writer(sizes(count)[1])
        for number in range(WARM + repeats):
            side.hear(b"%d rows %d" % (count, number))
            side.write(handle, b"%d sums %d" % (count, number))
            side.finish(handle)
    sys.stdin.readline()  # until the first process has heard the last


def over_nixl(rows: list[int], repeats: int) -> list[tuple[float, float]]:
    """us there and back, for each count of rows: median and least."""
    side = Side(max(max(sizes(count)) for count in rows))
    command = [sys.executable, __file__, "--answer", "--rows", ",".join(map(str, rows))]
    process = subprocess.Popen(
        [*command, "--repeats", str(repeats)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        side.meet(PeerInfo.read(process.stdout))
        process.stdin.write(side.info().line())
        process.stdin.flush()
        found = []
        for count in rows:
            handle = side.writer(sizes(count)[0])
            times = []
            for number in range(WARM + repeats):
                start = time.perf_counter()
                side.write(handle, b"%d rows %d" % (count, number))
                side.finish(handle)  # which sends the notification
                side.hear(b"%d sums %d" % (count, number))
                times.append(1e6 * (time.perf_counter() - start))
            found.append((statistics.median(times[WARM:]), min(times[WARM:])))
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait(SECONDS)
        return found
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--tls", help="UCX_TLS")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tls:
        os.environ["UCX_TLS"] = given.tls
    rows = [int(count) for count in given.rows.split(",")]
    if given.answer:
        answer(rows, given.repeats)
        return
    nixl = over_nixl(rows, given.repeats)
    setup = expert_hop.HopSetup(tuple(rows), hidden=HIDDEN, top_k=TOP_K, repeats=given.repeats)
    hops = expert_hop.bench(setup)
    print(f"load {os.getloadavg()[0]:.1f}; us there and back: median (least for NIXL)")
    print("rows   NIXL        least       tcp       plain socket")
    for count, (median, least), hop in zip(rows, nixl, hops, strict=True):
        print(f"{count:5} {median:10.0f} {least:10.0f} {hop.us:10.0f} {hop.plain:10.0f}")


if __name__ == "__main__":
    main()
