"""Log lines of what `micro_batches="auto"` measured and decides. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from rorqual.engine.micro_batches.policy import MARGIN, best_parts
from rorqual.engine.micro_batches.step_times import MS, MeasuredSize, StepTimes

COLUMNS = (
    "phase",
    "tokens",
    "exchange",
    "compute",
    "wire",
    "pass in 1, 2, ... parts",
    "noise",
    "parts",
)


def lines(times: StepTimes) -> Iterator[str]:
    """A table by phase and size."""
    yield (
        f"micro-batches: auto, measured in {times.seconds:.1f} s; tokens of a data-parallel rank; "
        "compute and wire of one layer, passes, in ms; a step is cut for a predicted gain above "
        f"{MARGIN:.0%} and the noise"
    )
    rows: list[tuple[str, ...]] = [COLUMNS]
    for name, phase in (("decode", times.decode), ("prompts", times.prompts)):
        if phase.reason:
            yield f"{name}: 1 part: {phase.reason}"
        rows += [(name, *_row(times, size, name == "decode")) for size in phase.sizes]
    if len(rows) == 1:
        return
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    for row in rows:
        yield "  ".join(text.rjust(wide) for text, wide in zip(row, widths, strict=True)).rstrip()


def _row(times: StepTimes, size: MeasuredSize, decodes: bool) -> tuple[str, ...]:
    return (
        str(size.tokens),
        size.exchange,
        f"{size.compute * MS:.3f}",
        f"{size.wire * MS:.3f}",
        " ".join(f"{seconds * MS:.2f}" for seconds in size.passes),
        f"{max(size.noise, default=0.0):.0%}",
        str(parts_of(times, size, decodes)),
    )


def parts_of(times: StepTimes, size: MeasuredSize, decodes: bool) -> int:
    """The number of parts chosen for a step of a measured size."""
    return best_parts(times, (size.lengths,), (size.tokens if decodes else 0,))
