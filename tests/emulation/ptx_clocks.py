"""What happened before what, for ptx_interpreter.py: vector clocks of warps, and of what works for
them while they go on.

Threads take turns here, so data would be right where a GPU would race. So whoever touches a byte
leaves its name and clock there, and every warp knows of each agent the last clock that certainly
came before. Two touches of a byte by two agents, one of them writing, of which the second does not
know the first, are a race, whatever the turns were. Lanes of a warp count as one.
"""

from __future__ import annotations

import numpy as np

# a warp's agents: itself, tensor cores, bulk stores' reading and their writing
OWN, PRODUCTS, BULK_READS, BULK_WRITES = range(4)
BARRIERS = 32  # a block; each stands for the bulk copies it counts


class Clocks:
    """known[row of a warp, agent]. Agents of block b: `each` from b * each on, kind after kind."""

    def __init__(self, blocks: int, warps: int):
        self.blocks = blocks
        self.warps = warps
        self.each = 4 * warps + BARRIERS
        self.known = np.zeros((blocks * warps, blocks * self.each), np.int32)
        rows = np.arange(blocks * warps)
        self.known[rows, self.agent(rows)] = 1

    def agent(self, row: np.ndarray, kind: int = OWN) -> np.ndarray:
        return row // self.warps * self.each + kind * self.warps + row % self.warps

    def agents(self, kind: int) -> np.ndarray:
        return self.agent(np.arange(self.blocks * self.warps), kind)

    def barrier_agent(self, block: int, index: int) -> int:
        assert index < BARRIERS, "more barriers of copies than are kept"
        return block * self.each + 4 * self.warps + index

    def now(self, row: np.ndarray) -> np.ndarray:
        return self.known[row, self.agent(row)]

    def release(self, rows: np.ndarray) -> np.ndarray:
        """What the warps know together; what they do from now on is not part of it."""
        together = self.known[rows].max(0)
        self.known[rows, self.agent(rows)] += 1
        return together

    def acquire(self, rows: np.ndarray, together: np.ndarray) -> None:
        self.known[rows] = np.maximum(self.known[rows], together)


class Watch:
    """The last write of each cell of some memory, and the last read by each of `readers`
    (agents)."""

    def __init__(self, clocks: Clocks, cells: int, readers: np.ndarray):
        self.clocks = clocks
        self.readers = readers
        self.column = {int(agent): i for i, agent in enumerate(readers)}
        self.columns = np.full(clocks.known.shape[1], -1)
        self.columns[readers] = np.arange(len(readers))
        self.writer = np.zeros(cells, np.int32)
        self.written = np.zeros(cells, np.int32)
        self.read_at = np.zeros((cells, len(readers)), np.int32)

    def unseen_writes(self, cells: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """rows: of the warps that touch the cells, which must broadcast to these."""
        return self.written[cells] > self.clocks.known[rows, self.writer[cells]]

    def unseen_reads(self, cells: np.ndarray | slice, rows: np.ndarray) -> bool:
        return bool((self.read_at[cells] > self.clocks.known[rows[..., None], self.readers]).any())

    def read(self, cells: np.ndarray, agents: np.ndarray, clocks: np.ndarray) -> None:
        self.read_at[cells, self.columns[agents]] = clocks

    def write(
        self, cells: np.ndarray | slice, agents: np.ndarray | int, clocks: np.ndarray | int
    ) -> None:
        self.writer[cells] = agents
        self.written[cells] = clocks
