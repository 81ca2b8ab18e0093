"""Questions about which deployment to choose, each answered by the cost model with its inputs and
its formula. No torch.

Lower bounds (profile roofline) are used if no kernel times are known; the answer is then a ratio of
two bounds, not a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rorqual.config.hardware import load_device
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.parallel.eplb.load_file import loads_by_layer, read_expert_load
from rorqual.parallel.eplb.placement import Floats, balancedness, identity_placement, place
from rorqual.planner.costs.catalog import published
from rorqual.planner.costs.costs import BatchShape, GroupWork
from rorqual.planner.costs.routing import Routing
from rorqual.planner.search.deployments import (
    BATCHES,
    Goal,
    Option,
    Question,
    aggregated,
    decode_step,
    prompt_seconds,
)
from rorqual.planner.search.planner import layouts, rejection, search
from rorqual.planner.simulator.cost_runner import StepLoad
from rorqual.planner.simulator.layout_costs import ModelCosts
from rorqual.planner.timing.profiles import load_profile
from rorqual.planner.timing.roofline import StepModel, largest_batch, with_link
from rorqual.planner.timing.split import split_memory, split_step, transfer_seconds
from rorqual.planner.validation.deployed import R1, Line


def _asked(gpu: str, count: int, prompt: int, output: int, **changes: object) -> Question:
    values = {
        "config": published(R1),
        "device": load_device(gpu),
        "count": count,
        "profile": load_profile("sglang"),
        "goal": Goal(prompt, output),
        "splits": False,
        **changes,
    }
    return Question(**values)  # type: ignore[arg-type]


# ---- layouts


def one_node_or_two() -> list[Line]:
    """The overview's test: 1,000 in, 1,000 out, on H20 with 141 GB, 8, 64 and 2,048 at once."""
    lines = []
    options = {count: _whole(count) for count in (8, 16)}
    for concurrency in (8, 64, 2048):
        for count, found in options.items():
            option = _fastest(found, concurrency)
            figures = (
                f"TTFT {option.ttft * 1e3:,.0f} ms, TPOT {option.tpot * 1e3:.1f} ms, "
                f"{option.per_gpu:.0f} tok/s a GPU"
            )
            nodes = "one node" if count == 8 else "two nodes"
            how = f"{option.layout}, {option.limiter}-bound"
            lines.append(Line(f"{concurrency} at once, {nodes}", figures, how))
    return [
        *lines,
        Line(
            "the overview says",
            "one node: more tokens/s a GPU; two: shorter TTFT and TPOT",
            "predicted alike, but for TTFT of 8 requests: a prompt alone gains less from twice "
            "the GPUs than its messages between nodes cost; from 64 on it waits less",
        ),
        Line("GPUs", "H20 with 141 GB, 8 a node", "400 Gb/s a GPU between nodes"),
    ]


def _whole(count: int) -> list[Option]:
    """Every layout of one replica over all the GPUs, without pipelines, at every batch."""
    question = _asked("h20-141", count, 1000, 1000)
    return [
        option
        for sizes in layouts(question)
        if sizes.world == count and sizes.pp == 1 and rejection(question, sizes) is None
        for option in aggregated(question, sizes)
    ]


def _fastest(options: Sequence[Option], concurrency: int) -> Option:
    """The one with the shortest TPOT at so many requests; where they do not fit, at as many as
    do."""
    most = max(option.batch * option.sizes.dp for option in options)
    wanted = min(concurrency, most)
    return min(
        (option for option in options if option.batch * option.sizes.dp == wanted),
        key=lambda option: option.tpot,
    )


def attention_data_parallel() -> list[Line]:
    """Each with as many requests as its cache holds, and at equal numbers."""
    lines = []
    best: dict[str, float] = {}
    layouts = (
        ("attention over 8 GPUs (tp8)", ParallelConfig(tp=8)),
        ("attention on each GPU (dp8, tp8 experts)", ParallelConfig(dp=8)),
        ("the same, whole experts (dp8 ep8)", ParallelConfig(dp=8, ep=8)),
    )
    context = 2048
    for title, sizes in layouts:
        question = _asked("h200", 8, 1024, 1024)
        model = question.model(sizes)
        room = model.cache_tokens(1024) // context
        fits = [batch for batch in BATCHES if batch <= room]
        rates = {}
        for batch in fits:
            work = GroupWork(BatchShape.decode(batch, context))
            rates[batch] = batch * sizes.dp / model.step(work).seconds
        batch = max(rates, key=lambda size: rates[size])
        best[title] = rates[batch]
        lines.append(
            Line(
                title,
                f"{rates[batch]:,.0f} tok/s at {batch * sizes.dp:,} requests",
                f"cache of {room * sizes.dp:,} requests of {context:,} tokens; a latent is held "
                f"{'by every GPU' if sizes.tp == 8 else 'once'}",
            )
        )
    first, *others = best.values()
    return [
        *lines,
        Line(
            "data parallelism over tensor parallelism",
            f"x {max(others) / first:.1f}",
            "8 x H200, decode alone; the overview's 1.9 is SGLang 0.4 over 0.3 on H100, where "
            "the cache holds less",
        ),
    ]


