"""One start of a process that compiles a small decode step through torchair, on stubs of CANN.

    STUB_DEVICES=1 python -m tests.npu.graph_worker ge_graph CACHE '[[5, 7], [6, 8]]' static

Prints what was handed over, built and run as one line of JSON: tests/npu/test_graph_modes.py reads
it. Tensors stay on the CPU, and the operators are small ones of this file: what is looked at is the
graph, and the KV lengths that attention is called with. With `device`, tensors are the stubs'
device's, and the operators torch_npu's own up to their kernels.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch_npu  # noqa: F401  (registers its operators)
import torchair

REQUESTS = 2
HEADS = 4
HEAD = 128
PAGE = 128
WIDTH = 64

npu = torch.ops.npu
Lengths = Sequence[int]
lengths_seen: list[list[int]] = []


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> Any:
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale * gamma.float()).to(x.dtype), scale


def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def attention_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
    lengths_seen.append(list(given["actual_seq_lengths_kv"]))
    return given["out"][0], given["out"][1]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
    return attention_out(q, k, v, out=[torch.empty_like(q), torch.empty(0)], **given)


def install() -> list[torch.library.Library]:
    name = "npu_fused_infer_attention_score"
    # A replay's update calls attention on tensors that torchair rebuilds, as the device's.
    device = torch.library.Library("npu", "IMPL", "PrivateUse1")
    device.impl(f"{name}.out", attention_out, allow_override=True)
    # It also copies each call's inputs into such tensors; here they are the same every time.
    copies = torch.library.Library("aten", "IMPL", "PrivateUse1")
    copies.impl("_foreach_copy_", lambda to, given, non_blocking=False: None, allow_override=True)
    library = torch.library.Library("npu", "IMPL", "CPU")
    library.impl("npu_rms_norm", rms_norm)
    library.impl("npu_swiglu", swiglu)
    library.impl(name, attention)
    library.impl(f"{name}.out", attention_out)
    library.impl(f"_{name}_get_max_workspace", lambda q, k, v, **given: torch.empty(1))
    library.impl(
        f"_{name}_infer_output", lambda q, v, **given: (torch.empty_like(q), torch.empty(0))
    )
    return [library, device, copies]


class Decode(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, 2 * WIDTH, dtype=torch.bfloat16))

    def step(
        self, x: Any, q: Any, kv: Any, table: Any, kv_lengths: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, _ = npu.npu_rms_norm(x, self.gamma, 1e-6)
        hidden = npu.npu_swiglu(normed @ self.weight)
        attended, _ = npu.npu_fused_infer_attention_score(
            q,
            kv,
            kv,
            actual_seq_lengths_kv=kv_lengths,
            block_table=table,
            num_heads=HEADS,
            num_key_value_heads=1,
            scale=HEAD**-0.5,
            input_layout="BNSD",
            block_size=PAGE,
        )
        return hidden, attended


class ScopedDecode(Decode):
    """All of the step in one SuperKernel scope, its MLP on a second stream."""

    def step(
        self, x: Any, q: Any, kv: Any, table: Any, kv_lengths: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torchair.scope.super_kernel("decode", "stream-fusion=1"):
            normed, _ = npu.npu_rms_norm(x, self.gamma, 1e-6)
            with torchair.scope.npu_stream_switch("shared", 3):
                shared = npu.npu_swiglu(normed @ self.weight)
            hidden = npu.npu_swiglu(x @ self.weight)
            hidden = torchair.scope.npu_wait_tensor(hidden, shared)
            return hidden + shared, q


class Watch:
    """Keeps what the compiler of `package` was given and what it made of it."""

    def __init__(self, package: str):
        self.nodes: list[list[str]] = []
        self.engine: list[list[list[Any]]] = []
        self.runs = 0
        compiler = importlib.import_module(f"{package}.npu_fx_compiler")._NpuFxCompiler
        inner = compiler._gen_compiled_gm

        def generate(this: Any, module: torch.fx.GraphModule, *rest: Any) -> Any:
            made = inner(this, module, *rest)
            calls = [node for node in module.graph.nodes if node.op == "call_function"]
            self.nodes.append([str(node.target) for node in calls if "getitem" not in node.name])
            if hasattr(made, "graph") and hasattr(made.graph, "op"):
                self.engine.append([[op.type, self.marks(op)] for op in made.graph.op])
            return made

        compiler._gen_compiled_gm = generate

    @staticmethod
    def marks(op: Any) -> dict[str, str]:
        marked = ("_super_kernel_scope", "_user_stream_label")
        return {key: value.s.decode() for key, value in op.attr.items() if key in marked}

    def engine_runs(self, outputs: Callable[[], list[torch.Tensor]]) -> None:
        """The engine's session compiles nothing: its last step is answered here."""

        def run(graph: Any, inputs: Any, assigned: Any = (), stream: Any = None) -> Any:
            self.runs += 1
            lengths_seen.extend(i.tolist() for i in inputs if i.dtype == torch.int64)
            return outputs()

        importlib.import_module("torchair.core._backend").TorchNpuGraph.run = run


