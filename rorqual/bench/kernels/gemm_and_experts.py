"""Cases of rorqual.bench.kernels.run: experts, fp8 products, norms and cache epilogues.

A time is the median over replays of one CUDA graph that calls the kernel over rotated data (more
than 200 MB in all, random, experts drawn uniformly), so nothing is found in L2. floor: the bytes
that must be read and written for these draws / 4.3 TB/s, or operations / 735 (bf16) or 1341 (fp8)
TFLOP/s, whichever is longer. error: 1 - 2 sum(xy) / sum(x^2 + y^2) against fp64 on some tokens,
with fp8 activations rounded as the kernel rounds them; a NaN left by an unwritten output shows.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rorqual.bench.kernels import vllm_kernels as peers
from rorqual.config.quant import quantization_named
from rorqual.ops import reference
from rorqual.ops.activation import Quantized, hidden_of
from rorqual.ops.interface import GQAWeights, TokenPlaces
from rorqual.ops.reference import FP8, ExpertWeights, Weight
from rorqual.ops.triton.attention import rope_kv_write
from rorqual.ops.triton.gemm import fp8_gemm, gemv, int4_gemm
from rorqual.ops.triton.moe import grouped_gemm as ex
from rorqual.ops.triton.rowwise import norm
from rorqual.ops.triton.rowwise.quantize import quantize, quantized
from rorqual.ops.triton.runtime.precompile import compiling

BANDWIDTH = 4.3e12
# int4 is multiplied in bf16; int8's rate was not measured and is taken to be fp8's
RATES = {"bf16": 735e12, "fp8": 1341e12, "int4": 735e12, "int8": 1341e12}
WIDTHS = {"bf16": 2, "fp8": 1, "int4": 0.5 + 2 / 128}  # bytes of a weight; groups of 128
ROTATE = 260e6
CHECKED = 6  # tokens computed anew
Call = Callable[[], Any]


@dataclass
class KernelSetup:
    """Calls over rotated data; how far the first one's output is from the truth; bytes and
    operations of a call. peers: by name, what makes another library's call over the same data,
    whose first output `judge` looks at."""

    calls: list[Call]
    error: Callable[[], float]
    bytes: float = 0
    flops: float = 0
    peers: Mapping[str, Callable[[], peers.Call]] = field(default_factory=dict)
    judge: Callable[[Tensor], float] | None = None


@dataclass
class KernelCase:
    """One line of the table. peer: microseconds of the best peer on this GPU
    (anchors/README.md)."""

    name: str
    kind: str
    setup: Callable[[torch.device], KernelSetup]
    peer: float | None = None


def difference(got: Tensor, expected: Tensor) -> float:
    x = got.double()
    y = expected.double()
    return (1 - 2 * (x * y).sum() / (x * x + y * y).sum()).item()


# --- timing ---


def graph_of(calls: list[Call], repeat: int) -> torch.cuda.CUDAGraph:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for call in calls:
                call()
    return graph


def median_us(calls: list[Call], replays: int = 15) -> float:
    """Microseconds a call."""
    repeat = max(1, 16 // len(calls))
    graph = graph_of(calls, repeat)
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    del graph
    return times[replays // 2] * 1e3 / (repeat * len(calls))


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fresh storage holds NaN."""
    plain = torch.empty

    def empty(*shape: Any, **options: Any) -> Tensor:
        made = plain(*shape, **options)
        return made.fill_(float("nan")) if made.is_floating_point() and made.dtype != FP8 else made

    with mock.patch.object(torch, "empty", empty):
        yield


# --- experts ---


@dataclass(frozen=True)
class ExpertShape:
    """`slots` experts of hidden x inner, top_k per token; the last `shared` of both are fused
    shared experts."""

    kind: str
    slots: int
    hidden: int
    inner: int
    top_k: int
    shared: int = 0

    @property
    def routed(self) -> int:
        return self.slots - self.shared

    def routed_picks(self, tokens: int) -> int:
        """What configurations are chosen by."""
        return tokens * (1 if self is V3_RANK else self.top_k - self.shared)