def w4a8() -> list[Line]:
    """Bounds: experts of 4 bits are read in half the time, and multiplied at fp8's rate."""
    lines = []
    sizes = ParallelConfig(tp=8)
    for gpu in ("h20-141", "h200"):
        device = load_device(gpu)
        profile = load_profile("roofline")
        models = {
            quant: StepModel(published(R1, quant), sizes, device, profile)
            for quant in ("fp8", "w4afp8")
        }
        for batch in (8, 64, 256, 1024):
            work = GroupWork(BatchShape.decode(batch, 1500))
            times = {quant: model.step(work).seconds for quant, model in models.items()}
            rooms = {quant: largest_batch(model, 1500) for quant, model in models.items()}
            fits = ", ".join(
                f"{quant} holds {room:,}" for quant, room in rooms.items() if batch == 8
            )
            lines.append(
                Line(
                    f"8 x {device.title}, {batch} requests of 1,500 tokens",
                    f"x {times['fp8'] / times['w4afp8']:.2f}",
                    f"{times['fp8'] * 1e3:.1f} and {times['w4afp8'] * 1e3:.1f} ms at least"
                    + (f"; {fits}" if fits else ""),
                )
            )
    return [
        *lines,
        Line(
            "what is missing",
            "times of W4A8 kernels",
            "there are none of ours on GPUs yet, so these are ratios of lower bounds; the overview "
            "orders TensorRT-LLM w4a8 before fp8 and gives no figure",
        ),
    ]


# ---- overlap and balance


def micro_batches() -> list[Line]:
    """Two micro-batches against one, prompts and decoding, by the speed of the wire."""
    sizes = ParallelConfig(dp=32, ep=32)
    lines = []
    for title, load in (
        ("prompts: 4,096 tokens a GPU", StepLoad(0, 0, 2, 2048, 0)),
        ("decoding: 128 requests a GPU", StepLoad(128, 4096)),
        ("decoding: 16 requests a GPU", StepLoad(16, 4096)),
    ):
        for gbit in (50, 100, 200, 400, 800):
            device = with_link(load_device("h800"), gbit)
            model = StepModel(published(R1), sizes, device, load_profile("sglang"))
            times = [
                ModelCosts(model, batches, exact=True).step([load] * 32, 0).seconds
                for batches in (1, 2)
            ]
            sent = sum(
                item.seconds for item in model.step(_work(load)).items if item.limiter == "network"
            )
            lines.append(
                Line(
                    f"{title}, {gbit} Gbit/s a GPU",
                    f"x {times[0] / times[1]:.2f}",
                    f"{times[0] * 1e3:.0f} ms, {times[1] * 1e3:.0f} with two; sending is "
                    f"{sent / times[0]:.0%} of the first",
                )
            )
    return [
        *lines,
        Line(
            "why decoding may lose",
            "each part reads the experts it needs anew",
            "4 nodes of 8 H800, ep 32; bounded by (a + b) / max(a, b) where nothing is read twice",
        ),
    ]


def _work(load: StepLoad) -> GroupWork:
    decode = BatchShape.decode(load.rows, load.context) if load.rows else None
    prefill = (BatchShape(load.prompts, load.new, load.cached),) if load.prompts else ()
    return GroupWork(decode, prefill, 32 * load.tokens(0))


def redundant_experts(files: Sequence[str | Path] = ()) -> list[Line]:
    """Placed by one load and judged under it and, where there are several, under each other."""
    loads = dict(_loads(files))
    lines = []
    for ranks in (8, 32):
        judged = [("experts in order", 0, *_judged(loads, ranks, None))]
        for copies in (0, 32, 64):
            title = f"placed by load, {copies} redundant"
            judged.append((title, copies, *_judged(loads, ranks, copies)))
        for title, copies, same, other in judged:
            sizes = ParallelConfig(dp=ranks, ep=ranks, redundant_experts=copies)
            extra = copies / ranks * 58 * 3 * 7168 * 2048 / 1e9
            how = f"{extra:.1f} GB more a GPU"
            lines.append(Line(f"ep {ranks}, {title}", _worth(sizes, same), how))
            if other is not None:
                lines.append(Line("  under another load", _worth(sizes, other)))
    return [
        *lines,
        Line(
            "steps",
            "128 requests a GPU with 4,096 tokens; prompts of 8,192 tokens a GPU",
            "H200, SGLang's kernels; over a step where all ranks have as much to do",
        ),
        Line("loads", ", ".join(loads), "another load: the mean over all pairs"),
    ]