def compiled_step(mode: str, step: Any, cache: str, dynamic: bool) -> tuple[str, Any]:
    """The package whose compiler takes part, and the step to call."""
    if mode == "npugraph_ex":
        compile_ = torch.npu.npugraph_ex.inference.cache_compile
        return "npugraph_ex", compile_(step, cache_dir=cache, dynamic=dynamic)
    config = torchair.CompilerConfig()
    config.mode = {"ge_graph": "max-autotune", "acl_graph": "reduce-overhead"}[mode]
    step = torchair.inference.cache_compile(
        step, config=config, cache_dir=cache, dynamic=dynamic, ge_cache=mode == "ge_graph"
    )
    return "torchair", step


def canonical(line: str) -> str:
    """The engine's graph is kept as a protobuf, whose maps are written in any order."""
    if not line.startswith("serialized_graph = "):
        return line
    model = importlib.import_module("torchair._ge_concrete_graph.ge_ir_pb2").ModelDef()
    model.ParseFromString(ast.literal_eval(line.partition(" = ")[2]))
    return repr(model.SerializeToString(deterministic=True))


def kept(package: str, cache: str) -> dict[str, str]:
    """Digest of the code in each compiled step below the cache folder, which the code names."""
    loader = importlib.import_module(f"{package}.inference._cache_compiler").CompiledModel
    files = sorted(Path(cache).rglob("compiled_module"))
    digests = {}
    for path in files:
        code = loader.load(str(path)).compiled_fx.py_code.replace(str(Path(cache).resolve()), "")
        code = "\n".join(map(canonical, code.splitlines()))
        digests[str(path.relative_to(cache))] = hashlib.sha256(code.encode()).hexdigest()
    return digests


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(REQUESTS, WIDTH, dtype=torch.bfloat16)
    q = torch.randn(REQUESTS, HEADS, 1, HEAD, dtype=torch.bfloat16)
    kv = torch.randn(8, 1, PAGE, HEAD, dtype=torch.bfloat16)
    return x, q, kv, torch.zeros(REQUESTS, 4, dtype=torch.int32)


def captured(calls: list[list[int]]) -> dict[str, Any]:
    """The step captured without torchair: torch_npu itself puts new lengths into each replay."""
    model = Decode()
    given = tensors()
    graph = torch.npu.NPUGraph()
    with torch.no_grad(), torch.npu.graph(graph, auto_dispatch_capture=True):
        model.step(*given, calls[0])
    for lengths in calls[1:]:
        graph.replay()
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
    records = graph.graph_dispatch_mode.graph_dispatch_records
    return {"lengths": lengths_seen, "recorded": [r.op_cache_entry.__name__ for r in records]}


def main(mode: str, cache: str, calls: list[list[int]], kind: str = "dynamic") -> dict[str, Any]:
    torch.manual_seed(0)
    if mode == "captured":
        return captured(calls)
    model = ScopedDecode() if kind == "scopes" else Decode()
    x, q, kv, table = tensors()
    if kind == "device":
        model.to("npu")
        x, q, kv, table = (tensor.to("npu") for tensor in (x, q, kv, table))
    for fixed in (x, q, kv, table):
        torch._dynamo.mark_static(fixed)
    package, step = compiled_step(mode, model.step, cache, dynamic=kind in ("dynamic", "device"))
    watch = Watch(package)
    watch.engine_runs(lambda: [torch.empty_like(x), torch.empty_like(q)])
    with torch.no_grad():
        for lengths in calls:
            hidden, attended = step(x, q, kv, table, lengths)
            assert (hidden.shape, attended.shape) == (x.shape, q.shape)
    return {
        "nodes": watch.nodes,
        "engine": watch.engine,
        "runs": watch.runs,
        "lengths": lengths_seen,
        "traced": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "kept": kept(package, cache),
    }


if __name__ == "__main__":
    libraries = install() if sys.argv[4:] != ["device"] else None
    with contextlib.redirect_stdout(sys.stderr):
        result = main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), *sys.argv[4:])
    print(json.dumps(result))
