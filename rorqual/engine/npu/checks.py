"""Checks before loading that an NPU supports the configuration; and the communicator of its
dispatch and combine operators."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from rorqual.cache.spec import EIGHT_BITS, FP8, kv_dtype
from rorqual.config.model import ModelConfig, hccl_buffer_mb
from rorqual.engine.config import EXE_MODES, EngineConfig
from rorqual.engine.npu.compiled import load_torchair
from rorqual.errors import ConfigError
from rorqual.models.transformer import Transformer
from rorqual.ops.interface import Ops
from rorqual.ops.npu import limits
from rorqual.parallel.group_axis import GroupAxis
from rorqual.parallel.mesh import Mesh
from rorqual.platforms.base import Platform

MAX_DRAFTS = 3  # rows of latent attention verified by the vendor's recipes


def check_npu(config: EngineConfig, model: ModelConfig, platform: Platform) -> None:
    """Raises ConfigError."""
    sizes = config.parallel
    limits.check_model(model, sizes, config.page_size or platform.default_page_size)
    quant = model.quant
    if quant is not None and quant.scheme is not None and quant.scheme.kind == "int8":
        limits.check_int8_experts(model, sizes)
    if model.is_mla and config.mla_prefill != "CC":
        raise ConfigError(
            f"mla_prefill={config.mla_prefill!r} is not supported on an NPU, whose absorbed "
            f"attention takes up to {limits.ABSORBED_ROWS} tokens of a request; accepted: CC"
        )
    cached = kv_dtype(config.kv_cache_dtype)
    if cached == FP8:
        raise ConfigError(
            "kv_cache_dtype=fp8 is not supported on an NPU; accepted: auto, bfloat16, float16, int8"
        )
    if cached in EIGHT_BITS:
        limits.check_int8_cache(model, sizes)
    refused = {
        "mla_decode": config.mla_decode == "CD",
        "enable_eplb": config.enable_eplb,
        "fp8_dispatch": config.fp8_dispatch,
        "embed_device": config.embed_device == "cpu",
        "piecewise_tokens": bool(config.piecewise_tokens),
        "steps_in_flight": (config.steps_in_flight or 1) > 1,
    }
    for name, given in refused.items():
        if given:
            raise ConfigError(f"{name}={getattr(config, name)!r} is not supported on an NPU")
    compiles = EXE_MODES[config.exe_mode] == "compile"
    for name in ("enable_superkernel", "enable_multi_streams"):
        if getattr(config, name) and not compiles:
            raise ConfigError(
                f"{name} on an NPU goes with exe_mode='compile' (ge_graph) alone, not "
                f"{config.exe_mode!r}"
            )
    if config.enable_multi_streams and not model.moe.num_shared:
        raise ConfigError(
            "enable_multi_streams=True needs shared experts, which the second stream computes; "
            "this model has none"
        )
    if model.is_mla and config.num_speculative_tokens > MAX_DRAFTS:
        raise ConfigError(
            f"num_speculative_tokens={config.num_speculative_tokens} is out of range for latent "
            f"attention on an NPU; accepted: 0 to {MAX_DRAFTS}"
        )
    if compiles and config.exchange == "alltoall":
        raise ConfigError(
            f"exe_mode={config.exe_mode!r} does not go with exchange='alltoall', where the host "
            "reads in every step how many rows will come"
        )
    if config.num_speculative_tokens and EXE_MODES[config.exe_mode] == "graph":
        raise ConfigError(
            f"exe_mode={config.exe_mode!r} does not go with num_speculative_tokens on an NPU: a "
            "captured step takes its lengths from the host; accepted: compile (ge_graph), eager"
        )


def connect_dispatch(
    ops: Ops, mesh: Mesh, model: ModelConfig, platform: Platform, rows: int
) -> str:
    """Create the communicator of the dispatch and combine operators, with the buffer for steps of
    `rows` tokens a rank. Collective. Returns its description for the log."""
    sizes = mesh.sizes
    soc = platform.soc  # type: ignore[attr-defined]
    needed = limits.dispatch_buffer_mb(model.hidden_size, model.moe, sizes, rows)
    buffer = hccl_buffer_mb() or needed
    limits.check_dispatch(model, sizes, rows, soc, buffer)
    for axis in dict.fromkeys((mesh.dp, mesh.stage)):
        if isinstance(axis, GroupAxis):
            group = dist.new_group(
                list(axis.ranks),
                pg_options=platform.group_options(buffer),
                use_local_synchronization=True,
            )
            ops.dispatch_combine.connect(axis, group)
    return f"dispatch and combine operators ({buffer} MB)"


def set_streams(ops: Any, config: EngineConfig) -> None:
    """Set what compiled steps fuse, and what they compute on a second stream."""
    ops.superkernel = config.enable_superkernel
    ops.multi_streams = config.enable_multi_streams
    if ops.superkernel or ops.multi_streams:
        ops.scopes = load_torchair().scope


def check_cache_scales(model: Transformer) -> None:
    """After loading weights: raises ConfigError where an int8 cache lacks a layer's scale."""
    for attention in model.attentions():
        scale = attention.cache_scale
        if scale is None or not bool((scale > 0).all()):
            raise ConfigError(
                "kv_cache_dtype=int8 on an NPU needs a scale a layer in the checkpoint: "
                f"{attention.name}.k_scale is missing, or is not above 0"
            )
