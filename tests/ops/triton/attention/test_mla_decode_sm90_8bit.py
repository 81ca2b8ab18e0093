"""The Hopper kernel of MLA decode for many rows over an 8-bit cache: its Python over torch tensors
against fp64, with hostile tails and scales; and what it compiles to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from rorqual.bench.kernels.attention import attend
from rorqual.ops import reference
from rorqual.ops.triton.attention import mla_decode as mla
from rorqual.ops.triton.attention import mla_decode_sm90_8bit
from tests.emulation import gluon_emulator, ptx_interpreter
from tests.emulation.gluon_emulator import Descriptor
from tests.emulation.ptx_kernels import Kernel, assembled, caught, changes, compiled
from tests.emulation.ptx_memory import TensorMap
from tests.ops.triton.attention.test_mla_decode_sm90_fp8 import SIZES, emulated, filled

pytestmark = pytest.mark.exhaustive

KINDS = {"fp8": torch.uint8, "int8": torch.int8}
CASES = [
    ([200, 64, 1, 0, 130], 16, 4, 3, 1),  # queries x heads share a block of rows
    ([300], 128, 1, 5, 2),  # several splits of one request
    ([65, 0, 70], 64, 2, 2, 1),
    ([128, 191, 3], 80, 1, 1, 1),  # rows that fill no block
]


def widened(words: Tensor, scale: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Stand-in of the kernel's assembly: [n, k] int32 to two [n, k] int32 of bf16 pairs."""
    numbers = words.contiguous().view(kind).float().view(*words.shape, 4)
    wide = (numbers * scale[..., None]).bfloat16()
    even, odd = (wide[..., at : at + 2].contiguous().view(torch.int32)[..., 0] for at in (0, 2))
    return even, odd


STAND_INS: dict[str, Any] = {
    "_widen_e4m3": lambda words, scale: widened(words, scale, reference.FP8),
    "_widen_int8": lambda words, scale: widened(words, scale, torch.int8),
    "_prefetch": lambda *given: None,
    "opaque_zero": lambda: 0,
}


