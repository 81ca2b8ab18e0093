"""The Hopper kernel of MLA decode: its Python over torch tensors against fp64, with hostile
tails; and what it compiles to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.emulation.triton_interpreter import DEVICE

pytest.importorskip("triton.experimental.gluon")

from rorqual.bench.kernels.attention import attend
from rorqual.ops.triton.attention import mla_decode as mla
from rorqual.ops.triton.attention import mla_decode_sm90
from tests.emulation import gluon_emulator, ptx_interpreter
from tests.emulation.gluon_emulator import Descriptor
from tests.emulation.ptx_kernels import Kernel, assembled, caught, changes, compiled
from tests.emulation.ptx_memory import TensorMap

pytestmark = pytest.mark.exhaustive

PAGE = 64
CASES = [
    ([200, 64, 1, 0, 130], 16, 4, 3, 1),  # queries x heads share a block of rows
    ([300], 128, 1, 5, 2),  # several splits of one request
    ([65, 0, 70], 64, 2, 2, 1),
    ([128, 191, 3], 80, 1, 1, 1),  # rows that fill no block
]


def check(
    lens: list[int],
    heads: int,
    queries: int,
    workers: int,
    min_tiles: int,
    page: int,
    machine: Kernel | None = None,
    seed: int | None = None,
    past: float = float("nan"),
) -> None:
    """Every program emulated, from the kernel's Python or from what it was compiled to, against
    fp64. past: what lies behind ends."""
    torch.manual_seed(1)
    columns = 6 * PAGE // page
    requests = len(lens)
    pages = 1 + requests * columns
    tables = (1 + torch.randperm(pages - 1)).int().view(requests, columns)
    cache = torch.full((pages, page, 576), past, dtype=torch.bfloat16)
    for table, length in zip(tables, lens, strict=True):
        entries = torch.randn(length, 576).bfloat16()
        for at in range(0, length, page):
            cache[table[at // page], : min(page, length - at)] = entries[at : at + page]
    tokens = requests * queries
    q_latent = torch.randn(tokens, heads, 512).bfloat16()
    q_rope = torch.randn(heads, tokens, 64).bfloat16().transpose(0, 1)
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    scale = 192**-0.5
    config = mla.MlaDecodeConfig(64, 64, 8, 2, min_tiles=min_tiles, gluon=True)
    plan = mla.split_plan(kv_lens, workers, config.block_n, min_tiles, queries * heads, 512)
    out = torch.full((tokens, heads, 512), float("nan"), dtype=torch.bfloat16)
    latent = cache.flatten(0, 1)[:, :512]
    rope = cache.flatten(0, 1)[:, 512:]
    grid = (-(-queries * heads // 64), workers)
    plan.partial.fill_(float("nan"))
    plan.lse.fill_(float("nan"))
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
    if machine is not None:
        maps = [TensorMap(latent, (64, 64), 128), TensorMap(rope, (64, 64), 128)]
        assert (
            ptx_interpreter.run(
                machine.ptx, machine.shared, grid, [q_latent, q_rope, *maps, *rest], seed=seed
            )
            > 0
        )
    else:
        tiles = [Descriptor(latent, [64, 512]), Descriptor(rope, [64, 64])]
        args = [
            q_latent,
            q_rope,
            *tiles,
            *rest,
            heads,
            queries,
            page,
            64,
            64,
            512,
            64,
            mla_decode_sm90.STAGES,
            mla_decode_sm90.REGISTERS,
            False,
        ]
        gluon_emulator.run(
            mla_decode_sm90,
            "_mla_hopper_kernel",
            grid,
            args,
            opaque_zero=lambda: 0,
            _wait_for_most_scores=lambda: None,
        )
    mla.combine(plan, out, requests)
    for r, length in enumerate(lens):
        entries = cache[tables[r].long()].flatten(0, 1)[:length, None]
        at = slice(r * queries, (r + 1) * queries)
        # tokens that do not exist see nothing or stale data, which is not read
        if length < queries:
            at = slice((r + 1) * queries - length, (r + 1) * queries)
        expected = attend(torch.cat((q_latent, q_rope), -1)[at], entries, entries[..., :512], scale)
        assert torch.allclose(out[at].double(), expected, atol=2e-2, rtol=2e-2), (r, length)
    assert not out[: queries * requests].isnan().any()


@pytest.mark.parametrize(("lens", "heads", "queries", "workers", "min_tiles"), CASES)
@pytest.mark.parametrize("page", [64, 128])
def test_emulated_result(
    lens: list[int], heads: int, queries: int, workers: int, min_tiles: int, page: int
) -> None:
    check(lens, heads, queries, workers, min_tiles, page)


@pytest.mark.parametrize("past", [float("inf"), -3e38, 0.0])
def test_what_lies_past_the_end_does_not_matter(past: float) -> None:
    check([150, 64, 3], 16, 4, 2, 1, 64, past=past)


LAUNCHES = """
from rorqual.ops.triton.attention import mla_decode as mla
m = lambda *s: torch.empty(*s, dtype=torch.bfloat16)
i = lambda *s: torch.empty(*s, dtype=torch.int32)
for heads, queries in ((128, 1), (128, 2), (16, 4)):
    config = mla.MlaDecodeConfig(64, 64, 8, 2, gluon=True)
    mla.mla_decode(m(4 * queries, heads, 512), m(4 * queries, heads, 64), m(9, 64, 576), i(4, 9),
        i(4), 0.1, 512, config=config)
