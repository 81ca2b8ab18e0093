"""Groups of a mesh that are aborted, while another thread asks whether they are gone."""

from __future__ import annotations

import threading
import time
from copy import copy

import pytest

from rorqual.parallel.group_axis import GroupAxis
from rorqual.parallel.mesh import Mesh


def axis(gone: threading.Event) -> GroupAxis:
    found = object.__new__(GroupAxis)
    found.group = object()  # type: ignore[assignment]
    found.abort = lambda: gone.wait(30)  # type: ignore[assignment, method-assign, return-value]
    return found


def test_waiting_during_an_abort_waits_for_all_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = copy(Mesh.single())  # that one is shared
    mesh.aborting = []
    gone = threading.Event()
    mesh.axes = {"tp": axis(gone), "ep": axis(gone)}
    begun = threading.Event()
    start = threading.Thread.start

    def slowly(thread: threading.Thread) -> None:
        begun.set()
        time.sleep(0.1)
        start(thread)

    watchdog = threading.Thread(target=mesh.abort)
    watchdog.start()
    watchdog.join()
    assert not mesh.wait_aborted(0.01), "the groups are still there"

    mesh.aborting = []
    watchdog = threading.Thread(target=mesh.abort)
    monkeypatch.setattr(threading.Thread, "start", slowly)
    start(watchdog)
    assert begun.wait(30)
    assert not mesh.wait_aborted(0.01), "none may be asked for before it runs"
    gone.set()
    watchdog.join()
    assert mesh.wait_aborted(30)
    assert len(mesh.aborting) == 2
