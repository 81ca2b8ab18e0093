"""Messages on the link of a process group, between a caller and one expert server. No torch.

    caller -> GROUP        JSON: what the group and calls are like, and which rank the server has
                           (GroupOffer)
    server -> GROUP_MADE   JSON: {}, or {"why": a sentence} where it takes no part
    caller -> GROUP_BEGIN  64 random bytes, once every server takes part
    server -> STORE        JSON: what is set or looked up to connect a communicator (StoreRequest)
    caller -> STORED       JSON: {"value": hexadecimal}, or {"why": a sentence}
    server -> GROUP_READY  every lane is connected, and has proved that it is
    caller -> STEP         what is to be computed next by each lane (wire.pack_step)
    caller -> GROUP_END    the group is given up, and calls go over sockets

The first half of the random bytes goes to the server over each lane, the second half back: so both
sides know that the process at the other end of a lane is the one that answers this link, which
knows the secret.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rorqual.parallel.remote.link import LinkError
from rorqual.parallel.remote.wire import (
    MAX_LANES,
    MAX_REASON,
    MAX_SHARED_ROWS,
    MAX_TOP_K,
    json_object,
)

MAX_MEMBERS = 64  # servers of a group
MAX_GROUP_BYTES = 4096
TOKEN = 64  # bytes
MAX_KEY = 500  # characters
MAX_VALUE = 2**15  # bytes
MAX_STORE_BYTES = 2**17
STORE_OPERATIONS = ("set", "get", "check", "add")
BACKENDS = {"cuda": "nccl", "cpu": "gloo"}  # by kind of device


@dataclass(frozen=True)
class GroupOffer:
    """rank: of the server among `size`, of which the caller is 0. rows: of a call, at most; columns
    and dtype of hidden states."""

    rank: int
    size: int
    lanes: int
    rows: int
    columns: int
    top_k: int
    fp8: bool
    dtype: str
    backend: str

    def pack(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def unpack(cls, data: bytes) -> GroupOffer:
        """Raises LinkError."""
        found = json_object(data)
        most = {
            "rank": MAX_MEMBERS,
            "size": MAX_MEMBERS + 1,
            "lanes": MAX_LANES,
            "rows": MAX_SHARED_ROWS,
            "columns": 2**20,
            "top_k": MAX_TOP_K,
        }
        values: dict[str, Any] = {}
        for name, limit in most.items():
            value = found.get(name)
            if type(value) is not int or not 0 < value <= limit:
                raise LinkError(f"a group was offered with {name} {str(value)[:20]}")
            values[name] = value
        if values["rank"] >= values["size"]:
            raise LinkError(f"rank {values['rank']} was offered in a group of {values['size']}")
        fp8 = found.get("fp8")
        dtype = found.get("dtype")
        backend = found.get("backend")
        if type(fp8) is not bool or not isinstance(dtype, str) or not isinstance(backend, str):
            raise LinkError("an invalid group was offered")
        return cls(fp8=fp8, dtype=dtype[:20], backend=backend[:20], **values)


def group_made(why: str = "") -> bytes:
    """why: the server takes no part, if anything."""
    return json.dumps({"why": why[:MAX_REASON]} if why else {}).encode()


def read_group_made(data: bytes) -> None:
    """Raises LinkError, with the reason where the server takes no part."""
    found = json_object(data)
    if found.get("why"):
        raise LinkError(str(found["why"])[:MAX_REASON])


@dataclass(frozen=True)
class StoreRequest:
    """operation: of STORE_OPERATIONS. amount: that `add` adds."""

    operation: str
    key: str
    value: bytes = b""
    amount: int = 0

    def pack(self) -> bytes:
        return json.dumps({**vars(self), "value": self.value.hex()}).encode()

    @classmethod
    def unpack(cls, data: bytes) -> StoreRequest:
        """Raises LinkError."""
        found = json_object(data)
        operation = found.get("operation")
        key = found.get("key")
        amount = found.get("amount")
        if operation not in STORE_OPERATIONS:
            raise LinkError(f"a store was asked to {str(operation)[:20]!r}")
        if not isinstance(key, str) or len(key) > MAX_KEY:
            raise LinkError(f"a store's key came that has no 0 to {MAX_KEY} characters")
        if type(amount) is not int or abs(amount) > 2**31:
            raise LinkError("a store was asked to add what is no number")
        return cls(str(operation), key, read_value(found.get("value")), amount)


def read_value(text: object) -> bytes:
    """Raises LinkError."""
    if not isinstance(text, str) or len(text) > 2 * MAX_VALUE:
        raise LinkError(f"a store's value came that has no 0 to {MAX_VALUE} bytes")
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise LinkError("a store's value came that is no hexadecimal number") from None


def stored(value: bytes = b"", why: str = "") -> bytes:
    return json.dumps({"why": why[:MAX_REASON]} if why else {"value": value.hex()}).encode()


def read_stored(data: bytes) -> bytes:
    """Raises LinkError, with the reason where there is no answer."""
    found = json_object(data)
    if found.get("why"):
        raise LinkError(str(found["why"])[:MAX_REASON])
    return read_value(found.get("value"))
