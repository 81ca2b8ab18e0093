"""The decoder that all supported models share: embedding, layers of attention and feed-forward,
norm, head."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.config.model import ModelConfig
from rorqual.layers.embedding import Embedding, Head
from rorqual.layers.fixed_experts import FixedExperts
from rorqual.layers.forward_batch import CapturablePrompts, ForwardBatch
from rorqual.layers.mla import MLA
from rorqual.layers.moe import DenseMLP, MoE
from rorqual.layers.norm import Norm
from rorqual.layers.parameter import Build, Target
from rorqual.layers.rotary import Rotary
from rorqual.ops.activation import Activation
from rorqual.ops.deferred_sum import NormInput, summed
from rorqual.parallel.layout import Layout, MultiRankLayout
from rorqual.parallel.overlap import run, run_one

Pass = Generator[None, None, Tensor]
MLP = DenseMLP | MoE | FixedExperts


class Attention(Protocol):
    def forward(self, x: Activation, step: ForwardBatch) -> Tensor: ...

    def finalize(self) -> None: ...

    def targets(self) -> Iterator[Target]: ...

    def capturable_prompts(self, pool: KVPool) -> CapturablePrompts | None: ...


class Predictor(Protocol):
    """A module that predicts one token further than the previous model or module
    (models/mtp.py)."""

    def forward(self, embedded: Tensor, hidden: Tensor, step: ForwardBatch) -> Pass: ...


class Layer:
    """norm, attention, norm, feed-forward. The norms also add to the residual stream."""

    def __init__(
        self,
        build: Build,
        prefix: str,
        config: ModelConfig,
        attention: Attention,
        mlp: MLP,
    ):
        self.attention = attention
        self.mlp = mlp
        self.input_norm = Norm(
            build,
            f"{prefix}.input_layernorm",
            config.hidden_size,
            config.norm_eps,
            quantize_output=True,
        )
        self.post_norm = Norm(
            build,
            f"{prefix}.post_attention_layernorm",
            config.hidden_size,
            config.norm_eps,
            quantize_output=True,
            before_router=isinstance(mlp, MoE) and mlp.shared is None,
        )

    def attend(
        self, x: NormInput, residual: Tensor | None, step: ForwardBatch
    ) -> tuple[Activation, Tensor]:
        """(input of the feed-forward part, residual stream)"""
        h, residual = step.layout.to_attention(self.input_norm, x, residual)
        h = self.attention.forward(h, step)
        return step.layout.to_ffn(self.post_norm, h, residual)

    def finalize(self) -> None:
        self.attention.finalize()
        self.mlp.finalize()

    def targets(self) -> Iterator[Target]:
        for part in (self.input_norm, self.attention, self.post_norm, self.mlp):
            yield from part.targets()


@dataclass
class HiddenState:
    """State between two layers: the input of the next norm, and the residual stream, None before
    the first norm. Both [T, hidden]."""

    x: NormInput
    residual: Tensor | None = None


def forward_layers(
    layers: Sequence[Layer], state: HiddenState, step: ForwardBatch
) -> Generator[None, None, None]:
    """Run the decoder layers, updating `state`. Yields at every hand-over of an MoE layer.

    It returns nothing and delegates to no other generator: torch.compile traces a generator, but
    as of 2.13 loses its return value.
    """
    for layer in layers:
        h, state.residual = layer.attend(state.x, state.residual, step)
        if step.layer_written is not None:
            step.layer_written()
        first, *rest = layer.mlp.stages(step.layout)
        x = first(h)
        for stage in rest:
            yield
            x = stage(x)
        state.x = x


# A layer's kernels depend only on objects of these modules.
DESCRIBED = ("rorqual.layers.", "rorqual.models.", "rorqual.ops.reference")


def _shapes(what: Any, seen: set[int]) -> Iterator[tuple[Any, ...]]:
    """Types of a layer's parts, and shapes and dtypes of its tensors, in attribute order."""
    if isinstance(what, Tensor):
        yield tuple(what.shape), what.dtype
    elif isinstance(what, list | tuple):
        for one in what:
            yield from _shapes(one, seen)
    elif type(what).__module__.startswith(DESCRIBED) and id(what) not in seen:
        seen.add(id(what))
        yield (type(what).__qualname__,)
        for value in getattr(what, "__dict__", {}).values():
            yield from _shapes(value, seen)