launched[:] = [kernel for kernel in launched if kernel.name.startswith("_mla")]
"""
CHECKS = """
assert [kernel.name for kernel in launched] == ["_mla_hopper_kernel"] * 3
for kernel in launched:
    found = kernel.resources()
    assert found["shared"] <= SHARED[90] and found["stack"] < 64, found
    # one warpgroup all scores, two half the columns each: 36 and 2 x 4 products of a tile, none
    # twice
    for product, count in {"m64n64k16": 36, "m64n256k16": 8}.items():
        assert kernel.ptx.count("wgmma.mma_async.sync.aligned." + product) == count, (product,
            kernel.ptx.count(product))
    assert "griddepcontrol.wait" in kernel.ptx
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """For 16 heads and 4 queries."""
    return compiled(LAUNCHES, tmp_path_factory.mktemp("compiled"), CHECKS)[2]


@pytest.mark.longest
def test_it_compiles_to_products_that_overlap(kernel: Kernel, tmp_path: Path) -> None:
    said = assembled(kernel, tmp_path)
    assert "serialized" not in said
    # the assembler takes the warpgroups' registers as they are asked for
    assert "setmaxnreg" not in said


@pytest.mark.skipif(DEVICE != "cpu", reason="executed without a card")
@pytest.mark.longest
def test_compiled_code_is_right_and_free_of_races(kernel: Kernel) -> None:
    check([150, 0, 3], 16, 4, 2, 1, 64, kernel)
    for seed in range(3):
        check([200, 0, 3, 64], 16, 4, 2, 1, 64, kernel, seed)
    check([200, 0, 3, 64], 16, 4, 2, 1, 64, kernel, past=-1e30)


# what is taken out, one place at a time; by what; how many places there are, of which all matter
BROKEN = {
    "a part is used before it is there, or a place not given up": (
        r"mbarrier\.try_wait\.parity[^;]*;",
        "mov.pred complete, -1;",
        7,
    ),
    "weights, queries, barriers without a fence": (r"fence\.proxy\.async[^;]*;", "", 3),
    "products not awaited": (r"wgmma\.wait_group\S+\s+0;", "", 3),
    "an unannounced copy": (r"@%p\d+ mbarrier\.arrive\.expect[^;]*;", "", 7),
    "inputs of the kernel before": (r"griddepcontrol\.wait[^;]*;", "", 3),
}


@pytest.mark.skipif(DEVICE != "cpu", reason="executed without a card")
@pytest.mark.parametrize("what", BROKEN)
def test_races_are_found(kernel: Kernel, what: str) -> None:
    pattern, by, matter = BROKEN[what]

    def run(ptx: str) -> None:
        check([150, 0, 3, 200], 16, 4, 2, 1, 64, replace(kernel, ptx=ptx))

    assert caught(changes(kernel.ptx, pattern, by), run) >= matter, what
