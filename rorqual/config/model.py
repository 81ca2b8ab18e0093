"""The model configuration: frozen data and its formulas. No torch. hf.py reads it from a
config.json.

Also what the environment configures: cache folders, the compiler, collectives, a launcher's
variables and the secret.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rorqual.config.quant import QuantConfig
from rorqual.errors import ConfigError

TORCH_CACHE = "TORCHINDUCTOR_CACHE_DIR"
SHORTEST_SECRET = 16


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of `dim` columns. YaRN after arXiv 2309.00071 with DeepSeek's two mscales
    (arXiv 2405.04434)."""

    dim: int
    theta: float
    kind: str = "default"  # default | linear | yarn
    interleaved: bool = False
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    @staticmethod
    def yarn_mscale(factor: float, mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    def longest(self, trained: int) -> int:
        """Longest sequence of a model whose file says `trained` positions, which with YaRN may be
        the length before or after scaling."""
        if self.kind != "yarn":
            return trained
        return max(trained, int(self.factor * self.original_max_position))

    @property
    def table_scale(self) -> float:
        """Factor on cos and sin."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.yarn_mscale(self.factor, self.mscale) / self.yarn_mscale(
                self.factor, self.mscale_all_dim
            )
        return self.yarn_mscale(self.factor, 1.0)

    @property
    def softmax_scale(self) -> float:
        """Factor on MLA's softmax scale (GQA models have it only in cos and sin)."""
        if self.kind == "default" or not self.mscale_all_dim:
            return 1.0
        return self.yarn_mscale(self.factor, self.mscale_all_dim) ** 2


@dataclass(frozen=True)
class MLAConfig:
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool = False

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True)
class GQAConfig:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False


@dataclass(frozen=True)
class MoEConfig:
    num_experts: int
    top_k: int
    intermediate_size: int
    num_shared: int = 0
    scoring: str = "softmax"  # softmax | sigmoid
    method: str = "greedy"  # greedy | group_limited_greedy | noaux_tc
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = False
    scaling: float = 1.0
    router_fp32: bool = True  # Qwen3 multiplies hidden states with the gate in the model's dtype

    @property
    def has_bias(self) -> bool:
        return self.method == "noaux_tc"


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    family: str  # deepseek_v2 | deepseek_v3 | qwen3_moe
    vocab_size: int
    hidden_size: int
    num_layers: int
    norm_eps: float
    max_position: int
    attention: MLAConfig | GQAConfig
    rope: RopeConfig
    dense_intermediate: int
    moe: MoEConfig
    moe_layers: tuple[bool, ...]
    tie_embeddings: bool = False
    dtype: str = "bfloat16"
    quant: QuantConfig | None = None
    num_mtp_layers: int = 0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_mla(self) -> bool:
        return isinstance(self.attention, MLAConfig)


