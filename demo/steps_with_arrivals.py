"""What pages that arrive from a prefill server cost the steps of an engine that answers: steps
during which pages arrive beside steps of as many requests without, in turns.

    python demo/steps_with_arrivals.py --streams 64 --threads 1 --json arrivals.json
    python demo/steps_with_arrivals.py qwen3-30b-a3b --weights random --layers 16

This process answers: `--streams` requests decode, and every `--every` steps one more comes, for
which the oldest makes room, so all steps have as many requests. Its prompt has been computed by an
engine in another process. In one kind of turn its pages are fetched from there meanwhile, in the
other they were fetched before. All prompts are computed before both turns, so nothing but pages
comes from the other process while steps are timed. With one GPU both engines are on it.

A step's time is that between the ends of two steps, which is what a stream waits for a token: it
holds what an engine process does between steps (pages put in the cache, requests queued) and what
threads that fetch take away. What a server adds to send tokens on is not in it.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from child_process import ChildProcess, options_of_both

from rorqual.disagg.kv_transfers import KVTransfers
from rorqual.disagg.transfer_config import TransferConfig
from rorqual.engine.config import EngineConfig
from rorqual.engine.engine import Engine
from rorqual.engine.scheduling.dp_scheduler import DataParallelInFlight
from rorqual.models.hub import model_folder
from rorqual.request import Request, SamplingParams

LEASE_SECONDS = 3600.0
STARTED_SECONDS = 60.0  # after a turn, for all requests of it to have begun
MAX_RATIO = 1.1  # of medians, as it is wanted
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Setting:
    """model: a folder, a shape's name or an id; the bundled checkpoint if None. layers: all if
    None. prompt: tokens, rounded up to whole pages and one more. every: steps from one request
    that comes to the next. steps: of a turn. turns: of each kind."""

    model: str | None = None
    weights: str = "checkpoint"
    layers: int | None = None
    streams: int = 16
    prompt: int = 1024
    every: int = 8
    steps: int = 64
    turns: int = 25
    page_size: int = 16
    threads: int | None = None
    transport: str = "tcp"
    seed: int = 1

    @property
    def prompt_pages(self) -> int:
        return -(-self.prompt // self.page_size)

    @property
    def prompt_tokens(self) -> int:
        """With whole pages and one token more every page of a prompt can be cached."""
        return self.prompt_pages * self.page_size + 1

    @property
    def comers(self) -> int:
        """Requests that come in a turn."""
        return -(-self.steps // self.every)

    @property
    def longest(self) -> int:
        """Tokens that a stream makes at most: room for one that waits long for its successor."""
        return 4 * self.streams * self.every + self.steps

    @property
    def answering_pages(self) -> int:
        """Streams at their longest, and all prompts of two turns."""
        stream = self.prompt_pages + 1 + -(-self.longest // self.page_size)
        return (self.streams + 2) * stream + 2 * self.comers * (self.prompt_pages + 1)

    @property
    def computing_pages(self) -> int:
        """Of these half may be held for who fetches them."""
        return 2 * (2 * self.comers + 1) * (self.prompt_pages + 1) + 16


def engine_of(setting: Setting, pages: int) -> Engine:
    options: dict[str, Any] = {
        "weights": setting.weights,
        "page_size": setting.page_size,
        "num_pages": pages,
        "max_num_seqs": setting.streams + 2,
        "max_model_len": setting.prompt_tokens + setting.longest + 1,
        "num_layers": setting.layers,
        "threads": setting.threads,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return Engine(EngineConfig(str(model_folder(setting.model)), **given))


# ---- who computes prompts


def keep() -> None:
    """The main of the other process: its setting and then prompts come as lines, and where the
    pages of each are goes out as one."""
    first = json.loads(sys.stdin.readline())
    setting = Setting(**first["setting"])
    engine = engine_of(setting, setting.computing_pages)
    config = TransferConfig(
        "prefill", first["secret"], lease_seconds=LEASE_SECONDS, transport=setting.transport
    )
    transfers = KVTransfers(engine, config, lambda: None)
    print(json.dumps("ready"), flush=True)
    for number, line in enumerate(sys.stdin):
        transfers.settle()
        found: dict[str, Any] = {}
        prompts = json.loads(line)
        for place, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            asked = {"do_remote_decode": True}
            name = f"{number}-{place}"
            engine.add(Request(name, tuple(prompt), params, kv_transfer_params=asked))
        while engine.has_work:
            for out in engine.step():
                if out.finish is not None:
                    found[out.sequence.request.id] = transfers.offer(out.sequence)
            transfers.settle()
        print(json.dumps([found[f"{number}-{i}"] for i in range(len(prompts))]), flush=True)
    transfers.close()
    engine.close()


class Keeper(ChildProcess):
    """That process, from here, once it can be asked."""

    def __init__(self, setting: Setting, secret: str):
        super().__init__(__file__, {"setting": asdict(setting), "secret": secret})
        try:
            self.receive()
        except BaseException:
            self.close()
            raise

    def computed(self, prompts: list[list[int]]) -> list[dict[str, Any]]:
        """Where the pages of each are."""
        self.send(prompts)
        found = self.receive()
        if None in found:
            raise SystemExit("pages of a prompt were not offered")
        return list(found)


# ---- who answers


@dataclass
class Times:
    """Seconds of steps with as many requests as there are streams. arriving: while pages were on
    their way or put in the cache. others: the further ones of the same turns. without: of turns in
    which nothing arrives. uneven: steps of another number of requests, which count nowhere."""

    arriving: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    uneven: int = 0


class Answerer:
    """Streams of one engine, and those that come. came: requests whose pages were fetched; fetch:
    seconds that took."""

    def __init__(self, setting: Setting, secret: str):
        self.setting = setting
        self.engine = engine_of(setting, setting.answering_pages)
        config = TransferConfig("decode", secret, transport=setting.transport)
        self.transfers = KVTransfers(self.engine, config, lambda: None)
        self.streams: deque[str] = deque()
        self.newest: deque[Any] = deque()  # of which it is not known yet what was cached
        self.launched: deque[int] = deque()  # requests of the steps in flight
        self.engine.on_launch = self._note
        self.began: dict[str, float] = {}
        self.fetch: list[float] = []
        self.count = 0

    def _note(self, step: DataParallelInFlight) -> None:
        self.launched.append(len(step.output.decode_slots) + len(step.output.chunks))

    def request(self, prompt: list[int], where: dict[str, Any] | None = None) -> Request:
        self.count += 1
        params = SamplingParams(temperature=0, max_tokens=self.setting.longest, ignore_eos=True)
        return Request(f"s{self.count}", tuple(prompt), params, kv_transfer_params=where)

    def fill(self, prompts: list[list[int]]) -> None:
        """Until as many streams as wanted decode."""
        for prompt in prompts:
            request = self.request(prompt)
            self.engine.add(request)
            self.streams.append(request.id)
        while self.engine.scheduler.num_decoding < len(prompts):
            self._step()

    def fetch_before(self, prompts: list[list[int]], where: list[dict[str, Any]]) -> None:
        """Into the cache, while no steps are timed."""
        for prompt, place in zip(prompts, where, strict=True):
            self._fetch(self.request(prompt, place))
        while self.transfers.arrivals.waiting:
            for request, _ in self._arrived():
                self.began.pop(request.id)
            time.sleep(0.001)

    def turn(
        self, prompts: list[list[int]], where: list[dict[str, Any]] | None, times: Times
    ) -> None:
        """`prompts` come one after another; their pages, where `where` says, or else they are in
        the cache."""
        places: list[dict[str, Any] | None] = [*where] if where else [None] * len(prompts)
        coming = deque(zip(prompts, places, strict=True))
        before = time.perf_counter()
        for number in range(self.setting.steps):
            if number % self.setting.every == 0:
                self._comes(*coming.popleft())
            arriving = bool(self.transfers.arrivals.waiting)
            self._take_arrived()
            requests = self._step()
            now = time.perf_counter()
            if requests != self.setting.streams:
                times.uneven += 1
            elif arriving:
                times.arriving.append(now - before)
            else:
                (times.others if where else times.without).append(now - before)
            before = now
        deadline = before + STARTED_SECONDS
        while self.transfers.arrivals.waiting or self.newest:
            self._take_arrived()
            self._step()
            if time.perf_counter() > deadline:
                raise SystemExit(f"after {STARTED_SECONDS:g} s a new request had not begun")

    def _comes(self, prompt: list[int], where: dict[str, Any] | None) -> None:
        request = self.request(prompt, where)
        if where is None:
            self._replace(request)
        else:
            self._fetch(request)

    def _fetch(self, request: Request) -> None:
        self.transfers.check(request)
        if not self.transfers.fetch(request):
            raise SystemExit("pages of a new prompt are not to be fetched")
        self.began[request.id] = time.perf_counter()

    def _arrived(self) -> Iterator[tuple[Request, int]]:
        """With the data-parallel rank that has its pages."""
        for request, error, rank in self.transfers.arrived():
            if error:
                raise SystemExit(f"not all pages arrived: {error}")
            yield request, rank

    def _take_arrived(self) -> None:
        for request, rank in self._arrived():
            self.fetch.append(time.perf_counter() - self.began.pop(request.id))
            self._replace(request, rank)

    def _replace(self, request: Request, rank: int | None = None) -> None:
        """The oldest stream makes room."""
        self.engine.abort(self.streams.popleft())
        self.engine.add(request, rank)
        self.streams.append(request.id)
        self.newest.append(self.engine.scheduler.sequences[request.id])

    def _step(self) -> int:
        """How many requests the step had that ended now."""
        self.engine.step()
        self._check_cached()
        return self.launched.popleft()

    def _check_cached(self) -> None:
        """Nobody computes a prompt here."""
        while self.newest and self.newest[0].num_cached_prompt is not None:
            found = self.newest.popleft().num_cached_prompt
            if found != self.setting.prompt_tokens - 1:
                raise SystemExit(f"of {self.setting.prompt_tokens} tokens {found} were cached")

    def close(self) -> None:
        self.transfers.close()
        self.engine.close()


@dataclass
class Figures:
    """Milliseconds by percentile, and steps, of each kind. ratios: of arriving over without, by
    percentile; by_turn: of medians, turn by turn; whole: of the means of all steps of turns with
    arrivals, between these as well, over those without. page_bytes: of a prompt. came: requests
    whose pages arrived; fetch: the median of milliseconds from asking to all pages in the cache.
    """

    machine: str
    load: str
    requests: int
    page_bytes: int
    came: int
    fetch: float
    steps: dict[str, int]
    uneven: int
    times: dict[str, dict[int, float]]
    ratios: dict[int, float]
    by_turn: list[float]
    whole: float

    def print(self) -> None:
        print(f"{self.machine}, load {self.load}")
        print(
            f"{self.requests} requests decode; {self.came} prompts arrived, "
            f"{self.page_bytes / 1e6:.2f} MB of pages each, in {self.fetch:.1f} ms (median)"
        )
        print(f"{'steps':34}{'number':>8}" + "".join(f"{f'p{p} ms':>10}" for p in PERCENTILES))
        for name, found in self.times.items():
            row = "".join(f"{found[p]:10.3f}" for p in PERCENTILES)
            print(f"{name:34}{self.steps[name]:8}{row}")
        row = "".join(f"{self.ratios[p]:10.3f}" for p in PERCENTILES)
        print(f"{'pages arrive / nothing arrives':42}{row}")
        low, paired, high = np.percentile(self.by_turn, (25, 50, 75))
        print(
            f"of the medians of {len(self.by_turn)} pairs of turns: {paired:.3f} (median; half of "
            f"the pairs within {low:.3f} to {high:.3f})"
        )
        print(f"all steps of turns with arrivals / without, means: {self.whole:.3f}")
        if self.uneven:
            print(f"{self.uneven} steps of another number of requests count nowhere")
        held = "held" if paired <= MAX_RATIO else "not held"
        print(f"at most {MAX_RATIO} between the medians of a pair: {held}")


def percentiles(times: list[float]) -> dict[int, float]:
    return {p: 1e3 * float(np.percentile(times, p)) for p in PERCENTILES}


def measure(setting: Setting) -> Figures:
    """Raises SystemExit where pages do not arrive."""
    secret = secrets.token_hex(16)
    keeper = Keeper(setting, secret)
    try:
        answerer = Answerer(setting, secret)
        try:
            return _measured(setting, keeper, answerer)
        finally:
            answerer.close()
    finally:
        keeper.close()


def _measured(setting: Setting, keeper: Keeper, answerer: Answerer) -> Figures:
    random = np.random.default_rng(setting.seed)
    vocabulary = min(4000, answerer.engine.model_config.vocab_size)

    def drawn(count: int) -> list[list[int]]:
        shape = (count, setting.prompt_tokens)
        found: list[list[int]] = random.integers(10, vocabulary, shape).tolist()
        return found

    answerer.fill(drawn(setting.streams))
    times = Times()
    by_turn = []
    for number in range(-1, setting.turns):  # the first warms up
        pair = Times()
        cached, new = drawn(setting.comers), drawn(setting.comers)
        answerer.fetch_before(cached, keeper.computed(cached))
        where = keeper.computed(new)
        for arrives in (bool(number % 2), not number % 2):
            answerer.turn(new if arrives else cached, where if arrives else None, pair)
        if number < 0:
            answerer.fetch.clear()
            continue
        if not pair.arriving or not pair.without:
            raise SystemExit("a turn had no step to compare; more --steps are needed")
        by_turn.append(statistics.median(pair.arriving) / statistics.median(pair.without))
        times.arriving += pair.arriving
        times.others += pair.others
        times.without += pair.without
        times.uneven += pair.uneven
    kinds = {"pages arrive": times.arriving, "nothing arrives": times.without}
    if times.others:
        kinds["between arrivals"] = times.others
    found = {name: percentiles(kind) for name, kind in kinds.items()}
    device = answerer.engine.platform.device
    cuda = device.type == "cuda"
    machine = torch.cuda.get_device_name(device) if cuda else f"CPU, {os.cpu_count()} cores"
    return Figures(
        machine,
        " ".join(f"{load:.1f}" for load in os.getloadavg()),
        setting.streams,
        setting.prompt_pages * answerer.transfers.pages.memory.size,
        len(answerer.fetch),
        1e3 * statistics.median(answerer.fetch),
        {name: len(kind) for name, kind in kinds.items()},
        times.uneven,
        found,
        {p: found["pages arrive"][p] / found["nothing arrives"][p] for p in PERCENTILES},
        by_turn,
        statistics.fmean(times.arriving + times.others) / statistics.fmean(times.without),
    )


def main() -> None:
    if sys.argv[1:] == ["--keep"]:
        keep()
        return
    known = Setting()
    parser = options_of_both(__doc__.split("\n\n")[0], known)
    parser.add_argument("--streams", type=int, default=known.streams)
    parser.add_argument("--prompt", type=int, default=known.prompt, help="tokens of a prompt")
    parser.add_argument("--every", type=int, default=known.every, help="steps between arrivals")
    parser.add_argument("--steps", type=int, default=known.steps, help="of a turn")
    parser.add_argument("--turns", type=int, default=known.turns, help="of each kind")
    given = vars(parser.parse_args())
    file = given.pop("json")
    setting = Setting(**given)
    found = measure(setting)
    found.print()
    if file is not None:
        content = {"setting": asdict(setting), "figures": asdict(found)}
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
