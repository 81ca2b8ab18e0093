"""On the path of an engine's other ranks, which are processes of their own: puts memory files in
place of a GPU's there too."""

import os
import sys

if "rorqual.engine.distributed.worker_process" in sys.orig_argv:
    from tests.disagg.shared_memory_process import WHOLE_STEPS, put_in_place, whole_steps

    put_in_place()
    if os.environ.get(WHOLE_STEPS):
        for owner, name, value in whole_steps():
            setattr(owner, name, value)
