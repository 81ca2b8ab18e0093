"""What collectives move: the definitions that the running counters and any estimate of them share.
No torch.

Bytes are those that leave one rank, averaged over the ranks of a group of n, in the cheapest
algorithm that any network allows:

| call           | message                                | bytes                        |
|----------------|----------------------------------------|------------------------------|
| all_reduce     | the tensor                             | 2 (n - 1) / n of the message |
| reduce_scatter | the tensor before                      | (n - 1) / n                  |
| all_gather     | the tensor after                       | (n - 1) / n                  |
| broadcast      | the tensor                             | (n - 1) / n                  |
| all_to_all     | what this rank sends to others         | all of it                    |
| send           | the tensor                             | all of it                    |

An exchange over memory that ranks share counts as the one over a process group that it stands for:
the most that can leave. How many rows were wanted where is known to the device alone.

Rows are padded to the longest of a group before they are gathered or scattered, so messages count
padded rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROUTING_BYTES = 8  # of one chosen expert, beside a row: an int32 id and an fp32 weight
CALLS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send")


def bytes_sent(call: str, message: int, size: int) -> int:
    """Bytes that leave a rank for one call with a message of so many bytes in a group of `size`
    ranks."""
    assert call in CALLS, call
    if call in ("all_to_all", "send"):
        return message
    return message * (size - 1) * (2 if call == "all_reduce" else 1) // size


def fp8_row_bytes(columns: int) -> int:
    """Of a hidden state that travels as e4m3, with one fp32 scale for each 128 columns."""
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
