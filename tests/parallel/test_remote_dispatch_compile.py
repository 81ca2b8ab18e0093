"""The kernels of calls to expert servers over shared memory as a Hopper GPU would run them,
compiled without a GPU. Run as a script it prints what the compiler made."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from tests.child_process import output_of_compiler

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]
WORDS = (
    "sys.release.add",
    "sys.acquire.add",
    "gpu.acq_rel.add",
    "ld.acquire.sys",
    "st.global.v2",
    "st.global.v4",
    "st.global.b16",
    "st.global.b8",
    "ld.global.cg.v4",
    "griddepcontrol.wait",
)
LEAST = {
    "_dispatch_kernel": 1,
    "_send_home_kernel": 1,
    "_remote_arrival_kernel": 0,
    "_remote_combine_kernel": 1,
}
EARLY = {
    "_dispatch_kernel": 2,
    "_send_home_kernel": 2,
    "_remote_arrival_kernel": 1,
    "_remote_combine_kernel": 9,
}


def compiled(capability: int) -> list[dict[str, Any]]:
    import torch

    from rorqual.ops.triton.comm import remote_dispatch as kernels
    from tests.emulation.cross_compile import compiling

    rows = []
    for columns, top_k, fp8, count in (
        (7168, 8, True, 64),
        (7168, 8, False, 64),
        (2048, 6, False, 64),
        (7168, 8, True, 1),
        (7168, 8, False, 1),
        (7168, 8, True, 256),
        (7168, 8, True, 1024),
    ):
        areas = kernels.LaneAreas(1024, columns, top_k, 2)
        table = torch.empty(2 * kernels.SERVERS + 2, dtype=torch.int64)
        done = torch.empty(1, dtype=torch.int32)
        sent = torch.empty(1024, dtype=torch.int32)
        caller = kernels.CallerLane(areas, table, sent, done, torch.empty(1, dtype=torch.int32))
        server = kernels.ServerLane(
            areas,
            torch.empty(3, dtype=torch.int64),
            torch.empty(areas.inbox_size, dtype=torch.uint8),
            torch.empty(1024, top_k, dtype=torch.int32),
            done,
        )
        x = torch.empty(count, columns, dtype=torch.bfloat16)
        ids = torch.empty(count, top_k, dtype=torch.int64)
        holders = torch.empty(256, dtype=torch.int64)
        with compiling(capability) as found:
            kernels.dispatch(caller, holders, x, ids, torch.empty(count, top_k), 3, fp8)
            kernels.arrive(server, torch.empty(257, dtype=torch.int64), count)
            kernels.send_home(server, x)
            kernels.combine(caller, x)
        for kernel in found:
            about = {"name": kernel.name, "columns": columns, "fp8": fp8, "rows": count}
            about |= kernel.figures(WORDS)
            about["early"] = kernel.ptx.partition("griddepcontrol.wait")[0].count("ld.global")
            # warps leave the loop of a wait one by one: nothing in it waits for all of them
            about["in_wait"] = kernel.ptx.partition("ld.acquire.sys")[2].partition("bar.sync")[0]
            rows.append(about)
    return rows


def test_the_kernels_compile_for_hopper() -> None:
    rows = json.loads(output_of_compiler(__file__))
    assert len(rows) == 28
    for row in rows:
        assert row["stack"] == 0, row
        sends = row["name"] in ("_dispatch_kernel", "_send_home_kernel")
        assert (row["sys.release.add"], row["ld.acquire.sys"]) == (int(sends), int(not sends)), row
        assert (row["sys.acquire.add"], row["griddepcontrol.wait"]) == (0, 1), row
        quantizes = row["fp8"] and row["name"] == "_dispatch_kernel"
        counts = sends and (quantizes or row["rows"] > 8)
        assert row["gpu.acq_rel.add"] == int(counts), row
        # addresses of buffers, each perhaps once more in another order of threads
        assert row["early"] >= EARLY[row["name"]], row
        if not sends:
            assert "bra" in row["in_wait"], row
        # rows leave 16 bytes at a time, or 8 of which a warp's are two lines
        assert row["st.global.b16"] == row["st.global.b8"] == 0, row
        assert row["st.global.v4"] + row["st.global.v2"] >= LEAST[row["name"]], row
        # past the first cache
        assert row["ld.global.cg.v4"] >= (8 if row["name"] == "_remote_combine_kernel" else 0), row


if __name__ == "__main__":
    print(json.dumps(compiled(90)))
