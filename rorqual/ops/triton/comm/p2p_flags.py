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


@triton.jit
def at(table, peer, start, kind: tl.constexpr):
    """The part of a rank's buffer `start` bytes from its beginning: on a multiple of 16 bytes,
    which nobody could know from an address read from memory."""
    return tl.multiple_of((tl.load(table + peer) + start).to(tl.pointer_type(kind)), 16)


@triton.jit
def await_flags(table, flags, peer, real, least, WORLD: tl.constexpr):
    """Wait until flags[peer] of this rank's own buffer have come to `least` wherever `real`;
    what their ranks stored before is visible then to every thread of the block."""
    nothing = tl.zeros_like(peer)
    looked = 0
    behind = tl.full([], 1, tl.int32)
    while behind > 0:
        seen = tl.atomic_add(flags + peer, nothing, mask=real, sem="acquire", scope="sys")
        behind = tl.sum(tl.where(real & (seen - least < 0), 1, 0))
        looked += 1
        if looked % 256 == 0:  # seldom: the stop word is read over the host's bus
            stop = tl.load(table + WORLD).to(tl.pointer_type(tl.int32))
            behind = tl.where(tl.load(stop, volatile=True) == 0, behind, 0)
    tl.debug_barrier()  # no thread reads before the slowest has seen all flags
