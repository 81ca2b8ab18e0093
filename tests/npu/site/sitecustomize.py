"""Read by Python when a rank's process starts."""

import os

if os.environ.get("RORQUAL_NPU_BENCH"):
    from tests.emulation.npu_platform import SWITCH, WIDE, install

    install(wide=os.environ[SWITCH] == WIDE)
