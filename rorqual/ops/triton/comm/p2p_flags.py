"""Memory that every GPU of a host can read and write: where a peer's buffer lies, and flags that
count upwards.

A buffer has the same shape on every rank; `table` [world + 1] int64 holds the addresses of all of
them as this rank sees them, and of its stop word last. A flag is never reset: who waits knows how
far it must have come, and compares by difference, so that it may pass 2^31.

The stop word, int32 in host memory, is 0 as long as all ranks live. Anything else ends every wait,
and what is computed then means nothing: it is how the host gets its GPU back when a rank has died
whose flag would never come.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rorqual.ops.triton.runtime.launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def at(table, peer, start, kind: tl.constexpr):
    """The part of a rank's buffer `start` bytes from its beginning: on a multiple of 16 bytes,
    which nobody could know from an address read from memory."""
    return tl.multiple_of((tl.load(table + peer) + start).to(tl.pointer_type(kind)), 16)


@triton.jit
def look(flags, real, least, LOADS: tl.constexpr):
    """What flags say, and acquire what was stored before them; anything where not `real`. LOADS: by
    loads of the first warp; the others are told `least` and wait at the next barrier. An addition
    of 0 keeps the memory's atomic unit busy, in which the flags of other GPUs come in."""
    if LOADS and not _INTERPRETED:
        seen = tl.inline_asm_elementwise(
            """
            {
                .reg .pred %look;
                .reg .b32 %thread;
                mov.u32 %thread, %tid.x;
                setp.lt.u32 %look, %thread, 32;
                setp.ne.and.b32 %look, $2, 0, %look;
                mov.b32 $0, $3;
                @%look ld.acquire.sys.global.b32 $0, [$1];
            }
            """,
            "=&r,l,r,r,~{memory}",
            [flags.to(tl.int64), real.to(tl.int32), least],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        seen = tl.atomic_add(flags, tl.zeros_like(least), mask=real, sem="acquire", scope="sys")
    return seen


@triton.jit
def await_flags(table, flags, peer, real, least, WORLD: tl.constexpr, LOADS: tl.constexpr = False):
    """Wait until flags[peer] of this rank's own buffer have come to `least` wherever `real`;
    what their ranks stored before is visible then to every thread of the block. LOADS: as `look`
    has it."""
    least = tl.zeros_like(peer) + least
    looked = 0
    behind = tl.full([], 1, tl.int32)
    while behind > 0:
        seen = look(flags + peer, real, least, LOADS)
        behind = tl.sum(tl.where(real & (seen - least < 0), 1, 0))
        looked += 1
        if looked % 256 == 0:  # seldom: the stop word is read over the host's bus
            stop = tl.load(table + WORLD).to(tl.pointer_type(tl.int32))
            behind = tl.where(tl.load(stop, volatile=True) == 0, behind, 0)
    tl.debug_barrier()  # no thread reads before the slowest has seen all flags
