"""Times decode steps at batch sizes that captured graphs pad, with padding rows left out of the
experts, as the engine does, and counted as requests, and prints how many experts a layer reads.

    python demo/padded_batches.py qwen3-30b-a3b
    python demo/padded_batches.py deepseek-v2-lite --layers 8 --requests 3,5,9 --json padded.json

The model has random weights, and prompts are random token ids. Both ways replay the same graphs in
turns; only the number of requests that they find on the device differs. Experts are those that one
step chooses, averaged over layers, without shared experts. A CPU has no graphs: there the same
steps are computed operation by operation, which shows the number of experts, but no time worth
reporting.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from graphs_in_turns import DEPTH, WARM, GraphsInTurns, keep, options

from rorqual import SamplingParams
from rorqual.bench.offline.steady_state import steady_state_steps
from rorqual.engine.execution.cuda_graphs import DecodeGraphs
from rorqual.layers.moe import MoE
from rorqual.platforms.base import Uncaptured

BATCH = 16  # least max_num_seqs: it is a captured size


@dataclass
class Padded:
    """rows: of the graph. experts: of a layer, of the requests alone and with those of padding
    rows. ms: of a step, with padding left out, as the engine does it, and counted as requests."""

    requests: int
    rows: int
    experts: float
    counted_experts: float
    ms: float
    counted_ms: float


class Steps(GraphsInTurns):
    def __init__(self, asked: argparse.Namespace):
        most = max(asked.requests)
        # of a request, while all are there
        tokens = most + 4 + 2 * asked.turns * (asked.steps + WARM + DEPTH)
        super().__init__(asked, max(BATCH, most), tokens)
        self.eager = self._graphs()
        self.graphs = self.runner.graphs = self.runner.graphs or self.eager

    def _graphs(self) -> DecodeGraphs:
        """Graphs' steps without a capture."""
        runner = self.runner
        padding = runner.rows.padding
        return DecodeGraphs(runner._decode_body, Uncaptured(runner.platform), padding, padding)

    def measure(self, count: int) -> Padded:
        params = SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True)
        times: dict[bool, list[float]] = {False: [], True: []}
        with steady_state_steps(self.engine, self.prompts(count), params):
            experts = self.experts(count)
            for _ in range(self.asked.turns):
                for counted, found in times.items():
                    with self.padding(self.graphs, counted):
                        found.append(self.seconds())
        ms = (1e3 * statistics.median(found) for found in times.values())
        return Padded(count, self.graphs.bucket(count), *experts, *ms)

    @contextmanager
    def padding(self, graphs: DecodeGraphs, counted: bool) -> Iterator[None]:
        """Inside, steps are those of `graphs`, where padding may be `counted` among the
        requests."""
        given_for = graphs.given_for

        def given(slots: list[int], size: int) -> list[int]:
            found = given_for(slots, size)
            return [size if counted else found[0], *found[1:]]

        self.use(graphs)
        with mock.patch.object(graphs, "given_for", given):
            yield
            self.drain()
        self.runner.graphs = self.graphs

    def experts(self, count: int) -> tuple[float, float]:
        """Of one step with all rows counted: a layer's experts of the first `count` rows, and of
        all."""
        chosen: list[torch.Tensor] = []
        route = MoE.route

        def recorded(layer: MoE, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
            ids, weights = route(layer, *given)
            chosen.append(ids[:, : layer.moe.top_k].clone())
            return ids, weights

        apart = property(lambda layer: False)  # the router as an operation of its own
        with (
            self.padding(self.eager, counted=True),
            mock.patch.object(MoE, "route", recorded),
            mock.patch.object(MoE, "is_one_op", apart),
        ):
            self.engine.launch()
            self.drain()
        return (
            statistics.mean(len(ids[:count].unique()) for ids in chosen),
            statistics.mean(len(ids.unique()) for ids in chosen),
        )


def main(words: list[str] | None = None) -> list[Padded]:
    parser = options(__doc__.split("\n\n")[0], "1,2,3,4,5,6,7,8,9")
    asked = parser.parse_args(words)
    steps = Steps(asked)
    print(f"{steps.engine.platform.describe()}: {asked.model}, ms a step, experts a layer")
    print(
        f"{'requests':>9}{'rows':>6}{'experts':>9}{'counted':>9}{'ms':>9}{'counted':>9}{'ratio':>8}"
    )
    found = []
    for count in asked.requests:
        row = steps.measure(count)
        found.append(row)
        print(
            f"{row.requests:9}{row.rows:6}{row.experts:9.1f}{row.counted_experts:9.1f}"
            f"{row.ms:9.3f}{row.counted_ms:9.3f}{row.counted_ms / row.ms:8.3f}",
            flush=True,
        )
    keep(asked, found)
    return found


if __name__ == "__main__":
    main()
