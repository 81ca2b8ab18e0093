"""`exe_mode: compile`: the forward pass of a decode step, traced once without hand-overs and
compiled by torch.compile.

Two variants at most, both made before serving: one for a single token, one for any larger number
(the number is a symbol, so batch sizes and drafts do not matter). On several ranks collectives are
operators of the traced graph. Where all ranks hold the same rows, which is tensor parallelism
alone, nothing else changes; else counts of rows are part of the code: steps are padded to batch
sizes that all ranks agree on, as for captured graphs, and each has a variant.

After the first call the compiled function is called directly, with the step's tensors in place of
the first call's: no guards are evaluated, and nothing can recompile. What the trace assumed must
therefore not change: tensors of weights, cache and exchange are updated in place, `record_load`
keeps its value.

Compiled code is kept below the cache folder by torch's own caches, so that a restart traces the
model (seconds) and compiles nothing; unless configured to keep nothing.
"""

from __future__ import annotations

import hashlib
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.config.model import MoEConfig, cache_folder, compiler_caches_in
from rorqual.config.parallel import ParallelConfig
from rorqual.errors import ConfigError
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.models.transformer import Transformer, forward_layers
from rorqual.ops import custom_ops
from rorqual.ops.custom_ops import TracedMetadata, TracedOps
from rorqual.ops.interface import AttentionMetadata, TokenPlaces
from rorqual.parallel.exchange_policy import chosen_exchange, shards_tokens
from rorqual.parallel.layout import Layout

# Precompiled headers would go into a folder that every user of the machine may write to.
OPTIONS = {"cpp_cache_precompile_headers": False}
# Only marked sizes become symbols. Else numbers that differ from an earlier engine's would, too.
STATIC = {
    "automatic_dynamic_shapes": False,
    "assume_static_by_default": True,
    "specialize_int": True,
}
Function = Callable[..., Any]


@dataclass
class CompileStats:
    """variants: functions compiled; from_cache: how many of them came from an earlier process;
    seconds: tracing and compiling."""

    variants: int = 0
    from_cache: int = 0
    seconds: float = 0.0


class CompiledVariant:
    """A compiled function with the arguments of its first call; the step's arguments are replaced
    at each call."""

    def __init__(
        self,
        function: Function,
        arguments: tuple[Any, ...],
        of_step: tuple[Tensor, ...],
        tokens: int | None,
        pages: int,
    ):
        """tokens: of the first call, where their number is a symbol."""
        self.function = function
        self.arguments = list(arguments)
        places = {id(tensor): index for index, tensor in enumerate(of_step)}
        self.tensors = [
            (at, places[id(given)]) for at, given in enumerate(arguments) if id(given) in places
        ]
        assert len(self.tensors) == len(of_step), "every tensor of the step is an input, once"
        sizes = {at: given for at, given in enumerate(arguments) if not isinstance(given, Tensor)}
        assert set(sizes.values()) <= {tokens, pages}, "these two are the only symbols"
        self.sizes = [at for at, given in sizes.items() if given == tokens]

    def __call__(self, of_step: tuple[Tensor, ...]) -> Tensor:
        arguments = self.arguments.copy()
        for at, index in self.tensors:
            arguments[at] = of_step[index]
        for at in self.sizes:
            arguments[at] = of_step[0].shape[0]
        return self.function(*arguments)[0]


class TracedForwardBatch(ForwardBatch):
    """A decode-only step. Values cached behind a lock cannot be traced, so segments are made at
    each call; nor, in torch 2.11, can objects as default arguments, so there are none."""

    def __init__(
        self,
        ids: Tensor,
        places: TokenPlaces,
        pool: KVPool,
        segment: AttentionMetadata,
        layout: Layout,
    ):
        self.token_ids = self.positions = self.logit_rows = ids
        self.places = places
        self.pool = pool
        self.layout = layout
        self.decode = segment
        self.prefill = None

    @property
    def segments(self) -> list[tuple[AttentionMetadata, slice]]:
        assert self.decode is not None
        return [(self.decode, slice(0, self.num_tokens))]


def same_rows_on_all_ranks(sizes: ParallelConfig, moe: MoEConfig) -> bool:
    """Whether all ranks hold the same rows in every decode step."""
    return sizes.dp == 1 and not shards_tokens(sizes, chosen_exchange(sizes, moe, 1, decode=True))


