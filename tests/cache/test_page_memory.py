"""Pages as bytes, between pools that are cut into ranks and pages differently."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rorqual.cache.page_memory import PageMemory
from rorqual.cache.page_parts import PagePart, held_part, num_heads, whole_part
from rorqual.cache.pool import KVPool
from rorqual.cache.spec import KVSpec, Plane
from rorqual.platforms.cpu import CpuPlatform

CPU = CpuPlatform(torch.device("cpu"))
LAYERS = 3
HEADS = 4
TOKENS = 48
CUT = (
    Plane("k", "uint8", (HEADS, 5), 0),
    Plane("v", "bfloat16", (HEADS, 3), 0),
    Plane("scales", "float32", (HEADS, 2), 0),
)
ALIKE = (Plane("latent", "uint8", (7,)), Plane("rope", "float32", (3,)))


class Rank:
    """A pool whose tokens lie in the order of its pages 1, 2, ..."""

    def __init__(self, planes: tuple[Plane, ...], page_size: int, tp: int, rank: int):
        whole = KVSpec((planes,) * LAYERS, page_size)
        self.held = held_part(range(LAYERS), num_heads(whole), tp, rank)
        self.pages = list(range(1, TOKENS // page_size + 1))
        pool = KVPool(whole.shard(tp), len(self.pages) + 1, CPU.device)
        self.memory = PageMemory(pool, CPU, self.held)
        self.planes = planes

    def tokens(self, layer: int, name: str) -> Tensor:
        plane = self.memory.pool.layers[layer][name]
        return plane[self.pages].flatten(0, 1)

    def fill(self, whole: list[dict[str, Tensor]]) -> None:
        for layer, tensors in zip(self.memory.pool.layers, whole, strict=True):
            for name, plane in layer.items():
                plane[self.pages] = self.mine(tensors[name]).view(plane[self.pages].shape)

    def mine(self, tensor: Tensor) -> Tensor:
        """Of [tokens, *shape] of all heads."""
        part = self.held
        cut = self.planes[0].shard_axis is not None
        return tensor[:, part.first_head : part.last_head] if cut else tensor


def random_cache(planes: tuple[Plane, ...]) -> list[dict[str, Tensor]]:
    made = torch.Generator().manual_seed(3)
    sizes = {plane.name: (TOKENS, *plane.shape) for plane in planes}
    dtypes = {plane.name: getattr(torch, plane.dtype) for plane in planes}
    return [
        {
            name: torch.randint(0, 255, size, generator=made).to(dtypes[name])
            for name, size in sizes.items()
        }
        for _ in range(LAYERS)
    ]


@pytest.mark.parametrize("planes", [CUT, ALIKE], ids=["heads", "latents"])
@pytest.mark.parametrize(
    ("theirs", "own"),
    [((8, 1), (8, 1)), ((4, 2), (16, 1)), ((16, 1), (4, 4)), ((8, 4), (8, 2)), ((4, 8), (8, 8))],
)
def test_a_rank_is_filled_from_others(
    planes: tuple[Plane, ...], theirs: tuple[int, int], own: tuple[int, int]
) -> None:
    whole = random_cache(planes)
    size, tp = theirs
    senders = [Rank(planes, size, tp, rank) for rank in range(tp)]
    for sender in senders:
        sender.fill(whole)
    for rank in range(own[1]):
        reader = Rank(planes, *own, rank)
        # all but its first page, from where the sender's page begins
        first = own[0] // size
        seen: set[PagePart] = set()
        for sender in senders:
            part = reader.held.common(sender.held)
            if part.empty or part in seen:
                continue
            seen.add(part)
            pages = sender.pages[first:]
            rows = reader.memory.rows(len(pages), reader.memory.part_size(part, size))
            assert rows.shape[1] == sender.memory.part_size(part)
            for page, row in zip(pages, rows, strict=True):
                sender.memory.read(page, row, part)
            skipped = own[0] - first * size
            reader.memory.write(reader.pages[1:2], rows, part, size, skipped)
            skipped += own[0]
            reader.memory.write(reader.pages[2:], rows, part, size, skipped)
        for layer, tensors in enumerate(whole):
            for name, tensor in tensors.items():
                got = reader.tokens(layer, name)
                assert torch.equal(got[own[0] :], reader.mine(tensor)[own[0] :])
                assert not got[: own[0]].any()


def test_parts() -> None:
    part = PagePart(0, 3, 1, 2)
    assert part.covers(part)
    assert part.covers(PagePart(2, 3, 1, 2))
    assert not part.covers(PagePart(0, 4, 1, 2))
    assert not part.covers(PagePart(0, 3, 0, 2))
    assert not part.covers(PagePart(2, 2, 1, 2)), "nothing is no part"
    assert PagePart(2, 1, 0, 1).empty
    assert whole_part(KVSpec((CUT,), 8)) == PagePart(0, 1, 0, HEADS)
    assert held_part(range(2, 4), 2, 4, 3) == PagePart(2, 4, 1, 2)
    assert held_part(range(2, 4), 4, 2, 1) == PagePart(2, 4, 2, 4)
    assert held_part(range(1), 1, 3, 2) == PagePart(0, 1, 0, 1)
