"""Memory that every GPU of a host can read and write: addresses of peers' buffers, and monotonic
flags.

A buffer has the same shape on every rank; `table` [world + 1] int64 has the addresses of all
buffers in this rank's address space, and last that of its stop word. Flags are never reset: a
waiting kernel knows the value to reach, and compares by difference, so that flags may pass 2^31.

The stop word, int32 in host memory, is 0 while all ranks are alive. Any other value ends every
wait, and results are then invalid: this is how the host gets its GPU back when a rank has died.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rorqual.ops.triton.runtime.launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def at(table, peer, start, kind: tl.constexpr):
    """Pointer to byte `start` of a rank's buffer, with the hint that it is 16-byte aligned, which
    the compiler cannot know of an address loaded from memory."""
    return tl.multiple_of((tl.load(table + peer) + start).to(tl.pointer_type(kind)), 16)


@triton.jit
def look(flags, real, least, LOADS: tl.constexpr):
    """Read flags with acquire semantics; any value if not `real`. LOADS: with loads of the first
    warp only; other warps get `least` and wait at the next barrier. Otherwise with an atomic
    addition of 0, which uses the memory's atomic unit, where other GPUs' flags arrive too."""
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
def _stop_word(table, halt, first, WORLD: tl.constexpr):
    """0 while waits go on; see await_flags."""
    stop = tl.load(table + WORLD).to(tl.pointer_type(tl.int32))
    if halt is None:
        word = tl.load(stop, volatile=True)
    else:
        if first:
            found = tl.load(stop, volatile=True) != 0
            tl.store(halt, found.to(tl.int32), mask=found)
        word = tl.load(halt, volatile=True)
    return word


@triton.jit
def await_flags(
    table,
    flags,
    peer,
    real,
    least,
    WORLD: tl.constexpr,
    LOADS: tl.constexpr = False,
    halt=None,
    first=True,
):
    """Wait until flags[peer] of this rank's own buffer reach `least` for all `real` ones.
    Everything that their ranks stored before is then visible to all threads of the block. LOADS:
    see `look`.

    halt: for many programs that wait at once, int32 in this GPU's memory. Only the `first` one,
    which must be program 0, then reads the stop word, and passes a stop on in `halt`, which the
    host sets to 0 together with the stop word: reads of one word of host memory queue, for about
    half a microsecond each, and the last program would wait for all others' reads."""
    least = tl.zeros_like(peer) + least
    looked = 0
    behind = tl.full([], 1, tl.int32)
    while behind > 0:
        seen = look(flags + peer, real, least, LOADS)
        behind = tl.sum(tl.where(real & (seen - least < 0), 1, 0))
        looked += 1
        if looked % 256 == 0:  # rarely: the stop word is in host memory
            behind = tl.where(_stop_word(table, halt, first, WORLD) == 0, behind, 0)
    tl.debug_barrier()  # no thread reads data before all threads have seen the flags
