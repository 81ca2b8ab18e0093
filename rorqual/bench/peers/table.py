"""The comparison as Markdown: a line a row, ours, the peer's and the ratio; then the musts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rorqual.bench.peers.results import OFFLINE, OURS, Measured, Pair, Results, in_order
from rorqual.bench.peers.rows import Row, parse_rows
from rorqual.bench.serving.metrics import Figures
from rorqual.bench.serving.report import MISSING

COLUMNS = (
    ("out tok/s", "output_throughput", 0),
    ("TTFT p50 ms", "median_ttft_ms", 1),
    ("TTFT p99 ms", "p99_ttft_ms", 1),
    ("TPOT p50 ms", "median_tpot_ms", 2),
    ("TPOT p99 ms", "p99_tpot_ms", 2),
    ("ITL p50 ms", "median_itl_ms", 2),
    ("ITL p99 ms", "p99_itl_ms", 2),
)
LATENCIES = COLUMNS[1:]
MAX_MEAN = 1.0  # geometric mean of the latency cells, ours over the peer's
MAX_CELL = 1.1
MAX_API_US = 25.0
MAX_STEP = 1.03  # served over offline
MANY = 256  # requests at which the last two hold


@dataclass(frozen=True)
class Verdict:
    """ok: None where nothing was measured that says it."""

    what: str
    ok: bool | None
    found: str

    def __str__(self) -> str:
        word = "PASS" if self.ok else "MISS" if self.ok is False else "not measured"
        return f"- {word}: {self.what}: {self.found}"


def page(results: Results, model: str, peer: str, settings: str | None, wanted: str) -> str:
    """settings: of the peer; None for the best of each row. Only pairs whose routing is known not
    to have collapsed count."""
    found = results.best(model, peer) if settings is None else results.pairs(model, peer, settings)
    names = in_order(found, [row.name for row in parse_rows(wanted)])
    pairs = {name: found[name] for name in names}
    counted = {name: pair for name, pair in pairs.items() if _counts(pair)}
    title = f"## {model}: rorqual beside {peer}, {settings or 'the best settings of each row'}"
    parts = [title, "", *_table(pairs), ""]
    parts += [str(item) for item in verdicts(counted, _offline(results, model))]
    return "\n".join([*parts, "", *_notes(pairs)])


def alone(results: Results, model: str, wanted: str) -> str:
    """Our rows without a peer's, the last of each."""
    rows = {row.row: row for row in results.of(model, OURS)}
    names = in_order(rows, [row.name for row in parse_rows(wanted)])
    heads = ["row", *(label for label, _, _ in COLUMNS), "API us/token"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for name in names:
        cells = [_value(rows[name].figures.get(key), digits) for _, key, digits in COLUMNS]
        lines.append(_line([name, *cells, _value(rows[name].api_us, 1)]))
    lines += ["", *(str(item) for item in _served(rows, _offline(results, model)))]
    return "\n".join([f"## {model}: rorqual", "", *lines, "", *_sources(rows.values())])


def _counts(pair: Pair) -> bool:
    return pair.ours.spread is not False and pair.peer.spread is not False


# ---- the table


def _table(pairs: Mapping[str, Pair]) -> Iterator[str]:
    heads = ["row", *(label for label, _, _ in COLUMNS), "API us/token"]
    yield _line(heads)
    yield _line(["---"] * len(heads))
    for name, pair in pairs.items():
        cells = [_cell(pair, key, digits) for _, key, digits in COLUMNS]
        label = name if _counts(pair) else f"{name} (does not count)"
        yield _line([label, *cells, _value(pair.ours.api_us, 1)])
    yield ""
    yield "Each cell: ours / the peer's = ratio."


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(pair: Pair, key: str, digits: int) -> str:
    ours = pair.ours.figures.get(key)
    theirs = pair.peer.figures.get(key)
    ratio = _ratio(pair, key)
    shown = f"{_value(ours, digits)} / {_value(theirs, digits)}"
    return shown if ratio is None else f"{shown} = {ratio:.2f}"


def _value(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:,.{digits}f}"


def _ratio(pair: Pair, key: str) -> float | None:
    ours = pair.ours.figures.get(key)
    theirs = pair.peer.figures.get(key)
    return ours / theirs if ours and theirs else None


# ---- the musts


def verdicts(pairs: Mapping[str, Pair], offline: Mapping[str, Measured]) -> Iterator[Verdict]:
    for name, pair in pairs.items():
        least = _row(name).must
        ratio = _ratio(pair, "output_throughput")
        if least is not None and ratio is not None:
            yield Verdict(
                f"{name}, output tokens/s at least {least:.2f}x", ratio >= least, f"{ratio:.3f}x"
            )
    cells = {
        f"{name} {label}": ratio
        for name, pair in pairs.items()
        for label, key, _ in LATENCIES
        if (ratio := _ratio(pair, key)) is not None
    }
    yield from _latencies(cells)
    yield from _served({name: pair.ours for name, pair in pairs.items()}, offline)


def _latencies(cells: Mapping[str, float]) -> Iterator[Verdict]:
    mean = f"geometric mean of the latency cells at most {MAX_MEAN:.2f}"
    each = f"no latency cell above {MAX_CELL:.2f}"
    if not cells:
        yield Verdict(mean, None, "no pair counts")
        return
    found = math.exp(sum(map(math.log, cells.values())) / len(cells))
    yield Verdict(mean, found <= MAX_MEAN, f"{found:.3f} of {len(cells)}")
    worst = max(cells, key=lambda name: cells[name])
    above = sum(ratio > MAX_CELL for ratio in cells.values())
    yield Verdict(each, not above, f"{above} are, the worst {cells[worst]:.2f} ({worst})")


def _served(ours: Mapping[str, Measured], offline: Mapping[str, Measured]) -> Iterator[Verdict]:
    what = f"API processor time at {MANY} streams at most {MAX_API_US:.0f} us a token"
    many = [row for name, row in ours.items() if _many(name) and row.api_us is not None]
    found = ", ".join(f"{row.api_us:.1f} us ({row.row})" for row in many)
    ok = all((row.api_us or 0.0) <= MAX_API_US for row in many) if many else None
    yield Verdict(what, ok, found or "no such row")
    steps = {
        name: row.figures["median_itl_ms"] / offline[name].figures["step_ms"]
        for name, row in ours.items()
        if name in offline and row.figures.get("median_itl_ms") and _alike(row, offline[name])
    }
    for name, ratio in steps.items():
        step = offline[name].figures["step_ms"]
        what = f"{name}, served steps at most {MAX_STEP:.2f}x of offline's {step:.2f} ms"
        yield Verdict(what, ratio <= MAX_STEP, f"{ratio:.3f}x")
    if not steps:
        yield Verdict("served steps over offline's", None, f"ask with --offline {MANY}")


def _alike(served: Measured, offline: Measured) -> bool:
    return (served.card, served.commit) == (offline.card, offline.commit)


def _many(name: str) -> bool:
    row = _row(name)
    return row.kind == "closed" and row.count == MANY


def _row(name: str) -> Row:
    (row,) = parse_rows(name)
    return row


def _offline(results: Results, model: str) -> dict[str, Measured]:
    return {row.row: row for row in results.of(model, OFFLINE)}


# ---- a chart


def chart_series(
    results: Results, model: str, peer: str | None
) -> tuple[dict[str, list[Figures]], list[str]]:
    """Closed-loop rows of the lengths with most concurrencies, by engine, the peer's at its best
    settings; and their provenance."""
    pairs = results.best(model, peer) if peer else {}
    ours = {row.row: row for row in results.of(model, OURS)}
    kept = {name: pair.ours for name, pair in pairs.items() if _counts(pair)} if peer else ours
    theirs = {name: pair.peer for name, pair in pairs.items() if _counts(pair)}
    rows = [_row(name) for name in kept if _row(name).kind == "closed"]
    lengths = [row.lengths for row in rows]
    most = max(lengths, key=lengths.count, default=None)
    names = [row.name for row in sorted(rows, key=lambda row: row.count) if row.lengths == most]
    found = {OURS: [kept[name] for name in names]}
    if peer:
        found[peer] = [theirs[name] for name in names]
    sources = [*_sources(row for group in found.values() for row in group)]
    series = {
        f"{engine} {group[0].version}": [row.figures | {"model_id": model} for row in group]
        for engine, group in found.items()
        if group
    }
    return series, [line.removeprefix("- ") for line in sources]


# ---- provenance


def _notes(pairs: Mapping[str, Pair]) -> Iterator[str]:
    for name, pair in pairs.items():
        for side in (pair.ours, pair.peer):
            if side.spread is not True:
                word = "does not count" if side.spread is False else "routing not known"
                yield f"- {name}, {side.engine}: {word}: {side.routing}"
    yield from _sources(item for pair in pairs.values() for item in (pair.ours, pair.peer))


def _sources(rows: Iterable[Measured]) -> Iterator[str]:
    """One line per server start, with its rows."""
    groups: dict[tuple[object, ...], list[Measured]] = {}
    for row in rows:
        key = (row.call, row.engine, row.settings, row.prefix_cache)
        groups.setdefault(key, []).append(row)
    for found in groups.values():
        first = found[0]
        commit = f", commit {first.commit}" if first.engine == OURS and first.commit else ""
        names = ", ".join(row.row for row in found)
        cache = "with" if first.prefix_cache else "without"
        yield (
            f"- {first.engine} {first.version}{commit}, {first.settings}, {cache} prefix cache, "
            f"ready after {first.ready_seconds:.0f} s, {first.routing}; {first.card}, "
            f"{first.date[:10]}, call {first.call}: {names}"
        )
