"""What the CPU platform asks of the operating system."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
import torch

from rorqual.platforms.cpu import LARGE_PAGE, CpuPlatform

MAPPINGS = Path("/proc/self/smaps")
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
RANGE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ", re.MULTILINE)


def flags_at(address: int) -> list[str]:
    """Of the mapping that an address is in."""
    text = MAPPINGS.read_text()
    for found in RANGE.finditer(text):
        if int(found[1], 16) <= address < int(found[2], 16):
            return text[text.index("VmFlags:", found.end()) :].split("\n", 1)[0].split()[1:]
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.skipif(not SWITCH.exists() or not MAPPINGS.exists(), reason="no large pages")
def test_weights_are_asked_for_in_large_pages() -> None:
    # of the system itself: what the C library gives may be what an earlier model's weights had
    memory = mmap.mmap(-1, 20 * LARGE_PAGE + 4096)
    weights = torch.frombuffer(memory, dtype=torch.uint8)
    view = weights[100:200].view(10, 10)
    small = torch.empty(1000)
    within = -(-weights.data_ptr() // LARGE_PAGE) * LARGE_PAGE
    assert "hg" not in flags_at(within)
    CpuPlatform(torch.device("cpu")).weights_made([view, small, weights])
    assert "hg" in flags_at(within)
    assert "hg" in flags_at(within + 3 * LARGE_PAGE - 1)
    weights.fill_(7)
    assert int(weights.sum(dtype=torch.int64)) == 7 * weights.numel()
