"""On the path of an engine's other ranks, which are processes of their own: captures there too."""

import os
import sys

if "rorqual.engine.distributed.worker_process" in sys.orig_argv:
    import torch

    from rorqual import platforms
    from rorqual.ops.interface import Ops
    from tests.engine.distributed import in_pieces
    from tests.engine.execution import bounded
    from tests.engine.execution.recording import LOOKING, RecordingPlatform, as_one_call

    for name in LOOKING:
        setattr(Ops, name, as_one_call(getattr(Ops, name)))
    bounded.put_in_place()
    if os.environ.get(in_pieces.VARIABLE):
        in_pieces.put_in_place()
    if os.environ.get("COMPILES_IN_TESTS"):
        RecordingPlatform.compiles = True
    platforms.make_platform = lambda device: RecordingPlatform(torch.device("cpu"))
