"""Events are waited for on their own GPU, whatever the thread's is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from rorqual.platforms.cuda import AnyThreadEvent

GPU = torch.device("cuda", 1)


def test_waiting_and_asking_are_on_the_event_s_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current = threading.local()
    calls = []

    class Event:
        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append(f"synchronize on {getattr(current, 'device', None)}")

        def query(self) -> bool:
            calls.append(f"query on {getattr(current, 'device', None)}")
            return True

    @contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        current.device = wanted
        yield
        current.device = None

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", device)
    event = AnyThreadEvent(GPU)
    event.record()
    for work in (event.synchronize, event.query):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert event.query()
    assert calls == ["record", "synchronize on cuda:1", "query on cuda:1", "query on cuda:1"]
