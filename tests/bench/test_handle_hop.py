"""rorqual bench hop --transport handles, with files for a GPU's memory and kernels in Triton's
interpreter."""

from __future__ import annotations

import gc
import json

import pytest

from tests.emulation.triton_interpreter import DEVICE, needs_triton  # before kernels are defined

pytestmark = [
    needs_triton,
    pytest.mark.skipif(DEVICE != "cpu", reason="runs in the interpreter"),
    pytest.mark.exhaustive,
]

from rorqual.bench.comm.handle_hop import HandleHopSetup, as_json, bench, print_table  # noqa: E402
from rorqual.parallel import cuda_ipc  # noqa: E402
from rorqual.parallel.remote import handles  # noqa: E402
from tests.parallel.memfd_driver import MemfdDriver, no_device  # noqa: E402


@pytest.mark.longest
def test_rows_come_back_right(capsys: pytest.CaptureFixture[str]) -> None:
    setup = HandleHopSetup((1, 12), 2, 256, 6, 4, 1, 2, "cpu", "cpu")
    driver = MemfdDriver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_ipc, "driver", lambda: driver)
        patch.setattr(cuda_ipc, "on_device", no_device)
        patch.setattr(handles, "DEVICES", ("cpu",))
        found = bench(setup, module="tests.bench.shared_memory_hop")
        gc.collect()
    assert [(hop.rows, hop.fp8, hop.right) for hop in found] == [
        (1, True, True),
        (12, True, True),
        (1, False, True),
        (12, False, True),
    ]
    # each row is routed to four of six experts, so both servers get it
    assert [hop.back for hop in found] == [2 * 2 * 256 * hop.rows for hop in found]
    print_table(found, setup)
    assert capsys.readouterr().out.count("right") == 4
    assert json.loads(as_json(found, setup))["hops"][0]["rows"] == 1
