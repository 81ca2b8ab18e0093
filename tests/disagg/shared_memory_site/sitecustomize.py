"""On the path of an engine's other ranks, which are processes of their own: puts memory files in
place of a GPU's there too."""

import sys

if "rorqual.engine.distributed.worker_process" in sys.orig_argv:
    from tests.disagg.shared_memory_process import put_in_place

    put_in_place()
