"""The Hopper kernel of MLA decode over an fp8 cache: its Python over torch tensors against fp64,
with hostile tails and scales; and what it compiles to."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

# repairs the interpreter's rounding, which puts partial results together
from tests.emulation.triton_interpreter import DEVICE

pytest.importorskip("triton.experimental.gluon")

import triton

from rorqual.bench.kernels.attention import attend, exact_entries
from rorqual.ops import reference
from rorqual.ops.triton.attention import mla_decode as mla
from rorqual.ops.triton.attention import mla_decode_sm90_fp8
from tests.child_process import output_of_compiler
from tests.emulation import gluon_emulator, ptx_interpreter
from tests.emulation.gluon_emulator import Descriptor
from tests.emulation.ptx_kernels import caught, changes
from tests.emulation.ptx_memory import TensorMap

pytestmark = pytest.mark.exhaustive

PAGE = 64
emulated = pytest.mark.skipif(DEVICE == "cuda", reason="the card runs the kernel itself: tests/gpu")


def widen(x: Tensor) -> Tensor:
    return x.view(reference.FP8).to(torch.float16)


def widen_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    return widen((x & 255).to(torch.uint8)), widen(((x >> 8) & 255).to(torch.uint8))


STAND_INS = {
    "_widen": widen,
    "_widen_pairs": widen_pairs,
    "_log2": torch.log2,
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
    config: mla.MlaDecodeConfig,
    compiled: Path | None = None,
) -> Tensor:
    """As mla_decode, with every program emulated, from the kernel's Python or from what it was
    compiled to."""
    (tokens, heads, _) = q_latent.shape
    requests = len(lens)
    kv_lens = torch.tensor(lens, dtype=torch.int32)
    queries = tokens // requests
    page = cache.shape[1]
    assert mla_decode_sm90_fp8.supported(
        q_latent, cache, config.block_h, config.block_n, config.warps
    )
    plan = mla.split_plan(kv_lens, workers, config.block_n, config.min_tiles, queries * heads, 512)
    plan.partial.fill_(float("nan"))
    plan.lse.fill_(float("nan"))
    out = torch.full((tokens, heads, 512), float("nan"), dtype=torch.bfloat16)
    latent, scales, rope = reference.latent_parts(cache.flatten(0, 1), 512, torch.bfloat16)
    before = [q_latent, q_rope]
    after = [
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
        config.min_tiles,
    ]
    grid = (-(-queries * heads // config.block_h), workers)
    if compiled is not None:
        maps = [
            TensorMap(latent.view(torch.uint8), (64, 128), 128),
            TensorMap(scales, (64, 4), 0),
            TensorMap(rope, (64, 64), 128),
        ]
        shared = int(compiled.with_suffix(".shared").read_text())
        assert ptx_interpreter.run(compiled.read_text(), shared, grid, before + maps + after) > 0
    else:
        tiles = [
            Descriptor(latent.view(torch.uint8), [64, 512]),
            Descriptor(scales, [64, 4]),
            Descriptor(rope, [64, 64]),
        ]
        ahead = mla_decode_sm90_fp8.groups_ahead(config.block_h, config.warps, config.per_sm)
        constants = [
            heads,
            queries,
            page,
            config.block_h,
            64,
            512,
            64,
            128,
            mla_decode_sm90_fp8.LARGEST,
            config.warps,
            config.stages,
            ahead,
            False,
        ]
        gluon_emulator.run(
            mla_decode_sm90_fp8,
            "_mla_hopper_fp8_kernel",
            grid,
            before + tiles + after + constants,
            **STAND_INS,
        )
    mla.combine(plan, out, requests)
    return out


def filled(rows: list[Tensor], page: int) -> tuple[Tensor, Tensor]:
    """(cache, tables): rows [n, 656] of each request, in pages in no order; all other bytes are
    255, a NaN as e4m3, as a scale and as a rope key."""
    columns = max(1, -(-max(map(len, rows)) // page))
    tables = (1 + torch.randperm(len(rows) * columns)).int().view(len(rows), columns)
    cache = torch.full((1 + tables.numel(), page, 656), 255, dtype=torch.uint8)
    cache = cache.view(rows[0].dtype)
    for table, own in zip(tables, rows, strict=True):
        for at in range(0, len(own), page):
            cache[table[at // page], : min(page, len(own) - at)] = own[at : at + page]
    return cache, tables


CASES = [
    ([200, 64, 1, 0, 130], 16, 1, 3, 1, (16, 4, 2, 2)),
    ([200, 3, 65], 16, 4, 3, 1, (32, 8, 2, 1)),
    ([150, 0, 70], 16, 2, 2, 1, (32, 8, 3, 1)),
    ([300], 5, 2, 5, 2, (16, 4, 1, 3)),  # rows that fill no block; several splits of one request
    ([130, 2], 24, 3, 2, 1, (32, 4, 2, 1)),  # blocks of rows that hold parts of query tokens
]


def check(
    lens: list[int],
    heads: int,
    queries: int,
    page: int,
    workers: int,
    config: mla.MlaDecodeConfig,
    compiled: Path | None = None,
) -> None:
    torch.manual_seed(1)
    rows = [reference.pack_latent(torch.randn(n, 576).bfloat16(), 512) for n in lens]
    cache, tables = filled(rows, page)
    tokens = len(lens) * queries
    scale = 192**-0.5
    q_latent = torch.randn(tokens, heads, 512).bfloat16()
    q_rope = torch.randn(heads, tokens, 64).bfloat16().transpose(0, 1)
    out = decode(q_latent, q_rope, cache, tables, lens, scale, workers, config, compiled)
    for r, length in enumerate(lens):
        entries = exact_entries(rows[r])[:, None]
        # tokens that do not exist are not read
        used = slice((r + 1) * queries - min(length, queries), (r + 1) * queries)
        if length == 0:
            assert not out[r * queries : (r + 1) * queries].any()
            continue
        expected = attend(
            torch.cat((q_latent, q_rope), -1)[used], entries, entries[..., :512], scale
        )
        assert (out[used].double() - expected).norm() < 2e-3 * expected.norm(), (r, length)
    assert out.isfinite().all()


@emulated
@pytest.mark.parametrize(("lens", "heads", "queries", "workers", "min_tiles", "form"), CASES)
@pytest.mark.parametrize("page", [64, 128])
def test_emulated_result(
    lens: list[int],
    heads: int,
    queries: int,
    workers: int,
    min_tiles: int,
    form: tuple[int, int, int, int],
    page: int,
) -> None:
    check(
        lens,
        heads,
        queries,
        page,
        workers,
        mla.MlaDecodeConfig(form[0], 64, *form[1:], min_tiles=min_tiles, gluon=True),
    )


SIZES = {
    # each token larger than the one before
    "tokens": lambda n: torch.logspace(-6, 2, n)[:, None].expand(n, 4),
    "groups": lambda n: torch.tensor([1e2, 1e-6, 1.0, 1e-3]).expand(n, 4),
    "tiny": lambda n: torch.full((n, 4), 1e-4 / 448),
    "huge": lambda n: torch.full((n, 4), 1e20),
    "mixed": lambda n: 10.0 ** torch.randint(-6, 3, (n, 4)),
}


@emulated
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("peaked", [False, True])
def test_any_scales(case: str, peaked: bool) -> None:
    """Each group of 128 columns by itself is right: a group of small scales does not drown in
    the error of the others."""
    torch.manual_seed(2)
    length = 200
    heads = 16
    rows = reference.pack_latent(torch.randn(length, 576).bfloat16(), 512)
    scales = SIZES[case](length).float().contiguous()
    rows[:, 512:528] = scales.view(torch.uint8).view(length, 16)
    cache, tables = filled([rows], PAGE)
    entries = exact_entries(rows)[:, None]
    # scores of about that size
    size = (5.0 if peaked else 0.5) / entries[..., :512].norm(dim=-1).amax().item()
    sizes = torch.logspace(-2, 1, heads)[:, None]
    q_latent = (torch.randn(1, heads, 512) * size * sizes).bfloat16()
    q_rope = torch.randn(1, heads, 64).bfloat16()
    out = decode(
        q_latent,
        q_rope,
        cache,
        tables,
        [length],
        1.0,
        2,
        mla.MlaDecodeConfig(16, 64, 4, 2, min_tiles=1, gluon=True),
    )
    expected = attend(torch.cat((q_latent, q_rope), -1), entries, entries[..., :512], 1.0)
    for g in range(0, 512, 128):
        part = expected[..., g : g + 128]
        assert (
            (out[..., g : g + 128].double() - part).norm(dim=-1) < 3e-3 * part.norm(dim=-1)
        ).all(), g


@emulated
def test_rows_of_queries_do_not_touch_each_other() -> None:
    """Query tokens that pad a request may hold anything."""
    torch.manual_seed(3)
    rows = reference.pack_latent(torch.randn(100, 576).bfloat16(), 512)
    cache, tables = filled([rows], PAGE)
    q_latent = torch.randn(4, 4, 512).bfloat16()
    q_rope = torch.randn(4, 4, 64).bfloat16()
    for token, garbage in ((0, float("inf")), (1, float("nan")), (2, 3e38)):
        q_latent[token] = garbage
        q_rope[token] = garbage
    out = decode(
        q_latent,
        q_rope,
        cache,
        tables,
        [100],
        192**-0.5,
        2,
        mla.MlaDecodeConfig(16, 64, 4, 2, min_tiles=1, gluon=True),
    )
    entries = exact_entries(rows)[:, None]
    expected = attend(torch.cat((q_latent, q_rope), -1)[3:], entries, entries[..., :512], 192**-0.5)
    assert (out[3:].double() - expected).norm() < 2e-3 * expected.norm()


COMPILE = """
import torch
from rorqual.ops.triton.attention import mla_decode as mla
from tests.emulation.cross_compile import SHARED, compiling
m = lambda *s, t=torch.bfloat16: torch.empty(*s, dtype=t)
i = lambda *s: torch.empty(*s, dtype=torch.int32)
shapes = (16, 1, (16, 4, 2, 2)), (16, 1, (16, 4, 1, 3)), (32, 1, (32, 8, 3, 1))
with compiling(90) as launched:
    for heads, queries, form in shapes:
        mla.mla_decode(m(4 * queries, heads, 512), m(4 * queries, heads, 64), m(9, 64, 656,
            t=torch.uint8), i(4, 9), i(4), 0.1, 512,
                       config=mla.MlaDecodeConfig(form[0], 64, *form[1:], gluon=True))
