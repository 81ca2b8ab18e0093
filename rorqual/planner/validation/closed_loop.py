"""TTFT and TPOT of a benchmark with a fixed number of clients, simulated with a step model. No
torch.

Each client sends its next request when the previous one is answered. Prompts queue and have
priority, up to `max_chunk` tokens per step, as in engines that do not mix phases; with mixed chunks
they share steps with decoding requests. Lengths are uniform between `ratio` and 1 times the nominal
ones, from a fixed seed. This is a queue around `StepModel.step`, not the engine's scheduler.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from statistics import fmean

from rorqual.planner.costs.costs import BatchShape, GroupWork
from rorqual.planner.timing.roofline import StepModel


@dataclass
class LoopRequest:
    prompt: int
    output: int
    arrived: float
    computed: int = 0
    made: float = 0.0
    first: float = 0.0
    done: float = 0.0


@dataclass(frozen=True)
class Loop:
    """Concurrent clients of one attention group; requests in all; nominal prompt and output
    lengths; num_speculative_tokens drafts, of which a step accepts `accepted` besides its own
    token."""

    clients: int
    prompt: int
    output: int
    requests: int = 0
    ratio: float = 1.0
    num_speculative_tokens: int = 0
    accepted: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class LoopResult:
    """Seconds; means over requests; output tokens a second of the group."""

    ttft: float
    tpot: float
    throughput: float
    batch: float


class _State:
    def __init__(self, model: StepModel, loop: Loop):
        self.model = model
        self.loop = loop
        self.clock = 0.0
        self.random = random.Random(loop.seed)
        self.left = loop.requests or 10 * loop.clients
        self.waiting: deque[LoopRequest] = deque()
        self.running: list[LoopRequest] = []
        self.finished: list[LoopRequest] = []
        self.batch_seconds = 0.0
        for _ in range(min(loop.clients, self.left)):
            self.send()

    def send(self) -> None:
        if not self.left:
            return
        self.left -= 1
        loop = self.loop
        draw = self.random
        lengths = [
            max(1, round(nominal * draw.uniform(loop.ratio, 1)))
            for nominal in (loop.prompt, loop.output)
        ]
        self.waiting.append(LoopRequest(lengths[0], lengths[1], self.clock))

    def take_prompts(self, room: int) -> list[tuple[LoopRequest, int]]:
        """Chunks of waiting prompts, in order."""
        taken = []
        for request in self.waiting:
            chunk = min(request.prompt - request.computed, room)
            if chunk <= 0:
                break
            taken.append((request, chunk))
            room -= chunk
        return taken

    def step(self) -> None:
        profile = self.model.profile
        chunks = self.take_prompts(
            profile.max_chunk - (len(self.running) if profile.mixed_chunks else 0)
        )
        decoding = self.running if not chunks or profile.mixed_chunks else []
        work = self.work(decoding, chunks)
        seconds = self.model.step(work).seconds
        self.batch_seconds += seconds * len(decoding)
        self.clock += seconds
        self.prefilled(chunks)
        if decoding:
            self.decoded(list(decoding))

    def work(self, decoding: list[LoopRequest], chunks: list[tuple[LoopRequest, int]]) -> GroupWork:
        """Equal requests of the mean context; contexts are rounded so that steps repeat. The
        mean chunk of equal prompts."""
        loop = self.loop
        decode = None
        if decoding:
            context = (
                fmean(request.prompt + request.made for request in decoding)
                + 1
                + loop.num_speculative_tokens
            )
            decode = BatchShape.verify(
                len(decoding),
                max(loop.num_speculative_tokens + 1, round(context / 64) * 64),
                loop.num_speculative_tokens,
            )
        prefill = tuple(
            BatchShape(1, round(chunk / 32) * 32 or chunk, request.computed)
            for request, chunk in chunks
        )
        return GroupWork(decode, prefill, drafts=loop.num_speculative_tokens if decode else 0)

    def prefilled(self, chunks: list[tuple[LoopRequest, int]]) -> None:
        for request, chunk in chunks:
            request.computed += chunk
            if request.computed >= request.prompt:
                self.waiting.remove(request)
                request.made = 1.0
                request.first = self.clock
                self.running.append(request)

    def decoded(self, decoding: list[LoopRequest]) -> None:
        for request in decoding:
            request.made += 1 + self.loop.accepted
            if request.made >= request.output:
                request.done = self.clock
                self.running.remove(request)
                self.finished.append(request)
                self.send()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)


def play(model: StepModel, loop: Loop) -> LoopResult:
    """Run to the end. Requests with one output token have no TPOT and count only for TTFT."""
    state = _State(model, loop)
    while state.busy:
        state.step()
    late = model.profile.first_token_us * 1e-6
    decode = (
        model.step(GroupWork(BatchShape.decode(max(1, loop.clients - 1), loop.prompt))).seconds
        if loop.clients > 1
        else 0.0
    )
    # steps that were launched before the prompt was seen
    late += model.profile.queued_steps * decode
    ttft = [request.first - request.arrived + late for request in state.finished]
    tpot = [
        (request.done - request.first) / (request.output - 1)
        for request in state.finished
        if request.output > 1
    ]
    made = sum(request.output for request in state.finished)
    return LoopResult(
        fmean(ttft),
        fmean(tpot) if tpot else 0.0,
        made / state.clock,
        state.batch_seconds / state.clock,
    )
