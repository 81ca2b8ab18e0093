"""What `bench layers` times: real layers with random weights over the platform's own op table,
one case a module, variant and size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from rorqual.bench.layers.backbone import make_backbone
from rorqual.cache.pool import KVPool
from rorqual.cache.spec import MLA_FORMS, kv_spec
from rorqual.config.model import ModelConfig, MoEConfig
from rorqual.errors import CapacityError
from rorqual.layers.attention import GQA
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.layers.mla import MLA
from rorqual.layers.moe import DenseMLP, MoE, run_stages
from rorqual.layers.parameter import Build, Target
from rorqual.layers.rotary import Rotary
from rorqual.models.loader import Draw, fill_normal
from rorqual.models.transformer import HiddenState, Layer, forward_layers
from rorqual.ops import rng
from rorqual.ops.deferred_sum import summed
from rorqual.ops.interface import AttentionMetadata, TokenPlaces
from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.select import ops_for
from rorqual.parallel.overlap import run_one
from rorqual.planner.costs import costs
from rorqual.planner.costs.costs import BatchShape, Format, Op
from rorqual.planner.costs.weights import attention_weights, layer_weights
from rorqual.platforms.base import Platform

ZIPF = 1.1
SEED = 0
PARTS: dict[str, tuple[str, ...]] = {
    "embed_tokens": ("embedding",),
    "mlp": ("dense_ffn",),
    "mla": ("attention",),
    "gqa": ("attention",),
    "dense_layer": ("attention", "dense_ffn", "norms"),
    "moe": ("router", "routed_experts", "shared_experts"),
    "backbone": ("attention", "dense_ffn", "router", "shared_experts", "norms"),
}


@dataclass(frozen=True)
class LayerCase:
    """One thing to time. phase: tokens (n tokens) | prefill (one prompt of n) | decode (one
    token a request, KV length n). on_host: the host's own work counts, done by one thread: several
    wait for one another where the machine is busy."""

    module: str
    variant: str
    phase: str
    n: int
    run: Callable[[], object]
    cost: Op
    parameters: int
    cache_bytes: int = 0
    experts_hit: int | None = None
    on_host: bool = False


class Layers(Protocol):
    def targets(self) -> Iterator[Target]: ...


@dataclass(frozen=True)
class LayerBench:
    """Where and at which sizes to measure. `requests` decode at once; `tokens` are the sizes n."""

    config: ModelConfig
    platform: Platform
    dtype: torch.dtype
    tokens: tuple[int, ...]
    requests: int = 1

    @property
    def device(self) -> torch.device:
        return self.platform.device

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def build(self) -> Build:
        gain = (2 * self.config.num_layers) ** -0.5
        return Build(ops_for(self.platform.name), self.dtype, self.device, self.config.quant, gain)

    @cached_property
    def rotary(self) -> Rotary:
        return Rotary(self.config.rope, max(self.tokens), self.device)

    def hidden(self, rows: int) -> Tensor:
        """Hidden states as a norm leaves them: random directions of unit mean square."""
        draw = torch.randn(
            rows, self.config.hidden_size, generator=torch.Generator().manual_seed(SEED)
        )
        return torch.nn.functional.rms_norm(draw, draw.shape[-1:]).to(self.device, self.dtype)

    def format(self, form: str = "A_CC_ME") -> Format:
        return Format(dtype=self.dtype_name, form=form)

    def cost(
        self, module: str, batch: BatchShape, form: str = "A_CC_ME", layers: tuple[int, ...] = (0,)
    ) -> Op:
        ops = (
            op
            for layer in layers
            for op in costs.layer_ops(self.config, layer, batch, self.format(form))
        )
        return costs.total(op for op in ops if op.part in PARTS[module])

    def batch(self, phase: str, n: int) -> BatchShape:
        return BatchShape.decode(self.requests, n) if phase == "decode" else BatchShape(1, n)

    def cache_bytes(self, form: str = "A_CC_ME") -> int:
        """Of one token in one layer."""
        return costs.kv_bytes_per_token(self.config, self.format(form)) // self.config.num_layers


def fill(layers: Layers, draw: Draw = rng.draw_normal) -> None:
    """Random weights drawn as `models.loader.random_weights` draws them."""
    for target in layers.targets():
        if not target.covers and target.std is None:
            target.view.fill_(target.fill)
        elif not target.covers:
            fill_normal(target.view, target.name, SEED, target.std or 0.0, draw=draw)


def size_of(layers: Layers) -> int:
    return sum(
        target.view.numel()
        for target in layers.targets()
        if not target.covers and not target.name.endswith("_scale_inv")
    )


class Cache:
    """A pool of random entries for `layers` layers, and steps over it with scattered pages."""

    def __init__(self, bench: LayerBench, form: str, layers: int = 1):
        self.bench = bench
        self.page = bench.platform.default_page_size
        columns = -(-max(bench.tokens) // self.page)
        pages = columns * bench.requests
        spec = kv_spec(replace(bench.config, num_layers=layers), self.page, bench.dtype_name, form)
        self.pool = KVPool(spec, pages + 1, bench.device)
        for plane in (plane for layer in self.pool.layers for plane in layer.values()):
            plane.normal_()
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(SEED)) + 1
        self.tables = order.view(bench.requests, columns).to(bench.device)

    def step(self, phase: str, n: int) -> ForwardBatch:
        decode = phase == "decode"
        device = self.bench.device
        rows = self.bench.requests if decode else 1
        positions = (
            torch.full((rows,), n - 1, device=device) if decode else torch.arange(n, device=device)
        )
        owner = (
            torch.arange(rows, device=device)
            if decode
            else torch.zeros(n, dtype=torch.int64, device=device)
        )
        slots = self.tables[owner, positions // self.page] * self.page + positions % self.page
        tables = self.tables[:rows, : -(-n // self.page)].contiguous()
        segment = AttentionMetadata(
            tables,
            torch.full((rows,), n, device=device),
            (1,) * rows if decode else (n,),
            (n,) * rows,
        )
        ids = torch.zeros_like(positions)
        places = TokenPlaces(*self.bench.rotary.rows(positions), slots)
        step = ForwardBatch(ids, positions, places, owner[:1], self.pool)
        return replace(step, decode=segment) if decode else replace(step, prefill=segment)


# ---- modules


def embed_cases(bench: LayerBench) -> Iterator[LayerCase]:
    """Placements of the table: `device`; and if that is not the host, `cpu` (rows gathered by one
    host thread), `cpu+h2d` (and copied to the device) and `pinned` (read by the device's kernel, as
    with `embed_device: cpu`)."""
    config = bench.config
    ops = bench.build.ops
    platform = bench.platform
    table = bench.build.empty(config.vocab_size, config.hidden_size).normal_()
    draws = {n: torch.randint(config.vocab_size, (n,)) for n in bench.tokens}
    runs: dict[str, Callable[[Tensor], Callable[[], object]]] = {}
    if platform.name != "cpu":
        host = platform.host_empty(tuple(table.shape), table.dtype).copy_(table)
        runs["cpu"] = lambda ids: partial(host.index_select, 0, ids)
        runs["cpu+h2d"] = lambda ids: lambda: platform.to_device(host.index_select(0, ids))
        runs["pinned"] = lambda ids: partial(ops.embed, ids.to(bench.device), host)
    runs["device"] = lambda ids: partial(ops.embed, ids.to(bench.device), table)
    for variant, run in runs.items():
        for n, ids in draws.items():
            cost = Op("embed", "embedding", 0, float(n * config.hidden_size * table.element_size()))
            yield LayerCase(
                "embed_tokens",
                variant,
                "tokens",
                n,
                run(ids),
                cost,
                table.numel(),
                on_host=variant.startswith("cpu"),
            )


def mlp_cases(bench: LayerBench) -> Iterator[LayerCase]:
    config = bench.config
    layer = bench.config.moe_layers.index(False)
    mlp = DenseMLP(
        bench.build, f"model.layers.{layer}.mlp", config.hidden_size, config.dense_intermediate
    )
    fill(mlp, bench.build.ops.draw_normal)
    for n in bench.tokens:
        cost = bench.cost("mlp", BatchShape(1, n), layers=(layer,))
        yield LayerCase(
            "mlp", "dense", "tokens", n, partial(mlp.forward, bench.hidden(n)), cost, size_of(mlp)
        )


def mla_cases(bench: LayerBench) -> Iterator[LayerCase]:
    """One layer a form, in both phases: a form that suits decoding shows what it costs for
    prompts, and the reverse."""
    for form in MLA_FORMS:
        layer = MLA(
            bench.build, bench.config, 0, "model.layers.0.self_attn", prefill=form, decode=form
        )
        fill(layer, bench.build.ops.draw_normal)
        layer.finalize()
        yield from _attention_cases(
            bench, "mla", form, layer, costs.attention_parameters(bench.config, form)
        )


def gqa_cases(bench: LayerBench) -> Iterator[LayerCase]:
    layer = GQA(bench.build, bench.config, 0, "model.layers.0.self_attn")
    fill(layer, bench.build.ops.draw_normal)
    yield from _attention_cases(bench, "gqa", "GQA", layer, size_of(layer))


def _attention_cases(
    bench: LayerBench, module: str, form: str, layer: MLA | GQA, parameters: int
) -> Iterator[LayerCase]:
    cache = Cache(bench, form)
    for phase, n in _phases(bench):
        step = cache.step(phase, n)
        run = partial(layer.forward, bench.hidden(step.num_tokens), step)
        cost = bench.cost(module, bench.batch(phase, n), form)
        yield LayerCase(module, form, phase, n, run, cost, parameters, bench.cache_bytes(form))


def _phases(bench: LayerBench) -> Iterator[tuple[str, int]]:
    return ((phase, n) for phase in ("prefill", "decode") for n in bench.tokens)


def dense_layer_cases(bench: LayerBench) -> Iterator[LayerCase]:
    """Norm, attention, norm, MLP, with the engine's default forms."""
    config = bench.config
    index = bench.config.moe_layers.index(False)
    model = make_backbone(
        replace(config, num_layers=1, moe_layers=(False,), vocab_size=1), bench.build
    )
    fill(model, bench.build.ops.draw_normal)
    model.finalize()
    layer = model.layers[0]
    cache = Cache(bench, "A_CC_ME")
    for phase, n in _phases(bench):
        step = cache.step(phase, n)
        cost = bench.cost("dense_layer", bench.batch(phase, n), _default_form(phase), (index,))
        run = partial(_through, [layer], bench.hidden(step.num_tokens), step)
        yield LayerCase(
            "dense_layer", "default", phase, n, run, cost, size_of(layer), bench.cache_bytes()
        )


