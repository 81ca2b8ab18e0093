"""What one process holds: its device, its part of the model, its cache, and the runner over
them. One process is one rank."""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rorqual.cache.host_memory import HostMemory
from rorqual.cache.pool import KVPool
from rorqual.cache.spec import (
    DTYPE_BYTES,
    EIGHT_BITS,
    FP8,
    KVSpec,
    check_8bit_cache,
    kv_dtype,
    kv_spec,
    short_name,
)
from rorqual.config.hf import read_config_file
from rorqual.config.model import MLAConfig, ModelConfig
from rorqual.config.parallel import AUTO, EXCHANGES, ParallelConfig, check_parallel
from rorqual.config.quant import QuantConfig, quantization_named
from rorqual.engine.balance.initial import expert_layers, initial_maps, simulated_loads
from rorqual.engine.balance.mover import ExpertMover, slots_per_move
from rorqual.engine.captured_forward import CapturedForward
from rorqual.engine.config import (
    DEFAULT_NUM_SEQS,
    EXE_MODES,
    MOST_NUM_SEQS,
    OFF,
    EngineConfig,
)
from rorqual.engine.execution.cuda_graphs import CAPTURED
from rorqual.engine.execution.draft_controller import draft_count_choices
from rorqual.engine.execution.drafters import Speculation
from rorqual.engine.execution.model_runner import ModelRunner
from rorqual.engine.execution.piecewise.parts import PARTS
from rorqual.engine.host_room import check_host_memory
from rorqual.engine.kernels_ahead import (
    KeptParts,
    LateKernels,
    agreed,
    beside,
    fits_beside,
    kept_path,
    layers_of_all_kinds,
    of_all_ranks,
)
from rorqual.engine.micro_batches.kept import KeptTimes
from rorqual.engine.micro_batches.measure import Limits, deviation, measure
from rorqual.engine.micro_batches.policy import FixedParts, MeasuredParts, MicroBatchPolicy
from rorqual.engine.micro_batches.report import lines
from rorqual.engine.micro_batches.step_times import StepTimes
from rorqual.engine.npu.checks import check_cache_scales, check_npu, connect_dispatch, set_streams
from rorqual.engine.remote_experts import RemoteExperts
from rorqual.engine.scheduling.buckets import piecewise_tokens
from rorqual.engine.scheduling.scheduler_output import SamplingVariant
from rorqual.errors import CapacityError, ConfigError
from rorqual.layers.fixed_experts import check_fixed_experts
from rorqual.layers.parameter import Build
from rorqual.layers.routing_simulator import SampledRouting, SimulatedRouting, UniformRouting
from rorqual.models.loader import Loadable, load_weights, random_weights
from rorqual.models.registry import make_model
from rorqual.models.transformer import Transformer
from rorqual.ops.select import ops_for
from rorqual.ops.stretch import workspace_bytes
from rorqual.parallel.exchange import SlotMap
from rorqual.parallel.exchange_policy import captured_prompt_tokens, possible_exchanges
from rorqual.parallel.exchange_select import captures_decode
from rorqual.parallel.mesh import Mesh
from rorqual.parallel.remote.servers import ExpertServers
from rorqual.parallel.remote.steps_in_turns import StepsInTurns
from rorqual.parallel.shared.slow_link import SlowLink
from rorqual.platforms.base import Platform

if TYPE_CHECKING:
    from rorqual.engine.execution.compiled import CompiledForward
    from rorqual.engine.npu.compiled import NpuCompiledForward

log = logging.getLogger("rorqual.engine")
CPU_CACHE_BYTES = 2 * 2**30
CPU_CACHE_SHARE = 0.25
STAND_IN_PAGES = 16  # of the model that only compiles kernels
# Random weights: all layers together add a quarter of the embedding's variance, so that hidden
# states stay specific to the token and routing is as even as uniform routing (at 1.0 it hits 4 %
# fewer experts).
RESIDUAL_GAIN = 0.5


def read_model(config: EngineConfig) -> ModelConfig:
    """The model's configuration. Raises ConfigError where it is not supported, or not in this
    layout."""
    overrides = {} if config.num_layers is None else {"num_hidden_layers": config.num_layers}
    model = read_config_file(config.model, config.ignore_config_fields, overrides)
    if config.quantization != "auto":
        model = replace(model, quant=_rounding(model, config.quantization))
    if config.quantize_head != OFF:
        model = replace(model, quant=_with_head(model, config.quantize_head))
    check_parallel(model, config.parallel)
    if config.fixed_experts and not all(model.moe_layers):
        check_fixed_experts(model, config.parallel)
    _check_graphs(config, model)
    cached = kv_dtype(config.kv_cache_dtype)
    if cached in EIGHT_BITS:
        check_8bit_cache(model, config.mla_decode, cached)
    return model


