"""Engine: a scheduler, an executor, and the loop between them."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from rorqual.engine.balance.initial import initial_maps
from rorqual.engine.balance.policy import BalanceStats, LoadWindow
from rorqual.engine.balance.slot_balancer import SlotBalancer
from rorqual.engine.config import EngineConfig
from rorqual.engine.distributed.executor import DistributedExecutor
from rorqual.engine.distributed.expert_load import Counts
from rorqual.engine.execution.draft_controller import DraftController
from rorqual.engine.execution.grammar import Grammars
from rorqual.engine.executor import Executor, LaunchedStep, LocalExecutor
from rorqual.engine.kernels_ahead import LateKernels
from rorqual.engine.scheduling.chunk_controller import chunk_controller
from rorqual.engine.scheduling.dp_scheduler import DataParallelInFlight, DataParallelScheduler
from rorqual.engine.scheduling.scheduler import SchedulerConfig
from rorqual.engine.scheduling.sequence import TokenOut
from rorqual.engine.step_trace import MAX_STEPS, TraceFile
from rorqual.errors import ConfigError, ExpertsMissing, RequestError
from rorqual.parallel.eplb.placement import Ints, balancedness_by_layer, identity_placement
from rorqual.request import FinishReason, Request

if TYPE_CHECKING:
    from rorqual.engine.execution.compiled import CompileStats

EXPERT_POLL_SECONDS = 0.02  # seconds between two checks for experts that no server holds


@dataclass
class Stats:
    """Counts since the engine started, and seconds of start-up by phase. allreduce_backend,
    all2all_backend: names of those that decode steps use. steps_by_parts: number of steps by
    micro-batches requested (--micro-batches). late_kernels: of rank 0.

    drafted and accepted count speculative tokens by their position in the draft (element 0 is the
    first token guessed).
    """

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    startup: dict[str, float] = field(default_factory=dict)
    compiled: CompileStats | None = None
    allreduce_backend: str = ""
    all2all_backend: str = ""
    steps_by_parts: Counter[int] = field(default_factory=Counter)
    late_kernels: LateKernels = field(default_factory=LateKernels)


class Engine:
    """`add` requests, then call `step` until `has_work` is False; each call returns new tokens.

    With several ranks this process is rank 0: it starts the others, schedules for all, and computes
    its own share. `worker`: this process's own rank.
    """

    def __init__(self, config: EngineConfig):
        self.config = config
        self.executor = make_executor(config)
        worker = self.worker = self.executor.worker
        self.scheduler = DataParallelScheduler(
            self._scheduler_config(), self.executor.dp, worker.runner.micro_batches
        )
        self.platform = worker.platform
        self.model = worker.model
        self.model_config = worker.model_config
        self.dtype = worker.dtype
        self.max_model_len = worker.max_model_len
        self.depth = worker.depth
        self.speculation = worker.speculation
        self.mtp_layers = worker.mtp_layers
        self.controller = DraftController(
            config.num_speculative_tokens, adaptive=config.speculative_policy == "adaptive"
        )
        most = worker.batched_tokens
        self.chunks = chunk_controller(config.itl_ms, most)
        self.stats = Stats(
            drafted=self.scheduler.drafted, accepted=self.scheduler.accepted, startup=worker.startup
        )
        self.stats.allreduce_backend = worker.allreduce_backend
        self.stats.all2all_backend = worker.all2all_backend
        self.stats.late_kernels = worker.late_kernels
        self.stats.compiled = worker.compiled.stats if worker.compiled else None
        self.expert_window = LoadWindow(config.eplb_window, config.eplb_decay)
        self.slot_balancer = self._slot_balancer()
        self.in_flight: deque[tuple[DataParallelInFlight, LaunchedStep]] = deque()
        self._collected = 0.0
        self.on_restart: Callable[[], None] = lambda: None  # cached pages are lost
        self.on_launch: Callable[[DataParallelInFlight], None] = lambda step: None
        self.missing: ExpertsMissing | None = None  # since `missing_since`, a monotonic time
        self.missing_since = 0.0
        self._consistent = True
        self._next_balancer_step = 0

    def _slot_balancer(self) -> SlotBalancer | None:
        worker = self.worker
        if worker.experts is None or not self.config.expert_rebalance:
            return None
        return SlotBalancer(
            worker.experts,
            worker.expert_layers,
            self.model_config.moe.num_experts,
            self.config.eplb_threshold,
        )

    def _scheduler_config(self) -> SchedulerConfig:
        config = self.config
        worker = self.worker
        return SchedulerConfig(
            max_num_seqs=worker.max_num_seqs,
            max_num_batched_tokens=worker.batched_tokens,
            max_model_len=worker.max_model_len,
            num_pages=worker.num_pages,
            page_size=worker.spec.page_size,
            prefix_caching=config.enable_prefix_caching,
            chunked_prefill_size=config.chunked_prefill_size,
            num_speculative_tokens=config.num_speculative_tokens,
            lookahead=worker.mtp_layers,
            send_tokens=worker.speculation is not None and worker.speculation.drafter == "ngram",
            pipeline_turns=config.parallel.pipeline_turns or 1,
            host_pages=worker.host_pages,
            host_step_pages=worker.host_step_pages,
        )

    @property
    def grammars(self) -> Grammars | None:
        """Makes matchers for requests with structured output; set by the owner of the tokenizer.
        With several ranks: SharedGrammars."""
        return self.executor.grammars

    @grammars.setter
    def grammars(self, grammars: Grammars | None) -> None:
        self.executor.grammars = grammars

    # ---- serving

    def add(self, request: Request, dp_rank: int | None = None) -> FinishReason | None:
        """Queue a request; raises RequestError when it can never be served. Returns a finish
        reason, without queueing, where its given output already reaches its limit; else None.
        dp_rank: the data-parallel rank that has its pages, where that is known."""
        vocab = self.model_config.vocab_size
        if not _within(request, vocab):
            for name, tokens in (("prompt", request.prompt), ("answer", request.outputs)):
                for token in tokens:
                    if not 0 <= token < vocab:
                        raise RequestError(
                            f"the {name} holds token id {token}; accepted: 0 to {vocab - 1}"
                        )
        params = request.params
        for name, ids in (
            ("logit_bias", params.logit_bias or ()),
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("bad_word_ids", chain.from_iterable(params.bad_word_ids)),
        ):
            wrong = next((token for token in ids if token >= vocab), None)
            if wrong is not None:
                raise RequestError(f"{name}={wrong} is no token id; accepted: 0 to {vocab - 1}")
        if request.priority and self.config.scheduling_policy != "priority":
            raise RequestError(
                f"priority={request.priority} needs scheduling_policy='priority'; accepted here: 0"
            )
        # A model's files may name end-of-sequence ids outside its vocabulary. They are never
        # sampled, and have no logit that min_tokens could mask.
        ends = tuple(token for token in request.eos_token_ids if 0 <= token < vocab)
        if len(ends) < len(request.eos_token_ids):
            request = replace(request, eos_token_ids=ends)
        self._check_bans(request)
        if params.structured is not None:
            self._check_structured(request)
        with self.changing():
            try:
                over = self.scheduler.add(request, dp_rank)
            except RequestError as error:  # rejected before any state changed
                refused = error
            else:
                return over
        try:
            raise refused
        finally:
            del refused  # its traceback holds this frame, and so the request

    def _check_bans(self, request: Request) -> None:
        """At every position some token must remain allowed."""
        params = request.params
        if params.bad_words:
            raise RequestError("bad_words need a tokenizer: give bad_word_ids, or use LLM")
        if not params.bans or params.structured is not None:
            return  # a structure may end where no token is allowed
        banned = {word[-1] for word in params.bad_word_ids}
        if params.min_tokens:
            banned |= request.stop_ids
        allowed = params.allowed_token_ids
        left = range(self.model_config.vocab_size) if allowed is None else allowed
        if all(token in banned for token in left):
            name = "bad_words" if allowed is None else "allowed_token_ids"
            raise RequestError(
                f"{name}: no token is left to draw beside bad_words"
                f"{' and min_tokens' if params.min_tokens else ''}"
            )

    def _check_structured(self, request: Request) -> None:
        if self.grammars is None:
            raise RequestError("structured output needs a tokenizer and the package xgrammar")
        assert request.params.structured is not None
        matcher = self.grammars.matcher(request.params.structured)  # may raise RequestError
        for place, token in enumerate(request.outputs):
            if not matcher.accept(token):
                raise RequestError(
                    f"the structure does not allow token id {token} at place {place} of the answer"
                )
        if matcher.done:
            raise RequestError("the answer that was given is complete by its structure")

    def abort(self, request_id: str) -> None:
        with self.changing():
            self.scheduler.abort(request_id)

    def stop(self, request_id: str) -> None:
        """End a request whose text reached a stop string."""
        with self.changing():
            sequence = self.scheduler.sequences.get(request_id)
            if sequence is not None:
                self.scheduler.finish(sequence, FinishReason.STOP)

    def start_trace(self, prefix: str, steps: int) -> None:
        """Record the next `steps` steps on every rank into PREFIX.json.gz, with several ranks
        PREFIX-rankN.json.gz. One trace at a time; `traced` returns its files."""
        if not 1 <= steps <= MAX_STEPS:
            raise ConfigError(
                f"a trace of {steps} steps is out of range; accepted: 1 to {MAX_STEPS}"
            )
        with self.changing():
            self.executor.start_trace(prefix, steps)

    def stop_trace(self) -> None:
        """Stop recording, and write the steps recorded so far."""
        with self.changing():
            self.executor.stop_trace()

    def traced(self) -> list[TraceFile] | None:
        """The trace's files, returned once, when they are written; else None."""
        return self.executor.traced()

    def close(self) -> None:
        """End the other ranks. The engine cannot be used afterwards."""
        if self.slot_balancer is not None:
            self.slot_balancer.close()
        self.executor.close()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.in_flight)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Wraps every change of requests, pages, rows or steps in flight. An exception may
        interrupt it at any point, Ctrl-C between any two instructions: entering sets a flag that
        only a normal exit clears, and while it is set the next entry restores a consistent state
        first."""
        if not self._consistent:
            self._restore()
        self._consistent = False
        yield
        self._consistent = True

    def _restore(self) -> None:
        """Abandon the steps in flight: their sampled tokens are dropped, and requests continue from
        the tokens that `step` has returned. May itself be interrupted; it then starts over."""
        self.worker.abandon()
        for step, _ in self.in_flight:
            self.scheduler.undo(step)
        self.in_flight.clear()
        self.scheduler.restart()
        self.on_restart()
        self._consistent = True

    def step(self) -> list[TokenOut]:
        """Launch until `depth` steps are in flight, then collect the oldest. Raises EngineError
        when a rank has died or hangs.

        Whatever it raises, no request loses or repeats a token: the next call continues all of them
        or, where other ranks may be out of step with this one, raises EngineError. Where no server
        holds an expert that a step needs it returns no tokens, and raises ExpertsMissing after
        `expert_wait` seconds."""
        try:
            self._check_experts()
            while len(self.in_flight) < self.depth and self.launch():
                pass
            outs = self.collect() if self.in_flight else []
        except ExpertsMissing as error:
            with self.changing():  # drops the steps in flight
                pass
            self._wait_for_experts(error)
            return []
        self.missing = None
        self.stats.all2all_backend = self.worker.all2all_backend  # a lost group changes it
        if self.slot_balancer is not None:
            self._update_balancer(self.slot_balancer)
        return outs

    def _update_balancer(self, balancer: SlotBalancer) -> None:
        """Runs a few times a window: with several ranks, counts come one request late."""
        window = self.expert_window
        if self.stats.steps < self._next_balancer_step:
            return
        self._next_balancer_step = self.stats.steps + max(1, window.steps // 4)
        before = window.newest
        self.expert_load()
        if window.newest is not before and window.newest is not None and window.load is not None:
            balancer.observe(window.load, window.newest)

    @property
    def balance(self) -> BalanceStats | None:
        """Statistics of expert load balancing, between ranks or expert servers; None where it is
        off."""
        return self.executor.balance if self.slot_balancer is None else self.slot_balancer.stats

    def _check_experts(self) -> None:
        """Raise without trying a step while the experts missing before are still missing."""
        servers = self.worker.experts
        if self.missing is not None and servers is not None and servers.without_holder():
            raise self.missing

    def _wait_for_experts(self, error: ExpertsMissing) -> None:
        now = time.monotonic()
        if self.missing is None:
            self.missing_since = now
        self.missing = error.with_traceback(None)
        if now - self.missing_since >= self.config.expert_wait:
            self.missing = None
            raise error
        time.sleep(EXPERT_POLL_SECONDS)

    def expert_load(self) -> Counts:
        """See Executor; empty where it is not recorded."""
        if not self.config.counts_expert_load:
            return []
        counts = self.executor.expert_load()
        if counts:
            self.expert_window.add(self.stats.steps, counts)
        return counts

    def expert_balancedness(self) -> list[float]:
        """Mean over maximum load of the ranks that share the experts, by MoE layer: of the windows
        that `expert_load` has recorded, under the present placement. Empty before the first
        window."""
        if self.slot_balancer is not None:
            return self.slot_balancer.stats.by_layer
        load = self.expert_window.load
        ranks = self.config.parallel.ep
        if load is None or ranks == 1:
            return []
        found: list[float] = balancedness_by_layer(self._placement(), load, ranks).tolist()
        return found

    def _placement(self) -> Ints:
        placement = self.executor.placement
        return self._first_placement if placement is None else placement

    @cached_property
    def _first_placement(self) -> Ints:
        maps = initial_maps(self.config, self.model_config)
        layers = self.worker.expert_layers
        if not maps:
            return identity_placement(len(layers), self.model_config.moe.num_experts)
        return np.array([maps[layer] for layer in layers])

    def launch(self) -> bool:
        """Schedule a step and launch it; False when nothing can be launched until a step in flight
        is collected."""
        with self.changing():
            if self.config.num_speculative_tokens:
                self.scheduler.num_speculative_tokens = self.controller.next_count(
                    self.scheduler.num_decoding
                )
            if self.chunks is not None:
                self.scheduler.prompt_budget = self.chunks.budget(self.scheduler.next_load())
            step = self.scheduler.schedule()
            if step is None:
                return False
            self.on_launch(step)
            step.launched = time.perf_counter()
            self.in_flight.append((step, self.executor.launch(step.output)))
            self.stats.steps += 1
            self.stats.steps_by_parts[step.output.micro_batches] += 1
            self.stats.prompt_tokens += sum(len(chunk.tokens) for chunk in step.output.chunks)
            return True

    def collect(self) -> list[TokenOut]:
        """Collect the oldest step in flight. There is none after an error abandoned them."""
        with self.changing():
            if not self.in_flight:
                return []
            step, launched = self.in_flight[0]
            outs = self.scheduler.update(step, self.executor.collect(launched))
            if self.chunks is not None or self.config.num_speculative_tokens:
                self._observe(step, len(outs))
            self.stats.output_tokens += len(outs)
            self.in_flight.popleft()  # up to here its tokens can be undone
            return outs

    def _observe(self, step: DataParallelInFlight, tokens: int) -> None:
        """Pass the controllers a step's tokens and duration: from its launch, or from the
        collection of the step before if that was later."""
        now = time.perf_counter()
        seconds = now - max(self._collected, step.launched)
        began = self._collected
        self._collected = now
        decoding = len(step.output.decode_slots)
        prompts = sum(len(chunk.tokens) for chunk in step.output.chunks)
        if self.chunks is not None and (decoding or prompts):  # not a step of page copies alone
            self.chunks.observe(decoding, prompts, seconds)
        if self.config.num_speculative_tokens and began and decoding and not prompts:
            drafts = step.output.num_speculative_tokens
            self.controller.observe(decoding, drafts, tokens, seconds)


def _within(request: Request, vocab: int) -> bool:
    """Whether all of its given tokens are in the vocabulary."""
    try:
        ids = np.asarray(request.token_array)
    except OverflowError:
        return False
    return bool(ids.min(initial=0) >= 0 and ids.max(initial=0) < vocab)


def make_executor(config: EngineConfig) -> Executor:
    """Start the other ranks, if any, and load the model."""
    if config.parallel.is_single or config.single_rank_bench:
        return LocalExecutor(config)
    return DistributedExecutor(config)