def _default_form(phase: str) -> str:
    return "CC" if phase == "prefill" else "A_CC_ME"


# ---- experts


class ForcedMoE(MoE):
    """Run the router, then replace its ids by `forced`; the weights are kept, as they do not affect
    the time."""

    forced: Tensor | None = None

    @property
    def is_one_op(self) -> bool:
        return self.forced is None and super().is_one_op

    def route(self, x: Tensor, padded: PaddedRows | None = None) -> tuple[Tensor, Tensor]:
        ids, weights = super().route(x, padded)
        return (ids if self.forced is None else self.forced), weights

    def run(self, x: Tensor, forced: Tensor | None) -> Tensor:
        self.forced = forced
        y = summed(run_stages(self.stages(), x))
        self.forced = None
        return y


def routed_ids(kind: str, tokens: int, moe: MoEConfig) -> Tensor:
    """Expert ids [T, K], drawn without replacement: `uniform`, or `zipf` with weight 1/rank^1.1
    over experts in random order."""
    generator = torch.Generator().manual_seed(SEED)
    if kind == "uniform":
        return torch.rand(tokens, moe.num_experts, generator=generator).topk(moe.top_k, -1).indices
    ranks = torch.randperm(moe.num_experts, generator=generator) + 1
    return torch.multinomial(
        ranks.double().pow(-ZIPF).expand(tokens, -1), moe.top_k, generator=generator
    )


