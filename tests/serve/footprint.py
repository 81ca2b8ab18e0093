"""What a server holds while nobody asks it anything: open files, memory, processes, sequences and
pages. After an attack, or hours of load, it must be what it was."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.serve.running import Running

MIB = 1 << 20


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def children(pid: int) -> list[int]:
    """All below the process, at any depth."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *children(child)]
    return found


@dataclass(frozen=True)
class Footprint:
    """By process: the API process, and each engine. Processes: all that the server started, but
    for those that compile grammars, which are started when they are needed."""

    files: dict[str, int]
    memory: dict[str, int]
    processes: int

    @staticmethod
    def of(server: Running, **headers: str) -> Footprint:
        status, info = server.request("GET", "/server_info", **headers)
        assert status == 200
        pids = {"api": server.pid}
        pids |= {f"engine {i}": engine["pid"] for i, engine in enumerate(info["engines"])}
        return Footprint(
            {name: open_files(pid) for name, pid in pids.items()},
            {name: resident(pid) for name, pid in pids.items()},
            len(children(server.pid)),
        )

    def grown(self, before: Footprint, files: int, memory: dict[str, int]) -> list[str]:
        """What is more than it was, by more than so many files and, by process, bytes."""
        found = []
        for name, count in self.files.items():
            if count > before.files[name] + files:
                found.append(f"{name}: {before.files[name]} open files, then {count}")
        for name, size in self.memory.items():
            if size > before.memory[name] + memory[name]:
                found.append(f"{name}: {before.memory[name] // MIB} MiB, then {size // MIB}")
        return found


def held(server: Running, **headers: str) -> list[str]:
    """What the server still holds of requests."""
    status, found = server.request("GET", "/stats", **headers)
    assert status == 200
    return [
        f"still held: {engine}"
        for engine in found["engines"]
        if engine["kv"]["used"] or engine["running"] or engine["waiting"] or engine["open"]
    ]


def settle(server: Running, seconds: float = 20.0, **headers: str) -> list[str]:
    """What is still held so many seconds later; nothing, as soon as there is nothing."""
    deadline = time.monotonic() + seconds
    while (found := held(server, **headers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
