"""A rank other than 0: `python -m rorqual.engine.worker FD`, started by RankGroup. It computes the plans that arrive on its link."""

from __future__ import annotations

import json
import select
import socket
import sys
import threading
from collections import deque
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rorqual.config import die_with_parent
from rorqual.engine.config import EngineConfig
from rorqual.engine.group import GroupPlan
from rorqual.engine.link import Kind, Link
from rorqual.engine.rank import Rank
from rorqual.engine.wire import decode_plan, encode_result
from rorqual.engine.xmatcher import ReceivedGrammars
from rorqual.parallel.mesh import Groups, Mesh
from rorqual.platforms import make_platform
from rorqual.platforms.base import Platform

ALIVE_SECONDS = 1.0
START_SECONDS = 1800.0  # until a rank can compute: imports and loading may keep it silent for long


def meet(platform: Platform, store: str, rank: int, world: int, watchdog: float) -> Groups:
    """Join the ranks of this host through a file that only they can read; returns the maker of groups whose collectives may take
    `watchdog` seconds. The group of all waits for those that are still loading."""
    file, patience = dist.FileStore(store, world), timedelta(seconds=START_SECONDS)
    dist.init_process_group(platform.collectives, store=file, rank=rank, world_size=world, timeout=patience)
    return Groups(timedelta(seconds=watchdog))


def rank_device(config: EngineConfig, rank: int) -> str:
    """Cards are taken in order; on a CPU there is one device for all."""
    return f"cuda:{rank}" if config.device in ("auto", "cuda") and make_platform(config.device).name == "cuda" else config.device


class Worker:
    def __init__(self, link: Link, hello: dict[str, Any]):
        self.link = link
        config = EngineConfig.from_dict(hello["config"])
        number = hello["rank"]
        platform = make_platform(rank_device(config, number))
        groups = meet(platform, hello["store"], number, config.parallel.world, config.watchdog_seconds)
        self.rank = Rank(config, platform, Mesh.of(config.parallel, groups=groups))
        mesh = self.rank.mesh
        self.leads = mesh.last_stage and mesh.tp_rank == 0  # its results are those of its data-parallel rank
        self.pending: deque[Any] = deque()
        self.grammars = self.rank.runner.rows.grammars = ReceivedGrammars()

    def run(self) -> None:
        """Launch what arrives; while nothing does, bring home what was launched."""
        while True:
            if self.pending and not select.select([self.link.socket], [], [], 0)[0]:
                self._collect()
                continue
            frame = self.link.receive()
            if frame is None or frame[0] is Kind.STOP:
                return
            if frame[0] is Kind.GRAMMAR:
                self.grammars.receive(frame[1])
            else:
                self._launch(decode_plan(frame[1]))

    def _launch(self, plan: GroupPlan) -> None:
        while plan.host and self.pending:
            self._collect()  # a grammar must have heard the tokens before
        part = plan.parts[self.rank.mesh.dp_rank]
        self.pending.append(self.rank.runner.launch(part, plan.common()))
        self.grammars.used(plan.structures)
        if not self.rank.platform.asynchronous:
            self._collect()  # rank 0 need not wait for the next step too

    def _collect(self) -> None:
        result = self.rank.runner.collect(self.pending.popleft())
        if self.leads:
            self.link.send(Kind.RESULT, encode_result(result))


def beat(link: Link, stopped: threading.Event) -> None:
    while not stopped.wait(ALIVE_SECONDS):
        try:
            link.send(Kind.ALIVE)
        except OSError:
            return


def main() -> int:
    die_with_parent()
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    frame = link.receive()
    if frame is None:
        return 1
    stopped = threading.Event()
    threading.Thread(target=beat, args=(link, stopped), daemon=True).start()
    try:
        worker = Worker(link, json.loads(frame[1]))
        link.send(Kind.READY)
        worker.run()
        dist.destroy_process_group()
        return 0
    except Exception as error:  # whatever it was, rank 0 tells the users
        link.send(Kind.FAILED, f"{type(error).__name__}: {error}".encode())
        return 1
    finally:
        stopped.set()


if __name__ == "__main__":
    sys.exit(main())
