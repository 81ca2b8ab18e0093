"""How a tile of an fp8 latent cache becomes operands of Hopper's tensor cores: in registers, for
mla_decode_sm90_fp8.py.

A tile is 64 tokens of 512 e4m3 in shared memory, four blocks of 128 columns, with 128 bytes of a
token in a block and the swizzle of bulk copies. The left operand of wgmma may come from registers,
and there e4m3 becomes fp16: exactly, one instruction for two values.

Keys are rows of the operand. A thread reads the 32 bytes of a row and block that its conversion
makes into its own part of the operand; which column is which is settled by the order in which the
queries are put down. Values are the transposed operand, columns by tokens: the instruction that
transposes 16-bit elements moves pairs of bytes, and each pair becomes two operands, of even and of
odd columns. Nothing dequantized goes through shared memory.

A scale multiplies what came of its 128 columns: sums of keys x queries after they were added up,
weights before they meet the values.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rorqual.ops.triton.runtime.sm90_pipeline import thread_barrier


@gluon.constexpr_function
def key_layout(tokens, group, parts):
    """Bytes [tokens, group]: of the rows that wgmma gives a thread, 32 in a row."""
    warps = [[16, 0], [32, 0]] + [[0, 0]] * (parts - 1)
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]]
    lanes = [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [tokens, group])


@gluon.constexpr_function
def scale_layout(tokens, groups, parts):
    """Scales [tokens, 4]: all four of the tokens that wgmma gives a thread."""
    warps = [[16, 0], [32, 0]] + [[0, 0]] * (parts - 1)
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], lanes, warps, [], [tokens, groups])


@gluon.jit
def _widen(bytes):
    """e4m3 as fp16, exactly."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
    }""",
        "=r,=r,r",
        [bytes],
        dtype=gl.float16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _widen_pairs(pairs):
    """Pairs of e4m3 in 16 bits as (first of each pair, second of each pair) in fp16, exactly."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 sorted;
        .reg .b16 first, second;
        prmt.b32 sorted, $2, $2, 0x3120;
        mov.b32 {first, second}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, first;
        cvt.rn.f16x2.e4m3x2 $1, second;
    }""",
        "=r,=r,r",
        [pairs],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _clear(tile, first, length, value, LAYOUT: gl.constexpr):
    token = first + gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT))
    tile.store(gl.where((token < length)[:, None], tile.load(LAYOUT), value))


@gluon.jit
def clear_end(
    latents,
    scales,
    ropes,
    first,
    length,
    GROUPS: gl.constexpr,
    COPY: gl.constexpr,
    SCALES: gl.constexpr,
):
    """Rows of a tile past the request's end: they may hold anything, and a weight of zero does
    not cure a NaN."""
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2)
    words = latents._reinterpret(
        gl.int32, [GROUPS, latents.shape[0], latents.shape[1] // GROUPS // 4], WORDS
    )
    for g in range(GROUPS):
        _clear(words.index(g), first, length, 0, COPY)
    _clear(scales, first, length, 1.0, SCALES)
    _clear(ropes, first, length, 0.0, COPY)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def put_queries(
    q_latent,
    q_rope,
    token,
    head,
    ok,
    q_token,
    q_head,
    qr_token,
    qr_head,
    queries,
    query_ropes,
    units,
    COPY: gl.constexpr,
):
    """Into shared memory, the latent part in fp16. Each row is divided by a power of two, which
    goes to `units` [rows].

    Column 32 c + 4 s + 2 u + e of a group goes to 16 s + 8 u + 2 c + e: thread c of four has its
    bytes 32 c to 32 c + 31 of a key, and the operand's columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9
    of every 16."""
    GROUPS: gl.constexpr = queries.shape[0]
    ROWS: gl.constexpr = queries.shape[1]
    GROUP: gl.constexpr = queries.shape[2]
    column = gl.arange(0, GROUP, gl.SliceLayout(0, COPY))
    rope_column = gl.arange(0, query_ropes.shape[1], gl.SliceLayout(0, COPY))
    rows = token * q_token + head * q_head
    rope_rows = token * qr_token + head * qr_head
    rope = gl.load(q_rope + rope_rows[:, None] + rope_column[None, :], mask=ok[:, None], other=0.0)
    parts = ()
    largest = gl.full([ROWS], 1e-18, gl.float32, gl.SliceLayout(1, COPY))
    for g in gl.static_range(GROUPS):
        part = gl.load(
            q_latent + rows[:, None] + (g * GROUP + column)[None, :], mask=ok[:, None], other=0.0
        )
        largest = gl.maximum(largest, gl.max(gl.abs(part.to(gl.float32)), 1))
        parts += (part,)  # type: ignore[assignment]
    unit = gl.exp2(gl.floor(gl.log2(largest)) - 13.0)
    for g in gl.static_range(GROUPS):
        part = (parts[g].to(gl.float32) / unit[:, None]).to(gl.float16)
        part = gl.permute(gl.reshape(part, [ROWS, 4, GROUP // 16, 2, 2]), [0, 2, 3, 1, 4])
        queries.index(g).store(gl.reshape(part, [ROWS, GROUP]))
    query_ropes.store((rope.to(gl.float32) / unit[:, None]).to(gl.bfloat16))
    units.store(unit)
    fence_async_shared()
    thread_barrier()  # here, or Triton puts one into the loop


@gluon.jit
def load_scales(scales, SCALES: gl.constexpr, TOKEN: gl.constexpr):
    """The four scales of each token, [64] each."""
    even, odd = gl.split(gl.reshape(scales.load(SCALES), [scales.shape[0], 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    first = gl.convert_layout(first, TOKEN, assert_trivial=True)
    second = gl.convert_layout(second, TOKEN, assert_trivial=True)
    third = gl.convert_layout(third, TOKEN, assert_trivial=True)
    fourth = gl.convert_layout(fourth, TOKEN, assert_trivial=True)
    return first, second, third, fourth


@gluon.jit
def score(
    latents,
    ropes,
    scale,
    queries,
    query_ropes,
    zero,
    MMA: gl.constexpr,
    KEYS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Queries x keys over the queries' units, [64, rows]. AHEAD groups of columns may be under
    way while the next is being converted."""
    TOKENS: gl.constexpr = latents.shape[0]
    GROUPS: gl.constexpr = queries.shape[0]
    GROUP: gl.constexpr = queries.shape[2]
    none = gl.full([TOKENS, queries.shape[1]], 0.0, gl.float32, MMA)
    keys = latents._reinterpret(gl.uint8, [GROUPS, TOKENS, GROUP], latents.layout)
    rope_scores = warpgroup_mma(
        ropes, query_ropes.permute((1, 0)), none, use_acc=False, is_async=True
    )
    scores = none
    under_way = ()
    bytes = keys.index(0).load(KEYS)
    for g in gl.static_range(GROUPS):
        if g > 0 and AHEAD == 0:  # no registers for reading ahead
            bytes = keys.index(g).load(KEYS)
        left = _widen(bytes)
        left = gl.permute(gl.reshape(left, [TOKENS, 4, GROUP // 16, 2, 2]), [0, 2, 3, 1, 4])
        left = gl.convert_layout(
            gl.reshape(left, [TOKENS, GROUP]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True
        )
        under_way += (
            warpgroup_mma(
                left, queries.index(g + zero).permute((1, 0)), none, use_acc=False, is_async=True
            ),
        )  # type: ignore[assignment]
        if g + 1 < GROUPS and AHEAD > 0:
            bytes = keys.index(g + 1).load(KEYS)
        if g == 0:
            scores = warpgroup_mma_wait(1, deps=[rope_scores])
        if g >= AHEAD:
            scores += (
                warpgroup_mma_wait(AHEAD, deps=[under_way[g - AHEAD]]) * scale[g - AHEAD][:, None]
            )
    for g in gl.static_range(GROUPS - AHEAD, GROUPS):
        scores += warpgroup_mma_wait(GROUPS - 1 - g, deps=[under_way[g]]) * scale[g][:, None]
    return scores


@gluon.jit
def add_values(
    latents,
    weights,
    sums,
    zero,
    GROUP: gl.constexpr,
    WIDE: gl.constexpr,
    MMA: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """sums + values x weights, [64, rows] each: of a group's even columns, of its odd ones, of
    the next group's even ones and so on."""
    GROUPS: gl.constexpr = latents.shape[1] // GROUP
    pairs = latents._reinterpret(gl.int16, [GROUPS, latents.shape[0], GROUP // 2], WIDE)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    under_way = ()
    done = ()
    bytes = pairs.index(0).permute((1, 0)).load(LEFT)
    for g in gl.static_range(GROUPS):
        even, odd = _widen_pairs(bytes)
        even = warpgroup_mma(even, weights[g].index(zero), sums[2 * g], is_async=True)
        odd = warpgroup_mma(odd, weights[g].index(zero), sums[2 * g + 1], is_async=True)
        under_way += (even, odd)  # type: ignore[assignment]
        if g + 1 < GROUPS:
            bytes = pairs.index(g + 1).permute((1, 0)).load(LEFT)
        if g >= AHEAD:
            done += warpgroup_mma_wait(
                2 * AHEAD, deps=[under_way[2 * (g - AHEAD)], under_way[2 * (g - AHEAD) + 1]]
            )
    if AHEAD > 0:
        done += warpgroup_mma_wait(0, deps=[under_way[2 * GROUPS - 2], under_way[2 * GROUPS - 1]])
    return done
