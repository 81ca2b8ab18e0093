"""A server of `bench hop --transport handles` on a CPU."""

from __future__ import annotations

import tests.emulation.triton_interpreter  # noqa: F401  asks for the interpreter before kernels are defined
from rorqual.bench.comm.handle_hop import serve_echo
from tests.disagg.shared_memory_process import put_in_place

if __name__ == "__main__":
    put_in_place()
    serve_echo()