class Transformer:
    """Subclasses create the layers' attention and feed-forward. On several ranks this is one rank's
    part: its shards, and the layers of its pipeline stage; the first stage has the embedding, the
    last one norm and head."""

    def __init__(self, config: ModelConfig, build: Build, max_len: int):
        self.config = config
        self.ops = build.ops
        self.dtype = build.dtype
        self.mesh = build.mesh
        mesh = build.mesh
        sizes = (config.vocab_size, config.hidden_size)
        self.held = mesh.sizes.stage_layers(config.num_layers, mesh.pp_rank)
        tied = mesh.last_stage and config.tie_embeddings
        embeds = mesh.first_stage or tied or self.embeds_drafts(build)
        self.embed = Embedding(build, "model.embed_tokens.weight", *sizes) if embeds else None
        self.layers = [self.make_layer(build, i, f"model.layers.{i}") for i in self.held]
        self.norm = Norm(build, "model.norm", config.hidden_size, config.norm_eps)
        self.head = Head(build, *sizes, self.embed if tied else None) if mesh.last_stage else None
        self.rotary = Rotary(config.rope, max_len, build.device)
        self.mtp: Sequence[Predictor] = ()

    def embeds_drafts(self, build: Build) -> bool:
        """Whether prediction modules of this pipeline stage need the embedding."""
        return False

    @property
    def cache_layers(self) -> range:
        """This rank's layers of the whole model's cache (cache/spec.py); prediction modules follow
        the last layer."""
        return range(self.held.start, self.held.stop + len(self.mtp))

    def make_layer(self, build: Build, index: int, prefix: str) -> Layer:
        raise AssertionError("subclasses make their layers")

    def make_mlp(self, build: Build, index: int, prefix: str) -> MLP:
        config = self.config
        # prediction modules follow the layers and have experts
        if index >= config.num_layers or config.moe_layers[index]:
            slots = build.slot_maps.get(index)
            remote = build.remote(index)
            made = MoE(build, f"{prefix}.mlp", config.hidden_size, config.moe, slots, remote)
            made.simulated_routing = build.simulated_routing(index)
            return made
        if build.fixed_experts:
            return FixedExperts(build, f"{prefix}.mlp", config)
        return DenseMLP(build, f"{prefix}.mlp", config.hidden_size, config.dense_intermediate)

    def first_of_each_kind(self) -> list[Layer]:
        """The first layer of each kind: layers are of one kind if their tensors have the same
        shapes and dtypes."""
        kinds: dict[tuple[Any, ...], Layer] = {}
        for layer in self.layers:
            kinds.setdefault(tuple(_shapes(layer, set())), layer)
        return list(kinds.values())

    @contextmanager
    def one_layer_of_each_kind(self) -> Iterator[None]:
        """Inside, a step runs only the first layer of each kind, which launches every kernel."""
        with self.only(self.first_of_each_kind()):
            yield

    @contextmanager
    def only(self, layers: list[Layer]) -> Iterator[None]:
        """Inside, a step runs these layers alone."""
        every = self.layers
        self.layers = layers
        try:
            yield
        finally:
            self.layers = every

    def forward(self, step: ForwardBatch, every_row: bool = False) -> Pass:
        """Normed hidden states of the step's `logit_rows`, [N, hidden], or with `every_row` of all
        tokens, [T, hidden]. Yields at every hand-over of an MoE layer."""
        assert step.layout.mesh is self.mesh, (
            "a step of a model on several ranks needs Transformer.layout"
        )
        state = yield from self._enter(step)
        yield from forward_layers(self.layers, state, step)
        if not self.mesh.last_stage:
            return self._pass_on(state)
        # as many logit rows as tokens: all rows, in order, so there is nothing to select
        every_row = every_row or step.logit_rows.shape[0] == step.num_tokens
        return self.leave(state, step, None if every_row else step.logit_rows)

    def leave(self, state: HiddenState, step: ForwardBatch, rows: Tensor | None) -> Tensor:
        """The final norm: hidden states of `rows` [N] of the step, or of all rows."""
        assert state.residual is not None
        return step.layout.leave(self.norm, state.x, state.residual, rows)

    def embedded(self, step: ForwardBatch) -> HiddenState:
        assert self.embed is not None
        return HiddenState(step.layout.enter(self.embed.forward(step.token_ids, step.layout)))

    def _enter(self, step: ForwardBatch) -> Generator[None, None, HiddenState]:
        """Embedded tokens, or the state received from the previous pipeline stage."""
        if self.mesh.first_stage:
            return self.embedded(step)
        assert isinstance(step.layout, MultiRankLayout)
        shape = (2, step.layout.rows, self.config.hidden_size)
        device = step.token_ids.device
        pending = self.mesh.pp.receive(shape, self.dtype, device, self.mesh.pp_rank - 1)
        yield  # even without rows: all ranks of a stage must interleave micro-batches alike
        return HiddenState(*pending.wait().unbind(0))

    def _pass_on(self, state: HiddenState) -> Tensor:
        """Send the state to the next pipeline stage. Returns an empty tensor, [0, hidden]."""
        assert state.residual is not None
        x = summed(state.x)
        self.mesh.pp.send(torch.stack((x, state.residual)), self.mesh.pp_rank + 1)
        return x[:0]

    def split(self, step: ForwardBatch, tokens: Sequence[Sequence[int]], decode: bool) -> None:
        """Split the step into micro-batches. `tokens`: for each of them, the tokens of each
        data-parallel rank. All use one exchange: exchanges hand over differently often, and a
        micro-batch may read what the one before it has written of the same layer."""
        own = accumulate((part[self.mesh.dp_rank] for part in tokens), initial=0)
        most = max(max(part) for part in tokens)
        padded = step.layout.padded
        step.parts = []
        for part, (start, stop) in zip(tokens, pairwise(own), strict=True):
            layout = self.layout(part, decode, most).with_padding(padded and padded.after(start))
            step.parts.append(step.part(slice(start, stop), layout.alternating()))

    def compute(self, step: ForwardBatch, every_row: bool = False) -> Tensor:
        """Run `forward` to its end. A split step interleaves its micro-batches and returns every
        row."""
        if not step.parts:
            return run_one(self.forward(step, every_row))
        with self.ops.beside_messages():
            return torch.cat(run([self.forward(part, every_row=True) for part in step.parts]))

    def layout(
        self, tokens: Sequence[int], decode: bool = False, most: int | None = None
    ) -> Layout:
        """The layout of a step. `tokens` of each data-parallel rank, including padding, the same on
        all ranks of the world; `decode`: no rank has a prefill chunk; most: see Mesh.layout."""
        return self.mesh.layout(tokens, decode, self.config.moe, most)

    def logits(
        self, hidden: Tensor, counts: Sequence[int] | None = None, wide: bool = True
    ) -> Tensor:
        """[N, hidden] to [N, vocabulary], on the last stage. `wide`: in fp32. `counts`: rows of
        each data-parallel rank, needed if head_tp exceeds tp."""
        assert self.head is not None, "logits are made on the last stage"
        return self.head.forward(hidden, counts, wide)

    @property
    def embedding(self) -> Tensor:
        """The embedding table, or this rank's rows of it."""
        assert self.embed is not None, "the embedding lives on the first stage"
        return self.embed.table

    def targets(self) -> Iterator[Target]:
        if self.embed is not None:
            yield from self.embed.targets()
        for layer in self.layers:
            yield from layer.targets()
        if self.head is not None:
            yield from self.norm.targets()
            yield from self.head.targets()

    def skips(self, name: str) -> bool:
        """Whether a checkpoint tensor is skipped by design: another stage's, or unused."""
        tied = self.config.tie_embeddings and name == "lm_head.weight"
        return name.endswith("rotary_emb.inv_freq") or tied or self._elsewhere(name)

    def _elsewhere(self, name: str) -> bool:
        first, *rest = name.removeprefix("model.").split(".")
        if first == "layers" and rest and rest[0].isdigit():
            return int(rest[0]) not in self.held and int(rest[0]) < self.config.num_layers
        return (first == "embed_tokens" and self.embed is None) or (
            first in ("norm", "lm_head") and self.head is None
        )

    def finalize(self) -> None:
        """Call once, after loading."""
        for layer in self.layers:
            layer.finalize()
        if self.head is not None:
            self.head.finalize()

    def derived(self) -> list[Tensor]:
        """Tensors that `finalize` derived from the weights and that are kept in addition to
        them."""
        return []

    def attentions(self) -> list[MLA]:
        """Latent attention layers, including those of prediction modules."""
        return []

    def moe_layers(self) -> list[MoE]:
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoE)]
