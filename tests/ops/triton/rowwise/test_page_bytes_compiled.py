"""What moves pages to rows and back, compiled for Hopper without a GPU: sixteen bytes at once. Run
as a script it prints what the compiler made."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from tests.child_process import output_of_compiler

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]


def compiled() -> list[dict[str, object]]:
    import torch

    from rorqual.ops.triton.rowwise.page_bytes import PlaneTable
    from tests.emulation.cross_compile import compiling

    found = []
    latents = torch.zeros(4, 64, 576, dtype=torch.bfloat16)
    heads = torch.zeros(4, 64, 4, 128, dtype=torch.bfloat16)
    for planes in ([latents] * 2, [heads] * 2, [heads.narrow(2, 1, 2)] * 2):
        table = PlaneTable.of(planes)
        rows = torch.zeros(2, table.size, dtype=torch.uint8)
        pages = torch.tensor([1, 2])
        with compiling(90) as kernels:
            table.gather(pages, rows)
            table.scatter(rows, pages)
            table.scatter(rows, pages, far=True)
            table.read_host(pages, pages, range(1, 2))
        for kernel in kernels:
            moves = set(re.findall(r"(?:ld|st)\.global[.\w]*", kernel.ptx))
            far = kernel.name != "_page_bytes_kernel"
            found.append({**kernel.resources(), "moves": sorted(moves), "far": far})
    return found


def test_bytes_go_sixteen_at_once() -> None:
    found = json.loads(output_of_compiler(__file__))
    assert len(found) == 12
    for kernel in found:
        # numbers of pages and planes are read one by one
        far = ".cg" * kernel["far"]
        moves = ["ld.global.b64", f"ld.global{far}.v2.b64", "st.global.v2.b64"]
        assert kernel["moves"] == sorted(moves)
        assert (kernel["stack"], kernel["shared"]) == (0, 0)


if __name__ == "__main__":
    print(json.dumps(compiled()))
