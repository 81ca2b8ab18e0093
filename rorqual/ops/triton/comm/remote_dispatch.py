"""Dispatch of rows to expert servers, which are other processes of this host, and combine, over
memory that the GPUs of both sides read and write.

Each pair of a caller and a server has two buffers per lane (a lane has one call in flight): the
server's inbox, which the caller writes, and the caller's home, which the server writes. One call
has four kernels: `dispatch` sends, `arrive` waits for it at the server and maps ids to slots,
`send_home` returns the sums, `combine` waits for all servers and adds.

| inbox   | bytes               | home    | bytes                              |
| ------- | ------------------- | ------- | ---------------------------------- |
| head    | 256                 | head    | 256                                |
| data    | rows * columns * item | sums  | rows * columns * item              |
| scales  | 4 * rows * columns/128 |      |                                    |
| ids     | 4 * rows * top_k    |         |                                    |
| weights | 4 * rows * top_k    |         |                                    |

A head has three int32: completed rows of the other side's kernels, never reset; the value that this
count must reach, which only the buffer's owner writes; and whether the server lacked an expert of
the call.

Row i of every buffer is the caller's row i: a call has equally many rows on both sides, as captured
graphs need anyway, and rows that were not sent to a server are skipped there, as their ids are -1.
All ids of all rows are written at each call.

Several programs handle a row. Programs count themselves in memory of their own GPU, and the last
one adds the call's rows to the other side's flag: one addition over the link instead of hundreds to
one address, each after its own fence. A program's stores are released by its addition to the count,
which the last one acquires and releases with the flag (release and acquire are transitive, also
from GPU scope to system scope, as all counting programs are on one GPU). With few unquantized rows
each row is one program, which adds 1 itself and saves a memory round trip.

`table` (caller) has the servers' addresses: inboxes [SERVERS] (0: none), homes [SERVERS], the stop
word, the report word, all int64. `holders` [E] int64 of a layer has, per expert, the number of its
servers << 32 and their numbers, 4 bits each. Both change in place between steps, so captured graphs
stay valid. All experts of a row use the same turn, so a row goes to only one of two servers with
the same experts.

Tables are written by copies. A copy starts after all earlier kernels have ended and ends before the
next one starts, so kernels may read `table` before they wait for the previous kernel. Nothing else
may be read that early: three kernels may be on a GPU at once, and the one before the previous may
still be running.

No data is overwritten while the other side reads it. Calls of a lane have one order, on one stream
on each side:

- the inbox is written by the caller's next `dispatch`, which follows its `combine`, which waited
  for the server's `send_home`, which follows all reads of its experts.
- home is written by the server's next `send_home`, which follows its `arrive`, which waited for the
  caller's next `dispatch`, which follows `combine`, the reader. For this all servers must answer
  every call, even without rows.
- after a wait was cut short by the stop word, data is invalid and not used; counts still match,
  since every kernel of the step still runs.

Ids are logical, and the server checks on its device whether it holds them, so no address or slot
from another process is used as an index.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rorqual.ops.padded_rows import PaddedRows
from rorqual.ops.reference import ACTIVATION_BLOCK, FP8
from rorqual.ops.triton.comm.p2p_flags import await_flags
from rorqual.ops.triton.rowwise.quantize import to_fp8
from rorqual.ops.triton.runtime.launch import dependent, next_power, wait_for_inputs
from rorqual.ops.triton.runtime.padding import padding, real_rows

HEAD = 256  # bytes
SERVERS = 8  # most servers of a caller
NUMBER_BITS = 4  # bits of a server's number in `holders`
IDS_AT_ONCE = (512, 2048)
FEW_ROWS = 8  # up to so many unquantized rows: one program per row, which sets flags itself
SOME_ROWS = 64  # up to so many rows use the first of COLUMNS_AT_ONCE, more rows the second
COLUMNS_AT_ONCE = (1024, 2048)


def _ends(lengths: tuple[int, ...]) -> tuple[int, ...]:
    found = [HEAD]
    for length in lengths:
        found.append(found[-1] + -(-length // 256) * 256)
    return tuple(found)


@dataclass(frozen=True)
class LaneAreas:
    """Offsets of the parts of a lane's buffers, in bytes. rows: most rows of a call. itemsize: of
    hidden states."""

    rows: int
    columns: int
    top_k: int
    itemsize: int

    @property
    def inbox(self) -> tuple[int, ...]:
        """(data, scales, ids, weights, end)"""
        picks = 4 * self.rows * self.top_k
        scales = 4 * self.rows * -(-self.columns // ACTIVATION_BLOCK)
        return _ends((self.rows * self.columns * self.itemsize, scales, picks, picks))

    @property
    def inbox_size(self) -> int:
        return self.inbox[-1]

    @property
    def home_size(self) -> int:
        return _ends((self.rows * self.columns * self.itemsize,))[-1]


@triton.jit
def _set_flags(done, flags, real, rows, COUNTED: tl.constexpr):
    """Publish this kernel's stores through the other side's `flags`. COUNTED: programs count
    themselves in `done`, local memory that is 0 before and after, and the last one adds `rows`.
    Otherwise each program is one row and adds 1."""
    tl.debug_barrier()  # all threads' stores come before the count and the flags
    if COUNTED:
        programs = tl.num_programs(0) * tl.num_programs(1)
        # releases this program's stores; the last one acquires all others'
        before = tl.atomic_add(done, 1, sem="acq_rel", scope="gpu")
        if before == programs - 1:
            tl.debug_barrier()  # threads that set flags run after the one that acquired
            tl.atomic_add(flags, tl.where(real, rows, 0), mask=real, sem="release", scope="sys")
            tl.store(done, 0)
    else:
        tl.atomic_add(flags, real.to(tl.int32), mask=real, sem="release", scope="sys")


@triton.jit(do_not_specialize=["rows", "turn", "each_rows", "first_row"])
def _dispatch_kernel(
    table,
    holders,
    x,
    ids,
    weights,
    sent,
    done,
    requests,
    each_rows,
    first_row,
    rows,
    columns,
    x_row,
    turn,
    data_at,
    scales_at,
    ids_at,
    weights_at,
    TOP_K: tl.constexpr,
    PICKS: tl.constexpr,
    SIZE: tl.constexpr,
    SERVERS: tl.constexpr,
    BITS: tl.constexpr,
    QUANT: tl.constexpr,
    UE8M0: tl.constexpr,
    COUNTED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (i, j) sends part j of row i to each server that holds any of its experts; programs
    (i, 0) send its ids to all servers, -1 if the row is padding."""
    server = tl.arange(0, SERVERS)
    inboxes = tl.load(table + server)  # no kernel writes it
    homes = tl.load(table + SERVERS + server)
    used = inboxes != 0
    real = real_rows(rows, requests, each_rows, first_row)  # no kernel writes `requests`
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0)
    part = tl.program_id(1)
    pick = tl.arange(0, PICKS)
    offsets = part * SIZE + tl.arange(0, SIZE)
    mine = pick < TOP_K
    inside = offsets < columns
    first = (row == 0) & (part == 0)
    # on their way together
    values = tl.load(x + row.to(tl.int64) * x_row + offsets, mask=inside, other=0.0)
    expert = tl.load(ids + row * TOP_K + pick, mask=mine & (row < real), other=-1).to(tl.int32)
    weight = tl.load(weights + row * TOP_K + pick, mask=mine, other=0.0)
    # for `combine`, which waits for this whole kernel
    due = (homes + 4).to(tl.pointer_type(tl.int32))
    tl.store(due, tl.load(due, mask=used & first, other=0) + rows, mask=used & first)
    known = tl.load(holders + expert, mask=expert >= 0, other=0)
    # while holders are on their way
    scales = values
    if QUANT:
        values, scales = to_fp8(values.to(tl.float32), SIZE // 128, UE8M0, True)
        values = tl.reshape(values, (SIZE,))
    count = (known >> 32).to(tl.int32)
    place = (row + turn) % tl.maximum(count, 1)
    holder = (known >> (BITS * place).to(tl.int64)).to(tl.int32) & ((1 << BITS) - 1)
    holder = tl.where(count > 0, holder, -1)
    wants = holder[None, :] == server[:, None]
    goes = tl.max(wants.to(tl.int32), 1)
    to = tl.sum(goes << server)

    for step in range(SERVERS):
        peer = (row + step) % SERVERS  # rows start with different servers
        if ((to >> peer) & 1) > 0:
            data = (tl.load(table + peer) + data_at).to(tl.pointer_type(values.dtype))
            data = tl.multiple_of(data, 16) + row.to(tl.int64) * columns
            tl.store(data + offsets, values, mask=inside)
    if QUANT:
        block = part * (SIZE // 128) + tl.arange(0, SIZE // 128)
        blocks = (columns + 127) // 128
        factors = (inboxes + scales_at).to(tl.pointer_type(tl.float32)) + row * blocks
        tl.store(
            factors[:, None] + block[None, :],
            tl.broadcast_to(scales[None, :], (SERVERS, SIZE // 128)),
            mask=(goes > 0)[:, None] & (block < blocks)[None, :],
        )
    if part == 0:  # after the data, which takes longest
        tl.store(sent + row, to)
        topk_offsets = tl.broadcast_to((row * TOP_K + pick)[None, :], (SERVERS, PICKS))
        there = used[:, None] & mine[None, :]
        tl.store(
            (inboxes + ids_at).to(tl.pointer_type(tl.int32))[:, None] + topk_offsets,
            tl.where(wants, tl.broadcast_to(expert[None, :], (SERVERS, PICKS)), -1),
            mask=there,
        )
        tl.store(
            (inboxes + weights_at).to(tl.pointer_type(tl.float32))[:, None] + topk_offsets,
            tl.broadcast_to(weight[None, :], (SERVERS, PICKS)),
            mask=there,
        )
        homeless = tl.max(tl.where((expert >= 0) & (count == 0), 1, 0))
        if homeless > 0:
            tl.store(tl.load(table + 2 * SERVERS + 1).to(tl.pointer_type(tl.int32)), 1)
    _set_flags(done, inboxes.to(tl.pointer_type(tl.int32)), used, rows, COUNTED)


@triton.jit(do_not_specialize=["rows"])
def _remote_arrival_kernel(
    table,
    places,
    local,
    rows,
    experts,
    ids_at,
    TOP_K: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program. Later kernels may start only after everything has arrived: otherwise they might
    cache memory that changes while this one waits. They start while ids are mapped."""
    inbox = tl.load(table)  # no kernel writes it
    if DEPENDENT:
        gdc_wait()
    one = tl.arange(0, 1)
    due = (inbox + 4).to(tl.pointer_type(tl.int32))
    least = tl.load(due) + rows
    await_flags(table, inbox.to(tl.pointer_type(tl.int32)), one, one < 1, least, 2, LOADS=True)
    if DEPENDENT:
        gdc_launch_dependents()
    ids = tl.multiple_of((inbox + ids_at).to(tl.pointer_type(tl.int32)), 16)
    total = rows * TOP_K
    missed = tl.full([CHUNK], 0, tl.int32)
    for start in range(0, total, CHUNK):
        offsets = start + tl.arange(0, CHUNK)
        expert = tl.load(ids + offsets, mask=offsets < total, other=-1, cache_modifier=".cg")
        known = (expert >= 0) & (expert < experts)
        slot = tl.load(places + expert, mask=known, other=-1).to(tl.int32)
        tl.store(local + offsets, slot, mask=offsets < total)
        missed |= ((expert >= 0) & (slot < 0)).to(tl.int32)
    tl.store(due, least)
    tl.store((inbox + 8).to(tl.pointer_type(tl.int32)), tl.max(missed))


@triton.jit(do_not_specialize=["rows"])
def _send_home_kernel(
    table,
    local,
    y,
    done,
    rows,
    columns,
    sums_at,
    TOP_K: tl.constexpr,
    PICKS: tl.constexpr,
    SIZE: tl.constexpr,
    COUNTED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (i, j) returns part j of row i, if any of its experts was computed here."""
    inbox = tl.load(table)  # no kernel writes it
    home = tl.load(table + 1)
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0)
    part = tl.program_id(1)
    first = (row == 0) & (part == 0)
    pick = tl.arange(0, PICKS)
    offsets = part * SIZE + tl.arange(0, SIZE)
    kind: tl.constexpr = y.dtype.element_ty
    start = row.to(tl.int64) * columns
    # on their way together
    slot = tl.load(local + row * TOP_K + pick, mask=pick < TOP_K, other=-1)
    missed = tl.load((inbox + 8).to(tl.pointer_type(tl.int32)), mask=first, other=0)
    values = tl.load(y + start + offsets, mask=offsets < columns)
    if tl.max(slot) >= 0:
        target = tl.multiple_of((home + sums_at).to(tl.pointer_type(kind)), 16) + start
        tl.store(target + offsets, values, mask=offsets < columns)
    tl.store((home + 8).to(tl.pointer_type(tl.int32)), missed, mask=first)
    flags = home.to(tl.pointer_type(tl.int32)) + tl.arange(0, 1)
    _set_flags(done, flags, tl.full([1], 1, tl.int1), rows, COUNTED)


@triton.jit
def _remote_combine_kernel(
    table,
    sent,
    halt,
    base,
    out,
    columns,
    sums_at,
    SIZE: tl.constexpr,
    SERVERS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Part j of out[i] = the sum of row i's partial sums, in fp32 and in server order, rounded, and
    base[i]."""
    server = tl.arange(0, SERVERS)
    homes = tl.load(table + SERVERS + server)  # no kernel writes it
    bases = ()  # computed before the wait, so that sums can be read right after it
    for peer in tl.static_range(SERVERS):
        home = tl.load(table + SERVERS + peer)
        bases = bases + (home,)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0)
    part = tl.program_id(1)
    offsets = part * SIZE + tl.arange(0, SIZE)
    used = homes != 0
    due = tl.load((homes + 4).to(tl.pointer_type(tl.int32)), mask=used, other=0)
    flags = homes.to(tl.pointer_type(tl.int32))
    to = tl.load(sent + row)
    start = row.to(tl.int64) * columns
    more = tl.zeros([SIZE], tl.float32)
    if base is not None:
        more = tl.load(base + start + offsets, mask=offsets < columns, other=0.0).to(tl.float32)
    first = (row == 0) & (part == 0)
    zeros = tl.zeros_like(server)
    await_flags(table, flags, zeros, used, due, 2 * SERVERS, True, halt, first)
    kind: tl.constexpr = out.dtype.element_ty
    total = tl.zeros([SIZE], tl.float32)
    for peer in tl.static_range(SERVERS):
        sums = tl.multiple_of((bases[peer] + sums_at).to(tl.pointer_type(kind)), 16)
        found = tl.load(
            sums + start + offsets,
            mask=(offsets < columns) & (((to >> peer) & 1) > 0),
            other=0.0,
            cache_modifier=".cg",
        )
        total += found.to(tl.float32)
    if base is not None:
        total = total.to(kind).to(tl.float32) + more
    tl.store(out + start + offsets, total.to(kind), mask=offsets < columns)
    if first:
        missed = tl.load(
            (homes + 8).to(tl.pointer_type(tl.int32)), mask=used, other=0, cache_modifier=".cg"
        )
        if tl.max(missed) > 0:
            tl.store(tl.load(table + 2 * SERVERS + 1).to(tl.pointer_type(tl.int32)), 1)


@triton.jit
def _note_kernel(table, out, own, SERVERS: tl.constexpr):
    """Both words are in host memory, written by the host or by earlier kernels."""
    stop = tl.load(tl.load(table + 2 * SERVERS).to(tl.pointer_type(tl.int32)), volatile=True)
    report = tl.load(tl.load(table + 2 * SERVERS + 1).to(tl.pointer_type(tl.int32)), volatile=True)
    tl.store(out, ((stop != 0) | (report != 0) | (own != 0)).to(tl.int32))


@dataclass(frozen=True, eq=False)
class CallerLane:
    """table [2 * SERVERS + 2] int64. sent [areas.rows] int32: bit mask of the servers to which each
    row of the current call was sent. done [1] int32, 0 between kernels. halt [1] int32: set by a
    wait that the stop word ended; 0 once the host has cleared both."""

    areas: LaneAreas
    table: Tensor
    sent: Tensor
    done: Tensor
    halt: Tensor


@dataclass(frozen=True, eq=False)
class ServerLane:
    """table [3] int64: addresses of the inbox, of home and of the stop word. inbox [inbox_size]
    uint8. local [rows, top_k] int32. done [1] int32, 0 between kernels."""

    areas: LaneAreas
    table: Tensor
    inbox: Tensor
    local: Tensor
    done: Tensor


def pack_holders(numbers: list[int]) -> int:
    """The entry of `holders` for one expert."""
    assert len(numbers) <= SERVERS
    return (len(numbers) << 32) + sum(
        number << (NUMBER_BITS * place) for place, number in enumerate(numbers)
    )


def dispatch(
    lane: CallerLane,
    holders: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    turn: int,
    fp8: bool = False,
    padded: PaddedRows | None = None,
    ue8m0: bool = False,
) -> None:
    """Send x [T, columns] with logical ids [T, K] int32 or int64 and weights [T, K] fp32; T from 1
    to areas.rows. turn: of the first row, for the choice among several servers of an expert. fp8:
    quantize as quantize_activation, with ue8m0 by powers of two. padded: some of the last rows are
    padding, which no server computes; its sums are 0."""
    areas = lane.areas
    (rows, columns) = x.shape
    assert 0 < rows <= areas.rows, (rows, areas)
    assert (columns, ids.shape[1]) == (areas.columns, areas.top_k), (x.shape, ids.shape, areas)
    assert x.stride(1) == 1
    assert x.element_size() == areas.itemsize
    counted = fp8 or rows > FEW_ROWS
    size = _columns_at_once(rows, columns, counted)
    _dispatch_kernel[rows, triton.cdiv(columns, size)](
        lane.table,
        holders,
        x,
        ids.contiguous(),
        weights.contiguous(),
        lane.sent,
        lane.done,
        *padding(padded),
        rows,
        columns,
        x.stride(0),
        turn,
        *areas.inbox[:4],
        areas.top_k,
        next_power(areas.top_k),
        size,
        SERVERS,
        NUMBER_BITS,
        fp8,
        ue8m0,
        counted,
        num_warps=_warps(size),
        **dependent(x.device),
    )


def arrive(lane: ServerLane, places: Tensor, rows: int) -> None:
    """Wait, on the stream, until a call of `rows` rows has arrived, and map its ids with `places`
    [>= E]: the slot of each expert, or -1."""
    areas = lane.areas
    (few, many) = IDS_AT_ONCE
    at_once = few if rows * areas.top_k <= few else many
    _remote_arrival_kernel[1,](
        lane.table,
        places,
        lane.local,
        rows,
        places.shape[0],
        areas.inbox[2],
        areas.top_k,
        at_once,
        num_warps=at_once // 128,
        **dependent(lane.table.device),
    )


def arrived(
    lane: ServerLane, rows: int, dtype: torch.dtype, fp8: bool = False
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """((rows [rows, columns],) or (e4m3 rows, scales), slots, weights [rows, K]): views. A row that
    was not sent here has only -1 slots and stale data."""
    areas = lane.areas
    (data, scales, _, weights, _) = areas.inbox

    def part(start: int, columns: int, kind: torch.dtype) -> Tensor:
        end = start + rows * columns * kind.itemsize
        return lane.inbox[start:end].view(kind).view(rows, columns)

    topk = lane.local[:rows], part(weights, areas.top_k, torch.float32)
    if not fp8:
        return (part(data, areas.columns, dtype),), *topk
    blocks = -(-areas.columns // ACTIVATION_BLOCK)
    return (part(data, areas.columns, FP8), part(scales, blocks, torch.float32)), *topk


def send_home(lane: ServerLane, y: Tensor) -> None:
    """Return the sums y [rows, columns] to the caller, except of rows that were not sent here."""
    areas = lane.areas
    (rows, columns) = y.shape
    assert rows <= areas.rows, (rows, areas)
    assert columns == areas.columns, (y.shape, areas)
    assert y.element_size() == areas.itemsize
    assert y.is_contiguous()
    counted = rows > FEW_ROWS
    size = _columns_at_once(rows, columns, counted)
    _send_home_kernel[rows, triton.cdiv(columns, size)](
        lane.table,
        lane.local,
        y,
        lane.done,
        rows,
        columns,
        HEAD,
        areas.top_k,
        next_power(areas.top_k),
        size,
        counted,
        num_warps=_warps(size),
        **dependent(y.device),
    )


def combine(lane: CallerLane, like: Tensor, base: Tensor | None = None) -> Tensor:
    """The sums of the rows, [T, columns], with the shape and dtype of `like`, the dispatched hidden
    states. base: added to the rounded sums."""
    (rows, columns) = like.shape
    assert base is None or (base.shape == like.shape and base.is_contiguous())
    out = torch.empty(rows, columns, dtype=like.dtype, device=like.device)
    size = _columns_at_once(rows, columns, True)
    _remote_combine_kernel[rows, triton.cdiv(columns, size)](
        lane.table,
        lane.sent,
        lane.halt,
        base,
        out,
        columns,
        HEAD,
        size,
        SERVERS,
        num_warps=_warps(size),
        **dependent(out.device),
    )
    return out


def note(lane: CallerLane, own: bool, out: Tensor) -> None:
    """Set out [1] int32 to 1 if a wait of earlier kernels may have been cut short, if one of them
    reported an expert without a server, or if `own`; else to 0."""
    _note_kernel[1,](lane.table, out, int(own), SERVERS)


def _columns_at_once(rows: int, columns: int, parts: bool) -> int:
    """Columns of a program, a power of 2 of at least 128. parts: whether several programs may share
    a row."""
    whole = max(128, next_power(columns))
    return min(whole, COLUMNS_AT_ONCE[rows > SOME_ROWS]) if parts else whole


def _warps(size: int) -> int:
    return min(8, max(1, size // 256))
