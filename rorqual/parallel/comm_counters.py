"""How many bytes collectives send: definitions for the runtime counters and for estimates of them.
No torch.

Bytes leave one rank, averaged over a group of n ranks, with the cheapest algorithm on any network:

| call           | message                                | bytes                        |
|----------------|----------------------------------------|------------------------------|
| all_reduce     | the tensor                             | 2 (n - 1) / n of the message |
| reduce_scatter | the tensor before                      | (n - 1) / n                  |
| all_gather     | the tensor after                       | (n - 1) / n                  |
| broadcast      | the tensor                             | (n - 1) / n                  |
| all_to_all     | what this rank sends to others         | all of it                    |
| send           | the tensor                             | all of it                    |

An exchange over shared memory counts as the process-group exchange that it replaces, of rows as it
sends them, an upper bound: only the device knows how many rows went where.

Rows are padded to the longest rank of a group before they are gathered or scattered, so messages
include padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROUTING_BYTES = 8  # sent with a row for each of its experts: an int32 id and an fp32 weight
CALLS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send")


def bytes_sent(call: str, message: int, size: int) -> int:
    """Bytes that leave a rank for one call with a message of `message` bytes in a group of `size`
    ranks."""
    assert call in CALLS, call
    if call in ("all_to_all", "send"):
        return message
    return message * (size - 1) * (2 if call == "all_reduce" else 1) // size


def fp8_row_bytes(columns: int) -> int:
    """Bytes of a hidden state sent as e4m3, with one fp32 scale for each 128 columns."""
    return columns + 4 * -(-columns // 128)


@dataclass
class Traffic:
    """Counts of one axis. A captured graph counts once, when it is captured."""

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def count(self, call: str, message: int, size: int) -> None:
        self.calls[call] = self.calls.get(call, 0) + 1
        self.bytes[call] = self.bytes.get(call, 0) + bytes_sent(call, message, size)

    def reset(self) -> None:
        self.calls.clear()
        self.bytes.clear()

    @property
    def total(self) -> int:
        return sum(self.bytes.values())
