"""The first thing to run on an Ascend NPU: `python -m rorqual.bench.npu_first_light`.

The NPU backend was written against torch_npu's schemas and documentation, and has not met the
hardware. This compares its entries, at the widths of DeepSeek-V3 and Qwen3-30B, with their
definitions in plain torch on the CPU, times them, and prints a table and a report to send back. An
entry that fails is reported, with the operator's own words, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import platform as host
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from rorqual.config.model import MLAConfig, MoEConfig
from rorqual.errors import ConfigError
from rorqual.ops.activation import hidden_of
from rorqual.ops.interface import (
    AttentionMetadata,
    GQAWeights,
    MLAWeights,
    Ops,
    SplitLatent,
    TokenPlaces,
)
from rorqual.ops.reference import ExpertWeights, RouterWeights, Weight
from rorqual.ops.select import ops_for
from rorqual.platforms import make_platform
from rorqual.platforms.base import Platform

HIDDEN = 7168
PAGE = 128
MAX_ROWS = 512
MLA = MLAConfig(
    num_heads=16,
    q_lora_rank=1536,
    kv_lora_rank=512,
    nope_dim=128,
    rope_dim=64,
    v_dim=128,
)
MOE = MoEConfig(
    num_experts=256,
    top_k=8,
    intermediate_size=256,
    scoring="sigmoid",
    method="noaux_tc",
    n_group=8,
    topk_group=4,
    norm_topk_prob=True,
    scaling=2.5,
)
CLOSE = 2e-2  # of the largest value: bf16, summed in another order
REPEATS = 20
Work = Callable[[Ops], Tensor]


@dataclass
class FirstLight:
    """One entry. error: largest deviation over the reference's largest value. milliseconds: median
    of single calls. failed: the operator's error message."""

    name: str
    error: float | None = None
    milliseconds: float | None = None
    failed: str | None = None

    @property
    def fine(self) -> bool:
        return self.failed is None and self.error is not None and self.error < CLOSE


