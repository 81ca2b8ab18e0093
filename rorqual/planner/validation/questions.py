"""Questions that come up before any deployment of these models, each answered with its inputs and
its formula. No torch.

`rorqual plan --question NAME` prints one. Measured inputs on RTX 4090s are those of the
home-cluster study of DeepSeek-R1 (batch 128).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from rorqual.cache.spec import DTYPE_BYTES
from rorqual.config.hardware import load_device
from rorqual.config.model import GQAConfig, MLAConfig
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.planner.costs import costs
from rorqual.planner.costs.catalog import published
from rorqual.planner.costs.costs import BatchShape, Format, GroupWork
from rorqual.planner.costs.messages import RankMessages
from rorqual.planner.costs.routing import UNIFORM, Routing, distinct_experts
from rorqual.planner.timing.profiles import load_profile
from rorqual.planner.timing.roofline import (
    StepModel,
    compute_bound_tokens,
    expert_seconds,
    largest_batch,
    rpc_seconds,
    with_link,
)
from rorqual.planner.validation.choices import CHOICES, TAKES_LOADS
from rorqual.planner.validation.deployed import (
    R1,
    Line,
    a3_decode,
    qwen_low_latency,
    sglang_96,
    small_clusters,
    speculation,
)
from rorqual.planner.validation.expert_calls import expert_rpc

GIB = 2**30
# seconds of everything but the experts for 128 rows on one 4090, without graphs, as measured
BACKBONE = 32.85e-3
TOKENS = 128
# seconds a layer that the study assumes
MOE_LAYER = 1e-3
RPC_LAYER = 1e-3


def parameters() -> list[Line]:
    lines = []
    for name in (R1, "deepseek-ai/DeepSeek-V2-Lite", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"):
        config = published(name)
        parts = costs.parameters(config)
        held = costs.weight_bytes(config)
        backbone = parts.total - parts.routed_experts
        lines += [
            Line(
                f"{name}: parameters",
                f"{parts.total:,}",
                f"{costs.active_parameters(config):,} active, embedding counted, no "
                "prediction module",
            ),
            Line(
                "  routed experts",
                f"{parts.routed_experts:,}",
                f"{held.routed_experts / 1e9:.2f} GB",
            ),
            Line(
                "  everything else",
                f"{backbone:,}",
                f"{(held.total - held.routed_experts) / 1e9:.2f} GB",
            ),
        ]
    moe = published(R1).moe
    one = 3 * 7168 * moe.intermediate_size
    return [
        *lines,
        Line(
            "one expert of R1",
            f"{one:,}",
            f"x {moe.num_experts} x 58 layers = {one * moe.num_experts * 58 / 1e9:.1f} B, "
            "not 638 B",
        ),
    ]


def kv_tokens() -> list[Line]:
    config = published(R1)
    room = 10 * GIB
    plain = costs.kv_bytes_per_token(config, Format(form="CD"))
    latent = costs.kv_bytes_per_token(config)
    return [
        Line(
            "MLA, bf16 latent",
            f"{costs.kv_tokens(config, room):,} tokens",
            f"10 GiB / {latent:,} B = 61 layers x (512 + 64) x 2",
        ),
        Line(
            "MHA, keys 192 and values 128 wide",
            f"{costs.kv_tokens(config, room, Format(form='CD')):,} tokens",
            f"10 GiB / {plain:,} B",
        ),
        Line(
            "MHA, values counted 192 wide",
            f"{room // (128 * 192 * 61 * 2 * 2):,} tokens",
            "as the home-cluster study divides",
        ),
        Line(
            "MLA, fp8 latent",
            f"{costs.kv_tokens(config, room, Format(kv_dtype='fp8')):,} tokens",
            "61 layers x (512 + 4 x 4 + 64 x 2)",
        ),
    ]


def cache_kinds() -> list[Line]:
    """The same heads and layers with keys and values of every head, of eight groups, of one, and
    with a latent; what the model has is marked."""
    lines = []
    latent_attention = published(R1).attention
    assert isinstance(latent_attention, MLAConfig)
    latent = latent_attention.latent_dim  # for both
    for name in (R1, "Qwen/Qwen3-30B-A3B"):
        config = published(name)
        attention = config.attention
        heads = attention.num_heads
        own = costs.kv_bytes_per_token(config)
        if isinstance(attention, MLAConfig):
            wide = attention.qk_dim + attention.v_dim
            has = "MLA"
        else:
            wide = 2 * attention.head_dim
            has = f"GQA, {attention.num_kv_heads} groups"
        groups = attention.num_kv_heads if isinstance(attention, GQAConfig) else 8
        layers = config.num_layers
        whole = heads * wide * 2 * layers
        for kind, columns, how in (
            ("MHA", heads * wide, f"{heads} heads x {wide}"),
            (f"GQA, {groups} groups", groups * wide, f"{groups} x {wide}"),
            ("MQA", wide, f"1 x {wide}"),
            ("MLA", latent, f"a latent of {latent}"),
        ):
            size = columns * 2 * layers
            assert kind != has or size == own, "the engine's own count"
            mark = ", as published" if kind == has else ""
            lines.append(
                Line(
                    f"{name}: {kind}{mark}",
                    f"{size:,} B a token",
                    f"{layers} layers x {how} x 2 B; {whole / size:.1f} times less than MHA; "
                    f"{10 * GIB // size:,} tokens in 10 GiB",
                )
            )
    return lines


def data_parallel() -> list[Line]:
    config = published(R1)
    ratio = config.moe.num_experts // config.moe.top_k
    lines = [
        Line(
            "tokens of a batch for one of an expert",
            f"{ratio}",
            "256 experts / 8 chosen: a factor between batches, not a number of ranks",
        )
    ]
    for name in ("h20-96", "h800", "h200", "rtx4090"):
        device = load_device(name)
        rows, batch = compute_bound_tokens(config, device)
        how = f"{device.peak('fp8') / 1e12:.0f} TFLOP/s / (2 x {device.bandwidth / 1e9:.0f} GB/s)"
        lines.append(
            Line(
                f"{device.title}: compute-bound from",
                f"{rows:.0f} tokens an expert, {batch:,.0f} in all",
                how,
            )
        )
    h800 = load_device("h800")
    kv = costs.kv_bytes_per_token(config) * 4096
    each = largest_batch(
        StepModel(config, ParallelConfig(dp=32, ep=32), h800, load_profile("roofline")), 4096
    )
    need = compute_bound_tokens(config, h800)[1]
    lines.append(
        Line(
            "requests of 4,096 tokens beside 1/32 of the experts on an H800",
            f"{each}",
            f"{kv / 1e6:.0f} MB of cache each",
        )
    )
    return [
        *lines,
        Line(
            "GPUs whose batches together make H800 experts compute-bound",
            f"{math.ceil(need / each)}",
            f"{need:,.0f} / {each}",
        ),
    ]


def _flight(title: str, moe_layer: float, rpc_layer: float, gbit: float) -> list[Line]:
    """58 MoE layers on 29 devices, two layers each; one backbone device, whose wire carries every
    layer's rows out and back. The batches are independent of each other, so with enough of them
    the busiest is always busy: no step joins them, as it does the engine's micro-batches."""
    wire = 58 * TOKENS * 7168 * 2 / (gbit / 8 * 1e9)
    total = BACKBONE + 58 * (moe_layer + rpc_layer)
    busiest = max(BACKBONE, 2 * moe_layer, wire)
    needed = math.ceil(total / busiest - 1e-9)
    parts = (
        f"{BACKBONE * 1e3:.1f} ms backbone + 58 x ({moe_layer * 1e3:.2f} MoE + "
        f"{rpc_layer * 1e3:.2f} RPC) ms = {total * 1e3:.0f} ms"
    )
    name = "backbone" if busiest == BACKBONE else "wire" if busiest == wire else "expert GPUs"
    rates = [TOKENS * min(count / total, 1 / busiest) for count in (1, 2, needed)]
    return [
        Line(
            f"{title}: batches in flight",
            f"{needed}",
            f"{parts}, over the busiest, the {name} with {busiest * 1e3:.0f} ms",
        ),
        Line(
            "  tokens/s with 1, 2 and that many",
            ", ".join(f"{rate:,.0f}" for rate in rates),
            f"{TOKENS} tokens a batch, {gbit:g} Gb/s",
        ),
    ]


