"""What one `rorqual bench serve` does: connect, measure rows (one, a sweep, an SLO search),
print them, write JSON and charts."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rorqual.bench import provenance
from rorqual.bench.serving import compare, pareto, report, slo
from rorqual.bench.serving import server_info as server
from rorqual.bench.serving.client import Client, ServerTarget
from rorqual.bench.serving.load import ArrivalLoad
from rorqual.bench.serving.measure import Data, Method, ServingBench, warnings
from rorqual.bench.serving.metrics import Figures
from rorqual.bench.serving.progress import Progress
from rorqual.bench.serving.prompts import Vocabulary
from rorqual.bench.wide_console import wide_console
from rorqual.errors import ConfigError
from rorqual.models.hub import model_folder

CARD_KEYS = ("card", "gpu", "device_name", "device")  # of a server's configuration page
LOG_WIDTH = 170


@dataclass(frozen=True)
class SloSearch:
    """A search and its objective. seconds: no measurement is begun that, taking as long as the
    longest before it, would end later."""

    objective: slo.Objective
    state: slo.ConcurrencySearch
    seconds: float = math.inf

    @classmethod
    def parse(
        cls, text: str, start: int, most: int, probes: int, seconds: float = math.inf
    ) -> SloSearch:
        if not seconds > 0:
            raise ConfigError(f"slo_seconds={seconds}; must be above 0")
        return cls(slo.Objective.parse(text), slo.ConcurrencySearch(start, most, probes), seconds)


@dataclass(frozen=True)
class Outputs:
    """Files to write and what to say in them. `chart`: path without suffix; next to the JSON if
    None."""

    json: Path | None = None
    chart: Path | None = None
    label: str | None = None
    card: str | None = None
    info_path: str | None = None

    @property
    def chart_stem(self) -> Path | None:
        stem = self.chart or self.json
        return (
            None
            if stem is None
            else stem.with_suffix("")
            if stem.suffix in (".json", ".png", ".html")
            else stem
        )


@dataclass
class Session:
    """`run` returns whether all went well: no failed request, and the objective kept somewhere."""

    target: ServerTarget
    data: Data
    method: Method
    outputs: Outputs = field(default_factory=Outputs)
    as_text: bool = False
    tokenizer: str | None = None
    rows: list[Figures] = field(default_factory=list)
    facts: Figures = field(default_factory=dict)

    async def run(
        self, base: ArrivalLoad, counts: Sequence[int] = (), search: SloSearch | None = None
    ) -> bool:
        """`base` once, or at each of the concurrencies `counts`, or as `search` decides."""
        loads = [replace(base, concurrency=count) for count in counts] or ([] if search else [base])
        vocabulary = Vocabulary(
            model_folder(self.tokenizer, weights=False),
            self.as_text,
            self.tokenizer or "bundled with rorqual",
        )
        async with Client(self.target) as client:
            client.target = replace(
                self.target, model=self.target.model or await client.first_model()
            )
            bench = ServingBench(client, vocabulary, self.data, self.method, Progress(visible=True))
            self.facts = await self._provenance(client)
            for load in loads:
                await self._measure(bench, load, alone=len(loads) == 1 and search is None)
            found = await self._search(bench, search, base) if search else None
        if len(self.rows) > 1 or search is not None:
            self._show_many(found, search.objective.tps_user if search else None)
        return not any(row["failed"] for row in self.rows) and (
            found is None or found["max_concurrency"] is not None
        )

    async def _measure(self, bench: ServingBench, load: ArrivalLoad, alone: bool) -> Figures:
        row = await bench.measure(load)
        self.rows.append(row)
        self._tell(row, alone)
        if self.outputs.json:  # after every row: a sweep that is interrupted keeps what it has
            report.write_json(self.outputs.json, report.document(self.rows, self.facts))
        return row

    def _tell(self, row: Figures, alone: bool) -> None:
        if alone:
            print(report.result_table(row))
        name = (
            f"concurrency {row['max_concurrency']}: "
            if row["max_concurrency"] and not alone
            else ""
        )
        again = self.method.repeats > 1 and self.data.name in ("sharegpt", "trace")
        for sentence in warnings(row, again):
            print(f"warning: {name}{sentence}", file=sys.stderr)
        if row["failed"]:
            print(
                f"{name}{row['failed']} failed requests:\n{report.failures(row)}", file=sys.stderr
            )

    async def _search(self, bench: ServingBench, search: SloSearch, base: ArrivalLoad) -> Figures:
        """Rows of a sweep count as answers already given."""
        state = search.state
        objective = search.objective
        by_concurrency = {
            row["max_concurrency"]: row for row in self.rows if row["max_concurrency"]
        }
        state.known |= {count: objective.kept(row) for count, row in by_concurrency.items()}
        began = last = time.monotonic()
        longest = 0.0
        while (count := state.next()) is not None:
            if longest and last + longest - began > search.seconds:
                break
            row = by_concurrency[count] = await self._measure(
                bench, replace(base, concurrency=count), alone=False
            )
            row["slo_probe"] = True
            state.tell(count, objective.kept(row))
            longest = max(longest, time.monotonic() - last)
            last = time.monotonic()
        self.rows.sort(key=lambda row: row["max_concurrency"] or 0)
        best, broken = state.bracket
        chosen = by_concurrency.get(best, {})
        chosen["slo_choice"] = True
        kept = (
            "output_throughput",
            "output_throughput_per_gpu",
            "tps_user",
            "median_ttft_ms",
            "median_tpot_ms",
            "request_throughput",
        )
        return {
            "objective": str(objective),
            "max_concurrency": best,
            **{key: chosen.get(key) for key in kept},
            "lowest_that_breaks_it": broken,
            "broken_by": objective.broken_by(by_concurrency[broken]) if broken is not None else [],
            "out_of_time": count is not None,
            "probes": [
                {"concurrency": count, "kept": ok} for count, ok in sorted(state.known.items())
            ],
        }

    def _show_many(self, found: Figures | None, limit: float | None) -> None:
        title = (
            f"{self.rows[0]['model_id']}, {self.data.name}, "
            f"{self.data.lengths.input_len}/{self.data.lengths.output_len} tokens in/out"
        )
        table = report.sweep_table(self.rows, title, found["max_concurrency"] if found else None)
        wide_console(LOG_WIDTH).print(table)
        if found:
            print(report.verdict(found))
        if self.outputs.json:
            report.write_json(self.outputs.json, report.document(self.rows, self.facts, found))
        if (stem := self.outputs.chart_stem) is not None:
            write_charts(
                {self.outputs.label or "this server": self.rows}, stem, self._notes(), limit
            )
        else:
            print(
                "pass --json or --chart to keep the results and draw the Pareto chart",
                file=sys.stderr,
            )

    def _notes(self) -> list[str]:
        client = self.facts["client"]
        card = self.facts["server"]["card"]
        commit = f", commit {client['git_commit']}" if client["git_commit"] else ""
        version = self.facts["server"]["version"]
        return [
            f"Measured {client['date']} with rorqual {client['rorqual']}{commit}: "
            f"{' '.join(client['command'])}",
            f"Server: {self.target.base_url}, version "
            f"{version if version is not None else report.MISSING}, card "
            f"{card or report.MISSING}",
        ]

    async def _provenance(self, client: Client) -> Figures:
        own = await server.facts(client, self.outputs.info_path)
        info = own.info if isinstance(own.info, dict) else {}
        stated = self.outputs.card or next((info[key] for key in CARD_KEYS if info.get(key)), None)
        cards = stated or (
            provenance.local_cards() if server.is_local(self.target.base_url) else None
        )
        return {
            "client": provenance.client_facts(),
            "server": {"base_url": self.target.base_url, "card": cards, **asdict(own)},
            "label": self.outputs.label,
            "seed": self.method.seed,
        }


def compare_files(files: Sequence[Path], gpus: int | None, chart: Path | None) -> None:
    """Several result files: a table with ratios and, if `chart` names a place, one chart of all."""
    if len(files) < 2:
        raise ConfigError(f"--compare needs two result files or more; given: {len(files)}")
    results = compare.read(files, gpus)
    wide_console(LOG_WIDTH).print(compare.table(results))
    if chart is not None:
        write_charts(
            results,
            Outputs(chart=chart).chart_stem or chart,
            [f"{name}: {path}" for name, path in zip(results, files, strict=True)],
        )


def write_charts(
    results: dict[str, list[Figures]], stem: Path, notes: Sequence[str], limit: float | None = None
) -> None:
    try:
        drawn = pareto.chart(results, limit)
    except ConfigError as error:
        print(f"no chart: {error}", file=sys.stderr)
        return
    png = stem.with_name(stem.name + ".png")
    page = stem.with_name(stem.name + ".html")
    pareto.write_html(drawn, page, notes)
    pareto.write_png(drawn, png)
    print(f"charts: {png}, {page}", file=sys.stderr)