QWEN3_30B = ExpertShape("bf16", 128, 2048, 768, 8)
# one of 8 ranks, one local expert per token
V3_SHARE = ExpertShape("fp8", 32, 7168, 2048, 1)
# the same with 8 experts per token, 7/8 of them on other ranks
V3_RANK = ExpertShape("fp8", 32, 7168, 2048, 8)
V2_LITE = ExpertShape("bf16", 64, 2048, 1408, 6)
QWEN3_235B_TP8 = ExpertShape("bf16", 128, 4096, 192, 8)  # a rank's columns of every expert
QWEN3_30B_INT4 = replace(QWEN3_30B, kind="int4")
V2_LITE_INT4 = replace(V2_LITE, kind="int4")
EXPERTS: list[tuple[ExpertShape, str, dict[int, float | None]]] = [
    (
        QWEN3_30B,
        "experts bf16",
        {
            1: 30.7,
            2: None,
            4: 75.6,
            8: 128.6,
            64: 297.9,
            256: 323.7,
            1024: 382.2,
            4096: 859.8,
            16384: 2878.9,
        },
    ),
    (V2_LITE, "experts bf16 V2-Lite", {1: None, 8: None, 64: None, 256: None}),
    (
        V3_SHARE,
        "experts fp8",
        {1: 46.7, 8: 89.5, 32: 243.5, 128: 362.8, 512: 401.7, 2048: 598.0, 8192: 1578.3},
    ),
    (QWEN3_30B_INT4, "experts int4", {1: None, 8: None, 64: None, 256: None, 1024: None}),
    (V2_LITE_INT4, "experts int4 V2-Lite", {1: None, 8: None, 64: None, 256: None}),
    (V3_RANK, "experts fp8 rank", {64: None, 1024: None}),
    (QWEN3_235B_TP8, "experts bf16 Qwen3-235B tp8", {1: None, 64: None}),
]
W4A16 = quantization_named("w4a16").schemes[0]
_weights: dict[ExpertShape, ExpertWeights] = {}


def random_weight(kind: str, device: torch.device, *shape: int) -> Weight:
    """Rows of about unit norm. int4: groups of 128 columns, or of 64 where 128 do not divide
    them."""
    if kind == "int4":
        group = W4A16.fitted(shape[-1]).block[1]
        groups = (*shape[:-1], shape[-1] // group)
        scale = (torch.rand(groups, device=device) + 0.5) * 0.2 * shape[-1] ** -0.5
        halved = (*shape[:-1], shape[-1] // 2)
        data = torch.randint(0, 256, halved, dtype=torch.uint8, device=device)
        return Weight(data, scale.bfloat16(), (1, group), activation="wide")
    data = torch.empty(shape, dtype=torch.bfloat16, device=device)
    for part in data.view(-1, *shape[-2:]):
        part.normal_(std=shape[-1] ** -0.5)
    if kind == "bf16":
        return Weight(data)
    scale = (
        torch.rand(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128), device=device) * 0.01
        + 0.005
    )
    return Weight((data * 100).to(FP8), scale)


def expert_weights(shape: ExpertShape, device: torch.device) -> ExpertWeights:
    key = replace(shape, top_k=0)
    if key not in _weights:
        _weights.clear()  # one set at a time
        _weights[key] = ExpertWeights(
            random_weight(shape.kind, device, shape.slots, 2 * shape.inner, shape.hidden),
            random_weight(shape.kind, device, shape.slots, shape.hidden, shape.inner),
            shape.shared,
        )
    return replace(_weights[key], local_fraction=1 / 8 if shape is V3_RANK else 1)


Draw = tuple[Tensor, Tensor, Tensor]


def draws(shape: ExpertShape, tokens: int, device: torch.device) -> list[Draw]:
    """(x, ids, weights) for each call: enough calls that their experts do not fit L2."""
    share = shape is V3_RANK
    slots = shape.slots * 8 if share else shape.routed
    out = []
    for _ in range(8 if tokens <= 16 else 2):
        ids = torch.rand(tokens, slots, device=device).topk(shape.top_k - shape.shared).indices
        if share:
            ids[ids >= shape.slots] = -1
        x = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16)
        picked = reference.with_shared(
            ids, torch.rand(ids.shape, device=device), slots, shape.shared
        )
        out.append((x, *picked))
    return out


