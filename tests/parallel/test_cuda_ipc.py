"""What is asked of CUDA's driver to share memory between processes; the driver here is a
stand-in."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rorqual.parallel import cuda_ipc


class Driver:
    """Hands out addresses, and handles that hold them; keeps what was called."""

    def __init__(self, fails: str = ""):
        # type: ignore[var-annotated]
        self.fails = fails
        self.calls = []

    def __getattr__(self, name: str) -> Any:
        def function(*args: Any) -> int:
            self.calls.append((name, args))
            if name == "cuGetErrorName":
                args[1]._obj.value = b"CUDA_ERROR_NOT_PERMITTED"
            elif name == self.fails:
                return 800
            elif name == "cuMemAlloc_v2":
                args[0]._obj.value = 4096
            elif name == "cuIpcGetMemHandle":
                ctypes.memmove(args[0]._obj.reserved, args[1].to_bytes(8, "little"), 8)
            elif name == "cuIpcOpenMemHandle_v2":
                assert args[2] == cuda_ipc.ENABLE_PEERS
                args[0]._obj.value = 1 << 20 | int.from_bytes(bytes(args[1].reserved)[:8], "little")
            return 0

        return function

    def named(self, name: str) -> list[Any]:
        return [args for called, args in self.calls if called == name]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        cuda_ipc,
        "_undo",
        lambda function, pointer, device: getattr(cuda_ipc.driver(), function)(pointer),
    )


def test_a_block_is_known_elsewhere_by_its_handle_and_given_back(
    device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(cuda_ipc, "driver", lambda: driver)
    own = cuda_ipc.Mapping.new(640)
    handle = own.handle()
    assert len(handle) == cuda_ipc.HANDLE_BYTES
    there = cuda_ipc.Mapping.of(handle, 640)
    assert (own.pointer, there.pointer) == (4096, 1 << 20 | 4096)
    assert driver.named("cuMemAlloc_v2")[0][1] == 640
    assert own.__cuda_array_interface__["data"] == (4096, False)
    holder = SimpleNamespace(memory=own)
    del own
    gc.collect()
    assert not driver.named("cuMemFree_v2"), "somebody holds it"
    holder.memory = there
    gc.collect()
    assert driver.named("cuMemFree_v2") == [(4096,)]
    del there, holder
    gc.collect()
    assert driver.named("cuIpcCloseMemHandle") == [(1 << 20 | 4096,)]


@pytest.mark.parametrize("fails", ["cuMemAlloc_v2", "cuIpcOpenMemHandle_v2"])
def test_the_driver_s_name_for_what_went_wrong(
    device: None, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    driver = Driver(fails)
    monkeypatch.setattr(cuda_ipc, "driver", lambda: driver)
    with pytest.raises(RuntimeError, match=rf"{fails}: CUDA_ERROR_NOT_PERMITTED \(800\)"):
        cuda_ipc.Mapping.of(cuda_ipc.Mapping.new(8).handle(), 8)
