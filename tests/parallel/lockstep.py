"""Data-parallel ranks in step, in one process: one scheduler, a model runner for each rank, and a
log of the collectives that each of them starts.

Every rank is alone with copies of its own rows (FakeAxis), so its tokens mean nothing. Which
collectives run, in which order and of which sizes, does not depend on tokens, and is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, zip_longest
from typing import Any

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.cache.spec import kv_spec
from rorqual.config.model import ModelConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.engine.distributed.codec import decode_output, encode_output
from rorqual.engine.execution.cuda_graphs import CAPTURED
from rorqual.engine.execution.draft_controller import draft_count_choices
from rorqual.engine.execution.drafters import Speculation
from rorqual.engine.execution.model_runner import ModelRunner
from rorqual.engine.scheduling.dp_scheduler import DataParallelOutput, DataParallelScheduler
from rorqual.engine.scheduling.scheduler import SchedulerConfig
from rorqual.engine.scheduling.scheduler_output import StepResult
from rorqual.layers.parameter import Build
from rorqual.models.loader import random_weights
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.ops.select import ops_for
from rorqual.parallel.collectives import AddNormFn, NullAxis, PendingCollective, Ready
from rorqual.parallel.fake_axis import FakeAxis
from rorqual.parallel.mesh import AXES, Mesh, members
from rorqual.parallel.shard import Shard
from rorqual.request import Request, SamplingParams
from tests.engine.execution.replaying import ReplayingPlatform

CPU = torch.device("cpu")
PAGE = 4
LONGEST = 64
Results = dict[int, StepResult]
BESIDE = ("pp", "tokens")  # what stages send each other overtakes what the ranks of a stage do


@dataclass(frozen=True)
class Settings:
    """num_speculative_tokens drafts a step by `drafter`, draft_counts in turn if given;
    cudagraph_capture_sizes None: no graphs."""

    num_speculative_tokens: int = 0
    drafter: str = "mtp"
    window: bool = True
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    draft_counts: tuple[int, ...] = ()
    chunked_prefill_size: int | None = 7
    piecewise_tokens: int = 0
    rates: tuple[float, ...] = ()

    @property
    def speculation(self) -> Speculation | None:
        if not self.num_speculative_tokens:
            return None
        return Speculation(self.drafter, self.num_speculative_tokens, self.window, self.rates)

    @property
    def with_mtp(self) -> bool:
        return self.num_speculative_tokens > 0 and self.drafter == "mtp"

    def scheduler(self, model: ModelConfig) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=LONGEST,
            num_pages=8 * LONGEST // PAGE + 1,
            page_size=PAGE,
            prefix_caching=False,
            chunked_prefill_size=self.chunked_prefill_size,
            num_speculative_tokens=self.num_speculative_tokens,
            lookahead=model.num_mtp_layers if self.with_mtp else 0,
            send_tokens=self.num_speculative_tokens > 0 and self.drafter == "ngram",
        )


def make_transformer(config: ModelConfig, mesh: Mesh, settings: Settings) -> Transformer:
    build = Build(ops_for("replaying"), torch.float32, CPU, config.quant, mesh=mesh)
    return make_model(config, build, 2 * LONGEST, with_mtp=settings.with_mtp)


def make_runner(model: Transformer, settings: Settings) -> ModelRunner:
    """On a platform that replays by calling again."""
    mesh = model.mesh
    modules = model.config.num_mtp_layers if settings.with_mtp else 0
    whole = kv_spec(model.config, PAGE, "float32", "A_CC_ME", modules)
    held = range(model.held.start, model.held.stop + modules * mesh.last_stage)
    config = settings.scheduler(model.config)
    pool = KVPool(whole.shard(mesh.sizes.tp, held), config.num_pages, CPU)
    runner = ModelRunner(
        model,
        pool,
        ReplayingPlatform(CPU),
        config.max_num_seqs,
        2 * LONGEST,
        settings.cudagraph_capture_sizes is not None,
        settings.speculation,
        piecewise_tokens=settings.piecewise_tokens,
    )
    choices = draft_count_choices(settings.num_speculative_tokens, bool(settings.draft_counts))
    runner.capture(CAPTURED, choices, settings.cudagraph_capture_sizes)
    return runner


@dataclass(frozen=True)
class Call:
    """What the ranks of an axis must do alike."""

    axis: str
    name: str
    detail: tuple[Any, ...]


class LoggedAxis(FakeAxis):
    """Logs what GroupAxis would start: nothing for a message without elements."""

    def __init__(self, name: str, cut: Shard, log: list[Call]):
        super().__init__(name, cut)
        self.log = log

    def _heard(self, name: str, *detail: Any) -> None:
        self.log.append(Call(self.name, name, detail))

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.numel():
            self._heard("all_reduce", tuple(x.shape), x.dtype)
        return x

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        eps: float,
        plain: AddNormFn,
    ) -> tuple[Tensor, Tensor]:
        return plain(self.all_reduce(x), residual, weight, eps)

    def reduce_scatter(self, x: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        rows = tuple(counts) if counts is not None else (x.shape[0] // self.size,)
        if max(rows):
            self._heard("reduce_scatter", rows, tuple(x.shape[1:]), x.dtype)
        return super().reduce_scatter(x, counts)

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        rows = tuple(counts) if counts is not None else (x.shape[0],)
        if max(rows):
            self._heard("all_gather", rows, tuple(x.shape[1:]), x.dtype)
        return super().all_gather(x, counts)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        self._heard("all_to_all", tuple(x.shape[1:]), x.dtype)
        return super().all_to_all(x, send, receive)

    def all_to_all_fixed(self, x: Tensor) -> Tensor:
        if x.numel():
            self._heard("all_to_all_fixed", tuple(x.shape), x.dtype)
        return super().all_to_all_fixed(x)

    def start_broadcast(self, x: Tensor, root: int) -> PendingCollective:
        self._heard("broadcast", tuple(x.shape), root)
        return Ready(x if self.rank == root else x.zero_())

    def send(self, x: Tensor, to: int) -> None:
        if x.numel():
            self._heard("pass", tuple(x.shape), x.dtype)

    def receive(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        source: int,
    ) -> PendingCollective:
        out = torch.zeros(*shape, dtype=dtype, device=device)
        if out.numel():
            self._heard("pass", tuple(shape), dtype)
        return Ready(out)


@dataclass
class Member:
    """One rank: its runner, its log, and by axis the ranks it does things with."""

    runner: ModelRunner
    log: list[Call]
    groups: dict[str, tuple[int, ...]]
    read: int = 0

    @staticmethod
    def of(sizes: ParallelConfig, rank: int, config: ModelConfig, settings: Settings) -> Member:
        log: list[Call] = []
        groups = {name: members(sizes, rank, name) for name in AXES}
        axes: dict[str, Any] = {}
        for name, group in groups.items():
            cut = Shard(group.index(rank), len(group))
            axes[name] = LoggedAxis(name, cut, log) if len(group) > 1 else NullAxis(name)
        model = make_transformer(config, Mesh(sizes, rank, axes), settings)
        random_weights(model, 0)
        return Member(make_runner(model, settings), log, groups)

    def shared_with(self, other: Member) -> dict[str, list[Call]]:
        """New calls on the axes that both are on: those of a stage in one list."""
        both = {name for name, group in self.groups.items() if group == other.groups[name]}
        found: dict[str, list[Call]] = {"stage": [], **{name: [] for name in BESIDE}}
        for call in self.log[self.read :]:
            if call.axis in both:
                found[call.axis if call.axis in BESIDE else "stage"].append(call)
        return found


def prompt_of(number: int, length: int) -> list[int]:
    return [(7 * number + 3 * i) % 100 for i in range(length)]


def first_difference(ours: list[Call], theirs: list[Call]) -> str:
    for index, (one, other) in enumerate(zip_longest(ours, theirs)):
        if one != other:
            return f"call {index} is {one} on the one and {other} on the other"
    return ""


@dataclass
class Lockstep:
    """`run` adds requests to data-parallel ranks and steps until nothing is left. Every step
    compares what the ranks did. tokens: by request."""

    members: list[Member]
    sizes: ParallelConfig
    scheduler: DataParallelScheduler
    settings: Settings
    plans: list[DataParallelOutput] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    added: int = 0

    @staticmethod
    def of(config: ModelConfig, sizes: ParallelConfig, settings: Settings) -> Lockstep:
        ranks = [Member.of(sizes, rank, config, settings) for rank in range(sizes.world)]
        scheduler = DataParallelScheduler(settings.scheduler(config), sizes.dp)
        made = Lockstep(ranks, sizes, scheduler, settings)
        made.compare("recording")
        return made

    def add(self, rank: int, length: int, params: SamplingParams) -> None:
        prompt = tuple(prompt_of(self.added, length))
        self.scheduler.schedulers[rank].add(Request(f"r{self.added}", prompt, params))
        self.added += 1

    def step(self) -> None:
        if self.settings.draft_counts:
            turn = len(self.plans) % len(self.settings.draft_counts)
            self.scheduler.num_speculative_tokens = self.settings.draft_counts[turn]
        step = self.scheduler.schedule()
        assert step is not None
        output = decode_output(encode_output(step.output))
        self.plans.append(output)
        results: Results = {}
        for member in self.members:
            mesh = member.runner.model.mesh
            pending = member.runner.launch(output.parts[mesh.dp_rank], output.metadata())
            result = member.runner.collect(pending)
            if mesh.last_stage and mesh.tp_rank == 0:
                results[mesh.dp_rank] = result
        self.compare(f"step {len(self.plans)}")
        results = self.gather(results)
        outs = self.scheduler.update(step, [results[rank] for rank in range(self.sizes.dp)])
        for out in outs:
            self.tokens.setdefault(out.sequence.request.id, []).append(out.token)

    def gather(self, results: Results) -> Results:
        """Of all data-parallel ranks."""
        return results

    def run(self, arrivals: Iterable[tuple[int, int, int, SamplingParams]]) -> None:
        """arrivals: (before which step, data-parallel rank, prompt length, parameters); where
        nothing is left to do, the next one comes at once."""
        left = sorted(arrivals, key=lambda arrival: arrival[0])
        while left or self.scheduler.has_work:
            while left and (left[0][0] <= len(self.plans) or not self.scheduler.has_work):
                self.add(*left.pop(0)[1:])
            self.step()

    def compare(self, when: str) -> None:
        for (a, one), (b, other) in combinations(enumerate(self.members), 2):
            mine = one.shared_with(other)
            theirs = other.shared_with(one)
            for axes in mine:
                found = first_difference(mine[axes], theirs[axes])
                if found:
                    raise AssertionError(f"{when}: ranks {a} and {b} on {axes}: {found}")
        for member in self.members:
            member.read = len(member.log)

    @property
    def replays(self) -> list[int]:
        """Steps that each rank replayed."""
        return [platform.replays for platform in self._platforms]

    @property
    def pieces(self) -> list[int]:
        """Steps that each rank replayed in pieces."""
        return [platform.pieces for platform in self._platforms]

    @property
    def _platforms(self) -> list[Any]:
        return [member.runner.platform for member in self.members]
