"""What `rorqual simulate` prints: one screen of latencies, rates, queues and use of resources."""

from __future__ import annotations

from statistics import fmean

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rorqual.planner.simulator.results import Outcome, Percentiles
from rorqual.planner.simulator.simulator import Simulation
from rorqual.planner.simulator.timeline import Timeline

MOST_INCIDENTS = 20


def show(simulation: Simulation, found: Outcome, console: Console | None = None) -> None:
    console = console or Console(width=None if Console().is_terminal else 140)
    console.print(render(simulation, found))


def render(simulation: Simulation, found: Outcome) -> RenderableType:
    parts: list[RenderableType] = [
        Text(_heading(simulation, found)),
        Text(_rates(found)),
        _latencies(found),
    ]
    for pool, timeline in zip(simulation.deployment.pools, simulation.timelines, strict=True):
        parts.append(Text(f"\n{pool.name}: {_pool(timeline, found.utilization[pool.name])}"))
    parts += [Text(line) for line in _balance(found)]
    parts += [Text(line) for line in _incidents(simulation, found)]
    return Group(*parts)


def _balance(found: Outcome) -> list[str]:
    """Of all replicas together; the JSON has each."""
    if not found.balance:
        return []
    least, mean = (
        min(b.balancedness for b in found.balance),
        fmean(b.balancedness for b in found.balance),
    )
    return [
        f"experts: balancedness at the end {mean:.3f} in the mean, {least:.3f} at least; "
        f"{sum(b.rebalances for b in found.balance)} rebalances, "
        f"{sum(b.moves for b in found.balance)} moves, "
        f"{sum(b.slots for b in found.balance):,} slots"
    ]


def _incidents(simulation: Simulation, found: Outcome) -> list[str]:
    incidents = simulation.incidents
    lines = [f"{one.at:10.1f} s  {one.text}" for one in incidents[:MOST_INCIDENTS]]
    if len(incidents) > MOST_INCIDENTS:
        lines.append(f"and {len(incidents) - MOST_INCIDENTS} more, in the JSON")
    if found.moved:
        lines.append(f"{found.moved:,} times a request went on elsewhere after a death")
    return lines


def _heading(simulation: Simulation, found: Outcome) -> str:
    pools = ", ".join(
        f"{pool.name} {pool.replicas} x {pool.gpus} GPUs ({pool.ranks} ranks of "
        f"{pool.scheduler.max_num_seqs} sequences, "
        f"{(pool.scheduler.num_pages - 1) * pool.scheduler.page_size:,} tokens of cache)"
        for pool in simulation.deployment.pools
    )
    refused = f", {found.refused} refused" if found.refused else ""
    return (
        f"{found.requests:,} requests in {found.seconds:.1f} s{refused}, seed "
        f"{simulation.seed}\n{found.gpus:.4g} GPUs: {pools}"
    )


def _rates(found: Outcome) -> str:
    reused = found.reused_tokens / max(1, found.prompt_tokens + found.recomputed_tokens)
    user = (
        f", {found.rate_per_user:.1f} for a user (1 / median TPOT)" if found.rate_per_user else ""
    )
    lines = [
        f"output tokens/s: {found.output_rate:,.0f} in all, "
        f"{found.output_rate_per_gpu:,.1f} a GPU{user}; "
        f"prompts and outputs: {found.total_rate_per_gpu:,.1f} a GPU",
        f"found in the prefix cache: {reused:.1%} of prompt tokens; preemptions: "
        f"{found.preemptions}",
    ]
    if found.accepted:
        lines.append(
            "drafts accepted by place: " + ", ".join(f"{share:.3f}" for share in found.accepted)
        )
    return "\n".join(lines)


def _latencies(found: Outcome) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for index, column in enumerate(("milliseconds", "mean", "p50", "p90", "p99")):
        table.add_column(column, justify="right" if index else "left")
    rows: list[tuple[str, Percentiles | None]] = [
        ("queue", found.queue),
        ("TTFT", found.ttft),
        ("TPOT", found.tpot),
        ("ITL", found.itl),
        ("E2E", found.e2e),
    ]
    for name, spread in rows:
        if spread is not None:
            table.add_row(
                name,
                *(
                    f"{value * 1e3:,.2f}"
                    for value in (spread.mean, spread.p50, spread.p90, spread.p99)
                ),
            )
    return table


def _pool(timeline: Timeline, used: dict[str, float]) -> str:
    shares = ", ".join(f"{name} {share:.1%}" for name, share in used.items())
    waiting, running = (max(values, default=0) for values in (timeline.waiting, timeline.running))
    mean = timeline.rows / max(1, timeline.steps)
    return (
        f"busy {shares}; {timeline.steps:,} steps of {mean:.1f} decoding rows; at most "
        f"{waiting:,} waiting, {running:,} running"
    )
