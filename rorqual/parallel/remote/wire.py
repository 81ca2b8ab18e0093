"""Messages between an attention process and an expert server. No torch.

Each pair has one control link and a few data links; every link begins as link.py says and goes on
with

    caller -> JOIN       JSON: {"lane": null} (control), {"lane": N}, {"lane": "handles"} or
                         {"lane": "group"}, and for all but a number "caller": which process, 32
                         hexadecimal digits

On the control link:

    server -> HOLDINGS   JSON: {"version", "max_rows", "max_slots", "finished", "failure",
                         "layers": {number of a layer: experts "0-63,70"}}
    caller -> PING       a number, and the version of the holdings by which it calls
    server -> PONG       the number, and the version that is true now; HOLDINGS follow where it
                         is another
    caller -> ORDER      JSON: {"number", "layers": {layer: ["drop" experts, "load" experts]}}
    server -> ORDERED    a sentence where it refuses, else nothing

On a data link one call is in flight at most:

    caller -> CALL, then ids [rows, top_k] int32 (-1: another server's), weights [rows, top_k] fp32,
              rows [rows, hidden]; in e4m3 with fp32 scales [rows, hidden / 128] behind
    server -> REPLY, then the weighted sums [rows, hidden] in the model's dtype; or an error of
              `rows` bytes, after which it ends the link; or as many bytes that say which expert it
              does not hold (any more), after which the link goes on

On the link of shared memory (handles.py), where both sides have it:

    caller -> LANES      JSON: the layout of calls, and where the server gets the descriptor of the
                         memory that it writes sums into (LanesOffer)
    server -> LANES_MADE JSON: where the caller gets that of the memory for rows; or why not
    caller -> STEP       what is to be computed next by each lane (pack_step), before the caller's
                         kernels send the rows of it; there is no answer

Messages on the link of a process group are in group/messages.py.

Sizes follow from the heads alone, so a call is one write and its reply is another. Numbers in heads
are in network order, in tensors little-endian."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from rorqual.parallel.remote.link import LinkError

PURPOSE = "experts"
MAX_LANES = 8
MAX_TOP_K = 64
MAX_ERROR = 1000  # bytes
MAX_HOLDINGS = 2**20
MAX_ORDER = 2**20
MAX_FAILURE = 1000  # bytes
MAX_LANES_BYTES = 4096
MAX_REASON = 500  # characters
MAX_STEP = 2**16  # bytes
MAX_CALLS = 4096  # of a lane in a step
MAX_SHARED_ROWS = 2**14  # of a call over shared memory
HANDLES = "handles"
GROUP = "group"
PING = struct.Struct("!QQ")
SCALE_COLUMNS = 128
NONE = "none"
HOLDING_NUMBERS = ("max_rows", "max_slots", "version", "finished")


class ExpertMessage(IntEnum):
    """Numbers below are those of LinkMessage."""

    JOIN = 5
    HOLDINGS = 6
    PING = 7
    PONG = 8
    ORDER = 9
    ORDERED = 10
    LANES = 11
    LANES_MADE = 12
    STEP = 13
    GROUP = 14
    GROUP_MADE = 15
    GROUP_BEGIN = 16
    GROUP_READY = 17
    GROUP_END = 18
    STORE = 19
    STORED = 20


class CallOutcome(IntEnum):
    """Of a call."""

    DONE = 0
    FAILED = 1
    MOVED = 2


class RowFormat(IntEnum):
    """In what hidden states are sent."""

    MODEL = 0
    FP8 = 1


@dataclass(frozen=True)
class CallHead:
    """sequence: of the call on its link."""

    sequence: int
    layer: int
    rows: int
    top_k: int
    form: int

    FORM = struct.Struct("!4sIIIHH")
    MAGIC = b"call"

    def pack(self) -> bytes:
        return self.FORM.pack(
            self.MAGIC, self.sequence, self.layer, self.rows, self.top_k, self.form
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray, max_rows: int) -> CallHead:
        """Raises LinkError for what no caller sends."""
        magic, *numbers = cls.FORM.unpack(data)
        head = cls(*numbers)
        if magic != cls.MAGIC:
            raise LinkError("what came is no call")
        if not 0 < head.rows <= max_rows:
            raise LinkError(f"a call of {head.rows} rows came; accepted: 1 to {max_rows}")
        if not 0 < head.top_k <= MAX_TOP_K:
            raise LinkError(f"a call with top_k={head.top_k} came; accepted: 1 to {MAX_TOP_K}")
        if head.form not in RowFormat.__members__.values():
            raise LinkError(f"rows of format {head.form} came")
        return head

    def sizes(self, hidden: int, itemsize: int) -> list[int]:
        """Bytes of ids, weights, rows, and scales where there are any."""
        topk = 4 * self.rows * self.top_k
        if self.form == RowFormat.FP8:
            scales = 4 * self.rows * -(-hidden // SCALE_COLUMNS)
            return [topk, topk, self.rows * hidden, scales]
        return [topk, topk, self.rows * hidden * itemsize]


@dataclass(frozen=True)
class ReplyHead:
    """rows: of the answer, or bytes of an error. busy: microseconds it took."""

    sequence: int
    rows: int
    busy: int
    outcome: int

    FORM = struct.Struct("!4sIIIB3x")
    MAGIC = b"sums"

    def pack(self) -> bytes:
        return self.FORM.pack(self.MAGIC, self.sequence, self.rows, self.busy, self.outcome)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> ReplyHead:
        """Raises LinkError for what no server sends."""
        magic, *numbers = cls.FORM.unpack(data)
        head = cls(*numbers)
        if magic != cls.MAGIC:
            raise LinkError("what came is no reply")
        if head.outcome not in CallOutcome.__members__.values():
            raise LinkError(f"a reply of outcome {head.outcome} came")
        if head.outcome and head.rows > MAX_ERROR:
            raise LinkError(f"an error of {head.rows} bytes came; accepted: at most {MAX_ERROR}")
        return head


@dataclass(frozen=True)
class Join:
    """What a link is for: a lane's calls, None: control, HANDLES: shared memory, GROUP: process
    groups. caller: which process; nothing where it does not say."""

    lane: int | str | None
    caller: str = ""

    def pack(self) -> bytes:
        named = {"caller": self.caller} if self.caller else {}
        return json.dumps({"lane": self.lane, **named}).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Join:
        """Raises LinkError."""
        found = json_object(data)
        lane = found.get("lane", "")
        caller = found.get("caller", "")
        numbered = type(lane) is int and 0 <= lane < MAX_LANES
        if not (lane is None or lane in (HANDLES, GROUP) or numbered):
            raise LinkError(f"lane {str(lane)[:20]!r} is none; accepted: 0 to {MAX_LANES - 1}")
        if not isinstance(caller, str) or not re.fullmatch("([0-9a-f]{32})?", caller):
            raise LinkError("a caller's name is not 32 hexadecimal digits")
        if lane in (HANDLES, GROUP) and not caller:
            raise LinkError("a link for shared memory or for a group needs the caller's name")
        return cls(lane, caller)  # type: ignore[arg-type]


def join(lane: int | str | None, caller: str = "") -> bytes:
    return Join(lane, caller).pack()


@dataclass(frozen=True)
class BlockName:
    """Where a descriptor of shared memory is to be had (shared/handle_passing.py): the name of a
    socket and a token, in hexadecimal."""

    name: str
    token: str

    @classmethod
    def read(cls, found: dict[str, object]) -> BlockName:
        """Raises LinkError."""
        name = found.get("name")
        token = found.get("token")
        for value in (name, token):
            if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{32}", value):
                raise LinkError("an invalid name of shared memory")
        return cls(str(name), str(token))


def lanes_made(block: BlockName) -> bytes:
    """block: the memory for rows, of all lanes."""
    return json.dumps(vars(block)).encode()


def lanes_refused(reason: str) -> bytes:
    return json.dumps({"why": reason[:MAX_REASON]}).encode()


def read_lanes_made(data: bytes) -> BlockName:
    """Raises LinkError, with the reason where there are none."""
    found = json_object(data)
    if found.get("why"):
        raise LinkError(str(found["why"])[:MAX_REASON])
    return BlockName.read(found)


@dataclass(frozen=True)
class LanesOffer:
    """host: a number that processes of one running host share. rows: of a call, at most; columns
    and dtype of hidden states. block: the memory that sums are written into, of all lanes."""

    host: int
    lanes: int
    rows: int
    columns: int
    top_k: int
    fp8: bool
    dtype: str
    block: BlockName

    def pack(self) -> bytes:
        own = {name: value for name, value in vars(self).items() if name != "block"}
        return json.dumps({**own, **vars(self.block)}).encode()

    @classmethod
    def unpack(cls, data: bytes) -> LanesOffer:
        """Raises LinkError."""
        found = json_object(data)
        most = {
            "lanes": MAX_LANES,
            "rows": MAX_SHARED_ROWS,
            "columns": 2**20,
            "top_k": MAX_TOP_K,
            "host": 2**63,
        }
        values: dict[str, Any] = {}
        for name, limit in most.items():
            value = found.get(name)
            if type(value) is not int or not (name == "host" or value > 0) or value > limit:
                raise LinkError(f"lanes were offered with {name} {str(value)[:20]}")
            values[name] = value
        fp8 = found.get("fp8")
        dtype = found.get("dtype")
        if type(fp8) is not bool or not isinstance(dtype, str):
            raise LinkError("invalid lanes were offered")
        return cls(fp8=fp8, dtype=dtype[:20], block=BlockName.read(found), **values)


@dataclass(frozen=True)
class SharedCall:
    """One layer's experts for so many rows."""

    layer: int
    rows: int


