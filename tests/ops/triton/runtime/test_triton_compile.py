"""Every kernel compiles for sm_80, 89, 90, 100 and 120 in the shapes of the real models, with no
GPU. Run as a script it prints what the compiler made of them: registers, spills, shared memory
and the instructions that matter."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.child_process import output_of_compiler

INSTRUCTIONS = (
    "wgmma.mma_async",
    "mma.sync",
    "tcgen05.mma",
    "cp.async.cg",
    "cp.async.bulk.tensor",
    "griddepcontrol.wait",
)

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]


def cases(capability: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(name, a call that launches kernels): tensors are never read."""
    import torch

    from rorqual.config.model import MoEConfig
    from rorqual.ops.activation import Quantized
    from rorqual.ops.deferred_sum import DeferredMoESum
    from rorqual.ops.interface import GQAWeights, TokenPlaces
    from rorqual.ops.padded_rows import PaddedRows
    from rorqual.ops.rank_rows import RankParts
    from rorqual.ops.reference import FP8, ExpertWeights, RouterWeights, Weight
    from rorqual.ops.triton.attention import latent_fp8, rope_kv_write
    from rorqual.ops.triton.comm import rank_rows
    from rorqual.ops.triton.gemm import fp8_gemm, gemv, int4_gemm, per_head_gemm, skinny_gemm
    from rorqual.ops.triton.gemm.linear_plan import PersistentPlan, StreamKPlan
    from rorqual.ops.triton.moe import align as picks_kernels
    from rorqual.ops.triton.moe import combine, expert_rows, grouped_gemm, router_gemm, topk
    from rorqual.ops.triton.quantized import experts as quantized_experts
    from rorqual.ops.triton.quantized import linear as quantized_linear
    from rorqual.ops.triton.rowwise import embedding, norm, quantize
    from rorqual.ops.triton.sampling import argmax, rng, sampling, spec_decode

    def x(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype)

    def fp8(*shape: int) -> Weight:
        return Weight(
            x(*shape, dtype=FP8),
            x(*shape[:-2], -(-shape[-2] // 128), shape[-1] // 128, dtype=torch.float32),
        )

    def int4(*shape: int, zero: bool = False, group: int = 128) -> Weight:
        places = (*shape[:-1], shape[-1] // group)
        return Weight(
            x(*shape[:-1], shape[-1] // 2, dtype=torch.uint8),
            x(*places),
            (1, group),
            x(*places, dtype=torch.uint8) if zero else None,
            "wide",
        )

    def picks(tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return x(tokens, top_k, dtype=torch.int64), x(tokens, top_k, dtype=torch.float32)

    def experts(
        make: Callable[..., Any], slots: int, hidden: int, inner: int, shared: int = 0
    ) -> ExpertWeights:
        gate_up, down = make(slots, 2 * inner, hidden), make(slots, hidden, inner)
        quantized = isinstance(down, Weight)
        return ExpertWeights(
            gate_up if quantized else Weight(gate_up), down if quantized else Weight(down), shared
        )

    # sm_80 has no fp8 products
    wide = torch.float32
    v3 = capability >= 89
    for tokens in (1, 64, 256, 1024, 4096):
        yield (
            f"bf16 T{tokens}",
            lambda t=tokens: grouped_gemm.experts(
                x(t, 2048), *picks(t, 8), experts(x, 128, 2048, 768)
            ),
        )
        if v3:
            yield (
                f"fp8 T{tokens}",
                lambda t=tokens: grouped_gemm.experts(
                    x(t, 7168), *picks(t, 1), experts(fp8, 32, 7168, 2048)
                ),
            )
            yield f"linear T{tokens}", lambda t=tokens: fp8_gemm.linear(x(t, 7168), fp8(2112, 7168))
    for plan in (
        (
            StreamKPlan(64, 128, 8, 6, split=64),
            PersistentPlan(256, 4),
        )
        if v3
        else ()
    ):
        yield (
            f"linear {plan}",
            lambda p=plan: fp8_gemm.linear(x(p.m, 7168), fp8(2112, 7168), plan=p),
        )
    if v3:
        yield (
            "fp8 one token",
            lambda: grouped_gemm.experts(x(1, 7168), *picks(1, 8), experts(fp8, 256, 7168, 2048)),
        )
        yield (
            "fp8 one token, joined",
            lambda: grouped_gemm.experts(
                x(1, 7168), *picks(1, 9), experts(fp8, 257, 7168, 2048, shared=1)
            ),
        )
    for tokens, zero in ((1, False), (64, True), (256, False), (1024, False), (4096, False)):
        four = partial(int4, zero=zero)
        yield (
            f"int4 T{tokens}",
            lambda t=tokens, f=four: grouped_gemm.experts(
                x(t, 2048), *picks(t, 8), experts(f, 128, 2048, 768)
            ),
        )
        yield (
            f"int4 linear T{tokens}",
            lambda t=tokens, f=four: int4_gemm.linear(x(t, 2048), f(5120, 2048)),
        )

    def lying(kind: str, activation: str, *shape: int) -> Weight:
        """As operands.supported wants them: int4 in groups, the others with a scale a row or, with
        rows scaled in groups, a block."""
        if kind == "int4":
            return replace(int4(*shape), activation=activation, turned=True)
        blocks = activation.endswith("group")
        places = (-(-shape[-2] // 128), shape[-1] // 128) if blocks else (shape[-2], 1)
        data = x(*shape, dtype=torch.int8 if kind == "int8" else FP8)
        scale = x(*shape[:-2], *places, dtype=torch.float32)
        return Weight(data, scale, (128, 128) if blocks else (1, shape[-1]), activation=activation)

    for kind, activation in (
        ("int4", "wide"),
        ("int4", "int8_token"),
        ("int8", "int8_token"),
        ("int8", "int8_group"),
        *((("int4", "fp8_token"), ("fp8", "fp8_token")) if v3 else ()),
    ):
        held = partial(lying, kind, activation)
        name = f"{kind} {activation}"
        # the few tokens of a step by experts, the many of a prompt by a linear layer
        yield (
            f"quantized experts {name}",
            lambda h=held: quantized_experts.experts(
                x(64, 2048), *picks(64, 8), experts(h, 128, 2048, 768)
            ),
        )
        yield (
            f"quantized experts of two tokens {name}",
            lambda h=held: quantized_experts.experts(
                x(2, 2048), *picks(2, 8), experts(h, 128, 2048, 768)
            ),
        )
        yield (
            f"quantized linear {name}",
            lambda h=held: quantized_linear.linear(x(1024, 2048), h(5120, 2048)),
        )
        yield (
            f"quantized experts of one token {name}",
            lambda h=held: quantized_experts.experts(
                x(1, 2048), *picks(1, 8), experts(h, 128, 2048, 768)
            ),
        )
        yield (
            f"quantized linear of one token {name}",
            lambda h=held: quantized_linear.linear(x(1, 2048), h(5120, 2048)),
        )
    for tokens in (1, 64):
        yield (
            f"bf16 T{tokens}, joined",
            lambda t=tokens: grouped_gemm.experts(
                x(t, 2048), *picks(t, 8), experts(x, 66, 2048, 1408, shared=2)
            ),
        )
    yield (
        "fp32",
        lambda: grouped_gemm.experts(
            x(9, 64, dtype=wide), *picks(9, 2), experts(partial(x, dtype=wide), 8, 64, 32)
        ),
    )
    moe = MoEConfig(
        256,
        8,
        2048,
        scoring="sigmoid",
        method="noaux_tc",
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
    )
    yield "route", lambda: topk.route(x(4, 256, dtype=wide), x(256, dtype=wide), moe, shared=1)
    for tokens, kind in itertools.product((9, 256), (wide, torch.bfloat16)):
        for rows, columns in ((64, 2048), (256, 7168)):
            yield (
                f"gate {rows} T{tokens} {kind}",
                lambda t=tokens, k=kind, r=rows, c=columns: topk.route(
                    router_gemm.partial_logits(x(t, c), x(r, c, dtype=k)),
                    x(r, dtype=wide),
                    replace(moe, num_experts=r),
                    kind=k,
                ),
            )
    yield (
        "router fp32",
        lambda: topk.router(
            x(1, 7168), RouterWeights(x(256, 7168, dtype=wide), x(256, dtype=wide), moe)
        ),
    )

    def sorting(tokens: int, each: int, slots: int) -> picks_kernels.ExpertBlocks:
        return picks_kernels.empty_blocks(
            tokens * each, slots, 16, torch.device("cpu"), buckets=True
        )

    yield (
        "route and sort",
        lambda: topk.route(
            x(64, 256, dtype=wide), x(256, dtype=wide), moe, shared=1, into=sorting(64, 9, 257)
        ),
    )
    yield (
        "router and sort",
        lambda: topk.router(
            x(8, 2048),
            RouterWeights(x(64, 2048, dtype=wide), None, MoEConfig(64, 6, 1408), 2),
            into=sorting(8, 8, 66),
        ),
    )

    def padded() -> PaddedRows:
        return PaddedRows(x(1, dtype=torch.int64), 2, 3)

    yield (
        "route and sort, padded",
        lambda: topk.route(
            x(64, 256, dtype=wide),
            x(256, dtype=wide),
            moe,
            shared=1,
            into=sorting(64, 9, 257),
            padded=padded(),
        ),
    )
    yield (
        "router, padded",
        lambda: topk.router(
            x(2, 2048),
            RouterWeights(x(128, 2048), None, MoEConfig(128, 8, 768, norm_topk_prob=True)),
            padded=padded(),
        ),
    )
    yield (
        "router bf16",
        lambda: topk.router(
            x(1, 2048),
            RouterWeights(x(128, 2048), None, MoEConfig(128, 8, 768, norm_topk_prob=True)),
        ),
    )
    yield (
        "norm and router",
        lambda: topk.router(
            norm.pending(x(1, 2048), x(1, 2048), x(2048), 1e-6),
            RouterWeights(x(128, 2048), None, MoEConfig(128, 8, 768, norm_topk_prob=True)),
        ),
    )
    for tokens in (1, 4, 8):
        yield f"small T{tokens}", lambda t=tokens: gemv.linear(x(t, 4096), x(2048, 4096))
        yield f"small gated T{tokens}", lambda t=tokens: gemv.gate_up(x(t, 2048), x(5632, 2048))
    for tokens in (5, 16):
        yield f"skinny T{tokens}", lambda t=tokens: skinny_gemm.linear(x(t, 4096), x(2048, 4096))
    up = x(16, 256, 512)
    for tokens in (1, 8):
        yield (
            f"absorb T{tokens}",
            lambda t=tokens: (
                per_head_gemm.heads_matmul(x(t, 16, 192)[..., :128], up[:, :128]),
                per_head_gemm.heads_matmul(x(t, 16, 512), up[:, 128:].transpose(1, 2)),
            ),
        )
    if v3:
        yield (
            "absorb fp8",
            lambda: per_head_gemm.joined_heads_dot(x(8, 16, 512), up[:, 128:].transpose(1, 2)),
        )
    index = x(9, dtype=torch.int64)
    for n in (0, 3):
        yield (
            f"rows of a step, {n} drafts",
            lambda n=n: spec_decode.decode_rows(
                index,
                index,
                x(9, 3, dtype=torch.int64),
                x(4, 20, dtype=torch.int64),
                index[:4],
                n,
                64,
            ),
        )
    tokens = x(4, 4, dtype=torch.int64)
    for taken in (None, x(4, 3, dtype=torch.bool)):
        yield (
            f"drafts judged {taken is None}",
            lambda t=taken: spec_decode.verify_drafts(
                tokens, tokens[:, :3], index[:4], index[:4], t
            ),
        )
    yield (
        "rows move",
        lambda: spec_decode.commit_tokens(index, index, index[:4], index[:4], tokens, index[:4]),
    )
    cpu = torch.device("cpu")
    for tokens in (8, 1024) if v3 else ():
        lying_in = picks_kernels.empty_blocks(tokens * 8, 128, 128, cpu, buckets=tokens == 8)
        yield (
            f"rows in order T{tokens}",
            lambda t=tokens, b=lying_in: (
                expert_rows.in_order(Quantized.empty(t, 7168, cpu), b, 8),
                expert_rows.in_order(x(t * 8, 7168), b, 1),
                expert_rows.joined(x(t * 8, 4096), b),
            ),
        )
    yield "embedding", lambda: embedding.rows(x(4, dtype=torch.int64), x(129280, 7168))
    yield "norm", lambda: norm.add_norm(x(4, 7168), x(4, 7168), x(7168), 1e-6)
    for hidden, each, kind in (
        (2048, 8, torch.bfloat16),
        (7168, 9, torch.bfloat16),
        (4096, 8, torch.bfloat16),
        (7168, 9, wide),
        (100, 3, wide),
    ):
        for beside, some, pads in (
            (False, False, False),
            (True, False, False),
            (True, True, False),
            (True, False, True),
        ):

            def both(
                h: int = hidden,
                k: int = each,
                d: torch.dtype = kind,
                b: bool = beside,
                s: bool = some,
                p: bool = pads,
            ) -> None:
                ids, weights = picks(4, k)
                gave = DeferredMoESum(
                    x(4 * k, h, dtype=d),
                    ids if s else None,
                    weights,
                    x(4, h, dtype=d) if b else None,
                    combine.combine,
                    padded() if p else None,
                )
                rest = x(4, h, dtype=d), x(h, dtype=d), 1e-6
                combine.combine_add_norm(gave, *rest, quantize_output="fp8_group" if v3 else None)
                norm.add_norm(gave.total(), *rest, quantize_output="fp8_group" if v3 else None)

            yield f"sum and norm {hidden} K{each} {kind} {beside} {some} {pads}", both
    for top_k in (3, 8):
        yield (
            f"routing as a message K{top_k}",
            lambda k=top_k: rank_rows.unpack_routing(
                rank_rows.pack_routing(*picks(64, k)), torch.int64, 4, 8
            ),
        )
    for ranks, top_k in ((32, 8), (256, 8), (2, 3)):
        parts = RankParts(ranks, 8)
        yield (
            f"rank blocks {ranks}",
            lambda p=parts, k=top_k: rank_rows.rank_blocks(*picks(64, k), p, 64),
        )
        for kind in (torch.bfloat16, wide):
            for beside in (False, True):
                yield (
                    f"partial sums {ranks} {kind} {beside}",
                    lambda r=ranks, d=kind, b=beside: rank_rows.add_partial_sums(
                        x(r * 64, 7168, dtype=d),
                        x(64, r, dtype=torch.int32),
                        x(64, 7168, dtype=d) if b else None,
                    ),
                )
    if v3:
        yield "quantize exactly", lambda: quantize.quantize_exactly(x(64, 7168))
        yield "powers of two", lambda: quantize.quantize(x(64, 7168), ue8m0=True)
    yield "swiglu", lambda: norm.swiglu(x(4, 4096))
    for tokens in (4, 9000):
        angles = x(tokens, 32, dtype=wide)
        yield (
            f"rope T{tokens}",
            lambda t=tokens, a=angles: rope_kv_write.rope(x(t, 128, 64), a, a, True),
        )
    if v3:
        yield (
            "norm fp8",
            lambda: norm.add_norm(
                x(4, 7168), x(4, 7168), x(7168), 1e-6, quantize_output="fp8_group"
            ),
        )
        yield "swiglu fp8", lambda: norm.swiglu_fp8(x(4, 4096))
    slots = x(4, dtype=torch.int64)
    angle = x(4, 32, dtype=wide)
    places = TokenPlaces(angle, angle, slots)
    yield (
        "latent",
        lambda: rope_kv_write.latent_epilogue(
            x(4, 2112),
            x(1536),
            x(512),
            places,
            x(9, 64, 576),
            1e-6,
            True,
            quant="fp8_group" if v3 else None,
        ),
    )
    if v3:
        rows = x(9, 64, 656, dtype=torch.uint8)
        yield (
            "latent to an fp8 cache",
            lambda: rope_kv_write.latent_epilogue(
                x(4, 2112), x(1536), x(512), places, rows, 1e-6, True, quant="fp8_group"
            ),
        )
        yield (
            "fp8 cache",
            lambda: (
                latent_fp8.write(rows, slots, x(4, 576), 512),
                latent_fp8.read(rows, slots, 512, torch.bfloat16),
            ),
        )
    wider = x(4, 64, dtype=wide)
    yield (
        "heads",
        lambda: rope_kv_write.heads_epilogue(
            x(4, 40 * 128),
            GQAWeights(x(128), x(128), 1e-6),
            TokenPlaces(wider, wider, slots),
            (x(9, 64, 4, 128), x(9, 64, 4, 128)),
        ),
    )
    exact = x(4, dtype=torch.float64)
    index = x(4, dtype=torch.int64)
    for vocab in (4096, 151936):
        logits = x(4, vocab, dtype=wide)
        yield f"best {vocab}", lambda t=logits: argmax.argmax(t)
        yield (
            f"distribution {vocab}",
            lambda t=logits: sampling.distribution(t, x(4, 4, dtype=torch.float64), True),
        )
    given = sampling.Distribution(
        logits, x(4, 4, dtype=torch.float64), index, x(4, 38, dtype=torch.float64)
    )
    yield "draw", lambda: sampling.sample_from(given, exact)
    yield (
        "draw rest",
        lambda: sampling.sample_residual(
            given, index, exact, index, x(9, 151936, dtype=wide), index
        ),
    )
    yield "write probs", lambda: sampling.write_probs(given, x(9, 151936, dtype=wide), index)
    yield "uniform", lambda: rng.uniform(index, index, 1)
    for kind in (torch.bfloat16, *([FP8] if v3 else [])):
        yield (
            f"draw normal {kind}",
            lambda kind=kind: rng.draw_normal(x(2048, 7168, dtype=kind), -5, 0.02, 2**40, 7168),
        )


def sum_layout(ttgir: str) -> str:
    """How the tensor that a kernel sums lies over its threads, which decides the order of that
    sum."""
    found = re.search(r'"tt\.reduce".*?\}\) : \(tensor<(\w+), (#\w+)>\)', ttgir, re.S)
    assert found is not None
    return found[1] + dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.M))[found[2]]


def compile_all(capability: int) -> list[dict[str, Any]]:
    from tests.emulation.cross_compile import compiling

    rows = []
    for name, call in cases(capability):
        with compiling(capability) as found:
            call()
        for kernel in found:
            counts = {word: kernel.ptx.count(word) for word in INSTRUCTIONS if word in kernel.ptx}
            rows.append({"case": name, "kernel": kernel.name, **kernel.resources(), **counts})
            if name.startswith("sum and norm") and "norm" in kernel.name:
                rows[-1]["sums over"] = sum_layout(kernel.kernel.asm["ttgir"])
    return rows


@pytest.mark.parametrize(
    "capability",
    [*(pytest.param(other, marks=pytest.mark.longest) for other in (80, 89, 100, 120)), 90],
)
def test_kernels_compile(capability: int) -> None:
    from tests.emulation.cross_compile import SHARED

    rows = json.loads(output_of_compiler(__file__, str(capability), "--json"))
    for row in rows:
        assert row["shared"] <= SHARED[capability], row
        whole = row["kernel"] in ("_blocks_kernel", "_sums_kernel") or (
            row["kernel"] == "_combine_norm_kernel" and "bfloat16" in row["case"]
        )
        assert row["stack"] < (1 if whole else 256), row  # bytes of spilled registers
        if row["kernel"] in (
            "_gate_up_kernel",
            "_down_kernel",
            "_linear_kernel",
            "_int4_kernel",
            "_quantized_linear_kernel",
            "_quantized_gate_up_kernel",
            "_quantized_down_kernel",
            "_gate_kernel",
            "_rounded_linear_kernel",
            "_rounded_gate_up_kernel",
            "_rounded_down_kernel",
        ):
            products = {90: ("wgmma.mma_async",), 100: ("tcgen05.mma", "mma.sync")}
            rounded = row["kernel"].startswith("_rounded")
            wanted = ("mma.sync",) if rounded else products.get(capability, ("mma.sync",))
            there = [word in row for word in wanted]
            assert row["case"] == "fp32" or any(there), row
        assert ("griddepcontrol.wait" in row) == (capability == 90), row
    assert sum(row["kernel"].startswith("_rounded") for row in rows) >= (
        6 if capability == 80 else 12
    )
    orders = [(row["case"], row["kernel"], row["sums over"]) for row in rows if "sums over" in row]
    assert {kernel for _, kernel, _ in orders} == {"_norm_kernel", "_combine_norm_kernel"}
    alike = len({(case, order) for case, _, order in orders}) == len(
        {case for case, _, _ in orders}
    )
    assert alike, "the joint kernel sums squares as the norm's does"


if __name__ == "__main__":
    table = compile_all(int(sys.argv[1]))
    print(json.dumps(table) if "--json" in sys.argv else "\n".join(str(row) for row in table))
