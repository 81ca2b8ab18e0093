"""Memory that every card of a host can read and write: where a peer's buffer lies, and flags that count upwards.

A buffer has the same shape on every rank; `table` [world] int64 holds the addresses of all of them as this rank sees them. A flag is
never reset: who waits knows how far it must have come, and compares by difference, so that it may pass 2^31.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def at(table, peer, start, kind: tl.constexpr):
    """The part of a rank's buffer `start` bytes from its beginning: on a multiple of 16 bytes, which nobody could know from an address
    read from memory."""
    return tl.multiple_of((tl.load(table + peer) + start).to(tl.pointer_type(kind)), 16)


@triton.jit
def await_flags(flags, peer, real, least):
    """Wait until flags[peer] of this rank's own buffer have come to `least` wherever `real`; what their ranks stored before is visible
    then to every thread of the block."""
    nothing = tl.zeros_like(peer)
    behind = tl.full([], 1, tl.int32)
    while behind > 0:
        seen = tl.atomic_add(flags + peer, nothing, mask=real, sem="acquire", scope="sys")
        behind = tl.sum(tl.where(real & (seen - least < 0), 1, 0))
    tl.debug_barrier()  # no thread reads before the slowest has seen all flags