Step = dict[int, tuple[SharedCall, ...]]  # by lane, in the order in which they come
LANE_HEAD = struct.Struct("!HH")
CALL_FORM = struct.Struct("!HH")


def pack_step(step: Step) -> bytes:
    parts = []
    for lane, calls in step.items():
        parts.append(LANE_HEAD.pack(lane, len(calls)))
        parts += [CALL_FORM.pack(call.layer, call.rows) for call in calls]
    return b"".join(parts)


def read_step(data: bytes, lanes: int, rows: int) -> Step:
    """Raises LinkError for what no caller with so many lanes, of so many rows, sends."""
    found: Step = {}
    place = 0
    try:
        while place < len(data):
            lane, count = LANE_HEAD.unpack_from(data, place)
            place += LANE_HEAD.size
            if lane >= lanes or lane in found or not 0 < count <= MAX_CALLS:
                raise LinkError(f"a step of lane {lane} with {count} calls came")
            calls = [
                SharedCall(*CALL_FORM.unpack_from(data, place + number * CALL_FORM.size))
                for number in range(count)
            ]
            place += count * CALL_FORM.size
            if not all(0 < call.rows <= rows for call in calls):
                raise LinkError(f"a step came with calls that are not of 1 to {rows} rows")
            found[lane] = tuple(calls)
    except struct.error:
        raise LinkError("an invalid step came") from None
    if not found:
        raise LinkError("a step came without calls")
    return found