def moe_cases(bench: LayerBench) -> Iterator[LayerCase]:
    config = bench.config
    layer = bench.config.moe_layers.index(True)
    moe = ForcedMoE(bench.build, f"model.layers.{layer}.mlp", config.hidden_size, config.moe)
    fill(moe, bench.build.ops.draw_normal)
    for kind in ("natural", "uniform", "zipf"):
        for n in bench.tokens:
            x = bench.hidden(n)
            routed, shared = moe.route(x)[0].split((config.moe.top_k, moe.fused_shared_experts), 1)
            if kind != "natural":
                routed = routed_ids(kind, n, config.moe).to(bench.device)
            run = partial(moe.run, x, None if kind == "natural" else torch.cat((routed, shared), 1))
            hit = routed.unique().numel()
            yield LayerCase(
                "moe",
                kind,
                "tokens",
                n,
                run,
                _moe_cost(bench, layer, n, hit),
                size_of(moe),
                experts_hit=hit,
            )


def _moe_cost(bench: LayerBench, layer: int, n: int, hit: int) -> Op:
    """With the bytes of the experts really in use."""
    ops = [
        op
        for op in costs.layer_ops(bench.config, layer, BatchShape(1, n), bench.format())
        if op.part in PARTS["moe"]
    ]
    share = hit / costs.expected_experts(bench.config.moe.num_experts, bench.config.moe.top_k, n)
    return costs.total(
        replace(op, weight_bytes=op.weight_bytes * share) if op.part == "routed_experts" else op
        for op in ops
    )


