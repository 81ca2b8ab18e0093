"""The fused all-reduce as a Hopper GPU would run it, compiled without a GPU. Run as a script
it prints what the compiler made."""

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


def compiled(capability: int) -> list[dict[str, object]]:
    import torch

    from rorqual.ops.triton.comm.all_reduce_norm import all_reduce_norm
    from tests.emulation.cross_compile import compiling

    rows = []
    for world, two_shot in ((2, False), (8, False), (8, True)):
        table = torch.empty(world + 1, dtype=torch.int64)
        epochs = torch.empty(128, dtype=torch.int32)
        x = torch.empty(8, 7168, dtype=torch.bfloat16)
        with compiling(capability) as found:
            all_reduce_norm(
                table, epochs, 0, x, x, torch.empty(7168, dtype=torch.bfloat16), 1e-6, two_shot
            )
        (kernel,) = found
        words = (
            "sys.release.exch",
            "sys.acquire.add",
            "ld.global.cg.v4",
            "ld.global.cg.b16",
            "griddepcontrol.wait",
        )
        rows.append({"world": world, "two_shot": two_shot, **kernel.figures(words)})
    return rows


def test_the_kernel_compiles_for_hopper() -> None:
    for row in json.loads(output_of_compiler(__file__)):
        assert row["stack"] == 0, row
        meetings = 2 if row["two_shot"] else 1
        assert row["sys.release.exch"] == row["sys.acquire.add"] == meetings, row
        # rows of other GPUs come 16 bytes at a time
        assert row["ld.global.cg.v4"] >= row["world"], row
        assert row["ld.global.cg.b16"] == 0, row
        assert row["griddepcontrol.wait"] == 1, row


if __name__ == "__main__":
    print(json.dumps(compiled(90)))