class CompiledForward:
    """Normed hidden states [T, hidden] of every row of a step that only decodes. Compiled code
    is kept in `folder`, or nowhere; the model's layers were built over `ops`."""

    def __init__(self, model: Transformer, pool: KVPool, ops: TracedOps, folder: Path | None):
        self.model = model
        self.pool = pool
        self.ops = ops
        self.folder = folder
        self.stats = CompileStats()
        # Whether each number of tokens has its own variant, and steps are padded to these: where
        # ranks hold different rows, their number is part of the code.
        self.fixed_shapes = not same_rows_on_all_ranks(model.mesh.sizes, model.config.moe)
        self.sized: dict[int, CompiledVariant] = {}
        self.one: CompiledVariant | None = None
        self.many: CompiledVariant | None = None
        for attention in model.attentions():
            self.ops.mla[attention.index] = attention.weights

    def compile(self, examples: Iterable[ForwardBatch]) -> None:
        """Compile for example steps that write only to the null page: one of a single token, one of
        several, or either. Their number of tokens must differ from the pool's pages: equal numbers
        would become one symbol. With fixed shapes a size is compiled at its first step, on all
        ranks in the same order, which the warm-up of all batch sizes runs before serving."""
        if not self.fixed_shapes:
            self._compile_all(examples)

    def _compile_all(self, examples: Iterable[ForwardBatch]) -> None:
        start = time.perf_counter()
        with _caches(self.folder):
            for step in examples:
                if self._variant(step) is not None:
                    continue
                if self.fixed_shapes:
                    self.sized[step.num_tokens] = self._compile(step, dynamic=False)
                elif step.num_tokens == 1:
                    self.one = self._compile(step, dynamic=False)
                else:
                    self.many = self._compile(step, dynamic=True)
        self.stats.seconds += time.perf_counter() - start

    def __call__(self, step: ForwardBatch) -> Tensor:
        assert step.decode is not None
        assert step.prefill is None
        variant = self._variant(step)
        if variant is None:
            self._compile_all([step])
            variant = self._variant(step)
        assert variant is not None
        with self.ops.attending(step.decode):
            return variant(_inputs(step))

    def _variant(self, step: ForwardBatch) -> CompiledVariant | None:
        if self.fixed_shapes:
            return self.sized.get(step.num_tokens)
        return self.one if step.num_tokens == 1 else self.many

    def _trace(self, ids: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        segment = TracedMetadata(ids.shape[0])
        places = TokenPlaces(cos, sin, slots)
        mesh = self.model.mesh
        # every data-parallel rank has the same number of rows: else steps are padded
        counts = (ids.shape[0],) * mesh.sizes.dp
        layout = mesh.layout(counts, True, self.model.config.moe)
        step = TracedForwardBatch(ids, places, self.pool, segment, layout)
        state = self.model.embedded(step)
        for _ in forward_layers(self.model.layers, state, step):
            pass  # a hand-over: there is no other micro-batch
        return self.model.leave(state, step, None)

    def _compile(self, step: ForwardBatch, dynamic: bool) -> CompiledVariant:
        assert step.decode is not None
        assert step.num_tokens != self.pool.num_pages or not dynamic
        made: list[CompiledVariant] = []
        # clones: inputs are told apart by identity
        of_step = tuple(tensor.clone() for tensor in _inputs(step))
        planes = [plane for layer in self.pool.layers for plane in layer.values()]
        # The number of pages depends on free memory: as a symbol it does not invalidate kept code
        # at the next start.
        for tensor in (*planes, *(of_step if dynamic else ())):
            torch._dynamo.mark_dynamic(tensor, 0)

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Function:
            function = self._inductor(graph, inputs)

            def first(*arguments: Any) -> Any:
                symbols = (of_step[0].shape[0] if dynamic else None, self.pool.num_pages)
                made.append(CompiledVariant(function, arguments, of_step, *symbols))
                return function(*arguments)

            return first

        # Guards choose between compiled variants at each call; here a variant is called directly,
        # so none are kept.
        options: dict[str, Any] = {"guard_filter_fn": lambda guards: [False] * len(guards)}
        function = torch.compile(
            _own_code(self._trace), fullgraph=True, backend=backend, options=options
        )
        try:
            with self.ops.attending(step.decode), torch._dynamo.config.patch(STATIC):
                function(*of_step)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            cause = error.inner_exception
            first = (str(cause).strip().splitlines() or [""])[0]
            raise ConfigError(
                f"exe_mode='compile' does not work here: {type(cause).__name__}: {first}; "
                "accepted: eager"
            ) from error
        assert len(made) == 1
        return made[0]

    def _inductor(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Function:
        from torch._dynamo.utils import counters
        from torch._inductor.compile_fx import compile_fx

        before = _hits(counters)
        function: Any = compile_fx(graph, inputs, config_patches=OPTIONS)
        self.stats.variants += 1
        self.stats.from_cache += _hits(counters) > before
        return function


@contextmanager
def _caches(folder: Path | None) -> Iterator[None]:
    """Without a folder, compiled code goes to a temporary one, deleted once all of it has been
    loaded. Code that this process compiled before may be reused from memory, none from disk."""
    if folder is not None:
        with compiler_caches_in(folder):
            yield
        return
    with TemporaryDirectory(prefix="rorqual-compile-") as name, ExitStack() as stack:
        stack.enter_context(compiler_caches_in(Path(name)))
        if "triton" in sys.modules:  # triton keeps inductor's kernels itself
            cache = sys.modules["triton"].knobs.cache
            stack.enter_context(cache.scope())
            cache.dir = str(Path(name) / "triton")
        yield


def code_folder(device: str, case: str | None = None) -> Path:
    """Where code compiled by this torch for these operators and this kind of device is kept, below
    the folder `case` where one is named. Below it torch keys code by the traced graph, which
    reflects the model's configuration and the engine's options, and shares what graphs have in
    common."""
    source = hashlib.sha256(Path(custom_ops.__file__).read_bytes()).hexdigest()
    key = hashlib.sha256(repr((torch.__version__, device, source)).encode()).hexdigest()[:16]
    return cache_folder() / (case or "") / f"compile-{key}"


def _inputs(step: ForwardBatch) -> tuple[Tensor, ...]:
    places = step.places
    return step.token_ids, places.slots, places.cos, places.sin


def _hits(counters: Any) -> int:
    """Cache hits: of whole functions, or of their kernels."""
    return (
        counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    )


def _own_code(method: Any) -> Function:
    """The method over a copy of its code object. Dynamo stores and counts compiled code on that
    object, so engines in one process would otherwise share it and its limit."""
    function = method.__func__
    copy = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
    return types.MethodType(copy, method.__self__)
