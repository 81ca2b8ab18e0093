"""Two routers before one server that computes prompts and one that answers, on a core each: the
first token of a stream comes from the former, or from the latter.

    python demo/first_token_routers.py --requests 40 --turns 3

Prints, for each load, medians of the turns, which the routers take: ms to the first token, from it
to the second, and between tokens.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from zlib import crc32

from served_load import made_prompts, running_router
from servers_on_cores import (
    PAGE,
    apart_options,
    apart_roles,
    measured,
    on_core,
    options,
    played,
    shapes_of,
)

from rorqual.bench.serving.client import RequestRecord
from rorqual.bench.serving.launched_server import launched_server
from rorqual.bench.serving.load import ArrivalLoad


def second_gap(records: list[RequestRecord]) -> float:
    """The median time from the first to the second token, in ms."""
    return 1e3 * median(record.itls[0] for record in records if record.itls)


def first_tokens(shapes: list[tuple[int, int]], asked: argparse.Namespace) -> None:
    """For each shape: requests one at a time, then at each rate."""
    longest = max(sum(shape) for shape in shapes) + PAGE
    cores = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        urls = []
        for core, role in zip(cores, apart_roles(folder), strict=True):
            with on_core(core):
                started = launched_server([*options(longest), *role])
                urls.append(stack.enter_context(started).url)
        prefill, decode = urls
        routers = {}
        for source in ("decode", "prefill"):
            given = apart_options(prefill, decode, source)
            log = folder / f"{source}.log"
            routers[source] = stack.enter_context(running_router(log, 2, 60, *given)).url
        for shape in shapes:
            for rate in (None, *asked.rates):
                first_tokens_of(routers, shape, rate, asked)


def first_tokens_of(
    routers: dict[str, str],
    shape: tuple[int, int],
    rate: float | None,
    asked: argparse.Namespace,
) -> None:
    """rate: requests/s; None: one at a time."""
    load = ArrivalLoad(1) if rate is None else ArrivalLoad(rate=rate)
    turns: dict[str, list[dict[str, float]]] = {source: [] for source in routers}
    for turn in range(-1, asked.turns):
        for source, url in list(routers.items())[:: 1 if turn % 2 else -1]:
            seed = crc32(f"{shape} {rate} {turn} {source}".encode())
            records = played(url, made_prompts(asked.requests, shape, seed), load)
            if turn >= 0:  # the first ones warm up
                turns[source].append({**measured(records), "second": second_gap(records)})
    label = "one at a time" if rate is None else f"{rate:g} requests/s"
    for source, found in turns.items():
        shown = "  ".join(
            f"{key} {median(one[key] for one in found):.1f}"
            for key in ("ttft_p50", "ttft_p99", "second", "itl_p50", "itl_p99", "tokens_s")
        )
        print(f"{shape[0]}:{shape[1]}, {label}, first token from {source}: {shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=60, help="of each run")
    parser.add_argument("--turns", type=int, default=3, help="medians are over so many")
    parser.add_argument("--shapes", default="1024:64,256:256", help="tokens in:out, ...")
    parser.add_argument("--rates", type=float, nargs="*", default=[7.2], help="requests/s")
    asked = parser.parse_args()
    print(f"medians of {asked.turns} turns, ms; load {os.getloadavg()}", flush=True)
    first_tokens(shapes_of(asked.shapes), asked)


if __name__ == "__main__":
    main()
