"""Published deployments: what their figures imply, compared with the cost model. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from rorqual.config.hardware import load_device
from rorqual.config.parallel import ParallelConfig
from rorqual.planner.costs import costs
from rorqual.planner.costs.catalog import published
from rorqual.planner.costs.costs import BatchShape, Format, GroupWork
from rorqual.planner.costs.parallel_costs import rank_step
from rorqual.planner.costs.routing import Routing
from rorqual.planner.timing.profiles import load_profile
from rorqual.planner.timing.roofline import StepModel
from rorqual.planner.validation.validation import hidden, published_rows, validate

R1 = "deepseek-ai/DeepSeek-R1"


@dataclass(frozen=True)
class Line:
    what: str
    value: str
    how: str = ""


def _group(name: str) -> list[Line]:
    lines = []
    for group in validate([name]):
        lines.append(Line(group.title, "", group.source))
        for point in group.points:
            high = f" to {point.high:,.1f}" if point.high else ""
            lines.append(
                Line(
                    f"  {point.label}: {point.metric}",
                    f"predicted {point.predicted:,.1f}{high} {point.unit}, published "
                    f"{point.measured:,.1f}",
                    "",
                )
            )
        lines.append(Line("  why", group.note))
    return lines


def a3_decode() -> list[Line]:
    row = published_rows()["a3-decode"]
    config = published(R1, row["quant"])
    sizes = ParallelConfig(**row["sizes"])
    model = StepModel(
        config,
        sizes,
        load_device(row["device"]),
        load_profile("roofline"),
        Format(kv_dtype=row["kv_dtype"], split_latent=row["split_latent"]),
        Routing.parse(row["routing"]),
    )
    time = model.step(GroupWork(BatchShape.verify(48, 4096, 1), drafts=1))
    left = model.memory_left(96, mtp=True)
    cache = 48 * 4096 * costs.kv_bytes_per_token(config, model.fmt)
    return [
        Line(
            "requests",
            "6144 / 128 dies = 48 a die, 2 rows each",
            "64 chips of two dies, EP128: two experts of each layer a die",
        ),
        Line("tokens/s a chip", f"{6144 / 64 / 44.9e-3:,.0f}", "6144 / 64 / 44.9 ms; 1,069 a die"),
        Line(
            "the step itself",
            f"{44.9 * 1.7:.1f} ms",
            "44.9 ms already divides by 1.7 tokens a step, and draft and sampling time "
            "are model time alone",
        ),
        Line(
            "at another acceptance",
            f"{44.9 * 1.7 / 1.5:.1f} ms at 0.5, {44.9 * 1.7 / 1.85:.1f} ms at 0.85",
            "the same step",
        ),
        Line(
            "roofline of that step",
            f"{time.seconds * 1e3:.1f} ms",
            ", ".join(
                f"{name} {value * 1e3:.1f}" for name, value in time.by("limiter").items() if value
            ),
        ),
        Line(
            "weights and cache a die",
            f"{model.weight_bytes / 1e9:.1f} and {cache / 1e9:.1f} GB",
            f"of {left / 1e9:.1f} GB left for cache",
        ),
        Line(
            "reached",
            f"{time.seconds / 76.33e-3:.0%} of the roofline",
            "with balance forced: real routing adds the fullest rank's load",
        ),
        *_group("a3-decode")[-1:],
    ]


def sglang_96() -> list[Line]:
    model_lines = _group("h100-decode") + _group("h100-prefill")
    row = published_rows()["h100-decode"]
    model = StepModel(
        published(R1), ParallelConfig(**row["sizes"]), load_device("h100"), load_profile("sglang")
    )
    time = model.step(GroupWork(BatchShape.decode(256, 2050)))
    shares = ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in time.by("limiter").items())
    return [
        Line(
            "published step",
            f"{256 * 8 / 22282 * 1e3:.0f} ms",
            "256 requests a GPU, 22,282 tokens/s a node",
        ),
        Line(
            "predicted step",
            f"{time.seconds * 1e3:.0f} ms without overlap, {hidden(time) * 1e3:.0f} ms with "
            "the network hidden",
            shares,
        ),
        *model_lines,
    ]


def qwen_low_latency() -> list[Line]:
    config = published("Qwen/Qwen3-235B-A22B")
    model = StepModel(
        config, ParallelConfig(tp=16), load_device("ascend-a3"), load_profile("roofline")
    )
    work = GroupWork(BatchShape.decode(1, 2048))
    time = model.step(work)
    step = rank_step(config, model.sizes, work)
    count = sum(message.layers for message in step.messages)
    weight_bytes = sum(op.weight_bytes * op.layers for op in step.ops)
    return [
        Line(
            "bf16, 8 chips (TP16), one request: roofline",
            f"{time.seconds * 1e3:.2f} ms",
            ", ".join(f"{name} {value * 1e3:.2f}" for name, value in time.by("limiter").items()),
        ),
        Line("published", "below 20 ms", "Qwen3-MoE low-latency document"),
        Line(
            "collectives a step",
            f"{count}",
            "two all-reduces a layer: at 20 us each they are 3.8 ms of it",
        ),
        Line(
            "weights read a die",
            f"{weight_bytes / 1e9:.2f} GB",
            "experts in use, their columns over 16 dies",
        ),
    ]


def small_clusters() -> list[Line]:
    """Do 8 x H20 96 GB and 16 x H800 leave room for a cache?"""
    lines = []
    for name, sizes in (
        ("h20-96", ParallelConfig(tp=8)),
        ("h20-141", ParallelConfig(tp=8)),
        ("h800", ParallelConfig(tp=8, pp=2)),
        ("h800", ParallelConfig(dp=16, ep=16)),
    ):
        model = StepModel(published(R1), sizes, load_device(name), load_profile("sglang"))
        tokens = model.cache_tokens(2048)
        label = (
            f"{sizes.world} x {model.device.title}, tp{sizes.tp} dp{sizes.dp} pp{sizes.pp} "
            f"ep{sizes.ep}"
        )
        how = (
            f"{model.weight_bytes / 1e9:.1f} GB of weights, "
            f"{model.memory_left(2048) / 1e9:.1f} GB left a GPU"
        )
        lines.append(Line(label, f"{tokens * sizes.dp:,} tokens of cache", how))
    return lines


def speculation() -> list[Line]:
    lines = []
    model = StepModel(
        published(R1), ParallelConfig(tp=8), load_device("h200"), load_profile("sglang")
    )
    for batch in (1, 16, 64, 128):
        plain = model.step(GroupWork(BatchShape.decode(batch, 2048))).seconds
        drafted = model.step(GroupWork(BatchShape.verify(batch, 2048, 1), drafts=1)).seconds
        lines.append(
            Line(
                f"8 x H200, TP8, {batch} requests: num_speculative_tokens 1",
                f"x {1.85 * plain / drafted:.2f} at 0.85 accepted",
                f"step {plain * 1e3:.1f} to {drafted * 1e3:.1f} ms; breaks even at "
                f"{drafted / plain - 1:.2f}",
            )
        )
    return lines