class Inputs:
    """Seeded tensors, the same on the CPU and on `device`."""

    def __init__(self, device: torch.device):
        self.device = device
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator) * std
        return drawn.to(torch.bfloat16).to(self.device)

    def matrix(self, *shape: int) -> Weight:
        return Weight(self.normal(*shape, std=shape[-1] ** -0.5))

    def int8_matrix(self, *shape: int) -> Weight:
        drawn = torch.randint(-127, 128, shape, generator=self.generator, dtype=torch.int8)
        scale = torch.full((*shape[:-1], 1), (73 * shape[-1] ** 0.5) ** -1)
        return Weight(
            drawn.to(self.device),
            scale.to(self.device),
            (1, shape[-1]),
            activation="int8_token",
        )

    def places(self, slots: list[int]) -> TokenPlaces:
        angle = torch.rand(len(slots), MLA.rope_dim // 2, generator=self.generator) * 6
        return TokenPlaces(
            angle.cos().to(self.device),
            angle.sin().to(self.device),
            torch.tensor(slots, device=self.device),
        )


def _decode(given: Inputs, rows: int, length: int) -> tuple[AttentionMetadata, list[int], int]:
    """Requests of `length` cached tokens that bring one each; their slots, and all pages."""
    pages = -(-length // PAGE)
    tables = torch.arange(1, rows * pages + 1).view(rows, pages)
    slots = (tables[:, -1] * PAGE + (length - 1) % PAGE).tolist()
    lens = torch.full((rows,), length)
    segment = AttentionMetadata(
        tables.to(given.device), lens.to(given.device), (1,) * rows, (length,) * rows
    )
    return segment, slots, rows * pages + 1


def rows_cases(given: Inputs, rows: int) -> Iterator[tuple[str, Work]]:
    x = given.normal(rows, HIDDEN, std=3.0)  # far from norm 1: a norm that does nothing shows
    residual = given.normal(rows, HIDDEN, std=3.0)
    gamma = given.normal(HIDDEN)
    yield "norm", lambda ops: ops.norm(x, gamma, 1e-6)
    yield "add_norm", lambda ops: hidden_of(ops.add_norm(x, residual, gamma, 1e-6)[0])
    for kind, made in (("bf16", given.matrix), ("int8", given.int8_matrix)):
        weight = made(2048, HIDDEN)
        yield f"linear {kind}", _prepared(weight, lambda ops, w: ops.linear(x, w))
        up = made(4096, HIDDEN)
        down = made(HIDDEN, 2048)
        yield f"mlp {kind}", _prepared_pair(up, down, lambda ops, a, b: ops.mlp(x, a, b))


def expert_cases(given: Inputs, rows: int) -> Iterator[tuple[str, Work]]:
    x = given.normal(rows, HIDDEN)
    gate = given.normal(MOE.num_experts, HIDDEN, std=HIDDEN**-0.5).float()
    bias = torch.zeros(MOE.num_experts, device=given.device)
    router = RouterWeights(gate, bias, MOE)
    yield "router", lambda ops: ops.router(x, router)[1].sort(-1).values
    for kind, made in (("bf16", given.matrix), ("int8", given.int8_matrix)):
        up = made(MOE.num_experts, 2 * MOE.intermediate_size, HIDDEN)
        down = made(MOE.num_experts, HIDDEN, MOE.intermediate_size)
        yield (
            f"experts {kind}",
            _prepared_pair(
                up, down, lambda ops, a, b: ops.routed_experts(x, router, ExpertWeights(a, b))
            ),
        )


def attention_cases(given: Inputs, rows: int, length: int) -> Iterator[tuple[str, Work]]:
    yield f"mla_decode, {length} tokens", _mla(given, rows, length)
    segment, slots, pages = _decode(given, rows, length)
    heads, groups, width = 32, 4, 128
    planes = (given.normal(pages, PAGE, groups, width), given.normal(pages, PAGE, groups, width))
    qkv = given.normal(rows, heads + 2 * groups, width)
    norms = GQAWeights(given.normal(width), given.normal(width), 1e-6)
    angle = torch.rand(rows, width // 2, generator=given.generator) * 6
    places = TokenPlaces(
        angle.cos().to(given.device),
        angle.sin().to(given.device),
        torch.tensor(slots, device=given.device),
    )

    def gqa(ops: Ops) -> Tensor:
        k, v = (plane.clone() for plane in planes)
        q = ops.gqa_prologue(qkv, norms, replace(places), (k, v))
        return ops.attention(q, k, v, segment.part(slice(None)), width**-0.5)

    yield f"gqa, {length} tokens", gqa


def _mla(given: Inputs, rows: int, length: int) -> Work:
    segment, slots, pages = _decode(given, rows, length)
    places = given.places(slots)
    down = given.matrix(1536 + 576, HIDDEN)
    q_b = given.matrix(MLA.num_heads * MLA.qk_dim, 1536)
    kv_b = given.matrix(MLA.num_heads * (MLA.nope_dim + MLA.v_dim), MLA.kv_lora_rank)
    q_norm = given.normal(1536)
    kv_norm = given.normal(MLA.kv_lora_rank)
    x = given.normal(rows, HIDDEN)
    latent = given.normal(pages, PAGE, MLA.kv_lora_rank)
    # rotated keys have the operators' layout, so older entries cannot be reused
    rope = torch.zeros(pages, PAGE, MLA.rope_dim, dtype=torch.bfloat16, device=given.device)

    def run(ops: Ops) -> Tensor:
        weights = MLAWeights(
            MLA,
            replace(down),
            None,
            q_norm,
            replace(q_b),
            kv_norm,
            replace(kv_b),
            1e-6,
            interleaved=True,
        )
        ops.prepare_mla(weights, HIDDEN)
        plane = SplitLatent(latent.clone(), rope.clone())
        own = segment.part(slice(None))
        scale = MLA.qk_dim**-0.5
        return hidden_of(ops.mla_decode(x, weights, replace(places), plane, own, scale))

    return run


def _prepared(weight: Weight, work: Callable[[Ops, Weight], Tensor]) -> Work:
    """With the weight as the backend wants it; the definition's stays as it was."""

    def run(ops: Ops) -> Tensor:
        own = replace(weight)
        ops.prepare_weight(own, "first light")
        return work(ops, own)

    return run


def _prepared_pair(
    first: Weight, second: Weight, work: Callable[[Ops, Weight, Weight], Tensor]
) -> Work:
    def run(ops: Ops) -> Tensor:
        pair = (replace(first), replace(second))
        for own in pair:
            ops.prepare_weight(own, "first light")
        return work(ops, *pair)

    return run


def cases(given: Inputs, rows: int, length: int) -> Iterator[tuple[str, Work]]:
    yield from rows_cases(given, rows)
    yield from expert_cases(given, rows)
    yield from attention_cases(given, rows, length)


def measure(platform: Platform, name: str, work: Work, want: Tensor) -> FirstLight:
    ops = ops_for(platform.name)
    found = FirstLight(name)
    try:
        out = work(ops).float().cpu()
        found.error = float((out - want).abs().max() / want.abs().max().clamp_min(1e-6))
        times = []
        for _ in range(REPEATS):
            platform.synchronize()
            start = time.perf_counter()
            work(ops)
            platform.synchronize()
            times.append(time.perf_counter() - start)
        found.milliseconds = 1000 * statistics.median(times)
    except Exception as error:  # an operator's refusal is what this is for
        found.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return found


def first_light(platform: Platform, rows: int, length: int) -> list[FirstLight]:
    """All cases. The definitions run on the CPU, on tensors drawn from the same seed."""
    on_host = cases(Inputs(torch.device("cpu")), rows, length)
    on_device = cases(Inputs(platform.device), rows, length)
    results = []
    with torch.inference_mode(), platform.stream():
        for (name, plain), (_, work) in zip(on_host, on_device, strict=True):
            want = plain(Ops()).float()
            results.append(measure(platform, name, work, want))
    return results


def report(platform: Platform, results: list[FirstLight], rows: int, length: int) -> str:
    """What to send back."""
    versions = {"torch": torch.__version__, "python": host.python_version()}
    try:
        import torch_npu

        versions["torch_npu"] = torch_npu.__version__
    except ImportError:
        pass
    return json.dumps(
        {
            "device": platform.describe(),
            "versions": versions,
            "rows": rows,
            "length": length,
            "results": [asdict(found) for found in results],
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="npu")
    parser.add_argument("--rows", type=int, default=16, help=f"1 to {MAX_ROWS}")
    parser.add_argument("--length", type=int, default=1024, help="cached tokens of a request")
    given = parser.parse_args()
    if not (1 <= given.rows <= MAX_ROWS and 1 <= given.length <= 65_536):
        parser.error(f"--rows 1 to {MAX_ROWS}, --length 1 to 65536")
    try:
        platform = make_platform(given.device)
    except ConfigError as error:
        parser.exit(1, f"{error}\n")
    results = first_light(platform, given.rows, given.length)
    for found in results:
        said = found.failed or f"error {found.error:.1e}  {found.milliseconds:9.3f} ms"
        print(f"{'ok  ' if found.fine else 'BAD '} {found.name:24} {said}")
    print("send back:", report(platform, results, given.rows, given.length))
    return 0 if all(found.fine for found in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
