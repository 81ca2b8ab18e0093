"""Executes PTX that Triton made for Hopper, without a GPU: what layouts, swizzles, descriptors and
assembler really do to data.

Blocks of threads on numpy arrays. The threads of a block run in lockstep until warps take different
branches; from then on their parts take turns, as blocks do: one after the other until it has to
wait, or by lot. What is asynchronous is done at once; ptx_memory.py, ptx_global.py and
ptx_products.py say whether it was awaited, by what ptx_clocks.py knows to have happened before,
whatever the turns were.

Not modelled: lanes of a warp that take different branches, clusters, caches, how long anything
takes, the tensor cores' rounding (sums of a product are exact to fp32).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tests.emulation.ptx_block import Block
from tests.emulation.ptx_clocks import Clocks
from tests.emulation.ptx_global import GlobalMemory
from tests.emulation.ptx_memory import SharedMemory, TensorMap
from tests.emulation.ptx_registers import Program

STEPS = 20_000_000  # instructions of all programs together, after which they are taken not to end


@dataclass(eq=False)
class Part:
    """Threads of a block that are at the same instruction."""

    threads: np.ndarray
    at: int = 0
    barrier: int | None = None  # waits there for others


class Running:
    """A block under way."""

    def __init__(self, block: Block):
        self.block = block
        self.parts = [Part(np.ones(block.threads, np.bool_))]
        self.arrivals: dict[int, int] = {}
        # a thread's, of each warp
        self.registers = {int(w): block.code.registers for w in range(block.threads // 32)}

    def step(self, part: Part, budget: int) -> int:
        """Until the part has to wait, ends or splits, or the budget is spent. Returns how many
        instructions there were."""
        block = self.block
        code = self.block.code
        block.active = part.threads
        for done in range(budget):
            guard, op, text = code.instructions[part.at]
            mask = part.threads & block.guarded(guard) if guard else part.threads
            jump = JUMPS.get(op.partition(".")[0]) or (
                JUMPS["wait"] if op.startswith(("mbarrier.try_wait", "setmaxnreg")) else None
            )
            if jump is None or op.startswith("bar.warp"):
                part.at += 1
                if mask.any():
                    block.execute(op, text, mask)
            elif not jump(self, part, op, text, mask):
                return done
            elif part not in self.parts or part.barrier is not None:
                return done + 1
        return budget

    # ---- instructions after which a part may not simply go on; False: it waits

    def branch(self, part: Part, op: str, text: list[str], mask: np.ndarray) -> bool:
        if op.startswith("brx"):
            table = self.block.code.tables[text[1]]
            index = self.block.get(text[0], "u32")
            self._split(
                part,
                [
                    (mask & (index == i), self.block.code.labels[name])
                    for i, name in enumerate(table)
                ],
            )
        else:
            self._split(part, [(mask, self.block.code.labels[text[0]] if mask.any() else 0)])
        return True

    def _split(self, part: Part, ways: list[tuple[np.ndarray, int]]) -> None:
        left = part.threads.copy()
        found = []
        for threads, at in ways:
            if threads.any():
                self.block.whole_warps(threads)
                found.append((threads, at))
                left &= ~threads
        if left.any():
            found.append((left, part.at + 1))
        part.threads, part.at = found[0]
        self.block.active = part.threads
        self.parts += [Part(*way) for way in found[1:]]

    def end(self, part: Part, op: str, text: list[str], mask: np.ndarray) -> bool:
        assert (mask == part.threads).all(), "threads end by themselves"
        self.block.shared.nothing_under_way(part.threads)
        self.parts.remove(part)
        return True

    def meet(self, part: Part, op: str, text: list[str], mask: np.ndarray) -> bool:
        """bar.sync: those who wait there go on together once enough have come."""
        self.block.whole_warps(part.threads)
        which = int(text[0])
        count = int(text[1]) if len(text) > 1 else self.block.threads
        part.at = part.at + 1
        part.barrier = which
        waiting = [p for p in self.parts if p.barrier == which]
        come = sum(int(p.threads.sum()) for p in waiting)
        assert come <= count, "more threads than the barrier counts"
        if come < count:
            return True
        shared = self.block.shared
        rows = np.unique(shared.row[np.logical_or.reduce([p.threads for p in waiting])])
        shared.clocks.acquire(rows, shared.clocks.release(rows))
        for _, group in itertools.groupby(sorted(waiting, key=lambda p: p.at), key=lambda p: p.at):
            first, *others = group
            first.barrier = None
            for other in others:
                first.threads = first.threads | other.threads
                self.parts.remove(other)
        return True

    def wait(self, part: Part, op: str, text: list[str], mask: np.ndarray) -> bool:
        if op.startswith("setmaxnreg"):
            wanted = int(text[0])
            own = [int(w) for w in np.flatnonzero(part.threads.reshape(-1, 32).all(1))]
            after = self.registers | dict.fromkeys(own, wanted)
            assert ("inc" in op) == (wanted >= self.registers[own[0]]) or wanted == self.registers[
                own[0]
            ], (op, wanted)
            if 0 < self.block.code.registers * len(after) < sum(after.values()):
                return False
            self.registers = after
        elif not self.block.tried(text, part.threads):
            return False
        part.at += 1
        return True


JUMPS: dict[str, Callable[..., bool]] = {
    "bra": Running.branch,
    "brx": Running.branch,
    "ret": Running.end,
    "exit": Running.end,
    "bar": Running.meet,
    "barrier": Running.meet,
    "wait": Running.wait,
}


@dataclass
class Launch:
    """arguments: what the kernel takes at run time; a TensorMap stands for a descriptor with its
    shape and strides. after: which launch of the same Grid has to be complete, if any."""

    ptx: str
    shared: int
    grid: tuple[int, ...]
    arguments: Sequence[Any]
    after: int | None = None

    def given(self) -> list[Any]:
        # no scratch
        return [
            part
            for x in self.arguments
            for part in ([x, 0, 0, 0, 0] if isinstance(x, TensorMap) else [x])
        ] + [0, 0]


class Grid:
    """Programs of one or more launches that run at the same time, over the same memory."""

    def __init__(
        self,
        launches: Sequence[Launch],
        watched: Sequence[Tensor],
        early: Sequence[Tensor] = (),
        counts: Sequence[int] = (),
        ended: Sequence[Tensor] = (),
        steps: int = STEPS,
    ):
        self.steps = steps
        codes = {launch.ptx: Program(launch.ptx) for launch in launches}
        self.launches = launches
        self.programs = [
            (i, place)
            for i, launch in enumerate(launches)
            for place in itertools.product(*map(range, launch.grid))
        ]
        self.codes = [codes[launch.ptx] for launch in launches]
        self.clocks = Clocks(len(self.programs), max(code.threads for code in self.codes) // 32)
        given = [
            x.rows if isinstance(x, TensorMap) else x
            for launch in launches
            for x in launch.arguments
        ]
        self.memory = GlobalMemory(
            [x for x in given if isinstance(x, Tensor)] + list(watched),
            watched,
            early,
            self.clocks,
            counts,
            ended,
        )
        self.products = 0

    def rows(self, launch: int) -> np.ndarray:
        """In the clocks."""
        mine = np.flatnonzero([i == launch for i, _ in self.programs])
        return (mine[:, None] * self.clocks.warps + np.arange(self.clocks.warps)).reshape(-1)

    def start(self, index: int) -> Running:
        which, place = self.programs[index]
        launch = self.launches[which]
        code = self.codes[which]
        arguments = self.launches[which].given()
        assert len(arguments) == len(code.parameters), (len(arguments), code.parameters)
        shared = SharedMemory(launch.shared, self.clocks, index, code.threads)
        if launch.after is not None:
            before = self.clocks.known[self.rows(launch.after)].max(0)
            self.clocks.acquire(np.unique(shared.row), before)
        return Running(Block(code, arguments, place, launch.grid, shared, self.memory))

    def in_turn(self, order: Sequence[int]) -> None:
        """Each program to its end; within it, each part until it has to wait. `order` keeps to
        what launches come after."""
        left = self.steps
        for index in order:
            running = self.start(index)
            while running.parts:
                done = sum(
                    running.step(part, left)
                    for part in list(running.parts)
                    if part in running.parts and part.barrier is None
                )
                left -= done
                assert left > 0, "the programs do not end"
                assert done, "everyone waits"
            self.products += running.block.products

    def by_lot(self, seed: int) -> None:
        """Programs and their parts mixed, for some instructions each; bulk copies land in any
        order."""
        lot = random.Random(seed)
        idle = 0
        left = self.steps
        waiting = list(range(len(self.programs)))
        running = dict[int, Running]()
        # programs that have not ended
        to_come = [int(np.prod(launch.grid)) for launch in self.launches]
        while waiting or running:
            for index in [
                i
                for i in waiting
                if (after := self.launches[self.programs[i][0]].after) is None
                or to_come[after] == 0
            ]:
                running[index] = self.start(index)
                running[index].block.shared.lot = lot
                waiting.remove(index)
            index = lot.choice(list(running))
            one = running[index]
            part = lot.choice(one.parts)
            done = 0 if part.barrier is not None else one.step(part, lot.choice((1, 10, 100, 1000)))
            left = left - done
            idle = 0 if done else idle + 1
            assert idle < 1000 * len(running), "everyone waits"
            assert left > 0, "the programs do not end"
            if not one.parts:
                assert not one.block.shared.flying, "ends before a copy has landed"
                del running[index]
                to_come[self.programs[index][0]] -= 1
                self.products += one.block.products


def run(
    ptx: str,
    shared: int,
    grid: tuple[int, ...],
    arguments: Sequence[Any],
    watched: Sequence[Tensor] = (),
    seed: int | None = None,
    backwards: bool = False,
    early: Sequence[Tensor] = (),
    steps: int = STEPS,
) -> int:
    """One launch. watched: tensors that programs write and that others may touch; early: what no
    kernel before writes. seed: by lot; else in turn. steps: more of them are taken for a loop
    without end. Returns how many products (of one warpgroup's instructions) there were."""
    found = Grid([Launch(ptx, shared, grid, arguments)], watched, early, steps=steps)
    if seed is None:
        found.in_turn(range(len(found.programs))[:: -1 if backwards else 1])
    else:
        found.by_lot(seed)
    return found.products
