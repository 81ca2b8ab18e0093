"""How late CUDA graphs begin that are launched behind others which have not begun, alone and with a
kernel after every few of them (`Platform.separate_graphs`).

    python demo/graph_starts.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

COUNTS = (20, 60, 100, 150, 300)
BEHIND = 20_000_000  # cycles for which the GPU is busy while graphs are launched
REPEATS = 5


def captured(work: Callable[[], object], pool: object) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        work()
    return graph


def microseconds(work: Callable[[], object]) -> float:
    """Of the GPU, which begins when all is launched."""
    found = []
    for _ in range(REPEATS):
        torch.cuda._sleep(BEHIND)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end))
    return statistics.median(found)


def main() -> None:
    x = torch.zeros(1 << 21, device="cuda")
    pool = torch.cuda.graph_pool_handle()
    graphs = [captured(lambda: x.add_(1), pool) for _ in range(max(COUNTS))]

    def replay(count: int, every: int) -> None:
        for number, graph in enumerate(graphs[:count], 1):
            graph.replay()
            if number % every == 0:
                x.add_(1)

    alone = microseconds(lambda: [x.add_(1) for _ in range(400)]) / 400
    print(f"{torch.cuda.get_device_name()}; one kernel takes {alone:.1f} us")
    names = ("graphs", "late by us", "with a kernel after every 6", "after every 1")
    print(f"{names[0]:>8}{names[1]:>12}{names[2]:>30}{names[3]:>16}")
    for count in COUNTS:
        found = []
        for every in (count + 1, 6, 1):
            total = microseconds(partial(replay, count, every))
            found.append((total - (count + count // every) * alone) / count)
        print(f"{count:8}{found[0]:12.1f}{found[1]:30.1f}{found[2]:16.1f}")


if __name__ == "__main__":
    main()
