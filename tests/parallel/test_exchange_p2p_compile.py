"""The kernels of exchanges over shared memory as a Hopper GPU would run them, compiled without
a GPU. Run as a script it prints what the compiler made."""

from __future__ import annotations

import importlib.util
import json

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
    "st.global.v4",
    "st.global.b16",
    "st.global.b8",
    "ld.global.cg.v4",
    "griddepcontrol.wait",
)


def compiled(capability: int) -> list[dict[str, object]]:
    import torch

    from rorqual.ops.triton.comm import dispatch_combine as kernels
    from tests.emulation.cross_compile import compiling

    rows = []
    for world, fp8 in ((2, False), (8, False), (8, True)):
        areas = kernels.Areas(world, 128, 7168, 8, 2)
        counters = torch.empty(2, dtype=torch.int32), torch.empty(128, world, dtype=torch.int32)
        buffer = kernels.DispatchBuffer(
            torch.empty(world + 1, dtype=torch.int64), 0, areas, 0, *counters
        )
        x = torch.empty(100, 7168, dtype=torch.bfloat16)
        ids = torch.empty(100, 8, dtype=torch.int64)
        with compiling(capability) as found:
            kernels.dispatch(
                buffer, x, ids, torch.empty(100, 8), 128, kernels.ExpertPlacement(256 // world), fp8
            )
            kernels.recv_dispatch(buffer)
            kernels.send_combine(buffer, torch.empty(world * 128, 7168, dtype=torch.bfloat16), 128)
            kernels.combine(buffer, x)
        for kernel in found:
            about = {"name": kernel.name, "world": world, "fp8": fp8}
            rows.append({**about, **kernel.figures(WORDS)})
    return rows


def test_the_kernels_compile_for_hopper() -> None:
    rows = json.loads(output_of_compiler(__file__))
    assert len(rows) == 12
    for row in rows:
        assert row["stack"] == 0, row
        sends = row["name"] in ("_dispatch_kernel", "_give_back_kernel")
        assert (row["sys.release.add"], row["sys.acquire.add"]) == (int(sends), int(not sends)), row
        assert row["griddepcontrol.wait"] == 1, row
        # rows leave 16 bytes at a time
        assert row["st.global.b16"] == row["st.global.b8"] == 0, row
        least = {
            "_dispatch_kernel": row["world"],
            "_give_back_kernel": 1,
            "_arrival_kernel": 0,
            "_combine_kernel": 1,
        }
        assert row["st.global.v4"] >= least[str(row["name"])], row
        # past the first cache
        assert row["ld.global.cg.v4"] >= (
            row["world"] if row["name"] == "_combine_kernel" else 0
        ), row


if __name__ == "__main__":
    print(json.dumps(compiled(90)))
