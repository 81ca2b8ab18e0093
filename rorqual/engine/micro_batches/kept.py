"""Step times of an earlier start, kept below the cache folder: `micro_batches="auto"` measures for
half a minute once; later starts of the same engine on the same machines only re-time two sizes,
which must agree.

A file is named by a digest of all that the times depend on: the configurations of engine and model,
torch's version, how times are measured, and each rank's host and device. Rank 0 reads and writes
the file, and broadcasts what it read, so that all ranks confirm and use the same.
"""

from __future__ import annotations

import logging
import os
import platform as host
from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist

from rorqual.config.model import ModelConfig, cache_folder
from rorqual.engine.config import EngineConfig
from rorqual.engine.kept_file import digest, read, write
from rorqual.engine.micro_batches.step_times import StepTimes
from rorqual.parallel.mesh import Mesh
from rorqual.platforms.base import Platform

log = logging.getLogger(__name__)

METHOD = 4  # of measuring: times that were measured otherwise are not compared
AGREES = 0.25  # allowed deviation of a pass from the kept time, relative


class KeptTimes:
    def __init__(self, config: EngineConfig, model: ModelConfig, mesh: Mesh, platform: Platform):
        """Collective: gathers every rank's host and device."""
        self.mesh = mesh
        self.device = platform.device
        own = (host.node(), platform.describe(), os.cpu_count(), torch.get_num_threads())
        ranks = self._of_all(digest(own))
        given = (METHOD, asdict(config), dict(model.raw), torch.__version__, ranks)
        self.path = cache_folder() / "step-times" / f"{digest(given):016x}.json"

    def times(
        self, measure: Callable[[], StepTimes], deviation: Callable[[StepTimes], float]
    ) -> StepTimes:
        """The kept times, where two re-timed sizes agree; else new ones, measured and kept.
        deviation: of the kept times from re-timed ones, relative; the same on every rank."""
        found = self._found()
        if found is not None:
            wrong = deviation(found)
            agree = wrong <= AGREES
            outcome = "used: they agree" if agree else "measured again: they differ"
            self._log(f"{outcome} by up to {wrong:.0%} with what is timed now")
            if agree:
                return found
        found = measure()
        if self.mesh.rank == 0 and not write(self.path, found.as_json()):
            self._log("not kept: the file cannot be written")
        return found

    def _log(self, outcome: str) -> None:
        if self.mesh.rank == 0:
            log.info("micro-batches: times of an earlier start (%s) %s", self.path, outcome)

    def _found(self) -> StepTimes | None:
        """The times that rank 0 read and parsed, on every rank."""
        times = parsed(read(self.path)) if self.mesh.rank == 0 else None
        if self.mesh.is_single:
            return times
        return parsed(self._from_first(times.as_json() if times else ""))

    def _of_all(self, number: int) -> list[int]:
        if self.mesh.is_single:
            return [number]
        own = torch.tensor([number], device=self.device)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
        return [int(one) for one in found]

    def _from_first(self, text: str) -> str:
        data = text.encode()
        length = torch.tensor([len(data)], device=self.device)
        dist.broadcast(length, 0)
        if not int(length):
            return ""
        sent = torch.tensor(list(data.ljust(int(length))), dtype=torch.uint8, device=self.device)
        dist.broadcast(sent, 0)
        return bytes(sent.tolist()).decode()


def parsed(text: str) -> StepTimes | None:
    """The times; None for invalid text, such as another version's."""
    try:
        return StepTimes.of_json(text)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
