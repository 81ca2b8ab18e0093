"""Blocks that processes share by descriptors. The driver is a stand-in with the host's memory."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rorqual.parallel import cuda_ipc
from rorqual.parallel.shared.handle_passing import fetch_descriptors
from rorqual.parallel.shared.shared_block import SharedBlock
from tests.parallel.memfd_driver import GRANULARITY, MemfdDriver, no_device

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


def put_in_place(monkeypatch: pytest.MonkeyPatch, driver: MemfdDriver) -> MemfdDriver:
    monkeypatch.setattr(cuda_ipc, "driver", lambda: driver)
    monkeypatch.setattr(cuda_ipc, "on_device", no_device)
    return driver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> MemfdDriver:
    return put_in_place(monkeypatch, MemfdDriver())


def test_a_block_is_seen_elsewhere_by_its_descriptor_and_given_back(driver: MemfdDriver) -> None:
    own = SharedBlock.new(1000, CPU)
    assert own.size == 1000
    assert driver.mapped == {own.pointer: GRANULARITY}, "mapped in the driver's unit"
    fd = own.fd()
    assert fd not in driver.open, "a new one"
    there = SharedBlock.of(fd, 1000, CPU)
    os.close(fd)
    assert there.pointer != own.pointer
    assert set(driver.accessible) == {own.pointer, there.pointer}
    own.tensor(CPU).copy_(torch.arange(1000) % 251)
    assert there.tensor(CPU).tolist() == [i % 251 for i in range(1000)]
    del own
    gc.collect()
    assert set(driver.mapped) == {there.pointer}
    assert there.tensor(CPU)[999] == 999 % 251, "the memory is there without who made it"
    del there
    gc.collect()
    assert not driver.holds


def test_a_view_of_a_tensor_holds_the_mapping(driver: MemfdDriver) -> None:
    block = SharedBlock.new(64, CPU)
    assert (block.tensor(CPU).dtype, block.tensor(CPU).shape) == (torch.uint8, (64,))
    view = block.tensor(CPU).fill_(7).view(torch.int32)[3:5]
    del block
    gc.collect()
    assert view.tolist() == [0x07070707] * 2
    assert len(driver.mapped) == 1
    del view
    gc.collect()
    assert not driver.holds


@pytest.mark.parametrize(
    "fails",
    [
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
    ],
)
def test_the_driver_s_name_for_what_went_wrong_and_nothing_left(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    driver = put_in_place(monkeypatch, MemfdDriver(fails))

    def use() -> None:
        block = SharedBlock.new(8, CPU)
        SharedBlock.of(block.fd(), 8, CPU)

    with pytest.raises(RuntimeError, match=rf"{fails}: CUDA_ERROR_NOT_PERMITTED \(800\)"):
        use()
    gc.collect()
    assert not driver.holds


def test_no_more_is_mapped_than_there_is(driver: MemfdDriver) -> None:
    block = SharedBlock.new(8, CPU)
    fd = block.fd()
    with pytest.raises(RuntimeError, match="cuMemMap: CUDA_ERROR_INVALID_VALUE"):
        SharedBlock.of(fd, GRANULARITY + 1, CPU)
    os.close(fd)
    assert len(driver.mapped) == len(driver.reserved) == len(driver.open) == 1


EXPORTER = """
import sys, time, torch
from rorqual.parallel import cuda_ipc
from rorqual.parallel.shared.handle_passing import DescriptorServer
from rorqual.parallel.shared.shared_block import SharedBlock
from tests.parallel.memfd_driver import MemfdDriver, no_device
driver = MemfdDriver()
cuda_ipc.driver = lambda: driver
cuda_ipc.on_device = no_device
block = SharedBlock.new(5000, torch.device("cpu"))
block.tensor(torch.device("cpu")).fill_(42)
server = DescriptorServer()
print(server.name, server.offer([block.fd()]).hex(), flush=True)
time.sleep(60)
"""


def test_a_block_of_another_process_outlives_it(driver: MemfdDriver) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", EXPORTER], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as other:
        try:
            assert other.stdout is not None
            name, token = other.stdout.readline().split()
            (fd,) = fetch_descriptors(name, bytes.fromhex(token), 1)
            block = SharedBlock.of(fd, 5000, CPU)
            os.close(fd)
            assert block.tensor(CPU).unique().tolist() == [42]
        finally:
            other.send_signal(signal.SIGKILL)
            other.wait()
    assert block.tensor(CPU).unique().tolist() == [42]
