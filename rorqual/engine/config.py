"""How to run a model: sizes, limits and choices, validated once. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rorqual.cache.spec import check_forms, kv_dtype
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError

# The documents' names for the modes are understood too.
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
EMBED_DEVICES = ("auto", "cpu")
DRAFTERS = ("auto", "mtp", "ngram")
SPECULATIVE_POLICIES = ("fixed", "adaptive")
MAX_SPECULATIVE_TOKENS = 8
LAUNCHERS = ("local", "torchrun", "ray")
DTYPES = ("auto", "bfloat16", "float16", "float32")


def read_recipe(path: Path) -> tuple[str | None, dict[str, Any]]:
    """(model, engine options) of a YAML file. Raises ConfigError where it is none, or names an
    option that does not exist."""
    import yaml  # read at the edge alone: an engine needs no YAML

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path} cannot be read as YAML: {' '.join(str(error).split())}"
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no mapping of options")
    model = data.pop("model", None)
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"model={model!r} in {path} must be a folder or a Hugging Face id")
    EngineConfig.from_dict({"model": "", **data})  # names the first mistake
    return model, {
        name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
    }


@dataclass(frozen=True)
class EngineConfig:
    """None means: derived from the model, the device or the memory at hand.

    kv_cache_dtype: `fp8` (also fp8_e4m3, float8_e4m3fn) keeps the latents of MLA models as e4m3
    with a scale for each 128 columns, and the rope keys as they are. kv_cache_bytes bounds the
    cache (num_pages overrides it); chunked_prefill_size is the most prompt tokens of one request in
    a step. weights: `checkpoint` or `random` (a config.json is enough); num_layers cuts a random
    model short. exe_mode: `eager`, or `graph` (decode steps recorded and replayed), or `compile`
    (the forward pass of decode steps goes through torch.compile, with a cache that survives
    restarts; recorded as well where the device has graphs), or `auto`: graph where the device has
    it. cudagraph_capture_sizes: batch sizes whose steps are recorded at the start, the others when
    first needed (None: all, up to max_num_seqs). precompile_kernels: kernels of these steps are
    compiled side by side before, not one after the other when they are first launched.
    steps_in_flight: launched before the first is read (None: what the device wants, and one more
    for each micro-batch after the first). embed_device: `cpu` keeps the embedding table in pinned
    host memory, from where the device reads rows; `auto` is the device. On a CPU both are the same.

    Speculation: num_speculative_tokens drafts a request and step, 0 for none, made by `drafter`:
    `mtp` (the checkpoint's prediction modules; `auto` is the same), or `ngram` (look-up in the
    request's own text, for every model). speculative_policy `adaptive` lets a controller lower
    num_speculative_tokens by batch size. draft_window: the prediction module sees every row of a
    step, not the last alone. simulated_acceptance: probabilities by place that a draft is taken,
    whatever it says; for benchmarks with random weights.

    Several ranks: the sizes are those of ParallelConfig; max_num_seqs and the cache are then those
    of one data-parallel rank. p2p_memory: decode steps add up partial sums and reach their experts
    through memory that the cards of a host share, where they can; if false, by collectives.
    single_rank_bench: this process is rank 0 of the layout and no other is started; collectives
    bring copies of its own rows, or nothing. It shows what one rank computes, for benchmarks with
    random weights; max_num_seqs are its own. watchdog_seconds: a rank silent for so long, or a
    collective that takes longer, ends the engine. first_device: the ranks of a host take its cards
    in order from this one on. launcher: who starts the other ranks (docs/parallelism.md).
    interface: where ranks of other hosts reach this one, an interface's name or its address;
    secret_file: what all hosts know, in place of RORQUAL_SECRET.
    """

    model: str
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    weights: str = "checkpoint"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    chunked_prefill_size: int | None = None
    page_size: int | None = None
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    mla_prefill: str = "CC"
    mla_decode: str = "A_CC_ME"
    steps_in_flight: int | None = None
    exe_mode: str = "auto"
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    precompile_kernels: bool = True
    embed_device: str = "auto"
    num_layers: int | None = None
    num_speculative_tokens: int = 0
    drafter: str = "auto"
    speculative_policy: str = "fixed"
    draft_window: bool = True
    simulated_acceptance: tuple[float, ...] = ()
    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    dense_tp: int | None = None
    embed_tp: int | None = None
    head_tp: int | None = None
    exchange: str = "auto"
    micro_batches: int | None = None
    sequence_parallel: bool = False
    fp8_dispatch: bool = False
    p2p_memory: bool = True
    single_rank_bench: bool = False
    watchdog_seconds: float = 60.0
    first_device: int = 0
    launcher: str = "local"
    interface: str | None = None
    secret_file: str | None = None
    record_expert_load: bool = False
    threads: int | None = None
    ignore_config_fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_forms(self.mla_prefill, self.mla_decode)
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"dtype={self.dtype!r} is not supported; accepted: {', '.join(DTYPES)}"
            )
        kv_dtype(self.kv_cache_dtype)  # raises ConfigError
        if self.exe_mode not in EXE_MODES:
            raise ConfigError(
                f"exe_mode={self.exe_mode!r} is not supported; accepted: {', '.join(EXE_MODES)}"
            )
        if EXE_MODES[self.exe_mode] == "compile" and self.mla_decode == "CC":
            raise ConfigError(
                f"exe_mode={self.exe_mode!r} does not go with mla_decode='CC'; accepted: CD, "
                "A_CC, A_CC_ME, AM_CC_ME"
            )
        if self.embed_device not in EMBED_DEVICES:
            raise ConfigError(
                f"embed_device={self.embed_device!r} is not supported; accepted: "
                f"{', '.join(EMBED_DEVICES)}"
            )
        if self.num_layers is not None and self.weights != "random":
            raise ConfigError(f"num_layers={self.num_layers} goes with weights='random' alone")
        if self.weights not in ("checkpoint", "random"):
            raise ConfigError(
                f"weights={self.weights!r} is not supported; accepted: checkpoint, random"
            )
        for name in (
            "max_model_len",
            "page_size",
            "num_pages",
            "kv_cache_bytes",
            "steps_in_flight",
            "threads",
            "chunked_prefill_size",
            "num_layers",
        ):
            self._positive(name, getattr(self, name), optional=True)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            self._positive(name, getattr(self, name), optional=False)
        self._check_capture_sizes()
        self._check_speculation()
        if not 1 <= self.watchdog_seconds <= 3600:
            raise ConfigError(
                f"watchdog_seconds={self.watchdog_seconds} is out of range; accepted: 1 to 3600"
            )
        self._check_launch()
        assert self.parallel  # raises ConfigError for sizes that do not fit one another
        if (self.micro_batches or 1) > 1 and self.pp == 1:
            raise ConfigError(
                f"micro_batches={self.micro_batches} needs pipeline stages to work on them: pp=1"
            )
        if EXE_MODES[self.exe_mode] == "compile" and not self.parallel.is_single:
            raise ConfigError(
                f"exe_mode={self.exe_mode!r} is not supported on several ranks; accepted: "
                "auto, eager, graph"
            )
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError(
                f"memory_utilization={self.memory_utilization} is out of range; accepted: "
                "above 0, up to 1"
            )

    def _check_capture_sizes(self) -> None:
        sizes = self.cudagraph_capture_sizes
        if sizes is None:
            return
        if not isinstance(sizes, (tuple, list)):
            raise ConfigError(f"cudagraph_capture_sizes={sizes!r} must be a list of batch sizes")
        for size in sizes:
            self._positive("cudagraph_capture_sizes", size, optional=False)
            if size > self.max_num_seqs:
                raise ConfigError(
                    f"cudagraph_capture_sizes={size} exceeds max_num_seqs={self.max_num_seqs}"
                )

    def _check_launch(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise ConfigError(
                f"launcher={self.launcher!r} is not supported; accepted: {', '.join(LAUNCHERS)}"
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
                f"device={self.device!r} names one card; several ranks, and first_device, "
                "take: auto, cpu, cuda"
            )

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(
            **{item.name: getattr(self, item.name) for item in fields(ParallelConfig)}
        )

    @staticmethod
    def from_dict(data: dict[str, Any]) -> EngineConfig:
        """From plain data: lists become tuples. Raises ConfigError for a name it does not know."""
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
        for name, accepted in (("drafter", DRAFTERS), ("speculative_policy", SPECULATIVE_POLICIES)):
            if getattr(self, name) not in accepted:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is not supported; accepted: "
                    f"{', '.join(accepted)}"
                )
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

    def _positive(self, name: str, value: int | None, optional: bool) -> None:
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r} must be an integer of at least 1")
