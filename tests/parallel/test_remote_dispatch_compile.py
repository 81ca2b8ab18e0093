"""The kernels of calls to expert servers over shared memory as a Hopper GPU would run them,
compiled without a GPU. Run as a script it prints what the compiler made."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.child_process import compiler_environment

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]
WORDS = (
    "sys.release.add",
    "sys.acquire.add",
    "st.global.v4",
    "st.global.b16",
    "st.global.b8",
    "ld.global.cg.v4",
    "griddepcontrol.wait",
)


def compiled(capability: int) -> list[dict[str, object]]:
    import torch

    from rorqual.ops.triton.comm import remote_dispatch as kernels
    from tests.emulation.cross_compile import compiling

    rows = []
    for columns, top_k, fp8 in ((7168, 8, True), (7168, 8, False), (2048, 6, False)):
        areas = kernels.LaneAreas(256, columns, top_k, 2)
        table = torch.empty(2 * kernels.SERVERS + 2, dtype=torch.int64)
        caller = kernels.CallerLane(areas, table, torch.empty(256, dtype=torch.int32))
        server = kernels.ServerLane(
            areas,
            torch.empty(3, dtype=torch.int64),
            torch.empty(areas.inbox_size, dtype=torch.uint8),
            torch.empty(256, top_k, dtype=torch.int32),
        )
        x = torch.empty(64, columns, dtype=torch.bfloat16)
        ids = torch.empty(64, top_k, dtype=torch.int64)
        holders = torch.empty(256, dtype=torch.int64)
        with compiling(capability) as found:
            kernels.dispatch(caller, holders, x, ids, torch.empty(64, top_k), 3, fp8)
            kernels.arrive(server, torch.empty(257, dtype=torch.int64), 64)
            kernels.send_home(server, x)
            kernels.combine(caller, x)
        for kernel in found:
            about = {"name": kernel.name, "columns": columns, "fp8": fp8}
            rows.append(
                {**about, **kernel.resources(), **{word: kernel.ptx.count(word) for word in WORDS}}
            )
    return rows


def test_the_kernels_compile_for_hopper() -> None:
    done = subprocess.run(
        [sys.executable, __file__],
        env=compiler_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)
    assert len(rows) == 12
    for row in rows:
        assert row["stack"] == 0, row
        sends = row["name"] in ("_dispatch_kernel", "_send_home_kernel")
        assert (row["sys.release.add"], row["sys.acquire.add"]) == (int(sends), int(not sends)), row
        assert row["griddepcontrol.wait"] == 1, row
        # rows leave 16 bytes at a time
        assert row["st.global.b16"] == row["st.global.b8"] == 0, row
        least = {
            "_dispatch_kernel": 1,
            "_send_home_kernel": 1,
            "_arrival_kernel": 0,
            "_combine_kernel": 1,
        }
        assert row["st.global.v4"] >= least[str(row["name"])], row
        # past the first cache
        assert row["ld.global.cg.v4"] >= (8 if row["name"] == "_combine_kernel" else 0), row


if __name__ == "__main__":
    print(json.dumps(compiled(90)))
