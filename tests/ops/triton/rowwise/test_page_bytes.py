"""Pages to rows of bytes and back, beside torch's calls for each plane. Interpreted where there is
no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.emulation.triton_interpreter import DEVICE, SKIP_REASON

if SKIP_REASON is not None:
    pytest.skip(SKIP_REASON, allow_module_level=True)

from rorqual.cache.page_memory import PlaneMover
from rorqual.ops.triton.rowwise import page_bytes
from rorqual.ops.triton.rowwise.page_bytes import PlaneTable

PAGES = 7


def plane(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    made = torch.empty(PAGES, *shape, dtype=dtype, device=DEVICE)
    size = made.numel() * made.element_size()
    made.view(-1).view(torch.uint8).copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
    return made


def planes_of(kind: str) -> list[Tensor]:
    if kind == "latents":
        return [plane(16, 576) for _ in range(3)]
    if kind == "eight bits with scales":
        return [plane(16, 656, dtype=torch.uint8), plane(16, 2, dtype=torch.float32)]
    if kind == "odd bytes":
        return [plane(4, 5), plane(4, 2, 3, dtype=torch.float32), plane(4, 7, dtype=torch.int8)]
    made = [plane(16, 4, 64), plane(16, 4, 64)]
    if kind == "some heads":
        return [one.narrow(2, 1, 2) for one in made]
    return made


KINDS = ("latents", "heads", "some heads", "eight bits with scales", "odd bytes")
UNITS = {"odd bytes": (1, 1), "eight bits with scales": (8, 1)}


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Of NaNs as well."""
    return first.contiguous().view(torch.uint8).equal(second.contiguous().view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_torch_s(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_bytes, "SIZE", 256)  # several programs a plane
    monkeypatch.setattr(page_bytes, "FAR_SIZE", 256)
    torch.manual_seed(1)
    planes = planes_of(kind)
    table = PlaneTable.of(planes)
    assert (table.unit, table.aligned) == UNITS.get(kind, (8, 2))
    assert table.whole == (kind != "some heads")
    pages = torch.tensor([5, 1, 6], device=DEVICE)
    rows = torch.full((4, table.size), 99, dtype=torch.uint8, device=DEVICE)
    want = rows.clone()
    table.gather(pages, rows)
    PlaneMover(planes).gather(pages, want[:3])
    assert rows.equal(want)
    assert rows[3].eq(99).all(), "beside the rows"


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_torch_s(kind: str, far: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_bytes, "SIZE", 256)
    monkeypatch.setattr(page_bytes, "FAR_SIZE", 256)
    monkeypatch.setattr(page_bytes, "FAR_PROGRAMS", 5)  # several pieces each
    torch.manual_seed(2)
    planes = planes_of(kind)
    owners = [one._base if one._base is not None else one for one in planes]
    before = [owner.clone() for owner in owners]
    table = PlaneTable.of(planes)
    size = table.size
    rows = torch.randint(0, 256, (3, size), dtype=torch.uint8).to(DEVICE)
    pages = torch.tensor([2, 0, 4], device=DEVICE)
    table.scatter(rows, pages, far)
    found = torch.empty_like(rows)
    table.gather(pages, found)
    assert found.equal(rows)
    for one, was in zip(owners, before, strict=True):
        others = [1, 3, 5, 6]
        assert same_bytes(one[others], was[others]), "other pages"
    if kind == "some heads":
        for one, was in zip(owners, before, strict=True):
            assert same_bytes(one[:, :, 0], was[:, :, 0])
            assert same_bytes(one[:, :, 3], was[:, :, 3])


@pytest.mark.parametrize("kind", KINDS)
def test_planes_are_read_from_addresses(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_bytes, "HOST_SIZE", 256)
    monkeypatch.setattr(page_bytes, "HOST_IN_FLIGHT", 6000)  # a few programs
    torch.manual_seed(3)
    planes = planes_of(kind)
    before = [one.clone() for one in planes]
    table = PlaneTable.of(planes)
    rows = torch.randint(0, 256, (5, table.size), dtype=torch.uint8)
    rows = rows.pin_memory() if DEVICE == "cuda" else rows
    pages = torch.tensor([2, 0, 4], device=DEVICE)
    chosen = [3, 1, 4]
    addresses = torch.tensor([rows[i].data_ptr() for i in chosen], device=DEVICE)
    last = len(planes) - 1
    table.read_host(addresses, pages, range(last, last + 1))
    for one, was in zip(planes[:last], before, strict=False):
        assert same_bytes(one, was), "other planes"
    assert same_bytes(planes[last][[1, 3, 5, 6]], before[last][[1, 3, 5, 6]]), "other pages"
    table.read_host(addresses, pages, range(last))
    found = torch.empty(3, table.size, dtype=torch.uint8, device=DEVICE)
    table.gather(pages, found)
    assert found.cpu().equal(rows[chosen])


def test_rows_that_begin_at_a_multiple_of_less_than_sixteen_bytes() -> None:
    planes = planes_of("latents")
    table = PlaneTable.of(planes)
    piece = torch.zeros(8 + 2 * table.size, dtype=torch.uint8, device=DEVICE)
    rows = piece[8:].view(2, table.size)
    pages = torch.tensor([3, 2], device=DEVICE)
    table.gather(pages, rows)
    want = torch.empty_like(rows)
    PlaneMover(planes).gather(pages, want)
    assert rows.equal(want)


def test_no_pages() -> None:
    table = PlaneTable.of(planes_of("heads"))
    rows = torch.zeros(1, table.size, dtype=torch.uint8, device=DEVICE)
    table.gather(torch.empty(0, dtype=torch.int64, device=DEVICE), rows)
    assert not rows.any()
    planes = planes_of("heads")
    before = [one.clone() for one in planes]
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    for far in (False, True):
        PlaneTable.of(planes).scatter(rows + 1, none, far)
    assert all(same_bytes(one, was) for one, was in zip(planes, before, strict=True))