@dataclass(frozen=True)
class Holdings:
    """max_rows: of a call. layers: the experts held of each. max_slots: of a layer that there is
    memory for. version: counts changes, from 1. finished: number of the newest order that has been
    carried out, or given up for the reason `failure`."""

    max_rows: int
    layers: dict[int, tuple[int, ...]]
    max_slots: int = 0
    version: int = 1
    finished: int = 0
    failure: str = ""

    def pack(self) -> bytes:
        layers = {str(layer): ranges(experts) for layer, experts in self.layers.items()}
        numbers = {name: getattr(self, name) for name in HOLDING_NUMBERS}
        failure = self.failure.encode()[:MAX_FAILURE].decode(errors="ignore")
        return json.dumps({**numbers, "failure": failure, "layers": layers}).encode()

    @classmethod
    def unpack(cls, data: bytes, num_experts: int) -> Holdings:
        """Raises LinkError."""
        found = json_object(data)
        numbers = [found.get(name) for name in HOLDING_NUMBERS]
        layers = found.get("layers")
        failure = found.get("failure")
        right = all(type(number) is int and number >= 0 for number in numbers)
        if not right or not numbers[0] or not isinstance(layers, dict):
            raise LinkError("invalid holdings came")
        if not isinstance(failure, str):
            raise LinkError("invalid holdings came")
        try:
            made = {int(layer): read_ranges(text, num_experts) for layer, text in layers.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise LinkError(f"invalid holdings came: {error}") from None
        values: dict[str, Any] = dict(zip(HOLDING_NUMBERS, numbers, strict=True))
        return cls(layers=made, failure=failure[:MAX_FAILURE], **values)


def ranges(numbers: Iterable[int]) -> str:
    """Sorted numbers as "0-63,70"; none as "none"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or NONE


def read_ranges(text: str, count: int) -> tuple[int, ...]:
    """Numbers below `count` from "0-63,70", all from "all", none from "none". Raises ValueError,
    with the end of a sentence."""
    if text in ("all", NONE):
        return tuple(range(count)) if text == "all" else ()
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if match is None:
            raise ValueError(f"{part!r} is no number or range; accepted: all, or such as 0-63,70")
        first = int(match[1])
        last = int(match[2] or first)
        if not first <= last < count:
            raise ValueError(f"{part!r} is out of range; accepted: 0 to {count - 1}")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def json_object(data: bytes) -> dict[str, object]:
    try:
        found = json.loads(data)
    except ValueError:
        raise LinkError("a message that is no JSON came") from None
    if not isinstance(found, dict):
        raise LinkError("a message that is no object came")
    return found