def _judged(loads: dict[str, Floats], ranks: int, copies: int | None) -> tuple[float, float | None]:
    """Balancedness under the load that experts were placed by, and under others; None: in
    order."""
    same = []
    other = []
    for name, load in loads.items():
        if copies is None:
            same.append(balancedness(identity_placement(*load.shape), load, ranks))
            continue
        made = place(load, load.shape[1] + copies, ranks)
        same.append(balancedness(made, load, ranks))
        other += [balancedness(made, found, ranks) for also, found in loads.items() if also != name]
    return float(np.mean(same)), float(np.mean(other)) if other else None


def _worth(sizes: ParallelConfig, balance: float) -> str:
    decode = GroupWork(BatchShape.decode(128, 4096))
    prompts = GroupWork(None, (BatchShape(1, 8192),))
    times = [_slower(sizes, balance, work) for work in (decode, prompts)]
    return f"balancedness {balance:.3f}: decoding x {times[0]:.3f}, prompts x {times[1]:.3f}"


def _slower(sizes: ParallelConfig, balance: float, work: GroupWork) -> float:
    """A step's time relative to one with a perfectly balanced expert load."""
    times = []
    for fullest in (1.0, max(1.0, 1 / balance)):
        model = StepModel(
            published(R1),
            sizes,
            load_device("h200"),
            load_profile("sglang"),
            routing=Routing(fullest=fullest),
        )
        times.append(model.step(work).seconds)
    return times[1] / times[0]


def _loads(files: Sequence[str | Path]) -> Iterator[tuple[str, Floats]]:
    layers = list(range(3, 61))
    for file in files:
        yield Path(file).stem, loads_by_layer(read_expert_load(file), layers, 256, file)
    if files:
        return
    # no counts ship: experts in a random order by layer, as popular as Zipf says
    for exponent in (0.4, 0.8):
        for seed in (0, 1):
            draw = np.random.default_rng(seed)
            popular = np.arange(1, 257) ** -exponent
            name = f"zipf {exponent:g}, seed {seed}"
            yield name, np.stack([draw.permutation(popular) for _ in layers])


# ---- roles


def prefill_decode() -> list[Line]:
    """Replicas of 8 GPUs for prompts, for one that decodes at TPOT of 50 ms; prompts loaded to
    80 % at most."""
    lines = []
    sizes = ParallelConfig(dp=8, ep=8)
    for prompt, output in ((8000, 200), (4000, 500), (2000, 1000), (1000, 1000), (500, 2000)):
        question = _asked("h200", 16, prompt, output)
        model = question.model(sizes)
        room = model.cache_tokens(1024) // (prompt + output)
        steps = {
            batch: decode_step(question, model, batch, 0)[0] for batch in BATCHES if batch <= room
        }
        allowed = [batch for batch, step in steps.items() if step <= 0.05] or [min(steps)]
        batch = max(allowed)
        decoded = 8 * batch / (output * steps[batch])
        first = replace(question, goal=Goal(prompt, output))
        seconds = prompt_seconds(first, first.model(sizes))
        ready = 0.8 * 8 / seconds
        moved = transfer_seconds(model, prompt)
        lines.append(
            Line(
                f"{prompt:,} in, {output:,} out",
                f"{decoded / ready:.2f} prompt replicas for one that decodes",
                f"{decoded:.1f} requests/s decoded ({batch} a GPU, {steps[batch] * 1e3:.0f} ms), "
                f"{ready:.1f} prompts/s ({seconds * 1e3:.0f} ms for 8), cache sent in "
                f"{moved * 1e3:.0f} ms",
            )
        )
    return [
        *lines,
        Line("replicas", "8 x H200 each, dp8 ep8", "both sides with even routing, no prefix found"),
    ]