def batches_in_flight() -> list[Line]:
    config = published(R1)
    device = load_device("rtx4090")
    used = distinct_experts(UNIFORM, 256, 8, TOKENS)
    skew = distinct_experts(Routing("zipf", 1.0), 256, 8, TOKENS)
    natural, skewed = (count * expert_seconds(config, device) for count in (used, skew))
    slow = rpc_seconds(config, with_link(device, 10), TOKENS)
    natural_lines = _flight(f"natural routing, {used:.0f} experts read", natural, RPC_LAYER, 25)
    flights = int(natural_lines[0].value)
    room = costs.kv_tokens(config, 10 * GIB)
    return [
        *_flight("the study's MoE times", MOE_LAYER, RPC_LAYER, 25),
        *natural_lines,
        *_flight(f"zipf:1 routing, {skew:.0f} experts read", skewed, RPC_LAYER, 25),
        *_flight("natural routing on 10 Gb/s Ethernet", natural, slow, 10),
        Line(
            "cache for that many requests",
            f"{room // (flights * TOKENS)} tokens each",
            f"{room:,} tokens in 10 GiB over {flights} x {TOKENS}: memory, not "
            "scheduling, forbids it",
        ),
        Line(
            "why the study's 1 ms is not natural",
            "its random inputs chose the same 8 experts",
            f"252 experts of 44 MB take {natural * 1e3:.1f} ms at 1,008 GB/s",
        ),
    ]


