"""Expert servers that are killed, stopped, stalled, slow and started again, answer garbage, or come
back with another checkpoint, while requests run: no wrong token."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rorqual import LLM, SamplingParams
from tests.disagg.expert_processes import ExpertProcess, write_secret
from tests.disagg.link_proxy import GARBAGE, LinkProxy
from tests.engine.mixed_batch import COMMON, TEXTS

pytestmark = pytest.mark.longest
REQUESTS = 1000
READERS = 12
TOKENS = 16
OTHER = ["--set", "weights=random"]
KINDS = (
    "kill",
    "stop",
    "stall",
    "short stop",
    "garbage",
    "another checkpoint",
    "slow",
)


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_secret(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def servers(secret_file: str) -> Iterator[list[ExpertProcess]]:
    """Every expert has two holders."""
    made = [ExpertProcess(slots, secret_file) for slots in ("0-10", "8-15,0-2", "3-15")]
    try:
        for server in made:
            server.wait()
        yield made
    finally:
        for server in made:
            server.kill()


def prompts(count: int) -> list[str]:
    return [f"{TEXTS[n % len(TEXTS)]} {n}" for n in range(count)]


PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
OPTIONS: dict[str, Any] = {**COMMON, "max_num_seqs": READERS, "num_pages": 400}


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    """One process with all its experts."""
    llm = LLM(**OPTIONS)
    yield llm
    llm.engine.close()


@pytest.fixture(scope="module")
def expected(alone: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in alone.generate(prompts(REQUESTS), PARAMS)]


def allowed(alone: LLM, number: int) -> list[list[int]]:
    """What one process says to a request by itself, and beside others. In fp32 too sums depend on
    what else is in a step; where two experts, or tokens, are equally good to the last digits, so
    does the answer."""
    found = []
    for first, last in ((number, number), (number - 1, number + 2), (number - 7, number)):
        numbers = [n % REQUESTS for n in range(first, last + 1)]
        outs = alone.generate([prompts(REQUESTS)[n] for n in numbers], PARAMS)
        found.append(outs[numbers.index(number)].outputs[0].token_ids)
    return found


class Chaos:
    """One fault after another until `stop`; never two servers at once. counts: by kind."""

    def __init__(self, servers: list[ExpertProcess], proxy: LinkProxy):
        self.servers = servers
        self.proxy = proxy
        self.draw = random.Random(3)
        self.counts: dict[str, int] = {}
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        for kind in itertools.cycle(KINDS):
            if self.stopped.wait(self.draw.uniform(0.2, 0.6)):
                return
            self._do(kind, self.draw.choice(self.servers))
            self.counts[kind] = self.counts.get(kind, 0) + 1
            time.sleep(1.0)  # it is linked again, and the next may fail

    def _do(self, kind: str, server: ExpertProcess) -> None:
        if kind == "kill":
            server.restart()
        elif kind == "stop":
            server.pause(2.5)
        elif kind == "short stop":
            server.pause(0.2)
        elif kind == "stall":
            self.proxy.stall(2.0)
        elif kind == "slow":
            self.proxy.slow(0.02, 2.0)
        elif kind == "garbage":
            self.proxy.garbage = GARBAGE[self.draw.choice(sorted(GARBAGE))]
        else:
            server.kill()
            server.arguments += OTHER
            server.restart()
            time.sleep(1.0)  # callers find it there, and are refused
            del server.arguments[-len(OTHER) :]
            server.restart()

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()


@pytest.mark.parametrize("more", [{}, {"micro_batches": 2, "num_speculative_tokens": 1}])
def test_a_thousand_requests_under_faults(
    more: dict[str, Any],
    servers: list[ExpertProcess],
    secret_file: str,
    alone: LLM,
    expected: list[list[int]],
) -> None:
    proxy = LinkProxy(servers[1].port, alone.engine.worker.model_config.hidden_size)
    ports = [servers[0].port, proxy.port, servers[2].port]
    llm = LLM(
        **OPTIONS,
        experts=tuple(f"127.0.0.1:{port}" for port in ports),
        expert_secret_file=secret_file,
        expert_timeout=1.0,
        **more,
    )
    chaos = Chaos(servers, proxy)
    asked = itertools.count()
    found: dict[int, list[int]] = {}

    def read() -> None:
        while (number := next(asked)) < REQUESTS:
            (out,) = llm.generate([prompts(REQUESTS)[number]], PARAMS)
            found[number] = out.outputs[0].token_ids

    began = time.monotonic()
    try:
        threads = [threading.Thread(target=read) for _ in range(READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        seconds = time.monotonic() - began
        chaos.stop()
        llm.engine.close()
        proxy.close()
    assert len(found) == REQUESTS
    other = [number for number, tokens in found.items() if tokens != expected[number]]
    print(f"\n{REQUESTS} requests in {seconds:.0f} s under {chaos.counts}; near ties: {other}")
    assert [n for n in other if found[n] not in allowed(alone, n)] == []
    assert len(other) <= REQUESTS // 200
    assert set(chaos.counts) == set(KINDS)
    assert proxy.garbled