def cache_folder() -> Path:
    """Folder of compiled kernels, tuned configurations and what starts found out: RORQUAL_CACHE,
    else the user's cache folder."""
    given = os.environ.get("RORQUAL_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(given) if given else Path(base) / "rorqual"


def triton_cache_folder() -> Path | None:
    """Folder for Triton's compiled kernels; None if TRITON_CACHE_DIR or TRITON_HOME is set."""
    return (
        None
        if {"TRITON_CACHE_DIR", "TRITON_HOME"} & os.environ.keys()
        else cache_folder() / "triton"
    )


def environment_for_child(names: Sequence[str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """Environment variables with these names or prefixes, for a child that gets no others."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith(prefixes)
    }


def hccl_buffer_mb() -> int | None:
    """MB of a communicator's buffer between NPUs; None if the environment does not set it."""
    given = os.environ.get("HCCL_BUFFSIZE", "")
    return int(given) if given.isdigit() else None


def nccl_channels(limit: int) -> int:
    """`limit`, or what NCCL's variables allow a communicator if that is less."""
    given = (os.environ.get(name, "") for name in ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS"))
    return min([limit, *(max(1, int(one)) for one in given if one.isdecimal())])


def hccl_on_vector_cores() -> None:
    """Run NPU collectives on vector cores instead of the device's CPU, which is faster for decode,
    unless the environment sets it. Call before the first communicator is created."""
    os.environ.setdefault("HCCL_OP_EXPANSION_MODE", "AIV")


def child_environment() -> dict[str, str]:
    """Environment of a child process: this one's, with the folder of this package on
    PYTHONPATH."""
    folder = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{known}" if known else folder}


def one_threaded_environment() -> dict[str, str]:
    """The environment of a child that forks: numpy's and torch's libraries start no threads in it,
    whose locks a fork could find taken."""
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def collectives_on(interface: str) -> None:
    """Use this network interface for collectives, unless the environment names another."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # without "=" NCCL uses all interfaces with this prefix
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


# as torch's threads of a communicator read them when it is made
_UNWATCHED = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # the first communicator of a process asks its store every second whether to dump a trace
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # after an error the watchdog sleeps four times as long, and holds a lock that sends take
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
_unwatched = threading.Lock()  # the environment is the process's


@contextmanager
def nccl_unwatched() -> Iterator[None]:
    """For communicators created inside, torch's watchdog does not end the process when a member is
    lost: the engine detects and handles that itself."""
    with _unwatched:
        before = {name: os.environ.get(name) for name in _UNWATCHED}
        os.environ.update(_UNWATCHED)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def nccl_without_registration() -> None:
    """Before the first communicator of a process: NCCL does not map the memory of captured messages
    into the other side's process, unless the environment says otherwise. It would write there
    directly, and that memory is freed under its kernels when the other process is killed."""
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def nccl_without_clusters() -> None:
    """Before the first communicator of a process: NCCL's programs start one by one, unless the
    environment says otherwise. By default four must find free multiprocessors close to one another
    on Hopper, and a message that is ready waits until a product of experts beside it has ended."""
    os.environ.setdefault("NCCL_CGA_CLUSTER_SIZE", "0")


def visible_device(number: int) -> int:
    """Index of the host's GPU `number` among those visible to this process
    (CUDA_VISIBLE_DEVICES)."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = shown.split(",") if shown else []
    return names.index(str(number)) if str(number) in names else number


def torchrun_variables() -> dict[str, str]:
    """The variables that torchrun, or a compatible launcher, sets for a rank; those that are
    set."""
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_RESTART_COUNT",
    )
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def shared_secret(file: str | None) -> bytes | None:
    """The shared secret of an engine's ranks on several hosts: the content of `file`, else
    RORQUAL_SECRET, else None. Raises ConfigError."""
    text = os.environ.get("RORQUAL_SECRET", "")
    if file is not None:
        try:
            if Path(file).stat().st_mode & 0o077:
                raise ConfigError(
                    f"secret_file={file!r} can be read by other users; accepted: mode 600 or 400"
                )
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"secret_file={file!r} cannot be read: {getattr(error, 'strerror', error)}"
            ) from None
    secret = text.strip().encode()
    if (secret or file is not None) and len(secret) < SHORTEST_SECRET:
        raise ConfigError(
            f"the secret has {len(secret)} bytes; accepted: at least {SHORTEST_SECRET}"
        )
    return secret or None


@contextmanager
def compiler_caches_in(folder: Path) -> Iterator[None]:
    """Inside, torch.compile's caches are in `folder`. torch reads the folder only from the
    environment, so the variable is set during compilation. Only the user may access the folder,
    since torch runs code that it finds there."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    before = os.environ.get(TORCH_CACHE)
    os.environ[TORCH_CACHE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[TORCH_CACHE]
        else:
            os.environ[TORCH_CACHE] = before


def compiler() -> str | None:
    """The C++ compiler for CPU kernels: CXX, else the first of g++ and clang++ on the path."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