# ---- backbone


def _through(layers: list[Layer], x: Tensor, step: ForwardBatch) -> Tensor:
    state = HiddenState(x)
    run_one(forward_layers(layers, state, step))
    return summed(state.x)


def backbone_cases(bench: LayerBench) -> Iterator[LayerCase]:
    """Every layer without its routed experts; no embedding, no head."""
    config = bench.config
    model = make_backbone(replace(config, vocab_size=1), bench.build)
    fill(model, bench.build.ops.draw_normal)
    model.finalize()
    layers = model.layers
    held = sum(map(size_of, model.layers))
    cache = Cache(bench, "A_CC_ME", config.num_layers)
    for phase, n in _phases(bench):
        step = cache.step(phase, n)
        cost = bench.cost(
            "backbone", bench.batch(phase, n), _default_form(phase), tuple(range(config.num_layers))
        )
        run = partial(_through, layers, bench.hidden(step.num_tokens), step)
        yield LayerCase(
            "backbone",
            "default",
            phase,
            n,
            run,
            cost,
            held,
            bench.cache_bytes() * config.num_layers,
        )


CASES = {
    "embed_tokens": embed_cases,
    "mlp": mlp_cases,
    "mla": mla_cases,
    "gqa": gqa_cases,
    "dense_layer": dense_layer_cases,
    "moe": moe_cases,
    "backbone": backbone_cases,
}


def modules_of(config: ModelConfig) -> list[str]:
    """The modules a model has."""
    absent = {"gqa" if config.is_mla else "mla"}
    absent |= {"mlp", "dense_layer"} if all(config.moe_layers) else set()
    absent |= set() if any(config.moe_layers) else {"moe"}
    return [name for name in CASES if name not in absent]


def check_memory(bench: LayerBench, modules: list[str]) -> None:
    """Refuse before allocating. Modules are built one after another, so the largest counts."""
    free = bench.platform.available_memory()
    for name in modules:
        need = _weight_bytes(bench, name)
        if need > free:
            raise CapacityError(
                f"module {name} needs {need / 2**30:.2f} GiB of weights, {free / 2**30:.2f} "
                "GiB are free; leave it out"
            )


def _weight_bytes(bench: LayerBench, module: str) -> int:
    config = bench.config
    name = bench.dtype_name
    if module == "embed_tokens":
        return costs.weight_bytes(config, fmt=bench.format()).embedding
    first = (
        config.moe_layers.index(module == "moe") if module in ("mlp", "dense_layer", "moe") else 0
    )
    layers = range(config.num_layers) if module == "backbone" else (first,)
    listed = [
        weight
        for layer in layers
        for weight in layer_weights(config, layer, config.moe_layers[layer])
    ]
    if module == "mla":  # the form with the most weights keeps its products in addition
        listed += attention_weights(config, 0, "AM_CC_ME")[-3:]
    return sum(weight.bytes(name) for weight in listed if weight.part in PARTS[module])
