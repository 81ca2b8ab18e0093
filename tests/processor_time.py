"""Processor time of each test file, child processes included: the suite must stay quick to run.

Wall time depends on the machine and on what else it does; processor time much less.
`--processor-minutes N` makes a run that took more fail, where N are minutes of a processor as fast
as the one that the limit was set on: a slower one has more, found by short loops all through the
run (two processors that are one core's threads are slower once both have tests to run) and by what
a process that imports torch takes, as a hundred of the tests' do; and so has one without AVX-512,
on which torch's bf16 and our kernels take twice as long.
Linux only (it reads /proc); elsewhere nothing is counted or printed.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

SHOWN = 25
KEY = "processor_seconds"
LOOP = 200_000
LOOP_SECONDS = 0.02  # what `loop_seconds` gives on the machine that limits were set on
EVERY = 5  # seconds between two loops
# `make test` took 12 to 13 minutes on an Intel Xeon with AMX, where 6.4 to 8 are usual; its loop
# took 0.02 s, the import 1.6 to 2.5
IMPORT_SECONDS = 0.8
# `make test` took 16.3 minutes on an AMD Zen 3 whose loop took 0.11 s, where 6.4 to 8 are usual
WITHOUT_AVX512 = 2.2


def slowness(loops: list[float]) -> float:
    """How many times longer than there the tests may take here, 1 or more."""
    vectors = 1.0 if torch.cpu._is_avx512_supported() else WITHOUT_AVX512
    looping = statistics.fmean(loops) / LOOP_SECONDS
    return vectors * max(1.0, looping, import_seconds() / IMPORT_SECONDS)


@cache
def import_seconds() -> float:
    """Processor time of a process that imports torch, the second one's."""
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def loop_seconds() -> float:
    """Processor time of a fixed piece of Python."""
    start = time.process_time()
    total = 0
    for number in range(LOOP):
        total += number * number % 7
    return time.process_time() - start


def processor_seconds(process: str = "self") -> float:
    """Seconds that a process, the children it waited for and its descendants have computed."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
        children = " ".join(p.read_text() for p in Path(f"/proc/{process}/task").glob("*/children"))
    except OSError:  # it has just ended: its parent counts it now, or will
        return 0.0
    # utime, stime, cutime and cstime follow the name, which is in brackets and may hold spaces.
    ticks = sum(int(field) for field in text.rpartition(")")[2].split()[11:15])
    own = ticks / os.sysconf("SC_CLK_TCK")
    return own + sum(processor_seconds(child) for child in children.split())


class ProcessorTime:
    def __init__(self, config: pytest.Config):
        self.config = config
        self.files: Counter[str] = Counter()
        worker = hasattr(config, "workerinput")
        self.limit = None if worker else config.getoption("--processor-minutes")
        self.loops = [loop_seconds()]
        self.looped = time.monotonic()
        self.last = processor_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        """Up to the end of this phase; fixtures count for the test that first needs them. The
        kernel's list of children may miss one for a moment, which must not count twice."""
        now = max(self.last, processor_seconds())
        spent = now - self.last
        self.last = now
        report = yield
        report.user_properties.append((KEY, spent))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        spent = [value for key, value in report.user_properties if key == KEY]
        self.files[report.nodeid.partition("::")[0]] += spent[-1] if spent else 0.0
        if self.limit is not None and time.monotonic() > self.looped + EVERY:
            self.loops.append(loop_seconds())
            self.looped = time.monotonic()

    @property
    def minutes(self) -> float:
        return sum(self.files.values()) / 60

    @property
    def too_long(self) -> bool:
        return self.limit is not None and self.minutes > self.limit * slowness(self.loops)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.too_long and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"processor time: {self.minutes:.1f} minutes")
        if self.limit is not None:
            times = slowness(self.loops)
            terminalreporter.write_line(f"limit: {self.limit:g} minutes, times {times:.2f} here")
        for name, seconds in self.files.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:7.1f} s  {name}")
        if self.too_long:
            terminalreporter.write_line(
                f"FAILED: more than the {self.limit:g} minutes of processor time that the tests may"
                f" take, times {times:.2f} for this processor; mark what is exhaustive as "
                "`exhaustive`, or make it cheaper",
                red=True,
            )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processor-minutes", type=float, help="fail a run that takes more processor time"
    )


def pytest_configure(config: pytest.Config) -> None:
    if Path("/proc/self/task").exists():
        config.pluginmanager.register(ProcessorTime(config), "rorqual-processor-time")
