"""Profile of a decode step: a trace of steps, and on a GPU the time by kernel and the gaps between
kernels.

torch's profiler records when each kernel and copy ran. Kernels may overlap (one starts while the
previous one ends), so busy time is the union of their spans. A gap longer than WAIT_US is not
between two kernels of a captured step: it is between two steps, or the step was not captured. If
the host launched something during the gap, the host caused it; otherwise the launch was earlier,
and the gap is the GPU's time to start a captured step.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from rorqual.bench.offline.steady_state import enough_tokens, steady_state_steps
from rorqual.errors import ConfigError
from rorqual.llm.llm import LLM
from rorqual.request import SamplingParams

WAIT_US = 5.0
# beginnings of their names
LAUNCHES = (
    "cudaGraphLaunch",
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)
NAME = 64


@dataclass(frozen=True)
class Span:
    """One kernel or copy: microseconds on the profiler's clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class KernelTime:
    """Of one step: calls, and microseconds of all of them."""

    name: str
    calls: float
    us: float


@dataclass
class StepProfile:
    """Microseconds of one step, averaged: `step` from the first kernel to the last, `busy` while
    at least one ran, `short` in waits of at most WAIT_US, `long` in longer ones, of which `late`
    in those during which the host was launching. `longest`: the longest waits, each with the
    kernel that ended it."""

    step: float
    busy: float
    short: float
    long: float
    late: float = 0.0
    kernels: list[KernelTime] = field(default_factory=list)
    longest: list[tuple[float, str]] = field(default_factory=list)

    def lines(self, most: int = 24) -> Iterator[str]:
        waits = (
            f"waits up to {WAIT_US:g} us {self.short:.0f}, longer ones {self.long:.0f} (for "
            f"the host {self.late:.0f})"
        )
        yield f"step {self.step:.0f} us: busy {self.busy:.0f}, {waits}"
        for us, name in self.longest:
            yield f"  a wait of {us:.1f} us before {name[:NAME]}"
        for kernel in self.kernels[:most]:
            share = 100 * kernel.us / self.step
            each = kernel.us / kernel.calls
            yield (
                f"{kernel.us:9.1f} us{share:5.1f} %{kernel.calls:8.1f} calls{each:9.2f} us "
                f"each  {kernel.name[:NAME]}"
            )


def summarize(spans: Sequence[Span], steps: int, launches: Sequence[float] = ()) -> StepProfile:
    """`spans` of so many steps alike; `launches`: when the host launched something."""
    ordered = sorted(spans, key=lambda span: span.start)
    launched = sorted(launches)
    waits: list[tuple[float, str]] = []
    busy = 0.0
    late = 0.0
    last = ordered[0].start
    for span in ordered:
        if span.start > last:
            waits.append((span.start - last, span.name))
            after = bisect_left(launched, last)
            if (
                span.start - last > WAIT_US
                and after < len(launched)
                and launched[after] <= span.start
            ):
                late += span.start - last
        busy += max(0.0, span.end - max(span.start, last))
        last = max(last, span.end)
    times: dict[str, tuple[int, float]] = {}
    for span in ordered:
        calls, us = times.get(span.name, (0, 0.0))
        times[span.name] = calls + 1, us + span.end - span.start
    kernels = [KernelTime(name, calls / steps, us / steps) for name, (calls, us) in times.items()]
    long = [wait for wait in waits if wait[0] > WAIT_US]
    return StepProfile(
        step=(last - ordered[0].start) / steps,
        busy=busy / steps,
        short=sum(us for us, _ in waits if us <= WAIT_US) / steps,
        long=sum(us for us, _ in long) / steps,
        late=late / steps,
        kernels=sorted(kernels, key=lambda kernel: -kernel.us),
        longest=sorted(long, reverse=True)[:3],
    )


def trace_steps(llm: LLM, prompts: list[list[int]], steps: int, prefix: str) -> list[str]:
    """Write a trace of decode steps, one file a rank; returns the files."""
    engine = llm.engine
    with _decoding(llm, prompts, steps):
        engine.start_trace(prefix, steps)
        for _ in range(steps + engine.depth):
            engine.step()
        engine.stop_trace()
    while (found := engine.traced()) is None:
        time.sleep(0.02)
    errors = [one.error for one in found if one.error]
    if errors:
        raise ConfigError(f"{found[0].path} was not written: {errors[0]}")
    return [one.path for one in found]


@contextmanager
def _decoding(llm: LLM, prompts: list[list[int]], steps: int) -> Iterator[None]:
    """Every request is decoding, and some steps of that are over; so many are left."""
    engine = llm.engine
    params = SamplingParams(
        temperature=0,
        max_tokens=enough_tokens(engine, prompts, steps + 16),
        ignore_eos=True,
        detokenize=False,
    )
    with steady_state_steps(engine, prompts, params):
        for _ in range(5):
            engine.step()
        engine.platform.synchronize()
        yield


def profile_steps(llm: LLM, prompts: list[list[int]], steps: int) -> StepProfile:
    """Of decode steps while every request is decoding, on a GPU."""
    spans, launches = spans_of_steps(llm, prompts, steps)
    return summarize(spans, steps, launches)


def spans_of_steps(
    llm: LLM,
    prompts: list[list[int]],
    steps: int,
    meanwhile: AbstractContextManager[object] | None = None,
) -> tuple[list[Span], list[float]]:
    """`timeline` of decode steps while every request is decoding, on a GPU. meanwhile: entered
    before these steps."""
    from torch.profiler import ProfilerActivity, profile

    engine = llm.engine
    assert engine.platform.name == "cuda", "it reads a GPU's clock"
    with (
        _decoding(llm, prompts, steps),
        meanwhile or nullcontext(),
        profile(activities=[ProfilerActivity.CUDA]) as found,
    ):
        for _ in range(steps):
            engine.step()
        engine.platform.synchronize()
    return timeline(found.events())


def busy_share(spans: Sequence[Span], waits: Collection[str]) -> float:
    """Share of the time from the first to the last kernel during which one ran that does not only
    wait. waits: names of kernels that do."""
    working = [span for span in spans if span.name not in waits]
    found = summarize(working, 1)
    return found.busy / found.step


def timeline(events: object) -> tuple[list[Span], list[float]]:
    """(what ran on the GPU, when the host launched something), from torch.profiler's events:
    the runtime's calls are among those of the host."""
    from torch.autograd import DeviceType

    spans = []
    launches = []
    for event in events:  # type: ignore[attr-defined]
        if event.device_type == DeviceType.CUDA:
            spans.append(Span(event.name, event.time_range.start, event.time_range.end))
        elif event.name.startswith(LAUNCHES):
            launches.append(event.time_range.start)
    return spans, launches