def expert_cost(shape: ExpertShape, picked: list[Draw]) -> tuple[float, float]:
    """(bytes, flops) a call, on average: the experts in use, read once, activations in and out."""
    active = sum(ids[ids >= 0].unique().numel() for _, ids, _ in picked) / len(picked)
    present = sum(int((ids >= 0).sum()) for _, ids, _ in picked) / len(picked)
    matrices = 3 * shape.hidden * shape.inner
    return active * matrices * WIDTHS[shape.kind] + picked[0][0].numel() * 4, 2 * present * matrices


def expert_truth(draw: Draw, rows: Tensor, w: ExpertWeights) -> Tensor:
    """fp64, activations rounded to fp8 where the kernel rounds them."""
    x, ids, weights = draw
    rounded = reference.rounded_to_fp8 if w.gate_up.fp8_blocks else (lambda t: t)
    total = torch.zeros(len(rows), x.shape[1], dtype=torch.float64, device=x.device)
    for slot in ids[rows].unique().tolist():
        if slot < 0:
            continue
        at, pick = (ids[rows] == slot).nonzero(as_tuple=True)
        up = reference.dequantize(w.gate_up[slot], torch.float64)
        gate, value = (rounded(x[rows][at]).double() @ up.t()).chunk(2, -1)
        h = rounded(
            (torch.nn.functional.silu(gate) * value)
            .float()
            .to(torch.float32 if w.gate_up.fp8_blocks else x.dtype)
        ).double()
        out = h @ reference.dequantize(w.down[slot], torch.float64).t()
        total.index_add_(0, at, out * weights[rows][at, pick, None])
    return total


def expert_setup(shape: ExpertShape, tokens: int, device: torch.device) -> KernelSetup:
    w = expert_weights(shape, device)
    picked = draws(shape, tokens, device)

    def call(draw: Draw) -> Tensor:
        return ex.experts(*draw, w)

    def judge(out: Tensor) -> float:
        rows = torch.randperm(tokens, device=device)[:CHECKED]
        assert not out.isnan().any(), "output left unwritten"
        return difference(out[rows], expert_truth(picked[0], rows, w))

    calls: list[Call] = [partial(call, draw) for draw in picked]
    size, flops = expert_cost(shape, picked)
    others = (
        {}
        if shape is V3_RANK or shape.shared or shape.kind == "int4"
        else {"vLLM": partial(peers.fused_experts, picked, w)}
    )
    return KernelSetup(calls, lambda: judge(call(picked[0])), size, flops, others, judge)


# --- fp8 products ---

LINEARS: dict[tuple[int, int], dict[int, float | None]] = {
    (2112, 7168): {
        1: 16.4,
        8: None,
        16: None,
        32: None,
        64: 13.1,
        128: 14.4,
        256: None,
        512: None,
        4096: 97.3,
    },
    (24576, 1536): {
        1: 20.2,
        8: None,
        16: None,
        32: None,
        64: 19.8,
        128: 20.7,
        256: None,
        512: None,
        4096: 248.4,
    },
    (7168, 16384): {
        1: 45.1,
        8: None,
        16: None,
        32: None,
        64: 42.7,
        128: 46.5,
        256: None,
        512: None,
        4096: 644.5,
    },
    (4096, 7168): {
        1: 19.2,
        8: None,
        16: None,
        32: None,
        64: 16.6,
        128: 17.5,
        256: None,
        512: None,
        4096: 176.4,
    },
    (7168, 2048): {
        1: 11.5,
        8: None,
        16: None,
        32: None,
        64: 11.5,
        128: 12.0,
        256: None,
        512: None,
        4096: 94.7,
    },
    # what V3 has besides with tp 8: queries, and the dense layers
    (3072, 1536): {1: None, 64: None},
    (4608, 7168): {1: None, 64: None},
    (7168, 2304): {1: None, 64: None},
}


