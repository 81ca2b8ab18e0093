"""Engine: a scheduler, a runner, and the loop between them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rorqual.cache.pool import KVPool
from rorqual.cache.spec import KVSpec, kv_spec
from rorqual.config import ModelConfig
from rorqual.engine.config import EXE_MODES, EngineConfig
from rorqual.engine.grammar import Grammars
from rorqual.engine.graphs import RECORDED
from rorqual.engine.next_n import Controller
from rorqual.engine.runner import ModelRunner, Speculation
from rorqual.engine.scheduler import InFlight, Scheduler, SchedulerConfig, TokenOut
from rorqual.errors import CapacityError, ConfigError, RequestError
from rorqual.layers.parameter import Build
from rorqual.models.loader import load_weights, random_weights
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.ops.table import ops_for
from rorqual.platforms import make_platform
from rorqual.platforms.base import Platform
from rorqual.request import FinishReason, Request

CPU_CACHE_BYTES = 2 * 2**30
CPU_CACHE_SHARE = 0.25
# Random weights: all layers together add a quarter of the embedding's variance, so that hidden states stay the token's own and
# the routers spread tokens as uniform routing would (at 1.0 they hit 4 % fewer experts).
RESIDUAL_GAIN = 0.5


@dataclass
class Stats:
    """Counts since the engine started, and seconds of start-up by phase.

    drafted and accepted count speculative tokens by their position in the draft (element 0 is the first token guessed).
    """

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    startup: dict[str, float] = field(default_factory=dict)


class Engine:
    """add requests, call `step` until nothing is left; each call returns the tokens that became known."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.stats = Stats()
        if config.threads:
            torch.set_num_threads(config.threads)
        self.platform = make_platform(config.device)
        overrides = {} if config.num_layers is None else {"num_hidden_layers": config.num_layers}
        self.model_config = ModelConfig.from_file(config.model, config.ignore_config_fields, overrides)
        self.dtype = self.model_config.dtype if config.dtype == "auto" else config.dtype
        self.max_model_len = self._max_model_len()
        self.depth = config.steps_in_flight or self.platform.steps_in_flight
        self.speculation = self._speculation()
        # A row may run past its request's end by what the steps in flight accept and draft.
        self.max_row_len = self.max_model_len + (config.next_n * (self.depth + 1) + 1 if config.next_n else 0)
        self.model = self._phase("weights", self._load)
        spec = self._spec()
        num_pages = self._num_pages(spec)
        pool = self._phase("cache", lambda: KVPool(spec, num_pages, self.platform.device))
        runner = ModelRunner(self.model, pool, self.platform, config.max_num_seqs, self.max_row_len, self._graphs(), self.speculation)
        self.controller = Controller(config.next_n, adaptive=config.next_n_policy == "adaptive")
        self._phase("graphs", lambda: runner.record(RECORDED, self.controller.choices))
        self.runner = runner
        self.scheduler = Scheduler(self._scheduler_config(spec, num_pages))
        self.stats.drafted, self.stats.accepted = self.scheduler.drafted, self.scheduler.accepted
        self.in_flight: deque[tuple[InFlight, Any]] = deque()
        self._collected = 0.0

    @property
    def grammars(self) -> Grammars | None:
        """Makes matchers for requests with structured output; whoever owns a tokenizer sets it."""
        return self.runner.rows.grammars

    @grammars.setter
    def grammars(self, grammars: Grammars | None) -> None:
        self.runner.rows.grammars = grammars

    def _speculation(self) -> Speculation | None:
        config = self.config
        if not config.next_n:
            return None
        drafter = "mtp" if config.drafter == "auto" else config.drafter
        return Speculation(drafter, config.next_n, config.draft_window, config.simulated_acceptance)

    @property
    def mtp_layers(self) -> int:
        """Prediction modules in use."""
        return self.model_config.num_mtp_layers if self.speculation and self.speculation.drafter == "mtp" else 0

    def _phase(self, name: str, work: Any) -> Any:
        start = time.perf_counter()
        result = work()
        self.stats.startup[name] = time.perf_counter() - start
        return result

    def _max_model_len(self) -> int:
        longest, wanted = self.model_config.max_position, self.config.max_model_len
        if wanted is not None and wanted > longest:
            raise ConfigError(f"max_model_len={wanted} exceeds the model's {longest} positions")
        return wanted or longest

    def _graphs(self) -> bool:
        mode = EXE_MODES[self.config.exe_mode]
        if mode == "graph" and not self.platform.has_graphs:
            raise ConfigError(f"exe_mode={self.config.exe_mode!r} is not supported on {self.platform.name}; accepted: auto, eager")
        return mode != "eager" and self.platform.has_graphs

    def _build(self, platform: Platform, device: torch.device) -> Build:
        gain = RESIDUAL_GAIN * (2 * self.model_config.num_layers) ** -0.5
        return Build(ops_for(platform.name), getattr(torch, self.dtype), device, self.model_config.quant, gain)

    def _make(self, device: torch.device) -> Transformer:
        config, build = self.config, self._build(self.platform, device)
        with_mtp = self.speculation is not None and self.speculation.drafter == "mtp"
        return make_model(self.model_config, build, self.max_row_len, config.mla_prefill, config.mla_decode, with_mtp)

    def _load(self) -> Transformer:
        self._check_memory()
        model = self._make(self.platform.device)
        if self.config.weights == "random":
            random_weights(model, self.config.seed)
        else:
            load_weights(model, Path(self.config.model))
        for layer in model.moe_layers():
            layer.exchange.record_load = self.config.record_expert_load
        return model

    def _check_memory(self) -> None:
        """Refuse before allocating: a model without memory is made first, to be measured as it will be once loaded."""
        model = self._make(torch.device("meta"))
        model.finalize()
        need = weight_bytes(model)
        free = self.platform.available_memory()
        if need > free:
            raise CapacityError(f"the weights need {need / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free on {self.platform.name}")

    def _spec(self) -> KVSpec:
        dtype = self.dtype if self.config.kv_cache_dtype == "auto" else self.config.kv_cache_dtype
        page = self.config.page_size or self.platform.default_page_size
        return kv_spec(self.model_config, page, dtype, self.config.mla_decode, self.mtp_layers)

    def _num_pages(self, spec: KVSpec) -> int:
        """Pages for max_num_seqs requests of full length, or as many as the memory set aside holds; page 0 is extra."""
        config = self.config
        if config.num_pages:
            return config.num_pages
        most = config.max_num_seqs * -(-self.max_model_len // spec.page_size)
        pages = min(most, self._cache_bytes() // spec.bytes_per_page)
        if pages < 1:
            raise CapacityError(f"no room for one cache page of {spec.bytes_per_page} bytes")
        return pages + 1

    def _cache_bytes(self) -> int:
        if self.config.kv_cache_bytes:
            return self.config.kv_cache_bytes
        free = self.platform.available_memory()
        if self.platform.name == "cpu":
            return min(CPU_CACHE_BYTES, int(free * CPU_CACHE_SHARE))
        total = self.platform.total_memory()
        return int(free - (1 - self.config.memory_utilization) * total)

    def _scheduler_config(self, spec: KVSpec, num_pages: int) -> SchedulerConfig:
        config = self.config
        return SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_pages=num_pages,
            page_size=spec.page_size,
            prefix_caching=config.enable_prefix_caching,
            prefill_chunk=config.prefill_chunk,
            next_n=config.next_n,
            lookahead=self.mtp_layers,
            send_tokens=self.speculation is not None and self.speculation.drafter == "ngram",
        )

    # ---- serving

    def add(self, request: Request) -> None:
        """Queue a request; raises RequestError when it can never be served."""
        vocab = self.model_config.vocab_size
        wrong = next((token for token in request.prompt if not 0 <= token < vocab), None)
        if wrong is not None:
            raise RequestError(f"the prompt holds token id {wrong}; accepted: 0 to {vocab - 1}")
        params = request.params
        for name, ids in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
            wrong = next((token for token in ids if token >= vocab), None)
            if wrong is not None:
                raise RequestError(f"{name} names token id {wrong}; accepted: 0 to {vocab - 1}")
        if params.structured is not None:
            if self.grammars is None:
                raise RequestError("structured output needs a tokenizer and the package xgrammar")
            self.grammars.matcher(params.structured)  # refuses here what cannot be compiled
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def stop(self, request_id: str) -> None:
        """End a request whose text reached a stop string."""
        sequence = self.scheduler.sequences.get(request_id)
        if sequence is not None:
            self.scheduler.finish(sequence, FinishReason.STOP)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.in_flight)

    def step(self) -> list[TokenOut]:
        """Launch until `depth` steps are in flight, then take in the oldest."""
        while len(self.in_flight) < self.depth:
            if self.config.next_n:
                self.scheduler.next_n = self.controller.choose(len(self.scheduler.decoding))
            planned = self.scheduler.plan()
            if planned is None:
                break
            self.in_flight.append((planned, self.runner.launch(planned.plan)))
            self.stats.steps += 1
            self.stats.prompt_tokens += sum(len(chunk.tokens) for chunk in planned.plan.chunks)
        if not self.in_flight:
            return []
        planned, pending = self.in_flight.popleft()
        outs = self.scheduler.update(planned, self.runner.collect(pending))
        self.stats.output_tokens += len(outs)
        if self.config.next_n:
            self._observe(planned, len(outs))
        return outs

    def _observe(self, planned: InFlight, tokens: int) -> None:
        """Tell the controller what a step of decoding alone brought, and how long it took since the one before was read."""
        now, before = time.perf_counter(), self._collected
        self._collected = now
        if before and planned.plan.decode_slots and not planned.plan.chunks:
            self.controller.observe(len(planned.plan.decode_slots), planned.plan.next_n, tokens, now - before)


def weight_bytes(model: Transformer) -> int:
    """Bytes of all parameters, merged ones counted once, and of what was derived from them."""
    views = [target.view for target in model.targets() if not target.covers] + model.derived()
    return sum(view.numel() * view.element_size() for view in views)