def _rounding(model: ModelConfig, name: str) -> QuantConfig:
    """How a wide checkpoint is rounded while it is read."""
    if model.quant is not None:
        raise ConfigError(
            f"quantization={name!r}: the checkpoint's weights are {model.quant.describe()} "
            "already; accepted: auto"
        )
    return quantization_named(name)


def _with_head(model: ModelConfig, name: str) -> QuantConfig:
    """The same with a head that is rounded while it is read."""
    if model.tie_embeddings:
        raise ConfigError(
            f"quantize_head={name!r}: this model's head is its embedding's table, which stays "
            f"wide; accepted: {OFF}"
        )
    return replace(model.quant or QuantConfig(None), head=quantization_named(name).scheme)


def _check_graphs(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError where graphs, captured or compiled, are configured with an exchange that
    does not support them."""
    asked = EXE_MODES[config.exe_mode] in ("graph", "compile")
    if not asked or captures_decode(config.parallel, model.moe):
        return
    others = [name for name in EXCHANGES if _takes_graphs(config.parallel, name, model)]
    raise ConfigError(
        f"exe_mode={config.exe_mode!r} does not go with exchange={config.exchange!r}, where the "
        "host reads in every step how many rows will come; "
        f"accepted: exchange {', '.join(others)}, or exe_mode auto, eager"
    )


def _takes_graphs(sizes: ParallelConfig, exchange: str, model: ModelConfig) -> bool:
    try:
        return captures_decode(replace(sizes, exchange=exchange), model.moe)
    except ConfigError:  # these sizes do not support the exchange
        return False


class Worker:
    """All ranks of an engine have the same configuration, each with its own place in the mesh.
    `startup`: seconds by phase. late_kernels: those met since, where kernels are compiled at the
    start."""

    def __init__(self, config: EngineConfig, platform: Platform, mesh: Mesh):
        self.config = config
        self.platform = platform
        self.mesh = mesh
        self.startup: dict[str, float] = {}
        self.late_kernels = LateKernels()
        self._watch_kernels(None)  # of an engine that this process already serves with
        if config.threads:
            torch.set_num_threads(config.threads)
        self.model_config = read_model(config)
        check_host_memory(config, platform, mesh)
        self.slot_maps = self._slot_maps()
        self.simulated = simulated_loads(config, self.model_config)
        if config.expert_balance == "forced" and mesh.rank == 0:
            log.warning("expert_balance=forced: routers are not obeyed, and tokens mean nothing")
        if config.slow_link_gbits:
            if platform.name != "cuda":
                raise ConfigError("slow_link_gbits is for GPUs")
            try:
                mesh.slow_down(SlowLink(config.slow_link_gbits, platform.device))
            except RuntimeError as error:
                raise ConfigError(
                    f"slow_link_gbits needs GPUs that share memory: {error}"
                ) from error
            if mesh.rank == 0:
                log.warning("slow_link_gbits=%g: collectives are delayed", config.slow_link_gbits)
        self.dtype = self.model_config.dtype if config.dtype == "auto" else config.dtype
        self._check_cache_dtype()
        if platform.name == "npu":
            check_npu(config, self.model_config, platform)
        self.max_model_len = self._max_model_len()
        self.depth = (
            config.steps_in_flight
            or platform.steps_in_flight + (config.parallel.pipeline_turns or 1) - 1
        )
        self.speculation = self._speculation()
        # A row may exceed its request's end by what the steps in flight accept and draft.
        self.max_row_len = self.max_model_len + (
            config.num_speculative_tokens * (self.depth + 1) + 1
            if config.num_speculative_tokens
            else 0
        )
        self.remote = self._remote_experts()
        try:
            self._make_runner()
        except BaseException:  # no one else can close the connections that were opened
            if self.remote is not None:
                self.remote.servers.close()
            raise

    def _make_runner(self) -> None:
        """Build the model, the cache and the runner."""
        config = self.config
        mesh = self.mesh
        platform = self.platform
        if platform.name == "cpu":  # whose kernels are compiled at the first start
            self._phase("kernels", lambda: ops_for(platform.name))
        self.model = self._phase("weights", self._load)
        if self.experts is not None:
            self._phase(
                "expert servers",
                partial(self.experts.wait_for_all, config.expert_wait, starts=True),
            )
        self.allreduce_backend = self.all2all_backend = (
            "nowhere (one rank alone)" if config.single_rank_bench else "local"
        )
        if self.remote is not None:
            self.all2all_backend = self.remote.decide()
        if not mesh.is_single and not config.single_rank_bench:
            self._phase("links", self._links)
        self.mover = self._mover()
        self.spec = self._spec_of(self.model_config, self.model)
        self.num_pages = self._agree(self._num_pages())
        self.host_pages, self.host_step_pages = self._host_pages()
        pool = self._phase("cache", lambda: KVPool(self.spec, self.num_pages, platform.device))
        self.compiled = self._compiled(pool)
        sizes = (self.max_num_seqs, self.max_row_len)
        self.runner = ModelRunner(
            self.model,
            pool,
            platform,
            *sizes,
            self._graphs(),
            self.speculation,
            self.compiled,
            # counted only where it matters: an NPU's packed int4 weights cannot be counted
            self._piecewise_tokens(partial(weight_bytes, self.model)),
            self._captured(pool),
        )
        self.runner.mover = self.mover
        self.runner.shares_prefixes = config.enable_prefix_caching
        self.runner.batched_tokens = self.batched_tokens
        if self.remote is not None:
            self.runner.calls = self.remote.calls
            if self.remote.group is not None:
                self.remote.group.left = self._on_group_lost
            if self.remote.misses is not None:
                # whether a step is dropped: requested after it; the reply waits for the device
                self.runner.agree = self.remote.agree_on_misses
        if self.alternates:
            self.runner.turns = StepsInTurns()
        self.step_times: StepTimes | None = None
        parts = config.micro_batches
        if parts in (AUTO, PARTS):  # more parts than two are launched eagerly
            self.runner.capture_parts(self._part_tokens)
        if isinstance(parts, int):
            self.runner.micro_batches = FixedParts(parts)
        if self.host_pages:
            self.runner.host = self._phase(
                "host memory", lambda: HostMemory(pool, platform, self.host_pages)
            )
        steps = self._captured_steps()
        if config.precompile_kernels:
            self._phase("kernels", self._compile_ahead)
        if not isinstance(parts, int):
            if self.runner.parts is not None:  # which are to be timed as they will be replayed
                self._phase("graphs of prompts", self.runner.capture_prompts)
            self.runner.micro_batches = self._measured_parts()
        self._phase("graphs", lambda: self.runner.capture(*steps))
        self._forget_load()
        if config.precompile_kernels:
            self._watch_kernels(self.late_kernels.note)

    def _watch_kernels(self, noted: Callable[[str, float], None] | None) -> None:
        if self.platform.compiles:
            ops_for(self.platform.name).watch_kernels(noted)

    def _compile_ahead(self) -> None:
        kept = self.kept_parts
        place = self.mesh.stage, self.platform.device
        if kept.path is not None and not agreed(kept.names, *place):
            kept.names = None
        met = self.runner.compile_ahead(*self._captured_steps(), kept.names)
        if kept.path is not None and met is not None:
            kept.learn(of_all_ranks(met, *place))

    @cached_property
    def kept_parts(self) -> KeptParts:
        whole = self.mesh.sizes.pp == 1 and self.remote is None
        if not (whole and self.platform.compiles) or self.compiles:
            return KeptParts(None)
        device = ops_for(self.platform.name).kernel_choice(self.platform.device)
        sizes = (self.max_num_seqs, self.max_row_len, self.batched_tokens, self.dtype)
        choice = (device, *sizes, self.mesh.rank)
        return KeptParts(kept_path(self.config, self.model_config, choice))

    @torch.inference_mode()
    def _forget_load(self) -> None:
        """The experts of warm-up steps are no requests' choice."""
        for layer in self.model.moe_layers():
            layer.exchange.load.zero_()

    def _captured_steps(
        self,
    ) -> tuple[tuple[SamplingVariant, ...], tuple[int, ...], Sequence[int] | None]:
        """Sampling variants, draft counts and batch sizes (None: all) to capture."""
        adapts = self.config.speculative_policy == "adaptive"
        choices = draft_count_choices(self.config.num_speculative_tokens, adapts)
        return CAPTURED, choices, self.config.cudagraph_capture_sizes

    def _measured_parts(self) -> MicroBatchPolicy:
        """How steps are split into micro-batches, by measured times. Collective."""
        width = self.config.num_speculative_tokens + 1
        captured = self.runner.graphs is not None
        limits = Limits(
            self.max_num_seqs,
            width,
            self.batched_tokens,
            self.max_model_len,
            captured,
            self.config.precompile_kernels and self.platform.compiles and not self.compiles,
        )
        times = self._phase("micro-batches", partial(self._step_times, limits))
        self.step_times = times
        if self.mesh.rank == 0:
            for line in lines(times):
                log.info("%s", line)
        return MeasuredParts(times)

    def _step_times(self, limits: Limits) -> StepTimes:
        again = partial(measure, self.runner, limits)
        if not self.config.keep_step_times:
            return again()
        kept = KeptTimes(self.config, self.model_config, self.mesh, self.platform)
        return kept.times(again, partial(deviation, self.runner, limits))

    def _phase(self, name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        self.startup[name] = self.startup.get(name, 0.0) + time.perf_counter() - start
        return result

    def _check_cache_dtype(self) -> None:
        """Before loading weights: whether the device supports an 8-bit cache."""
        config = self.config
        platform = self.platform
        dtype = kv_dtype(config.kv_cache_dtype)
        if dtype not in EIGHT_BITS:
            return
        others = "auto, bfloat16, float16, float32"
        if dtype == FP8 and not platform.converts_fp8:
            raise ConfigError(
                "kv_cache_dtype=fp8 needs compute capability 8.9, not "
                f"{platform.describe()}; accepted here: int8, {others}"
            )
        if not isinstance(self.model_config.attention, MLAConfig):
            return
        spec = kv_spec(
            self.model_config, 1, config.kv_cache_dtype, config.mla_decode, activations=self.dtype
        )
        row = spec.layers[0][0].bytes_per_token
        if platform.name == "cuda" and row % 16:
            raise ConfigError(
                f"kv_cache_dtype={short_name(dtype)}: a row of this model's cache has {row} "
                f"bytes, no multiple of 16; accepted here: {others}"
            )

    def _max_model_len(self) -> int:
        longest = self.model_config.max_position
        wanted = self.config.max_model_len
        if wanted is not None and wanted > longest:
            raise ConfigError(f"max_model_len={wanted} exceeds the model's {longest} positions")
        return wanted or longest

    def _speculation(self) -> Speculation | None:
        config = self.config
        if not config.num_speculative_tokens:
            return None
        drafter = "mtp" if config.drafter == "auto" else config.drafter
        return Speculation(
            drafter, config.num_speculative_tokens, config.draft_window, config.simulated_acceptance
        )

    @property
    def mtp_layers(self) -> int:
        """Number of prediction modules in use, on any rank."""
        return (
            self.model_config.num_mtp_layers
            if self.speculation and self.speculation.drafter == "mtp"
            else 0
        )

    def _graphs(self) -> bool:
        mode = EXE_MODES[self.config.exe_mode]
        if mode == "compile" and self._compiles_sizes():
            return True  # batches are padded to sizes that have a graph
        if self.platform.name == "npu" and mode == "auto" and self.speculation:
            return False  # the host does not know the lengths under speculation
        if mode == "graph" and not self.platform.has_graphs:
            raise ConfigError(
                f"exe_mode={self.config.exe_mode!r} is not supported on "
                f"{self.platform.name}; accepted: auto, eager, compile"
            )
        if self.remote is not None and self.remote.capturable:
            recordable = not self.alternates  # alternating steps are suspended midway
        else:
            recordable = captures_decode(self.config.parallel, self.model_config.moe)
        return mode != "eager" and self.platform.has_graphs and recordable

    def _compiles_sizes(self) -> bool:
        from rorqual.engine.execution.compiled import same_rows_on_all_ranks

        npu = self.platform.name == "npu"
        return npu or not same_rows_on_all_ranks(self.config.parallel, self.model_config.moe)

    def _piecewise_tokens(self, weights: Callable[[], int]) -> int:
        """Tokens of a rank up to which steps with prompts are captured; 0 on an NPU, whose
        attention takes lengths from the host. Collective. weights: bytes of the whole model on this
        rank."""
        if self.compiles or self.platform.name == "npu":
            return 0
        wanted = self.config.piecewise_tokens
        if self.remote is not None:  # only where configured: no measurement shows a gain
            most = self.remote.piecewise_rows if self.mesh.is_single else 0
            return min(wanted or 0, most, self.batched_tokens)
        if wanted is None and self.config.single_rank_bench and not self.mesh.is_single:
            return 0  # only where configured: not measured
        if wanted is None:
            wanted = self._agree(piecewise_tokens(weights() / self.model_config.num_layers))
        if not self.mesh.is_single:
            sizes, moe = self.mesh.sizes, self.model_config.moe
            wanted = min(wanted, captured_prompt_tokens(sizes, moe, self.batched_tokens))
        return min(wanted, self.batched_tokens)

    def _part_tokens(self, captured: int) -> int:
        """Tokens of a micro-batch up to which steps in two are captured, where steps of up to
        `captured` are: two are launched in twice the time. They may differ by a tenth."""
        wanted = min(2 * captured, self.batched_tokens // 2) * 9 // 8
        sizes, moe = self.mesh.sizes, self.model_config.moe
        return min(wanted, captured_prompt_tokens(sizes, moe, self.batched_tokens))

    @property
    def compiles(self) -> bool:
        return EXE_MODES[self.config.exe_mode] == "compile"

    def _compiled(self, pool: KVPool) -> CompiledForward | NpuCompiledForward | None:
        if not self.compiles:
            return None
        if self.platform.name == "npu":
            from rorqual.engine.npu.compiled import NpuCompiledForward, graph_folder

            where = graph_folder(self.config, self.model, self.num_pages, self.platform.describe())
            return NpuCompiledForward(self.model, pool, where)
        from rorqual.engine.execution.compiled import CompiledForward, code_folder
        from rorqual.ops.custom_ops import TracedOps

        assert isinstance(self.model.ops, TracedOps)
        config = self.config
        folder = (
            code_folder(self.platform.describe(), config.case_name)
            if config.enable_cache_compile
            else None
        )
        return CompiledForward(self.model, pool, self.model.ops, folder)

    def _captured(self, pool: KVPool) -> CapturedForward | None:
        """On a CPU a captured decode step is the forward pass as a list of compiled calls."""
        fits = self.mesh.is_single and self.remote is None and not self.alternates
        wanted = EXE_MODES[self.config.exe_mode] == "auto" and self.model.ops.captures_calls
        if not (fits and wanted):
            return None
        return CapturedForward(self.model, pool, self.decode_rows, self.max_row_len)

    # ---- the model

    def _slot_maps(self) -> dict[int, SlotMap]:
        """Slot maps by layer, where experts are not in order. Collective: ranks compare theirs,
        because ranks that read different files would send tokens to the wrong experts."""
        found = initial_maps(self.config, self.model_config)
        if self.config.init_expert_load and not self.config.single_rank_bench:
            check = zlib.crc32(repr(sorted(found.items())).encode())
            ends = torch.tensor([check, -check], device=self.platform.device)
            dist.all_reduce(ends, dist.ReduceOp.MAX)
            if int(ends.sum()):
                raise ConfigError(
                    f"init_expert_load={self.config.init_expert_load!r} is not the same file on "
                    "all hosts"
                )
        return {
            layer: SlotMap(slots, self.model_config.moe.num_experts)
            for layer, slots in found.items()
        }

    @property
    def alternates(self) -> bool:
        """Whether two steps alternate in this process."""
        return self.config.parallel.pp == 1 and (self.config.parallel.pipeline_turns or 1) > 1

    @property
    def calls_at_once(self) -> int:
        """Most concurrent calls to one expert server."""
        return 2 if self.alternates else self.config.parallel.most_micro_batches

    def _remote_experts(self) -> RemoteExperts | None:
        config = self.config
        remote = config.remote_experts()
        if remote is None:
            return None
        return RemoteExperts(
            remote,
            config,
            self.model_config,
            getattr(torch, self.dtype),
            self.expert_layers,
            max(self.batched_tokens, self.decode_rows),
            self.decode_rows,
            self.calls_at_once,
            self.platform,
            self.mesh,
        )

    @property
    def experts(self) -> ExpertServers | None:
        """Expert servers, where they hold the routed experts."""
        return None if self.remote is None else self.remote.servers

    @property
    def decode_rows(self) -> int:
        """Most rows of a decode step."""
        return self.max_num_seqs * (self.config.num_speculative_tokens + 1)

    def _on_group_lost(self) -> None:
        """A server is lost, and with it the process group: captured steps cannot be replayed any
        more."""
        assert self.remote is not None
        self.runner.drop_captured()
        self.runner.graphs = None
        self.runner.pieces = None
        self.all2all_backend = self.remote.describe_tcp()

    def abandon(self) -> None:
        """Drop the steps in flight: what is not computed yet never will be."""
        self.runner.abandon()
        if self.remote is not None:
            self.remote.lanes.clear()

    def close(self) -> None:
        """Close the connections to expert servers."""
        if self.remote is None:
            return
        if self.remote.group is not None:
            self.runner.drop_captured()  # captured steps keep their communicators alive
        self.remote.servers.close()

    def _build(self, device: torch.device) -> Build:
        gain = RESIDUAL_GAIN * (2 * self.model_config.num_layers) ** -0.5
        dtype = getattr(torch, self.dtype)
        ops = ops_for(self.platform.name)
        if self.platform.name == "npu":
            set_streams(ops, self.config)
        elif self.compiles:
            # operators are registered only where something is compiled
            from rorqual.ops.custom_ops import TracedOps

            ops = TracedOps(ops, self.model_config.moe)
        host = (
            self.platform.host_empty
            if self.embeds_on_host and device == self.platform.device
            else None
        )
        return Build(
            ops,
            dtype,
            device,
            self.model_config.quant,
            gain,
            mesh=self.mesh,
            embedding_memory=host,
            slot_maps=self.slot_maps,
            simulated_routing=self._simulated_routing,
            fixed_experts=self.config.fixed_experts,
            remote=self.remote.exchange if self.remote else lambda layer: None,
        )

    def _simulated_routing(self, layer: int) -> SimulatedRouting | None:
        """For benchmarks: forced topk_ids of a layer, in place of its router's."""
        moe = self.model_config.moe
        device = self.platform.device
        if self.config.expert_balance == "forced":
            return UniformRouting(moe, device)
        counts = self.simulated.get(layer)
        return None if counts is None else SampledRouting(counts, moe.top_k, layer, device)

    @property
    def embeds_on_host(self) -> bool:
        return self.config.embed_device == "cpu"

    def _make(self, device: torch.device, config: ModelConfig | None = None) -> Transformer:
        """Build this model, or that of `config`."""
        forms = (self.config.mla_prefill, self.config.mla_decode)
        with_mtp = self.speculation is not None and self.speculation.drafter == "mtp"
        return make_model(
            config or self.model_config, self._build(device), self.max_row_len, *forms, with_mtp
        )

    def _load(self) -> Transformer:
        if self.embeds_on_host and self.model_config.tie_embeddings:
            raise ConfigError(
                "embed_device='cpu': this model's head is its embedding and must lie on the "
                "device; accepted: auto"
            )
        on_meta = self._check_memory()
        model = self._make(self.platform.device)
        self.platform.weights_made(view for target in model.targets() for view in target.views)
        if self.config.weights == "random":
            random_weights(model, self.config.seed)
        else:
            with self._compiling_beside(on_meta):
                load_weights(model, Path(self.config.model))
        if self.platform.name == "npu" and kv_dtype(self.config.kv_cache_dtype) in EIGHT_BITS:
            check_cache_scales(model)
        for layer in model.moe_layers():
            layer.exchange.record_load = self.config.counts_expert_load
        return model

    def _compiling_beside(self, on_meta: Transformer) -> AbstractContextManager[None]:
        """Context in which kernels are compiled too, where that is possible and memory suffices.
        on_meta: this model on the meta device."""
        if not (self.config.precompile_kernels and self.platform.compiles and self._graphs()):
            return nullcontext()
        if not self.mesh.is_single or self.compiles or self.experts is not None:
            return nullcontext()
        count = layers_of_all_kinds(on_meta)
        sparse = self.model_config.moe_layers[:count]
        config = replace(self.model_config, num_layers=count, moe_layers=sparse)
        stand_in = self._make(torch.device("meta"), config)
        stand_in.finalize()
        weights = weight_bytes(on_meta)
        # before threads read: each of its many small calls would wait for them
        _ = self.kept_parts
        # this model's own weights are already allocated
        if not fits_beside(weight_bytes(stand_in), self.platform.available_memory()):
            return nullcontext()
        return beside(partial(self._compile_stand_in, config, weights), self.platform)

    @torch.inference_mode()
    def _compile_stand_in(self, config: ModelConfig, weights: int) -> None:
        """Compile the kernels of steps of a model of `config`; weights: bytes of the whole
        model."""
        model = self._make(self.platform.device, config)
        model.finalize()
        pool = KVPool(self._spec_of(config, model), STAND_IN_PAGES, self.platform.device)
        runner = ModelRunner(
            model,
            pool,
            self.platform,
            self.max_num_seqs,
            self.max_row_len,
            True,
            self.speculation,
            None,
            self._piecewise_tokens(lambda: weights),
        )
        runner.shares_prefixes = self.config.enable_prefix_caching
        runner.batched_tokens = self.batched_tokens
        # what meets kernels is learnt from the whole model: its cache has another size
        runner.compile_ahead(*self._captured_steps(), self.kept_parts.names)

    def _check_memory(self) -> Transformer:
        """Raise before allocating where memory does not suffice: returns the model on the meta
        device, built to count its bytes."""
        model = self._make(torch.device("meta"))
        model.finalize()
        need = weight_bytes(model)
        if self.embeds_on_host and self.platform.name != "cpu" and model.embed is not None:
            need -= model.embedding.numel() * model.embedding.element_size()
        free = self.platform.available_memory()
        if need > free:
            raise CapacityError(
                f"the weights need {need / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free "
                f"on {self.platform.name}"
            )
        return model

    def _links(self) -> None:
        """Set up all-reduce and exchange of decode steps; allocates their memory before the
        cache."""
        config = self.config
        model = self.model_config
        device = self.platform.device
        rows = self.max_num_seqs * (config.num_speculative_tokens + 1)
        dtype = getattr(torch, self.dtype)
        sizes = rows, model.hidden_size, model.moe, dtype, device, config.p2p_memory
        self.allreduce_backend = self.mesh.allreduce_backend(*sizes)
        if self.experts is None:
            self.all2all_backend = (
                self.mesh.all2all_backend(*sizes) if any(model.moe_layers) else "no experts"
            )
        if self.platform.name == "npu" and "low_latency" in possible_exchanges(
            config.parallel, model.moe
        ):
            self.all2all_backend = connect_dispatch(
                self.model.ops, self.mesh, model, self.platform, rows
            )
        if self.mesh.rank == 0:
            log.info(
                "decode steps add up partial sums by %s, and reach their experts by %s",
                self.allreduce_backend,
                self.all2all_backend,
            )

    @property
    def expert_layers(self) -> list[int]:
        """Numbers of all layers, of any stage, whose experts are in use."""
        last = self.model_config.num_layers + self.mtp_layers
        return [layer for layer in expert_layers(self.model_config) if layer < last]

    def _mover(self) -> ExpertMover | None:
        """Moves experts between ranks; allocates its memory before the cache."""
        if not self.config.enable_eplb or self.mesh.weights is None:
            return None
        held = self.model.cache_layers
        numbers = [layer for layer in self.expert_layers if layer in held]
        layers = dict(zip(numbers, self.model.moe_layers(), strict=True))
        most = self._agree(slots_per_move(layers.values()))
        return ExpertMover(layers, self.mesh.weights, self.platform, most)

    def fetch_load(self) -> Callable[[], torch.Tensor]:
        """Start to copy this rank's expert load, [layers, experts]; the returned function waits for
        it."""
        loads = [layer.exchange.load for layer in self.model.moe_layers()]
        if not loads:
            return lambda: torch.zeros(0, self.model_config.moe.num_experts, dtype=torch.int64)
        with self.platform.stream():
            return self.platform.fetch(torch.stack(loads))

    # ---- the cache

    @property
    def whole_spec(self) -> KVSpec:
        """Of all heads and layers, the same on every rank."""
        return self._whole_spec_of(self.model_config, self.model)

    def _whole_spec_of(self, config: ModelConfig, model: Transformer) -> KVSpec:
        page = self.config.page_size or self.platform.default_page_size
        return kv_spec(
            config,
            page,
            self.config.kv_cache_dtype,
            self.config.mla_decode,
            self.mtp_layers,
            activations=self.dtype,
            split_latent=model.ops.splits_latents,
        )

    @property
    def cache_layers(self) -> range:
        """The layers whose caches this rank holds."""
        return self._cache_layers_of(self.model)

    def _cache_layers_of(self, model: Transformer) -> range:
        """Prediction modules are on the last stage, after the model's layers."""
        held = model.held
        return range(held.start, held.stop + self.mtp_layers * self.mesh.last_stage)

    def _spec_of(self, config: ModelConfig, model: Transformer) -> KVSpec:
        """Of this rank's heads and layers of `model`."""
        layers = self._cache_layers_of(model)
        return self._whole_spec_of(config, model).shard(self.mesh.sizes.tp, layers)

    def _num_pages(self) -> int:
        """Pages for max_num_seqs requests of full length, or as many as the reserved memory holds;
        page 0 is extra."""
        config = self.config
        spec = self.spec
        if config.num_pages:
            return config.num_pages
        most = self.max_num_seqs * -(-self.max_model_len // spec.page_size)
        pages = min(most, self._cache_bytes() // spec.bytes_per_page)
        if pages < 1:
            beside = f" beside {self.workspace} bytes for attention" if self.workspace else ""
            page = f"one cache page of {spec.bytes_per_page} bytes"
            raise CapacityError(f"no room for {page}{beside}{self._why_no_room()}")
        return pages + 1

    @property
    def workspace(self) -> int:
        """Most bytes into which MLA layers in form CC decompress cached latents."""
        config = self.config
        mla = self.model_config.attention
        if not isinstance(mla, MLAConfig) or "CC" not in (config.mla_prefill, config.mla_decode):
            return 0
        own = replace(mla, num_heads=mla.num_heads // self.mesh.sizes.tp)
        return workspace_bytes(
            own,
            DTYPE_BYTES[self.dtype],
            self.platform.device.type,
            self.spec.page_size,
            requests=self.max_num_seqs,
            longest=self.max_row_len,
            queries=min(self.batched_tokens, config.chunked_prefill_size or self.max_row_len),
        )

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once. By default many where memory allows: beyond what the cache
        holds they wait, or are preempted, but until then each adds to tokens/s and none waits for
        its first token. Several ranks and expert servers have buffers for all of them, and with
        drafts several rows of each are sampled: there fewer."""
        config = self.config
        if config.max_num_seqs is not None:
            return config.max_num_seqs
        alone = config.parallel.is_single and not config.remote
        large = self.platform.has_large_memory(config.memory_utilization)
        if not (alone and large) or config.num_speculative_tokens:
            return DEFAULT_NUM_SEQS
        # a step has room for all of them
        room = config.max_num_batched_tokens or MOST_NUM_SEQS
        return max(DEFAULT_NUM_SEQS, min(MOST_NUM_SEQS, room))

    @property
    def batched_tokens(self) -> int:
        """Most tokens of a step."""
        config = self.config
        if config.max_num_batched_tokens is not None:
            return config.max_num_batched_tokens
        least = self.max_num_seqs * (config.num_speculative_tokens + 1)
        return max(self.platform.default_batched_tokens, least)

    def _cache_bytes(self) -> int:
        """Memory remaining beside weights and workspace, unless the cache's size is configured."""
        if self.config.kv_cache_bytes:
            return self.config.kv_cache_bytes
        free = self.platform.available_memory() - self.workspace
        if self.platform.name == "cpu":
            return min(CPU_CACHE_BYTES, int(free * CPU_CACHE_SHARE))
        total = self.platform.total_memory()
        return int(free - (1 - self.config.memory_utilization) * total)

    def _why_no_room(self) -> str:
        """What of a GPU's memory is left, where its size decides."""
        if self.config.kv_cache_bytes or self.platform.name == "cpu":
            return ""
        total = self.platform.total_memory() / 2**30
        free = self.platform.available_memory() / 2**30
        share = self.config.memory_utilization
        return (
            f": memory_utilization={share:g} is of {total:.1f} GiB for all programs together, and "
            f"{total - free:.1f} GiB are in use, this engine's weights included"
        )

    def _host_pages(self) -> tuple[int, int]:
        """Pages that host memory holds, and pages that a step copies each way."""
        host = int(self.config.kv_host_memory * 2**30)
        if not host:
            return 0, 1
        size = self.spec.bytes_per_page
        if self.platform.name == "cpu":  # the cache itself is in the same memory
            check_host_memory(self.config, self.platform, self.mesh, self.num_pages * size)
        pages = self._agree(host // size)
        if not pages:
            raise ConfigError(
                f"kv_host_memory={self.config.kv_host_memory} holds no page, which takes {size} "
                "bytes on this rank"
            )
        step = self._agree(max(1, self.platform.host_step_bytes // size))
        if self.mesh.rank == 0:
            log.info(
                "host memory holds %d pages (%d tokens) that the cache gives up, %.2f GiB a rank",
                pages,
                pages * self.spec.page_size,
                pages * size / 2**30,
            )
        return pages, step

    def _agree(self, count: int) -> int:
        """The smallest count of any rank: all ranks have one block table, and replay the same
        steps."""
        if self.mesh.is_single or self.config.single_rank_bench:
            return count
        least = torch.tensor(count, device=self.platform.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)


def weight_bytes(model: Loadable) -> int:
    """Bytes of all parameters, merged ones counted once, and of tensors derived from them."""
    held = [view for target in model.targets() if not target.covers for view in target.views]
    return sum(view.numel() * view.element_size() for view in held + model.derived())
