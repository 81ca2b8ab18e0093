"""The Hopper kernel of MLA decode: its Python over torch tensors against fp64, with hostile tails; and what it compiles to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops.triton_interpreter import DEVICE

pytest.importorskip("triton.experimental.gluon")

import triton

from rorqual.bench.kernels_attention import attend
from rorqual.ops.triton import mla_decode as mla
from rorqual.ops.triton import mla_hopper
from tests.ops import gluon_emulator, ptx_interpreter
from tests.ops.gluon_emulator import Descriptor
from tests.ops.ptx_memory import TensorMap

PAGE = 64
CASES = [
    ([200, 64, 1, 0, 130], 16, 4, 3, 1),  # queries x heads share a block of rows
    ([300], 128, 1, 5, 2),  # several splits of one request
    ([65, 0, 70], 64, 2, 2, 1),
    ([128, 191, 3], 80, 1, 1, 1),  # rows that fill no block
]


def check(lens: list[int], heads: int, queries: int, workers: int, min_tiles: int, page: int, compiled: Path | None = None) -> None:
    """Every program emulated, from the kernel's Python or from what it was compiled to, against fp64."""
    torch.manual_seed(1)
    columns, requests = 6 * PAGE // page, len(lens)
    pages = 1 + requests * columns
    tables = (1 + torch.randperm(pages - 1)).int().view(requests, columns)
    cache = torch.full((pages, page, 576), float("nan"), dtype=torch.bfloat16)
    for table, length in zip(tables, lens, strict=True):
        entries = torch.randn(length, 576).bfloat16()
        for at in range(0, length, page):
            cache[table[at // page], : min(page, length - at)] = entries[at : at + page]
    tokens = requests * queries
    q_latent, q_rope = torch.randn(tokens, heads, 512).bfloat16(), torch.randn(heads, tokens, 64).bfloat16().transpose(0, 1)
    kv_lens, scale = torch.tensor(lens, dtype=torch.int32), 192**-0.5
    config = mla.Config(64, 64, 8, 2, min_tiles=min_tiles, gluon=True)
    plan = mla.split_plan(kv_lens, workers, config.block_n, min_tiles, queries * heads, 512)
    out = torch.full((tokens, heads, 512), float("nan"), dtype=torch.bfloat16)
    latent, rope = cache.flatten(0, 1)[:, :512], cache.flatten(0, 1)[:, 512:]
    grid = (-(-queries * heads // 64), workers)
    plan.partial.fill_(float("nan"))
    plan.lse.fill_(float("nan"))
    rest = [
        tables, kv_lens, plan.starts, plan.first, out, plan.partial, plan.lse, scale * mla.LOG2E, *q_latent.stride()[:2],
        *q_rope.stride()[:2], tables.stride(0), *out.stride()[:2], requests, min_tiles,
    ]  # fmt: skip
    if compiled is not None:
        maps = [TensorMap(latent, (64, 64), 128), TensorMap(rope, (64, 64), 128)]
        shared = int(compiled.with_suffix(".shared").read_text())
        assert ptx_interpreter.run(compiled.read_text(), shared, grid, [q_latent, q_rope, *maps, *rest]) > 0
    else:
        tiles = [Descriptor(latent, [64, 512]), Descriptor(rope, [64, 64])]
        args = [q_latent, q_rope, *tiles, *rest, heads, queries, page, 64, 64, 512, 64, False]
        gluon_emulator.run(mla_hopper, "_mla_hopper_kernel", grid, args)
    mla.combine(plan, out, requests)
    for r, length in enumerate(lens):
        entries = cache[tables[r].long()].flatten(0, 1)[:length, None]
        at = slice(r * queries, (r + 1) * queries)
        if length < queries:  # tokens that do not exist see nothing or what is there; nobody reads them
            at = slice((r + 1) * queries - length, (r + 1) * queries)
        expected = attend(torch.cat((q_latent, q_rope), -1)[at], entries, entries[..., :512], scale)
        assert torch.allclose(out[at].double(), expected, atol=2e-2, rtol=2e-2), (r, length)
    assert not out[: queries * requests].isnan().any()


@pytest.mark.parametrize(("lens", "heads", "queries", "workers", "min_tiles"), CASES)
@pytest.mark.parametrize("page", [64, 128])
def test_emulated_result(lens: list[int], heads: int, queries: int, workers: int, min_tiles: int, page: int) -> None:
    check(lens, heads, queries, workers, min_tiles, page)


COMPILE = """
import torch
from rorqual.ops.triton import mla_decode as mla
from tests.ops.cross_compile import SHARED, compiling
m = lambda *s: torch.empty(*s, dtype=torch.bfloat16)
i = lambda *s: torch.empty(*s, dtype=torch.int32)
with compiling(90) as launched:
    for heads, queries in ((128, 1), (128, 2), (16, 4)):
        config = mla.Config(64, 64, 8, 2, gluon=True)
        mla.mla_decode(m(4 * queries, heads, 512), m(4 * queries, heads, 64), m(9, 64, 576), i(4, 9), i(4), 0.1, 512, config=config)
kernels = [k for k in launched if k.name == "_mla_hopper_kernel"]
assert len(kernels) == 3
for kernel in kernels:
    found = kernel.resources()
    assert found["shared"] <= SHARED[90] and found["stack"] < 64, found
    # each warpgroup half the scores, half the columns: 36 and 4 products of a tile, none twice
    assert kernel.ptx.count("wgmma.mma_async.sync.aligned.m64n32k16") == 36, kernel.ptx.count("m64n32k16")
    assert kernel.ptx.count("wgmma.mma_async.sync.aligned.m64n256k16") == 4
    assert "griddepcontrol.wait" in kernel.ptx
    open("{folder}/kernel.ptx", "w").write(kernel.ptx)
    open("{folder}/kernel.shared", "w").write(str(found["shared"]))
"""


def test_it_compiles_to_products_that_overlap(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": "."}
    command = [sys.executable, "-c", COMPILE.replace("{folder}", str(tmp_path))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [str(assembler), "-v", "--gpu-name=sm_90a", str(tmp_path / "kernel.ptx"), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "serialized" not in done.stderr, done.stderr
    if DEVICE == "cpu":  # what it compiled to is right, and free of races
        check([150, 0, 3], 16, 4, 2, 1, 64, tmp_path / "kernel.ptx")