def network_floor() -> list[Line]:
    config = published(R1)
    size = TOKENS * config.hidden_size * 2
    lines = [
        Line("bytes of 128 tokens, one layer, one direction", f"{size:,}", "128 x 7168 x 2"),
        Line(
            "rate for 1 ms a layer",
            f"{size / 1e-3 * 8 / 1e9:.1f} Gb/s a direction",
            f"{2 * size / 1e-3 / 1e9:.2f} GB/s both ways",
        ),
    ]
    for gbit in (10, 25, 100, 400):
        device = with_link(load_device("rtx4090"), gbit)
        lines.append(
            Line(
                f"{gbit} Gb/s: a layer there and back",
                f"{rpc_seconds(config, device, TOKENS) * 1e3:.2f} ms",
                f"58 layers {58 * rpc_seconds(config, device, TOKENS) * 1e3:.0f} ms",
            )
        )
    return lines


def host_embedding() -> list[Line]:
    config = published(R1)
    device = load_device("rtx4090")
    size = costs.weight_bytes(config).embedding
    rows = 1024 * config.hidden_size * 2
    return [
        Line("the table", f"{size / 1e9:.4f} GB, {size / GIB:.4f} GiB", "129280 x 7168 x 2"),
        Line(
            "cache it makes room for",
            f"{size // costs.kv_bytes_per_token(config):,} tokens",
            "at 70,272 B a token",
        ),
        Line(
            "1,024 rows over the host link, at least",
            f"{rows / device.host_link * 1e3:.2f} ms",
            f"{rows / 1e6:.1f} MB / {device.host_link / 1e9:.2f} GB/s",
        ),
        Line(
            "measured there, 1,024 tokens",
            "1.71 ms from the host, 0.77 ms on the GPU",
            "home-cluster study; 128 tokens: 0.22 and 0.06 ms",
        ),
        Line(
            "of a decode step of 128 tokens",
            f"{(0.2221 - 0.0582) / 1e3 / BACKBONE:.1%} of the backbone's time",
            "worth it where memory is what is missing",
        ),
    ]


def dense_layout() -> list[Line]:
    config = published(R1)
    work = GroupWork(BatchShape.decode(128, 4096))
    lines = []
    for title, sizes in (
        ("tp8: two all-reduces a dense layer", ParallelConfig(tp=8)),
        ("tp8, dense_tp1: reduce-scatter, all-gather of latents", ParallelConfig(tp=8, dense_tp=1)),
        ("dp8, dense_tp1: nothing", ParallelConfig(dp=8, dense_tp=1)),
    ):
        sent = list(
            RankMessages(config, sizes, work, DTYPE_BYTES[config.dtype]).layer(sparse=False)
        )
        lines.append(
            Line(
                title,
                f"{sum(m.wire_bytes for m in sent) / 1e6:.2f} MB a rank and layer",
                ", ".join(f"{m.kind} over {m.ranks}" for m in sent) or "no message",
            )
        )
    return lines


QUESTIONS: dict[str, tuple[str, Callable[..., list[Line]]]] = {
    "parameters": ("parameters and bytes of backbone and experts", parameters),
    "kv-tokens": ("tokens of cache in 10 GiB, MHA and MLA", kv_tokens),
    "cache-kinds": ("cache per token of MHA, GQA, MQA and MLA", cache_kinds),
    "data-parallel": ("why thirty-two-way data parallelism", data_parallel),
    "in-flight": ("batches in flight that hide the RPC", batches_in_flight),
    "network": ("the least network for remote experts", network_floor),
    "expert-rpc": ("when a call costs as much as an expert", expert_rpc),
    "host-embedding": ("the embedding table in host memory", host_embedding),
    "a3-decode": ("2,138 tok/s a chip at 44.9 ms on Atlas A3, and what it implies", a3_decode),
    "sglang-96": ("SGLang on 96 H100", sglang_96),
    "small-clusters": ("room for a cache on 8 x H20 and 16 x H800", small_clusters),
    "dense-layout": ("what dense data parallelism saves", dense_layout),
    "qwen-low-latency": ("Qwen3-235B in bf16 below 20 ms on Atlas A3", qwen_low_latency),
    "speculation": ("what one draft gains, by batch", speculation),
    **CHOICES,
}


def answer(name: str, loads: Sequence[str | Path] = ()) -> tuple[str, list[Line]]:
    """(the question, its lines). loads: files of expert counts, for the questions about them.
    Raises ConfigError naming the known ones."""
    if name not in QUESTIONS:
        raise ConfigError(f"question {name!r} is not known; known: {', '.join(QUESTIONS)}")
    if loads and name not in TAKES_LOADS:
        raise ConfigError(f"expert_load goes with the questions {', '.join(TAKES_LOADS)}")
    title, ask = QUESTIONS[name]
    return title, ask(loads) if loads else ask()
