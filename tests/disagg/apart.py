"""An engine that takes part in prompts computed elsewhere, in a process of its own: asked by lines
of JSON on its standard input, answering by lines on its standard output.

`python -m tests.disagg.apart ROLE SETTINGS`
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.engine.distributed.starting import ENGINE, environment
from tests.forked import start

SECRET = "a secret that is long enough"
LEASE = 2.0


class Engine:
    """Where it runs."""

    def __init__(self, role: str, settings: dict[str, Any]):
        import torch

        import rorqual.engine.executor as executors
        from rorqual.disagg.kv_transfers import KVTransfers
        from rorqual.disagg.transfer_config import TransferConfig
        from rorqual.engine.config import EngineConfig
        from rorqual.engine.engine import Engine as OwnEngine
        from rorqual.models.hub import model_folder
        from tests.engine.execution.replaying import ReplayingPlatform

        early = {name: settings.pop(name, False) for name in ("overlap", "by_layer")}
        early["transport"] = settings.pop("transport", "tcp")
        early["staging_mb"] = settings.pop("staging_mb", 64)
        if settings.pop("stand_in", False):
            use_stand_in()
        make = executors.make_platform
        if settings.pop("captured", False):  # steps are replayed, in pieces those of prompts
            executors.make_platform = lambda device: ReplayingPlatform(torch.device("cpu"))
            settings["piecewise_tokens"] = 64
        model = str(model_folder(settings.pop("model", None)))
        try:
            self.engine = OwnEngine(EngineConfig(model, **{**ENGINE, **settings}))
        finally:
            executors.make_platform = make
        config = TransferConfig(role, SECRET, lease_seconds=LEASE, **early)
        self.transfers = KVTransfers(self.engine, config, lambda: None)
        self.answers: list[Any] = []
        self.transfers.answer = lambda name, params: self.answers.append((name, params))
        self.names = itertools.count()

    def ranks(self) -> list[int]:
        return [handle.pid for handle in getattr(self.engine.executor, "handles", [])]

    def prefill(self, prompt: list[int], **more: Any) -> Any:
        """kv_transfer_params of a prompt whose answer goes on elsewhere."""
        asked = {"do_remote_decode": True}
        (sequence,) = self._run([self._request(prompt, asked, max_tokens=1, **more)])
        return self.transfers.offer(sequence)

    def begin(self, prompt: list[int]) -> Any:
        """kv_transfer_params of a prompt of which a first part is computed."""
        request = self._request(prompt, {"do_remote_decode": True}, max_tokens=1)
        self.engine.add(request)
        self.transfers.begin(request)
        while not (self.answers or (answers := self.transfers.advance())):
            self.engine.step()
        ((name, params),) = self.answers or answers
        self.answers = []
        assert name == request.id
        return params

    def go_on(self, steps: int) -> Any:
        """With what was begun; how many pages are held then, and whether anything is left."""
        for _ in range(steps):
            if self.engine.has_work:
                self.engine.step()
                self.transfers.advance()
            self.transfers.settle()
        return self.transfers.leases.held, self.engine.has_work

    def give_up(self) -> None:
        for name in list(self.engine.scheduler.sequences):
            self.engine.abort(name)

    def answer(self, prompt: list[int], given: Any = None, count: int = 1, **more: Any) -> Any:
        """(tokens, cached tokens, why not all pages came) of each of `count` requests."""
        return [
            self._answer_of(request, error)
            for request, error in self._arrive(prompt, given, count, more)
        ]

    def _arrive(self, prompt, given, count, more):
        waiting = [self._request(prompt, given, **more) for _ in range(count)]
        arrived = []
        for request in list(waiting):
            self.transfers.check(request)
            if not self.transfers.fetch(request):
                arrived.append((request, "", None))
        while len(arrived) < count:
            self.transfers.settle()
            arrived += self.transfers.arrived()
            time.sleep(0.002)
        ended = self._run([found[0] for found in arrived], [found[2] for found in arrived])
        return [(sequence, found[1]) for sequence, found in zip(ended, arrived, strict=True)]

    def _answer_of(self, sequence: Any, error: str) -> Any:
        return sequence.outputs, sequence.num_cached_prompt, error

    def abandon(self, prompt: list[int], given: Any) -> Any:
        """Begin to fetch, and let go at once."""
        request = self._request(prompt, given)
        self.transfers.check(request)
        found = self.transfers.fetch(request)
        self.transfers.cancel(request.id)
        return found

    def fetch_through_restart(self, prompt: list[int], given: Any) -> Any:
        """How many pages were kept for a prompt on its way when the cache was begun anew, and what
        became of it."""
        request = self._request(prompt, given)
        self.transfers.check(request)
        assert self.transfers.fetch(request)
        kept = len(self.transfers.arrivals.waiting[request.id].reserved)
        self.engine.scheduler.restart()
        self.engine.on_restart()
        ((arrived, error, _),) = self.transfers.arrived()
        assert arrived is request
        return kept, error

    def state(self) -> Any:
        """Pages in use by rank, and what of transfers is under way."""
        self.transfers.settle()
        self.transfers.arrived()
        figures = self.transfers.figures()
        return {
            "used": self.engine.scheduler.usage().pages_used,
            "held": figures[6],
            "waiting": figures[7],
            "expired": figures[4],
            "came": figures[2],
            "sent": figures[3],
            "transport": self.transfers.pages.mine["transport"],
            "brought": self.engine.scheduler.usage().host_pages_in,
        }

    def _request(self, prompt: list[int], given: Any, max_tokens: int = 12, **more: Any) -> Any:
        from rorqual.request import Request, SamplingParams

        salt = more.pop("salt", "")
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        name = f"r{next(self.names)}"
        return Request(name, tuple(prompt), params, cache_salt=salt, kv_transfer_params=given)

    def _run(self, requests: list[Any], dp_ranks: Any = None) -> list[Any]:
        for request, dp_rank in zip(requests, dp_ranks or [None] * len(requests), strict=True):
            self.engine.add(request, dp_rank)
        sequences = [self.engine.scheduler.sequences[request.id] for request in requests]
        while self.engine.has_work:
            self.engine.step()
            self.transfers.advance()
            self.transfers.settle()
        return sequences


def use_stand_in() -> None:
    """Handles of the host's memory in place of a GPU's."""
    from rorqual.disagg.transports import start
    from rorqual.parallel import cuda_ipc
    from tests.parallel.memfd_driver import MemfdDriver, no_device

    driver = MemfdDriver()
    cuda_ipc.driver = lambda: driver
    cuda_ipc.on_device = no_device
    start._shares_memory = lambda platform: True


class Apart:
    """From outside. `ask` waits for the answer; what the engine raises is raised here by name."""

    def __init__(self, role: str, **settings: Any):
        arguments = [role, json.dumps(settings)]
        self.process = start("tests.disagg.apart", arguments, environment())
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def begin(self, what: str, *given: Any, **more: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, given, more]) + "\n")
        self.process.stdin.flush()

    def end(self, seconds: float = 400.0) -> Any:
        line = self.lines.get(timeout=seconds)
        assert line, f"the engine's process has ended with {self.process.wait(60)}"
        kind, answer = json.loads(line)
        if kind == "error":
            raise RuntimeError(answer)
        return answer

    def ask(self, what: str, *given: Any, **more: Any) -> Any:
        self.begin(what, *given, **more)
        return self.end()

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], seconds: float = 60) -> None:
        """Until the engine's state is such."""
        deadline = time.monotonic() + seconds
        while not condition(state := self.ask("state")):
            assert time.monotonic() < deadline, state
            time.sleep(0.02)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def main() -> None:
    faulthandler.register(signal.SIGUSR1)
    role, settings = sys.argv[1:]
    engine = Engine(role, json.loads(settings))
    print(json.dumps(["ready", None]), flush=True)
    try:
        for line in sys.stdin:
            what, given, more = json.loads(line)
            try:
                answer = ["answer", getattr(engine, what)(*given, **more)]
            except Exception as error:
                answer = ["error", f"{type(error).__name__}: {error}"]
            print(json.dumps(answer), flush=True)
    finally:
        engine.transfers.close()
        engine.engine.close()


if __name__ == "__main__":
    main()
