"""`rorqual` on a CPU with kernels in Triton's interpreter, and memory files in place of a GPU's: an
expert server whose memory callers share."""

from __future__ import annotations

import tests.emulation.triton_interpreter  # noqa: F401  asks for the interpreter before kernels are defined
from rorqual.cli.main import main
from rorqual.parallel import cuda_ipc
from rorqual.parallel.remote import handles
from tests.parallel.memfd_driver import MemfdDriver, no_device


def put_in_place() -> None:
    driver = MemfdDriver()
    cuda_ipc.driver = lambda: driver  # type: ignore[assignment]
    cuda_ipc.on_device = no_device
    handles.DEVICES = ("cpu",)


if __name__ == "__main__":
    put_in_place()
    main()
