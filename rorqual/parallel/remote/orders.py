"""Which experts an expert server is to hold from now on, as plain data. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rorqual.parallel.remote.link import LinkError
from rorqual.parallel.remote.wire import json_object, ranges, read_ranges

MAX_NUMBER = 2**63


@dataclass(frozen=True)
class SlotChange:
    """Experts of one layer."""

    drop: tuple[int, ...] = ()
    load: tuple[int, ...] = ()


@dataclass(frozen=True)
class SlotOrder:
    """Without layers it only asks whether this caller may give orders. release: it gives none any
    more, and others may."""

    number: int
    layers: dict[int, SlotChange]
    release: bool = False

    def pack(self) -> bytes:
        layers = {
            str(layer): [ranges(change.drop), ranges(change.load)]
            for layer, change in self.layers.items()
        }
        found = {"number": self.number, "layers": layers, "release": self.release}
        return json.dumps(found).encode()

    @classmethod
    def unpack(cls, data: bytes, num_experts: int) -> SlotOrder:
        """Raises LinkError."""
        found = json_object(data)
        number = found.get("number")
        layers = found.get("layers")
        release = found.get("release")
        if type(number) is not int or not 0 <= number < MAX_NUMBER:
            raise LinkError("an order came without its number")
        if not isinstance(layers, dict) or type(release) is not bool:
            raise LinkError("an invalid order came")
        made = {}
        for layer, lists in layers.items():
            try:
                drop, load = (read_ranges(text, num_experts) for text in lists)
                made[int(layer)] = SlotChange(drop, load)
            except (ValueError, TypeError, AttributeError) as error:
                raise LinkError(f"an invalid order came: {error}") from None
        return cls(number, made, release)