def attention_experts() -> list[Line]:
    """The number of attention GPUs, for 32 expert GPUs with whole experts, that gives most tokens
    per GPU within 100 ms, by context."""
    device = load_device("h800")
    model = StepModel(published(R1), ParallelConfig(), device, load_profile("sglang"))
    experts = 32
    memory = split_memory(model, experts, "experts")
    each = model.config.num_layers * 576 * 2
    lines = []
    for context in (1024, 4096, 16384, 65536):
        room = int(memory.left // (each * context))
        found = []
        for attention in (8, 16, 32, 64, 128, 256):
            for batch in (size for size in BATCHES if size <= room):
                for flight in (size for size in (1, 2, 3, 4) if batch % size == 0):
                    work = GroupWork(BatchShape.decode(batch // flight, context))
                    step = split_step(model, work, attention, experts, "experts", flight)
                    if step.seconds <= 0.1:
                        rate = batch * attention / step.seconds / (attention + experts)
                        found.append((rate, attention, batch, step))
        if not found:
            lines.append(Line(f"{context:,} tokens", "none within 100 ms", f"room for {room}"))
            continue
        rate, attention, batch, step = max(found, key=lambda one: one[0])
        lines.append(
            Line(
                f"{context:,} tokens of context",
                f"{attention} : {experts}, {rate:,.0f} tok/s a GPU",
                f"{batch} requests an attention GPU in {step.batches} parts; a part takes "
                f"{step.attention * 1e3:.0f} ms of attention, {step.experts * 1e3:.0f} of experts, "
                f"{step.network * 1e3:.0f} of network; a token {step.seconds * 1e3:.0f} ms",
            )
        )
    return [
        *lines,
        Line(
            "why",
            "longer contexts need more attention GPUs for the same experts",
            "attention's time and cache grow with the context, the experts' do not; H800, 400 Gb/s "
            "a GPU",
        ),
    ]


# ---- at home

HOME_WATTS = 450.0  # of an RTX 4090 by its data sheet
HOST_WATTS = 100.0  # of a computer's other parts, for each GPU: an assumption
EURO_KWH = 0.30  # an assumption


def home_cluster() -> list[Line]:
    """32 RTX 4090 in four computers, experts (and attention's matrices) in 4 bits."""
    config = published(R1, "w4a16")
    lines = []
    watts = 32 * (HOME_WATTS + HOST_WATTS)
    for gbit in (1, 10, 25):
        question = _asked(
            "rtx4090",
            32,
            1024,
            512,
            config=config,
            device=with_link(load_device("rtx4090"), gbit),
            profile=load_profile("roofline"),
            splits=True,
        )
        plan = search(question)
        if not plan.options:
            raise ConfigError("nothing fits 32 RTX 4090")
        alone = min(
            (option for option in plan.options if option.batch * option.sizes.dp == 1),
            key=lambda option: option.tpot,
        )
        loaded = max(plan.options, key=lambda option: option.per_gpu)
        joules = loaded.throughput / watts
        lines += [
            Line(
                f"{gbit} Gbit/s between computers: one request",
                f"{alone.tpot * 1e3:.1f} ms a token at least",
                f"{_name(alone)}; {alone.limiter}",
            ),
            Line(
                "  at load",
                f"{loaded.throughput:,.0f} tok/s at most, {loaded.tpot * 1e3:.0f} ms a token",
                f"{_name(loaded)}, {loaded.batch} requests a group; {loaded.limiter}",
            ),
            Line(
                "  energy",
                f"{joules:.3f} tokens a joule, {joules * 3.6e6 / EURO_KWH:,.0f} a euro",
                f"{watts / 1e3:.1f} kW, {EURO_KWH:.2f} euro a kWh",
            ),
        ]
    return [
        *lines,
        Line(
            "what these are",
            "bounds: bytes over bandwidth, operations over peak",
            "no kernel of ours has been timed on a 4090; `rorqual bench calibrate --full` there "
            "measures them. 450 W is the card's limit, 100 W a GPU for the rest and the price "
            "are assumptions",
        ),
    ]


def _name(option: Option) -> str:
    return option.detail if option.kind == "attention:experts" else f"{option.kind} {option.layout}"


CHOICES: dict[str, tuple[str, Callable[..., list[Line]]]] = {
    "one-node-or-two": ("one node against two for R1", one_node_or_two),
    "attention-data-parallel": (
        "attention by data parallelism against tensor parallelism",
        attention_data_parallel,
    ),
    "w4a8": ("experts of 4 bits against fp8", w4a8),
    "micro-batches": ("what two micro-batches gain, by the wire's speed", micro_batches),
    "redundant-experts": (
        "what redundant experts are worth; --expert-load FILE takes real counts",
        redundant_experts,
    ),
    "prefill-decode": ("GPUs for prompts beside those that decode, by workload", prefill_decode),
    "attention-experts": ("attention GPUs for 32 expert GPUs, by context", attention_experts),
    "home-cluster": ("32 RTX 4090 with 4-bit experts over 1, 10 and 25 Gbit/s", home_cluster),
}
TAKES_LOADS = ("redundant-experts",)
