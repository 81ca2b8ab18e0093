"""`exe_mode: compile` (ge_graph) on an NPU: torchair compiles the forward pass of a decode step,
one graph for each number of rows, from embedding to normed hidden states.

Shapes are fixed: a step is padded to the next captured batch size, as for captured graphs. Lengths
are tensors, so nothing in the graph asks the host. Graphs are kept below the cache folder, in
`case_name` where given, under a digest of all they depend on: the configuration, the rank, the
versions, the number of pages. torchair drops the guards of kept graphs, so another configuration
must never find them."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rorqual.cache.pool import KVPool
from rorqual.config.model import cache_folder
from rorqual.engine.config import EngineConfig
from rorqual.engine.execution.compiled import CompileStats
from rorqual.errors import ConfigError
from rorqual.layers.forward_batch import ForwardBatch
from rorqual.models.transformer import Transformer, forward_layers
from rorqual.ops.interface import AttentionMetadata, TokenPlaces
from rorqual.ops.npu.backend import NpuOps, SegmentTensors
from rorqual.parallel.layout import Layout

TRACED = ("engine/npu", "layers", "models", "ops", "parallel")  # whose code may be in a graph
MAX_STEPS = 1024  # sizes of steps that may be traced
Step = Callable[..., Tensor]
Compile = Callable[[Step, Path | None], Step]


class TracedSegment(AttentionMetadata):
    """A step's requests for tracing: lengths as tensors."""

    def __init__(self, tokens: int, lists: SegmentTensors):
        self.tokens = tokens
        self.scratch = lists

    def __bool__(self) -> bool:
        return True


class TracedBatch(ForwardBatch):
    """A decode-only step; nothing in it is computed lazily or cached."""

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
        self.recorder = None
        self.parts = ()

    @property
    def segments(self) -> list[tuple[AttentionMetadata, slice]]:
        assert self.decode is not None
        return [(self.decode, slice(0, self.num_tokens))]


class DecodeStep(torch.nn.Module):
    """A module, because torchair keeps compiled code only of module methods. width: query tokens a
    request."""

    def __init__(self, model: Transformer, pool: KVPool, layout: Layout, width: int):
        super().__init__()
        self.model = model
        self.pool = pool
        self.layout = layout
        self.width = width

    def forward(
        self,
        ids: Tensor,
        slots: Tensor,
        cos: Tensor,
        sin: Tensor,
        tables: Tensor,
        queries: Tensor,
        lens: Tensor,
    ) -> Tensor:
        lists = SegmentTensors(tables, queries, lens, self.width == 1)
        segment = TracedSegment(ids.shape[0], lists)
        step = TracedBatch(ids, TokenPlaces(cos, sin, slots), self.pool, segment, self.layout)
        ops: Any = self.model.ops
        with ops.decoder_scope():
            state = self.model.embedded(step)
            for _ in forward_layers(self.model.layers, state, step):
                pass  # a hand-over: there is no other micro-batch
        return self.model.leave(state, step, None)


class NpuCompiledForward:
    """The NPU's counterpart of CompiledForward. `compile_with` compiles a step, by default with
    torchair. folder: where graphs are kept, None to keep none."""

    fixed_shapes = True

    def __init__(
        self,
        model: Transformer,
        pool: KVPool,
        folder: Path | None,
        compile_with: Compile | None = None,
    ):
        self.model = model
        self.pool = pool
        self.folder = folder
        load_torchair()
        self.compile_with = compile_with or torchair_step
        self.steps: dict[tuple[Any, ...], Step] = {}
        self.stats = CompileStats()

    def compile(self, examples: Iterable[ForwardBatch]) -> None:
        """Does nothing: a size is compiled at its first step, which the warm-up of all batch sizes
        runs before serving."""

    def __call__(self, step: ForwardBatch) -> Tensor:
        assert step.decode is not None
        assert step.prefill is None
        segment = step.decode
        width = segment.query_lens[0]
        tokens = getattr(step.layout, "tokens", ())
        key = (len(segment), width, segment.tables.shape[1], tokens)
        new = key not in self.steps
        if new:
            self.steps[key] = self._made(key, step, width)
        queries = torch.arange(width, step.num_tokens + 1, width, device=segment.kv_lens.device)
        places = step.places
        tables = segment.tables.to(torch.int32)
        # Traced at its first call. All sizes count against one limit of dynamo, by default 8.
        limit = {"recompile_limit": MAX_STEPS, "accumulated_recompile_limit": MAX_STEPS}
        with torch._dynamo.config.patch(limit) if new else nullcontext():
            return self.steps[key](
                step.token_ids,
                places.slots,
                places.cos,
                places.sin,
                tables,
                queries,
                segment.kv_lens,
            )

    def _made(self, key: tuple[Any, ...], step: ForwardBatch, width: int) -> Step:
        start = time.perf_counter()
        ops = self.model.ops
        assert isinstance(ops, NpuOps)
        ops.mask(step.token_ids.device)  # created now: the graph refers to it
        module = DecodeStep(self.model, self.pool, step.layout, width)
        name = "-".join(map(str, (*key[:3], *key[3])))
        made = self.compile_with(module.forward, self.folder and self.folder / f"decode-{name}")
        self.stats.variants += 1
        self.stats.seconds += time.perf_counter() - start
        return made


def load_torchair() -> Any:
    """The torchair package, checked for the attention variant that takes lengths as tensors. Raises
    ConfigError."""
    try:
        import torchair

        importlib.import_module("torchair.ops._npu_fused_infer_attention_score_v2")
    except ImportError as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"exe_mode='compile' on an NPU needs torchair, which torch_npu brings ({first}); "
            "accepted: eager, graph"
        ) from None
    return torchair


def torchair_step(method: Step, folder: Path | None) -> Step:
    """Compile with torchair in max-autotune mode; kept in `folder`, from which the next start loads
    it without tracing."""
    torchair = load_torchair()
    config = torchair.CompilerConfig()
    config.mode = "max-autotune"
    config.experimental_config.frozen_parameter = True
    config.experimental_config.tiling_schedule_optimize = True
    config.experimental_config.topology_sorting_strategy = "StableRDFS"
    if folder is None:
        backend = torchair.get_npu_backend(compiler_config=config)
        return torch.compile(method, dynamic=False, fullgraph=True, backend=backend)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return torchair.inference.cache_compile(
        method, config=config, dynamic=False, cache_dir=str(folder), ge_cache=True
    )


def code_digest() -> str:
    """Digest of this package's sources: torchair identifies kept code by module name alone."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for part in TRACED:
        for path in sorted((root / part).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def graph_folder(config: EngineConfig, model: Transformer, pages: int, device: str) -> Path | None:
    """The folder for this configuration and rank, below the cache folder; None where nothing is
    kept."""
    if not config.enable_cache_compile:
        return None
    given = {
        "config": {**asdict(config), "case_name": None},
        "model": dict(model.config.raw),
        "rank": model.mesh.rank,
        "pages": pages,
        "device": device,
        "torch": torch.__version__,
        "torch_npu": importlib.metadata.version("torch_npu"),
        "code": code_digest(),
    }
    digest = hashlib.sha256(repr(sorted(given.items())).encode()).hexdigest()[:16]
    case = config.case_name or "decode"
    return cache_folder() / "npu-graphs" / case / f"{digest}-rank{model.mesh.rank}"
