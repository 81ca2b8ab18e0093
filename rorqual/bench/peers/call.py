"""One call of `bench peers`: the peer is started, its rows are measured, it is ended, and ours is
measured with the same requests on the same machine."""

from __future__ import annotations

import asyncio
import json
import math
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from rorqual.bench import provenance
from rorqual.bench.peers.engines import ServerSide, our_side, peer_sides
from rorqual.bench.peers.model_folder import ServedModel
from rorqual.bench.peers.results import OFFLINE, OURS, Measured, Results
from rorqual.bench.peers.routing import below_floor
from rorqual.bench.peers.rows import PREFIX_TOKENS, Row
from rorqual.bench.peers.server_process import RunningServer, last_lines, running_server
from rorqual.bench.peers.settings import PeerSettings
from rorqual.bench.serving import server_info
from rorqual.bench.serving.client import Client, ServerTarget
from rorqual.bench.serving.load import ArrivalLoad
from rorqual.bench.serving.measure import Data, Method, ServingBench, warnings
from rorqual.bench.serving.metrics import Figures
from rorqual.bench.serving.prompts import PromptLengths, Vocabulary
from rorqual.errors import ConfigError, TargetError

WARM_UPS = 256  # requests at most; 32 tokens out each
MIN_WARM_UPS = 4
WARM_UP_TOKENS = 32
OUR_START = 60.0  # seconds kept for starting ours while the peer's rows are measured
OFFLINE_REPEATS = 1


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass
class PeerCall:
    """requests, rates: of the peer's rows, which ours repeats."""

    model: ServedModel
    asked: PeerSettings
    results: Results
    scratch: Path
    name: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    began: float = field(default_factory=time.monotonic)
    requests: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    spent: float = 0.0

    def __post_init__(self) -> None:
        cards = provenance.local_cards()
        self.card = cards[0] if cards else f"no GPU, {platform.machine()}"
        self.commit = self.asked.commit or provenance.git_commit()
        self.vocabulary = Vocabulary(self.model.folder, False, self.model.name)

    @property
    def left(self) -> float:
        return self.asked.budget - (time.monotonic() - self.began)

    def run(self) -> None:
        """Raises TargetError where a server fails; what was measured before is kept."""
        measured: dict[str, Row] = {}
        for side in peer_sides(self.model, self.asked, self.scratch):
            before = self.spent
            measured |= self._side(side, self._pending(side), reserve=True)
            # of several settings ours repeats the rows once
            self.spent = max(before, self.spent - before)
        rows = list(measured.values()) if self.asked.peer != "none" else self._alone()
        self._side(our_side(self.model, self.asked), rows, reserve=False)
        if self.asked.offline:
            self._offline(self.asked.offline)

    def _pending(self, side: ServerSide) -> list[Row]:
        done = self.results.pairs(self.model.name, side.engine, side.settings)
        return [row for row in self.asked.wanted if self.asked.again or row.name not in done]

    def _alone(self) -> list[Row]:
        done = {row.row for row in self.results.of(self.model.name, OURS)}
        return [row for row in self.asked.wanted if self.asked.again or row.name not in done]

    # ---- one server

    def _side(self, side: ServerSide, rows: Sequence[Row], reserve: bool) -> dict[str, Row]:
        """Rows that were measured. One start for the rows with a prefix cache, one for those
        without."""
        found: dict[str, Row] = {}
        for cached in (False, True):
            own = [row for row in rows if self._cached(row) is cached]
            if own and self._fits(side.name, reserve):
                with self._serving(side, cached, own) as server:
                    for row in own:
                        if not self._fits(row.name, reserve):
                            break
                        if self._row(side, server, row, cached):
                            found[row.name] = row
        return found

    def _cached(self, row: Row) -> bool:
        said = self.asked.prefix_cache
        return row.prefix_cache if said == "rows" else said == "on"

    def _fits(self, name: str, reserve: bool) -> bool:
        """Assume that ours takes as long for the peer's rows as the peer did."""
        needed = self.spent + OUR_START if reserve else 0.0
        if self.left > needed:
            return True
        tell(f"{name}: left for another call, {self.left:.0f} s are left of --budget")
        return False

    @contextmanager
    def _serving(
        self, side: ServerSide, cached: bool, rows: Sequence[Row]
    ) -> Iterator[RunningServer]:
        folder = self.asked.logs or self.scratch
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{_file_name(side.name)}{'-prefix-cache' if cached else ''}.log"
        most = max(row.concurrency or 0 for row in rows)
        command = side.command(0, cached, most)
        tell(f"{side.name}: starting {' '.join(command)}")
        seconds = min(self.asked.start_seconds, self.left)
        with running_server(
            lambda port: side.command(port, cached, most), log, seconds, side.environment
        ) as server:
            tell(f"{side.name}: ready after {server.ready_seconds:.1f} s")
            yield server

    # ---- one row

    def _row(self, side: ServerSide, server: RunningServer, row: Row, cached: bool) -> bool:
        began = time.monotonic()
        try:
            work = asyncio.wait_for(self._measure(side, server, row), self.left)
            version, figures, api_us = asyncio.run(work)
        except TimeoutError:
            tell(f"{side.name} {row.name}: not done within --budget")
            return False
        except TargetError as error:
            raise TargetError(
                f"{side.name} {row.name}: {error}\n{last_lines(server.log)}"
            ) from None
        if server.lost():
            raise TargetError(f"{side.name} {row.name}: the server ended\n{last_lines(server.log)}")
        spread, why = side.routing(server.log.read_text(encoding="utf-8", errors="replace"))
        if low := below_floor(self.model, row, figures, self.card):
            spread = False
            why = low
        found = Measured(
            call=self.name,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=self.commit,
            card=self.card,
            model=self.model.name,
            engine=side.engine,
            version=version,
            settings=side.settings,
            row=row.name,
            command=list(side.command(0, cached, row.concurrency or 0)),
            prefix_cache=cached,
            ready_seconds=round(server.ready_seconds, 1),
            spread=spread,
            routing=why,
            api_us=api_us,
            figures=figures,
        )
        self.results.add(found)
        self.spent += time.monotonic() - began
        self._tell(side, row, found)
        if side.engine != OURS:
            self.requests[row.name] = int(figures["num_prompts"])
        return found.good

    async def _measure(
        self, side: ServerSide, server: RunningServer, row: Row
    ) -> tuple[str, Figures, float | None]:
        rate = self._rate(side, row)
        count = self.requests.get(row.name) or row.requests(
            self.asked.waves, rate, self.asked.seconds
        )
        # ours sends what the peer was sent
        seconds = math.inf if row.name in self.requests else self.asked.seconds
        target = ServerTarget(server.url, temperature=self.asked.temperature)
        async with Client(target) as client:
            client.target = replace(target, model=await client.first_model())
            facts = await server_info.facts(client)
            await self._warm_up(client, row)
            bench = ServingBench(
                client, self.vocabulary, row.data(count), Method(warm_ups=0, seed=row.seed)
            )
            before = server.processor_seconds()
            figures = await bench.measure(row.load(rate, seconds))
            after = server.processor_seconds()
        tokens = figures["total_output_tokens"]
        known = before is not None and after is not None and tokens
        api_us = 1e6 * (after - before) / tokens if known else None  # type: ignore[operator]
        return _version(facts), figures, api_us

    async def _warm_up(self, client: Client, row: Row) -> None:
        """Shapes and connections, with other prompts of the same length."""
        most = row.concurrency or 64
        long = row.input_len + (PREFIX_TOKENS if row.kind == "prefix" else 0)
        lengths = PromptLengths(long, min(WARM_UP_TOKENS, row.output_len))
        data = Data(lengths=lengths, num_prompts=max(MIN_WARM_UPS, min(most, WARM_UPS)))
        method = Method(warm_ups=0, seed=row.seed + 1)
        figures = await ServingBench(client, self.vocabulary, data, method).measure(
            ArrivalLoad(most)
        )
        if not figures["completed"]:
            raise TargetError(f"every warm-up request failed: {next(iter(figures['failures']))}")

    def _rate(self, side: ServerSide, row: Row) -> float | None:
        """Requests/s: the peer's, also for ours."""
        if row.kind != "poisson":
            return None
        if row.name not in self.rates:
            peak = self.results.peak(self.model.name, self.asked.peer, side.settings, row.lengths)
            if not peak:
                lengths = "{}/{}".format(*row.lengths)
                raise ConfigError(
                    f"{row.name}: the file has no closed row of {lengths} of {side.name}, whose "
                    f"highest rate it needs; accepted: with --rows '{lengths}@64 {row.name}'"
                )
            self.rates[row.name] = peak * row.count / 100
        return self.rates[row.name]

    def _tell(self, side: ServerSide, row: Row, found: Measured) -> None:
        figures = found.figures
        said = (
            f"{figures['output_throughput']:,.1f} tok/s, TTFT {_ms(figures, 'ttft')}, "
            f"TPOT {_ms(figures, 'tpot')}, ITL {_ms(figures, 'itl')} (median / p99 ms)"
        )
        tell(
            f"{side.name} {row.name}: {figures['num_prompts']} requests in "
            f"{figures['duration']:.1f} s, {said}"
        )
        if found.spread is False:
            tell(f"{side.name} {row.name}: does not count: {found.routing}")
        for sentence in warnings(figures):
            tell(f"{side.name} {row.name}: {sentence}")
        for cause, count in figures["failures"].items():
            tell(f"{side.name} {row.name}: {count} x {cause}")

    # ---- our steps without a server

    def _offline(self, count: int) -> None:
        """In the same call, so on the same card."""
        lengths = next(
            (row for row in self.asked.wanted if (row.kind, row.count) == ("closed", count)), None
        )
        if lengths is None:
            raise ConfigError(f"--offline {count}; accepted: the concurrency of a row asked for")
        if not self._fits(OFFLINE, reserve=False):
            return
        own = next((row for row in reversed(self.results.rows) if row.engine == OURS), None)
        if own is None:
            raise ConfigError(f"--offline {count}: no row of ours was measured to set it beside")
        path = self.scratch / "offline.json"
        command = [sys.executable, "-m", "rorqual", "bench", "offline", str(self.model.folder)]
        command += ["--weights", "random"] if self.model.random else []
        command += ["--concurrency", str(count), "--repeats", str(OFFLINE_REPEATS)]
        command += ["--prompt-len", str(lengths.input_len), "--output-len", str(lengths.output_len)]
        tell(f"offline: {' '.join(command)}")
        try:
            done = subprocess.run(
                [*command, "--json", str(path)],
                capture_output=True,
                text=True,
                timeout=self.left,
                check=False,
            )
        except subprocess.TimeoutExpired:
            tell("offline: not done within --budget")
            return
        if done.returncode:
            raise TargetError(f"bench offline ended with {done.returncode}:\n{done.stderr[-2000:]}")
        (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
        self.results.add(
            replace(
                own,
                call=self.name,
                date=datetime.now(UTC).isoformat(timespec="seconds"),
                commit=self.commit,
                card=self.card,
                model=self.model.name,
                engine=OFFLINE,
                row=lengths.name,
                command=command,
                api_us=None,
                figures={"step_ms": row["step_ms"], "concurrency": count},
            )
        )


def _ms(figures: Figures, name: str) -> str:
    pair = (figures[f"median_{name}_ms"], figures[f"p99_{name}_ms"])
    return " / ".join("n/a" if value is None else f"{value:.2f}" for value in pair)


def _version(facts: server_info.ServerFacts) -> str:
    for page in (facts.version, facts.info):
        if isinstance(page, dict) and isinstance(page.get("version"), str):
            return str(page["version"])
    return "unknown"


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)[:80]