def decode(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    tables: Tensor,
    lens: list[int],
    scale: float,
    workers: int,
    min_tiles: int,
    machine: Kernel | None = None,
    seed: int | None = None,
) -> Tensor:
    """As mla_decode, with every program emulated, from the kernel's Python or from what it was
    compiled to."""
    tokens, heads, _ = q_latent.shape
    requests = len(lens)
    queries = tokens // requests
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    assert mla_decode_sm90_8bit.supported(q_latent, cache, 64, 64)
    plan = mla.split_plan(kv_lens, workers, 64, min_tiles, queries * heads, 512)
    plan.partial.fill_(float("nan"))
    plan.lse.fill_(float("nan"))
    out = torch.full((tokens, heads, 512), float("nan"), dtype=torch.bfloat16)
    rows = cache.flatten(0, 1)
    _, scales, rope = reference.latent_parts(rows, 512, torch.bfloat16)
    queries_and_words = [q_latent, q_rope, rows.view(torch.int32)]
    rest = [
        tables,
        kv_lens,
        plan.starts,
        plan.first,
        out,
        plan.partial,
        plan.lse,
        scale * mla.LOG2E,
        *q_latent.stride()[:2],
        *q_rope.stride()[:2],
        tables.stride(0),
        *out.stride()[:2],
        requests,
        min_tiles,
    ]
    grid = (-(-queries * heads // 64), workers)
    if machine is not None:
        maps = [TensorMap(scales, (64, 4), 0), TensorMap(rope, (64, 64), 128)]
        arguments = [*queries_and_words, *maps, *rest]
        assert ptx_interpreter.run(machine.ptx, machine.shared, grid, arguments, seed=seed) > 0
    else:
        constants = [
            heads,
            queries,
            cache.shape[1],
            64,
            64,
            512,
            64,
            128,
            656,
            mla_decode_sm90_8bit.STAGES,
            *mla_decode_sm90_8bit.REGISTERS,
            cache.dtype == torch.int8,
            mla_decode_sm90_8bit.bulk_layout(16),
            False,
        ]
        tiles = [Descriptor(scales, [64, 4]), Descriptor(rope, [64, 64])]
        gluon_emulator.run(
            mla_decode_sm90_8bit,
            "_mla_hopper_8bit_kernel",
            grid,
            [*queries_and_words, *tiles, *rest, *constants],
            **STAND_INS,
        )
    mla.combine(plan, out, requests)
    return out


def check(
    lens: list[int],
    heads: int,
    queries: int,
    workers: int,
    min_tiles: int,
    page: int,
    kind: torch.dtype,
    machine: Kernel | None = None,
    seed: int | None = None,
) -> None:
    torch.manual_seed(1)
    rows = [reference.pack_latent(torch.randn(n, 576).bfloat16(), 512, kind) for n in lens]
    cache, tables = filled(rows, page)
    tokens = len(lens) * queries
    q_latent = torch.randn(tokens, heads, 512).bfloat16()
    q_rope = torch.randn(heads, tokens, 64).bfloat16().transpose(0, 1)
    scale = 192**-0.5
    out = decode(q_latent, q_rope, cache, tables, lens, scale, workers, min_tiles, machine, seed)
    for r, length in enumerate(lens):
        if length == 0:
            assert not out[r * queries : (r + 1) * queries].any()
            continue
        entries = reference.unpack_latent(rows[r], 512, torch.bfloat16)[:, None]
        # tokens that do not exist are not read
        used = slice((r + 1) * queries - min(length, queries), (r + 1) * queries)
        expected = attend(
            torch.cat((q_latent, q_rope), -1)[used], entries, entries[..., :512], scale
        )
        error = (out[used].double() - expected).norm() / expected.norm()
        assert error < 4e-3, (r, length, error)
    assert out.isfinite().all()


@emulated
@pytest.mark.parametrize(("lens", "heads", "queries", "workers", "min_tiles"), CASES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [64, 128])
def test_emulated_result(
    lens: list[int], heads: int, queries: int, workers: int, min_tiles: int, kind: str, page: int
) -> None:
    check(lens, heads, queries, workers, min_tiles, page, KINDS[kind])


@emulated
@pytest.mark.parametrize("case", SIZES)
def test_any_scales(case: str) -> None:
    """Each group of 128 columns by itself is right."""
    torch.manual_seed(2)
    length = 200
    rows = reference.pack_latent(torch.randn(length, 576).bfloat16(), 512)
    scales = SIZES[case](length).float().contiguous()
    rows[:, 512:528] = scales.view(torch.uint8).view(length, 16)
    cache, tables = filled([rows], 64)
    entries = reference.unpack_latent(rows, 512, torch.bfloat16)[:, None]
    # scores of about that size
    size = 0.5 / entries[..., :512].double().norm(dim=-1).amax().item()
    q_latent = (torch.randn(1, 64, 512) * size).bfloat16()
    q_rope = torch.randn(1, 64, 64).bfloat16()
    out = decode(q_latent, q_rope, cache, tables, [length], 1.0, 2, 1)
    expected = attend(torch.cat((q_latent, q_rope), -1), entries, entries[..., :512], 1.0)
    for g in range(0, 512, 128):
        part = expected[..., g : g + 128]
        error = (out[..., g : g + 128].double() - part).norm(dim=-1) / part.norm(dim=-1)
        assert (error < 1e-2).all(), (g, error.max())


LAUNCHES = """
from rorqual.ops.triton.attention import mla_decode as mla
m = lambda *s, t=torch.bfloat16: torch.empty(*s, dtype=t)
i = lambda *s: torch.empty(*s, dtype=torch.int32)
for heads, queries, kind in ((128, 1, torch.uint8), (16, 4, torch.uint8), (16, 4, torch.int8)):
    config = mla.MlaDecodeConfig(64, 64, 8, 2, gluon=True)
    mla.mla_decode(m(4 * queries, heads, 512), m(4 * queries, heads, 64), m(9, 64, 656, t=kind),
        i(4, 9), i(4), 0.1, 512, config=config)
launched[:] = [kernel for kernel in launched if kernel.name.startswith("_mla")]
"""
CHECKS = """
assert [kernel.name for kernel in launched] == ["_mla_hopper_8bit_kernel"] * 3
for kernel in launched:
    found = kernel.resources()
    assert found["shared"] <= SHARED[90] and found["stack"] < 64, found
    # of a tile 36 products for scores, 4 of each half of the columns for values; the first
    # warpgroup has the first tile and the last one's values beside its loop
    for product, count in {"m64n64k16": 2 * 36, "m64n256k16": 3 * 4}.items():
        assert kernel.ptx.count("wgmma.mma_async.sync.aligned." + product) == count, (product,
            kernel.ptx.count(product))
    assert "griddepcontrol.wait" in kernel.ptx
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """For 128 heads, and for 16 with 4 queries with either cache."""
    return compiled(LAUNCHES, tmp_path_factory.mktemp("compiled"), CHECKS)


@pytest.mark.longest
def test_it_compiles_to_products_that_overlap(kernels: list[Kernel], tmp_path: Path) -> None:
    for kernel in kernels:
        said = assembled(kernel, tmp_path)
        assert "serialized" not in said
        # the assembler takes the warpgroups' registers as they are asked for
        assert "setmaxnreg" not in said


@emulated
@pytest.mark.longest
def test_compiled_code_is_right_and_free_of_races(kernels: list[Kernel]) -> None:
    for kernel, kind in zip(kernels[1:], KINDS.values(), strict=True):
        check([150, 0, 3], 16, 4, 2, 1, 64, kind, kernel)
        for seed in range(2):
            check([200, 0, 3, 64], 16, 4, 2, 1, 64, kind, kernel, seed)


# what is taken out, one place at a time; by what; how many places there are, of which all matter
BROKEN = {
    "a part is used before it is there, or a place not given up": (
        r"mbarrier\.try_wait\.parity[^;]*;",
        "mov.pred complete, -1;",
        5,
    ),
    "weights, queries, barriers without a fence": (r"fence\.proxy\.async[^;]*;", "", 5),
    "products not awaited": (r"wgmma\.wait_group\S+\s+0;", "", 5),
    "inputs of the kernel before": (r"griddepcontrol\.wait[^;]*;", "", 3),
}


@emulated
@pytest.mark.parametrize("what", BROKEN)
def test_races_are_found(kernels: list[Kernel], what: str) -> None:
    pattern, by, matter = BROKEN[what]
    kernel = kernels[1]

    def run(ptx: str) -> None:
        check([150, 0, 3, 200], 16, 4, 2, 1, 64, torch.uint8, replace(kernel, ptx=ptx))

    assert caught(changes(kernel.ptx, pattern, by), run) >= matter, what
