"""Where the seconds of an engine's start go, by phase: how often, and for how long, kernels are
compiled, loaded, given a launcher and graphs captured, and what Python does meanwhile.

python demo/start_profile.py deepseek-v2-lite --set weights=random
python demo/start_profile.py /tmp/v2-lite --top 25        # the second run is warm

What runs in a thread of its own beside the reading of weights is the phase `beside`. Profiling
makes Python slower: compare shares. On a CPU there are no kernels to be counted. From Python 3.12
on a profile is of all threads at once, so that there `weights` and `beside` are counted only.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import pstats
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rorqual.cli.options import load
from rorqual.engine.execution.worker import Worker

BESIDE = "beside"
NOT_PROFILED = {"weights", BESIDE} if sys.version_info >= (3, 12) else set()


class StartProfile:
    """Counts by (phase, what); a profile of each phase."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = defaultdict(int)
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.profiles: dict[str, cProfile.Profile | None] = {}
        self.phase = threading.local()
        self.lock = threading.Lock()

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """One phase inside another, or in another thread, is profiled by itself."""
        before = getattr(self.phase, "name", None)
        outer = self.profiles.get(before or "")
        if outer is not None:
            outer.disable()
        new = None if name in NOT_PROFILED else cProfile.Profile()
        profile = self.profiles.setdefault(name, new)
        self.phase.name = name
        start = time.perf_counter()
        if profile is not None:
            profile.enable()
        try:
            yield
        finally:
            if profile is not None:
                profile.disable()
            self._count(name, "all of it", time.perf_counter() - start)
            self.phase.name = before
            if outer is not None:
                outer.enable()

    def _count(self, phase: str, what: str, seconds: float) -> None:
        with self.lock:
            self.counts[phase, what] += 1
            self.seconds[phase, what] += seconds

    def counted(self, what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                phase = getattr(self.phase, "name", None) or threading.current_thread().name
                self._count(phase, what, time.perf_counter() - start)

        return timed

    def count_method(self, owner: Any, name: str, what: str) -> None:
        setattr(owner, name, self.counted(what, getattr(owner, name)))

    def watch(self) -> None:
        """From now on, in this process."""
        phase = Worker._phase
        stand_in = Worker._compile_stand_in

        def profiled(worker: Worker, name: str, work: Callable[[], Any]) -> Any:
            with self.within(name):
                return phase(worker, name, work)

        def beside(worker: Worker, *args: Any) -> None:
            with self.within(BESIDE):
                stand_in(worker, *args)

        Worker._phase = profiled  # type: ignore[method-assign]
        Worker._compile_stand_in = beside  # type: ignore[method-assign]
        self.count_method(gc, "collect", "gc.collect")
        if not torch.cuda.is_available():
            return
        from triton.backends.nvidia import driver as nvidia
        from triton.compiler import compiler
        from triton.runtime.jit import JITFunction

        self.count_method(JITFunction, "_do_compile", "first calls of a kernel and its arguments")
        self.count_method(compiler.CompiledKernel, "_init_handles", "kernels loaded by the driver")
        self.count_method(nvidia.CudaLauncher, "__init__", "launchers")
        self.count_method(torch.cuda.CUDAGraph, "capture_begin", "captures begun")
        self.count_method(torch.cuda.CUDAGraph, "capture_end", "captures ended")
        self.count_method(torch.cuda, "synchronize", "torch.cuda.synchronize")

    def report(self, top: int) -> None:
        for name, profile in self.profiles.items():
            print(f"\n==== {name}")
            for (phase, what), count in self.counts.items():
                if phase == name:
                    print(f"{self.seconds[phase, what]:8.2f} s  {count:6}  {what}")
            if top and profile is not None:
                stats = pstats.Stats(profile, stream=sys.stdout)
                stats.sort_stats("tottime").print_stats(top)
                stats.sort_stats("cumulative").print_stats(top)
        for (phase, what), count in self.counts.items():
            if phase not in self.profiles:
                print(f"{phase}: {self.seconds[phase, what]:.2f} s  {count}  {what}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", nargs="?", help="the bundled checkpoint if left out")
    parser.add_argument("--set", action="append", default=[], help="an engine option, name=value")
    parser.add_argument("--top", type=int, default=0, help="lines of each phase's profile")
    args = parser.parse_args()
    profile = StartProfile()
    profile.watch()
    start = time.perf_counter()
    llm = load(args.model, None, args.set, {}, skip_tokenizer_init=True)
    print(f"{time.perf_counter() - start:.2f} s, imports not among them")
    profile.report(args.top)
    llm.engine.close()


if __name__ == "__main__":
    main()
