"""Compiles kernels while weights are read: reading leaves most processors idle, and compiling needs
only shapes. It runs on a second model with uninitialized weights and just enough layers to have one
of each kind.

Steps of all sizes are launched for it, some hundreds, and most meet no kernel that is new. Which
ones do is kept in a file, so that a later start of the same engine launches those alone.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rorqual.config.model import ModelConfig, cache_folder, environment_for_child
from rorqual.engine.config import EngineConfig
from rorqual.engine.kept_file import digest, keep_newest, read, write
from rorqual.models.transformer import Transformer
from rorqual.parallel.collectives import Axis, gather_texts
from rorqual.platforms.base import Platform

log = logging.getLogger("rorqual.engine")
SPARE = 4 * 2**30  # bytes beside the weights: cache, buffers, memory for reading
SETTINGS = ("TRITON_", "NCCL_", "CUDA_")  # environment variables that choose kernels
SOURCES = (".py", ".json")
MOST_KEPT = 64  # files; a change of the package or of an option begins another


@dataclass
class LateKernels:
    """Kernels that the start did not meet: a step waited for each until it was compiled or loaded,
    `seconds` in all."""

    count: int = 0
    seconds: float = 0.0

    def note(self, name: str, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds
        log.info("kernel %s was not met at the start; a step waited %.2f s for it", name, seconds)


class Parts:
    """What is launched for kernels to be compiled, in named parts. known: names of those that are
    run, None: all."""

    def __init__(self, known: Collection[str] | None = None):
        self.known = known
        self.count: Callable[[], int] | None = None  # of kernels met so far
        self.met: list[str] = []  # parts that met a kernel before others did

    def __call__(self, name: str, work: Callable[[], object], always: bool = False) -> None:
        """always: for what it has torch and cuBLAS load, whatever it compiles."""
        if self.known is not None and name not in self.known and not always:
            return
        before = self.count() if self.count else 0
        work()
        if self.count and self.count() > before:
            self.met.append(name)


class KeptParts:
    """The parts that met kernels on any rank when all were run, in this start or an earlier one.
    `names`: None where that is not known, and where there is no file. Each rank has a file of its
    own."""

    def __init__(self, path: Path | None):
        self.path = path
        self.names = None if path is None else names_in(read(path))

    def learn(self, met: Collection[str] | None) -> None:
        """Keep them, unless `names` are known. None: nothing is compiled."""
        if self.path is None or self.names is not None or met is None:
            return
        self.names = frozenset(met)
        if not write(self.path, json.dumps(sorted(met))):
            log.info("%s cannot be written: the next start launches all steps again", self.path)
            return
        keep_newest(self.path.parent, MOST_KEPT)


def agreed(names: Collection[str] | None, axis: Axis, device: torch.device) -> bool:
    """Whether all ranks know the same names: they must launch the same. Collective."""
    own = -1 if names is None else digest(sorted(names))
    known = axis.all_gather(torch.tensor([own], device=device)).tolist()
    return own >= 0 and known == [own] * axis.size


def of_all_ranks(names: Collection[str], axis: Axis, device: torch.device) -> list[str]:
    """The names of any rank. Collective."""
    texts = gather_texts(axis, "\n".join(names), device)
    return sorted({name for text in texts for name in text.split("\n") if name})


def names_in(text: str) -> frozenset[str] | None:
    """None for text that KeptParts did not write: a walk meets some kernels."""
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return None
    return frozenset(names) or None


def kept_path(config: EngineConfig, model: ModelConfig, choice: object) -> Path:
    """Of the file for starts that launch the same. choice: what decides which kernels are launched,
    besides both configurations, variables and the package."""
    settings = sorted(environment_for_child((), SETTINGS).items())
    given = (asdict(config), dict(model.raw), choice, settings, package_state())
    return cache_folder() / "kernels-ahead" / f"{digest(given):016x}.json"


def package_state() -> list[tuple[str, int, int]]:
    """Names, sizes and times of change of the package's files: Python too goes by those when it
    asks whether a file that it compiled has changed. Any change may launch other kernels."""
    found = []
    for folder, _, names in os.walk(Path(__file__).parents[1]):
        for name in names:
            if name.endswith(SOURCES):
                path = os.path.join(folder, name)
                try:
                    state = os.stat(path)
                except OSError:  # an editor's, gone again
                    continue
                found.append((path, state.st_size, state.st_mtime_ns))
    return sorted(found)


def layers_of_all_kinds(model: Transformer) -> int:
    """The number of leading layers that include one of each kind."""
    with model.one_layer_of_each_kind():
        kinds = list(model.layers)
    return 1 + max((model.layers.index(layer) for layer in kinds), default=-1)


def fits_beside(stand_in: int, free: int) -> bool:
    """Whether the weights of a second model fit; bytes."""
    return stand_in + SPARE <= free


@contextmanager
def beside(compile_kernels: Callable[[], None], platform: Platform) -> Iterator[None]:
    """Inside the block a thread compiles. What fails to compile is left to the first launch, which
    raises the error. On exit, also by an exception, the thread has ended and its memory is free."""

    def work() -> None:
        try:
            with platform.background():
                compile_kernels()
        except Exception:
            log.warning("kernels could not be compiled while weights were read", exc_info=True)

    thread = threading.Thread(target=work, name="kernels", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        gc.collect()
        platform.release_memory()
