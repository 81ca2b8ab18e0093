"""One thread a process: the tests' models are tiny, and several test processes share the
machine. Without a GPU, kernels run in Triton's interpreter, which must be asked for before
anything imports Triton."""

from __future__ import annotations

import gc
import os
import signal

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


pytest_plugins = ["tests.processor_time"]


EXHAUSTIVE = ("no", "first", "only", "all")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        choices=EXHAUSTIVE,
        default="no",
        help="tests marked exhaustive: left out, run alone (the first case of each function, or "
        "all but the longest), or run with the others",
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for jobs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers", "full_matrix: every valid combination of parallel sizes (make test-parallel)"
    )
    config.addinivalue_line(
        "markers",
        "exhaustive(but_first=False, every=False): left to `make test-all`; with but_first the "
        "first case of each test function runs in `make test` all the same. CI runs the first of "
        "the others, or with `every` all",
    )
    config.addinivalue_line(
        "markers", "longest: exhaustive, and left out of CI's run as well: `make test-all` alone"
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """Thousands of tests and what they import stay: collections, which some tests ask for again and
    again, need not look through them."""
    gc.collect()
    gc.freeze()


def is_exhaustive(item: pytest.Item, seen: set[str]) -> bool:
    """Whether a quick run leaves the test out. `seen`: functions whose first case was met."""
    if item.get_closest_marker("longest"):
        return True
    mark = item.get_closest_marker("exhaustive")
    if mark is None:
        return False
    function = item.nodeid.partition("[")[0]
    first = function not in seen
    seen.add(function)
    return not (first and mark.kwargs.get("but_first", False))


def later_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """All but the first case of each function, unless it is marked for every case to run."""
    seen: set[str] = set()
    found = []
    for item in items:
        mark = item.get_closest_marker("exhaustive")
        function = item.nodeid.partition("[")[0]
        if function in seen and not (mark and mark.kwargs.get("every", False)):
            found.append(item)
        seen.add(function)
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out: list[pytest.Item] = []
    if "full_matrix" not in (config.option.markexpr or ""):
        left_out += [item for item in items if item.get_closest_marker("full_matrix")]
    asked = config.option.exhaustive
    if asked in ("first", "only"):
        left_out += [item for item in items if item.get_closest_marker("longest")]
    if asked != "all":
        seen: set[str] = set()
        wanted = asked != "no"
        left_out += [item for item in items if is_exhaustive(item, seen) != wanted]
    if asked == "first":
        gone = set(left_out)
        left_out += later_cases([item for item in items if item not in gone])
    if left_out:
        gone = set(left_out)
        config.hook.pytest_deselected(items=list(gone))
        items[:] = [item for item in items if item not in gone]
