"""How to run a model: sizes, limits and choices, validated once. No torch."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from rorqual.cache.spec import check_forms, kv_dtype
from rorqual.config.option import by_field, check_options, check_positive, option, same_option
from rorqual.config.parallel import EXCHANGES, REMOTE, ParallelConfig, read_micro_batches
from rorqual.config.quant import QUANTIZATIONS
from rorqual.engine.scheduling.chunk_controller import AUTO, OFF, itl_target
from rorqual.errors import ConfigError
from rorqual.parallel.remote.config import (
    MAX_SERVERS,
    TRANSPORTS,
    RemoteConfig,
    read_address,
    read_link_secret,
)
from rorqual.parallel.remote.group.messages import MAX_MEMBERS
from rorqual.registry.expert_registry import check_registry, expert_registry

# Also accepts the documents' names for the modes.
EXE_MODES = {
    "auto": "auto",
    "eager": "eager",
    "graph": "graph",
    "acl_graph": "graph",
    "reduce-overhead": "graph",
    "compile": "compile",
    "ge_graph": "compile",
    "max-autotune": "compile",
}
MAX_SPECULATIVE_TOKENS = 8
MAX_PIECEWISE = 65_536
# of max_num_seqs: for most devices, and for one with large memory
DEFAULT_NUM_SEQS = 256
MOST_NUM_SEQS = 1024
MAX_SEQS = 2**31 - 1  # memory for their state ends before
# far more than help: OpenMP ends the process, without an error, where it cannot start them
MAX_THREADS = max(4096, os.cpu_count() or 1)
MAX_HOST_MEMORY = 16_384  # GiB
CASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DTYPES = ("auto", "bfloat16", "float16", "float32")


def read_recipe(path: Path) -> tuple[str | None, dict[str, Any]]:
    """(model, engine options) of a YAML file. Raises ConfigError where it is none, or names an
    option that does not exist."""
    import yaml  # only here: an engine needs no YAML

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        # ValueError: not UTF-8, or a date that does not exist
        raise ConfigError(
            f"{path} cannot be read as YAML: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no mapping of options")
    model = data.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"model={model!r} in {path} must be a folder or a Hugging Face id")
    data = by_field(EngineConfig, data)
    EngineConfig.from_dict({"model": "", **data})  # raises for the first invalid option
    return model, {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
    }


_cache = partial(option, group="Cache")
_scheduling = partial(option, group="Scheduling")
_execution = partial(option, group="Execution")
_speculation = partial(option, group="Speculation")
_parallel = partial(option, group="Parallel")
_size = partial(same_option, ParallelConfig)


@dataclass(frozen=True)
class EngineConfig:
    """None means: derived from the model, the device or the memory at hand.

    On several ranks the sizes are those of ParallelConfig; max_num_seqs and the cache are then
    those of one data-parallel rank.
    """

    model: str
    dtype: str = option(
        "auto", "auto, bfloat16, float16 or float32.", group="Model", choices=DTYPES
    )
    kv_cache_dtype: str = _cache(
        "auto",
        "The cache's dtype: auto (the model's), or as --dtype, or in half the bytes fp8 (also "
        "fp8_e4m3, float8_e4m3fn) or int8. MLA: a scale for each 128 columns of a latent, rope "
        "keys as they are. Grouped-query attention: a scale for each token's key and value of a "
        "head.",
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:N, npu or npu:N.", group="Model")
    weights: str = option(
        "checkpoint",
        "checkpoint, or random: a config.json is enough.",
        group="Model",
        choices=("checkpoint", "random"),
    )
    quantization: str = option(
        "auto",
        "How weights are held: auto, as in the checkpoint; or a bf16 checkpoint is rounded while "
        f"it is read, matrix by matrix: {', '.join(QUANTIZATIONS)}. w4a16 has groups of 128.",
        group="Model",
        choices=("auto", *QUANTIZATIONS),
    )
    quantize_head: str = option(
        OFF,
        "How the output head is held, which quantized checkpoints leave wide: off, or rounded "
        f"while it is read: {', '.join(QUANTIZATIONS)}.",
        group="Model",
        choices=(OFF, *QUANTIZATIONS),
    )
    seed: int = option(0, "Seed of random weights.", group="Model", flags=("--engine-seed",))
    max_model_len: int | None = _scheduling(
        None, "Longest sequence, prompt and output together.", at_least_one=True
    )
    max_num_seqs: int | None = _scheduling(
        None,
        f"Sequences that run at once in one engine. If left out {DEFAULT_NUM_SEQS}, or "
        f"{MOST_NUM_SEQS:,} on one GPU with 100 GiB of memory to use, without drafts.",
        at_least_one=True,
        least=1,
        most=MAX_SEQS,
    )
    max_num_batched_tokens: int | None = _scheduling(
        None, "Tokens of one step; 8192 on a GPU, 2048 on a CPU if left out.", at_least_one=True
    )
    itl_ms: str = _scheduling(
        OFF,
        "How long a step with prompts may hold up those that decode: milliseconds; auto: three of "
        "their steps, or what it takes to be through with all that waits in little more than the "
        "time it would take alone; off: as many tokens as fit. Where it is not off chunks depend "
        "on the clock, and in bf16 a token may differ from run to run. A server on a CPU takes "
        "auto if left out.",
    )
    scheduling_policy: str = _scheduling(
        "fair",
        "fair: requests wait by client, the least served first, and none may name a priority; or "
        "priority: by the request's priority, the lowest number first, then fair.",
        choices=("fair", "priority"),
    )
    chunked_prefill_size: int | None = _scheduling(
        None, "Most prompt tokens of one request in a step.", at_least_one=True
    )
    page_size: int | None = _cache(
        None, "Tokens of a cache page.", aliases=("block_size",), at_least_one=True
    )
    num_pages: int | None = _cache(
        None, "Pages of the cache; as many as fit if left out.", at_least_one=True
    )
    kv_cache_bytes: int | None = _cache(
        None, "Most bytes of the cache; --num-pages goes before it.", at_least_one=True
    )
    memory_utilization: float = _cache(
        0.9, "Share of the device's memory to use.", aliases=("gpu_memory_utilization",)
    )
    enable_prefix_caching: bool = _cache(
        True, "Keep and find pages of common prefixes.", aliases=("prefix_caching",)
    )
    kv_host_memory: float = _cache(
        0.0,
        "GiB of host memory of each rank for pages that the prefix cache evicts; 0 for none. "
        "Pinned where the device is a GPU.",
    )
    mla_prefill: str = _execution("CC", "MLA form for prompts: CD, CC, A_CC, A_CC_ME or AM_CC_ME.")
    mla_decode: str = _execution("A_CC_ME", "MLA form for decode steps.")
    steps_in_flight: int | None = _execution(
        None,
        "Steps launched before the first is read: what the device wants, and one more for each "
        "micro-batch after the first, if left out.",
        at_least_one=True,
    )
    exe_mode: str = _execution(
        "auto",
        "eager, graph (also acl_graph, reduce-overhead: decode steps are captured and replayed), "
        "compile (also ge_graph, max-autotune: decode steps go through torch.compile, with a cache "
        "that survives restarts, and are captured where the device has graphs), or auto: graph "
        "where the device has it, and on a CPU the forward pass captured as compiled calls.",
        choices=tuple(EXE_MODES),
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = _execution(
        None,
        "Batch sizes whose steps are recorded at the start, the others when first needed; all, up "
        "to --max-num-seqs, if left out.",
    )
    piecewise_tokens: int | None = _execution(
        None,
        "Steps with prompts, of up to so many tokens, are recorded in pieces between which "
        "attention is launched; 0 for none. If left out, 4096, or none where a GPU holds more than "
        "4 GiB of weights of a layer, which take longer to read than to launch. With --experts "
        "over shared memory none if left out. Not with --pp; steps that use the all-to-all "
        "exchange are not recorded.",
    )
    precompile_kernels: bool = _execution(
        True,
        "Kernels of recorded steps are compiled side by side before, not one after the other when "
        "they are first launched.",
    )
    enable_cache_compile: bool | None = _execution(
        None,
        "With exe_mode compile alone: keep compiled code below the cache folder, for the next "
        "start; yes if left out. --no-enable-cache-compile keeps nothing and finds nothing.",
    )
    keep_step_times: bool = _execution(
        True,
        "With micro_batches auto: keep measured times below the cache folder, for the next start "
        "with the same options on the same machines, which times two sizes again and measures anew "
        "where these differ by more than a quarter.",
    )
    case_name: str | None = _execution(
        None,
        "With exe_mode compile: the folder below the cache folder that keeps compiled code.",
        env="CASE_NAME",
    )
    enable_superkernel: bool = _execution(
        False, "NPU, with exe_mode compile: all decoder layers in one SuperKernel scope."
    )
    enable_multi_streams: bool = _execution(
        False,
        "NPU, with exe_mode compile: shared experts on a stream of their own, beside routed ones.",
    )
    embed_device: str = _execution(
        "auto",
        "auto (the device), or cpu: the embedding table stays in pinned host memory, from where "
        "the device reads rows.",
        choices=("auto", "cpu"),
    )
    num_layers: int | None = option(
        None,
        "Cut a random model to this many layers.",
        group="Model",
        aliases=("layers",),
        at_least_one=True,
    )
    num_speculative_tokens: int = _speculation(
        0, "Speculative drafts a request and step; 0 is off.", aliases=("next_n",)
    )
    drafter: str = _speculation(
        "auto",
        "Who guesses: mtp (the checkpoint's prediction modules; auto is the same) or ngram "
        "(look-up in the request's own text, for every model).",
        choices=("auto", "mtp", "ngram"),
    )
    speculative_policy: str = _speculation(
        "fixed",
        "fixed, or adaptive: fewer drafts where that is faster, by batch size.",
        aliases=("next_n_policy",),
        choices=("fixed", "adaptive"),
    )
    draft_window: bool = _speculation(
        True, "The prediction module sees every row of a step, not the last alone."
    )
    simulated_acceptance: tuple[float, ...] = _speculation(
        (),
        "Probabilities by place that a draft is taken, whatever it says; for benchmarks with "
        "random weights.",
    )
    tp: int = _size("tp")
    dp: int = _size("dp")
    pp: int = _size("pp")
    ep: int = _size("ep")
    dense_tp: int | None = _size("dense_tp")
    embed_tp: int | None = _size("embed_tp")
    head_tp: int | None = _size("head_tp")
    exchange: str = _size("exchange")
    pipeline_turns: int | None = _size("pipeline_turns")
    micro_batches: int | str = _size("micro_batches")
    sequence_parallel: bool = _size("sequence_parallel")
    fp8_dispatch: bool = _size("fp8_dispatch")
    redundant_experts: int = _size("redundant_experts")
    enable_eplb: bool = _size("enable_eplb")
    eplb_window: int = _parallel(
        100,
        "Steps of one count of picks, for balancedness in /metrics as well, and between two looks "
        "at them.",
        at_least_one=True,
    )
    eplb_decay: float = _parallel(
        0.5, "What counts of picks still count for a window later: 0 forgets them, 1 keeps all."
    )
    eplb_threshold: float = _parallel(
        0.9,
        "Balancedness (mean over max of the ranks' loads, mean over layers) under which experts "
        "are moved, if what that gains exceeds what it costs.",
    )
    fixed_experts: bool = _parallel(
        False,
        "Dense layers are computed as one shared expert and others that every token picks, spread "
        "over --ep like the routed ones.",
    )
    expert_balance: str = _parallel(
        "natural",
        "natural, or forced: tokens go to all experts equally often, whatever the router says. For "
        "benchmarks: what is computed is as much, tokens mean nothing.",
        choices=("natural", "forced"),
    )
    simulated_expert_load: str | None = _parallel(
        None,
        "With --single-rank-bench: tokens go to experts as often as the counts of this file say.",
    )
    simulated_rank: str = _parallel(
        "hottest",
        "With --simulated-expert-load: the rank to be, in each layer the one with most to do "
        "(hottest), or the one nearest to the mean.",
        choices=("hottest", "mean"),
    )
    init_expert_load: str | None = _parallel(
        None,
        "Place experts by the counts of this file, on every host at the same path (JSON with "
        "`logical_count` [layers, experts], as bench offline --expert-load writes it). Without it "
        "they lie in order, and the first have second copies.",
    )
    p2p_memory: bool = _parallel(
        True,
        "Decode steps add up partial sums and reach their experts through memory that the GPUs "
        "of a host share, where they can; else by collectives.",
    )
    single_rank_bench: bool = _parallel(
        False,
        "Compute what rank 0 of the layout computes, without the others: collectives bring copies "
        "of its own rows, or nothing. For benchmarks with random weights; --max-num-seqs are its "
        "own.",
    )
    slow_link_gbits: float = _parallel(
        0.0,
        "For benchmarks on GPUs, with --no-p2p-memory: what a rank sends by collectives arrives "
        "after the time that it would take on a link of so many Gbit/s.",
    )
    watchdog_seconds: float = _parallel(
        60.0, "A rank silent for so long, or a collective that takes longer, ends the engine."
    )
    first_device: int = _parallel(0, "The ranks of a host take its GPUs in order from this one on.")
    launcher: str = _parallel(
        "local",
        "Who starts the other ranks: local (this process, on this host), torchrun or ray.",
        choices=("local", "torchrun", "ray"),
    )
    interface: str | None = _parallel(
        None, "torchrun, ray: the network interface, or its address, that ranks meet on."
    )
    secret_file: str | None = _parallel(
        None, "torchrun, ray: a file of mode 600 on every host; else RORQUAL_SECRET is read."
    )
    experts: tuple[str, ...] = _parallel(
        (),
        "HOST:PORT of expert servers (`rorqual experts`), which hold the routed experts in place "
        "of this engine; may be repeated, or given with commas.",
    )
    experts_from: str | None = _parallel(
        None,
        "Where expert servers register (`rorqual experts --register`): http://HOST:PORT of a "
        "`rorqual route`, or etcd://HOST:PORT. They are taken in and left out while requests run.",
    )
    experts_from_secret_file: str | None = _parallel(
        None, "A file with the router's --admin-secret-file secret; etcd needs none."
    )
    expert_secret_file: str | None = _parallel(
        None,
        "A file with the secret that expert servers know as well; needed with --experts and "
        "--experts-from.",
    )
    expert_timeout: float = _parallel(
        2.0, "Seconds of silence after which an expert server is left out until it answers again."
    )
    expert_wait: float = _parallel(
        30.0, "Seconds that requests wait, and a start, for a server where none holds an expert."
    )
    expert_transport: str = _parallel(
        "auto",
        "How rows reach expert servers: tcp; handles (memory that GPUs of one host share, in a "
        "captured step); group (a process group with all of --experts, NCCL on GPUs, also of "
        "several hosts, in a captured step; one rank; over tcp once one is lost); auto: handles "
        "where every rank can with every server, else tcp.",
        choices=TRANSPORTS,
    )
    expert_rebalance: bool = _parallel(
        False,
        "Have expert servers load and drop experts as the load asks (--eplb-window, "
        "--eplb-threshold), and load what no server holds any more. One engine alone may, of those "
        "that share servers.",
    )
    record_expert_load: bool = _execution(False, "Count tokens by layer and expert.")
    threads: int | None = _execution(
        None, "CPU threads.", at_least_one=True, least=1, most=MAX_THREADS
    )
    ignore_config_fields: tuple[str, ...] = option(
        (),
        "A config.json field to disregard; may be repeated.",
        group="Model",
        aliases=("ignore_config_field",),
    )

    def __post_init__(self) -> None:
        check_forms(self.mla_prefill, self.mla_decode)
        check_options(self)
        object.__setattr__(self, "micro_batches", read_micro_batches(self.micro_batches))
        kv_dtype(self.kv_cache_dtype)  # raises ConfigError
        if EXE_MODES[self.exe_mode] == "compile" and self.mla_decode == "CC":
            raise ConfigError(
                f"exe_mode={self.exe_mode!r} does not go with mla_decode='CC'; accepted: CD, "
                "A_CC, A_CC_ME, AM_CC_ME"
            )
        if self.num_layers is not None and self.weights != "random":
            raise ConfigError(f"num_layers={self.num_layers} goes with weights='random' alone")
        self._check_capture_sizes()
        self._check_speculation()
        self._check_balance()
        assert self.itl_target is not None or self.itl_ms in (OFF, AUTO)  # raises ConfigError
        if not 0 <= (self.piecewise_tokens or 0) <= MAX_PIECEWISE:
            raise ConfigError(
                f"piecewise_tokens={self.piecewise_tokens} is out of range; accepted: 0 to "
                f"{MAX_PIECEWISE}"
            )
        if not 1 <= self.watchdog_seconds <= 3600:
            raise ConfigError(
                f"watchdog_seconds={self.watchdog_seconds} is out of range; accepted: 1 to 3600"
            )
        self._check_launch()
        self._check_experts()
        assert self.parallel  # raises ConfigError for sizes that do not fit one another
        if (self.pipeline_turns or 1) > 1 and self.pp == 1:
            self._check_turns()
        if EXE_MODES[self.exe_mode] == "compile" and not self.parallel.is_single:
            self._check_compiled_ranks()
        self._check_npu_options()
        self._check_kept_code()
        if self.init_expert_load is not None and self.ep == 1:
            raise ConfigError(
                f"init_expert_load={self.init_expert_load!r} needs ep of at least 2: with ep=1 "
                "every rank has a part of every expert"
            )
        self._check_host_memory()
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError(
                f"memory_utilization={self.memory_utilization} is out of range; accepted: "
                "above 0, up to 1"
            )

    def _check_host_memory(self) -> None:
        found = self.kv_host_memory
        number = isinstance(found, int | float) and not isinstance(found, bool)
        if not number or not 0 <= found <= MAX_HOST_MEMORY:
            raise ConfigError(
                f"kv_host_memory={found!r} is out of range; accepted: 0 to {MAX_HOST_MEMORY} (GiB)"
            )
        if found and not self.enable_prefix_caching:
            raise ConfigError(f"kv_host_memory={found} needs enable_prefix_caching")
        if found and self.for_npu:
            raise ConfigError(f"kv_host_memory={found} is for device auto, cpu or cuda")

    def _check_turns(self) -> None:
        """Without pipeline stages, turns are only for steps that wait for expert servers."""
        if not self.remote:
            raise ConfigError(
                f"pipeline_turns={self.pipeline_turns} needs pipeline stages to work on them: pp=1"
            )
        if self.pipeline_turns != 2:
            raise ConfigError(
                f"pipeline_turns={self.pipeline_turns} with experts in other processes; accepted: "
                "1, 2"
            )
        if self.kv_host_memory:
            raise ConfigError(
                "pipeline_turns=2 with experts in other processes does not go with "
                f"kv_host_memory={self.kv_host_memory}: pages are copied while a step still writes"
            )
        if self.micro_batches != 1 or not self.parallel.is_single:
            raise ConfigError(
                "pipeline_turns=2 with experts in other processes goes with one rank, and with "
                f"micro_batches=1, not {self.micro_batches}"
            )

    def _check_experts(self) -> None:
        """Which options work with expert servers."""
        if self.exchange == REMOTE or (self.remote and self.exchange != "auto"):
            raise ConfigError(
                f"exchange={self.exchange!r} is not known; accepted: {', '.join(EXCHANGES)}"
                if not self.remote
                else f"exchange={self.exchange!r} does not go with experts; accepted: auto"
            )
        if self.experts_from is None and self.experts_from_secret_file is not None:
            raise ConfigError("experts_from_secret_file goes with experts_from alone")
        if not self.remote:
            if self.expert_secret_file is not None:
                raise ConfigError("expert_secret_file goes with experts or experts_from alone")
            if self.expert_rebalance:
                raise ConfigError("expert_rebalance goes with experts or experts_from alone")
            if self.expert_transport != "auto":
                raise ConfigError("expert_transport goes with experts or experts_from alone")
            return
        if self.experts_from is not None:
            check_registry(self.experts_from)
        others = {
            "fixed_experts": self.fixed_experts,
            "single_rank_bench": self.single_rank_bench,
            "expert_balance": self.expert_balance != "natural",
            "init_expert_load": self.init_expert_load is not None,
        }
        found = [name for name, given in others.items() if given]
        if found:
            raise ConfigError(f"{found[0]} does not go with experts in other processes")
        if EXE_MODES[self.exe_mode] in ("graph", "compile"):
            raise ConfigError(
                f"exe_mode={self.exe_mode!r} does not go with experts in other processes, for "
                "which the host waits; accepted: auto, eager"
            )
        if self.for_npu:
            raise ConfigError("experts in other processes are for device auto, cpu or cuda")
        if self.expert_transport == "group":
            self._check_expert_group()
        if len(self.expert_servers) > MAX_SERVERS:
            raise ConfigError(
                f"experts names {len(self.expert_servers)} servers; accepted: {MAX_SERVERS}"
            )
        for name, least, most in (("expert_timeout", 0.05, 60), ("expert_wait", 0, 3600)):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"{name}={value} is out of range; accepted: {least} to {most}")

    def _check_expert_group(self) -> None:
        """A process group's members are fixed, and only one rank may call."""
        wrong = {
            "experts_from": self.experts_from is not None,
            "pipeline_turns": (self.pipeline_turns or 1) > 1,
            "tp": self.tp > 1,
            "dp": self.dp > 1,
            "pp": self.pp > 1,
        }
        for name, given in wrong.items():
            if given:
                raise ConfigError(
                    f"expert_transport='group' does not go with {name}={getattr(self, name)!r}; "
                    "accepted: auto, tcp"
                )
        if len(self.expert_servers) > MAX_MEMBERS:
            raise ConfigError(
                f"experts names {len(self.expert_servers)} servers; accepted with "
                f"expert_transport='group': {MAX_MEMBERS}"
            )

    @property
    def expert_servers(self) -> tuple[tuple[str, int], ...]:
        """Their addresses. Raises ConfigError."""
        names = [name.strip() for given in self.experts for name in given.split(",")]
        return tuple(dict.fromkeys(read_address(name, "experts") for name in names))

    @property
    def remote(self) -> bool:
        """Whether experts are in other processes."""
        return bool(self.experts) or self.experts_from is not None

    def remote_experts(self) -> RemoteConfig | None:
        """With secrets read from their files; None without expert servers."""
        if not self.remote:
            return None
        secret = read_link_secret(self.expert_secret_file, "expert_secret_file")
        registry = None
        if self.experts_from is not None:
            registry = expert_registry(
                self.experts_from, secret, self.experts_from_secret_file, "experts_from"
            )
        return RemoteConfig(
            self.expert_servers,
            secret,
            self.expert_timeout,
            self.expert_wait,
            registry,
            self.expert_transport,
        )

    def _check_compiled_ranks(self) -> None:
        """Which options a compiled step of several ranks does not support."""
        if self.for_npu:
            return
        wrong = {"pp": self.pp > 1, "micro_batches": self.micro_batches != 1}
        wrong["enable_eplb"] = self.enable_eplb
        for name, given in wrong.items():
            if given:
                raise ConfigError(
                    f"exe_mode={self.exe_mode!r} on several ranks does not go with "
                    f"{name}={getattr(self, name)!r}; accepted: auto, eager, graph"
                )

    @property
    def for_npu(self) -> bool:
        return self.device.partition(":")[0] == "npu"

    def _check_npu_options(self) -> None:
        for name in ("enable_superkernel", "enable_multi_streams"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} must be true or false")
            if value and not self.for_npu:
                raise ConfigError(f"{name}={value!r} needs device='npu', not {self.device!r}")

    def _check_kept_code(self) -> None:
        """Only code from torch.compile can be kept: not captured graphs, and not eager steps."""
        kept = self.enable_cache_compile
        compiles = EXE_MODES[self.exe_mode] == "compile"
        if kept not in (None, True, False):
            raise ConfigError(f"enable_cache_compile={kept!r} must be true or false")
        if kept and not compiles:
            raise ConfigError(
                f"enable_cache_compile=True does not go with exe_mode={self.exe_mode!r}, in which "
                "nothing is compiled that could be kept; accepted: compile (ge_graph)"
            )
        if kept is None and compiles:
            object.__setattr__(self, "enable_cache_compile", True)
        case = self.case_name
        if case is not None and not (isinstance(case, str) and CASE_NAME.fullmatch(case)):
            raise ConfigError(
                f"case_name={case!r}; accepted: up to 64 letters, digits, '-', '_' and '.', the "
                "first a letter or digit"
            )

    def _check_balance(self) -> None:
        for name, most in (("eplb_decay", 1.0), ("eplb_threshold", 1.0)):
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise ConfigError(f"{name}={value} is out of range; accepted: 0 to {most:g}")
        if self.simulated_expert_load is not None and not self.single_rank_bench:
            raise ConfigError("simulated_expert_load goes with single_rank_bench alone")
        if self.simulated_expert_load is not None and self.expert_balance == "forced":
            raise ConfigError("simulated_expert_load does not go with expert_balance='forced'")
        if self.enable_eplb and self.single_rank_bench:
            raise ConfigError("enable_eplb does not go with single_rank_bench: nothing can move")

    @property
    def counts_expert_load(self) -> bool:
        return self.record_expert_load or self.enable_eplb or self.expert_rebalance

    def _check_capture_sizes(self) -> None:
        sizes = self.cudagraph_capture_sizes
        if sizes is None:
            return
        if not isinstance(sizes, (tuple, list)):
            raise ConfigError(f"cudagraph_capture_sizes={sizes!r} must be a list of batch sizes")
        for size in sizes:
            check_positive("cudagraph_capture_sizes", size)
            if size > (self.max_num_seqs or DEFAULT_NUM_SEQS):
                left_out = f"; left out, it may be {DEFAULT_NUM_SEQS}"
                raise ConfigError(
                    f"cudagraph_capture_sizes={size} exceeds max_num_seqs={self.max_num_seqs}"
                    f"{'' if self.max_num_seqs else left_out}"
                )

    def _check_launch(self) -> None:
        if not 0 <= self.slow_link_gbits < math.inf:
            raise ConfigError(f"slow_link_gbits={self.slow_link_gbits}; accepted: 0 or more")
        if self.slow_link_gbits and (self.p2p_memory or self.parallel.is_single):
            raise ConfigError(
                "slow_link_gbits needs several ranks and p2p_memory=False: steps over shared "
                "memory send nothing"
            )
        if self.slow_link_gbits and (
            self.single_rank_bench or EXE_MODES[self.exe_mode] == "compile"
        ):
            raise ConfigError(
                "slow_link_gbits goes neither with single_rank_bench, which sends nothing, nor "
                "with compiled steps, whose collectives are not delayed"
            )
        if self.single_rank_bench and (
            self.weights != "random" or self.launcher != "local" or self.pp > 1
        ):
            raise ConfigError(
                "single_rank_bench needs weights='random' (its tokens mean nothing), "
                "launcher='local' and pp=1"
            )
        for name in ("interface", "secret_file"):
            if getattr(self, name) is not None and self.launcher == "local":
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} does not go with launcher='local'; "
                    "accepted: torchrun, ray"
                )
        if (
            isinstance(self.first_device, bool)
            or not isinstance(self.first_device, int)
            or self.first_device < 0
        ):
            raise ConfigError(
                f"first_device={self.first_device!r} must be an integer of at least 0"
            )
        if ":" in self.device and (self.first_device or not self.parallel.is_single):
            raise ConfigError(
                f"device={self.device!r} names one device; several ranks, and first_device, "
                "take: auto, cpu, cuda, npu"
            )

    @property
    def itl_target(self) -> float | None:
        """Seconds of a step, where itl_ms names them."""
        return itl_target(self.itl_ms)

    @property
    def parallel(self) -> ParallelConfig:
        given = {item.name: getattr(self, item.name) for item in fields(ParallelConfig)}
        if self.remote:
            given["exchange"] = REMOTE
        return ParallelConfig(**given)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> EngineConfig:
        """From plain data; aliases are accepted, and lists become tuples. Raises ConfigError for an
        unknown name."""
        data = by_field(EngineConfig, data)
        known = {item.name for item in fields(EngineConfig)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ConfigError(
                f"{unknown[0]!r} is not an engine option; accepted: {', '.join(sorted(known))}"
            )
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return EngineConfig(**values)

    def _check_speculation(self) -> None:
        if (
            isinstance(self.num_speculative_tokens, bool)
            or not isinstance(self.num_speculative_tokens, int)
            or not 0 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS
        ):
            raise ConfigError(
                f"num_speculative_tokens={self.num_speculative_tokens!r} is out of "
                f"range; accepted: 0 to {MAX_SPECULATIVE_TOKENS}"
            )
        rates = self.simulated_acceptance
        if rates and (
            len(rates) != self.num_speculative_tokens or not all(0 <= rate <= 1 for rate in rates)
        ):
            raise ConfigError(
                f"simulated_acceptance={rates!r} must hold one probability for each of "
                f"the num_speculative_tokens={self.num_speculative_tokens} drafts"
            )