kernels = [k for k in launched if k.name == "_mla_hopper_fp8_kernel"]
for kernel, (heads, queries, (rows, warps, stages, per_sm)) in zip(kernels, shapes, strict=True):
    found = kernel.resources()
    # the system takes a KB of each program
    assert per_sm * (found["shared"] + 1024) <= SHARED[90] + 1024, found
    assert per_sm * warps * 32 * -(-found["registers"] // 8) * 8 <= 65536, found
    assert found["stack"] < 128, found  # outside the loop over tiles
    # 4 products of ropes; 32 of keys and 32 of values, whose left operand is in registers
    product = f"wgmma.mma_async.sync.aligned.m64n{4 * rows // warps}k16.f32"
    bf16, fp16 = (kernel.ptx.count(f"{product}.{t}.{t}") for t in ("bf16", "f16"))
    assert (bf16, fp16) == (4, 64), (bf16, fp16)
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" in kernel.ptx
    assert "griddepcontrol.wait" in kernel.ptx
    open("{folder}/" + f"{rows}-{per_sm}.ptx", "w").write(kernel.ptx)
    open("{folder}/" + f"{rows}-{per_sm}.cubin", "wb").write(kernel.kernel.asm["cubin"])
    open("{folder}/" + f"{rows}-{per_sm}.shared", "w").write(str(found["shared"]))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """PTX of three forms of the kernel, with files of machine code and of shared memory's size
    beside it."""
    folder = tmp_path_factory.mktemp("compiled")
    code = COMPILE.replace("{folder}", str(folder))
    output_of_compiler("-c", code, TRITON_CACHE_DIR=str(folder))
    found = sorted(folder.glob("*.ptx"))
    assert len(found) == 3
    return found


@pytest.mark.longest
def test_products_overlap_and_nothing_is_spilled_between_them(compiled: list[Path]) -> None:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    for path in compiled:
        command = [str(tools / "ptxas"), "-v", "--gpu-name=sm_90a", str(path), "-o", "/dev/null"]
        assembled = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert "serialized" not in assembled, assembled
        command = [str(tools / "cuobjdump"), "-sass", str(path.with_suffix(".cubin"))]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        loop = code[code.index("HGMMA") : code.rindex("HGMMA")]
        for instruction, there in (
            ("LDS.128", True),
            ("F2FP.F16.E4M3.UNPACK_B", True),
            ("LDL", False),
            ("STL", False),
        ):
            assert (instruction in loop) == there, (path, instruction)


@emulated
def test_compiled_code_is_right_and_free_of_races(compiled: list[Path]) -> None:
    for path, heads, form in zip(
        compiled, (16, 16, 32), ((16, 4, 2, 2), (16, 4, 1, 3), (32, 8, 3, 1)), strict=True
    ):
        lens = [150, 0, 3]
        check(
            lens,
            heads,
            1,
            64,
            2,
            mla.MlaDecodeConfig(form[0], 64, *form[1:], min_tiles=1, gluon=True),
            path,
        )


# what is changed, one place at a time, once the kernel has begun; by what; how many of the places
# matter at least
BROKEN = {
    "what threads wrote is multiplied without a fence": (r"fence\.proxy\.async[^;]*;", "", 3),
    "products not awaited": (r"wgmma\.wait_group[^;]*;", "", 5),
    "a copy not awaited": (r"mbarrier\.try_wait\.parity[^;]*;", "mov.pred complete, -1;", 1),
    "an unannounced copy": (r"@%p\d+ mbarrier\.arrive[^;]*;", "", 2),
    "threads do not meet at all": (r"bar\.sync[^;]*;", "", 1),
}


@emulated
@pytest.mark.parametrize("what", BROKEN)
def test_races_are_found(compiled: list[Path], what: str, tmp_path: Path) -> None:
    (pattern, by, matter) = BROKEN[what]
    path = tmp_path / "kernel.ptx"
    start, wait, rest = compiled[0].read_text().partition("griddepcontrol.wait")
    path.with_suffix(".shared").write_text(compiled[0].with_suffix(".shared").read_text())
    changed = (
        [re.sub(r"bar\.sync[^;]*;", "", rest)] if "at all" in what else changes(rest, pattern, by)
    )

    def execute(text: str) -> None:
        path.write_text(start + wait + text)
        check(
            [150, 0, 3],
            16,
            1,
            64,
            2,
            mla.MlaDecodeConfig(16, 64, 4, 2, per_sm=2, min_tiles=1, gluon=True),
            path,
        )

    assert caught(changed, execute) >= matter, what