def linear_data(
    rows: int, columns: int, tokens: int, device: torch.device
) -> tuple[list[Weight], Tensor, Quantized]:
    first = random_weight("fp8", device, rows, columns)
    copies = min(32, max(2, int(-(-ROTATE // (rows * columns)))))
    x = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
    return (
        [first, *(Weight(first.data.clone(), first.scale) for _ in range(copies - 1))],
        x,
        quantize(x),
    )


def linear_setup(rows: int, columns: int, tokens: int, device: torch.device) -> KernelSetup:
    """Only the GEMM, as DeepGEMM's figures: x is already quantized."""
    weights, x, packed = linear_data(rows, columns, tokens, device)

    def judge(out: Tensor) -> float:
        some = torch.randperm(tokens, device=device)[:64]
        truth = (
            reference.rounded_to_fp8(x[some]).double()
            @ reference.dequantize(weights[0], torch.float64).t()
        )
        assert not out.isnan().any(), "output left unwritten"
        return difference(out[some], truth)

    calls: list[Call] = [partial(fp8_gemm.linear, packed, w) for w in weights]
    size = rows * columns + tokens * columns + 2 * tokens * rows
    others = {"DeepGEMM": partial(peers.deep_gemm, x, weights)}
    return KernelSetup(
        calls, lambda: judge(calls[0]()), size, 2 * tokens * rows * columns, others, judge
    )


# --- int4 products ---

INT4_LINEARS = [(5120, 2048), (2048, 4096), (3648, 2048), (2048, 2816)]
# Qwen3-30B: qkv, out; V2-Lite: down, shared down
INT4_TOKENS = (1, 4, 16, 64, 256, 1024)


def int4_data(
    rows: int, columns: int, tokens: int, device: torch.device
) -> tuple[list[Weight], Tensor]:
    copies = min(64, max(2, int(-(-ROTATE // (rows * columns * WIDTHS["int4"])))))
    x = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
    return [random_weight("int4", device, rows, columns) for _ in range(copies)], x


def int4_setup(rows: int, columns: int, tokens: int, device: torch.device) -> KernelSetup:
    weights, x = int4_data(rows, columns, tokens, device)

    def error() -> float:
        truth = x.double() @ reference.dequantize(weights[0], torch.float64).t()
        return difference(int4_gemm.linear(x, weights[0]), truth)

    return KernelSetup(
        [partial(int4_gemm.linear, x, w) for w in weights],
        error,
        rows * columns * WIDTHS["int4"] + 2 * tokens * (rows + columns),
        2 * tokens * rows * columns,
    )


# --- bf16 products of a few tokens ---

SMALL = [(2048, 4096), (5120, 2048), (3648, 2048), (5632, 2048), (2048, 2816), (151936, 2048)]
# Qwen3-30B: out, qkv; V2-Lite: down, shared gate_up, shared down; Qwen3-30B: head


def small_data(
    rows: int, columns: int, tokens: int, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    copies = min(32, max(2, int(-(-ROTATE // (2 * rows * columns)))))
    x = torch.randn(tokens, columns, device=device, dtype=torch.bfloat16)
    return [random_weight("bf16", device, rows, columns).data for _ in range(copies)], x


def small_setup(
    rows: int, columns: int, tokens: int, library: bool, device: torch.device
) -> KernelSetup:
    """The kernel, or the library's product in the same place."""
    weights, x = small_data(rows, columns, tokens, device)
    product = torch.nn.functional.linear if library else gemv.linear

    def error() -> float:
        return difference(product(x, weights[0]), x.double() @ weights[0].double().t())

    return KernelSetup(
        [partial(product, x, w) for w in weights],
        error,
        2 * rows * columns,
        2 * tokens * rows * columns,
    )


def shared_setup(tokens: int, small: bool, device: torch.device) -> KernelSetup:
    """The shared experts of V2-Lite: two kernels, or the library's products around swiglu."""
    ups, x = small_data(5632, 2048, tokens, device)
    downs, _ = small_data(2048, 2816, tokens, device)

    def call(up: Tensor, down: Tensor) -> Tensor:
        if small:
            return gemv.linear(gemv.gate_up(x, up), down)
        return torch.nn.functional.linear(norm.swiglu(torch.nn.functional.linear(x, up)), down)

    def error() -> float:
        return difference(
            call(ups[0], downs[0]),
            reference.mlp(x.double(), Weight(ups[0].double()), Weight(downs[0].double())),
        )

    pairs = list(zip(ups, downs, strict=False))
    return KernelSetup(
        [partial(call, *pair) for pair in pairs],
        error,
        2 * 3 * 2816 * 2048,
        6 * tokens * 2816 * 2048,
    )


# --- small kernels ---


def rotated(size: float, build: Callable[[], Any], device: torch.device) -> list[Any]:
    return [build() for _ in range(min(64, max(2, int(-(-ROTATE // size)))))]


def norm_setup(tokens: int, quant: bool, device: torch.device) -> KernelSetup:
    weight = torch.rand(7168, device=device, dtype=torch.bfloat16) + 0.5
    sets = rotated(
        tokens * 7168 * 4,
        lambda: torch.randn(2, tokens, 7168, device=device, dtype=torch.bfloat16),
        device,
    )

    def call(pair: Tensor) -> Any:
        return norm.add_norm(pair[0], pair[1], weight, 1e-6, "fp8_group" if quant else None)

    def error() -> float:
        expected, _ = reference.add_norm(sets[0][0], sets[0][1], weight, 1e-6)
        out, _ = call(sets[0])
        return (
            difference(unpacked(quantized(out, False)), reference.rounded_to_fp8(expected))
            if quant
            else difference(hidden_of(out), expected)
        )

    return KernelSetup(
        [partial(call, pair) for pair in sets], error, tokens * 7168 * (9 if quant else 8)
    )


def unpacked(x: Quantized) -> Tensor:
    return x.data.double() * x.scale.double().repeat_interleave(128, 1)


def quantize_setup(tokens: int, device: torch.device) -> KernelSetup:
    sets = rotated(
        tokens * 7168 * 2,
        lambda: torch.randn(tokens, 7168, device=device, dtype=torch.bfloat16),
        device,
    )

    def error() -> float:
        return difference(unpacked(quantize(sets[0])), reference.rounded_to_fp8(sets[0]))

    return KernelSetup([partial(quantize, x) for x in sets], error, tokens * 7168 * 3)


def swiglu_setup(tokens: int, device: torch.device) -> KernelSetup:
    sets = rotated(
        tokens * 4096 * 2,
        lambda: torch.randn(tokens, 4096, device=device, dtype=torch.bfloat16),
        device,
    )

    def error() -> float:
        return difference(
            unpacked(norm.swiglu_fp8(sets[0])), reference.rounded_to_fp8(reference.swiglu(sets[0]))
        )

    return KernelSetup([partial(norm.swiglu_fp8, x) for x in sets], error, tokens * 4096 * 2.5)


def latent_setup(tokens: int, fp8: bool, device: torch.device) -> KernelSetup:
    """`fp8`: into an fp8 cache."""
    q_weight, kv_weight = (
        torch.rand(n, device=device, dtype=torch.bfloat16) + 0.5 for n in (1536, 512)
    )
    cos, sin = torch.randn(2, tokens, 32, device=device)
    pages = 2 + tokens // 64
    plane = torch.empty(pages, 64, 576, device=device, dtype=torch.bfloat16).fill_(float("nan"))
    plane = torch.full((pages, 64, 656), 255, device=device, dtype=torch.uint8) if fp8 else plane
    slots = torch.randperm(pages * 64, device=device)[:tokens]
    places = TokenPlaces(cos, sin, slots)
    sets = rotated(
        tokens * 2112 * 2,
        lambda: torch.randn(tokens, 2112, device=device, dtype=torch.bfloat16),
        device,
    )

    def call(x: Tensor) -> Any:
        return rope_kv_write.latent_epilogue(x, q_weight, kv_weight, places, plane, 1e-6, True)

    def error() -> float:
        got = call(sets[0])
        first, latent, key = sets[0].split((1536, 512, 64), -1)
        entry = torch.cat(
            (
                reference.norm(latent, kv_weight, 1e-6),
                reference.rope(key[:, None], cos, sin, True)[:, 0],
            ),
            -1,
        )
        rows = plane.flatten(0, 1)[slots]
        packed = reference.pack_latent(entry, 512)
        rows, entry = (
            (reference.unpack_latent(x, 512, got.dtype) for x in (rows, packed))
            if fp8
            else (rows, entry)
        )
        return difference(
            torch.cat((got, rows), 1), torch.cat((reference.norm(first, q_weight, 1e-6), entry), 1)
        )

    return KernelSetup(
        [partial(call, x) for x in sets],
        error,
        tokens * (2112 * 2 + 1536 * 2 + plane.shape[2] * plane.element_size()),
    )


def heads_setup(tokens: int, device: torch.device) -> KernelSetup:
    heads = 32
    groups = 4
    size = 128
    q_weight, k_weight = (
        torch.rand(size, device=device, dtype=torch.bfloat16) + 0.5 for _ in range(2)
    )
    cos, sin = torch.randn(2, tokens, size // 2, device=device)
    pages = 2 + tokens // 64
    planes = torch.empty(2, pages, 64, groups, size, device=device, dtype=torch.bfloat16).fill_(
        float("nan")
    )
    slots = torch.randperm(pages * 64, device=device)[:tokens]
    places = TokenPlaces(cos, sin, slots)
    sets = rotated(
        tokens * 5120 * 2,
        lambda: torch.randn(tokens, 5120, device=device, dtype=torch.bfloat16),
        device,
    )

    def call(x: Tensor) -> Tensor:
        return rope_kv_write.heads_epilogue(
            x, GQAWeights(q_weight, k_weight, 1e-6), places, (planes[0], planes[1])
        )

    def error() -> float:
        got = call(sets[0])
        q, k, v = sets[0].view(tokens, -1, size).split((heads, groups, groups), 1)
        q, k = (
            reference.rope(reference.norm(t, w, 1e-6), cos, sin, False)
            for t, w in ((q, q_weight), (k, k_weight))
        )
        written = [plane.flatten(0, 1)[slots] for plane in planes]
        return difference(torch.cat((got, *written), 1), torch.cat((q, k, v), 1))

    return KernelSetup([partial(call, x) for x in sets], error, tokens * 5120 * 4)


# --- the table ---


def cases() -> Iterator[KernelCase]:
    for shape, name, sizes in EXPERTS:
        for t, peer in sizes.items():
            yield KernelCase(f"{name} T{t}", shape.kind, partial(expert_setup, shape, t), peer)
    for (n, k), times in LINEARS.items():
        for m, peer in times.items():
            yield KernelCase(f"linear {n}x{k} M{m}", "fp8", partial(linear_setup, n, k, m), peer)
    for (n, k), m in itertools.product(INT4_LINEARS, INT4_TOKENS):
        yield KernelCase(f"linear int4 {n}x{k} M{m}", "int4", partial(int4_setup, n, k, m))
    for n, k in SMALL:
        for m in (1, 4):
            yield KernelCase(
                f"linear bf16 {n}x{k} M{m}", "bf16", partial(small_setup, n, k, m, False)
            )
            yield KernelCase(
                f"linear bf16 library {n}x{k} M{m}", "bf16", partial(small_setup, n, k, m, True)
            )
    for m in (1, 4):
        yield KernelCase(f"mlp bf16 V2-Lite shared T{m}", "bf16", partial(shared_setup, m, True))
        yield KernelCase(
            f"mlp bf16 library V2-Lite shared T{m}", "bf16", partial(shared_setup, m, False)
        )
    for t in (1, 128, 8192):
        yield KernelCase(f"quantize 7168 T{t}", "bf16", partial(quantize_setup, t))
        yield KernelCase(f"add_norm 7168 T{t}", "bf16", partial(norm_setup, t, False))
        yield KernelCase(f"add_norm+fp8 7168 T{t}", "bf16", partial(norm_setup, t, True))
        yield KernelCase(f"swiglu+fp8 2x2048 T{t}", "bf16", partial(swiglu_setup, t))
        yield KernelCase(f"latent epilogue T{t}", "bf16", partial(latent_setup, t, False))
        yield KernelCase(f"latent epilogue, fp8 cache T{t}", "bf16", partial(latent_setup, t, True))
        yield KernelCase(f"heads epilogue T{t}", "bf16", partial(heads_setup, t))


def measure_peers(setup: KernelSetup, check: bool) -> dict[str, Any]:
    """Over the same data, in the same way: see vllm_kernels.best."""

    def one(make: Callable[[], peers.Call]) -> tuple[float, float | None]:
        call = make()
        error = setup.judge(call(0).clone()) if check and setup.judge else None
        return median_us([partial(call, i) for i in range(len(setup.calls))]), error

    return peers.best(setup.peers, one)


def measure(
    case: KernelCase, device: torch.device, check: bool, peer: bool = False
) -> dict[str, Any]:
    setup = case.setup(device)
    us = median_us(setup.calls)
    row: dict[str, Any] = {
        "kernel": case.name,
        "us": us,
        "peer_us": case.peer,
        "floor_us": max(setup.bytes / BANDWIDTH, setup.flops / RATES[case.kind]) * 1e6,
        "gb_s": setup.bytes / us / 1e3,
        "tflop_s": setup.flops / us / 1e6,
    }
    if check:
        with poisoned():
            row["error"] = setup.error()
    if peer:
        row.update(measure_peers(setup, check))
    return row


def row(case: KernelCase, device: torch.device, check: bool, peer: bool = False) -> dict[str, Any]:
    try:
        return measure(case, device, check, peer)
    except Exception as failure:
        if "CUDA error" in str(failure):
            raise
        return {"kernel": case.name, "failed": " | ".join(reason(failure).splitlines()[:4])[:300]}


def precompile(chosen: list[KernelCase], device: torch.device) -> None:
    """Compile everything that the cases launch in parallel, before the single-threaded
    measurement."""
    with compiling():
        for case in chosen:
            with contextlib.suppress(Exception):
                case.setup(device).calls[0]()


def reason(failure: BaseException) -> str:
    while failure.__cause__ is not None:
        failure = failure.__cause__
    place = traceback.extract_tb(failure.__traceback__)[-1:]
    return f"{type(failure).__name__} {str(failure)[-250:]} {place[0].name if place else ''}"


def selected(only: str, among: Iterable[KernelCase] | None = None) -> list[KernelCase]:
    words = [word for word in only.split(",") if word]
    return [
        case
        for case in among or cases()
        if not words or any(word in case.name + "$" for word in words)
    ]
