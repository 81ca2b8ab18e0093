"""Where a decode step's time goes on a card: time by kernel, and how long the card waited between kernels.

torch's profiler says when each kernel and copy ran. Kernels may overlap (one starts while the one before ends), so busy time is the
union of their spans. A wait longer than WAIT_US is none between two kernels of a recorded step: the host was late, or the step was not
recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rorqual.bench.together import decoding_together, enough_tokens
from rorqual.errors import ConfigError
from rorqual.platforms.base import Platform
from rorqual.request import SamplingParams
from rorqual.serve.llm import LLM

WAIT_US = 5.0
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
    """Microseconds of one step, averaged: `step` from the first kernel to the last, `busy` while at least one ran, `short` in waits of at
    most WAIT_US, `long` in longer ones. `longest`: the longest waits, each with the kernel that ended it."""

    step: float
    busy: float
    short: float
    long: float
    kernels: list[KernelTime] = field(default_factory=list)
    longest: list[tuple[float, str]] = field(default_factory=list)

    def lines(self, most: int = 24) -> Iterator[str]:
        yield f"step {self.step:.0f} us: busy {self.busy:.0f}, waits up to {WAIT_US:g} us {self.short:.0f}, longer ones {self.long:.0f}"
        for us, name in self.longest:
            yield f"  a wait of {us:.1f} us before {name[:NAME]}"
        for kernel in self.kernels[:most]:
            share, each = 100 * kernel.us / self.step, kernel.us / kernel.calls
            yield f"{kernel.us:9.1f} us{share:5.1f} %{kernel.calls:8.1f} calls{each:9.2f} us each  {kernel.name[:NAME]}"


def summarise(spans: Sequence[Span], steps: int) -> StepProfile:
    """`spans` of so many steps alike."""
    ordered = sorted(spans, key=lambda span: span.start)
    waits: list[tuple[float, str]] = []
    busy, last = 0.0, ordered[0].start
    for span in ordered:
        if span.start > last:
            waits.append((span.start - last, span.name))
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
        kernels=sorted(kernels, key=lambda kernel: -kernel.us),
        longest=sorted(long, reverse=True)[:3],
    )


def check_platform(platform: Platform) -> None:
    """Raises ConfigError where there is no card."""
    if platform.name != "cuda":
        raise ConfigError(f"--profile reads a card's clock; accepted: device cuda, not {platform.name}")


def profile_steps(llm: LLM, prompts: list[list[int]], steps: int) -> StepProfile:
    """Of decode steps while every request is decoding."""
    from torch.profiler import ProfilerActivity, profile

    engine = llm.engine
    check_platform(engine.platform)
    params = SamplingParams(temperature=0, max_tokens=enough_tokens(engine, prompts, steps + 16), ignore_eos=True, detokenize=False)
    with decoding_together(engine, prompts, params):
        for _ in range(5):
            engine.step()
        engine.platform.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(steps):
                engine.step()
            engine.platform.synchronize()
    return summarise(list(device_spans(found.events())), steps)


def device_spans(events: object) -> Iterator[Span]:
    """What ran on the card, from torch.profiler's events."""
    from torch.autograd import DeviceType

    for event in events:  # type: ignore[attr-defined]
        if event.device_type == DeviceType.CUDA:
            yield Span(event.name, event.time_range.start, event.time_range.end)
