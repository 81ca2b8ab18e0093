"""What `bench serve` shows while it runs: a bar on a terminal, a line a stage in a log file; on
standard error, apart from the results.

Drawing is done by the event loop twice a second rather than by a thread of its own, which would
delay the chunks' times."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from rorqual.bench.serving.client import RequestRecord

INTERVAL = 0.5


class Progress:
    """Counts records as they are sent and completed. `visible`: whether anything is shown."""

    def __init__(self, visible: bool = False):
        self.visible = visible
        self.title = ""
        self.total = 0
        self.bar: Any = None
        self._reset()

    def _reset(self) -> None:
        self.started = time.perf_counter()
        self.open = self.done = self.failed = self.tokens = 0

    def stage(self, title: str, total: int = 0) -> None:
        self.title = title
        self.total = total
        self._reset()
        if self.visible and total and not sys.stderr.isatty():
            print(f"{title}: {total} requests", file=sys.stderr, flush=True)

    def seen(self, record: RequestRecord) -> None:
        if not record.end:
            self.open += 1
            return
        self.open -= 1
        self.done += 1
        self.failed += record.error is not None
        self.tokens += record.output_tokens

    @property
    def status(self) -> str:
        rate = self.tokens / max(1e-9, time.perf_counter() - self.started)
        failed = f", [red]{self.failed} failed[/red]" if self.failed else ""
        return f"{self.open} open{failed}, {rate:,.0f} tok/s of completed requests"

    @asynccontextmanager
    async def refreshing(self) -> AsyncIterator[None]:
        if not (self.visible and sys.stderr.isatty()):
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
        )
        with Bar(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
            task = bar.add_task(self.title, total=self.total, status="")
            drawing = asyncio.create_task(self._draw(bar, task))
            try:
                yield
            finally:
                drawing.cancel()
                with suppress(asyncio.CancelledError):
                    await drawing

    async def _draw(self, bar: Any, task: Any) -> None:
        while True:
            bar.update(task, completed=self.done, status=self.status)
            bar.refresh()
            await asyncio.sleep(INTERVAL)
